#!/usr/bin/env python3
"""A controllable server with an OpenAI-style API, for tests of everything that starts and talks to engines.

Standard library only; runs alone: ``python fake_engine.py --port 8000 --allocate 100MiB``. Beside the API it answers
``GET /control/state`` and ``POST /control/{release,hold,healthy,unhealthy,allocate,print,die}``, so that a test decides
when something happens instead of waiting for it; a request's own field ``garbage`` stands for ``--garbage``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import fake_garbage  # these lie beside this file
from fake_memory import map_file, start_grandchild, touch
from fake_sleep import Bed
from fake_switches import parse_arguments, parse_size


class State:
    """What tests see and change; shared by the threads of all requests."""

    def __init__(self, switches: argparse.Namespace) -> None:
        self.switches = switches
        self.lock = threading.Condition()
        self.probes = 0
        self.healthy = not switches.unhealthy and switches.die_while_loading is None
        self.healthy_at = time.monotonic() + switches.load_seconds
        self.hold = switches.hold
        self.released = 0
        self.started = 0
        self.finished = 0
        self.cancelled = 0
        self.bed = Bed(switches.allocate, switches.sleep)
        self.memory: list[object] = []
        self.grandchild: int | None = None

    def view(self) -> dict[str, object]:
        with self.lock:
            return {
                "pid": os.getpid(),
                "started": self.started,
                "finished": self.finished,
                "cancelled": self.cancelled,
                "in_flight": self.started - self.finished - self.cancelled,
                "grandchild": self.grandchild,
                "asleep": self.bed.asleep,
            }

    def probed(self) -> None:
        """A health probe came."""
        with self.lock:
            self.probes += 1
            if self.probes == self.switches.die_while_loading:
                print("fake engine: a layer is missing", file=sys.stderr, flush=True)
                die(self.switches.exit_code)

    def is_healthy(self) -> bool:
        return self.healthy and time.monotonic() >= self.healthy_at

    def enter(self) -> int:
        """A request starts; returns its number once it may go on."""
        with self.lock:
            self.started += 1
            number = self.started
        self.wait_for_release(0)
        return number

    def wait_for_release(self, tokens: int) -> None:
        """Wait where requests are held, after so many tokens, until a test lets one of them go on."""
        with self.lock:
            while self.hold and tokens == self.switches.hold_after and self.released == 0:
                self.lock.wait()
            if self.hold and tokens == self.switches.hold_after:
                self.released -= 1

    def leave(self, finished: bool) -> None:
        with self.lock:
            self.finished += finished
            self.cancelled += not finished

    def control(self, act: str, count: str | None) -> None:
        with self.lock:
            if act == "release":
                self.released += int(count or 10**9)
            elif act == "hold":
                self.hold, self.released = True, 0
            elif act in ("healthy", "unhealthy"):
                self.healthy = act == "healthy"
            elif act == "allocate":
                self.memory.append(touch(parse_size(count or "0")))
            elif act == "print":
                print(count or "", flush=True)
            elif act == "die":
                die(int(count or self.switches.exit_code))
            else:
                raise KeyError(act)
            self.lock.notify_all()


def die(code: int) -> None:
    """End at once, in the middle of whatever other threads do."""
    sys.stdout.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


class Answered(Exception):
    """The request was answered with nonsense."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def address_string(self) -> str:
        return "client"  # a Unix socket has no address

    def do_GET(self) -> None:
        state, switches = self.server.state, self.server.state.switches
        path = urlsplit(self.path).path
        if path == "/control/state":
            self.answer(state.view())
        elif path == "/health" and not switches.no_health:
            if switches.hang_health:
                threading.Event().wait()
            if switches.garbage_health:
                with contextlib.suppress(Answered, OSError):
                    self.nonsense(switches.garbage_health)
                return
            state.probed()
            healthy = state.is_healthy()
            self.answer({"status": "ok" if healthy else "loading"}, 200 if healthy else 503)
        elif path == "/v1/models":
            healthy = state.is_healthy()
            self.answer({"object": "list", "data": [{"id": switches.name}]}, 200 if healthy else 503)
        else:
            self.fail(404, "no such path")

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if url.path.startswith("/control/"):
            query = parse_qs(url.query)
            try:
                self.server.state.control(url.path.rpartition("/")[2], query.get("value", [None])[0])
            except KeyError:
                self.fail(404, "no such control")
            else:
                self.answer(self.server.state.view())
            return
        bed, serve = self.server.state.bed, ANSWERS.get(url.path)
        if bed.has(url.path):
            self.answer({}, bed.tell(url.path))
            return
        if serve is None:
            self.fail(404, "no such path")
            return
        if bed.asleep:
            self.fail(503, "the model sleeps", "server_error")
            return
        finished = False
        number = self.server.state.enter()
        try:
            request = json.loads(body) if not url.path.startswith(("/v1/audio", "/v1/images")) else {}
            self.misbehave(request)
            memory = touch(self.server.state.switches.request_bytes)
            serve(self, request, number)
            del memory
            finished = True
        except Answered:
            finished = True
        except ValueError as error:
            self.fail(400, str(error))
        except OSError:
            self.close_connection = True  # the client left
        finally:
            self.server.state.leave(finished)

    def misbehave(self, request: dict[str, object]) -> None:
        switches = self.server.state.switches
        if switches.hang:
            threading.Event().wait()
        if kind := request.get("garbage", switches.garbage):
            self.nonsense(str(kind))

    def nonsense(self, kind: str) -> None:
        fake_garbage.answer(kind, self.wfile.write)
        if kind not in fake_garbage.KEPT:
            self.close_connection = True
        raise Answered

    def answer(self, body: object, status: int = 200) -> None:
        self.raw(json.dumps(body).encode(), status)

    def raw(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        self.answer({"error": {"code": status, "message": message, "type": kind}}, status)

    def head(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, body: object) -> None:
        self.chunk(f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode())

    def log_message(self, text: str, *values: object) -> None:
        print(text % values, file=sys.stderr)


def words_of(request: dict[str, object]) -> list[str]:
    """The words of a prompt; the fake's tokens."""
    if "messages" in request:
        return " ".join(str(message.get("content")) for message in request["messages"]).split()  # type: ignore[union-attr, attr-defined]
    return str(request.get("prompt", "")).split()


def generate(handler: Handler, request: dict[str, object], number: int) -> None:
    """Answer a chat or a completion: word by word, at the given pace, with usage."""
    switches = handler.server.state.switches
    chat = "messages" in request
    prompt = words_of(request)
    if switches.context is not None and len(prompt) > switches.context:
        handler.fail(400, f"request ({len(prompt)} tokens) exceeds the context", "exceed_context_size_error")
        return
    count = min(switches.tokens, int(str(request.get("max_tokens") or switches.tokens)))
    dying = switches.die_after is not None and number >= switches.die_after
    stream = bool(request.get("stream"))
    if stream:
        handler.head("text/event-stream")
    words = []
    for index in range(count):
        if index > 0:
            handler.server.state.wait_for_release(index)
        if switches.tokens_per_second:
            time.sleep(1 / switches.tokens_per_second)
        if dying and index >= count // 2:
            die(switches.exit_code)
        words.append(f"word{index}")
        if stream:
            text = words[-1] if index == 0 else f" {words[-1]}"
            delta = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            handler.event(envelope(switches.name, chat, delta | {"finish_reason": None}, chunk=True))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    if stream:
        last = {"index": 0, "finish_reason": "stop"} | ({"delta": {}} if chat else {"text": ""})
        handler.event(envelope(switches.name, chat, last, chunk=True) | {"usage": usage})
        handler.event("[DONE]")
        handler.chunk(b"")
        return
    text = " ".join(words)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}} if chat else {"index": 0, "text": text}
    body = envelope(switches.name, chat, choice | {"finish_reason": "stop"}, chunk=False)
    handler.answer(body | {"usage": usage})


def envelope(name: str, chat: bool, choice: dict[str, object], *, chunk: bool) -> dict[str, object]:
    """The frame of OpenAI's answers."""
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
    return {"id": "fake-1", "object": kind, "created": 1, "model": name, "choices": [choice]}


def embed(handler: Handler, request: dict[str, object], number: int) -> None:
    """Answer embeddings: a vector of three numbers that depends on the text alone."""
    given = request["input"]
    texts = given if isinstance(given, list) else [given]
    vectors = [[float(len(str(text))), float(sum(str(text).encode()) % 97), 1.0] for text in texts]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
    handler.answer({"object": "list", "model": handler.server.state.switches.name, "data": data, "usage": usage})


def rerank(handler: Handler, request: dict[str, object], number: int) -> None:
    """Answer a rerank: the more words of the query a document has, the better."""
    wanted = set(str(request["query"]).lower().split())
    documents = [str(document) for document in request["documents"]]  # type: ignore[attr-defined]
    scored = [
        {"index": i, "relevance_score": float(len(wanted & set(text.lower().split())))}
        for i, text in enumerate(documents)
    ]
    scored.sort(key=lambda result: -result["relevance_score"])
    handler.answer({"model": handler.server.state.switches.name, "results": scored, "usage": {"total_tokens": 1}})


def fixed(**body: object) -> Callable[[Handler, dict[str, object], int], None]:
    """Answer the same to everything."""
    return lambda handler, request, number: handler.answer(body)


ANSWERS = {
    "/v1/chat/completions": generate,
    "/v1/completions": generate,
    "/v1/embeddings": embed,
    "/v1/rerank": rerank,
    "/v1/audio/transcriptions": fixed(text="fake words"),
    "/v1/images/classifications": fixed(labels=[{"label": "fake", "score": 1.0}]),
    "/v1/images/saliency": fixed(saliency=[[0.0, 1.0]]),
    "/v1/texts/classifications": fixed(data=[{"index": 0, "label": "fake", "score": 1.0, "scores": {"fake": 1.0}}]),
    "/v1/texts/token-classifications": fixed(data=[{"index": 0, "tokens": [{"text": "fake", "label": "x"}]}]),
}


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, state: State) -> None:
        self.state = state
        if state.switches.socket:
            self.address_family = socket.AF_UNIX
            super().__init__(state.switches.socket, Handler)  # type: ignore[arg-type]
        else:
            super().__init__(("127.0.0.1", state.switches.port or 0), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that leaves is no news


def flood(switches: argparse.Namespace) -> None:
    """Print too much, as told."""
    for number in range(switches.flood // 64):
        print(f"flood {number:09d} ".ljust(63, "x"), flush=False)
    for output in (sys.stdout, sys.stderr) if switches.flood_line else ():
        output.write("x" * switches.flood_line)
    sys.stdout.flush()
    if switches.flood_forever:
        threading.Thread(target=print_forever, daemon=True).start()


def print_forever() -> None:
    while True:
        print("flood ".ljust(4095, "x"), flush=True)


def main() -> None:
    """Misbehave as told, then serve for ever."""
    switches = parse_arguments(__doc__)
    if switches.slow_stop:
        signal.signal(signal.SIGTERM, lambda number, frame: (time.sleep(switches.slow_stop), os._exit(0)))
    if switches.ignore_sigterm:
        signal.signal(signal.SIGTERM, lambda number, frame: print("SIGTERM ignored", flush=True))
    state = State(switches)
    if switches.mmap:
        state.memory.append(map_file(switches.mmap))
    if switches.grandchild:
        state.grandchild = start_grandchild(switches.grandchild, switches.grandchild_bytes)
    flood(switches)
    if switches.load_gate:
        with open(switches.load_gate, "rb"):
            pass  # opening a fifo waits for the other side
    if switches.die_before_listen:
        print("fake engine: something is missing", file=sys.stderr, flush=True)
        die(switches.exit_code)
    server = Server(state)
    print(f"fake engine listens on {switches.socket or server.server_address}", flush=True)
    server.serve_forever(poll_interval=60)


if __name__ == "__main__":
    main()
