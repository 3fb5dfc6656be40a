"""Before a request: what is restored, what is not and why, and that no fault of it ever reaches the request."""

import asyncio
import json

import pytest

from pagein.config.schema import Settings
from pagein.daemon import keeper as module
from pagein.daemon import restoring
from pagein.daemon.keeper import Keeper
from pagein.errors import SlotBusy, SlotFault, SlotLost, SlotRefused
from pagein.gateway.ports import Prepared
from pagein.kv.snapshots.offer import Offer
from pagein.kv.snapshots.reuse import Counted

from .slots import COMPLETION, OTHER, TALK, World, faults_in, slot_bytes

FAULTS = [SlotBusy("busy"), SlotRefused("no"), SlotLost("gone"), SlotFault("odd")]


@pytest.fixture
async def world(tmp_path, monkeypatch, caplog):
    """A keeper with one worker; at the end nothing of it is left, and nothing failed unseen."""
    made = World(tmp_path, monkeypatch)
    await made.begin()
    yield made
    await made.close()
    assert not faults_in(caplog)


def body_of(prepared):
    return json.loads(prepared.body)


async def test_a_conversation_comes_back_after_its_eviction(world):
    """The next turn computes what is new; the engine's counters prove it."""
    first = await world.turn(TALK, "I see.")
    assert (first.restored, first.kind) == (0, "empty")
    await world.evict()
    again = await world.prepare(TALK + "I see. And then?")
    held = len(TALK) + len("I see.") - 1
    assert (again.restored, again.miss, again.kind) == (held, None, "")
    assert again.reason.startswith(f"restored {held} of {len(TALK) + 16} tokens (")
    assert again.seconds is not None
    assert not list(world.engine.folder.iterdir()), "what the engine has read is gone"
    counted = world.engine.answers(TALK + "I see. And then?", again.slot, "x")
    assert world.keeper.account("m", again, counted) is None
    counters = world.keeper.counters["m"]
    assert (counters.restores, counters.restored, counters.saves) == (1, held, 1)
    assert counters.computed == len(TALK) + 16 - held + len(TALK)


async def test_what_is_still_there_is_not_restored(world):
    """While the model stays, its own cache is used, and that is no miss."""
    await world.turn(TALK, "I see.")
    again = await world.turn(TALK + "I see. And then?")
    assert (again.restored, again.miss) == (0, None)
    assert again.reason.endswith("tokens are still there")
    assert world.engine.calls["restore"] == 0


async def _other_prompt(world):
    return OTHER


async def _other_settings(world):
    world.kv_type = "q8_0"
    await world.evict()
    return TALK


async def _edited(world):
    world.attention = "window"
    await world.evict()
    await world.turn(OTHER, "I see.")
    await world.evict()
    return OTHER[:-2] + ", and how?"


async def _damaged(world):
    (entry,) = world.keeper.entries()
    data = bytearray(entry.path.read_bytes())
    data[-70] ^= 1
    entry.path.write_bytes(data)
    return TALK


async def _gone(world):
    (entry,) = world.keeper.entries()
    entry.path.unlink()
    return TALK


async def _unready(world):
    world.weights.unlink()
    await world.evict()
    return TALK


async def _media(world):
    return ["a picture", 7]


async def _fast_engine(world):
    short = Prepared(b"", tokens=[1])
    world.keeper.account("m", short, Counted(0, 100_000, prompt_seconds=0.001))
    return TALK


async def _refusing(world):
    world.engine.faults["restore"] = SlotRefused("no")
    return TALK


async def _other_tenant(world):
    await world.keeper.end("m")
    await world.keeper.close()
    world.keeper = world.opened(state={"salt": "another tenant", "disk": 100_000_000})
    await world.begin()
    return TALK


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("tokens", _other_prompt, "begins with"),
        ("settings", _other_settings, "KV type of K: q8_0, the snapshot has f16"),
        ("uncut", _edited, "cannot be cut back"),
        ("damaged", _damaged, "damaged"),
        ("gone", _gone, "left the store"),
        ("unready", _unready, "digest"),
        ("media", _media, "no list of tokens"),
        ("slower", _fast_engine, "not worth it: restoring"),
        ("failed", _refusing, "no"),
        ("empty", _other_tenant, "no snapshot is stored"),
    ],
)
async def test_each_miss_has_its_kind_and_its_reason(world, kind, change, words):
    """Nothing is restored, it is said why, counted, and the request goes on as it came."""
    await world.turn(TALK, "I see.")
    await world.evict()
    prompt = await change(world)
    before = world.misses.get(kind, 0)
    missed = await world.prepare(prompt)
    assert (missed.restored, missed.kind) == (0, kind)
    assert words in missed.miss
    assert (missed.tokens is None) == (kind == "media"), "its slot is known, and is given back"
    assert world.misses[kind] == before + 1
    assert body_of(missed) == {"model": "m", "prompt": prompt}
    world.keeper.account("m", missed, None)


async def test_a_damaged_snapshot_is_asked_for_once(world):
    """It was moved aside, so the next miss is that nothing is stored."""
    await world.turn(TALK, "I see.")
    await world.evict()
    await _damaged(world)
    damaged = await world.prepare(TALK)
    world.keeper.forget("m")
    await world.begin()
    again = await world.prepare(TALK)
    assert (damaged.kind, again.kind) == ("damaged", "empty")
    world.keeper.account("m", again, None)


async def test_a_snapshot_of_other_tokens_never_reaches_the_engine(world):
    """Whole and verified, but the engine's own list of tokens in it is not the one that the snapshot names."""
    await world.turn(TALK, "I see.")
    (entry,) = world.keeper.entries()
    payload = world.folder / "other.kv"
    payload.write_bytes(slot_bytes(*map(ord, OTHER * 2)))
    tokens = [ord(letter) for letter in TALK * 2]
    world.keeper.store.put(Offer(entry.header.fingerprint, tokens, payload.stat().st_size), payload)
    await world.evict()
    missed = await world.prepare(TALK * 2)
    assert (missed.kind, world.engine.calls["restore"]) == ("damaged", 0)
    assert "other tokens" in missed.miss
    world.keeper.account("m", missed, None)


async def test_a_restore_that_the_engine_did_not_use_is_a_miss(world):
    """Its own counters decide: what it computed anew was not reused."""
    await world.turn(TALK, "I see.")
    await world.evict()
    again = await world.prepare(TALK + "I see. And then?")
    assert again.restored
    unused = world.keeper.account("m", again, Counted(3, 70))
    assert unused == f"the engine used 3 of {again.restored} restored tokens"
    counters = world.keeper.counters["m"]
    assert (counters.restores, counters.restored, counters.misses["unused"]) == (0, 0, 1)


async def test_without_counters_nothing_is_claimed(world):
    """A client that left, or an engine that tells nothing: neither a restore nor a miss is counted."""
    await world.turn(TALK, "I see.")
    await world.evict()
    again = await world.prepare(TALK + "I see. And then?")
    assert again.restored
    assert world.keeper.account("m", again, None) is None
    assert (world.keeper.counters["m"].restores, world.misses.get("unused")) == (0, None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
@pytest.mark.parametrize("call", ["tokens_of", "look", "save", "restore"])
async def test_no_fault_of_the_engine_fails_a_request(world, call, fault):
    """Whatever call fails, and how: the request goes on, and its slot is free again after it."""
    world.clock.quiet.clear()  # nothing is saved in between, so that the next prompt displaces it
    await world.turn(TALK, "I see.")
    world.engine.faults[call] = fault
    for prompt in (OTHER, TALK):
        prepared = await world.prepare(prompt)
        assert body_of(prepared) == {"model": "m", "prompt": prompt}
        assert prepared.restored == 0
        world.keeper.account("m", prepared, None)
    world.engine.faults.clear()
    assert (await world.turn(OTHER)).slot == 0


async def test_slots_in_flight_are_never_given_twice(world):
    """Requests at the same moment get slots of their own; one too many goes to whichever the engine chooses."""
    world.slots = 2
    await world.evict()
    first, second, third = await asyncio.gather(*(world.prepare(TALK) for _ in range(3)))
    assert {first.slot, second.slot} == {0, 1}
    assert (third.slot, third.kind) == (None, "busy")
    assert "id_slot" not in body_of(third)
    world.keeper.account("m", second, None)
    again = await world.prepare(TALK)
    assert again.slot == second.slot
    for one in (first, again, third):
        world.keeper.account("m", one, None)


async def test_a_client_that_leaves_gives_its_slot_back(world):
    """A request that is cancelled while it is prepared leaves no slot taken."""
    await world.turn(TALK, "I see.")
    await world.evict()
    world.engine.gates["restore"] = asyncio.Event()
    preparing = asyncio.ensure_future(world.prepare(TALK))
    await world.until("restore")
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    world.engine.gates.clear()
    assert (await world.turn(TALK)).slot == 0


async def test_an_eviction_during_a_restore_ends_both(world, monkeypatch):
    """The model leaves after the bound, and the request that came too late is a miss, not an error."""
    monkeypatch.setattr(module, "SAVE_BOUND", 0.02)
    await world.turn(TALK, "I see.")
    await world.evict()
    world.engine.gates["restore"] = gate = asyncio.Event()
    preparing = asyncio.ensure_future(world.prepare(TALK))
    await world.until("restore")
    async with asyncio.timeout(10):
        await world.keeper.end("m")
    gate.set()
    prepared = await preparing
    assert (prepared.restored, prepared.kind) == (0, "failed")
    assert body_of(prepared) == {"model": "m", "prompt": TALK}
    world.keeper.account("m", prepared, None)
    assert [entry.header.tokens for entry in world.keeper.entries()] == [len(TALK) + 5]


async def test_a_request_during_a_save_waits_for_it(world):
    """Both are done, one after the other, and nothing is lost."""
    world.engine.gates["save"] = gate = asyncio.Event()
    await world.turn(TALK, "I see.")
    await world.until("save")
    preparing = asyncio.ensure_future(world.prepare(OTHER))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not preparing.done()
    gate.set()
    prepared = await preparing
    world.keeper.account("m", prepared, world.engine.answers(OTHER, 0, ""))
    await world.settle()
    assert {entry.header.tokens for entry in world.keeper.entries()} == {len(TALK) + 5, len(OTHER)}


@pytest.mark.parametrize("slots", [1, 2])
async def test_no_other_byte_of_a_body_changes(world, slots):
    """With several slots the slot is named; else, and besides, the bytes are those that came."""
    world.slots = slots
    await world.evict()
    raw = ('{ "prompt" : "' + TALK + 'é \\u00e9", "max_tokens":1e1 ,"x": [1.50, null]}').encode()
    prepared = await world.keeper.prepare("m", COMPLETION, raw)
    named = f'"id_slot":{prepared.slot},'.encode() if slots > 1 else b""
    assert prepared.body == raw.replace(b"{", b"{" + named, 1)
    world.keeper.account("m", prepared, None)


@pytest.mark.parametrize("given", [0, 1, -1, 99, "x", None])
async def test_a_client_does_not_choose_its_slot(world, given):
    """Another's conversation may be there: the slot is ours to name."""
    world.slots = 2
    await world.evict()
    prepared = await world.prepare(TALK, id_slot=given)
    assert body_of(prepared) == {"model": "m", "prompt": TALK, "id_slot": prepared.slot}
    world.keeper.account("m", prepared, None)


async def test_a_request_may_decline(world):
    """`cache_prompt: false` is the client's to say: nothing is restored for it."""
    await world.turn(TALK, "I see.")
    await world.evict()
    prepared = await world.prepare(TALK, cache_prompt=False)
    assert (prepared.restored, world.engine.calls["restore"]) == (0, 0)
    assert body_of(prepared) == {"model": "m", "prompt": TALK, "cache_prompt": False}
    world.keeper.account("m", prepared, Counted(0, len(TALK)))


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("other", COMPLETION, b'{"prompt": "x"}'),
        ("m", "/v1/embeddings", b'{"prompt": "x"}'),
        ("m", COMPLETION, b"[1]"),
        ("m", COMPLETION, b'"x"'),
        ("m", COMPLETION, b"{"),
        ("m", COMPLETION, b"\xff\xfe"),
    ],
)
async def test_what_is_not_kept_passes(world, model, path, body):
    """Other models and paths, and bodies that are the engine's to refuse."""
    prepared = await world.keeper.prepare(model, path, body)
    assert (prepared.body, prepared.slot, prepared.restored) == (body, None, 0)
    assert sum(world.engine.calls.values()) == 0


async def test_a_slow_engine_holds_nobody_up_for_ever(world, monkeypatch):
    """A restore that is not done within its bound is a miss."""
    monkeypatch.setattr(restoring, "RESTORE_BOUND", 0.05)
    await world.turn(TALK, "I see.")
    await world.evict()
    world.engine.faults["restore"] = SlotBusy("not done within 50 ms")
    missed = await world.prepare(TALK)
    assert (missed.kind, missed.miss) == ("failed", "not done within 50 ms")
    world.keeper.account("m", missed, None)


async def test_switched_off_there_is_no_keeper(tmp_path):
    """Not even a folder is made."""
    settings = Settings.model_validate({"state_dir": str(tmp_path), "models": {}, "state": "off"})
    assert Keeper.open(tmp_path / "kv", settings) is None
    assert not (tmp_path / "kv").exists()
