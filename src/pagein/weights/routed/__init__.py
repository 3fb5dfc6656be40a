"""Routed experts: read when a token is sent to them."""
