"""A worker without a daemon: it serves on, keeps its output flowing, and waits for the next daemon to prove itself."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from pathlib import Path

from pagein.engines.death import outlive_parent
from pagein.protocol import ADOPTION_SOCKET, Adopt, Adopted, WorkerSpec, decode, encode
from pagein.worker.handshake import Control

_KEPT = 8 * 1024  # bytes of output for the next daemon; as JSON at most six times that, and a message has 64 KiB
_LONGEST_WORD = 4096
_CALLERS = 4
_WAITING = 16  # connections that were not let in yet, while the daemon lives
_HANDOVER_TIMEOUT = 5.0


class Orphan:
    """Lets this process outlive its daemon once its model is ready; see `pagein.protocol` for what is said.

    `prepare` belongs to the main thread, `await_daemon` to the thread that watches the daemon.
    """

    def __init__(self, spec: WorkerSpec, control: Control, output: int) -> None:
        """``output`` is the reading end of this process's own output."""
        self._spec, self._control, self._output = spec, control, output
        self._wait = spec.adopt_wait
        self._listener: socket.socket | None = None
        self._kept = b""
        self._lost = 0

    def prepare(self) -> None:
        """The model is about to be ready: from now on the end of the daemon is not the end."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            path = Path(self._spec.socket_dir) / ADOPTION_SOCKET
            listener.bind(os.fspath(path))  # into a folder of the owner alone
            listener.listen(_WAITING)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            print(f"pagein: this worker cannot be adopted later: {error}", file=sys.stderr, flush=True)
            return
        self._listener = listener
        outlive_parent()

    def await_daemon(self) -> socket.socket | None:
        """Block until a daemon has taken over and return its connection, or None when none came in time."""
        if self._listener is None:
            return None  # it died while the model was loaded
        deadline = time.monotonic() + self._wait
        callers: dict[socket.socket, bytes] = {}  # with what each has said, in the order of their coming
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fd == self._output:
                        self._keep_output()
                    elif key.fileobj is self._listener:
                        self._let_in(callers, selector)
                    elif (daemon := self._hear(key.fileobj, callers, selector)) is not None:
                        self._close(callers, selector)
                        return daemon
            self._close(callers, selector)
        return None

    def _keep_output(self) -> None:
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return
        whole = self._kept + data
        self._kept = whole[-_KEPT:]
        self._lost += len(whole) - len(self._kept)

    def _let_in(self, callers: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        caller.setblocking(False)
        if len(callers) == _CALLERS:  # who says nothing makes room
            _drop(next(iter(callers)), callers, selector)
        callers[caller] = b""
        selector.register(caller, selectors.EVENT_READ)

    def _hear(
        self, caller: object, callers: dict[socket.socket, bytes], selector: selectors.BaseSelector
    ) -> socket.socket | None:
        """Take in what a caller says; returns it once it has proved itself and has everything."""
        if not isinstance(caller, socket.socket) or caller not in callers:
            return None  # closed a moment ago
        try:
            said = caller.recv(_LONGEST_WORD)
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        callers[caller] += said
        if said and b"\n" not in callers[caller] and len(callers[caller]) < _LONGEST_WORD:
            return None
        if (adopt := _understood(callers[caller])) is not None and self._is_right(adopt.token):
            selector.unregister(caller)
            del callers[caller]
            if self._hand_over(caller):
                self._wait = adopt.adopt_wait
                return caller
            caller.close()
        else:
            _drop(caller, callers, selector)
        return None

    def _is_right(self, token: str) -> bool:
        import hmac  # only here: it loads a cryptography library, which a worker with a daemon does not pay for

        return hmac.compare_digest(token.encode(errors="surrogatepass"), self._spec.token.encode())

    def _hand_over(self, daemon: socket.socket) -> bool:
        ready = self._control.ready
        assert ready is not None, "it was ready before the daemon went"
        output = self._kept.decode(errors="surrogateescape")
        adopted = Adopted(self._spec.token, os.getpid(), output, self._lost)
        message = memoryview(encode(adopted) + encode(ready))
        descriptor = os.dup(daemon.fileno())
        try:
            with self._control.moving_to(descriptor):
                daemon.settimeout(_HANDOVER_TIMEOUT)
                sent = socket.send_fds(daemon, [message], [self._output])
                if sent < len(message):
                    daemon.sendall(message[sent:])
                daemon.setblocking(True)
        except OSError:
            os.close(descriptor)
            return False
        self._kept, self._lost = b"", 0
        return True

    def _close(self, callers: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
        for caller in list(callers):
            _drop(caller, callers, selector)


def _drop(caller: socket.socket, callers: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
    selector.unregister(caller)
    del callers[caller]
    caller.close()


def _understood(said: bytes) -> Adopt | None:
    try:
        message = decode(said)
    except ValueError:
        return None
    sound = (
        isinstance(message, Adopt) and isinstance(message.token, str) and isinstance(message.adopt_wait, int | float)
    )
    return message if sound and isinstance(message, Adopt) else None
