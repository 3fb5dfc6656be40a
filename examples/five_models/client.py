"""A few lines of HTTP: what any program needs to talk to Pagein."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    """A model's answer, and what Pagein says about how it came: milliseconds, models evicted for it."""

    model: str
    body: Any
    queue_ms: float
    load_ms: float | None
    evicted: list[str]
    total_ms: float

    @property
    def infer_ms(self) -> float:
        """Time of the inference itself: all but the wait for the model."""
        return max(0.0, self.total_ms - self.queue_ms)


class Pagein:
    """A daemon at an address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str) -> Any:
        """Read JSON."""
        with urllib.request.urlopen(self.address + path, timeout=30) as response:
            return json.load(response)

    def ask(self, model: str, path: str, body: Any, content_type: str = "application/json") -> Answer:
        """Send one request for a model; raises RuntimeError with Pagein's reason when it is refused."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": content_type})
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                answer, headers = json.load(response), response.headers
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{model}: {error.code} {error.read().decode()[:600]}") from error
        load = headers.get("X-Pagein-Load-Ms")
        return Answer(
            model=headers.get("X-Pagein-Model", ""),
            body=answer,
            queue_ms=float(headers.get("X-Pagein-Queue-Ms", 0)),
            load_ms=None if load is None else float(load),
            evicted=[name.strip() for name in headers.get("X-Pagein-Evicted", "").split(",") if name.strip()],
            total_ms=(time.perf_counter() - began) * 1000,
        )
