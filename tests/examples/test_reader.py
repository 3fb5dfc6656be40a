"""The document reader, end to end and short: train, analyse, apply, answer within half of its memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.examples.running import EXAMPLES, loads, model_folder, run

pytestmark = pytest.mark.engines
EXAMPLE = EXAMPLES / "reader"


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """The reader's split, of heads that a few pages and all texts trained."""
    out = tmp_path_factory.mktemp("reader")
    vision, text = model_folder("dinov2-s-hf"), model_folder("minilm-hf")
    trained = run(EXAMPLE / "train.py", vision, text, out, "--pages", 2)
    told = dict(line.partition(": ")[::2] for line in trained.splitlines())
    right, texts = map(int, re.search(r"(\d+) of (\d+) right", told["topic"]).groups())
    assert right > texts * 0.7
    run("-m", "pagein", "split", "analyze", out / "page", "--tasks", out / "task_mapping.yaml", "--out", out / "split")
    run("-m", "pagein", "split", "apply", out / "split")
    return out / "split"


def test_each_task_needs_one_encoder_or_half_of_it(split: Path):
    """Vision and text share nothing; the fields need the lower half of the text encoder."""
    plan = json.loads((split / "split_plan.json").read_text())
    assert {task: set(of["parts"]) for task, of in plan["tasks"].items()} == {
        "page": {"page"},
        "topic": {"shared.fields.search.topic", "shared.search.topic", "topic"},
        "fields": {"shared.fields.search.topic", "fields"},
        "search": {"shared.fields.search.topic", "shared.search.topic"},
    }
    saved = {task: of["share"] for task, of in plan["saves"].items()}
    assert saved["fields"] > 0.6
    assert min(saved.values()) > 0.45


def test_a_text_brings_no_vision_encoder(split: Path):
    """Its topic and its fields are found, and only the text's parts are read."""
    said = run(EXAMPLE / "reader.py", split, "--text", "The balance of 56 euros is due before 20 June.")
    assert "topic: payment" in said
    assert "amount “56 euros”" in said
    assert "date “20 June”" in said
    assert loads(said)["page"] == 0
    assert loads(said)["shared.search.topic"] == 1


def test_half_of_the_memory_is_enough_for_every_task(split: Path):
    """Within 100 MiB of 171, the encoders take turns."""
    said = run(EXAMPLE / "reader.py", split, "--memory", "100MiB")
    assert all(f"{task}: " in said for task in ("page", "topic", "fields", "search"))
    assert "search: 0" in said
    assert loads(said)["page"] == loads(said)["shared.search.topic"] == 1
    assert re.search(r"^page: cold", said, re.MULTILINE)
