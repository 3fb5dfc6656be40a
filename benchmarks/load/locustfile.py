"""Users of an office assistant, for Locust: grammar 5, summarise 3, e-mail 2, over the OpenAI endpoints.

    LOAD_MODEL=assistant locust -f benchmarks/load/locustfile.py --host http://127.0.0.1:PORT

LOAD_MODEL names a model that is split and has these tasks (`assistant` by default), LOAD_LOG a file that gets a line of
JSON for each request.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

from locust import FastHttpUser, between, events, task

MODEL = os.environ.get("LOAD_MODEL", "assistant")
TOKENS = {"grammar": 12, "summarise": 12, "email": 20}
_NUMBERS = itertools.count()
TEXTS = Path(__file__).parents[2] / "examples" / "office" / "texts.json"
"""What is asked: short office texts, each with an answer that is not wanted here."""
_KINDS: dict[str, list[str]] = {
    kind: [question for part in pairs.values() for question, _ in part]
    for kind, pairs in json.loads(TEXTS.read_text(encoding="utf-8")).items()
}


class OfficeUser(FastHttpUser):
    """Asks, reads the answer, and asks again."""

    wait_time = between(0.2, 1.0)
    network_timeout = connection_timeout = 120.0

    def on_start(self) -> None:
        """Each user has an order of texts of their own."""
        self._random = random.Random(next(_NUMBERS))

    @task(5)
    def grammar(self) -> None:
        """Correct a sentence."""
        self._ask("grammar", 1)

    @task(3)
    def summarise(self) -> None:
        """Three notices at once."""
        self._ask("summarise", 3)

    @task(2)
    def email(self) -> None:
        """Make a letter of a line."""
        self._ask("email", 1)

    def _ask(self, kind: str, texts: int) -> None:
        text = " ".join(self._random.choices(_KINDS[kind], k=texts))
        body = {
            "model": f"{MODEL}:{kind}",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": TOKENS[kind],
            "temperature": 0,
        }
        with self.client.post("/v1/chat/completions", json=body, name=kind, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"answered {response.status_code}: {(response.text or '')[:300]}")
            elif not (response.json() or {}).get("choices"):
                response.failure(f"no choices in {(response.text or '')[:300]}")


if log_path := os.environ.get("LOAD_LOG"):
    _log = Path(log_path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until Locust ends

    @events.request.add_listener
    def _write(name: str, response_time: float, exception: BaseException | None, start_time: float, **_: Any) -> None:
        told = {"task": name, "at": start_time, "seconds": response_time / 1e3}
        _log.write(json.dumps(told | {"failed": None if exception is None else str(exception)[:300]}) + "\n")
