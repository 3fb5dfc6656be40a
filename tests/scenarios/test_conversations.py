"""Conversations on a real model survive eviction, restart and kill -9: the next turn computes only what is new."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from .daemon import Stream, fake

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "models" / "smollm2-135m"
STORY = "The lighthouse keeper wrote down every ship that passed, its colours, its flag and the hour of the day. "
FLAGS = "And what about the flags?"
AT_ONCE = "  min_residency: 0s\n"
MISSED = "X-Pagein-Restore-Miss"

pytestmark = pytest.mark.engines


def chat(name="chat", weights=WEIGHTS, **settings):
    """A model of a configuration; two of them do not fit into the budget of these tests."""
    rows = {"model": weights, "context": 2048, "memory": "500MiB", "engine": "llama_cpp", **settings}
    return f"  {name}:\n" + "".join(f"    {key}: {value}\n" for key, value in rows.items())


@pytest.fixture
def model():
    if not WEIGHTS.is_dir():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    return chat()


class Talk:
    """A plain client that sends its whole history each turn."""

    def __init__(self, d, turns=12, name="chat", story=STORY):
        self.d, self.name = d, name
        self.messages = [{"role": "user", "content": story * turns + "What did the keeper write down?"}]

    def body(self, **more):
        body = {"model": self.name, "messages": self.messages, "max_tokens": 12, "temperature": 0}
        return {**body, "seed": 1, "logprobs": True, **more}

    def ask(self, **more):
        answer = self.d.call("POST", "/v1/chat/completions", self.body(**more))
        assert answer.status == 200, answer.body
        return answer

    def says(self, text):
        self.messages.append({"role": "user", "content": text})

    def turn(self, text=None):
        if text is not None:
            self.says(text)
        answer = self.ask()
        self.messages.append({"role": "assistant", "content": answer.json["choices"][0]["message"]["content"]})
        return answer

    def kept_turn(self, text=None):
        """A turn that is saved afterwards."""
        known = set(snapshots(self.d))
        answer = self.turn(text)
        self.d.until(lambda: set(snapshots(self.d)) - known, "the save after the turn")
        return answer

    def on(self, d, name=None):
        """The same client at another daemon, or asking another model."""
        other = Talk(d, name=name or self.name)
        other.messages = list(self.messages)
        return other

    def check(self, answer):
        """The answer is that of a model which computed all of the prompt now."""
        past = self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages
        assert spoken(answer) == spoken(self.ask(messages=past, cache_prompt=False))


def spoken(answer):
    """What was generated, token by token."""
    return [one["id"] for one in answer.json["choices"][0]["logprobs"]["content"]]


def counts(answer):
    """Tokens of the prompt that were restored and computed."""
    return int(answer.headers["X-Pagein-Restored-Tokens"]), int(answer.headers["X-Pagein-Computed-Tokens"])


def new_since(answer, before):
    """Tokens of a prompt that the turn before did not leave in the cache, whose last token has no KV yet."""
    usage = before.json["usage"]
    return answer.json["usage"]["prompt_tokens"] - usage["prompt_tokens"] - usage["completion_tokens"] + 1


def goes_on(answer, before):
    """What was said before was restored, and only what is new and one token at most was computed."""
    restored, computed = counts(answer)
    new = new_since(answer, before)
    assert restored >= answer.json["usage"]["prompt_tokens"] - new, answer.headers.get(MISSED)
    assert computed <= new + 1


def missed(answer, kind):
    """Nothing was restored, for a reason of this kind."""
    assert answer.headers["X-Pagein-Restored-Tokens"] == "0"
    assert answer.headers[MISSED].startswith(f"{kind}:")


def snapshots(d):
    """What is saved whole, and was not moved aside."""
    return [file for file in (d.state / "kv" / "snapshots").glob("*/*.kv") if file.parent.name != "damaged"]


def unload(d, name="chat"):
    assert d.call("POST", f"/api/models/{name}/unload").status == 200


def flip(file, at):
    """Change one bit of a file, and nothing that its times and size tell."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_long_conversation_survives_eviction_and_kill(start, model, tmp_path):
    """1,500 tokens: each later turn computes what is new, and answers token by token as if it had never left."""
    stayed = Talk(start("600MiB", model, state="off", folder=tmp_path / "stayed"), turns=68)
    expected = [spoken(stayed.turn(text)) for text in (None, FLAGS, "And the hour?")]
    stayed.d.stop()
    d = start("600MiB", model + fake("other", memory="300MiB"), AT_ONCE, folder=tmp_path / "evicted")
    talk = Talk(d, turns=68)
    first = talk.turn()
    assert first.json["usage"]["prompt_tokens"] >= 1500
    assert d.chat("other").status == 200
    assert d.model("chat")["pid"] is None
    second = talk.kept_turn(FLAGS)
    goes_on(second, first)
    told = [row["reason"] for row in d.decisions("state", "chat")]
    assert any(reason.startswith(f"restored {counts(second)[0]} of ") for reason in told)
    d.stop(signal.SIGKILL)
    third = talk.on(start("600MiB", model, folder=d.folder)).turn("And the hour?")
    goes_on(third, second)
    assert [spoken(answer) for answer in (first, second, third)] == expected


def test_a_conversation_survives_the_end_of_the_daemon(start, model):
    """Stopped right after the turn: the next daemon restores what was answered before."""
    first = start("600MiB", model)
    talk = Talk(first)
    before = talk.turn()
    first.stop()
    goes_on(talk.on(start("600MiB", model)).turn(FLAGS), before)


def test_another_conversation_is_not_mistaken_for_it(start, model):
    """Only what both begin with is reused; the answer is that of a fresh model."""
    d = start("600MiB", model)
    Talk(d).kept_turn()
    unload(d)
    other = Talk(d, turns=0)
    answer = other.ask()
    missed(answer, "tokens")
    other.check(answer)


def test_other_settings_are_misses(start, model):
    """Other types of the cache and another context: the field is named, and the answer is right."""
    others = chat("packed", options="{cache_type_k: q8_0}") + chat("short", context=1024)
    d = start("600MiB", model + others, AT_ONCE)
    talk = Talk(d, turns=6)
    talk.kept_turn()
    talk.says(FLAGS)
    for name, field in (("packed", "KV type of K"), ("short", "context")):
        other = talk.on(d, name)
        answer = other.ask()
        missed(answer, "settings")
        assert field in answer.headers[MISSED]
        other.check(answer)
    assert counts(talk.ask())[0] > 100


def test_other_weights_and_another_tenant_are_misses(start, model, tmp_path):
    """One bit of one tensor under the same path, size and times; then another salt: nothing is reused."""
    weights = tmp_path / "weights" / "chat.gguf"
    weights.parent.mkdir()
    shutil.copyfile(next(WEIGHTS.glob("*.gguf")), weights)
    entry = chat(weights=weights)
    talk = Talk(start("600MiB", entry), turns=6)
    talk.kept_turn()
    talk.d.stop()
    flip(weights, weights.stat().st_size - 1001)
    talk.says(FLAGS)
    for state, kind in (("", "settings"), ("{salt: somebody-else}", "empty")):
        other = talk.on(start("600MiB", entry, state=state))
        answer = other.ask()
        missed(answer, kind)
        other.check(answer)
        other.d.stop()


def test_damaged_snapshots_are_misses(start, model):
    """A bit flipped in the header or the payload, an end cut off: the answer is right, and the file is moved aside."""
    d = start("600MiB", model)
    talk = Talk(d, turns=6)
    talk.turn()
    for damage in (lambda f: flip(f, 40), lambda f: flip(f, f.stat().st_size // 2), lambda f: os.truncate(f, 5000)):
        unload(d)
        d.until(lambda: snapshots(d), "the save for the unloading")
        (file,) = snapshots(d)
        damage(file)
        answer = talk.turn("Go on.")
        missed(answer, "damaged")
        assert file not in snapshots(d)
        talk.check(answer)


def test_two_conversations_take_turns_through_evictions(start, tmp_path):
    """Each goes on with what it had, one request at a time token by token, and at once in two slots, too."""
    answers = {}
    for evicted in (False, True):
        d = start("600MiB", chat(parallel=2), folder=tmp_path / str(evicted))
        talks = [Talk(d, turns=8), Talk(d, turns=8, story=STORY.replace("lighthouse", "harbour"))]
        before = [talk.turn() for talk in talks]
        if evicted:
            unload(d)
        after = [talk.turn(FLAGS) for talk in talks]
        answers[evicted] = [spoken(answer) for answer in (*before, *after)]
    assert answers[True] == answers[False]
    for first, second in zip(before, after, strict=True):
        goes_on(second, first)
    unload(d)
    asked = [d.later(lambda talk=talk: talk.turn("And the hour?")) for talk in talks]
    for second, third in zip(after, asked, strict=True):
        goes_on(third.result(), second)


def test_a_request_that_comes_while_the_model_leaves(start, model):
    """It is answered, and computes what is new: the save before the unload is complete before it is looked for."""
    d = start("600MiB", model)
    talk = Talk(d)
    before = talk.turn()
    for text in (FLAGS, "And the hour?", "And the colours?"):
        leaving = d.later(lambda: unload(d))
        answer = talk.turn(text)
        leaving.result()
        assert counts(answer)[1] <= new_since(answer, before) + 1
        before = answer


def test_a_request_that_is_not_to_be_cached_takes_nothing_away(start, model):
    """The engine gives it the slot of a conversation, which is saved before and restored after it."""
    d = start("600MiB", model)
    talk = Talk(d)
    before = talk.turn()
    Talk(d, turns=0).ask(cache_prompt=False)
    goes_on(talk.turn(FLAGS), before)


def test_a_client_that_leaves_amid_its_turn_can_send_it_again(start, model):
    """The same turn computes what is new, and is answered as if nobody had left."""
    d = start("600MiB", model)
    talk = Talk(d)
    before = talk.turn()
    talk.says(FLAGS)
    left = Stream(d, "chat", messages=talk.messages, max_tokens=500, temperature=0).begin()
    assert left.line().startswith(b"data:")
    left.hang_up()
    answer = talk.ask()
    assert counts(answer)[1] <= new_since(answer, before) + 1
    talk.check(answer)


def test_state_can_be_switched_off(start, model):
    """Nothing is written and nothing is restored."""
    d = start("600MiB", model, state="off")
    talk = Talk(d, turns=4)
    answer = talk.turn()
    assert "X-Pagein-Restored-Tokens" not in answer.headers
    assert not (d.state / "kv").exists()
