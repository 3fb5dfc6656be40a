"""The plan of streamed weights: within its memory, never worse with more of it, and honest where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagein.errors import DoesNotFit
from pagein.weights.planning.plan import Experts, HeadPlace, Needs, Plan, Unit, make_plan, spread

MIB = 1024**2


def needs_of(blocks: int = 24, block: int = 90 * MIB, **changes: object) -> Needs:
    """Return a plausible decoder: 24 blocks of 90 MiB, a head of its own, 2048 tokens of context."""
    usual = Needs(
        runtime=350 * MIB,
        resident_small=2 * MIB,
        embedding=400 * MIB,
        head=400 * MIB,
        tied=False,
        units=tuple(Unit(f"layers.{index}", block, block) for index in range(blocks)),
        kv_per_token=24_576,
        context=2048,
        batch=1,
        activations=40 * MIB,
        head_rows=151_936,
    )
    return replace(usual, **changes)


def least_of(needs: Needs) -> int:
    """Return the least memory that a plan needs, as its refusal tells."""
    try:
        make_plan(needs, -1)
    except DoesNotFit as error:
        return int(str(error.details["need_bytes"]))
    raise AssertionError("nothing fits into less than no memory")


def read_of(plan: Plan) -> int:
    """Return all bytes that a token reads."""
    return plan.streamed_bytes_per_pass + plan.routed_bytes_per_token


sizes = st.integers(0, 500 * MIB)
units = st.lists(st.integers(1, 300 * MIB), min_size=0, max_size=40).map(
    lambda slots: tuple(Unit(f"layers.{index}", max(slot - slot // 7, 1), slot) for index, slot in enumerate(slots))
)


@st.composite
def experts(draw: st.DrawFn) -> Experts | None:
    """Draw routed experts whose active part is a part of them."""
    if draw(st.booleans()):
        return None
    total = draw(st.integers(1, 8000 * MIB))
    per_token = draw(st.integers(1, total))
    return Experts(total, per_token, draw(st.integers(1, per_token)))


@st.composite
def any_needs(draw: st.DrawFn) -> Needs:
    """Draw needs of any shape: mixed blocks, no head, a head that must stay, experts."""
    return Needs(
        runtime=draw(sizes),
        resident_small=draw(sizes),
        embedding=draw(sizes),
        head=draw(sizes),
        tied=draw(st.booleans()),
        units=draw(units),
        kv_per_token=draw(st.integers(0, 10**6)),
        context=draw(st.integers(16, 8192)),
        batch=draw(st.integers(1, 8)),
        activations=draw(sizes),
        streams_head=draw(st.booleans()),
        experts=draw(experts()),
    )


memories = st.integers(0, 20_000 * MIB)


@given(any_needs(), memories, st.integers(2, 4))
def test_never_passes_its_memory(needs, memory, depth):
    """Whatever is asked for, the parts add up to the total and the total is within the memory, or it is refused."""
    least = least_of(needs)
    if memory < least:
        with pytest.raises(DoesNotFit):
            make_plan(needs, memory, depth=depth)
        return
    plan = make_plan(needs, memory, depth=depth)
    held = sum(needs.units[index].slot_bytes for index in plan.resident)
    ends = needs.head if plan.head is HeadPlace.RESIDENT else plan.head_kept_bytes
    ends += needs.embedding if plan.embedding_resident and not needs.tied else 0
    parts = needs.fixed + held + ends + plan.slots * plan.slot_bytes + plan.expert_cache
    assert parts == plan.total <= memory
    assert plan.streamed_bytes_per_pass == sum(
        unit.nbytes for index, unit in enumerate(needs.units) if index not in plan.resident
    ) + (needs.head - plan.head_kept_bytes if plan.head is HeadPlace.TILED else 0)


@settings(deadline=None, max_examples=40)
@given(any_needs(), memories, st.integers(0, 2000 * MIB), st.floats(0.05, 10), st.floats(0.001, 60))
def test_more_memory_is_never_predicted_slower(needs, memory, more, gigabytes, compute):
    """With speeds that are known, more memory makes the predicted token as fast or faster."""
    memory += least_of(needs)
    speeds = {"bytes_per_second": gigabytes * 1e9, "compute_seconds": compute}
    before, after = make_plan(needs, memory, **speeds), make_plan(needs, memory + more, **speeds)
    assert before.predicted_seconds is not None
    assert after.predicted_seconds is not None
    assert after.predicted_seconds <= before.predicted_seconds + 1e-4
    assert before.predicted_seconds >= max(before.read_seconds or 0, compute) - 1e-6


@given(any_needs(), memories, st.integers(0, 2000 * MIB), st.integers(2, 4))
def test_more_memory_never_reads_more(needs, memory, more, depth):
    """With more memory a token reads as much or less, and what fitted fits."""
    memory += least_of(needs)
    before, after = make_plan(needs, memory, depth=depth), make_plan(needs, memory + more, depth=depth)
    assert read_of(after) <= read_of(before)


@given(any_needs())
def test_a_refusal_tells_the_least_memory_that_is_accepted(needs):
    """The need in a refusal is the sum of its parts; that much is enough, and one byte less is not."""
    least = least_of(needs)
    assert make_plan(needs, least).total == least
    with pytest.raises(DoesNotFit) as caught:
        make_plan(needs, least - 1)
    parts = caught.value.details["parts"]
    assert isinstance(parts, dict)
    assert sum(parts.values()) == least
    assert caught.value.details["memory_bytes"] == least - 1


@given(any_needs(), memories)
def test_streamed_blocks_always_have_two_buffers_that_hold_them(needs, memory):
    """A ring has two to four buffers, each as large as the largest streamed block, and none where nothing streams."""
    plan = make_plan(needs, least_of(needs) + memory)
    if not plan.streamed_bytes_per_pass:
        assert plan.slots == plan.slot_bytes == 0
        return
    streamed = [unit.slot_bytes for index, unit in enumerate(needs.units) if index not in plan.resident]
    assert 2 <= plan.slots <= 4
    assert plan.slot_bytes >= max(streamed, default=1)
    if plan.head is HeadPlace.TILED:
        assert 0 < plan.head_tile_bytes <= plan.slot_bytes


@given(st.integers(1, 300 * MIB), st.integers(4, 60), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_reads_fall_by_what_the_memory_grows(block, blocks, with_head, first, second):
    """While blocks stream, each byte of memory takes a byte off every pass, within one block."""
    head = block * blocks // 5 if with_head else 0
    needs = needs_of(blocks, block, head=head, tied=False, embedding=0)
    span = needs.whole - least_of(needs) - 2 * block
    memory, more = least_of(needs) + int(min(first, second) * span), int(abs(first - second) * span)
    before, after = make_plan(needs, memory), make_plan(needs, memory + more)
    assume(len(after.resident) < blocks)  # then the ring itself becomes blocks
    fallen = before.streamed_bytes_per_pass - after.streamed_bytes_per_pass
    assert abs(fallen - more) <= block


@given(st.integers(1, 200), st.data())
def test_residents_are_spread_evenly(count, data):
    """Any stretch of blocks, over the end too, has its share of the residents, give or take two."""
    chosen = data.draw(st.integers(0, count))
    first = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(1, count))
    resident = set(spread(count)[:chosen])
    inside = sum((first + step) % count in resident for step in range(length))
    assert sorted(spread(count)) == list(range(count))
    assert abs(inside - length * chosen / count) <= 2.5


@given(memories, st.integers(0, 4000 * MIB))
def test_more_memory_only_adds_blocks(memory, more):
    """Blocks that were resident stay so when the memory grows: nothing has to be read again."""
    needs = needs_of(head=0)
    memory += least_of(needs)
    before, after = make_plan(needs, memory), make_plan(needs, memory + more)
    assert before.resident <= after.resident


def test_all_resident_when_all_fits():
    """A model that fits has no ring and reads nothing; its embedding stays only where it fits beside the rest."""
    needs = needs_of()
    plan = make_plan(needs, needs.whole)
    assert plan.fits_whole
    assert plan.slots == 0
    assert plan.predicted_seconds == 0.0
    assert plan.embedding_resident
    assert plan.total == needs.whole
    without = make_plan(needs, needs.whole - 1)
    assert without.fits_whole
    assert not without.embedding_resident


def test_a_tied_head_is_held_once():
    """Head and embedding of one tensor count once: in memory rows come from it, streamed they are gathered."""
    needs = needs_of(tied=True)
    assert needs.whole == needs_of().whole - needs.embedding
    assert make_plan(needs, needs.whole).embedding_resident
    least = make_plan(needs, needs.fixed + 2 * 90 * MIB)
    assert least.head is HeadPlace.TILED
    assert not least.embedding_resident


def test_a_streamed_head_comes_in_whole_rows_of_a_buffer():
    """A tile is what a buffer holds, in whole rows of the head."""
    plan = make_plan(needs_of(), needs_of().fixed + 2 * 90 * MIB)
    row = 400 * MIB / 151_936
    assert plan.head is HeadPlace.TILED
    assert plan.head_tile_bytes == 90 * MIB
    assert plan.head_tile_rows == int(90 * MIB / row) // 64 * 64


def test_the_head_stays_before_blocks_do():
    """What streams comes at even distances: of the head, which is all at the end, only what fills up a block's room."""
    needs = needs_of()
    plan = make_plan(needs, needs.fixed + (2 + 10) * 90 * MIB)
    assert plan.head is HeadPlace.TILED
    assert needs.head - plan.head_kept_bytes < 90 * MIB
    assert plan.streamed_bytes_per_pass == needs.head + 24 * 90 * MIB - 10 * 90 * MIB
    exactly = make_plan(needs, needs.fixed + needs.head + (2 + 6) * 90 * MIB)
    assert exactly.head is HeadPlace.RESIDENT
    assert len(exactly.resident) == 6


def test_a_buffer_more_is_taken_where_reads_would_wait_for_one():
    """Large blocks beside small ones: a third buffer lets their reads begin earlier; it is taken for that alone."""
    units = tuple(Unit(f"layers.{index}", MIB, MIB) for index in range(12))
    small, disk = needs_of(head=0, embedding=0, units=units), 100 * MIB
    memory = small.fixed + 9 * MIB
    even = make_plan(small, memory, bytes_per_second=disk, compute_seconds=0.001)
    assert even.slots == 2
    assert even.predicted_seconds == pytest.approx(5 * MIB / disk)
    seconds = {
        depth: make_plan(small, memory, depth=depth, bytes_per_second=disk, compute_seconds=0.06).predicted_seconds
        for depth in (2, 3, 4)
    }
    chosen = make_plan(small, memory, bytes_per_second=disk, compute_seconds=0.06)
    assert chosen.predicted_seconds == min(seconds.values())


def test_prediction_is_bytes_over_bandwidth_beside_compute():
    """Reads hide compute or are hidden by it; only late experts add to both."""
    needs = needs_of(head=0)
    memory = needs.fixed + 180 * MIB
    plan = make_plan(needs, memory, bytes_per_second=1080 * MIB, compute_seconds=0.5)
    assert plan.predicted_seconds == pytest.approx(2.0)
    slow = make_plan(needs, memory, bytes_per_second=1080 * MIB, compute_seconds=3.0)
    assert slow.predicted_seconds == pytest.approx(3.0)
    assert make_plan(needs, memory).predicted_seconds is None
    routed = replace(needs, experts=Experts(total=1000 * MIB, per_token=108 * MIB, least=0))
    assert make_plan(routed, memory, bytes_per_second=1080 * MIB).predicted_seconds == pytest.approx(2.1)


def test_experts_take_what_dense_weights_leave():
    """Dense blocks come first, as every token reads them; half the experts cached halves what is read of them."""
    needs = needs_of(head=0, embedding=0, experts=Experts(total=8000 * MIB, per_token=800 * MIB, least=100 * MIB))
    plan = make_plan(needs, needs.fixed + 24 * 90 * MIB + 4000 * MIB)
    assert len(plan.resident) == 24
    assert plan.expert_cache == 4000 * MIB
    assert plan.routed_bytes_per_token == 400 * MIB


def test_a_deeper_ring_gives_way_to_two_buffers():
    """Three buffers are taken where they fit, before any block is resident; where only two fit, two are."""
    needs = needs_of(head=0)
    tight = needs.fixed + 2 * 90 * MIB
    assert make_plan(needs, tight, depth=3).slots == 2
    wide = make_plan(needs, tight + 180 * MIB, depth=3)
    assert wide.slots == 3
    assert len(wide.resident) == 1


def test_refusal_names_both_numbers_and_what_would_have_to_shrink():
    """A refusal has the need, the memory, the parts, and the change that would do."""
    needs = needs_of(context=32_768)
    short = needs.fixed + 2 * 90 * MIB - 24 * MIB
    with pytest.raises(DoesNotFit) as caught:
        make_plan(needs, short)
    message, hint = caught.value.message, caught.value.hint
    assert "needs at least 1.3 GiB, the memory given is 1.3 GiB" in message
    assert "2 buffers of 90.0 MiB" in message
    assert "KV of 32768 tokens × 1 768 MiB" in message
    assert hint == "a context of 31744 tokens instead of 32768 would fit, or give 24.0 MiB more"
    assert make_plan(replace(needs, context=31_744), short)
    with pytest.raises(DoesNotFit, match="memory given is 100 MiB") as caught:
        make_plan(needs, 100 * MIB)
    assert "fewer bits" in str(caught.value.hint)


def test_refusal_that_a_smaller_batch_heals():
    """Where no context is short enough, the number of sequences that would fit is named."""
    needs = needs_of(context=64, batch=8, kv_fixed=50 * MIB)
    short = needs.fixed + 2 * 90 * MIB - 80 * MIB
    with pytest.raises(DoesNotFit) as caught:
        make_plan(needs, short)
    assert "6 sequences at once instead of 8" in str(caught.value.hint)
    assert make_plan(replace(needs, batch=6), short)


def test_plan_is_said_in_lines():
    """The printed plan has blocks, buffers, each part of the memory, and the division behind the prediction."""
    needs = needs_of()
    memory = needs.fixed + 12 * 90 * MIB
    text = "\n".join(make_plan(needs, memory, bytes_per_second=1024 * MIB, compute_seconds=0.25).lines())
    assert "6 of 24 blocks resident, 18 streamed through 2 buffers of 90.0 MiB" in text
    assert "KV (2048 tokens × 1) 48.0 MiB" in text
    assert "runtime 350 MiB" in text
    assert "head: tiled, 360 MiB of it resident, 40.0 MiB (15168 rows) at a time" in text
    assert "a token reads 1.6 GiB / 1.0 GiB/s = 1.6 s; compute 250 ms; predicted 1.6 s a token" in text
    whole = "\n".join(make_plan(needs, needs.whole).lines())
    assert "all 24 blocks resident" in whole
    assert "a token reads no weights" in whole
