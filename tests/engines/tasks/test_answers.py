"""What the tasks of a split model answer over HTTP: what the library, and the models that were split, answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from pagein import load_parts
from pagein.protocol import Capability
from tests.engines.local.test_write import events
from tests.engines.tasks.conftest import BERT, LABELS, PROMPT, split
from tests.engines.writing.conftest import write_tokeniser

pytestmark = pytest.mark.torch

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TEXTS, TOKENS = "/v1/texts/classifications", "/v1/texts/token-classifications"


def said(messages: str | list[Any], **more: Any) -> dict[str, Any]:
    """A chat."""
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"messages": asked, "max_tokens": 16, "temperature": 0, **more}


async def write(running: Any, task: str, prompt: str, **more: Any) -> str:
    """Continue a prompt."""
    reply = await running.ask(COMPLETIONS, task, {"prompt": prompt, "max_tokens": 16, "temperature": 0, **more})
    assert reply.status == 200, reply.body
    return reply.body["choices"][0]["text"]


@pytest.fixture
def library(writes):
    """The split as a program uses it: a function that writes after a prompt."""
    model = load_parts(writes, sweep_seconds=None)
    tokeniser = transformers.AutoTokenizer.from_pretrained(writes)

    def act(task: str, prompt: str, tokens: int = 16, **more: Any) -> str:
        ids = tokeniser(prompt, return_tensors="pt").input_ids
        options = {"do_sample": False, "pad_token_id": 0, **more}
        found = model.generate(ids, task=task, max_new_tokens=tokens, **options)
        return tokeniser.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    yield act
    model.pagein.close()


async def test_each_task_writes_what_the_library_writes(run, writes, library):
    """With the weights of its own adapter, or of none; and all of them something else."""
    running = run(writes)
    assert running.started.capabilities == [Capability.CHAT, Capability.COMPLETION, Capability.EMBEDDING]
    texts = {task: await write(running, task, "abc") for task in ("email", "grammar", "plain")}
    assert texts == {task: library(task, "abc") for task in texts}
    assert len(set(texts.values())) == 3


async def test_a_chats_last_message_goes_into_the_tasks_prompt(run, writes):
    """Nothing else of the chat does; a task without a prompt takes the message as it is."""
    running = run(writes)
    chat = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "y"},
    ]
    asked = said([*chat, {"role": "user", "content": "abc{text}"}])
    for task, prompt in (("email", PROMPT.replace("{text}", "abc{text}")), ("grammar", "abc{text}")):
        reply = await running.ask(CHAT, task, asked)
        assert reply.body["choices"][0]["message"]["content"] == await write(running, task, prompt)
        assert reply.body["usage"]["prompt_tokens"] == len(prompt)
    reply = await running.ask(CHAT, "email", said([{"role": "system", "content": "x"}]))
    assert (reply.status, reply.error["param"]) == (400, "messages")
    reply = await running.ask(CHAT, "email", said("a", chat_template_kwargs={"thinking": True}))
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


async def test_a_stream_says_the_same_piece_by_piece(run, writes):
    """The pieces add up to the whole answer, with the same counts."""
    running = run(writes)
    whole = (await running.ask(CHAT, "email", said("abc"))).body
    pieces = events(await running.ask(CHAT, "email", said("abc", stream=True, stream_options={"include_usage": True})))
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in pieces[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert pieces[-1]["usage"] == whole["usage"]


async def test_tasks_at_once_do_not_mix(run, writes):
    """Nine requests of three tasks in three threads, greedy and drawn, get what each gets alone."""
    running = run(writes)
    drawn = {"temperature": 1.0, "seed": 3}
    wishes = [(task, prompt, more) for task in ("email", "grammar", "plain") for prompt, more in
              (("abc", {}), ("longer", drawn), ("x", {**drawn, "seed": 4}))]  # fmt: skip
    alone = [await write(running, task, prompt, **more) for task, prompt, more in wishes]
    assert len(set(alone)) == len(wishes)
    for _ in range(3):
        together = await asyncio.gather(*(write(running, task, prompt, **more) for task, prompt, more in wishes))
        assert together == alone


async def test_a_seed_draws_what_the_library_draws(run, writes, library):
    """As after ``torch.manual_seed``; without a seed two requests of a moment differ."""
    running = run(writes)
    torch.manual_seed(7)
    wanted = library("grammar", "abc", do_sample=True, temperature=2.0, top_k=0)
    assert await write(running, "grammar", "abc", temperature=2.0, seed=7) == wanted
    free = await asyncio.gather(*(write(running, "grammar", "abc", temperature=5.0) for _ in range(2)))
    assert free[0] != free[1]


async def test_a_stop_string_ends_the_text_before_it(run, writes):
    """The reason is stop."""
    running = run(writes)
    text = await write(running, "plain", "abc")
    body = {"prompt": "abc", "max_tokens": 16, "temperature": 0, "stop": [text[4:6]]}
    reply = await running.ask(COMPLETIONS, "plain", body)
    choice = reply.body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[4:6])], "stop")


async def test_a_text_longer_than_the_context_is_refused_with_both_numbers(run, writes):
    """Prompt alone, prompt with what it wants to write, and a text that is looked at."""
    running = run(writes, context=32)
    for path, task, body, tokens in (
        (COMPLETIONS, "plain", {"prompt": "x" * 40}, 40),
        (COMPLETIONS, "plain", {"prompt": "x" * 20, "max_tokens": 13}, 33),
        (EMBEDDINGS, "vector", {"input": "x" * 33}, 33),
    ):
        reply = await running.ask(path, task, body)
        assert (reply.status, reply.error["tokens"], reply.error["context"]) == (400, tokens, 32)


async def test_a_vector_is_the_mean_of_the_last_hidden_states(run, writes):
    """Of length 1, one for each text."""
    model = load_parts(writes, sweep_seconds=None)
    tokeniser = transformers.AutoTokenizer.from_pretrained(writes)
    wanted = []
    for text in ("abc", "something else"):
        with torch.no_grad():
            found = model(**tokeniser(text, return_tensors="pt"), task="vector", output_hidden_states=True)
        mean = found.hidden_states[-1][0].mean(dim=0)
        wanted.append(mean / mean.norm())
    model.pagein.close()
    reply = await run(writes).ask(EMBEDDINGS, "vector", {"input": ["abc", "something else"]})
    rows = torch.tensor([one["embedding"] for one in reply.body["data"]])
    torch.testing.assert_close(rows, torch.stack(wanted), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(rows[0], rows[1], atol=1e-2)


async def test_a_vector_is_made_as_the_models_folder_says(run, tmp_path):
    """Of an encoder that takes its first token; what says so goes along into the split."""
    torch.manual_seed(3)
    base, folder = tmp_path / "base", tmp_path / "split"
    own: Any = transformers.BertModel(transformers.BertConfig(**BERT)).eval()
    own.save_pretrained(base)
    write_tokeniser(base, template=None)
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    split(folder, base, {"vector": {"kind": "embed", "samples": ["ab"]}})
    reply = await run(folder, context=60).ask(EMBEDDINGS, None, {"input": "abc"})
    tokeniser = transformers.AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        first = own(**tokeniser("abc", return_tensors="pt")).last_hidden_state[0, 0]
    found = torch.tensor(reply.body["data"][0]["embedding"])
    torch.testing.assert_close(found, first / first.norm(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", ["sentiment", "topic"])
async def test_labels_are_those_of_the_model_that_was_split(run, reads, task):
    """Scores of all labels, named as the task's own model names them, the likeliest first of all."""
    folder = reads.parent / task
    own: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokeniser = transformers.AutoTokenizer.from_pretrained(folder)
    reply = await run(reads, context=60).ask(TEXTS, task, {"input": ["good day", "no"]})
    assert reply.status == 200, reply.body
    assert reply.body["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    for text, one in zip(("good day", "no"), reply.body["data"], strict=True):
        with torch.no_grad():
            scores = torch.softmax(own(**tokeniser(text, return_tensors="pt")).logits[0], dim=-1)
        assert one["scores"] == pytest.approx(dict(zip(LABELS[task], scores.tolist(), strict=True)), abs=1e-5)
        assert (one["label"], one["score"]) == (LABELS[task][int(scores.argmax())], max(one["scores"].values()))


async def test_tokens_get_labels_with_their_places(run, reads):
    """Those of the tagger that was split; places are in characters, also where a character has several tokens."""
    own: Any = transformers.AutoModelForTokenClassification.from_pretrained(reads.parent / "tag")
    tokeniser = transformers.AutoTokenizer.from_pretrained(reads.parent / "tag")
    text = "in Århus"
    reply = await run(reads, context=60).ask(TOKENS, "tag", {"input": text})
    with torch.no_grad():
        scores = torch.softmax(own(**tokeniser(text, return_tensors="pt")).logits[0], dim=-1)
    found = reply.body["data"][0]["tokens"]
    assert [one["label"] for one in found] == [LABELS["tag"][label] for label in scores.argmax(dim=-1)]
    assert [one["score"] for one in found] == pytest.approx(scores.max(dim=-1).values.tolist(), abs=1e-5)
    assert [(one["text"], one["start"], one["end"]) for one in found] == [
        (text[at], at, at + 1) for at in (0, 1, 2, 3, 3, 4, 5, 6, 7)
    ]


@pytest.mark.parametrize(
    ("path", "task", "status", "code"),
    [
        (COMPLETIONS, None, 400, "task_unclear"),
        (COMPLETIONS, "poem", 404, "unknown_task"),
        (COMPLETIONS, "vector", 400, "invalid_request"),
        (EMBEDDINGS, "email", 400, "invalid_request"),
        (TEXTS, "email", 400, "invalid_request"),
        (EMBEDDINGS, "inner", 400, "invalid_request"),
    ],
)
async def test_a_request_names_a_task_of_its_paths_kind(run, writes, path, task, status, code):
    """Otherwise it is refused, with what there is, and nothing was loaded for it."""
    running = run(writes)
    reply = await running.ask(path, task, {"prompt": "a", "input": "a"})
    assert (reply.status, reply.error["code"]) == (status, code)
    if code == "invalid_request":
        assert reply.error["kind"] in reply.error["message"]
        assert reply.error["capability"] in reply.error["message"]
    assert {name: state for name, (state, _) in (await running.states()).items()} == {
        "backbone": "hot", "email.adapter": "cold", "grammar.adapter": "cold"
    }  # fmt: skip


async def test_names_of_tasks_are_taken_in_any_case(run, writes):
    """As the library takes them."""
    running = run(writes)
    assert await write(running, "EMail", "abc") == await write(running, "email", "abc")


async def test_a_model_of_one_task_needs_none_named(run, tmp_path, writes):
    """The only one is meant."""
    base = writes.parent / "base"
    folder = split(tmp_path / "one", base, {"only": {"kind": "generate", "samples": ["ab"], "prompt": "{text}!"}})
    reply = await run(folder).ask(CHAT, None, said("abc"))
    assert (reply.status, reply.body["usage"]["prompt_tokens"]) == (200, 4)
