"""Conversations of the engine transformers survive eviction, kill -9 and restart: only what is new is computed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .daemon import Running, fake

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "models" / "smollm2-135m-hf"
STORY = "The lighthouse keeper wrote down every ship that passed, its colours, its flag and the hour of the day. "
TURNS = ["What did the keeper write down?", "And what about the flags?", "Who reads it?", "Thank you. Good night!"]
AT_ONCE = "  min_residency: 0s\n"

pytestmark = pytest.mark.engines


@pytest.fixture
def model():
    """A model of a configuration; another one does not fit beside it into the budget of these tests."""
    if not WEIGHTS.is_dir():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the weights are not here: run scripts/setup dev")
    rows = {"model": WEIGHTS, "context": 1024, "memory": "900MiB", "engine": "transformers"}
    return "  chat:\n" + "".join(f"    {key}: {value}\n" for key, value in rows.items())


@pytest.fixture
def other():
    """A model that pushes the first one out."""
    return fake("other", "--allocate 10MiB", memory="400MiB")


class Talk:
    """A plain client of OpenAI's API that sends its whole history each turn and knows nothing of it."""

    def __init__(self, d: Running, **body):
        self.d, self.body, self.messages, self.texts = d, body, [], []

    def turn(self, text):
        """One turn; returns the answer with its counters."""
        said = text if self.messages else STORY * 10 + text
        self.messages.append({"role": "user", "content": said})
        body = {"model": "chat", "messages": self.messages, "max_tokens": 12, "temperature": 0, **self.body}
        answer = self.d.call("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        message = answer.json["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": message})
        self.texts.append(message)
        return answer


def cached(answer):
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def goes_on(answer, before):
    """All of the turn before was there, but for its last token; at most that and what is new was computed."""
    usage, old = answer.json["usage"], before.json["usage"]
    new = usage["prompt_tokens"] - old["prompt_tokens"] - old["completion_tokens"]
    assert cached(answer) >= usage["prompt_tokens"] - new - 1, answer.json["timings"]


def push_out(d):
    """Another model takes its memory, and leaves again."""
    assert d.chat("other").status == 200
    d.until_state("chat", "absent")


def undisturbed(start, model, folder):
    """The four answers of a worker that is never evicted, and finds nothing on the disk."""
    with_all = start("2GiB", model, AT_ONCE, folder=folder / "whole")
    talk = Talk(with_all)
    for text in TURNS:
        talk.turn(text)
    with_all.stop()
    return talk.texts


def test_a_chat_goes_on_however_often_its_model_leaves(start, model, other, tmp_path):
    """Four turns, another model in between each: what is known is read, and the answers are those of a whole run."""
    wanted = undisturbed(start, model, tmp_path)
    d = start("1000MiB", model + other, AT_ONCE)
    talk, before = Talk(d), None
    for text in TURNS:
        answer = talk.turn(text)
        if before is not None:
            goes_on(answer, before)
            assert int(answer.headers["X-Pagein-Restored-Tokens"]) == cached(answer)
        before = answer
        push_out(d)
    assert talk.texts == wanted
    (reuse,) = [one for one in d.get("/api/state")["models"] if one["model"] == "chat"]
    assert reuse["restores"] == 3
    (store,) = d.get("/api/state")["blocks"]
    assert 0 < store["bytes"] <= store["cap"]
    assert any("brought back" in one["reason"] for one in d.decisions("state", "chat"))


def test_after_kill_9_of_the_worker_the_next_turn_goes_on_from_the_disk(start, model, tmp_path):
    """What the write behind the turn had reached is there; the daemon loads the model again, and nothing is wrong."""
    wanted = undisturbed(start, model, tmp_path)
    d = start("1000MiB", model, AT_ONCE)
    talk = Talk(d)
    first = talk.turn(TURNS[0])
    d.until(lambda: d.get("/api/state/kv")["models"]["chat"].get("writing") == 0, "the write behind the turn")
    os.kill(d.model("chat")["pid"], signal.SIGKILL)
    d.until_state("chat", "absent", "failed")
    assert d.call("POST", "/api/models/chat/load").status == 200
    second = talk.turn(TURNS[1])
    goes_on(second, first)
    for text in TURNS[2:]:
        talk.turn(text)
    assert talk.texts == wanted


def test_two_tenants_share_nothing_and_a_restart_keeps_what_was_theirs(start, model):
    """Another key finds nothing of the first one's; the first one's next daemon finds all of it."""
    counts = []
    for key in ("key-of-the-first", "key-of-the-second", "key-of-the-first"):
        d = start("1000MiB", model, AT_ONCE, key=key)
        counts.append(cached(Talk(d).turn(TURNS[0])))
        d.stop()
    assert counts[:2] == [0, 0]
    assert counts[2] > 100


def test_what_is_deleted_is_gone_with_and_without_a_worker(start, model, other):
    """A session deleted while its worker runs, and one while none does: neither memory nor disk has it any more."""
    d = start("1000MiB", model + other, AT_ONCE)
    for name, evict in (("one", False), ("two", True)):
        body = {"model": "chat", "messages": [{"role": "user", "content": STORY * 10 + TURNS[0]}], "max_tokens": 8}
        session = {"X-Pagein-Session": name}
        assert d.call("POST", "/v1/chat/completions", {**body, "temperature": 0}, session).status == 200
        if evict:
            push_out(d)
        assert d.call("DELETE", f"/api/state/conversations/{name}").status == 204
        again = d.call("POST", "/v1/chat/completions", {**body, "temperature": 0})
        assert cached(again) == 0
        push_out(d)
        assert d.call("DELETE", "/api/state/snapshots").status == 200
