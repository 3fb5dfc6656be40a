"""Snapshots of conversations' KV caches: what they are, where they rest, when they pay. Shared by both sides.

Nothing here waits on an event loop: what reads or writes files blocks, and its callers give it a thread.
"""
