"""The reference page tells the truth about paths, errors and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pagein.config.schema import Server
from pagein.errors import PageinError
from pagein.gateway.app import make_app
from pagein.kv.snapshots.answers import MissKind
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")


def _kinds(root: type[PageinError]) -> Iterator[type[PageinError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from _kinds(kind)


def test_every_error_is_listed_with_its_status() -> None:
    """Each error with a status of its own has a row."""
    rows = [line.split("|")[1:3] for line in PAGE.splitlines() if re.match(r"\| \d{3}", line)]
    listed = {
        (int(status), code) for statuses, codes in rows for status in statuses.split(",")
        for code in re.findall(r"\w+", codes)
    }  # fmt: skip
    own = {(kind.http_status, kind.code) for kind in _kinds(PageinError) if kind.http_status != 500}
    assert own <= listed


async def test_every_path_is_listed(desk: FakeDesk) -> None:
    """Each route of the gateway stands on the page; unpin shares the row of pin."""
    paths = {route.resource.canonical for route in make_app(desk, Server(), "1").router.routes() if route.resource}
    for path in paths - {"/api/models/{name}/unpin"}:
        assert path.replace("{model}", "{name}") in PAGE, path


async def test_every_metric_is_listed(serve: Serve) -> None:
    """Each metric stands on the page, and no other does."""
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "x"}) as response:
        assert response.status == 404
    async with gateway.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `pagein_")]
    listed = {word for row in rows for word in re.findall(r"pagein_\w+", row)}
    assert {name for name in names if not name.endswith("_created")} == listed


def test_every_kind_of_miss_is_listed() -> None:
    """What a header names as the kind of a miss has a row that explains it."""
    text = (Path(__file__).parents[2] / "src" / "pagein" / "daemon" / "restoring.py").read_text(encoding="utf-8")
    own = re.findall(r'_missed\([^\n]*?"([a-z]+)"', text)
    assert {"slower", "busy", "unready", "failed"} <= set(own)
    for kind in {*own, *MissKind, "media", "unwanted", "unused"}:
        assert f"\n| `{kind}` |" in PAGE, kind
