"""The scenarios, by theme; importing this package fills the list."""

from scenarios.cases import clients, faults, lifetime, memory, swapping

__all__ = ["clients", "faults", "lifetime", "memory", "swapping"]
