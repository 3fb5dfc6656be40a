"""One request of a storm, from its plan to the one way in which it ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

import aiohttp

from storm.setting import CHARACTERS, LONGEST_REQUEST


class End(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """With a status and an error of the API's shape."""
    ERROR_EVENT = "ended by an error event"
    LEFT = "left by the client"
    # what must never be
    FAULT = "internal error"
    DROPPED = "dropped without a status"
    BARE = "stream without an end"
    FALSE_DONE = "whole by its looks only"
    NEVER = "never ended"


WRONG = frozenset({End.FAULT, End.DROPPED, End.BARE, End.FALSE_DONE, End.NEVER})


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, and where its client leaves, if it does."""

    model: str
    embedding: bool
    stream: bool
    tokens: int
    leave_after: float | None
    """Seconds."""
    leave_at_token: int | None

    def body(self) -> dict[str, Any]:
        """What is sent."""
        if self.embedding:
            return {"model": self.model, "input": "some words to embed"}
        message = {"role": "user", "content": "some words"}
        return {"model": self.model, "messages": [message], "max_tokens": self.tokens, "stream": self.stream}

    @property
    def path(self) -> str:
        """Where it is sent."""
        return "/v1/embeddings" if self.embedding else "/v1/chat/completions"


def draw(chance: Random) -> Plan:
    """A request by chance; one of four leaves early, somewhere between the queue and the last token."""
    model = chance.choices(CHARACTERS, [c.weight for c in CHARACTERS])[0].name
    embedding = chance.random() < 0.25
    stream = not embedding and chance.random() < 0.6
    tokens = chance.randint(1, 40)
    leaves = chance.random() < 0.25
    by_token = leaves and stream and chance.random() < 0.4
    return Plan(
        model,
        embedding,
        stream,
        tokens,
        chance.uniform(0, 3) if leaves and not by_token else None,
        chance.randint(1, tokens) if by_token else None,
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended, and what shows that."""

    end: End
    told: str
    queue_seconds: float | None = None
    code: str = ""
    """Of the error, where it was one."""


async def perform(session: aiohttp.ClientSession, url: str, plan: Plan) -> Ended:
    """Send it and see it through; never raises but when it is cancelled."""
    limit = plan.leave_after if plan.leave_after is not None else LONGEST_REQUEST
    try:
        async with asyncio.timeout(limit):
            return await _exchange(session, url, plan)
    except TimeoutError:
        if plan.leave_after is not None:
            return Ended(End.LEFT, "before its end")
        return Ended(End.NEVER, f"not within {LONGEST_REQUEST:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Ended(End.DROPPED, f"{type(error).__name__} {error}")


async def _exchange(session: aiohttp.ClientSession, url: str, plan: Plan) -> Ended:
    async with session.post(url + plan.path, json=plan.body()) as response:
        queue = response.headers.get("X-Pagein-Queue-Ms")
        waited = float(queue) / 1000 if queue else None
        if response.status != 200:
            return _refused(response.status, await response.read())
        if plan.stream:
            return await _read_stream(response, plan, waited)
        said = json.loads(await response.read())
        if not plan.embedding and said["usage"]["completion_tokens"] != plan.tokens:
            return Ended(End.FALSE_DONE, f"{said['usage']} of {plan.tokens} tokens")
        return Ended(End.ANSWERED, "whole", waited)


def _refused(status: int, raw: bytes) -> Ended:
    try:
        error = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        return Ended(End.FAULT, f"{status} {raw[:200]!r}")
    told = f"{status} {error.get('code')}: {str(error.get('message'))[:200]}"
    end = End.FAULT if error.get("code") == "internal_error" else End.REFUSED
    return Ended(end, told, code=str(error.get("code")))


async def _read_stream(response: aiohttp.ClientResponse, plan: Plan, waited: float | None) -> Ended:
    tokens, last = 0, b""
    async for line in response.content:
        if line.startswith(b": X-Pagein-Model"):
            waited = _queue_ms(line)
        if not line.startswith(b"data:"):
            continue
        last = line.strip()
        tokens += b'"content"' in last
        if b'"error"' in last and b'"choices"' not in last:
            return _broken(last)
        if plan.leave_at_token is not None and tokens >= plan.leave_at_token:
            response.close()
            return Ended(End.LEFT, f"at token {tokens}")
    if last != b"data: [DONE]":
        return Ended(End.BARE, f"after {tokens} of {plan.tokens} tokens, last {last[:120]!r}")
    if tokens != plan.tokens:
        return Ended(End.FALSE_DONE, f"{tokens} of {plan.tokens} tokens")
    return Ended(End.ANSWERED, "whole", waited)


def _broken(last: bytes) -> Ended:
    error = json.loads(last[5:])["error"]
    end = End.FAULT if error.get("code") == "internal_error" else End.ERROR_EVENT
    return Ended(end, f"{error.get('code')}: {str(error.get('message'))[:200]}", code=str(error.get("code")))


def _queue_ms(line: bytes) -> float | None:
    """A stream that waited tells its headers in a comment."""
    for part in line.decode().removeprefix(":").split(","):
        name, _, value = part.strip().partition(":")
        if name == "X-Pagein-Queue-Ms":
            return float(value) / 1000
    return None
