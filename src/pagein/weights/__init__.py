"""Weights read from where they rest: checkpoints, rings of buffers, plans, packed shards (worker side)."""
