"""The loads of `pagein bench kv`, and the figures that come of them."""

from __future__ import annotations

import pytest

from pagein.kv.trial import load
from pagein.kv.trial.figures import Served, percentile, summarise


def test_the_original_load_is_a_hundred_requests_of_128_tokens():
    """Half of each is given and half generated, and none has a second turn."""
    one = load.requests()
    assert (one.users, one.turns, one.document + one.answer, one.longest, one.count) == (100, 1, 128, 128, 100)


def test_every_user_has_every_turn_once_and_in_their_order():
    """Each round serves every user once; a user's turns come one after the other."""
    one = load.users(5, turns=3)
    order = list(one.order())
    assert sorted(order) == [(user, turn) for user in range(5) for turn in range(3)]
    assert [turn for _, turn in order] == [0] * 5 + [1] * 5 + [2] * 5
    assert [user for user, turn in order if turn == 0] != [user for user, turn in order if turn == 1]


def test_the_same_load_is_asked_every_time_and_no_two_users_say_the_same():
    """Arms are compared on the same tokens, and nothing is shared by accident."""
    one, again = load.users(3, document=40), load.users(3, document=40)
    asked = {(user, turn): one.ask(user, turn, 1000) for user in range(3) for turn in range(2)}
    assert asked == {key: again.ask(*key, 1000) for key in asked}
    assert len({tuple(tokens) for tokens in asked.values()}) == len(asked)
    assert {len(asked[user, 0]) for user in range(3)} == {40}
    assert {len(asked[user, 1]) for user in range(3)} == {32}
    assert all(0 <= token < 1000 for tokens in asked.values() for token in tokens)


def test_the_longest_conversation_counts_questions_and_answers():
    """Document, then each turn's answer, and a question before each further one."""
    assert load.users(1, turns=3, document=100, question=10, answer=5).longest == 100 + 2 * 10 + 3 * 5


@pytest.mark.parametrize(("percent", "sample"), [(50, 5), (90, 9), (99, 10), (100, 10), (1, 1)])
def test_percentiles_are_samples(percent, sample):
    """Nearest rank: the smallest sample that so many percent do not pass."""
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == sample


def test_without_samples_there_is_no_percentile():
    """Unknown is None, not 0."""
    assert percentile([], 99) is None


def served(turn: int, service: float, failure: str | None = None) -> Served:
    """One turn of four tokens."""
    return Served(0, turn, service, service * 2, computed=10, answered=0 if failure else 4, failure=failure)


def test_a_failed_turn_counts_as_failed_and_nowhere_else():
    """Its seconds are neither a latency nor part of the throughput, and its reason is told once."""
    found = summarise([served(0, 1.0), served(1, 3.0), served(1, 100.0, "full"), served(1, 90.0, "full")])
    assert (found["turns"], found["failures"], found["failure_reasons"]) == (4, 2, ["full"])
    assert found["tokens_per_second"] == 2.0
    assert found["service"]["p99"] == 3.0
    assert found["latency"]["p50"] == 2.0


def test_returning_turns_can_be_told_apart():
    """The first turn costs the same however KV is kept; what is compared begins with the second."""
    found = summarise([served(0, 50.0), served(1, 1.0)], first_turn=1)
    assert (found["turns"], found["seconds"], found["tokens_per_second"]) == (1, 1.0, 4.0)


def test_the_first_token_is_told_where_a_way_tells_it():
    """What of a turn tiers can spare; a way that does not tell leaves no sample."""
    told = Served(0, 1, 3.0, 3.0, computed=10, answered=4, first=0.5)
    found = summarise([told, served(1, 1.0)])
    assert (found["first"]["p50"], found["service"]["p99"]) == (0.5, 3.0)
    assert summarise([served(1, 1.0)])["first"]["p50"] is None


def test_nothing_served_has_no_speed():
    """Unknown is None."""
    assert summarise([])["tokens_per_second"] is None
