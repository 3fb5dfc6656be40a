"""Conversations on a real model survive eviction, restart and kill -9: the next turn computes only what is new."""

import os
import signal
from pathlib import Path

import pytest

from .daemon import fake

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "models" / "smollm2-135m"
STORY = "The lighthouse keeper wrote down every ship that passed, its colours, its flag and the hour of the day. "

pytestmark = pytest.mark.engines


@pytest.fixture
def model():
    if not WEIGHTS.is_dir():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    return f"  chat:\n    model: {WEIGHTS}\n    context: 2048\n    memory: 500MiB\n    engine: llama_cpp\n"


class Talk:
    """A plain client that sends its whole history each turn."""

    def __init__(self, d, turns=12):
        self.d = d
        self.messages = [{"role": "user", "content": STORY * turns + "What did the keeper write down?"}]

    def turn(self, text=None):
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        answer = self.d.call(
            "POST",
            "/v1/chat/completions",
            {"model": "chat", "messages": self.messages, "max_tokens": 12, "temperature": 0, "seed": 1},
        )
        assert answer.status == 200, answer.body
        said = answer.json["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": said})
        return answer

    def on(self, d):
        """The same client after a restart."""
        self.d = d
        return self

    def copy(self):
        other = Talk(self.d)
        other.messages = list(self.messages)
        return other


def snapshots(d):
    """What is saved whole."""
    return list((d.state / "kv" / "snapshots").glob("*/*.kv"))


def test_a_conversation_survives_its_eviction(start, model):
    """The turn after it computes what is new and one token at most, and continues as if it had never left."""
    d = start("600MiB", model + fake("other", memory="300MiB"), "  min_residency: 0s\n")
    talk = Talk(d)
    first = talk.turn()
    stayed = talk.copy()
    expected = stayed.turn("And what about the flags?").json
    assert d.call("POST", "/api/models/chat/unload").status == 200
    assert d.chat("other").status == 200
    back = talk.turn("And what about the flags?")
    assert d.model("chat")["loads"] == 2
    restored, computed = int(back.headers["X-Pagein-Restored-Tokens"]), int(back.headers["X-Pagein-Computed-Tokens"])
    prompt = back.json["usage"]["prompt_tokens"]
    assert restored >= first.json["usage"]["prompt_tokens"] - 1
    assert computed <= prompt - restored + 1
    assert back.json["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    told = [r["reason"] for r in d.decisions("state", "chat")]
    assert any(reason.startswith(f"restored {restored} of {prompt} tokens") for reason in told)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_conversation_survives_the_end_of_the_daemon(start, model, number):
    """Killed or stopped: the next daemon restores what was answered before."""
    first = start("600MiB", model)
    talk = Talk(first)
    talk.turn()
    if number == signal.SIGKILL:
        first.until(lambda: snapshots(first), "the save after the turn")
    first.tree()
    first.stop(number)
    second = start("600MiB", model)
    back = talk.on(second).turn("And what about the flags?")
    assert int(back.headers["X-Pagein-Restored-Tokens"]) > 250
    assert int(back.headers["X-Pagein-Computed-Tokens"]) < 60


def test_another_conversation_is_not_mistaken_for_it(start, model):
    """Only what both begin with is reused; the answer is that of a fresh model."""
    d = start("600MiB", model)
    Talk(d).turn()
    d.until(lambda: snapshots(d), "the save after the turn")
    other = [{"role": "user", "content": "Name three colours."}]
    body = {"model": "chat", "messages": other, "max_tokens": 12, "temperature": 0, "seed": 1}
    assert d.call("POST", "/api/models/chat/unload").status == 200
    told = d.call("POST", "/v1/chat/completions", body)
    assert told.headers["X-Pagein-Restored-Tokens"] == "0"
    assert told.headers["X-Pagein-Restore-Miss"].startswith("tokens")
    fresh = start("600MiB", model, folder=d.folder / "fresh")
    again = fresh.call("POST", "/v1/chat/completions", body)
    assert again.json["choices"][0]["message"]["content"] == told.json["choices"][0]["message"]["content"]


def test_damaged_snapshots_are_misses(start, model):
    """A flipped byte in each part of the file: the answer is right, and the file is moved aside."""
    d = start("600MiB", model)
    talk = Talk(d, turns=6)
    talk.turn()
    d.until(lambda: snapshots(d), "the save after the turn")
    (file,) = snapshots(d)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert d.call("POST", "/api/models/chat/unload").status == 200
    back = talk.turn("And the flags?")
    assert back.headers["X-Pagein-Restored-Tokens"] == "0"
    assert back.headers["X-Pagein-Restore-Miss"].startswith("damaged")


def test_state_can_be_switched_off(start, model):
    """Nothing is written and nothing is restored."""
    d = start("600MiB", model, state="off")
    talk = Talk(d, turns=4)
    answer = talk.turn()
    assert "X-Pagein-Restored-Tokens" not in answer.headers
    assert not (d.state / "kv").exists()
