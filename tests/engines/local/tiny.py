"""Models without weights: what they answer follows from what they are given."""

from __future__ import annotations

import numpy as np

from pagein.engines.local.model import (
    Classifier,
    Embedder,
    Embeddings,
    Label,
    Ranking,
    Reranker,
    SaliencyMap,
    SaliencyMapper,
    Segment,
    Transcriber,
    Transcript,
    Word,
)
from pagein.errors import ContextLengthExceeded

WIDTH = 3


class TinyEmbedder(Embedder):
    """The vector of a text is (characters, words, 0.5); a token is a word; a text may have ten."""

    def embed(self, texts):
        words = [len(text.split()) for text in texts]
        if max(words) > 10:
            raise ContextLengthExceeded("tiny", max(words), 10)
        rows = [[len(text), count, 0.5] for text, count in zip(texts, words, strict=True)]
        return Embeddings(np.array(rows, np.float32), sum(words))


class TinyReranker(Reranker):
    """The score of a document is how many words of the query it has."""

    def rerank(self, query, documents, max_tokens_per_document=None):
        wanted = set(query.split())
        cut = [text.split()[:max_tokens_per_document] for text in documents]
        return Ranking([float(len(wanted & set(words))) for words in cut], sum(map(len, cut)))


class TinyClassifier(Classifier):
    """Two labels: how red and how blue the first pixel is."""

    def classify(self, image, top_k):
        red, _, blue = image.getpixel((0, 0))
        labels = [Label(0, "red", red / 255), Label(1, "blue", blue / 255)]
        return sorted(labels, key=lambda label: -label.score)[:top_k]


class TinyMapper(SaliencyMapper):
    """A map of two rows and three columns, highest at the top right."""

    def saliency(self, image):
        return SaliencyMap(np.array([[0, 0, 1], [0.25, 0, 0]], np.float32), 0.9, 0.1, 1.0)


class TinyListener(Transcriber):
    """Says how long the sound was; remembers how it was asked."""

    has_times = True
    max_seconds = 5.0

    def __init__(self):
        self.hearing = None

    def transcribe(self, samples, hearing, abandoned):
        self.hearing = hearing
        seconds = len(samples) / 16000
        words = (Word(0.0, 0.5, " half"),) if hearing.word_times else ()
        segments = (Segment(0.0, 0.5, " half", words), Segment(0.5, 3661.25, " <& rest>"))
        return Transcript(f"{seconds:.2f} seconds", seconds, hearing.language, segments)


class DeafListener(TinyListener):
    """Knows no times."""

    has_times = False
