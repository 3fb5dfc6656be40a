"""Weights in 8 and 4 bits: how they are packed, the shards that hold them, and layers that compute from them."""
