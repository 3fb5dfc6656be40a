"""Whisper, whose own `generate` takes a `task` that means something else."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pagein.parts.opening import load_parts
from pagein.parts.splitting.analyse import analyse
from pagein.parts.splitting.apply import apply
from tests.parts.models import mapping, quiet

pytestmark = pytest.mark.torch
SPEECH = {"inputs": {"input_features": {"shape": [1, 8, 40]}}}


def whisper(folder: Path) -> Path:
    """Write a small English-only Whisper."""
    import transformers as t

    quiet()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    places = {"max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 8, "vocab_size": 60}
    tokens = {"decoder_start_token_id": 57, "bos_token_id": 56, "eos_token_id": 56, "pad_token_id": 56}
    model = t.WhisperForConditionalGeneration(
        t.WhisperConfig(**sizes, **heads, **places, **tokens, begin_suppress_tokens=None)
    )
    model.generation_config = t.GenerationConfig(
        **tokens, no_timestamps_token_id=58, is_multilingual=False, return_timestamps=False
    )
    model.save_pretrained(folder)
    return folder


def test_a_task_of_the_split_is_not_told_to_whisper(tmp_path: Path) -> None:
    """An English-only Whisper refuses any task of its own; the split's tasks may have any name."""
    import transformers as t

    folder = whisper(tmp_path / "whisper")
    tasks = {name: {"kind": "generate", "samples": [SPEECH], "max_new_tokens": 4} for name in ("minutes", "transcribe")}
    apply(analyse(folder, mapping(**tasks)), tmp_path / "split")
    speech = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(5))
    wanted = t.WhisperForConditionalGeneration.from_pretrained(folder).eval().generate(speech, max_new_tokens=6)
    model = load_parts(tmp_path / "split", sweep_seconds=None)
    for task in tasks:
        assert torch.equal(model.generate(speech, task=task, max_new_tokens=6), wanted)
    model.pagein.close()


def test_a_task_that_takes_sound_is_for_programs_only(tmp_path: Path) -> None:
    """The engine finds no tokeniser in its folder and needs none; no path leads to it."""
    from pagein.engines.tasks.book import TaskBook
    from pagein.errors import BadRequest
    from pagein.protocol import Capability

    folder = whisper(tmp_path / "whisper")
    apply(analyse(folder, mapping(minutes={"kind": "generate", "samples": [SPEECH]})), tmp_path / "split")
    model = load_parts(tmp_path / "split", sweep_seconds=None)
    book = TaskBook("m", model, model.pagein.plan, tmp_path / "split", 32)
    assert book.capabilities == book.listing()["minutes"]["capabilities"] == []
    with pytest.raises(BadRequest, match="'minutes' of model 'm' is not for texts"):
        book.wanted("minutes", Capability.CHAT)
    model.pagein.close()
