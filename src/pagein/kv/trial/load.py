"""The loads: requests that stand alone, and users who come back; the same in every run of the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

ORIGINAL_REQUESTS, ORIGINAL_TOKENS, ORIGINAL_USERS = 100, 128, 20
"""The load test that Pagein is asked to repeat: 100 requests of 128 tokens, and 20 users."""
_SEED = 20


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks what. Requests are users of one turn with nothing behind them."""

    users: int
    turns: int
    """Of each user, the first included."""
    document: int
    """Tokens that a user begins with."""
    question: int
    """Tokens that each further turn adds."""
    answer: int
    """Tokens that each turn generates."""

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.document + (self.turns - 1) * self.question + self.turns * self.answer

    def ask(self, user: int, turn: int, vocabulary: int) -> list[int]:
        """Return the tokens that a turn adds to what was said before; no two users' are alike."""
        dice = random.Random(f"{_SEED}/{user}/{turn}")  # noqa: S311 - the same load every time is what is wanted
        count = self.document if turn == 0 else self.question
        return [dice.randrange(vocabulary) for _ in range(count)]

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield (user, turn) in the order of serving: in each round every user once, in another order each time.

        First everybody's document is read. From then on all users always wait for their next answer, so that
        somebody's turn begins as soon as another's has ended.
        """
        dice = random.Random(_SEED)  # noqa: S311
        for turn in range(self.turns):
            users = list(range(self.users))
            dice.shuffle(users)
            yield from ((user, turn) for user in users)

    @property
    def count(self) -> int:
        """Turns of all users."""
        return self.users * self.turns


def requests(count: int = ORIGINAL_REQUESTS, tokens: int = ORIGINAL_TOKENS) -> Load:
    """Return requests of so many tokens each: the first half is given, the second generated."""
    given = tokens // 2
    return Load(users=count, turns=1, document=given, question=0, answer=tokens - given)


def users(
    count: int = ORIGINAL_USERS, turns: int = 3, document: int = 512, question: int = 32, answer: int = 16
) -> Load:
    """Return users who read a document each, and then ask about it."""
    return Load(users=count, turns=turns, document=document, question=question, answer=answer)
