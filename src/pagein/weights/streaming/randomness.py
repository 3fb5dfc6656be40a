"""The random generators that sampling may draw from: the host's, and those of CUDA devices in use."""

from __future__ import annotations

import torch

State = tuple[torch.Tensor, ...]


def random_state() -> State:
    """Return where the generators stand: the host's first."""
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()))


def set_random_state(state: State) -> None:
    """Bring the generators back there; devices that were not in use then stay as they are."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])
