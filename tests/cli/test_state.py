"""state: what is kept is listed, deleted, exported, verified and swept, against a real gateway and stores."""

from __future__ import annotations

import json
import stat

import pytest
from tests.kv.snapshots.build import damage, ids, keep


def test_state_lists_deletes_and_exports(pagein, gateway, tmp_path):
    """ls shows what is kept, export writes it for the owner only and over no other file, rm deletes it."""
    pagein("chat", "m", "-s", "talk", input="one\n")
    pagein("chat", "m", "-s", "more", input="two\n")
    rows = [line.split() for line in pagein("state", "ls").stdout.splitlines()]
    assert [row[:4] for row in rows[:3]] == [
        ["NAME", "KIND", "MODEL", "ITEMS"],
        ["more", "session", "m", "2"],
        ["talk", "session", "m", "2"],
    ]
    lines = [json.loads(line) for line in pagein("state", "export", "talk").stdout.splitlines()]
    assert [line["type"] for line in lines] == ["conversation", "entry", "entry"]
    file = tmp_path / "all.jsonl"
    assert pagein("state", "export", "-o", str(file)).exit_code == 0
    assert len(file.read_text().splitlines()) == 6
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert pagein("state", "export", "-o", str(file)).exit_code == 2
    assert pagein("state", "rm", "talk").exit_code == 0
    assert pagein("state", "rm", "talk").exit_code == 4
    assert pagein("state", "rm").exit_code == 2
    assert "talk" not in pagein("state", "ls").stdout
    pagein("state", "rm", "more")
    assert pagein("state", "ls").stdout.startswith("no conversation is kept\n")


def test_a_failed_export_leaves_no_file(pagein, gateway, tmp_path):
    """An export of what is not there writes nothing."""
    assert pagein("state", "export", "none", "-o", str(tmp_path / "x.jsonl")).exit_code == 4
    assert [path.name for path in tmp_path.iterdir() if "jsonl" in path.name] == []


@pytest.fixture
def snapshots(gateway):
    """The store, with a snapshot of a named model and one of an unnamed."""
    keep(gateway.snapshots, list(range(50)), 5000, facts={"model": "m"}, conversation="a", seconds_saved=12.5)
    keep(gateway.snapshots, list(range(100, 300)), 5000, conversation="b")
    return gateway.snapshots


def test_snapshots_are_listed_with_their_worth(pagein, gateway, snapshots):
    """Id, model or fingerprint, tokens, size, idle time and worth in 80 columns; below what they take of the cap."""
    long, short = snapshots.entries()
    out = pagein("state", "ls").stdout
    rows = [line.split() for line in out.splitlines()]
    assert ["SNAPSHOT", "MODEL", "TOKENS", "SIZE", "IDLE", "WORTH"] in rows
    assert [row[:3] for row in rows if row[:1] == [long.id]] == [[long.id, long.header.fingerprint.digest[:8], "200"]]
    (row,) = [row for row in rows if row[:1] == [short.id]]
    assert (row[1:3], row[-2:]) == (["m", "50"], ["12.5", "s"])
    assert out.splitlines()[-1].startswith("2 snapshots, ")
    assert max(map(len, out.splitlines())) <= 80
    told = json.loads(pagein("state", "ls", "--json").stdout)
    assert [one["id"] for one in told["snapshots"]] == [long.id, short.id]
    assert told["usage"]["snapshots"] == 2


def test_a_snapshot_is_deleted_by_its_id(pagein, gateway, snapshots):
    """What is no name of a conversation and looks like an id is a snapshot's; an unknown one is exit code 4."""
    long, short = snapshots.entries()
    assert pagein("state", "rm", short.id).exit_code == 0
    assert ids(snapshots) == {long.id}
    assert not short.path.exists()
    again = pagein("state", "rm", short.id)
    assert (again.exit_code, "no snapshot" in again.stderr) == (4, True)


def test_all_is_all(pagein, gateway, snapshots):
    """rm --all leaves no conversation and no snapshot, and is not mixed with names."""
    pagein("chat", "m", "-s", "talk", input="one\n")
    assert pagein("state", "rm", "talk", "--all").exit_code == 2
    result = pagein("state", "rm", "--all")
    assert result.stdout.startswith("deleted 1 conversation and 2 snapshots (")
    assert ids(snapshots) == set()
    assert pagein("state", "ls").stdout.startswith("no conversation is kept\n")
    assert pagein("state", "rm", "--all").stdout == "deleted 0 conversations and 0 snapshots (0 B)\n"


def test_verify_fails_where_one_is_damaged(pagein, gateway, snapshots):
    """All are read, or those named; damage is told, moved aside, and has an exit code of its own."""
    long, short = snapshots.entries()
    assert pagein("state", "verify").exit_code == 0
    damage(short)
    assert pagein("state", "verify", long.id).exit_code == 0
    result = pagein("state", "verify")
    assert result.exit_code == 14
    assert f"{short.id}: the snapshot is damaged" in result.stdout
    assert "1 of 2 snapshots" in result.stderr
    assert pagein("state", "verify").exit_code == 0
    assert pagein("state", "verify", short.id).exit_code == 4
    assert pagein("state", "verify", "talk").exit_code == 4
    damage(long)
    failed = pagein("state", "verify", "--json")
    assert (failed.exit_code, json.loads(failed.stdout)["checked"]) == (14, 1)


def test_gc_removes_what_is_idle(pagein, gateway, snapshots):
    """What was used lately stays; a time that is none, names and options of another verb are refused."""
    assert pagein("state", "gc", "--idle", "7d").stdout == "removed 0 snapshots (0 B)\n"
    assert json.loads(pagein("state", "gc", "--idle", "0s", "--json").stdout)["snapshots"] == 2
    assert pagein("state", "gc", "--idle", "soon").exit_code == 2
    assert pagein("state", "gc", "name").exit_code == 2
    assert pagein("state", "ls", "--idle", "7d").exit_code == 2
    assert pagein("state", "gc", "--all").exit_code == 2


@pytest.mark.parametrize("gateway", ["off"], indirect=True)
@pytest.mark.parametrize("words", [("ls",), ("rm", "--all"), ("rm", "x"), ("verify",), ("gc",), ("export",)])
def test_switched_off(pagein, gateway, words):
    """Each verb says that nothing is kept here."""
    result = pagein("state", *words)
    assert (result.exit_code, "switched off" in result.stderr) == (1, True)


@pytest.fixture
def blocks(gateway, monkeypatch):
    """A store of KV blocks that no worker has, of which each check reads one block; returns what damages one."""
    pytest.importorskip("xxhash")
    from tests.daemon.test_idle_store import keep as put
    from tests.daemon.test_idle_store import spoil

    from pagein.kv.disk import checking

    monkeypatch.setattr(checking, "SECONDS", 0.0)
    folder = gateway.folder / "snapshots" / "b" / "m"
    store = checking_store(folder)
    put(store, "c", "t", 0)
    put(store, "d", "t", 1000)
    store.close()
    return lambda: spoil(folder, 2)


def checking_store(folder):
    """Open a store."""
    from pagein.kv.disk import BlockStore

    return BlockStore.open(folder, cap=1 << 26, floor=0)


def test_verify_reads_kv_blocks(pagein, gateway, snapshots, blocks):
    """All of every model's store, in as many parts as it takes; damage is told, dropped, and fails."""
    lines = pagein("state", "verify").stdout.splitlines()
    assert lines[0].startswith("read 2 snapshots (")
    assert lines[1] == "m: read 4 KV blocks (32 KiB), 0 with a fault"
    blocks()
    result = pagein("state", "verify")
    assert result.exit_code == 14
    assert "1 of 4 KV blocks cannot be used" in result.stderr
    assert "m/" in result.stdout
    assert "is not what was written" in result.stdout
    told = json.loads(pagein("state", "verify", "--json").stdout)
    assert (told["checked"], told["blocks"]["m"]["checked"], told["blocks"]["m"]["faults"]) == (2, 3, [])
    assert "KV blocks" not in pagein("state", "verify", snapshots.entries()[0].id).stdout


def test_verify_says_who_has_a_store(pagein, gateway, blocks):
    """A worker that does not answer for its blocks holds them: they are not read, and that is said."""
    held = checking_store(gateway.folder / "snapshots" / "b" / "m")
    result = pagein("state", "verify")
    assert result.exit_code == 14
    assert "m: the KV blocks in" in result.stdout
    assert "in use by process" in result.stdout
    assert "the KV blocks of 1 of 1 models cannot be used" in result.stderr
    held.close()
    assert pagein("state", "verify").exit_code == 0
