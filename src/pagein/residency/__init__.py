"""Ledger, lease, lifecycle, policy: the four words that hold at every grain. Pure: no clock, no I/O."""
