"""The parts of a checkpoint by the names and shapes of its tensors alone: no model is built, no torch is needed.

What `structure` finds in the module tree, guessed from the outside: repeated blocks are families ``prefix.N.`` of like
members, embedding and head are the matrices with a row per word. Good for advice and estimates; what runs is planned
from the real modules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pagein.catalog.safetensors import StoredTensor
from pagein.weights.reading.checkpoint import Checkpoint

SMALLEST_SHARE = 0.02
"""A family with less of the model's bytes is no stack worth streaming: it stays resident."""
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_WITH_HEAD = ("CausalLM", "ConditionalGeneration", "LMHeadModel", "MaskedLM", "Speech2Text")
_HEADS = ("head", "embed_out", "output", "output_layer")
"""Last word of the module that holds a head: ``lm_head``, GPT-NeoX's ``embed_out``, ChatGLM's ``output_layer``."""


@dataclass(frozen=True, slots=True)
class Block:
    """One repeated block: its dense tensors, and those of its routed experts."""

    name: str
    dense: tuple[StoredTensor, ...]
    experts: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The tensors of a checkpoint by what they are for."""

    stacks: tuple[tuple[Block, ...], ...]
    """Each family of blocks, the first in the checkpoint first; an encoder-decoder has two."""
    embeddings: tuple[StoredTensor, ...]
    head: StoredTensor | None
    """None where the model has no head; a tied one is the embedding's own tensor."""
    small: tuple[StoredTensor, ...]
    """Everything else outside the blocks."""
    experts: int
    """Routed experts of a block; 0 without any, or where the config does not tell them and how many are active."""
    active_experts: int

    @property
    def blocks(self) -> list[Block]:
        """All blocks, stack after stack."""
        return [block for stack in self.stacks for block in stack]

    @property
    def tied(self) -> bool:
        """Head and embedding are one tensor."""
        return self.head is not None and self.head in self.embeddings


def dissect(checkpoint: Checkpoint) -> Anatomy:
    """Tell the parts of a checkpoint apart."""
    text = text_config(checkpoint.config)
    experts, active = _count(text, _EXPERT_COUNTS), _count(text, _ACTIVE_COUNTS)
    if not experts or not active or active > experts:
        experts = active = 0
    prefixes = _families(checkpoint.tensors)
    outside = {name: tensor for name, tensor in checkpoint.tensors.items() if _home(name, prefixes) is None}
    stacks = tuple(_stack(prefix, checkpoint.tensors, experts) for prefix in prefixes)
    embeddings, head = _vocabulary(checkpoint.config, text, outside)
    shapes = {tensor.shape for tensor in (*embeddings, head) if tensor is not None}
    # What has the shape of a table is the table, or is tied to it.
    small = tuple(tensor for tensor in outside.values() if tensor.shape not in shapes)
    return Anatomy(stacks, embeddings, head, small, experts, active)


def text_config(config: dict[str, object]) -> dict[str, object]:
    """Return the part of a config that describes the text model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def whole(value: object) -> int:
    """Return a positive whole number of a config, 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _count(text: dict[str, object], names: tuple[str, ...]) -> int:
    return next((value for name in names if (value := whole(text.get(name)))), 0)


def _families(tensors: dict[str, StoredTensor]) -> list[str]:
    """Return the prefixes of the outermost families of like members with a good share of all bytes."""
    members: dict[str, dict[str, set[str]]] = {}
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        words = name.split(".")
        for at, word in enumerate(words[:-1]):
            if at and word.isdecimal():
                prefix = ".".join(words[:at])
                members.setdefault(prefix, {}).setdefault(word, set()).add(".".join(words[at + 1 :]))
                sizes[prefix] += tensor.nbytes
    least = SMALLEST_SHARE * sum(tensor.nbytes for tensor in tensors.values())
    found: list[str] = []
    for prefix in sorted(members, key=lambda prefix: prefix.count(".")):
        inner = any(prefix.startswith(f"{outer}.") for outer in found)
        if not inner and sizes[prefix] >= least and _are_alike(members[prefix]):
            found.append(prefix)
    order = {prefix: index for index, prefix in enumerate(members)}
    return sorted(found, key=order.__getitem__)


def _are_alike(members: dict[str, set[str]]) -> bool:
    """At least two members have the same tensors; others may differ, as dense blocks before sparse ones do."""
    return max(Counter(frozenset(suffixes) for suffixes in members.values()).values()) > 1


def _home(name: str, prefixes: list[str]) -> tuple[str, int] | None:
    """The family and the index of the block that a tensor is of, or None."""
    for prefix in prefixes:
        if name.startswith(f"{prefix}."):
            index, dot, _ = name[len(prefix) + 1 :].partition(".")
            if dot and index.isdecimal():
                return prefix, int(index)
    return None


def _stack(prefix: str, tensors: dict[str, StoredTensor], experts: int) -> tuple[Block, ...]:
    blocks: dict[int, list[StoredTensor]] = {}
    for name, tensor in tensors.items():
        home = _home(name, [prefix])
        if home is not None:
            blocks.setdefault(home[1], []).append(tensor)
    return tuple(_block(f"{prefix}.{index}", blocks[index], experts) for index in sorted(blocks))


def _block(name: str, tensors: list[StoredTensor], experts: int) -> Block:
    kinds: dict[bool, list[StoredTensor]] = {False: [], True: []}
    for tensor in tensors:
        kinds[bool(experts) and _is_routed(tensor, experts)].append(tensor)
    return Block(name, tuple(kinds[False]), tuple(kinds[True]))


def _is_routed(tensor: StoredTensor, experts: int) -> bool:
    """One expert of a list, or all experts of a block in one tensor; experts that all tokens share are dense."""
    return "experts" in tensor.name.split(".") or (len(tensor.shape) == 3 and tensor.shape[0] == experts)


def _vocabulary(
    config: dict[str, object], text: dict[str, object], outside: dict[str, StoredTensor]
) -> tuple[tuple[StoredTensor, ...], StoredTensor | None]:
    """Find embeddings and head among the matrices with a row for every word; a tied head is an embedding."""
    words = _count(text, ("vocab_size",))
    tables = [tensor for tensor in outside.values() if len(tensor.shape) == 2 and 0 < words <= tensor.shape[0]]
    # A table of positions may have more rows; one of words that is padded has, where none has just as many.
    tables = [tensor for tensor in tables if tensor.shape[0] == words] or tables
    heads = [tensor for tensor in tables if _is_head(tensor.name)]
    others = [tensor for tensor in tables if tensor not in heads]
    # An encoder's and a decoder's table of one shape are one tensor, whether or not both are written down.
    embeddings = tuple({tensor.shape: tensor for tensor in reversed(others)}.values())[::-1]
    told = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if embeddings and (told is True or not heads) and (heads or _has_head(config)):
        return embeddings, next((table for table in embeddings if "per_layer" not in table.name), None)
    return embeddings, heads[0] if heads else None


def _is_head(name: str) -> bool:
    owner = name.split(".")[-2] if "." in name else name
    return owner in _HEADS or owner.endswith("_head")


def _has_head(config: dict[str, object]) -> bool:
    """Whether the class that was saved has a head; taken to where the config names no class."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return True
    return any(part in str(names[0]) for part in _WITH_HEAD)
