"""Saved conversations as the operator sees and removes them: on a real store."""

from types import SimpleNamespace

import pytest

from pagein.daemon.idle_store import Busy
from pagein.daemon.kept import Counters
from pagein.errors import BadAnswer, ModelNotFound, SnapshotNotFound
from pagein.gateway.ports import Prepared
from pagein.gateway.snapshot_ports import Fault
from pagein.kv.snapshots.reuse import Counted
from tests.kv.snapshots.build import FINGERPRINT, damage, ids, keep
from tests.saved import RETAIN, saved_in

SHORT, LONG, OTHER = list(range(50)), list(range(100, 300)), list(range(400, 460))


@pytest.fixture
def kept(tmp_path):
    """Two snapshots: a cheap one of the model ``m``, and a dear one."""
    saved, store, clock = saved_in(
        tmp_path / "s", "m", m=Counters(300, 50, 400, 2, 5, {"empty": 3}), gone=Counters(1, 1, 1)
    )
    keep(store, SHORT, 5000, facts={"model": "m"}, conversation="a")
    keep(store, LONG, 5000, seconds_saved=9.0, conversation="b")
    return saved, store, clock


async def test_all_of_a_snapshot_is_shown_but_what_was_said(kept):
    """Model, fingerprint, tokens, bytes, idle time and worth; assumed where it was not measured."""
    saved, _, clock = kept
    clock.now += 100
    view = await saved.view()
    long, short = view.snapshots
    assert (short.model, short.tokens, short.kv_type, short.context) == ("m", 50, "f16/f16", 4096)
    assert (long.model, long.worth_seconds, short.worth_seconds) == (None, 9.0, 0.1)
    assert (short.fingerprint, short.weights) == (FINGERPRINT.digest[:12], "a" * 12)
    assert long.idle_seconds == pytest.approx(100, abs=1)
    assert (short.leaves, long.leaves) == (1, 2), "the one that is worth less leaves first"
    assert (view.usage.snapshots, view.usage.cap) == (2, 1_000_000)
    assert view.usage.bytes == short.bytes + long.bytes
    assert FINGERPRINT.tenant not in repr(view)


async def test_reuse_adds_up_to_the_prompts(kept):
    """What was restored counts once; a model that is not configured any more is left out."""
    (one,) = kept[0].reuse()
    assert (one.model, one.restored, one.cached, one.computed) == ("m", 300, 100, 50)
    assert (one.restores, one.saves, one.misses) == (2, 5, {"empty": 3})


async def test_snapshots_are_removed_by_id_or_all(kept):
    """An unknown id removes nothing, not even the known ones beside it."""
    saved, store, _ = kept
    long, short = (entry.id for entry in store.entries())
    with pytest.raises(SnapshotNotFound):
        await saved.remove([short, "0" * 24])
    assert ids(store) == {long, short}
    assert (await saved.remove([short])).snapshots == 1
    assert ids(store) == {long}
    assert (await saved.remove(None)).snapshots == 1
    assert ids(store) == set()


async def test_verifying_tells_what_is_damaged_and_moves_it_aside(kept):
    """One or all are read; a damaged one has its reason, and is no longer among the snapshots."""
    saved, store, _ = kept
    long, short = store.entries()
    damage(short)
    assert (await saved.verify(long.id)).faults == []
    found = await saved.verify(None)
    (fault,) = found.faults
    assert (found.checked, fault.id, fault.kind) == (2, short.id, "damaged")
    assert found.bytes == long.bytes + short.bytes
    assert ids(store) == {long.id}
    assert (await saved.view()).usage.damaged_bytes == short.bytes
    with pytest.raises(SnapshotNotFound):
        await saved.verify(short.id)


async def test_garbage_is_what_was_not_used_for_long(kept):
    """Without a time it is `state.retain`."""
    saved, store, clock = kept
    clock.now += 100
    keep(store, OTHER, conversation="c")
    assert (await saved.gc(200.0)).snapshots == 0
    assert (await saved.gc(50.0)).snapshots == 2
    clock.now += RETAIN - 60
    assert (await saved.gc(None)).snapshots == 0
    clock.now += 120
    assert (await saved.gc(None)).snapshots == 1


@pytest.mark.parametrize(
    ("prepared", "unused", "told", "data"),
    [
        (
            Prepared(b"", 0, [1], 62, 0.05, "restored 62 of 73 tokens (1.4 MiB) in 50 ms"),
            None,
            "restored 62 of 73 tokens (1.4 MiB) in 50 ms; the engine computed 11 of 73 tokens",
            {"restored": 62, "miss": ""},
        ),
        (
            Prepared(b"", 0, [1], 62, 0.05, "restored 62 of 73 tokens (1.4 MiB) in 50 ms"),
            "the engine used 3 of 62 restored tokens",
            "the engine used 3 of 62 restored tokens; the engine computed 11 of 73 tokens",
            {"restored": 0, "miss": "unused"},
        ),
        (
            Prepared(b"", 0, [1], miss="no snapshot is stored for this model with these settings", kind="empty"),
            None,
            "nothing restored: no snapshot is stored for this model with these settings; "
            "the engine computed 11 of 73 tokens",
            {"restored": 0, "miss": "empty"},
        ),
    ],
)
async def test_explain_tells_what_a_request_reused(make_lab, prepared, unused, told, data):
    """One decision per request, in words and numbers; a restore that was not used is no restore."""
    lab = make_lab(a={})
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.child("a").become_ready()
    lease = await acquiring
    lab.desk._keeper = SimpleNamespace(account=lambda *_: unused)
    lab.desk.account(lease, Prepared(b""), None)
    lab.desk.account(lease, prepared, Counted(62, 11))
    (decision,) = [one for one in lab.desk.decisions("a") if one.kind == "state"]
    assert (decision.reason, decision.data, decision.request_id) == (told, data, lease.request_id)
    lab.desk.release(lease, 200, 0.1)


async def test_blocks_are_verified_part_by_part(kept, monkeypatch):
    """What is damaged is a fault by model and block; a store that cannot be read now is one that says why."""
    saved, _, _ = kept
    answers = [
        {"checked": 3, "bytes": 30, "faults": [["ab12", "piece 0 of 2"]], "left": 10, "next": "1-2-3"},
        Busy("in use by process 7"),
        BadAnswer("it answered 500"),
        ModelNotFound("x", []),
    ]

    async def check(model, after):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(saved._keeper.blocks, "check", check)
    found = await saved.verify_blocks("m", None)
    assert (found.checked, found.bytes, found.left, found.next) == (3, 30, 10, "1-2-3")
    assert found.faults == [Fault("m/ab12", "damaged", "piece 0 of 2")]
    for why in ("in use by process 7", "it answered 500"):
        assert (await saved.verify_blocks("m", None)).faults == [Fault("m", "failed", why)]
    with pytest.raises(ModelNotFound):
        await saved.verify_blocks("x", None)
