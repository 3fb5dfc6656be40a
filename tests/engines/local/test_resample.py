"""Changing sample rates."""

from __future__ import annotations

import numpy as np
import pytest

from pagein.engines.local.resample import Resampler

EDGE = 400
"""Samples at each end where the filter sees the silence outside."""


def resampled(sound: np.ndarray, source: int, target: int, block: int) -> np.ndarray:
    """Feed the sound in blocks."""
    resampler = Resampler(source, target)
    parts = [resampler.feed(sound[at : at + block]) for at in range(0, len(sound), block)]
    return np.concatenate([*parts, resampler.flush()])


def tone(hertz: float, rate: int, count: int) -> np.ndarray:
    """A sine."""
    return np.sin(2 * np.pi * hertz * np.arange(count) / rate).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 32000, 44100, 48000, 96000])
@pytest.mark.parametrize("hertz", [100, 3000])
def test_a_tone_stays_what_it_is(rate, hertz):
    """A tone below both Nyquist frequencies comes out as itself, in place, within −80 dB."""
    found = resampled(tone(hertz, rate, rate), rate, 16000, 50_000)
    assert len(found) == 16000
    wanted = tone(hertz, 16000, 16000)
    assert np.abs(found - wanted)[EDGE:-EDGE].max() < 1e-4


@pytest.mark.parametrize(("rate", "hertz"), [(48000, 10_000), (44100, 9_000), (96000, 30_000)])
def test_what_the_target_cannot_hold_is_gone(rate, hertz):
    """A tone above the target's Nyquist frequency is silenced by 80 dB instead of folding back."""
    found = resampled(tone(hertz, rate, rate), rate, 16000, 50_000)
    assert np.abs(found)[EDGE:-EDGE].max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
@pytest.mark.parametrize("block", [1, 97, 5000])
def test_blocks_leave_no_seams(rate, block):
    """The size of the blocks does not change the sound."""
    sound = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    assert np.allclose(resampled(sound, rate, 16000, block), resampled(sound, rate, 16000, 3000), atol=1e-6)


@pytest.mark.parametrize(("count", "rate", "wanted"), [(1, 48000, 1), (2, 8000, 4), (0, 44100, 0), (441, 44100, 160)])
def test_the_length_follows_the_rates(count, rate, wanted):
    """Even a single sample gives as many as it lasts, rounded up."""
    assert len(resampled(np.ones(count, np.float32), rate, 16000, 100)) == wanted


def test_constant_sound_keeps_its_level():
    """The filters add up to one at every phase."""
    found = resampled(np.full(44100, 0.5, np.float32), 44100, 16000, 10_000)
    assert np.abs(found[EDGE:-EDGE] - 0.5).max() < 1e-5
