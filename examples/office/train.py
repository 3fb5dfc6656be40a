"""Train four LoRAs of one model on a CPU: summarise, grammar, e-mail, translate.

    python examples/office/train.py MODEL OUT [--steps N]

MODEL is a folder of a causal language model with `q_proj` and `v_proj`. Each LoRA is written as PEFT writes its own, to
`OUT/adapters/TASK`, and the task mapping beside them. The texts are few (`texts.json`): what is learnt is how a task's
answers look. The loss on texts that were not trained on is printed before and after, in nats per token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost more than they save on a busy machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from learn import Lora

HERE = Path(__file__).resolve().parent
RATE, SEED = 1e-3, 7
SEPARATOR = "\n###\n"
"""Between what is asked and the answer, in training as in use."""
Pair = tuple[torch.Tensor, int]
"""Token ids of question and answer, and how many of them are the question's."""


def main() -> None:
    """Train what the texts have, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=48, help="of each task, one text each (default %(default)s)")
    told = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(told.model)
    model = AutoModelForCausalLM.from_pretrained(told.model, dtype=torch.float32).eval().requires_grad_(False)
    texts = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
    for task, of in texts.items():
        pairs = {name: [encode(tokenizer, *pair) for pair in chosen] for name, chosen in of.items()}
        train(model, task, pairs, told.steps, told.out / "adapters" / task)
    shutil.copyfile(HERE / "task_mapping.yaml", told.out / "task_mapping.yaml")
    print(f"next: pagein split analyze {told.model} --tasks {told.out}/task_mapping.yaml --out {told.out}/split")


def train(model: nn.Module, task: str, pairs: dict[str, list[Pair]], steps: int, folder: Path) -> None:
    """Train one LoRA, say what it is worth, and write it."""
    torch.manual_seed(SEED)
    lora = Lora(model)
    before = mean_loss(model, pairs["held_out"])
    optimizer = torch.optim.AdamW(lora.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, pairs["train"][step % len(pairs["train"])]).backward()
        optimizer.step()
    after = mean_loss(model, pairs["held_out"])
    lora.remove()
    lora.save(folder)
    print(f"{task}: {steps} steps; loss on texts not trained on {before:.2f} -> {after:.2f} nats per token", flush=True)


def encode(tokenizer: Any, question: str, answer: str) -> Pair:
    """Return a pair's token ids (1 × tokens, int64), its end included."""
    asked = tokenizer(question + SEPARATOR, add_special_tokens=False).input_ids
    answered = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return torch.tensor([asked + answered]), len(asked)


def loss_of(model: nn.Module, pair: Pair) -> torch.Tensor:
    """Return the mean cross-entropy of an answer's tokens, in nats."""
    ids, asked = pair
    logits = model(input_ids=ids, use_cache=False).logits[0, asked - 1 : -1]
    return nn.functional.cross_entropy(logits.float(), ids[0, asked:])


@torch.no_grad()
def mean_loss(model: nn.Module, pairs: list[Pair]) -> float:
    """Return the mean of the pairs' losses."""
    return sum(float(loss_of(model, pair)) for pair in pairs) / len(pairs)


if __name__ == "__main__":
    main()
