"""Room below the device that one turn alone uses: host memory beside an accelerator, else a file without a name."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import IO, Any

from pagein.errors import KvFull, KvLost
from pagein.kv.tiers.below import Below


class Spill:
    """Pieces of one size, lent by the tiers below and counted there until `close`. One thread at a time per piece.

    They leave for nobody, and nobody finds them. The file has no name: whatever ends the process, the disk has its
    bytes back. Like swap space it is read back without a digest; what is kept longer than a turn is in the store.
    """

    def __init__(self, below: Below, piece: int, what: str) -> None:
        """``piece``: bytes; ``what`` is asked for, in words."""
        assert piece > 0, piece
        self._below, self.piece, self._what = below, piece, what
        self._places: list[int | None] = []
        """Per piece: a slot of host memory; None: it lies in the file, at its number."""
        self._file: IO[bytes] | None = None
        self._lent = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def bytes(self) -> int:
        """What it takes below."""
        return len(self._places) * self.piece

    def grow(self, count: int) -> None:
        """Have room for so many pieces; KvFull, with those that there are kept, where the tiers below have none."""
        while len(self._places) < count:
            handle = self._below.lend(self.piece)
            if handle is None and not self._lengthen(len(self._places)):
                raise KvFull(count * self.piece, self.bytes, f"{self._what}, in the tier below the device")
            self._places.append(handle)

    def write(self, piece: int, offset: int, flat: Any) -> None:
        """Write bytes of a piece from a flat uint8 tensor of host memory; KvLost where the disk does not take them."""
        handle = self._places[piece]
        if handle is not None:
            self._view(handle)[offset : offset + flat.numel()].copy_(flat)
            return
        view, at = memoryview(flat.numpy()), piece * self.piece + offset
        try:
            while view:
                done = os.pwrite(self._fileno(), view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise KvLost(f"{self._what}: KV cannot be written to the disk: {error}") from error

    def read(self, piece: int, offset: int, into: Any) -> None:
        """Read bytes of a piece into a flat uint8 tensor of host memory; KvLost where the disk does not give them."""
        handle = self._places[piece]
        if handle is not None:
            into.copy_(self._view(handle)[offset : offset + into.numel()])
            return
        view, at = memoryview(into.numpy()), piece * self.piece + offset
        try:
            while view:
                done = os.preadv(self._fileno(), [view], at)
                if not done:
                    raise KvLost(f"{self._what}: KV on the disk ends at byte {at}, {len(view)} more were written")
                view, at = view[done:], at + done
        except OSError as error:
            raise KvLost(f"{self._what}: KV cannot be read from the disk: {error}") from error

    def close(self) -> None:
        """Give all of it back. Idempotent."""
        for handle in self._places:
            if handle is not None:
                self._below.give_back(handle)
        self._places.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lent and self._below.cold is not None:
            self._below.cold.store.take_back(self._lent)
        self._lent = 0

    def _lengthen(self, piece: int) -> bool:
        """Let the file have a piece, within the folder's cap; False where the disk has no room."""
        if self._below.cold is None or self._below.cold.store.lend(self.piece) is not None:
            return False
        self._lent += self.piece
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._below.cold.store.folder, buffering=0)  # noqa: SIM115
            if hasattr(os, "posix_fallocate"):  # a full disk is told now, not in the middle of a pass
                os.posix_fallocate(self._file.fileno(), piece * self.piece, self.piece)
        except OSError:
            with suppress(OSError):
                if self._file is not None:
                    os.ftruncate(self._file.fileno(), piece * self.piece)
            self._below.cold.store.take_back(self.piece)
            self._lent -= self.piece
            return False
        return True

    def _fileno(self) -> int:
        assert self._file is not None, "a piece that is not in host memory is in the file"
        return self._file.fileno()

    def _view(self, handle: int) -> Any:
        assert self._below.host is not None
        return self._below.host.view(handle)
