"""Many prompts in one go: each weight pass serves all of them, and each comes out as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from pagein.errors import ContextTooLong
from pagein.weights.steps.lockstep import Lockstep

Prompt: TypeAlias = torch.Tensor | Sequence[int]


def generate_batch(hub: Lockstep, model: Any, prompts: Sequence[Prompt], **settings: Any) -> list[Any]:
    """Return for each prompt (token ids, [n] or [1, n]; of any lengths) what ``model.generate`` returns.

    That is a tensor [n + new]; [sequences, n + new] with ``num_return_sequences`` above 1; a ModelOutput where one is
    asked for. Prompts are not padded, so no pad token is needed and each result equals that of a single run, bit for
    bit. Prompts beyond the KV cache of the plan (context × batch) wait for one to end. Raises ContextTooLong before any
    computing.
    """
    ids = [torch.as_tensor(prompt, dtype=torch.long, device=model.device).reshape(1, -1) for prompt in prompts]
    most = hub.most_tokens
    config = settings.get("generation_config") or model.generation_config
    rows = max(int(_setting(config, settings, name) or 1) for name in ("num_beams", "num_return_sequences"))
    sizes = [rows * tokens_needed(model, one, settings) for one in ids]
    for size in sizes:
        if most is not None and size > most:
            raise ContextTooLong(size, most)
    draws = bool(_setting(config, settings, "do_sample"))
    with torch.inference_mode():
        seats = [
            hub.submit(_job(model, one, settings), tokens=size, draws=draws)
            for one, size in zip(ids, sizes, strict=True)
        ]
        hub.finish(seats)
    return [_alone(seat.result()) for seat in seats]


def _setting(config: Any, settings: Mapping[str, Any], name: str) -> Any:
    given = settings.get(name)
    return getattr(config, name, None) if given is None else given


def _alone(result: Any) -> Any:
    """One sequence without the dimension that counts them."""
    return result[0] if isinstance(result, torch.Tensor) and result.shape[0] == 1 else result


def _job(model: Any, ids: torch.Tensor, settings: dict[str, Any]) -> Callable[[], Any]:
    # generate would warn that it takes the end of text for it. Nothing but ends of several sequences is ever padded.
    given = {"pad_token_id": _padding(settings.get("generation_config") or model.generation_config), **settings}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **given)


def _padding(config: Any) -> int:
    """The token that `generate` itself fills shorter sequences up with; any where no text has an end."""
    ends = config.eos_token_id
    first = ends[0] if isinstance(ends, list) and ends else ends
    return int(next((token for token in (config.pad_token_id, first) if isinstance(token, int)), 0))


def tokens_needed(model: Any, ids: torch.Tensor, settings: Mapping[str, Any]) -> int:
    """Return the tokens of KV cache that a sequence takes at its longest."""
    config = settings.get("generation_config") or model.generation_config
    new = settings.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    if new is None:
        return max(int(settings.get("max_length") or config.max_length or 20), int(ids.shape[1]))
    return int(ids.shape[1]) + int(new)
