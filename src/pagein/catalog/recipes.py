"""What the recipes of the onnx engine offer, and which one a model's files call for, as data for the daemon's side."""

from __future__ import annotations

from pagein.catalog.model import Format, ModelInfo
from pagein.protocol import Capability

RECIPE_CAPABILITIES: dict[str, Capability] = {
    "embedding": Capability.EMBEDDING,
    "sparse_rerank": Capability.RERANK,
    "classification": Capability.CLASSIFICATION,
    "saliency": Capability.SALIENCY,
    "moonshine": Capability.TRANSCRIPTION,
}
"""The built-in recipes; a contract test of the engines keeps this the same as their own table."""

_TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
_VECTOR_OUTPUTS = {"last_hidden_state", "token_embeddings", "sentence_embedding"}


def guess_recipe(info: ModelInfo) -> str | None:
    """Return the recipe that file names, inputs and outputs leave no doubt about, else None."""
    names = {path.name.split(".")[0] for path in info.files}
    if {"encoder_model", "decoder_model_merged"} <= names and (info.path / "tokenizer.bin").is_file():
        return "moonshine"
    if info.format is not Format.ONNX or len(info.files) != 1:
        return None
    inputs, outputs = _only(info, "inputs"), _only(info, "outputs")
    if "input_ids" in inputs and inputs <= _TEXT_INPUTS and outputs & _VECTOR_OUTPUTS:
        return "embedding"
    return None


def _only(info: ModelInfo, key: str) -> set[str]:
    """The names of inputs or outputs of a model with one graph."""
    by_file = info.metadata.get(key)
    if not isinstance(by_file, dict):
        return set()
    return {name for names in by_file.values() if isinstance(names, list) for name in names if isinstance(name, str)}
