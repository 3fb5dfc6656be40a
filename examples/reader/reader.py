"""A document reader: one split with two encoders; a call reads only the one that it needs.

    python examples/reader/reader.py SPLIT --page PICTURE
    python examples/reader/reader.py SPLIT --text TEXT
    python examples/reader/reader.py SPLIT --find QUESTION FILE     # FILE: a text a line
    python examples/reader/reader.py SPLIT [--memory 100MiB]        # each once, on a page that it draws

SPLIT is the folder that `pagein split apply` wrote. `examples/reader/train.py` makes the models. Texts in pictures are
not read: that is another program's work (OCR).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine

import torch
from pages import draw, pixels
from PIL import Image
from transformers import AutoTokenizer

from pagein import load_parts

TEXTS = (
    "The balance of 56 euros is still open, so we ask for your payment before 20 June.",
    "The night train to Warsaw leaves on 8 December from platform four.",
    "Nina Larsen is applying for the apprenticeship as a carpenter.",
)
QUESTION = "Which bill is unpaid?"


class Reader:
    """What can be asked of a document."""

    def __init__(self, split: Path, memory: str | None = None) -> None:
        self.model = load_parts(split, memory=memory)
        self.tokenizer = AutoTokenizer.from_pretrained(split / "fields")

    def page(self, image: Image.Image) -> tuple[str, float]:
        """Return what kind of page a picture shows, and how sure that is."""
        return self._label("page", pixel_values=torch.tensor(pixels(image))[None])

    def topic(self, text: str) -> tuple[str, float]:
        """Return what a text is about, and how sure that is."""
        return self._label("topic", **self.tokenizer(text, return_tensors="pt"))

    def fields(self, text: str) -> list[tuple[str, str]]:
        """Return dates, amounts and persons of a text, each with its kind."""
        found = self.tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        spans = found.pop("offset_mapping")[0].tolist()[1:-1]
        with torch.no_grad():
            kinds = self.model(**found, task="fields").logits[0, 1:-1].argmax(-1).tolist()
        names = self.model.of("fields").config.id2label
        joined: list[tuple[int, int, int]] = []
        for kind, (start, end) in zip(kinds, spans, strict=True):
            if joined and joined[-1][0] == kind and start - joined[-1][2] <= 1:
                joined[-1] = (kind, joined[-1][1], end)
            else:
                joined.append((kind, start, end))
        return [(names[kind], text[start:end]) for kind, start, end in joined if kind]

    def find(self, question: str, texts: list[str]) -> list[tuple[float, str]]:
        """Return texts with their likeness to a question, the nearest first."""
        with self.model.lease("search"), torch.no_grad():
            asked, *vectors = [self._vector(text) for text in (question, *texts)]
        return sorted(((float(asked @ one), text) for one, text in zip(vectors, texts, strict=True)), reverse=True)

    def parts(self) -> Iterator[str]:
        """Say what was loaded."""
        for part in self.model.pagein.report().parts:
            yield f"{part.part}: {part.state}, {part.bytes} bytes, loaded {part.loads} times"

    def _vector(self, text: str) -> torch.Tensor:
        found = self.tokenizer(text, return_tensors="pt")
        mean = self.model.of("search").bert(**found).last_hidden_state[0].mean(0)
        return mean / mean.norm()

    def _label(self, task: str, **inputs: Any) -> tuple[str, float]:
        with torch.no_grad():
            shares = self.model(**inputs, task=task).logits[0].softmax(-1)
        best = int(shares.argmax())
        return self.model.of(task).config.id2label[best], float(shares[best])


def main() -> None:
    """Answer, and say what was loaded for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", type=Path)
    parser.add_argument("--page", type=Path, metavar="PICTURE")
    parser.add_argument("--text", metavar="TEXT")
    parser.add_argument("--find", nargs=2, metavar=("QUESTION", "FILE"))
    parser.add_argument("--memory", metavar="SIZE", help="for the weights of all parts (default: all fit)")
    told = parser.parse_args()
    reader = Reader(told.split, told.memory)
    every = not (told.page or told.text or told.find)
    if told.page or every:
        kind, sure = reader.page(Image.open(told.page) if told.page else draw("invoice", 2000))
        print(f"page: {kind} ({sure:.2f})")
    for text in [told.text] if told.text else TEXTS if every else ():
        topic, sure = reader.topic(text)
        print(f"topic: {topic} ({sure:.2f}): {text}")
        print(f"fields: {', '.join(f'{kind} “{words}”' for kind, words in reader.fields(text)) or 'none'}")
    if told.find or every:
        question, file = told.find or (QUESTION, None)
        texts = Path(file).read_text(encoding="utf-8").splitlines() if file else list(TEXTS)
        for likeness, text in reader.find(question, texts)[:3]:
            print(f"search: {likeness:.2f} {text}")
    print(*reader.parts(), sep="\n")
    reader.model.pagein.close()


if __name__ == "__main__":
    main()
