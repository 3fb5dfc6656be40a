"""Reads WAV files: PCM of 8 to 32 bits and IEEE floats, any rate and number of channels, as blocks of mono samples."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagein.engines.local.model import Floats
from pagein.errors import BadRequest

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_ENDLESS = 0xFFFFFFFF
"""Length that programs write when they stream a WAV and do not know its end."""
_BLOCK_FRAMES = 1 << 18
RATES = (2_000, 384_000)
"""Lowest and highest samples per second that are taken."""


@dataclass(frozen=True, slots=True)
class Wav:
    """A parsed WAV file; ``data`` are its interleaved samples."""

    rate: int
    channels: int
    kind: str
    """A key of the decoders: ``pcm8``, ``pcm16``, ``pcm24``, ``pcm32``, ``float32``, ``float64``."""
    data: memoryview

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of every channel."""
        return self.channels * _WIDTHS[self.kind]

    @property
    def frames(self) -> int:
        """Samples per channel."""
        return len(self.data) // self.frame_bytes

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return self.frames / self.rate

    def blocks(self) -> Iterator[Floats]:
        """Yield the sound as mono samples in −1…1, some seconds at a time."""
        step = _BLOCK_FRAMES * self.frame_bytes
        whole = self.frames * self.frame_bytes
        for start in range(0, whole, step):
            samples = _decode(self.kind, self.data[start : min(start + step, whole)])
            yield samples if self.channels == 1 else samples.reshape(-1, self.channels).mean(axis=1, dtype=np.float32)


def is_wav(data: bytes) -> bool:
    """Tell whether a file begins like a WAV."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def parse_wav(data: bytes) -> Wav | None:
    """Read the header of a WAV; None for a coding that is not PCM or float (then a decoder library may know it).

    Raises BadRequest for a damaged file.
    """
    fmt: bytes | None = None
    for name, chunk in _chunks(data):
        if name == b"fmt ":
            fmt = bytes(chunk[:40])
        elif name == b"data":
            if fmt is None or len(fmt) < 16:
                raise _damaged("it has no format before its data")
            return _described(fmt, chunk)
    raise _damaged("it has no data")


def _described(fmt: bytes, data: memoryview) -> Wav | None:
    coding, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", fmt)
    if coding == _EXTENSIBLE and len(fmt) >= 26:
        coding = struct.unpack_from("<H", fmt, 24)[0]
    kind = {_PCM: "pcm", _FLOAT: "float"}.get(coding, "") + str(bits)
    if kind not in _WIDTHS:
        return None
    if not 1 <= channels <= 64 or not RATES[0] <= rate <= RATES[1]:
        limits = f"1 to 64 channels and {RATES[0]} to {RATES[1]} samples per second are taken"
        raise _damaged(f"it says {channels} channels and {rate} samples per second; {limits}")
    return Wav(rate, channels, kind, data)


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    view, at = memoryview(data), 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        rest = len(data) - at - 8
        if name == b"data" and size == _ENDLESS:
            size = rest
        if size > rest:
            raise _damaged(f"its part {name!r} says {size} bytes, {rest} follow")
        yield name, view[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def _decode(kind: str, raw: memoryview) -> Floats:
    bits, samples = 8 * _WIDTHS[kind], np.empty(0, np.float32)
    match kind:
        case "pcm8":
            samples = np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)
            samples /= np.float32(128)
        case "pcm24":
            wide = np.zeros((len(raw) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            samples = wide.view("<i4")[:, 0].astype(np.float32)
            samples /= np.float32(2**31)
        case "pcm16" | "pcm32":
            samples = np.frombuffer(raw, f"<i{bits // 8}").astype(np.float32)
            samples /= np.float32(2 ** (bits - 1))
        case _:
            samples = np.frombuffer(raw, f"<f{bits // 8}").astype(np.float32)
            np.nan_to_num(samples, copy=False, nan=0.0, posinf=1.0, neginf=-1.0)
    return samples


_WIDTHS = {"pcm8": 1, "pcm16": 2, "pcm24": 3, "pcm32": 4, "float32": 4, "float64": 8}


def _damaged(why: str) -> BadRequest:
    return BadRequest(f"file is not a usable WAV: {why}", param="file")
