"""Reading WAV files."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from pagein.engines.local.wav import is_wav, parse_wav
from pagein.errors import BadRequest


def wav(
    coding: int, channels: int, rate: int, bits: int, data: bytes, *, says: int | None = None, extra: bytes = b""
) -> bytes:
    """A WAV file, byte by byte."""
    fmt = (
        struct.pack("<HHIIHH", coding, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits) + extra
    )
    head = b"RIFF" + struct.pack("<I", 36) + b"WAVE"
    return (
        head
        + b"fmt "
        + struct.pack("<I", len(fmt))
        + fmt
        + b"data"
        + struct.pack("<I", len(data) if says is None else says)
        + data
    )


def samples_of(data: bytes) -> np.ndarray:
    """All samples of a WAV."""
    parsed = parse_wav(data)
    assert parsed is not None
    return np.concatenate(list(parsed.blocks()))


@pytest.mark.parametrize(
    ("coding", "bits", "data"),
    [
        (1, 8, bytes([128, 192, 0])),
        (1, 16, struct.pack("<3h", 0, 16384, -32768)),
        (1, 24, b"\0\0\0" + b"\0\0\x40" + b"\0\0\x80"),
        (1, 32, struct.pack("<3i", 0, 2**30, -(2**31))),
        (3, 32, struct.pack("<3f", 0, 0.5, -1)),
        (3, 64, struct.pack("<3d", 0, 0.5, -1)),
    ],
)
def test_every_width_gives_the_same_sound(coding, bits, data):
    """Silence, half and full negative scale read the same from 8-bit to 64-bit samples."""
    found = samples_of(wav(coding, 1, 16000, bits, data))
    assert found.dtype == np.float32
    assert found.tolist() == [0.0, 0.5, -1.0]


def test_channels_are_mixed():
    """Two channels become their mean."""
    assert samples_of(wav(1, 2, 8000, 16, struct.pack("<4h", 16384, 0, -16384, 0))).tolist() == [0.25, -0.25]


def test_extensible_format_is_read_by_its_subformat():
    """WAVE_FORMAT_EXTENSIBLE says in its extension what the samples are."""
    extra = struct.pack("<HHIH", 22, 16, 0, 1) + b"\0" * 14
    assert samples_of(wav(0xFFFE, 1, 16000, 16, struct.pack("<h", 16384), extra=extra)).tolist() == [0.5]


def test_a_streamed_file_without_length_is_read_to_its_end():
    """A data length of 0xFFFFFFFF, as programs write into pipes, means the rest of the file."""
    assert len(samples_of(wav(1, 1, 16000, 16, b"\0" * 10, says=0xFFFFFFFF))) == 5


def test_an_odd_byte_at_the_end_is_left():
    """Half a sample is no sample."""
    assert len(samples_of(wav(1, 1, 16000, 16, b"\0" * 5))) == 2


def test_not_a_number_becomes_silence():
    """Floats that are no numbers cannot poison the model."""
    data = struct.pack("<3f", float("nan"), float("inf"), 0.25)
    assert samples_of(wav(3, 1, 16000, 32, data)).tolist() == [0.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (wav(1, 1, 16000, 16, b"\0" * 10, says=99), "says 99 bytes, 10 follow"),
        (wav(1, 0, 16000, 16, b""), "0 channels"),
        (wav(1, 1, 1, 16, b"\0\0"), "1 samples per second"),
        (b"RIFF\0\0\0\0WAVE", "no data"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "no format"),
        (b"RIFF\0\0\0\0WAVEfmt \x02\0\0\0\1\0data\0\0\0\0", "no format"),
    ],
)
def test_damage_is_named(data, words):
    """Each kind of damage is a BadRequest on the field file that says what is wrong, with the numbers."""
    with pytest.raises(BadRequest, match=words) as caught:
        parse_wav(data)
    assert caught.value.details["param"] == "file"


def test_other_codings_are_left_to_a_decoder():
    """mu-law in a WAV is not read here."""
    assert parse_wav(wav(7, 1, 8000, 8, b"\0")) is None


def test_only_riff_wave_counts():
    """AVI files are RIFF too."""
    assert is_wav(b"RIFF\0\0\0\0WAVE")
    assert not is_wav(b"RIFF\0\0\0\0AVI ")
