"""The log of one model: what its worker prints, and one line for each load, inference and unload (row G13).

Lines of the worker stand as they came. Pagein's own begin with the time and ``pagein``. No value of an environment
variable and no request text is written here.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

_LONGEST_LINE = 4096
_TAIL_LINES = 50
_TAIL_WIDTH = 500
_MODE = 0o600


class ModelLog:
    """An append-only file that is rotated by size; belongs to the event loop's thread.

    A disk that is full or broken loses lines and never raises: serving goes on, and the last lines stay in memory.
    """

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        """Open the file; ``max_bytes`` is the size at which it is rotated, ``files`` the rotated ones to keep."""
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._descriptor: int | None = None
        self._size = 0

    def begin(self) -> None:
        """A new worker starts: `tail` forgets the one before."""
        self._end_partial()
        self._tail.clear()

    def write(self, data: bytes) -> None:
        """Add what a worker printed; the end of a line may come later."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial)
            self._partial = b""
        self._add(lines)

    def event(
        self,
        kind: str,
        seconds: float | None = None,
        before: Mapping[str, int] | None = None,
        after: Mapping[str, int] | None = None,
        **facts: object,
    ) -> None:
        """Add one of Pagein's own lines: ``load``, ``infer`` or ``unload``, its duration, bytes per pool, and facts."""
        self._end_partial()
        words = [datetime.now(UTC).isoformat(timespec="milliseconds"), "pagein", kind]
        if seconds is not None:
            words.append(f"seconds={seconds:.3f}")
        for name, sizes in (("before", before), ("after", after)):
            words += [f"{name}.{pool}={count}" for pool, count in sorted((sizes or {}).items())]
        words += [f"{name}={_quote(value)}" for name, value in facts.items()]
        self._store(" ".join(words).encode() + b"\n")

    def tail(self, lines: int = 10) -> list[str]:
        """The last lines that the present worker printed, shortened and without control characters."""
        shown = [*self._tail, *([_readable(self._partial)] if self._partial.strip() else [])]
        return shown[-lines:]

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        self._end_partial()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _end_partial(self) -> None:
        if self._partial:
            self._add([self._partial])
            self._partial = b""

    def _add(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._tail.extend(_readable(line) for line in lines[-_TAIL_LINES:] if line.strip())
        self._store(b"".join(line + b"\n" for line in lines))

    def _store(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            descriptor = self._open()
            if self._size and self._size + len(data) > self._max_bytes:
                descriptor = self._rotate(descriptor)
            self._size += os.write(descriptor, data[: self._max_bytes])

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, _MODE)
            os.fchmod(self._descriptor, _MODE)
            self._size = os.fstat(self._descriptor).st_size
        return self._descriptor

    def _rotate(self, descriptor: int) -> int:
        os.close(descriptor)
        self._descriptor = None
        for number in range(self._files, 0, -1):
            newer = self._numbered(number - 1)
            if newer.exists():
                newer.replace(self._numbered(number))
        return self._open()

    def _numbered(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")


def _readable(line: bytes) -> str:
    """One line fit to print. Of a long one its beginning and its end are kept: a reason may follow a flood."""
    if len(line) <= _TAIL_WIDTH * 4 and len(kept := _printable(line)) <= _TAIL_WIDTH:
        return kept
    half = _TAIL_WIDTH // 2
    return f"{_printable(line[: half * 4])[: half - 3]} … {_printable(line[-half * 4 :])[-half:]}"


def _printable(line: bytes) -> str:
    text = line.decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


def _quote(value: object) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return f'"{text}"' if " " in text or not text else text
