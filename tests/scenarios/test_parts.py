"""Tasks of split models over HTTP: right answers whoever asks beside, and parts that stay while they are used.

Numbers in the docstrings are those of the situations in README.md.
"""

from __future__ import annotations

import threading

import pytest

from .daemon import Later
from .splits import (
    CONTEXT,
    READS,
    TEXTS,
    WRITES,
    act,
    data_of,
    endless,
    lazy,
    own_part,
    parts,
    read,
    split_model,
    write,
)

pytestmark = pytest.mark.torch

MANY = 16
ROUNDS = 12


def test_the_first_calls_of_a_cold_task_read_its_file_once(start, reads_folder):
    """1: all at once, one load of the model and one of the part; each has the answer of the whole model."""
    d = start("2GiB", split_model("reads", reads_folder))
    asked = [Later(lambda: data_of(read(d, "topic"))) for _ in range(MANY)]
    answers = [one.result() for one in asked]
    assert len(d.decisions("load", "reads")) == 1
    there = parts(d, "reads")
    assert {name: (one["state"], one["loads"]) for name, one in there.items()} == {
        "backbone": ("hot", 1), "topic": ("hot", 1), "sentiment": ("cold", 0), "tag": ("cold", 0),
    }  # fmt: skip
    assert lazy(d, "reads")["parts"]["owned"] == there["backbone"]["file_bytes"] + there["topic"]["file_bytes"]
    assert act(d, "reads", "rollout", {"level": "off"}).status == 200
    assert answers == [data_of(read(d, "topic"))] * MANY
    reasons = [one["reason"] for one in d.decisions("part", "reads")]
    assert sum(reason.startswith("loaded part topic") for reason in reasons) == 1


def test_tasks_mix_and_parts_come_and_go_under_them(start, reads_folder, writes_folder):
    """2, 4: labels, tags and texts at once, while another unloads every part that it can: each answer is its own."""
    both = split_model("reads", reads_folder) + split_model("writes", writes_folder, context=CONTEXT)
    d = start("2GiB", both)
    labels = {(task, text): data_of(read(d, task, text)) for task in READS for text in TEXTS}
    written = {(task, text): write(d, task, text) for task in WRITES for text in TEXTS[:2]}
    assert len({str(one) for one in labels.values()}) == len(labels)
    assert len(set(written.values())) == len(written)
    over = threading.Event()

    def evict() -> int:
        gone = 0
        while not over.is_set():
            for model, part in (("reads", "topic"), ("reads", "tag"), ("writes", "email.adapter")):
                reply = act(d, model, f"parts/{part}/unload")
                assert reply.status in (200, 409), reply.body
                gone += reply.status == 200
        return gone

    def call(mine: int) -> list[bool]:
        right = []
        for turn in range(ROUNDS):
            label, text = (list(known)[(mine * 5 + turn) % len(known)] for known in (labels, written))
            right += [data_of(read(d, *label)) == labels[label], write(d, *text) == written[text]]
        return right

    evicting, calling = Later(evict), [Later(lambda mine=mine: call(mine)) for mine in range(4)]
    right = [one for caller in calling for one in caller.result()]
    over.set()
    assert evicting.result() > 0
    assert right == [True] * (4 * ROUNDS * 2)
    for model in ("reads", "writes"):
        for one in parts(d, model).values():
            assert one["leases"] == 0, one
            assert one["loads"] - one["evictions"] == (one["state"] == "hot"), one


def test_a_stream_keeps_its_part_and_its_end_gives_it_back(start, writes_folder):
    """3, 5: while it writes, its part is in use and stays; when its client leaves, nothing holds it any more."""
    d = start("2GiB", split_model("writes", writes_folder, context=CONTEXT))
    alone = write(d, "grammar")
    stream = endless(d, "email")
    held = own_part(d, "writes", "email")
    assert (held["state"], held["idle_seconds"]) == ("hot", None)
    assert held["leases"] > 0
    refused = act(d, "writes", f"parts/{held['name']}/unload")
    assert (refused.status, refused.error["code"], refused.error["part"]) == (409, "in_use", held["name"])
    assert write(d, "grammar") == alone
    stream.hang_up()
    d.until(lambda: all(one["leases"] == 0 for one in parts(d, "writes").values()), "the parts to be given back")
    assert d.until_state("writes", "resident")["leases"] == 0
    assert own_part(d, "writes", "email")["idle_seconds"] is not None
    assert act(d, "writes", f"parts/{held['name']}/unload").status == 200
    assert own_part(d, "writes", "email")["state"] == "cold"
    too_long = {"model": "writes:email", "prompt": "a" * (CONTEXT + 1)}
    assert d.call("POST", "/v1/completions", too_long).error["code"] == "context_length_exceeded"
    assert {one["leases"] for one in parts(d, "writes").values()} == {0}


def test_parts_are_moved_by_hand(start, reads_folder):
    """12, 18: load brings the model along; what is pinned stays; what cannot be is told with its reason."""
    d = start("2GiB", split_model("reads", reads_folder))
    away = lazy(d, "reads")
    assert (away["state"], {one["state"] for one in away["parts"]["parts"]}) == ("absent", {"absent"})
    assert act(d, "reads", "parts/tag/unload").error["code"] == "not_loaded"
    assert act(d, "reads", "parts/nope/load").status == 404
    assert d.call("POST", "/v1/chat/completions", {"model": "reads:topic", "messages": []}).status == 400
    assert d.decisions("load") == []
    there = act(d, "reads", "parts/TAG/load")
    assert there.status == 200, there.body
    assert {one["name"] for one in there.json["parts"] if one["state"] == "hot"} == {"backbone", "tag"}
    assert act(d, "reads", "parts/tag/pin").status == 200
    refused = act(d, "reads", "parts/tag/unload")
    assert (refused.status, refused.error["code"]) == (409, "in_use")
    assert act(d, "reads", "parts/tag/unpin").status == 200
    gone = act(d, "reads", "parts/tag/unload")
    assert {one["name"]: one["state"] for one in gone.json["parts"]}["tag"] == "cold"
    assert act(d, "reads", "parts/tag/unload").status == 200
    kinds = [one["data"]["event"] for one in d.decisions("part", "reads") if one["data"].get("part") == "tag"]
    assert kinds == ["load", "pin", "unpin", "evict"]
    (shown,) = [one for one in d.get("/v1/models")["data"] if one["id"] == "reads"]
    assert shown["tasks"] == ["sentiment", "tag", "topic"]
    metrics = d.call("GET", "/metrics").body.decode()
    assert 'pagein_part_loads_total{model="reads",part="tag"} 1.0' in metrics


def test_the_kill_switch_at_run_time(start, reads_folder, writes_folder):
    """19: off and back while it serves: one process, the same bits, and everything in memory in between."""
    both = split_model("reads", reads_folder) + split_model("writes", writes_folder, context=CONTEXT)
    d = start("2GiB", both)

    def answers() -> list[object]:
        return [data_of(read(d, task)) for task in READS] + [write(d, task) for task in WRITES]

    wanted = answers()
    pids = [d.model(name)["pid"] for name in ("reads", "writes")]
    for name in ("reads", "writes"):
        told = act(d, name, "rollout", {"level": "off"})
        assert (told.status, told.json["level"]) == (200, "off")
        assert {(one["state"], one["pinned"]) for one in parts(d, name).values()} == {("hot", True)}
    assert answers() == wanted
    for name in ("reads", "writes"):
        assert act(d, name, "rollout", {"level": "auto"}).json["level"] == "auto"
    assert act(d, "reads", "parts/topic/unload").status == 200
    assert answers() == wanted
    assert act(d, "reads", "parts/topic/unload").status == 200
    assert act(d, "reads", "rollout", {"percent": 0}).json["percent"] == 0
    assert data_of(read(d, "tag")) == wanted[list(READS).index("tag")]
    assert parts(d, "reads")["topic"]["state"] == "hot", "a request that does not take part has all of the model"
    assert act(d, "reads", "rollout", {"percent": 100, "level": "backbone"}).status == 200
    assert act(d, "reads", "parts/topic/unload").status == 200
    away = read(d, "topic")
    assert (away.status, away.error["code"]) == (503, "part_away")
    assert [d.model(name)["pid"] for name in ("reads", "writes")] == pids


def test_every_door_names_tasks(start, writes_folder):
    """Chats, sessions, responses, `/run` and vectors, by name and by field: the same text, and a history of its own."""
    d = start("2GiB", split_model("writes", writes_folder, context=CONTEXT))
    said = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 24, "temperature": 0}
    wanted = write(d, "email", "<abc>\n")

    def text_of(reply):
        assert reply.status == 200, reply.body
        return reply.json["choices"][0]["message"]["content"]

    assert text_of(d.call("POST", "/v1/chat/completions", {"model": "writes", "task": "Email", **said})) == wanted
    assert text_of(d.call("POST", "/run/writes:email", {"input": "abc", "max_tokens": 24, "temperature": 0})) == wanted
    session = {"X-Pagein-Session": "letters"}
    for history in ("0", "2"):
        kept = d.call("POST", "/v1/chat/completions", {"model": "writes:email", **said}, session)
        assert (text_of(kept), kept.headers["X-Pagein-History"]) == (wanted, history)
    other = d.call("POST", "/v1/chat/completions", {"model": "writes:grammar", **said}, session)
    assert other.headers["X-Pagein-History"] == "4; recomputed; last-model=writes:email"
    asked = {"input": "abc", "max_output_tokens": 24, "temperature": 0}
    answered = d.call("POST", "/v1/responses", {"model": "writes", "task": "email", **asked})
    assert answered.status == 200, answered.body
    assert answered.json["model"] == "writes:email"
    assert answered.json["output"][-1]["content"][0]["text"] == wanted
    vector = d.call("POST", "/v1/embeddings", {"model": "writes:vector", "input": "abc"})
    assert len(vector.json["data"][0]["embedding"]) > 0
    assert d.call("POST", "/run/writes:inner", {"input": "abc"}).error["code"] == "capability_missing"
    assert {one["leases"] for one in parts(d, "writes").values()} == {0}
