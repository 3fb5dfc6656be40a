"""A lease keeps a thing in place while it is used; each ends exactly once."""

from __future__ import annotations


class Leases:
    """Who uses what: lease ids by the name of the leased thing."""

    def __init__(self) -> None:
        self._name_of: dict[int, str] = {}
        self._count: dict[str, int] = {}

    def take(self, lease_id: int, name: str) -> None:
        """Begin a lease; the id must be new."""
        assert lease_id not in self._name_of, f"lease {lease_id} was taken twice"
        self._name_of[lease_id] = name
        self._count[name] = self._count.get(name, 0) + 1

    def give_back(self, lease_id: int) -> str | None:
        """End a lease and return what it held; None when it ended before, so that ending twice does no harm."""
        name = self._name_of.pop(lease_id, None)
        if name is not None:
            self._count[name] -= 1
            assert self._count[name] >= 0
        return name

    def count(self, name: str) -> int:
        """Leases on one thing."""
        return self._count.get(name, 0)

    def __len__(self) -> int:
        return len(self._name_of)
