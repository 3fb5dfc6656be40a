"""The meeting assistant, end to end and short: train, analyse, apply, listen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.engines.conftest import DATA, word_errors
from tests.examples.running import EXAMPLES, loads, model_folder, run

pytestmark = pytest.mark.engines
EXAMPLE = EXAMPLES / "meeting"
DECODER = "shared.keypoints.transcribe"


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """The assistant's split, of a head and a LoRA that a few sentences trained."""
    out = tmp_path_factory.mktemp("meeting")
    model = model_folder("whisper-tiny-en-hf")
    trained = run(EXAMPLE / "train.py", model, out, "--clips", 3, "--rounds", 1, "--steps", 3)
    assert [line.partition(":")[0] for line in trained.splitlines()] == ["todos", "keypoints", "next"]
    run("-m", "pagein", "split", "analyze", model, "--tasks", out / "task_mapping.yaml", "--out", out / "split")
    run("-m", "pagein", "split", "apply", out / "split")
    return out / "split"


def test_the_encoder_is_the_backbone_of_three_tasks(split: Path):
    """Transcription and key points share the decoder; to-dos need a fifth of the bytes."""
    plan = json.loads((split / "split_plan.json").read_text())
    assert {task: set(of["parts"]) for task, of in plan["tasks"].items()} == {
        "transcribe": {"backbone", DECODER},
        "keypoints": {"backbone", DECODER, "keypoints.adapter"},
        "todos": {"backbone", "todos"},
    }
    assert 0.75 < plan["saves"]["todos"]["share"] < 0.85


def test_every_word_is_heard_through_the_split(split: Path):
    """A person's sentence is transcribed."""
    said = run(EXAMPLE / "meeting.py", split, DATA / "voice.wav", "--transcript")
    heard = " ".join(re.findall(r"^said: (.*)$", said, re.MULTILINE))
    assert word_errors((DATA / "voice.txt").read_text(), heard) <= 0.2
    assert loads(said)[DECODER] == 1


def test_the_decoder_is_read_only_for_what_is_worth_writing_down(split: Path):
    """Without a transcript, sentences that are no to-do and no decision bring neither decoder nor LoRA."""
    said = run(EXAMPLE / "meeting.py", split, DATA / "voice.wav")
    worth = int(bool(re.search(r"^(to-do|decision): ", said, re.MULTILINE)))
    assert "said: " not in said
    assert loads(said) == {"backbone": 1, "todos": 1, DECODER: worth, "keypoints.adapter": worth}
