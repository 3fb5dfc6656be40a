"""A small net of several tasks that uses its weights in every way, and a small Llama with LoRAs; as splits."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pagein.catalog.split.plan import Model, Role, SplitPlan, Task
from pagein.parts.splitting.joining import join
from pagein.parts.splitting.making import Making, PartMaking, SourceTensor
from pagein.parts.splitting.writing import write_split
from pagein.weights.reading.sources import DTYPES

WIDTH, WORDS = 16, 32
HEADS = ("classify", "tag", "score", "attend")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Net(nn.Module):
    """A shared backbone, and a head for each task: a module, functional use, bare parameters, attention."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("turns", torch.arange(WIDTH, dtype=torch.float32) / 7, persistent=False)
        self.classify = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, 3, bias=False))
        self.tag = nn.Linear(WIDTH, 5)
        self.score = nn.Parameter(torch.randn(WIDTH, 2))
        self.register_buffer("shift", torch.randn(2))
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.words = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, task: str) -> Any:
        hidden = self.norm(torch.tanh(self.body(self.embed(ids))) + torch.sin(self.turns))
        if task == "classify":
            return self.classify(hidden)
        if task == "tag":
            return functional.linear(hidden, self.tag.weight, self.tag.bias)
        if task == "score":
            return hidden @ self.score + self.shift
        if task == "attend":
            return self.attend(hidden, hidden, hidden, need_weights=False)[0]
        if task == "stream":
            return (functional.linear(hidden[:, at], self.tag.weight, self.tag.bias) for at in range(hidden.shape[1]))
        return self.words(hidden)


PARTS = {
    "backbone": ("embed.weight", "body.weight", "body.bias", "norm.weight", "norm.bias"),
    "classify": ("classify.0.weight", "classify.0.bias", "classify.2.weight"),
    "tag": ("tag.weight", "tag.bias"),
    "score": ("score", "shift"),
    "attend": ("attend.in_proj_weight", "attend.in_proj_bias", "attend.out_proj.weight", "attend.out_proj.bias"),
}
TASKS = {name: Task(name, ("backbone", name), "tokens") for name in HEADS} | {
    "words": Task("words", ("backbone",), "tokens"),
    "stream": Task("stream", ("backbone", "tag"), "tokens"),
}


def source(tensor: torch.Tensor) -> SourceTensor:
    """A tensor in memory as a split's source."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return SourceTensor(_NAMES[tensor.dtype], tuple(tensor.shape), lambda: [data])


def net(seed: int = 0, wide: int = 24) -> Net:
    """The whole net, with weights of its own."""
    torch.manual_seed(seed)
    return Net(wide).eval()


def split_net(folder: Path, whole: nn.Module, **changes: Any) -> SplitPlan:
    """Write the net's split."""
    tensors = {name: source(one) for name, one in whole.state_dict().items()}
    roles = {name: Role.BACKBONE if name == "backbone" else Role.TASK for name in PARTS}
    roles["tag"] = Role.SHARED
    parts = {name: PartMaking(roles[name], names) for name, names in PARTS.items()}
    body = {"tensors": tensors, "tasks": TASKS, "parts": parts, "tied": (("embed.weight", "words.weight"),)}
    model = Model("tests.Net", hashlib.sha256(b"net").hexdigest())
    return write_split(folder, Making(model, {"net.safetensors": "ab" * 32}, **{**body, **changes})).plan


def add_part(folder: Path, name: str, tensors: dict[str, SourceTensor], **options: Any) -> SplitPlan:
    """Let one more part join a split that stands."""
    role, tasks = options.pop("role", Role.ADAPTER), options.pop("tasks", {})
    sources = {f"{name}.safetensors": "cd" * 32}
    return join(folder, name, tensors, sources, tasks, role, options.pop("replaces", None)).plan


def llama(tied: bool = False) -> Any:
    """A small Llama, whole."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


TARGETS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj")


def factors(seed: int, rank: int = 4) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The two matrices of a random LoRA, for each of the Llama's layers that have one."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name in TARGETS:
        base = llama().get_submodule(name)
        a = torch.randn(rank, base.in_features, generator=made)
        found[name] = (a, torch.randn(base.out_features, rank, generator=made))
    return found


def lora(part: str, seed: int, scaling: float = 0.5) -> dict[str, SourceTensor]:
    """A random LoRA as a part's tensors."""
    tensors: dict[str, SourceTensor] = {}
    for name, (a, b) in factors(seed).items():
        tensors[f"{part}/{name}.lora_A.weight"] = source(a)
        tensors[f"{part}/{name}.lora_B.weight"] = source(b)
        tensors[f"{part}/{name}.scaling"] = SourceTensor("F64", (1,), lambda: [struct.pack("<d", scaling)])
    return tensors


def split_llama(folder: Path, whole: Any) -> SplitPlan:
    """Write a Llama as a split: a backbone, the head where it is not tied, and a LoRA for each of two tasks."""
    whole.config.save_pretrained(folder)
    whole.generation_config.save_pretrained(folder)
    tied = bool(whole.config.tie_word_embeddings)
    state = {name: one for name, one in whole.state_dict().items() if not (tied and name == "lm_head.weight")}
    tensors = {name: source(one) for name, one in state.items()}
    heads = tuple(name for name in state if name.startswith("lm_head"))
    parts = {"backbone": PartMaking(Role.BACKBONE, tuple(name for name in state if name not in heads))}
    parts |= {"head": PartMaking(Role.SHARED, heads)} if heads else {}
    for seed, task in enumerate(("email", "grammar")):
        found = lora(f"{task}-lora", seed)
        tensors |= found
        parts[f"{task}-lora"] = PartMaking(Role.ADAPTER, tuple(found))
    basis = ("backbone", "head") if heads else ("backbone",)
    tasks = {task: Task(task, (*basis, f"{task}-lora"), "generate") for task in ("email", "grammar")}
    tasks["plain"] = Task("plain", basis, "generate")
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    ties = (("model.embed_tokens.weight", "lm_head.weight"),) if tied else ()
    model = Model("LlamaForCausalLM", digest)
    return write_split(folder, Making(model, {"a": "ab" * 32}, tensors, tasks, parts, tied=ties)).plan


class WithLora(nn.Module):
    """A linear layer and its LoRA, in the operations of PEFT."""

    def __init__(self, base: nn.Linear, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scaling = base, a, b, scaling

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        low = functional.linear(inputs, self.a)
        return self.base(inputs) + functional.linear(low, self.b) * self.scaling


def llama_with(seed: int | None, tied: bool = False, scaling: float = 0.5) -> Any:
    """The whole Llama with one LoRA for good; ``seed`` as `lora` has it, None for no LoRA."""
    whole = llama(tied)
    for name, (a, b) in {} if seed is None else factors(seed).items():
        parent, _, leaf = name.rpartition(".")
        setattr(whole.get_submodule(parent), leaf, WithLora(whole.get_submodule(name), a, b, scaling))
    return whole


def ids(seed: int = 1, rows: int = 2, length: int = 6) -> torch.Tensor:
    """Token ids of a request."""
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
