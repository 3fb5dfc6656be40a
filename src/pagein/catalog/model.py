"""The catalog's values: what a weight file says about itself, and what a model will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pagein.catalog.split.facts import SplitFacts
from pagein.protocol import Capability


class Format(StrEnum):
    """Weight formats that Pagein reads."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    ORT = "ort"
    """onnxruntime's own flat-buffer format; sizes only."""
    CTRANSLATE2 = "ctranslate2"
    SPLIT = "split"
    """A folder of `pagein split apply`: a plan, and a file for each part of the model."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the header of a model file or folder says; read with bounded reads, never the weights themselves."""

    path: Path
    format: Format
    files: tuple[Path, ...]
    file_bytes: int
    weight_bytes: int
    """Bytes of all tensors as stored."""
    parameters: int | None = None
    architecture: str | None = None
    context_train: int | None = None
    """Context length the model was trained for, in tokens."""
    kv_bytes_per_token: int | None = None
    """Bytes of an f16 KV cache per token over the full-attention layers."""
    kv_window_bytes: int = 0
    """Bytes of an f16 KV cache of the sliding-window layers, which do not grow past the window."""
    kv_window: int | None = None
    """Tokens of that window; None without such layers."""
    state_bytes: int = 0
    """Bytes of recurrent state per sequence (Mamba and its kin), whatever its length."""
    vocabulary: int | None = None
    embedding_length: int | None = None
    feed_forward_length: int | None = None
    """Width of the widest feed-forward block that a token passes through, active experts together."""
    heads: int | None = None
    layers: int | None = None
    unpacked_bytes: int | None = None
    """Bytes of the weights once an engine that computes in fp32 has unpacked them; None = as stored."""
    has_chat_template: bool = False
    pooling: str | None = None
    """What makes one vector of a text (``mean``, ``cls``, ``last``) or a score (``rank``); None for other models."""
    split: SplitFacts | None = None
    """Tasks and parts of a split model; None for all others."""
    metadata: dict[str, object] = field(default_factory=dict)
    """What only one format knows, by the words of its reader: JSON-ready values."""


class NeedSource(StrEnum):
    """Where a need comes from, best first (rule 2)."""

    MEASURED = "measured"
    DECLARED = "declared"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Ingredient:
    """One part of an estimate: what it is, its bytes, and the pool that they are in."""

    name: str
    bytes: int
    pool: str


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes per pool that must be reserved before a load."""

    bytes: dict[str, int]
    source: NeedSource
    explanation: str
    """One line with the numbers behind it: ``weights 94 MiB + KV 45 MiB + runtime 90 MiB, × 1.2``."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A configured model, resolved: everything that the daemon needs to know before it starts it."""

    name: str
    engine: str
    engine_version: str
    capabilities: frozenset[Capability]
    info: ModelInfo | None
    """None for a command without a model file."""
    device: str
    """Resolved: ``cpu`` or ``cuda:N``."""
    estimate: Need
    """Declared or estimated; what is used while nothing was measured."""
    need: Need
    """What is reserved for a load now."""
    peak_key: str
    """Key of the remembered peaks: digest, engine, version and every setting that changes memory."""
    context: int | None = None
    """Tokens per request that will be loaded."""
    recipe: str | None = None
    """The configured recipe, or the one that the model's files call for; what the worker is given."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The configured options with what the header adds (``embedding: true``); what the worker is given."""
    split: SplitFacts | None = None
    """Tasks and parts, where it is served part by part."""
    least: int | None = None
    """Bytes of `pool` that it can do with because its engine streams what does not fit, or lets parts go that are idle;
    None where it takes what it takes. Such a model keeps within what it is given, so what it was measured to take is
    not what it needs."""
    problem: str | None = None
    """Why this model cannot be served here (file missing, engine not installed), or None."""

    @property
    def pool(self) -> str:
        """The pool that its weights are in; on a machine with one memory that is ``ram``, wherever it computes."""
        return self.device if self.device in self.estimate.bytes else "ram"
