"""A meeting assistant: one speech encoder; what is worth writing down decides whether the decoder is read at all.

    python examples/meeting/meeting.py SPLIT [SOUND] [--transcript]

SPLIT is the folder that `pagein split apply` wrote; `examples/meeting/train.py` makes what goes into it. SOUND is any
file that FFmpeg reads; without one six sentences are heard that were not trained on. It is cut at its pauses. Of to-dos
and decisions the point is written; with --transcript every word of all sentences, too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine

import numpy as np
import torch
from sound import RATE, read_sound, recordings, sentences
from transformers import AutoFeatureExtractor, AutoTokenizer, logging
from transformers.modeling_outputs import BaseModelOutput

from pagein import load_parts

logging.set_verbosity_error()


class Assistant:
    """What can be asked of a sentence."""

    def __init__(self, split: Path) -> None:
        self.model = load_parts(split)
        self.short, self.long = (AutoFeatureExtractor.from_pretrained(split / key) for key in ("todos", "transcribe"))
        self.tokenizer = AutoTokenizer.from_pretrained(split / "transcribe")

    @torch.no_grad()
    def kind(self, sound: np.ndarray) -> str:
        """Return whether a sentence is a to-do, a decision, or neither; its first seconds tell."""
        features = self.short(sound, sampling_rate=RATE, return_tensors="pt").input_features
        best = int(self.model(features, task="todos").logits[0].argmax())
        return str(self.model.of("todos").config.id2label[best])

    @torch.no_grad()
    def hear(self, sound: np.ndarray) -> BaseModelOutput:
        """Let Whisper's encoder hear a sentence: once for all that is written of it."""
        features = self.long(sound, sampling_rate=RATE, return_tensors="pt").input_features
        with self.model.lease("transcribe"):
            return self.model.of("transcribe").get_encoder()(features)

    def write(self, heard: BaseModelOutput, task: str) -> str:
        """Return a sentence's point (``keypoints``) or every word of it (``transcribe``)."""
        ids = self.model.generate(encoder_outputs=heard, task=task, max_new_tokens=200)
        return str(self.tokenizer.decode(ids[0], skip_special_tokens=True)).strip()


def main() -> None:
    """Write what was said, and say what was loaded for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", type=Path)
    parser.add_argument("sound", type=Path, nargs="?")
    parser.add_argument("--transcript", action="store_true")
    told = parser.parse_args()
    assistant = Assistant(told.split)
    sounds = (
        sentences(read_sound(told.sound)) if told.sound else [clip.sound for clip in recordings() if clip.held_out][::6]
    )
    for sound in sounds:
        kind = assistant.kind(sound)
        if kind == "other" and not told.transcript:
            continue
        heard = assistant.hear(sound)
        if kind != "other":
            print(f"{kind}: {assistant.write(heard, 'keypoints')}")
        if told.transcript:
            print(f"said: {assistant.write(heard, 'transcribe')}")
    for part in assistant.model.pagein.report().parts:
        print(f"{part.part}: {part.state}, {part.bytes} bytes, loaded {part.loads} times")
    assistant.model.pagein.close()


if __name__ == "__main__":
    main()
