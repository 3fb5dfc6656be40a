"""Many prompts in one go: each weight pass serves all of them, and each comes out as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pagein.errors import ContextTooLong

if TYPE_CHECKING:
    from pagein.weights.streamed import Streamed

Prompt: TypeAlias = torch.Tensor | Sequence[int]


def generate_batch(streamed: Streamed, model: Any, prompts: Sequence[Prompt], **settings: Any) -> list[torch.Tensor]:
    """Return for each prompt (token ids, [n] or [1, n]; of any lengths) what ``model.generate`` returns, [n + new].

    Nothing is padded, so no pad token is needed and each result equals that of a single run, bit for bit. Prompts
    beyond the KV cache of the plan (context × batch) wait for one to end. Raises ContextTooLong before any computing.
    """
    ids = [torch.as_tensor(prompt, dtype=torch.long, device=model.device).reshape(1, -1) for prompt in prompts]
    most = streamed.lockstep.most_tokens
    rows = max(int(settings.get(name) or 1) for name in ("num_beams", "num_return_sequences"))
    sizes = [rows * tokens_needed(model, one, settings) for one in ids]
    for size in sizes:
        if most is not None and size > most:
            raise ContextTooLong(size, most)
    draws = bool(settings.get("do_sample"))
    with torch.inference_mode():
        seats = [
            streamed.lockstep.submit(_job(model, one, settings), tokens=size, draws=draws)
            for one, size in zip(ids, sizes, strict=True)
        ]
        streamed.lockstep.finish(seats)
    return [seat.result()[0] for seat in seats]


def _job(model: Any, ids: torch.Tensor, settings: dict[str, Any]) -> Callable[[], torch.Tensor]:
    # pad_token_id: generate would warn that it takes the end of text for it; with one sequence nothing is ever padded.
    given = {"pad_token_id": 0, **settings}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **given)


def tokens_needed(model: Any, ids: torch.Tensor, settings: Mapping[str, Any]) -> int:
    """Return the tokens of KV cache that a sequence takes at its longest."""
    config = model.generation_config
    new = settings.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    if new is None:
        return max(int(settings.get("max_length") or config.max_length or 20), int(ids.shape[1]))
    return int(ids.shape[1]) + int(new)
