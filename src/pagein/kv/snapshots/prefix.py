"""Which stored token sequences begin as a prompt does: found by a chain of hashes, proven by the tokens.

A link stands for a block of 64 tokens and all before it. The hashes are Python's own, keyed per process and kept in
memory only: two sequences that collide cost a comparison, never an answer (scenario 20 of the KV list).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

BLOCK_TOKENS = 64
_BLOCK = 4 * BLOCK_TOKENS


class PrefixIndex:
    """Packed token sequences by key."""

    def __init__(self, link: Callable[[int, bytes], int] | None = None) -> None:
        self._link = link or _link
        self._tokens: dict[str, bytes] = {}
        self._cost: dict[str, int] = {}
        self._at: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, key: str, packed: bytes, cost: int) -> None:
        """Add a sequence; of two that serve a prompt alike, the one of less cost comes first."""
        assert key not in self._tokens
        self._tokens[key], self._cost[key] = packed, cost
        for link in self._chain(packed):
            self._at.setdefault(link, []).append(key)

    def remove(self, key: str) -> None:
        """Take a sequence out."""
        packed = self._tokens.pop(key)
        del self._cost[key]
        for link in self._chain(packed):
            keys = self._at[link]
            keys.remove(key)
            if not keys:
                del self._at[link]

    def candidates(self, packed: bytes) -> Iterator[tuple[int, str]]:
        """Tokens in common, and key, of every sequence: the longest first, then the one of less cost."""
        levels = [list(self._tokens)]
        for link in self._chain(packed):
            if link not in self._at:
                break  # whoever shared a longer prefix would stand here, too
            levels.append(list(self._at[link]))
        seen: set[str] = set()
        found: list[tuple[int, int, str]] = []
        for depth in range(len(levels) - 1, -1, -1):
            new = [key for key in dict.fromkeys(levels[depth]) if key not in seen]
            seen.update(new)
            likely = depth * BLOCK_TOKENS
            found += [(-common_tokens(packed, self._tokens[key], likely), self._cost[key], key) for key in new]
            found.sort()
            while found and -found[0][0] >= depth * BLOCK_TOKENS:  # the rest collided, and belongs further down
                common, _, key = found.pop(0)
                yield -common, key

    def _chain(self, packed: bytes) -> Iterator[int]:
        link = 0
        for start in range(0, len(packed) - _BLOCK + 1, _BLOCK):
            link = self._link(link, packed[start : start + _BLOCK])
            yield link


def common_tokens(one: bytes, other: bytes, likely: int = 0) -> int:
    """Tokens that two packed sequences begin with alike; fastest where it is ``likely`` or up to a block more."""
    low, high = 0, min(len(one), len(other)) // 4
    for guess in (likely, likely + BLOCK_TOKENS):
        if low <= guess <= high:
            if one[4 * low : 4 * guess] == other[4 * low : 4 * guess]:
                low = guess
            else:
                high = guess - 1
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _link(before: int, block: bytes) -> int:
    return hash((before, block))
