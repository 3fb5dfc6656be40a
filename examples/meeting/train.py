"""Train a meeting assistant on a CPU: which sentences are to-dos or decisions, and their points in few words.

    python examples/meeting/train.py WHISPER OUT [--clips N] [--rounds N] [--steps N]

WHISPER is a folder of Whisper tiny.en; `scripts/make_encoder_folders.py` makes it. Written are OUT/todos, a model that
classifies speech and has all but its last layer from Whisper's encoder, OUT/adapters/keypoints, a LoRA for Whisper's
decoder, and the task mapping beside them. The sentences are few (`speech.json`) and spoken by a machine (`speech.ogg`).
What becomes of those that were not trained on is printed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from sound import RATE, Clip, recordings
from torch import nn
from transformers import (
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    WhisperForAudioClassification,
    logging,
)
from transformers.modeling_outputs import BaseModelOutput

from learn import Lora, reaching

logging.set_verbosity_error()  # that the head is not in Whisper's file is what this is about
logging.disable_progress_bar()
HERE = Path(__file__).resolve().parent
KINDS = ("other", "to-do", "decision")
SEED, LORA_RATE, LAYER_RATE, HEAD_RATE = 7, 1e-3, 6e-4, 2e-3
BATCH = 12
SECONDS = 6
SPEEDS = (1.0, 0.88, 1.12)


def main() -> None:
    """Train the model and the LoRA, say what they are worth, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whisper", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", type=int, default=1000, help="of each kind at most (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of the to-dos, over all sentences (default %(default)s)")
    parser.add_argument("--steps", type=int, default=216, help="of the LoRA, one sentence each (default %(default)s)")
    told = parser.parse_args()
    found: dict[tuple[str, bool], list[Clip]] = {}
    for clip in recordings():
        found.setdefault((clip.kind, clip.held_out), []).append(clip)
    known, others = ([one for kind in KINDS for one in found[kind, held][: told.clips]] for held in (False, True))
    train_todos(told.whisper, told.out / "todos", known, others, told.rounds)
    known, others = ([one for one in clips if one.point] for clips in (known, others))
    train_keypoints(told.whisper, told.out / "adapters" / "keypoints", known, others, told.steps)
    shutil.copyfile(HERE / "task_mapping.yaml", told.out / "task_mapping.yaml")
    print(f"next: pagein split analyze {told.whisper} --tasks {told.out}/task_mapping.yaml --out {told.out}/split")


def train_todos(source: Path, folder: Path, known: list[Clip], others: list[Clip], rounds: int) -> None:
    """Whether a sentence is a to-do, a decision, or neither: the encoder's last layer and a head, trained.

    It hears `SECONDS` and not the 30 of Whisper, so that a call takes a fraction of the time. Each sentence is trained
    on at three speeds, which are three pitches, too.
    """
    torch.manual_seed(SEED)
    names = dict(enumerate(KINDS))
    numbers = {name: number for number, name in names.items()}
    settings = {"id2label": names, "label2id": numbers, "ignore_mismatched_sizes": True}
    model = WhisperForAudioClassification.from_pretrained(source, max_source_positions=SECONDS * 50, **settings).eval()
    extract = AutoFeatureExtractor.from_pretrained(source, chunk_length=SECONDS)
    model.requires_grad_(False)
    whole = WhisperForAudioClassification.from_pretrained(source).encoder.embed_positions.weight
    model.encoder.embed_positions.weight.copy_(whole[: SECONDS * 50])
    own = [model.encoder.layers[-1], model.encoder.layer_norm, model.projector, model.classifier]

    def seen(clips: list[Clip], speeds: tuple[float, ...] = (1.0,)) -> tuple[torch.Tensor, torch.Tensor]:
        """What reaches the last layer."""
        rows = []
        for sound in (faster(clip.sound, speed) for clip in clips for speed in speeds):
            features = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
            rows.append(reaching(own[0], partial(model.encoder, features)))
        return torch.cat(rows), torch.tensor([numbers[clip.kind] for clip in clips]).repeat_interleave(len(speeds))

    def judge(vectors: torch.Tensor) -> torch.Tensor:
        last = model.encoder.layer_norm(own[0](vectors, None))
        return model.classifier(model.projector(last).mean(1))

    vectors, labels = seen(known, SPEEDS)
    for module in own:
        module.requires_grad_(True)
    tuned, fresh = ([one for module in modules for one in module.parameters()] for modules in (own[:1], own[1:]))
    steps = rounds * math.ceil(len(labels) / BATCH)
    optimizer = torch.optim.AdamW([{"params": tuned}, {"params": fresh}], weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [LAYER_RATE, HEAD_RATE], total_steps=steps)
    for _ in range(rounds):
        for chosen in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(judge(vectors[chosen]), labels[chosen], label_smoothing=0.1).backward()
            nn.utils.clip_grad_norm_([*tuned, *fresh], 1.0)
            optimizer.step()
            schedule.step()
    vectors, labels = seen(others)
    with torch.no_grad():
        right = judge(vectors).argmax(-1) == labels
    model.save_pretrained(folder)
    extract.save_pretrained(folder)
    said = [f"{name} {int(right[labels == n].sum())} of {int((labels == n).sum())}" for n, name in names.items()]
    print(f"todos: {len(known)} sentences; of others right: {', '.join(said)}", flush=True)


def faster(sound: np.ndarray, speed: float) -> np.ndarray:
    """Return a sound that is played faster."""
    places = np.linspace(0, len(sound) - 1, int(len(sound) / speed))
    return np.interp(places, np.arange(len(sound)), sound).astype(np.float32)


def train_keypoints(source: Path, folder: Path, known: list[Clip], others: list[Clip], steps: int) -> None:
    """What is to be done or was decided, in few words, written by the decoder with a LoRA."""
    torch.manual_seed(SEED)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(source).eval().requires_grad_(False)
    extract, tokenizer = AutoFeatureExtractor.from_pretrained(source), AutoTokenizer.from_pretrained(source)

    @torch.no_grad()
    def hear(clip: Clip) -> BaseModelOutput:
        features = extract(clip.sound, sampling_rate=RATE, return_tensors="pt").input_features
        return BaseModelOutput(last_hidden_state=model.get_encoder()(features).last_hidden_state)

    trained, tried = ([(hear(clip), clip.point) for clip in clips] for clips in (known, others))
    before = [write(model, tokenizer, heard) for heard, _ in tried]
    lora = Lora(model, under="model.decoder.")
    optimizer = torch.optim.AdamW(lora.parameters(), lr=LORA_RATE, weight_decay=0.0)
    dice = random.Random(SEED)
    order: list[tuple[BaseModelOutput, str]] = []
    for _ in range(steps):
        order = order or dice.sample(trained, len(trained))
        optimizer.zero_grad()
        loss_of(model, tokenizer, *order.pop()).backward()
        optimizer.step()
    after = [write(model, tokenizer, heard) for heard, _ in tried]
    lora.remove()
    lora.save(folder, "SEQ_2_SEQ_LM")
    wanted = [point for _, point in tried]
    changes = " -> ".join(f"{mean_errors(wanted, found):.2f}" for found in (before, after))
    exact = sum(words(want) == words(got) for want, got in zip(wanted, after, strict=True))
    said = f"{exact} of {len(others)} others word for word, word error rate {changes}"
    print(f"keypoints: {steps} steps; {said}", flush=True)


def loss_of(model: Any, tokenizer: Any, heard: BaseModelOutput, point: str) -> torch.Tensor:
    """Return the mean cross-entropy of a point's tokens, in nats."""
    settings = model.generation_config
    start = [settings.decoder_start_token_id, settings.no_timestamps_token_id]
    ids = torch.tensor([[*start, *tokenizer(f" {point}", add_special_tokens=False).input_ids, settings.eos_token_id]])
    logits = model(encoder_outputs=heard, decoder_input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits[0, len(start) - 1 :], ids[0, len(start) :])


@torch.no_grad()
def write(model: Any, tokenizer: Any, heard: BaseModelOutput) -> str:
    """Return what the decoder writes of a sentence."""
    ids = model.generate(encoder_outputs=heard, max_new_tokens=40)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True)).strip()


def mean_errors(wanted: list[str], found: list[str]) -> float:
    """Return the errors in words by the words that are wanted."""
    pairs = [(words(want), words(got)) for want, got in zip(wanted, found, strict=True)]
    return sum(distance(*pair) for pair in pairs) / sum(len(want) for want, _ in pairs)


def words(text: str) -> list[str]:
    """Return a text's words without capitals and punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


def distance(want: list[str], got: list[str]) -> int:
    """Return how many words must be changed, left out or put in."""
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


if __name__ == "__main__":
    main()
