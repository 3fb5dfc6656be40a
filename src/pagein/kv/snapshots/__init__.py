"""Snapshots of conversations' KV caches: what they are, where they rest, when they pay. Shared by both sides."""
