"""Speech recognition with Moonshine (arXiv:2410.15608): an encoder of raw sound and a decoder with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagein.engines.local.fields import refuse
from pagein.engines.local.model import SAMPLE_RATE, Floats, Hearing, Transcriber, Transcript
from pagein.engines.recipes.contract import OpenSession, Place, Recipe, Session, need_inputs
from pagein.errors import ConfigError, LoadFailed

_FRAME = SAMPLE_RATE // 50
"""Samples of the 20 ms in which loudness is measured."""
_PAUSE = 15
"""Frames in which the quietest place for a cut is looked for."""
_SILENCE = 1e-3
"""Loudness (root mean square, −60 dB) below which nothing is said; the model hears "You" in silence."""
_SHORTEST = SAMPLE_RATE // 2
"""Samples to which shorter sound is filled up; the encoder's filters need about a sixteenth of a second."""
_SPACE = "▁".encode()


@dataclass(frozen=True, slots=True)
class Moonshine(Recipe):
    """Sound → hidden states → words, token by token. Sound beyond ``chunk_seconds`` is split where it is quietest."""

    encoder: str = "encoder_model.ort"
    """File in the model's folder."""
    decoder: str = "decoder_model_merged.ort"
    """File in the model's folder; without and with cache in one."""
    vocabulary: str = "tokenizer.bin"
    """File in the model's folder."""
    language: str = "en"
    """The one language that the model knows."""
    start_token: int = 1
    """Given to the decoder first."""
    end_token: int = 2
    """Ends a transcript."""
    tokens_per_second: float = 6.5
    """Most tokens per second of sound; stops the decoder when it repeats itself."""
    chunk_seconds: float = 20.0
    """Longest piece that is encoded at once: memory grows with its square (20 s: 76 MiB, 30 s: 150 MiB)."""
    max_seconds: float = 600.0
    """Longest sound that is taken."""

    def build(self, place: Place, open_session: OpenSession) -> Transcriber:
        """Load vocabulary, encoder and decoder."""
        if self.chunk_seconds < 1:
            raise ConfigError(
                f"model {place.name!r}: option 'chunk_seconds' is {self.chunk_seconds:g}, at least 1 is needed"
            )
        vocabulary = read_vocabulary(place.beside(self.vocabulary))
        encoder = open_session(place.beside(self.encoder))
        decoder = open_session(place.beside(self.decoder), many_runs=True)
        return _Listener(self, vocabulary, encoder, decoder)


class _Listener(Transcriber):
    def __init__(self, recipe: Moonshine, vocabulary: list[bytes], encoder: Session, decoder: Session) -> None:
        self._recipe, self._vocabulary, self._encoder, self._decoder = recipe, vocabulary, encoder, decoder
        self.max_seconds = recipe.max_seconds
        need_inputs(encoder, {"input_values", "attention_mask"}, "recipe 'moonshine' (encoder)")
        known = {"input_ids", "encoder_hidden_states", "encoder_attention_mask", "use_cache_branch"}
        need_inputs(decoder, known, "recipe 'moonshine' (decoder)")
        self._cache = {entry.name: entry.shape for entry in decoder.get_inputs() if entry.name not in known}
        self._outputs = [entry.name for entry in decoder.get_outputs()]

    def transcribe(self, samples: Floats, hearing: Hearing, abandoned: Callable[[], bool]) -> Transcript:
        self._check(hearing)
        texts = []
        for chunk in split_at_silence(samples, round(self._recipe.chunk_seconds * SAMPLE_RATE)):
            tokens = self._tokens(chunk, abandoned) if loudness(chunk).max() >= _SILENCE else []
            texts.append(to_text(self._vocabulary, tokens))
        text = " ".join(text for text in texts if text)
        return Transcript(text, len(samples) / SAMPLE_RATE, self._recipe.language)

    def _check(self, hearing: Hearing) -> None:
        known = self._recipe.language
        if hearing.language not in (None, known):
            refuse("language", f"language is {hearing.language[:20]!r}; this model knows {known!r} only")
        if hearing.translate:
            refuse("task", "task is 'translate'; this model only transcribes")
        if hearing.prompt:
            refuse("prompt", "prompt is given, but this model takes none")
        if hearing.temperature > 0:
            refuse("temperature", f"temperature is {hearing.temperature:g}; this model only knows 0")

    def _tokens(self, chunk: Floats, abandoned: Callable[[], bool]) -> list[int]:
        sound = np.pad(chunk, (0, max(0, _SHORTEST - len(chunk))))[None]
        # the decoder wants the mask of the sound, not of the hidden states: it thins it out itself
        mask = np.ones(sound.shape, np.int64)
        hidden = self._encoder.run(None, {"input_values": sound, "attention_mask": mask})[0]
        feed = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask, **self._empty_cache(hidden.shape[1])}
        tokens = [self._recipe.start_token]
        for step in range(max(1, int(len(chunk) / SAMPLE_RATE * self._recipe.tokens_per_second))):
            if abandoned():
                break
            feed["input_ids"] = np.array([[tokens[-1]]], np.int64)
            feed["use_cache_branch"] = np.array([step > 0])
            outputs = dict(zip(self._outputs, self._decoder.run(None, feed), strict=True))
            best = int(outputs["logits"][0, -1].argmax())
            if best == self._recipe.end_token:
                break
            tokens.append(best)
            self._keep(feed, outputs, first=step == 0)
        return tokens[1:]

    def _empty_cache(self, encoded: int) -> dict[str, NDArray[np.generic]]:
        """Caches before the first step: no decoder steps yet, room for the encoder's states that step 1 fills."""
        return {
            name: np.zeros((1, shape[1], encoded if ".encoder." in name else 0, shape[3]), np.float32)
            for name, shape in self._cache.items()
        }

    def _keep(self, feed: dict[str, NDArray[np.generic]], outputs: dict[str, Floats], *, first: bool) -> None:
        """Take over the caches; the encoder's part comes from the first step, later ones return it empty."""
        for name in self._cache:
            if first or ".decoder." in name:
                feed[name] = outputs[name.replace("past_key_values", "present")]


def loudness(samples: Floats) -> Floats:
    """Return the root mean square of each 20 ms; one value for shorter sound."""
    whole = len(samples) // _FRAME * _FRAME
    frames = samples[:whole].reshape(-1, _FRAME) if whole else samples[None]
    loud: Floats = np.sqrt(np.mean(np.square(frames), axis=1))
    return loud


def split_at_silence(samples: Floats, longest: int) -> Iterator[Floats]:
    """Yield pieces of at most ``longest`` samples, each cut in the quietest 0.3 s of its last third."""
    while len(samples) > longest:
        first = longest * 2 // 3
        loud = loudness(samples[first:longest])
        window = min(_PAUSE, len(loud))
        mean = np.convolve(loud, np.ones(window, np.float32), "valid")
        cut = min(first + (int(mean.argmin()) + window // 2) * _FRAME, longest)
        yield samples[:cut]
        samples = samples[cut:]
    yield samples


def read_vocabulary(file: Path) -> list[bytes]:
    """Return the pieces of a Moonshine ``tokenizer.bin``.

    Each is its length and its bytes. A length below 128 is one byte; otherwise two, low seven bits first:
    (first − 128) + 128 × second. Pieces are SentencePiece's: "▁" stands for a space, numbers 3 to 258 are single bytes.
    """
    pieces: list[bytes] = []
    data, at = file.read_bytes(), 0
    while at < len(data):
        length, at = data[at], at + 1
        if length >= 128 and at < len(data):
            length, at = length - 128 + 128 * data[at], at + 1
        if at + length > len(data):
            raise LoadFailed(f"{file}: piece {len(pieces)} says {length} bytes, {len(data) - at} follow")
        pieces.append(data[at : at + length])
        at += length
    return pieces


def to_text(vocabulary: list[bytes], tokens: list[int]) -> str:
    """Join pieces to text, leaving out marks such as ``<s>`` and ``<<ST_1>>``."""
    pieces = (vocabulary[token] for token in tokens if token < len(vocabulary))
    spoken = (piece for piece in pieces if not (piece.startswith(b"<") and piece.endswith(b">") and len(piece) > 2))
    return b"".join(spoken).replace(_SPACE, b" ").decode("utf-8", "replace").strip()
