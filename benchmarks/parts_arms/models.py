"""Makes the model of `bench-parts`: eight models of real shape that were fine-tuned from one, random weights, split.

Shape and tokenizer are SmolLM2-360M's, in bfloat16. As where the lowest quarter was frozen in fine-tuning, all eight
have the embeddings and the lowest blocks in common, and each has upper blocks of its own. Beside it a second split: the
first of the eight with a LoRA for each task, as PEFT writes them. The weights are a function of the tensors' names, so
that a second run makes the same bytes. The folders of single models are removed once they are split, but for the first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.wire import BenchmarkError
from parts_arms.traffic import FIRST, KINDS

if TYPE_CHECKING:
    from torch import Tensor

TASKS = (*KINDS, "translate", "reply", "minutes", "title", "rewrite")
SHARED = 0.25
"""Of the blocks, which all tasks have in common."""
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 960,
    "num_hidden_layers": 32,
    "intermediate_size": 2560,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
BLOCKS: int = SHAPE["num_hidden_layers"]
RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""What the LoRAs change."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SAMPLES = [[3, 1415, 926, 5358, 979, 323]]
_NEEDED = 2.6
"""Of the bytes of the split: the folders of all models lie beside it while it is made."""


@dataclass(frozen=True)
class Models:
    """Where everything lies. With fewer blocks it is a smaller model for a quick run."""

    folder: Path
    blocks: int = BLOCKS

    @property
    def config(self) -> dict[str, Any]:
        """As `config.json` has it."""
        return SHAPE | {"num_hidden_layers": self.blocks}

    @property
    def home(self) -> Path:
        """The folder of this size."""
        return self.folder / f"{len(TASKS)}-tasks-{self.blocks}-blocks"

    @property
    def split(self) -> Path:
        """Eight tasks with upper blocks of their own."""
        return self.home / "split"

    @property
    def lora_split(self) -> Path:
        """One model, and a LoRA for each task."""
        return self.home / "lora-split"

    @property
    def adapters(self) -> Path:
        """PEFT folders, by task."""
        return self.home / "adapters"

    @property
    def shared(self) -> int:
        """Blocks that all tasks have in common."""
        return int(self.blocks * SHARED)

    def source(self, task: str) -> Path:
        """A task's own model, as it was fine-tuned; but for the first one there only while the split is made."""
        return self.home / "sources" / task

    @property
    def base(self) -> Path:
        """The model that the LoRAs are for."""
        return self.source(FIRST)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each part's file in the first split."""
        plan = json.loads((self.split / "split_plan.json").read_text())
        return {name: part["files"]["stored"]["bytes"] for name, part in plan["parts"].items()}

    @property
    def whole(self) -> int:
        """Bytes of all parts."""
        return sum(self.sizes.values())

    @property
    def one_task(self) -> int:
        """Bytes of the backbone and the largest part beside it."""
        backbone = self.sizes["backbone"]
        return backbone + max(size for name, size in self.sizes.items() if name != "backbone")

    def files(self) -> list[Path]:
        """Every file that holds weights."""
        return sorted(self.home.rglob("*.safetensors"))


def make(models: Models, tokenizer: Path) -> None:
    """Make it where it is missing, whole or not at all; ``tokenizer``: a model folder with SmolLM2's."""
    if (models.lora_split / "split_plan.json").is_file():
        return
    if not (tokenizer / _TOKENIZER[0]).is_file():
        raise BenchmarkError(f"there is no tokenizer in {tokenizer}: run `scripts/setup bench`")
    shutil.rmtree(models.home, ignore_errors=True)
    tensors = shapes(models)
    own = sum(_size(shape) for name, shape in tensors.items() if is_own(name, models))
    need = int(_NEEDED * (_total(tensors) + own * (len(TASKS) - 1)))
    models.folder.mkdir(parents=True, exist_ok=True)
    if need > (free := shutil.disk_usage(models.folder).free):
        raise BenchmarkError(
            f"{models.folder} has {free / 1e9:.1f} GB free, and making the split takes {need / 1e9:.1f} GB"
        )
    for task in TASKS:
        _say(f"making {models.source(task).name}")
        _write_model(models, task, tensors, tokenizer)
        _write_adapter(models.adapters / task, task, tensors)
    each = {task: {"kind": "generate", "folder": f"sources/{task}"} for task in TASKS}
    _split(models.home / "split.yaml", each, models.base, models.split)
    for task in TASKS:
        if models.source(task) != models.base:
            shutil.rmtree(models.source(task))
    each = {task: {"kind": "generate", "adapter": f"adapters/{task}"} for task in TASKS}
    _split(models.home / "lora-split.yaml", each, models.base, models.lora_split)


def shapes(models: Models) -> dict[str, tuple[int, ...]]:
    """The tensors of one model as its file has them: tied ones once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**models.config))
    return {name: tuple(one.shape) for name, one in model.state_dict().items() if name != "lm_head.weight"}


def is_own(name: str, models: Models) -> bool:
    """Whether each task has this tensor for itself."""
    block, _, _ = name.removeprefix("model.layers.").partition(".")
    return name == "model.norm.weight" or (block.isdigit() and int(block) >= models.shared)


def tensor(name: str, shape: tuple[int, ...], spread: float = 0.02) -> Tensor:
    """Random weights as they are at the start of a training."""
    import torch

    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(shape, dtype=torch.bfloat16)
    values.normal_(0.0, spread, generator=seeded)
    return values + 1 if name.endswith("norm.weight") else values


def _write_model(models: Models, task: str, tensors: Mapping[str, tuple[int, ...]], tokenizer: Path) -> None:
    from safetensors.torch import save_file

    folder = models.source(task)
    folder.mkdir(parents=True)
    made = {name: tensor(f"{task}/{name}" if is_own(name, models) else name, shape) for name, shape in tensors.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(models.config, indent=1))
    for name in _TOKENIZER:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _write_adapter(folder: Path, task: str, tensors: Mapping[str, tuple[int, ...]]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    made = {}
    for module, (wide, deep) in _adapted(tensors):
        for kind, shape in (("lora_A", (RANK, deep)), ("lora_B", (wide, RANK))):
            name = f"base_model.model.{module}.{kind}.weight"
            made[name] = tensor(f"{task}/{name}", shape)
    save_file(made, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    config |= {"target_modules": list(TARGETS), "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def _adapted(tensors: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, shape in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            yield module, (shape[0], shape[1])


def _split(mapping: Path, tasks: Mapping[str, Mapping[str, str]], model: Path, out: Path) -> None:
    """Let Pagein split it, as its users do."""
    each = {name: {**facts, "samples": _SAMPLES, "max_new_tokens": 2} for name, facts in tasks.items()}
    mapping.write_text(yaml.safe_dump({"tasks": each}, sort_keys=False))
    _pagein("analyze", str(model), "--tasks", str(mapping), "--out", str(out))
    _pagein("apply", str(out))


def _pagein(*words: str) -> None:
    _say(f"pagein split {words[0]}")
    done = subprocess.run(
        [sys.executable, "-m", "pagein", "split", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"pagein split {words[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _total(tensors: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(_size, tensors.values()))


def _size(shape: tuple[int, ...]) -> int:
    """Bytes in 16 bits."""
    return 2 * prod(shape)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
