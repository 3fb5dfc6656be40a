"""The voice-question task: speech → text → retrieval → rerank → answer, with two images looked at in between.

Each step returns what the model said, and checks that it is the real thing: a transcript close to the sentence that was
read, the right passage on top, an espresso seen in the cup, the cat where the cat is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from client import Answer, Pagein

DATA = Path(__file__).parent / "data"


@dataclass
class Step:
    """One step's outcome for people, and whether it is what the real model gives."""

    name: str
    answer: Answer
    said: str
    right: bool


@dataclass
class Task:
    """One run of the task; what one step finds, the next one uses."""

    pagein: Pagein
    passages: list[str] = field(default_factory=list)
    expected: int = 0
    question: str = ""
    heard: str = ""
    vectors: list[list[float]] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    def steps(self) -> Iterator[Step]:
        """Run the steps in order, each when the one before was shown."""
        corpus = json.loads((DATA / "passages.json").read_text())
        self.passages, self.expected = corpus["passages"], corpus["right"]
        self.question = corpus["ask"]
        yield self.hear()
        yield self.see()
        yield self.retrieve()
        yield self.rerank()
        yield self.look()
        yield self.answer()

    def hear(self) -> Step:
        """Speech recognition of a human voice."""
        answer = self.pagein.ask("hear", "/run/hear", (DATA / "voice.wav").read_bytes(), "audio/wav")
        self.heard = answer.body["text"].strip()
        wrong = word_errors((DATA / "voice.txt").read_text(), self.heard)
        return Step("speech → text", answer, f"“{self.heard}”", wrong <= 0.2)

    def see(self) -> Step:
        """Image classification."""
        answer = self.pagein.ask("classify", "/run/classify", (DATA / "coffee.jpg").read_bytes(), "image/jpeg")
        best = answer.body["data"][0]
        said = f"coffee.jpg: {best['label']} ({best['score']:.2f})"
        return Step("image → label", answer, said, "espresso" in best["label"].lower() and best["score"] > 0.5)

    def retrieve(self) -> Step:
        """Embed the question and the corpus, and keep the five nearest passages."""
        answer = self.pagein.ask("embed", "/run/embed", {"input": [self.heard, *self.passages]})
        question, *vectors = [row["embedding"] for row in answer.body["data"]]
        nearest = sorted(range(len(vectors)), key=lambda i: -cosine(question, vectors[i]))
        self.found = nearest[:5]
        said = f"{len(vectors)} passages, nearest: “{self.passages[nearest[0]][:48]}…”"
        return Step("text → retrieval", answer, said, self.expected in self.found)

    def rerank(self) -> Step:
        """Order the five by a second model."""
        documents = [self.passages[i] for i in self.found]
        answer = self.pagein.ask("rerank", "/run/rerank", {"query": self.heard, "documents": documents})
        results = answer.body["results"]
        self.found = [self.found[row["index"]] for row in results]
        said = f"first: “{self.passages[self.found[0]][:56]}…”"
        scores = [row["relevance_score"] for row in results]
        return Step("rerank", answer, said, scores == sorted(scores, reverse=True) and self.found[0] == self.expected)

    def look(self) -> Step:
        """Where a vision transformer looks in the picture of a cat."""
        answer = self.pagein.ask("look", "/run/look", (DATA / "chelsea.jpg").read_bytes(), "image/jpeg")
        peak = answer.body["peak"]
        said = f"chelsea.jpg: looks at x {peak['x']:.2f}, y {peak['y']:.2f}"
        return Step("image → saliency", answer, said, 0.2 < peak["x"] < 0.8 and 0.1 < peak["y"] < 0.8)

    def answer(self) -> Step:
        """The language model answers from the best passage."""
        messages = [
            {"role": "system", "content": "You answer questions about a passage in one short sentence."},
            {"role": "user", "content": f"{self.passages[self.found[0]]}\n\nQuestion: {self.question}"},
        ]
        body = {"model": "answer", "messages": messages, "max_tokens": 48, "temperature": 0}
        answer = self.pagein.ask("answer", "/v1/chat/completions", body)
        text = " ".join(answer.body["choices"][0]["message"]["content"].split())
        tokens = answer.body["usage"]["completion_tokens"]
        right = all(word in text.lower() for word in ("dashwood", "promise", "stepmother"))
        return Step("passage → answer", answer, f"{self.question} {text} ({tokens} tokens)", right)


def cosine(a: list[float], b: list[float]) -> float:
    """Cosine of the angle between two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def word_errors(reference: str, heard: str) -> float:
    """Word error rate: edit distance in words over the reference's length."""
    want, got = (re.findall(r"[a-z']+", text.lower()) for text in (reference, heard))
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1] / max(1, len(want))
