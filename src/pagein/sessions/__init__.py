"""Conversations in SQLite: what was answered is kept through eviction, crash and restart."""
