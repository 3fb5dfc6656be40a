"""The longest common prefix, against a naive model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.kv.snapshots.header import pack_tokens
from pagein.kv.snapshots.prefix import BLOCK_TOKENS, PrefixIndex, common_tokens

# Few symbols in long runs: prefixes that are shared over several blocks, and end anywhere.
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90)), max_size=5)


def spread(runs):
    return [symbol for symbol, count in runs for _ in range(count)]


def naive(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def fill(stored, link=None):
    index = PrefixIndex(link)
    for number, tokens in enumerate(stored):
        index.add(str(number), pack_tokens(tokens), cost=len(tokens))
    return index


def expected(stored, prompt):
    ranked = sorted((-naive(prompt, tokens), len(tokens), str(number)) for number, tokens in enumerate(stored))
    return [(-common, key) for common, _, key in ranked]


@settings(max_examples=300, deadline=None)
@given(stored=st.lists(RUNS, max_size=6), prompt=RUNS)
def test_candidates_come_as_a_comparison_of_all_would_order_them(stored, prompt):
    """Every sequence comes once: the longest common prefix first, of equal ones the cheaper."""
    stored, prompt = [spread(runs) for runs in stored], spread(prompt)
    assert list(fill(stored).candidates(pack_tokens(prompt))) == expected(stored, prompt)


@settings(max_examples=200, deadline=None)
@given(stored=st.lists(RUNS, max_size=5), prompt=RUNS, links=st.integers(1, 3))
def test_colliding_hashes_change_nothing(stored, prompt, links):
    """With a hash of one to three values the tokens still decide (scenario 20)."""
    stored, prompt = [spread(runs) for runs in stored], spread(prompt)
    index = fill(stored, lambda before, block: (before + sum(block)) % links)
    assert list(index.candidates(pack_tokens(prompt))) == expected(stored, prompt)


@settings(max_examples=100, deadline=None)
@given(stored=st.lists(RUNS, min_size=1, max_size=6), prompt=RUNS, data=st.data())
def test_what_was_removed_is_not_found(stored, prompt, data):
    """After a removal the rest is as if the removed one had never been; an emptied index keeps nothing."""
    stored, prompt = [spread(runs) for runs in stored], spread(prompt)
    index = fill(stored)
    gone = data.draw(st.sets(st.sampled_from(range(len(stored)))))
    for number in gone:
        index.remove(str(number))
    left = [pair for pair in expected(stored, prompt) if int(pair[1]) not in gone]
    assert list(index.candidates(pack_tokens(prompt))) == left
    for _, key in left:
        index.remove(key)
    assert len(index) == 0
    assert index._at == {}


@settings(max_examples=300)
@given(one=RUNS, other=RUNS, likely=st.integers(0, 200))
def test_common_tokens_are_counted_exactly(one, other, likely):
    """The search by halves counts as a loop does, whatever it was told to expect."""
    one, other = spread(one), spread(other)
    assert common_tokens(pack_tokens(one), pack_tokens(other), likely) == naive(one, other)


def test_a_difference_at_the_fifth_token_leaves_five():
    """The tail of another conversation is never part of the answer (scenario 3)."""
    stored = list(range(3 * BLOCK_TOKENS))
    prompt = [*stored[:5], 9999, *stored[6:]]
    assert next(fill([stored]).candidates(pack_tokens(prompt))) == (5, "0")
