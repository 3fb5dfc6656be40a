"""Changes the sample rate of sound by polyphase filtering with a windowed sinc, block by block."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pagein.engines.local.model import Floats

_ZERO_CROSSINGS = 24
"""Length of the filter on each side, in periods of its cut-off."""
_ROLL_OFF = 0.945
"""Cut-off as a share of the lower Nyquist frequency: leaves room for the filter's transition band."""
_KAISER_BETA = 8.6
"""About 86 dB of attenuation (Kaiser's formula: beta = 0.1102 (A − 8.7))."""


class Resampler:
    """Turns blocks of one rate into blocks of another; memory does not grow with the length of the sound.

    Output n lies at input time n · down / up with up and down free of common factors, so only ``up`` different filters
    exist; all outputs that share one are computed together (J. O. Smith, "Digital Audio Resampling").
    """

    def __init__(self, source: int, target: int) -> None:
        divisor = math.gcd(source, target)
        self._up, self._down = target // divisor, source // divisor
        cutoff = _ROLL_OFF * min(1.0, self._up / self._down)
        self._half = math.ceil(_ZERO_CROSSINGS / cutoff)
        self._filters = _filters(self._up, self._half, cutoff)
        self._buffer = np.zeros(self._half - 1, np.float32)
        self._origin = 1 - self._half
        """Input position of the buffer's first sample."""
        self._taken = 0
        self._made = 0

    def feed(self, block: Floats) -> Floats:
        """Take input samples and return the output samples that they complete."""
        self._taken += len(block)
        return self._advance(block)

    def flush(self) -> Floats:
        """Return the last output samples: as many altogether as the sound lasts."""
        total = math.ceil(self._taken * self._up / self._down)
        missing = total - self._made
        rest = self._advance(np.zeros(self._half + self._down, np.float32))
        return rest[:missing]

    def _advance(self, block: Floats) -> Floats:
        self._buffer = np.concatenate([self._buffer, block])
        end = self._origin + len(self._buffer) - self._half
        ready = max(self._made, -(-end * self._up // self._down))
        output = np.empty(ready - self._made, np.float32)
        windows = sliding_window_view(self._buffer, 2 * self._half) if len(output) else None
        for i in range(min(self._up, len(output))):
            assert windows is not None
            base, phase = divmod((self._made + i) * self._down, self._up)
            first = base - self._half + 1 - self._origin
            output[i :: self._up] = windows[first :: self._down][: len(output[i :: self._up])] @ self._filters[phase]
        self._made = ready
        used = self._made * self._down // self._up - self._half + 1 - self._origin
        self._buffer = self._buffer[max(used, 0) :].copy()
        self._origin += max(used, 0)
        return output


def _filters(up: int, half: int, cutoff: float) -> Floats:
    """One filter per phase (up × 2 half): sinc of the cut-off under a Kaiser window, sum exactly 1."""
    phases = np.arange(up, dtype=np.float64)[:, None] / up
    distance = np.arange(1 - half, half + 1, dtype=np.float64) - phases
    inside = np.clip(1 - (distance / half) ** 2, 0, None)
    taps = np.sinc(cutoff * distance) * np.i0(_KAISER_BETA * np.sqrt(inside))
    table: Floats = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    return table
