"""What copies pass together, and who moves blocks has alone: no copy ever sees a block under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """`passing` for each step of a copy, the gate itself (``with gate:``) while blocks move.

    Whoever wants it alone goes before copies that have not begun. No thread takes it twice.
    """

    def __init__(self) -> None:
        self._news = threading.Condition(threading.Lock())
        self._passing = 0
        self._alone = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Copy beside others."""
        with self._news:
            while self._alone:
                self._news.wait()
            self._passing += 1
        try:
            yield
        finally:
            with self._news:
                self._passing -= 1
                if not self._passing:
                    self._news.notify_all()

    def __enter__(self) -> None:
        with self._news:
            while self._alone:
                self._news.wait()
            self._alone = True
            try:
                while self._passing:
                    self._news.wait()
            except BaseException:  # an interrupt (Ctrl-C): nobody would pass again
                self._alone = False
                self._news.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        with self._news:
            self._alone = False
            self._news.notify_all()
