"""Measured runs of a model under a load of conversations, each way of keeping KV in a process of its own."""
