"""The next turn computes only what is new: the engine over one pool of KV blocks, on tiny models made here."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.protocol import (
    BLOCKS_WAY,
    KV_CONVERSATION_HEADER,
    KV_PATH,
    KV_TENANT_HEADER,
    SLEEP_PATH,
    WAKE_PATH,
)
from tests.engines.local.conftest import Reply, request
from tests.engines.writing.test_transformers import COMPLETIONS, EMBEDDINGS, allow, stream

pytestmark = pytest.mark.torch

CAP = 256 * 1024**2
STORY = "The keeper wrote down every ship that passed, its colours and its flag. "


@pytest.fixture
def kept(run: Any, tmp_path: Path) -> Any:
    """Start the engine with a folder for blocks."""

    def act(**fields: Any) -> Any:
        given = {"kind": "plain", "context": 512, "kv_dir": str(tmp_path / "blocks"), "kv_disk": CAP} | fields
        kv = given.get("options", {}).get("kv", {})
        given["options"] = {"kv": {"worth": False, **kv}}  # a tiny model computes faster than a disk is read
        return run(**given)

    return act


class Talk:
    """A client that sends its whole history each turn, as raw text: every byte is a token."""

    def __init__(self, running: Any, text: str, tenant: str = "t", conversation: str | None = None) -> None:
        self.running, self.text = running, text
        self.headers = {KV_TENANT_HEADER: tenant}
        if conversation is not None:
            self.headers[KV_CONVERSATION_HEADER] = conversation

    async def turn(self, more: str = "", tokens: int = 12, **body: Any) -> dict[str, Any]:
        """Say something more; returns the engine's counters, and takes the answer into the history."""
        self.text += more
        asked = {"prompt": self.text, "max_tokens": tokens, "temperature": 0, **body}
        reply = await request(self.running.endpoint, "POST", COMPLETIONS, json=asked, headers=self.headers)
        assert reply.status == 200, reply.body
        self.text += reply.body["choices"][0]["text"]
        return reply.body["timings"]


async def pool_of(running: Any) -> dict[str, Any]:
    """The pool as the worker reports it."""
    return (await request(running.endpoint, "GET", KV_PATH)).body


def used(report: dict[str, Any]) -> int:
    """Bytes on the device; nothing may be leaked."""
    assert report["leaks"] == []
    return report["device"]["used"]


async def wish(running: Any, **body: Any) -> Reply:
    """What the daemon tells it."""
    return await request(running.endpoint, "POST", KV_PATH, json=body)


async def test_the_next_turn_computes_what_is_new(kept):
    """All but the last token of the turn before is there; the text is that of a run that reuses nothing."""
    running = kept()
    assert running.started.state.way == BLOCKS_WAY
    talk, plain = Talk(running, STORY), Talk(running, STORY)
    first = await talk.turn()
    assert (first["cache_n"], first["prompt_n"], first["restored_n"]) == (0, len(STORY), 0)
    assert first["miss"]
    await plain.turn(cache_prompt=False)
    assert talk.text == plain.text
    for _ in range(3):
        before = len(talk.text)
        told = await talk.turn(" And then?")
        assert told["cache_n"] >= before - 1
        assert told["cache_n"] + told["prompt_n"] == before + len(" And then?")
        alone = await plain.turn(" And then?", cache_prompt=False)
        assert (alone["cache_n"], alone["miss"].partition(":")[0]) == (0, "unwanted")
        assert talk.text == plain.text
    same = await Talk(running, STORY).turn()
    assert same["cache_n"] == len(STORY) - 1, "never all of a prompt: its last token is computed"


async def test_what_begins_otherwise_is_reused_as_far_as_it_is_the_same(kept):
    """Another conversation with the same beginning; nothing of another text is ever answered."""
    running = kept()
    await Talk(running, STORY * 3).turn()
    other = STORY * 2 + "Nobody saw them."
    told = await Talk(running, other).turn()
    assert len(STORY * 2) - 64 <= told["cache_n"] <= len(STORY * 2)
    talk, plain = Talk(running, other), Talk(running, other)
    await talk.turn()
    await plain.turn(cache_prompt=False)
    assert talk.text == plain.text


@pytest.mark.parametrize(("kind", "streamed"), [("plain", False), ("plain", True), ("windows", False)])
async def test_many_conversations_come_back_from_the_disk(kept, kind, streamed):
    """Twelve of them through room for two, turn by turn: each goes on as one that never left, whole or streamed."""
    running, free = kept(kind=kind, parallel=1), kept(kind=kind, parallel=8, kv_dir=None)
    if streamed:
        await stream(running)
    talks = [Talk(running, f"{number} {STORY * 3}", conversation=f"c{number}") for number in range(12)]
    others = [Talk(free, talk.text, conversation=f"c{number}") for number, talk in enumerate(talks)]
    restored = 0
    for more in ("", " Who?", " Why?"):
        for talk, other in zip(talks, others, strict=True):
            before = len(talk.text)
            told = await talk.turn(more)
            await other.turn(more)
            assert talk.text == other.text
            assert not more or told["cache_n"] >= before - 1, told
            restored += told["restored_n"]
    assert restored > 10 * len(STORY)


async def test_conversations_survive_sleep_and_the_end_of_the_worker(kept):
    """What was said before is on the disk in both cases, and is read, not computed."""
    running = kept()
    talk = Talk(running, STORY * 2, conversation="c")
    await talk.turn()
    assert (await request(running.endpoint, "POST", SLEEP_PATH)).status == 200
    assert used(await pool_of(running)) == 0
    assert (await request(running.endpoint, "POST", WAKE_PATH)).status == 200
    before = len(talk.text)
    assert (await talk.turn(" And?"))["restored_n"] >= before - 1
    running.engine.stop()
    talk.running = kept()
    before = len(talk.text)
    assert (await talk.turn(" And?"))["restored_n"] >= before - 1


async def test_tenants_share_nothing(kept):
    """Neither while it is in memory nor from the disk; the same tenant shares all of it."""
    running = kept()
    for _ in range(2):
        await Talk(running, STORY * 2, tenant="one").turn()
        assert (await Talk(running, STORY * 2, tenant=f"two{_}").turn())["cache_n"] == 0
        assert (await Talk(running, STORY * 2, tenant="one").turn())["cache_n"] == len(STORY * 2) - 1
        await request(running.endpoint, "POST", SLEEP_PATH)
        await request(running.endpoint, "POST", WAKE_PATH)


async def test_what_is_forgotten_is_gone(kept):
    """From memory and disk, for its tenant only; also all at once."""
    running = kept()
    for number in range(2):
        await Talk(running, STORY * 2, conversation=f"c{number}", tenant=f"t{number}").turn()
    assert (await wish(running, forget=[["t0", "c0"], ["t0", "c1"]])).status == 200
    assert (await Talk(running, STORY * 2, tenant="t0").turn())["cache_n"] == 0
    assert (await Talk(running, STORY * 2, tenant="t1").turn())["cache_n"] == len(STORY * 2) - 1
    assert (await wish(running, all=True)).status == 200
    assert (await Talk(running, STORY * 2, tenant="t1").turn())["cache_n"] == 0
    for odd in ({}, {"forget": "c0"}, {"forget": [["c0"]]}, {"idle": -1}, {"nothing": 1}):
        assert (await wish(running, **odd)).status == 400


async def test_texts_that_outgrow_the_pool_together_are_each_as_if_alone(kept):
    """Room for one and a half of them: some are parked on the disk and come back, and not a token changes."""
    running = kept(context=256, parallel=6)
    wishes = [(f"{number} {STORY}", {"temperature": 1.0, "seed": number}) for number in range(6)]
    alone = []
    for text, more in wishes:
        talk = Talk(running, text)
        await talk.turn(tokens=150, cache_prompt=False, **more)
        alone.append(talk.text)
    tight = kept(context=256, parallel=6, options={"kv": {"memory": running.plan.kv // 6 * 2}}, kv_dir=None)
    parking = kept(
        context=256,
        parallel=6,
        options={"kv": {"memory": running.plan.kv // 6 * 2}},
        kv_dir=str(Path(running.engine.spec.kv_dir) / "other"),
    )
    for engine in (tight, parking):
        talks = [Talk(engine, text) for text, _ in wishes]
        await asyncio.gather(*(talk.turn(tokens=150, **more) for talk, (_, more) in zip(talks, wishes, strict=True)))
        assert [talk.text for talk in talks] == alone
    assert (await pool_of(parking))["parked"] > 0
    assert (await pool_of(tight))["parked"] == 0, "without a tier below nobody begins who could not end"


async def test_an_allowance_below_all_texts_at_once_leaves_kv_for_fewer(kept):
    """While three write: two are parked, all end as if alone, and with more bytes there is KV for three again."""
    running = kept(context=256, parallel=3)
    wishes = [(f"{number} {STORY}", {"temperature": 1.0, "seed": number}) for number in range(3)]
    alone, least = [], (await allow(running, 1000)).error["need_bytes"]
    for text, more in wishes:
        talk = Talk(running, text)
        await talk.turn(tokens=150, cache_prompt=False, **more)
        alone.append(talk.text)
    whole = (await pool_of(running))["device"]["budget"]
    talks = [Talk(running, text) for text, _ in wishes]
    both = zip(talks, wishes, strict=True)
    writing = [asyncio.create_task(talk.turn(tokens=150, **more)) for talk, (_, more) in both]
    while (await pool_of(running))["places"].get("active", 0) < 3:
        assert not all(one.done() for one in writing)
    reply = await allow(running, least)
    assert (reply.status, reply.body["total"] <= least) == (200, True), reply.body
    assert (await pool_of(running))["device"]["budget"] == whole // 3
    await asyncio.gather(*writing)
    assert [talk.text for talk in talks] == alone
    assert (await allow(running, 1 << 32)).status == 200
    assert (await pool_of(running))["device"]["budget"] == whole


async def test_vectors_take_blocks_and_give_them_back(kept):
    """They reuse nothing and leave nothing; texts beside them are as ever."""
    running = kept(parallel=2)
    texts = [STORY * n for n in (1, 2, 3, 1)]
    body = {"input": texts}
    alone = [
        (await request(running.endpoint, "POST", EMBEDDINGS, json={"input": text})).body["data"][0]["embedding"]
        for text in texts
    ]
    talk, plain = Talk(running, STORY), Talk(running, STORY)
    await plain.turn(tokens=40, cache_prompt=False)
    reply, _ = await asyncio.gather(request(running.endpoint, "POST", EMBEDDINGS, json=body), talk.turn(tokens=40))
    assert [one["embedding"] for one in reply.body["data"]] == alone
    assert talk.text == plain.text
    await wish(running, all=True)
    assert used(await pool_of(running)) == 0


async def test_an_encoder_reuses_nothing(kept):
    """What its decoder keeps depends on the encoder's input; it is right, and its blocks come back."""
    running = kept(kind="t5", context=128)
    texts = []
    for _ in range(2):
        talk = Talk(running, STORY, conversation="c")
        told = await talk.turn(tokens=20)
        assert (told["cache_n"], told["miss"].partition(":")[0]) == (0, "encoder")
        texts.append(talk.text)
    assert texts[0] == texts[1]
    assert used(await pool_of(running)) == 0


def test_a_thousand_cancels_on_a_model_leave_no_block(kept):
    """Called off at any stop, waiting, computing or parked: every block comes back, and the next text is right."""
    running = kept(context=256, parallel=4, options={"kv": {"memory": 2**20}})
    engine = running.engine
    chance = random.Random(11)
    writer = engine._desk._writer
    from pagein.engines.local.sampling import Sampling
    from pagein.engines.local.writer import Ending, Prompt, Whose

    seats: list[Any] = []
    ended: list[Any] = []

    def begin(number: int) -> None:
        text = tuple(chance.randrange(256) for _ in range(chance.randint(1, 150)))
        whose = Whose("t", chance.choice([None, "a", "b"]), chance.random() < 0.9)
        sampling = Sampling(max_tokens=chance.randint(1, 40), temperature=0)
        heard = threading.Event()

        def deliver(item: Any) -> None:
            ended.append(item)
            heard.set()

        seats.append(writer.write(Prompt(text), sampling, deliver, whose))
        if number % 5 == 0:  # so that others are called off while they compute
            heard.wait(60)

    for number in range(1000):
        begin(number)
        if len(seats) > 4:
            seats.pop(chance.randrange(len(seats)))()
    for call_off in seats:
        call_off()
    wanted: list[Any] = []
    done = asyncio.Event()

    async def last() -> None:
        loop = asyncio.get_running_loop()

        def deliver(item: Any) -> None:
            wanted.append(item)
            if not isinstance(item, str):
                loop.call_soon_threadsafe(done.set)

        writer.write(Prompt(tuple(b"abc")), Sampling(max_tokens=5, temperature=0), deliver, Whose("u"))
        await asyncio.wait_for(done.wait(), 120)

    asyncio.run(last())
    assert isinstance(wanted[-1], Ending)
    assert not [one for one in ended if isinstance(one, Exception)]
    assert not engine._conversations.turns._running
    report = engine._conversations.report()
    assert report["leaks"] == []
    assert report["turns"] > 200


async def test_the_blocks_on_the_disk_are_read_through(kept, tmp_path):
    """The worker that has the store answers for it: part by part, what is damaged is told and dropped."""
    running = kept()
    await Talk(running, STORY * 3, conversation="c").turn()
    await wish(running, forget=[])  # between two passes
    async with asyncio.timeout(60):
        while (await pool_of(running))["writing"]:
            await asyncio.sleep(0)
    told = (await wish(running, check="")).body
    assert (told["checked"] > 2, told["faults"], told["left"], told["next"]) == (True, [], 0, None)
    with open(next((tmp_path / "blocks").glob("*.slots")), "r+b") as file:
        file.write(b"damage")
    spoiled = (await wish(running, check="")).body
    assert len(spoiled["faults"]) == 1
    assert (await wish(running, check="")).body["checked"] == told["checked"] - 1
    assert (await wish(running, check="nowhere")).status == 400
