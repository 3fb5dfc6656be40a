"""On a real model: what was deleted is gone from the disk and from the engine, and nothing crosses from key to key."""

import json

import pytest

from .daemon import Stream
from .test_conversations import FLAGS, Talk, chat, counts, goes_on, missed, model, snapshots, unload

__all__ = ["model"]
pytestmark = pytest.mark.engines
SESSION = {"X-Pagein-Session": "talk"}


def kept_turn(d, talk):
    """A turn of a session, saved afterwards."""
    known = set(snapshots(d))
    answer = d.call("POST", "/v1/chat/completions", talk.body(), SESSION)
    assert answer.status == 200, answer.body
    d.until(lambda: set(snapshots(d)) - known, "the save after the turn")
    return answer


def computes_all(answer):
    """The engine had nothing of the prompt, by its own counters."""
    assert counts(answer)[1] == answer.json["usage"]["prompt_tokens"]


def test_a_deleted_session_leaves_neither_snapshots_nor_slots(start, model):
    """The same prompt is computed from its first token, while the model stays, after it left, and after a restart."""
    d = start("600MiB", model)
    talk = Talk(d)
    kept_turn(d, talk)
    assert d.call("DELETE", "/api/state/conversations/talk").status == 204
    assert snapshots(d) == []
    computes_all(talk.ask(cache_prompt=True, max_tokens=1))
    d.until(lambda: snapshots(d), "the save of a chat that is nobody's")
    kept_turn(d, Talk(d, story="Every morning the harbour master counted the boats and wrote their names down. "))
    d.call("DELETE", "/api/state/conversations/talk")
    unload(d)
    (left,) = snapshots(d)
    assert d.call("DELETE", f"/api/state/snapshots/{left.stem}").status == 204
    d.stop()
    d = start("600MiB", model)
    assert snapshots(d) == []
    computes_all(talk.on(d).ask(max_tokens=1))


def test_a_deleted_response_leaves_nothing(start, model):
    """What the chain's other responses need is computed anew, and the chain goes on."""
    d = start("600MiB", model)
    body = {"model": "chat", "max_output_tokens": 8, "temperature": 0}
    first = d.call("POST", "/v1/responses", {**body, "input": Talk(d).messages[0]["content"]}).json
    d.until(lambda: snapshots(d), "the save after the first response")
    second = d.call("POST", "/v1/responses", {**body, "input": FLAGS, "previous_response_id": first["id"]}).json
    d.until(lambda: d.get("/api/state")["models"][0]["saves"] == 2, "the save after the second response")
    assert d.call("DELETE", f"/v1/responses/{second['id']}").status == 200
    assert snapshots(d) == []
    unload(d)
    assert snapshots(d) == []
    again = d.call("POST", "/v1/responses", {**body, "input": FLAGS, "previous_response_id": first["id"]})
    assert again.json["output"][0]["content"] == second["output"][0]["content"]
    assert again.headers["X-Pagein-Restored-Tokens"] == "0"


def test_a_removed_snapshot_is_not_saved_again(start, model):
    """Its slot is still live, and leaves without a save; the turn that goes on is saved."""
    d = start("600MiB", model)
    talk = Talk(d)
    before = talk.kept_turn()
    assert d.call("DELETE", "/api/state/snapshots").json["snapshots"] == 1
    unload(d)
    assert snapshots(d) == []
    talk.kept_turn(FLAGS)
    unload(d)
    goes_on(talk.turn("And the hour?"), before)


def test_a_prompt_that_was_cut_off_is_not_claimed(start, model):
    """The client left amid the prompt: what is said to be there is there, by the engine's own counters."""
    d = start("600MiB", model)
    talk = Talk(d, turns=68)
    left = Stream(d, "chat", messages=talk.messages, max_tokens=5, temperature=0, return_progress=True).begin()
    while (line := left.line()).startswith(b":"):
        pass
    progress = json.loads(line.removeprefix(b"data:"))["prompt_progress"]
    assert progress["processed"] < progress["total"], "it left amid the prompt"
    left.hang_up()
    answer = talk.ask()
    told = [row["reason"] for row in d.decisions("state", "chat")][-1]
    cached = answer.json["usage"]["prompt_tokens"] - counts(answer)[1]
    claimed = int(told.split()[0]) if "still there" in told else 0
    assert claimed <= cached + 1, told
    talk.check(answer)


@pytest.mark.parametrize("adopt", [False, True])
def test_nothing_crosses_from_key_to_key(start, model, adopt):
    """The same prompt under another key computes all of it, also in a worker that was taken over.

    What the first key had is listed to nobody else, and is still the first key's.
    """
    more = {"supervisor": "  adopt: true\n  adopt_wait: 60s\n"} if adopt else {}
    first = start("600MiB", model, key="first-key", **more)
    talk = Talk(first)
    kept_turn(first, talk)
    pid = first.model("chat")["pid"]
    first.stop(9)
    second = start("600MiB", model, key="second-key", **more)
    assert (second.model("chat")["pid"] == pid) == adopt
    answer = talk.on(second).ask(max_tokens=1)
    missed(answer, "empty")
    computes_all(answer)
    assert second.get("/api/state/conversations")["conversations"] == []
    assert second.call("DELETE", "/api/state/conversations/talk").status == 404
    second.headers = {}
    assert second.call("GET", "/api/state").status == 401
    second.headers = {"Authorization": "Bearer second-key"}
    second.stop()
    third = start("600MiB", model, key="first-key")
    assert counts(talk.on(third).ask(max_tokens=1))[0] > 100
    assert [one["name"] for one in third.get("/api/state/conversations")["conversations"]] == ["talk"]


def test_two_slots_and_a_deletion_amid_a_turn(start):
    """The turn has its answer; then nothing of it is left, and the other conversation goes on as if nothing was."""
    d = start("600MiB", chat(parallel=2))
    talk, other = Talk(d), Talk(d, story="Every morning the harbour master counted the boats. ")
    before = other.kept_turn()
    answering = d.later(lambda: d.call("POST", "/v1/chat/completions", talk.body(max_tokens=150), SESSION))
    kept = d.call("POST", "/v1/chat/completions", Talk(d, turns=0).body(), {"X-Pagein-Session": "short"})
    assert kept.status == 200
    assert d.call("DELETE", "/api/state/conversations/short").status == 204
    assert answering.result().status == 200
    assert d.call("DELETE", "/api/state/conversations/talk").status == 204
    unload(d)
    assert len(snapshots(d)) == 1
    goes_on(other.turn(FLAGS), before)
