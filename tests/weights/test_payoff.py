"""When guessing goes on, how many tokens are guessed, and when it stops."""

from __future__ import annotations

import pytest

from pagein.weights.steps.payoff import FIRST, MOST, PLAIN_EVERY, PLAIN_FIRST, PROBE_FIRST, PROBE_LAST, TRIALS, Payoff


def measured(plain: float = 1.0) -> Payoff:
    payoff = Payoff()
    for _ in range(PLAIN_FIRST):
        payoff.saw_plain(plain)
    return payoff


def guess(payoff: Payoff, cost: float, right: float, passes: int = TRIALS) -> None:
    """Let passes happen that cost so much for each position beyond the first, with a share of guesses right."""
    for _ in range(passes):
        wanted = payoff.wanted(MOST)
        if not wanted:
            payoff.saw_plain(1.0)
            continue
        accepted = int(wanted * right)
        payoff.saw(1.0 + cost * wanted, wanted, accepted, rejected=accepted < wanted)


def test_plain_decoding_is_measured_first() -> None:
    """Nothing is guessed before there is a plain pass to compare with."""
    payoff = Payoff()
    assert payoff.wanted(MOST) == 0
    payoff.saw_plain(9.0)
    assert payoff.wanted(MOST) == 0
    payoff.saw_plain(1.0)
    assert payoff.wanted(MOST) == FIRST


def test_free_positions_and_right_guesses_ask_for_the_most() -> None:
    """Where the disk is all that a pass waits for and guesses are right, as many as allowed are made."""
    payoff = measured()
    guess(payoff, cost=0.0, right=1.0, passes=8)
    assert payoff.is_on
    assert payoff.wanted(100) == MOST
    assert payoff.wanted(5) == 5


def test_dear_positions_ask_for_fewer_guesses() -> None:
    """The more a position costs, the fewer guesses are made, down to none."""
    counts = []
    for cost in (0.0, 0.1, 0.3, 1.0):
        payoff = measured()
        guess(payoff, cost, right=0.75, passes=12)
        counts.append(payoff.wanted(MOST))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > 0
    assert counts[-1] == 0


def test_what_loses_goes_off_and_says_why() -> None:
    """Positions that cost a pass each switch guessing off after the first trials, with both figures in the line."""
    payoff = measured()
    guess(payoff, cost=1.0, right=1.0, passes=TRIALS - 1)
    assert payoff.is_on
    guess(payoff, cost=1.0, right=0.5, passes=1)
    assert not payoff.is_on
    assert payoff.wanted(MOST) == 0
    assert "off: " in payoff.line()
    assert "times plain decoding" in payoff.line()


def test_it_is_tried_again_rarely_and_ever_more_rarely() -> None:
    """After each lost trial twice as many plain passes go by before the next one, up to a bound."""
    payoff = measured()
    guess(payoff, cost=1.0, right=0.0)
    waits = []
    for _ in range(7):
        plain = 0
        while not payoff.wanted(MOST):
            payoff.saw_plain(1.0)
            plain += 1
        waits.append(plain)
        payoff.saw(5.0, FIRST, 0, rejected=True)
    assert waits[:3] == [PROBE_FIRST, 2 * PROBE_FIRST, 4 * PROBE_FIRST]
    assert waits[-1] == PROBE_LAST


def test_it_comes_back_on_when_a_probe_wins() -> None:
    """A text that becomes easy to guess is guessed again after the probe that shows it."""
    payoff = measured()
    guess(payoff, cost=0.2, right=0.0, passes=6)
    assert not payoff.is_on
    for _ in range(3):
        while not payoff.wanted(MOST):
            payoff.saw_plain(1.0)
        guess(payoff, cost=0.02, right=1.0, passes=1)
    assert payoff.is_on


def test_plain_passes_are_measured_again_now_and_then() -> None:
    """While every pass has guesses, a plain one is asked for at times: what a pass costs grows with the text."""
    payoff = measured()
    guess(payoff, cost=0.0, right=1.0, passes=PLAIN_EVERY)
    assert payoff.wanted(MOST) == 0
    payoff.saw_plain(1.0)
    assert payoff.wanted(MOST) == MOST


def test_guesses_that_nobody_looked_at_are_no_rejections() -> None:
    """The end of a text leaves guesses unread; they count neither as right nor as wrong."""
    payoff = measured()
    for _ in range(6):
        payoff.saw(1.0, 4, 1, rejected=False)
    assert payoff.is_on
    assert payoff.wanted(MOST) == MOST


def test_a_new_plan_is_measured_anew_and_totals_stay() -> None:
    """What passes cost is forgotten when the plan changes; what was counted is not."""
    payoff = measured()
    guess(payoff, cost=1.0, right=0.0)
    payoff.forget()
    assert payoff.is_on
    assert payoff.wanted(MOST) == 0
    assert payoff.totals.proposed == TRIALS * FIRST
    assert payoff.totals.tokens_per_pass == 1.0


@pytest.mark.parametrize("wanted", [0, 1])
def test_what_cannot_be_guessed_for_says_so(wanted: int) -> None:
    """A reason that rules guessing out stands in the line, and nothing is wanted."""
    payoff = measured()
    payoff.stopped = "it has a sliding window"
    assert payoff.wanted(wanted) == 0
    assert payoff.line() == "0 proposed, 0 accepted, 1.00 tokens a pass; off: it has a sliding window"
