"""kill -9 of the daemon while clients talk: every turn whose answer a client had whole is kept, once and in order.

By hand: ``python -m tests.scenarios.kill_sessions --rounds 100 --seed 1``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .daemon import BOUND, Running, fake

ROUNDS = 12
BROKEN = (OSError, http.client.HTTPException)
"""What a client of a killed daemon sees."""


@dataclass
class Client:
    """One client: a session of the chat endpoint, a chain of responses, or a conversation."""

    kind: str
    name: str
    answered: list[tuple[str, str]] = field(default_factory=list)
    """Questions and answers, whole."""
    responses: list[tuple[str, str]] = field(default_factory=list)
    """Ids of answered responses, and what they said."""

    def turn(self, address: str, question: str, stream: bool) -> None:
        """Ask, and note the answer once its last byte is here."""
        answer, identity = self._ask(address, question, stream)
        self.answered.append((question, answer))
        if identity is not None:
            self.responses.append((identity, answer))

    def _ask(self, address: str, question: str, stream: bool) -> tuple[str, str | None]:
        body: dict[str, Any] = {"model": "chat", "stream": stream}
        if self.kind == "session":
            body["messages"] = [{"role": "user", "content": question}]
            whole = post(address, "/v1/chat/completions", body, {"X-Pagein-Session": self.name})
            return (said_in_stream(whole) if stream else said_at_once(whole)), None
        body |= {"input": question, "store": True}
        if self.kind == "conversation":
            body["conversation"] = self.name
        elif self.responses:
            body["previous_response_id"] = self.responses[-1][0]
        whole = post(address, "/v1/responses", body)
        response = completed(whole) if stream else json.loads(whole)
        return text_of(response), response["id"]


def post(address: str, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    """Ask and return the whole body; raises one of `BROKEN`, also for an answer that was cut."""
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers=headers or {})
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=BOUND) as answer:
        data: bytes = answer.read()
    return data


def events(whole: bytes) -> Iterator[bytes]:
    """The data of each server-sent event."""
    for line in whole.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def said_at_once(whole: bytes) -> str:
    """What a chat answered."""
    return str(json.loads(whole)["choices"][0]["message"]["content"])


def said_in_stream(whole: bytes) -> str:
    """The same of a streamed one, which must have its end."""
    *pieces, end = events(whole)
    if end != b"[DONE]":
        raise http.client.IncompleteRead(whole)
    deltas = [choice["delta"] for piece in pieces for choice in json.loads(piece)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def completed(whole: bytes) -> Any:
    """The response of a stream that has its end."""
    last = json.loads(list(events(whole))[-1])
    if last["type"] != "response.completed":
        raise http.client.IncompleteRead(whole)
    return last["response"]


def text_of(response: Any) -> str:
    """What a response says."""
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


class Crash:
    """One daemon after the other on one state folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._chance = folder, random.Random(seed)
        self._left = threading.Semaphore(0)
        self.clients = [Client("session", "first"), Client("session", "second"), Client("chain", "")]

    def run(self, rounds: int) -> list[str]:
        """Kill it so often; returns what was lost or mixed."""
        for number in range(rounds):
            daemon = self._start()
            try:
                if number == 0:
                    made = json.loads(post(daemon.address, "/v1/conversations", {}))
                    self.clients.append(Client("conversation", made["id"]))
                self._talk_and_kill(daemon, number)
            finally:
                daemon.stop(signal.SIGKILL)
        daemon = self._start()
        try:
            return [fault for client in self.clients for fault in judge(daemon, client)]
        finally:
            daemon.stop()
            for process in daemon.left():
                process.kill()

    def _start(self) -> Running:
        return Running(self._folder, "200MiB", fake("chat", "--tokens 3", memory="60MiB", parallel=8))

    def _talk_and_kill(self, daemon: Running, number: int) -> None:
        """Clients talk until the daemon is killed, at a moment that a number of answers and chance choose."""
        threads = [threading.Thread(target=self._talk, args=(daemon, client, number)) for client in self.clients]
        for thread in threads:
            thread.start()
        for _ in range(self._chance.randrange(1, 40)):
            assert self._left.acquire(timeout=BOUND), "nobody was answered"
        threading.Event().wait(self._chance.uniform(0, 0.02))  # somewhere within a turn
        daemon.tree()
        daemon.process.kill()
        for thread in threads:
            thread.join(BOUND)
            assert not thread.is_alive(), "a client waits for a daemon that was killed"
        while self._left.acquire(blocking=False):
            pass

    def _talk(self, daemon: Running, client: Client, number: int) -> None:
        for turn in range(10_000):
            try:
                client.turn(daemon.address, f"{client.kind}-{client.name}-{number}-{turn}", turn % 2 == 0)
            except BROKEN:
                return
            self._left.release()


def judge(daemon: Running, client: Client) -> Iterator[str]:
    """What is wrong with what was kept of a client's turns."""
    for identity, said in client.responses:
        kept = daemon.call("GET", f"/v1/responses/{identity}")
        if kept.status != 200 or text_of(kept.json) != said:
            yield f"response {identity} answered {said!r}, and is now {kept.status} {kept.body[:200]!r}"
    if client.kind == "chain":
        return
    turns = turns_of(daemon, client.name)
    kept_questions = [question for question, _ in turns]
    if len(set(kept_questions)) != len(kept_questions):
        yield f"{client.name}: a turn was kept twice"
    known = dict(turns)
    for question, answer in client.answered:
        if known.get(question) != answer:
            yield f"{client.name}: {question} was answered {answer!r}, kept is {known.get(question)!r}"
    asked = {question for question, _ in client.answered}
    if [question for question in kept_questions if question in asked] != [question for question, _ in client.answered]:
        yield f"{client.name}: the turns are kept in another order"


def turns_of(daemon: Running, name: str) -> list[tuple[str, str]]:
    """Questions and answers of one conversation, as the export has them."""
    lines = daemon.call("GET", f"/api/state/export?conversation={name}").body.splitlines()
    said = [plain(entry["body"]) for entry in map(json.loads, lines) if entry["type"] == "entry"]
    assert len(said) % 2 == 0, f"{name}: half a turn was kept"
    return list(zip(said[::2], said[1::2], strict=True))


def plain(message: Any) -> str:
    """The text of a message of either shape."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def main() -> int:
    """Run by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="how often the daemon is killed (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="what chance begins with (default 1)")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagein-kill-") as folder:
        crash = Crash(Path(folder), told.seed)
        faults = crash.run(told.rounds)
    answered = sum(len(client.answered) for client in crash.clients)
    print(f"{told.rounds} kills, {answered} answered turns, {len(faults)} faults")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
