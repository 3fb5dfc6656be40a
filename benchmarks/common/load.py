"""Many clients at once, in one thread: how many whole answers a second they get."""

from __future__ import annotations

import selectors
import time

from common.wire import TIMEOUT, Answer, BenchmarkError, Dropped, Target, connect


class _Client:
    """One kept connection that asks again as soon as it was answered."""

    def __init__(self, target: Target, selector: selectors.BaseSelector) -> None:
        self._target, self._selector = target, selector
        self.answered = 0
        self._open()

    def _reopen(self) -> None:
        self.close()
        self._open()

    def _open(self) -> None:
        self._answered_here = 0
        self._socket = connect(self._target.address)
        self._selector.register(self._socket, selectors.EVENT_READ, self)
        self._ask()

    def _ask(self) -> None:
        self._answer = Answer()
        self._socket.sendall(self._target.request)

    def read(self) -> bool:
        """Take in what came; True when that made an answer whole, and the next request is on its way."""
        try:
            self._answer.feed(self._socket.recv(262144))
        except (Dropped, ConnectionError):
            if self._answered_here == 0:
                raise
            self._reopen()  # the server closed it in the moment it was used again
        if not self._answer.done:
            return False
        self._answer.check()
        self.answered += 1
        self._answered_here += 1
        if self._answer.closes:
            self._reopen()
        else:
            self._ask()
        return True

    def close(self) -> None:
        """Leave, whatever is on its way."""
        self._selector.unregister(self._socket)
        self._socket.close()


def rate(target: Target, clients: int, seconds: float) -> float:
    """Whole answers per second that so many clients get together; the first answer of each is its warm-up."""
    with selectors.DefaultSelector() as selector:
        crowd = [_Client(target, selector) for _ in range(clients)]
        try:
            while not all(client.answered for client in crowd):
                _turn(selector, target)
            began, count = time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds:
                count += _turn(selector, target)
            return count / passed
        finally:
            for client in crowd:
                client.close()


def _turn(selector: selectors.BaseSelector, target: Target) -> int:
    """Wait for anything to come; returns how many answers it made whole."""
    ready = selector.select(TIMEOUT)
    if not ready:
        raise BenchmarkError(f"{target.address} answered nobody within {TIMEOUT:.0f} s")
    return sum(key.data.read() for key, _ in ready)
