"""The transformers engine over HTTP, on tiny models made here: what one request gets alone, many get together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.errors import DoesNotFit, EngineMissing, LoadFailed
from pagein.protocol import ALLOWANCE_PATH, SLEEP_PATH, WAKE_PATH, Capability
from pagein.weights.streaming.stage import resident_now
from tests.engines.local.conftest import Reply, request
from tests.engines.local.test_write import events

pytestmark = pytest.mark.torch

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


async def complete(running: Any, prompt: str, tokens: int = 12, **more: Any) -> str:
    """Continue a prompt greedily."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    reply = await request(running.endpoint, "POST", COMPLETIONS, json=body)
    assert reply.status == 200, reply.body
    return reply.body["choices"][0]["text"]


async def allow(running: Any, count: int) -> Reply:
    """Change its allowance."""
    return await request(running.endpoint, "POST", ALLOWANCE_PATH, json={"bytes": count})


async def stream(running: Any) -> Any:
    """Where the weights are now."""
    assert (await allow(running, running.streaming)).status == 200
    assert 0 < len(running.plan.resident) < 6
    return running


async def test_a_chat_uses_the_models_own_template(run):
    """Its prompt is what the template makes of the messages, and nothing is added to it."""
    running = run()
    assert running.started.capabilities == [Capability.CHAT, Capability.COMPLETION, Capability.EMBEDDING]
    body = {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 8, "temperature": 0}
    reply = await request(running.endpoint, "POST", CHAT, json=body)
    assert reply.status == 200, reply.body
    prompt = "<user>hey<assistant>"
    assert reply.body["usage"]["prompt_tokens"] == len(prompt)
    assert reply.body["choices"][0]["message"]["content"] == await complete(running, prompt, 8)


async def test_a_stream_says_the_same_piece_by_piece(run):
    """The pieces of a streamed answer add up to the whole one, with the same counts."""
    running = run()
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
    whole = await request(running.endpoint, "POST", COMPLETIONS, json=body)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    pieces = events(await request(running.endpoint, "POST", COMPLETIONS, json=asked))
    text = "".join(event["choices"][0]["text"] for event in pieces[:-1])
    assert text == whole.body["choices"][0]["text"]
    (timings,) = [event["timings"] for event in pieces if "timings" in event]
    assert (timings["cache_n"], timings["prompt_n"]) == (2, 1), "all but the last token of the prompt is known by then"
    assert pieces[-1]["usage"] == {**whole.body["usage"], "prompt_tokens_details": {"cached_tokens": 2}}


async def test_a_text_of_plain_transformers_is_written(run, tiny):
    """Whole and streamed, the engine writes what `generate` writes on a full load."""
    import torch
    import transformers

    tokeniser = transformers.AutoTokenizer.from_pretrained(tiny())
    full = transformers.AutoModelForCausalLM.from_pretrained(tiny(), dtype="auto")
    ids = tokeniser("Once upon", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = full.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    wanted = tokeniser.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    running = run()
    assert await complete(running, "Once upon", 20) == wanted
    assert await complete(await stream(running), "Once upon", 20) == wanted


@pytest.mark.parametrize("streamed", [False, True])
async def test_requests_together_equal_requests_alone(run, streamed):
    """Three at once, greedy and sampled with a seed, get what each gets alone."""
    running = run()
    if streamed:
        await stream(running)
    wishes = [("abc", {}), ("a longer prompt", {"temperature": 1.0, "seed": 3}), ("x", {"temperature": 2.0, "seed": 4})]
    alone = [await complete(running, prompt, 16, **more) for prompt, more in wishes]
    assert len(set(alone)) == 3
    for _ in range(2):
        assert list(await asyncio.gather(*(complete(running, prompt, 16, **more) for prompt, more in wishes))) == alone


async def test_a_seed_is_kept_and_none_is_not_shared(run):
    """The same seed writes the same; without one two requests of a moment differ."""
    running = run()
    seeded = [await complete(running, "abc", 16, temperature=5.0, seed=1) for _ in range(2)]
    assert seeded[0] == seeded[1]
    free = await asyncio.gather(*(complete(running, "abc", 16, temperature=5.0) for _ in range(2)))
    assert free[0] != free[1]


async def test_a_stop_string_ends_the_text_before_it(run):
    """The reason is stop, and no token is computed after the one that completed it."""
    running = run()
    text = await complete(running, "abc", 20)
    stop = text[4:6]
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "stop": [stop]}
    reply = await request(running.endpoint, "POST", COMPLETIONS, json=body)
    choice = reply.body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert reply.body["usage"]["completion_tokens"] < 20


async def test_a_request_larger_than_the_context_is_refused_with_both_numbers(run):
    """Prompt alone, and prompt with what it wants to write."""
    running = run()
    long = await request(running.endpoint, "POST", COMPLETIONS, json={"prompt": "x" * 200})
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert (long.error["tokens"], long.error["context"]) == (200, 128)
    wish = await request(running.endpoint, "POST", COMPLETIONS, json={"prompt": "x" * 100, "max_tokens": 29})
    assert (wish.status, wish.error["tokens"], wish.error["param"]) == (400, 129, "max_tokens")
    assert (await request(running.endpoint, "POST", EMBEDDINGS, json={"input": "x" * 129})).status == 400


async def test_without_a_limit_a_text_ends_with_the_context(run):
    """The reason is length."""
    body = {"prompt": "x" * 100, "temperature": 0}
    reply = await request(run().endpoint, "POST", COMPLETIONS, json=body)
    assert reply.body["usage"]["total_tokens"] <= 128
    assert reply.body["choices"][0]["finish_reason"] in ("length", "stop")


async def test_a_client_that_leaves_frees_its_place(run, monkeypatch):
    """The KV that it kept is there for the next one, which needs all of it."""
    running = run(parallel=1, context=256)
    hub = running.engine._model.pagein.lockstep
    turn, taken = hub.turn, set()
    monkeypatch.setattr(hub, "turn", lambda: (taken.add(hub.taken_tokens), turn())[1])
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=running.endpoint.socket)) as session:
        asked = {"prompt": "abc", "stream": True, "max_tokens": 250, "temperature": 5.0, "seed": 2}
        async with session.post(f"http://w{COMPLETIONS}", json=asked) as answer:
            assert (await answer.content.readline()).startswith(b"data:")
    assert len(await complete(running, "a" * 200, 50)) > 0
    assert hub.taken_tokens == 0
    assert taken >= {253, 250}  # by its own thread: this one may look when the text has ended by itself


async def test_its_allowance_goes_down_and_up_while_it_writes(run):
    """Blocks leave and return between two passes; the text is that of an undisturbed run, word for word."""
    running = run()
    wanted = await complete(running, "abc", 100)
    writing = asyncio.create_task(complete(running, "abc", 100))
    seen = []
    for count in (running.streaming, 1 << 32, running.streaming):
        reply = await allow(running, count)
        assert reply.status == 200, reply.body
        assert seen or not writing.done(), "the first change falls into the text"
        seen.append(reply.body["resident"])
        assert reply.body["bytes"] == count
        assert reply.body["total"] <= count
    assert seen[1] == 6
    assert seen[0] == seen[2] < 6
    assert await writing == wanted


async def test_an_allowance_that_is_too_small_is_refused_and_changes_nothing(run):
    """Both numbers are told, of the whole allowance, and the model serves on."""
    running = run()
    before = running.plan
    reply = await allow(running, 1000)
    assert (reply.status, reply.error["code"], reply.error["memory_bytes"]) == (507, "plan_too_large", 1000)
    assert reply.error["need_bytes"] > before.needs.runtime
    assert running.plan is before
    assert (await allow(running, reply.error["need_bytes"])).status == 200
    for body in ({}, {"bytes": "many"}, {"bytes": 0}, {"bites": 1}):
        assert (await request(running.endpoint, "POST", ALLOWANCE_PATH, json=body)).status == 400


async def test_it_sleeps_and_wakes(run):
    """Asleep it holds no weights and answers 503, also to a change of its allowance; awake it writes the same."""
    running = run()
    wanted = await complete(running, "abc")
    assert (await request(running.endpoint, "POST", SLEEP_PATH)).status == 200
    refused = await request(running.endpoint, "POST", COMPLETIONS, json={"prompt": "abc"})
    assert (refused.status, "asleep" in refused.error["message"]) == (503, True)
    assert (await allow(running, 1 << 32)).status == 503
    assert (await request(running.endpoint, "POST", WAKE_PATH)).status == 200
    assert await complete(running, "abc") == wanted


async def test_vectors_are_means_of_the_last_hidden_states(run, tiny):
    """As plain transformers computes them, of length 1; texts together give what each gives alone, streamed too."""
    import torch
    import transformers

    tokeniser = transformers.AutoTokenizer.from_pretrained(tiny())
    body = transformers.AutoModel.from_pretrained(tiny(), dtype="auto")
    ids = tokeniser("hello", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = torch.nn.functional.normalize(body(input_ids=ids).last_hidden_state[0].float().mean(0), dim=0)
    running = await stream(run())
    texts = ["hello", "a much longer text than that", "x"]
    together = await request(running.endpoint, "POST", EMBEDDINGS, json={"input": texts})
    vectors = [row["embedding"] for row in together.body["data"]]
    assert vectors[0] == pytest.approx(wanted.tolist(), abs=1e-6)
    for text, vector in zip(texts, vectors, strict=True):
        alone = await request(running.endpoint, "POST", EMBEDDINGS, json={"input": text})
        assert alone.body["data"][0]["embedding"] == vector


async def test_an_encoder_decoder_writes_what_transformers_writes(run, tiny):
    """Its prompt goes to the encoder; it completes and embeds, and has no chat."""
    import torch
    import transformers

    tokeniser = transformers.AutoTokenizer.from_pretrained(tiny("t5", None))
    full = transformers.AutoModelForSeq2SeqLM.from_pretrained(tiny("t5", None), dtype="auto")
    ids = tokeniser("translate", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = full.generate(ids, max_new_tokens=9, do_sample=False)
    running = run("t5", None)
    assert running.started.capabilities == [Capability.COMPLETION, Capability.EMBEDDING]
    assert await complete(running, "translate", 9) == tokeniser.decode(out[0, 1:], skip_special_tokens=True)
    assert len((await request(running.endpoint, "POST", EMBEDDINGS, json={"input": "a"})).body["data"]) == 1


async def test_an_encoder_embeds_only(run):
    """A model that cannot write has one path."""
    running = run("bert", None)
    assert running.started.capabilities == [Capability.EMBEDDING]
    reply = await request(running.endpoint, "POST", EMBEDDINGS, json={"input": ["a", "b"]})
    assert len(reply.body["data"][0]["embedding"]) == 64
    assert (await request(running.endpoint, "POST", COMPLETIONS, json={"prompt": "a"})).status == 404


def test_what_cannot_be_loaded_is_told(run, tiny, tmp_path):
    """An allowance below the least plan with both numbers, a folder without a tokeniser, a device that is not there."""
    with pytest.raises(DoesNotFit, match="needs at least"):
        run(allowance={"ram": 1 << 20})
    with pytest.raises(EngineMissing, match="cuda:0"):
        run(device="cuda:0")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    from pagein.engines.transformers import Transformers
    from pagein.protocol import WorkerSpec

    with pytest.raises(LoadFailed, match="tokeniser"):
        Transformers(WorkerSpec("m", "transformers", "t", str(tmp_path), path=str(tmp_path))).start()
    with pytest.raises(LoadFailed, match=r"config\.json"):
        Transformers(WorkerSpec("m", "transformers", "t", str(tmp_path), path="/no/such")).start()


@pytest.mark.engines
async def test_a_real_model_answers_the_same_whole_and_streamed(run, weights):
    """SmolLM2 knows the capital of France, alone and beside another request, however little of it is in memory."""
    # The engine runs in this process, whose own bytes depend on what ran before.
    room = resident_now() + 600 * 1024**2
    running = run(path=str(weights("smollm2-135m-hf")), context=256, allowance={"ram": room})
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    whole = await request(running.endpoint, "POST", CHAT, json={**body, "max_tokens": 12})
    assert "Paris" in whole.body["choices"][0]["message"]["content"]
    story = await complete(running, "Once upon a time", 8)
    assert (await allow(running, running.streaming)).status == 200
    assert len(running.plan.resident) < 30
    both = await asyncio.gather(
        request(running.endpoint, "POST", CHAT, json={**body, "max_tokens": 12}),
        complete(running, "Once upon a time", 8),
    )
    assert both[0].body["choices"] == whole.body["choices"]
    assert both[1] == story


def test_an_engine_whose_compute_thread_breaks_ends_and_says_why(run, monkeypatch):
    """The daemon hears the reason instead of waiting for answers that never come."""
    running = run()
    hub = running.engine._model.pagein.lockstep

    def broken() -> bool:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(hub, "turn", broken)
    running.engine._hub.submit(lambda: None, 0, lambda seat: None)
    assert "compute thread broke: ZeroDivisionError: boom" in running.engine.wait()
