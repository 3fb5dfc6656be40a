"""Decodes an uploaded sound file to mono samples of 16 kHz, within bounds of length and with no access beyond the file.

WAV is read here. Other containers go through PyAV (FFmpeg's libraries) where it is installed. The container is told by
its first bytes and named to FFmpeg, so that it never tries its playlist formats, which open further files and URLs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from pagein.engines.local.model import SAMPLE_RATE, Floats
from pagein.engines.local.resample import Resampler
from pagein.engines.local.wav import is_wav, parse_wav
from pagein.errors import BadRequest

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"RIFF", "wav"),
    (0, b"ID3", "mp3"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (4, b"ftyp", "mov"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
)
"""Offset, bytes there, FFmpeg's name of the container; MPEG audio without a tag is told by its sync word."""


def decode_audio(data: bytes, max_seconds: float) -> Floats:
    """Return the samples of a sound file; raises BadRequest when it is damaged, empty, unknown or too long."""
    if not data:
        raise BadRequest("file is empty", param="file")
    wav = parse_wav(data) if is_wav(data) else None
    if wav is None:
        blocks = _foreign_blocks(data, max_seconds)
    else:
        _check_length(wav.seconds, max_seconds)
        blocks = _resampled(wav.blocks(), wav.rate)
    samples = np.concatenate([np.empty(0, np.float32), *blocks])
    if not len(samples):
        raise BadRequest("file has no sound in it", param="file")
    return samples


def _resampled(blocks: Iterator[Floats], rate: int) -> Iterator[Floats]:
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    resampler = Resampler(rate, SAMPLE_RATE)
    for block in blocks:
        yield resampler.feed(block)
    yield resampler.flush()


def _check_length(seconds: float, limit: float) -> None:
    if seconds > limit:
        raise BadRequest(
            f"file lasts {math.ceil(seconds)} s, this model takes at most {limit:g} s",
            hint="send it in parts, or raise options.max_seconds of this model",
            param="file",
            seconds=round(seconds, 3),
            limit_seconds=limit,
        )


def _container(data: bytes) -> str:
    for offset, magic, name in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return name
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "mp3"
    raise BadRequest("file is of no known sound format; WAV, MP3, FLAC, Ogg, WebM, MP4 and AAC are", param="file")


def _foreign_blocks(data: bytes, max_seconds: float) -> Iterator[Floats]:
    container = _container(data)
    try:
        import av
    except ImportError:
        raise BadRequest(
            f"file is {container}; without PyAV only WAV (PCM or float) can be read",
            hint="pip install av, or send a WAV",
            param="file",
        ) from None
    try:
        with av.open(io.BytesIO(data), format=container, io_open=_refuse_io, metadata_errors="replace") as opened:
            yield from _decoded(av, opened, max_seconds)
    except (av.error.FFmpegError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadRequest(f"file is not a usable {container}: {reason}", param="file") from error


def _decoded(av: Any, opened: Any, max_seconds: float) -> Iterator[Floats]:
    if not opened.streams.audio:
        raise BadRequest("file has no sound in it", param="file")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    count = 0
    for frame in opened.decode(audio=0):
        for part in resampler.resample(frame):
            block = part.to_ndarray().reshape(-1)
            count += len(block)
            _check_length(count / SAMPLE_RATE, max_seconds)
            yield block
    yield from (part.to_ndarray().reshape(-1) for part in resampler.resample(None))


def _refuse_io(url: str, *_: object) -> NoReturn:
    raise ValueError(f"it refers to another file, {url[:80]!r}, which is not opened")
