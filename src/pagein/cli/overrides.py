"""Options that override settings: put into the environment, so that one code path validates them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagein.errors import BadUsage
from pagein.units import parse_bytes, parse_percent


def overridden(
    environ: Mapping[str, str], host: str | None = None, port: int | None = None, budget: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment with the options put in as the variables that set the same keys; raises BadUsage."""
    result = dict(environ)
    if host is not None:
        result["PAGEIN_SERVER__HOST"] = host
    if port is not None:
        result["PAGEIN_SERVER__PORT"] = str(port)
    for wish in budget:
        pool, _, size = wish.rpartition("=")
        _check_size(size)
        variable = f"PAGEIN_BUDGET__{(pool or 'ram').replace(':', '_').upper()}"
        if variable == "PAGEIN_BUDGET__RAM":
            result.pop("PAGEIN_BUDGET", None)  # the short name of the same key
        result[variable] = size
    return result


def _check_size(text: str) -> None:
    try:
        if parse_percent(text) is None:
            parse_bytes(text)
    except ValueError as error:
        raise BadUsage(f"--budget: {error}") from None
