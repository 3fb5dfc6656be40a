"""Sound: the recordings that the example is trained on, and sentences of a longer recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from faster_whisper.audio import decode_audio

HERE = Path(__file__).resolve().parent
RATE = 16_000
FRAME = RATE // 50
LONGEST = 28 * RATE
"""Samples of one sentence: Whisper hears 30 seconds at once."""
PAUSE = 25
"""Frames of silence after which a new sentence begins."""
QUIET = 0.02
"""Loudness of a pause, as a share of the loudest frame."""


@dataclass(frozen=True)
class Clip:
    """One spoken sentence."""

    kind: str
    """``to-do``, ``decision`` or ``other``."""
    said: str
    point: str
    """What is to be done or was decided, in few words; empty for other sentences."""
    held_out: bool
    sound: np.ndarray
    """Samples, float32."""


def recordings() -> list[Clip]:
    """Return the sentences of ``speech.ogg``."""
    sound = decode_audio(str(HERE / "speech.ogg"), RATE)
    rows = json.loads((HERE / "speech.json").read_text(encoding="utf-8"))["sentences"]
    return [
        Clip(one["kind"], one["said"], one["point"], one["held_out"], sound[_at(one["start"]) : _at(one["end"])])
        for one in rows
    ]


def _at(seconds: float) -> int:
    return round(seconds * RATE)


def read_sound(path: Path) -> np.ndarray:
    """Return the samples of any file that FFmpeg reads."""
    return decode_audio(str(path), RATE)


def sentences(sound: np.ndarray) -> list[np.ndarray]:
    """Cut a recording at its pauses."""
    count = len(sound) // FRAME
    loudness = np.sqrt((sound[: count * FRAME].reshape(count, FRAME) ** 2).mean(1))
    loud = np.flatnonzero(loudness > QUIET * loudness.max(initial=0.0))
    found = []
    for run in np.split(loud, np.flatnonzero(np.diff(loud) > PAUSE) + 1):
        if len(run):
            start, end = max(0, (run[0] - 5) * FRAME), (run[-1] + 6) * FRAME
            found += [sound[at : min(at + LONGEST, end)] for at in range(start, end, LONGEST)]
    return found
