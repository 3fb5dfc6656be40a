"""The managers that scenarios run against; add one by a module here and a line below."""

from __future__ import annotations

from scenarios.adapters.llama_router import LlamaRouter
from scenarios.adapters.pagein import Pagein
from scenarios.contract import Manager

ADAPTERS: dict[str, type[Manager]] = {"pagein": Pagein, "llama-router": LlamaRouter}
