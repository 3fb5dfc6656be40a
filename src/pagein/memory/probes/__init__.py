"""Probes: the only code that asks the system about memory. See README.md in this folder."""
