"""Decoding sound files of every kind, and the kinds that are refused."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from pagein.engines.local.audio import decode_audio
from pagein.errors import BadRequest
from tests.engines.local.test_wav import wav


def hum(rate: int, seconds: float = 1.0) -> np.ndarray:
    """A quiet 440 Hz tone in 16-bit samples."""
    return (8000 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype("<i2")


def hum_wav(rate: int, seconds: float = 1.0) -> bytes:
    """The tone as a WAV."""
    return wav(1, 1, rate, 16, hum(rate, seconds).tobytes())


def loudest_hertz(samples: np.ndarray) -> float:
    """The frequency with the most energy."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples))


def encoded(container: str, codec: str, rate: int) -> bytes:
    """The tone in another container, made by PyAV."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(hum(rate)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        fitting = av.AudioResampler(format=stream.format.name, layout="mono", rate=rate, frame_size=size)
        for part in [*fitting.resample(frame), *fitting.resample(None)]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_a_wav_of_any_rate_becomes_16_khz(rate):
    """The tone keeps its pitch and its length."""
    samples = decode_audio(hum_wav(rate), 60)
    assert len(samples) == 16000
    assert abs(loudest_hertz(samples) - 440) <= 1


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("mp3", "mp3", 16000),
        ("flac", "flac", 44100),
        ("ogg", "libopus", 48000),
        ("webm", "libopus", 48000),
        ("mp4", "aac", 44100),
        ("adts", "aac", 44100),
        ("wav", "pcm_mulaw", 8000),
    ],
)
def test_other_containers_are_decoded(container, codec, rate):
    """Where PyAV is installed, the usual containers give the same tone, within a frame's padding."""
    samples = decode_audio(encoded(container, codec, rate), 60)
    assert abs(len(samples) - 16000) < 2000
    assert abs(loudest_hertz(samples) - 440) <= 3


@pytest.mark.parametrize("data", [hum_wav(8000, 3.0), pytest.param(None, id="flac")])
def test_sound_beyond_the_limit_is_refused_with_both_numbers(data):
    """Length is checked from the header of a WAV, and while other containers are decoded."""
    with pytest.raises(BadRequest, match=r"lasts \d+ s, this model takes at most 0.5 s"):
        decode_audio(data or encoded("flac", "flac", 16000), 0.5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        b"RIFF\0\0\0\0AVI LIST",
        b"fLaC#EXTM3U\nfile:///etc/hostname\n",
        b"OggS" + b"\0" * 100,
        b"ID3\3\0\0" + b"\0" * 100,
        wav(1, 1, 16000, 16, b""),
    ],
)
def test_unknown_damaged_empty_and_playlist_files_are_refused(data):
    """Each is a BadRequest on the field file; playlists, which name other files, never reach a decoder."""
    with pytest.raises(BadRequest) as caught:
        decode_audio(data, 60)
    assert caught.value.details["param"] == "file"


def test_without_the_library_the_error_says_what_is_missing(monkeypatch):
    """An MP3 without PyAV names the library and the format that works without."""
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(BadRequest, match="without PyAV only WAV"):
        decode_audio(b"ID3\3\0\0", 60)
