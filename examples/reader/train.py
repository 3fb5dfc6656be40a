"""Train the heads of a document reader on a CPU: the kind of a page, a text's topic, and the fields in it.

    python examples/reader/train.py VISION TEXT OUT [--pages N] [--steps N]

VISION is a folder of DINOv2, TEXT one of all-MiniLM-L6-v2; `scripts/make_encoder_folders.py` makes both. The encoders
stay as they are. Written are OUT/page, OUT/topic, OUT/fields, ordinary models each, and the task mapping beside them.
Pages are drawn (`pages.py`), half of them as if scanned; texts are few (`texts.json`). How many of the pages, texts and
tokens that were not trained on are right is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from pages import KINDS, draw, pixels
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    logging,
)

from learn import fit, reaching

logging.set_verbosity_error()  # that the heads are not in the encoders' files is what this is about
logging.disable_progress_bar()

HERE = Path(__file__).resolve().parent
SEED = 7
HELD_OUT = 1000
"""Seed of the first page that is not trained on."""
LOWER = 3
"""Layers of the text encoder that the fields need."""
FIELDS = ("none", "date", "amount", "person")
MARK = re.compile(r"\{(\w+):([^}]*)\}")


def main() -> None:
    """Train each head, say what it is worth, and write its model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vision", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pages", type=int, default=20, help="of each kind, to train and to try (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each head (default %(default)s)")
    told = parser.parse_args()
    texts = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
    train_page(told.vision, told.out / "page", told.pages, told.steps)
    train_topic(told.text, told.out / "topic", texts, told.steps)
    train_fields(told.text, told.out / "fields", texts, told.steps)
    shutil.copyfile(HERE / "task_mapping.yaml", told.out / "task_mapping.yaml")
    print(f"next: pagein split analyze {told.out}/page --tasks {told.out}/task_mapping.yaml --out {told.out}/split")


def train_page(source: Path, folder: Path, count: int, steps: int) -> None:
    """The kind of a page, over DINOv2's first vector and the mean of the others."""
    model = _model(AutoModelForImageClassification, source, list(KINDS))

    def seen(first: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for kind in KINDS:
            for number in range(pages):
                image = torch.tensor(pixels(draw(kind, first + number, scanned=number % 2 == 1)))[None]
                rows.append(reaching(model.classifier, partial(model, image)))
        return torch.cat(rows), torch.arange(len(KINDS)).repeat_interleave(pages)

    fit(model.classifier, (model.classifier,), *seen(0, count), steps=steps, penalty=1e-2)
    right = _right(model.classifier, *seen(HELD_OUT, count))
    _save(model, folder)
    print(f"page: {count} pages of each kind; of others {right} right", flush=True)


def train_topic(source: Path, folder: Path, texts: dict[str, Any], steps: int) -> None:
    """The topic of a text, over the vector of its first token."""
    model = _model(AutoModelForSequenceClassification, source, list(texts))
    tokenizer = AutoTokenizer.from_pretrained(source)

    def head(vectors: torch.Tensor) -> torch.Tensor:
        return model.classifier(model.bert.pooler(vectors[:, None]))

    def seen(chosen: str) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [(MARK.sub(r"\2", text), number) for number, of in enumerate(texts.values()) for text in of[chosen]]
        calls = [partial(model, **tokenizer(text, return_tensors="pt")) for text, _ in pairs]
        rows = [reaching(model.bert.pooler, call)[:, 0] for call in calls]
        return torch.cat(rows), torch.tensor([number for _, number in pairs])

    known = seen("train")
    fit(head, (model.bert.pooler.dense, model.classifier), *known, steps=steps, penalty=1e-4)
    right = _right(head, *seen("held_out"))
    _save(model, folder, tokenizer)
    print(f"topic: {len(known[1])} texts; of others {right} right", flush=True)


def train_fields(source: Path, folder: Path, texts: dict[str, Any], steps: int) -> None:
    """What each token of a text is: part of a date, an amount, a person's name, or nothing of it.

    Half of the encoder's layers are enough, and better: the upper ones mix a token with its text.
    """
    model = _model(AutoModelForTokenClassification, source, list(FIELDS), num_hidden_layers=LOWER)
    tokenizer = AutoTokenizer.from_pretrained(source)

    def seen(chosen: str) -> tuple[torch.Tensor, torch.Tensor]:
        rows, labels = [], []
        for marked in (text for of in texts.values() for text in of[chosen]):
            text, kinds = unmarked(marked)
            found = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
            spans = found.pop("offset_mapping")[0, 1:-1]
            rows.append(reaching(model.classifier, partial(model, **found))[0, 1:-1])
            labels += [kinds[start] for start, _ in spans.tolist()]
        return torch.cat(rows), torch.tensor(labels)

    known = seen("train")
    fit(model.classifier, (model.classifier,), *known, steps=steps, penalty=0.1)
    vectors, labels = seen("held_out")
    guesses = model.classifier(vectors).argmax(-1)
    said = [f"{name} {_found(guesses == number, labels == number)}" for number, name in enumerate(FIELDS) if number]
    _save(model, folder, tokenizer)
    print(f"fields: {len(known[1])} tokens; in other texts {', '.join(said)}", flush=True)


def unmarked(marked: str) -> tuple[str, list[int]]:
    """Return a text without its marks, and for each character which of `FIELDS` it belongs to."""
    text, kinds, at = "", [], 0
    for mark in MARK.finditer(marked):
        before, kind, inner = marked[at : mark.start()], FIELDS.index(mark[1]), mark[2]
        text, kinds = text + before + inner, kinds + [0] * len(before) + [kind] * len(inner)
        at = mark.end()
    return text + marked[at:], kinds + [0] * (len(marked) - at)


def _model(kind: Any, source: Path, labels: list[str], **settings: Any) -> Any:
    torch.manual_seed(SEED)
    names = dict(enumerate(labels))
    numbers = {name: number for number, name in names.items()}
    model = kind.from_pretrained(source, id2label=names, label2id=numbers, **settings)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _right(head: Any, inputs: torch.Tensor, labels: torch.Tensor) -> str:
    return f"{int((head(inputs).argmax(-1) == labels).sum())} of {len(labels)}"


def _found(guessed: torch.Tensor, wanted: torch.Tensor) -> str:
    """Tokens that were found, that there are, and that were taken for some by mistake."""
    hit = int((guessed & wanted).sum())
    return f"{hit} of {int(wanted.sum())} ({int(guessed.sum()) - hit} wrong)"


def _save(model: Any, folder: Path, tokenizer: Any = None) -> None:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
