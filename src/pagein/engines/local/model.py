"""The interfaces of models that compute in this process, one per capability."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pagein.protocol import Capability

if TYPE_CHECKING:
    from PIL.Image import Image

Floats = NDArray[np.float32]
SAMPLE_RATE = 16_000
"""Samples per second of all sound that models are given."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of some texts, one row each (n × width, fp32), and the tokens that they had together."""

    vectors: Floats
    tokens: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """A score per document, in the order of the documents, and the tokens that query and documents had together."""

    scores: list[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Label:
    """One class of an image."""

    index: int
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class SaliencyMap:
    """How much each part of an image matters: a grid over the whole image, and where its highest point is."""

    values: Floats
    """Rows × columns, from the top left; 0 to 1."""
    x: float
    """Place of the peak from the left, as a share of the width."""
    y: float
    """Place of the peak from the top, as a share of the height."""
    score: float
    """Value at the peak, before it was averaged into the grid."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word with its times in seconds."""

    start: float
    end: float
    word: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech with its times in seconds."""

    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    """Further fields of OpenAI's segment that the engine knows, for example ``avg_logprob``."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said."""

    text: str
    duration: float
    """Seconds of sound."""
    language: str | None = None
    segments: tuple[Segment, ...] | None = None
    """None where the engine has no times."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """How a piece of speech is to be transcribed."""

    language: str | None = None
    """Two-letter code; None = the model finds out."""
    prompt: str | None = None
    temperature: float = 0.0
    translate: bool = False
    """Into English instead of the language that is spoken."""
    word_times: bool = False


class LocalModel(ABC):
    """A loaded model. Its methods are called from the compute thread only, one at a time, and may block.

    They raise PageinError for input that the model cannot take.
    """

    capability: ClassVar[Capability]
    context: int | None = None
    """Tokens that one text may have; None where it has no meaning."""


class Embedder(LocalModel):
    """Texts to vectors."""

    capability = Capability.EMBEDDING

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Return one vector per text."""


class Reranker(LocalModel):
    """Orders documents by a query."""

    capability = Capability.RERANK

    @abstractmethod
    def rerank(self, query: str, documents: Sequence[str], max_tokens_per_document: int | None = None) -> Ranking:
        """Return one score per document, higher is closer; longer documents are cut only where a maximum is given."""


class Classifier(LocalModel):
    """Image to labels."""

    capability = Capability.CLASSIFICATION

    @abstractmethod
    def classify(self, image: Image, top_k: int) -> list[Label]:
        """Return the most likely labels of an RGB image, best first."""


class SaliencyMapper(LocalModel):
    """Image to a map of what matters in it."""

    capability = Capability.SALIENCY

    @abstractmethod
    def saliency(self, image: Image) -> SaliencyMap:
        """Return the map of an RGB image."""


class Transcriber(LocalModel):
    """Speech to text."""

    capability = Capability.TRANSCRIPTION
    has_times: bool = False
    """True where transcripts have segments with times."""
    max_seconds: float = 600.0
    """Longest sound that is taken; bounds the memory of its samples (64 kB per second)."""

    @abstractmethod
    def transcribe(self, samples: Floats, hearing: Hearing, abandoned: Callable[[], bool]) -> Transcript:
        """Return what is said in mono samples of 16 kHz in −1…1.

        Asks ``abandoned`` between steps and may stop with any result once it is true: nobody waits for it any more.
        """
