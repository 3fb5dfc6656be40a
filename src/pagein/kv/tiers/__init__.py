"""Conversations over the tiers of one model: device, host memory, disk; who is where, and who moves."""
