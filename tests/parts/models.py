"""Small models of one backbone, as users have them: folders that were fine-tuned from it, and LoRAs for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 97
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def quiet() -> None:
    """Let transformers print nothing, and torch take two threads."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(2)


def family(root: Path, *, tuned: bool = False) -> dict[str, Path]:
    """Write two classifiers and a tagger over one BERT; ``tuned``: the tagger's last layer was trained, too."""
    import torch
    import transformers as t

    quiet()
    folders: dict[str, Path] = {}
    torch.manual_seed(1)
    base = t.BertModel(t.BertConfig(**BERT)).state_dict()
    kinds = {
        "sentiment": (t.BertForSequenceClassification, 3),
        "topic": (t.BertForSequenceClassification, 7),
        "tag": (t.BertForTokenClassification, 5),
    }
    for seed, (name, (kind, labels)) in enumerate(kinds.items()):
        torch.manual_seed(10 + seed)
        model: Any = kind(t.BertConfig(**BERT, num_labels=labels))
        model.bert.load_state_dict({key: value for key, value in base.items() if "pooler" not in key}, strict=False)
        if name != "tag":
            model.bert.pooler.load_state_dict({key[7:]: value for key, value in base.items() if "pooler" in key})
        if tuned and name == "tag":
            with torch.no_grad():
                model.bert.encoder.layer[-1].output.dense.weight += 1e-3
        folders[name] = root / name
        model.save_pretrained(folders[name])
    return folders


def llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a small language model."""
    import torch
    import transformers as t

    quiet()
    torch.manual_seed(seed)
    t.LlamaForCausalLM(t.LlamaConfig(**{**LLAMA, **changes})).save_pretrained(folder)
    return folder


def lora(folder: Path, seed: int, rank: int = 4, **changes: Any) -> Path:
    """Write a LoRA for `llama` as PEFT saves it."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 32), ("v_proj", 16)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, 32)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def mapping(**tasks: Any) -> Any:
    """Return a mapping as the file's text would make it."""
    from pagein.parts.splitting.tasks import TaskMapping

    return TaskMapping.model_validate({"tasks": tasks})


IDS = ([1, 5, 9, 33], [1, 2, 3, 4, 5, 6])
