#!/usr/bin/env python3
"""A controllable server with an OpenAI-style API, for tests of everything that starts and talks to engines.

Standard library only; runs alone: ``python fake_engine.py --port 8000 --allocate 100MiB``. Beside the API it answers
``GET /control/state`` and ``POST /control/{release,hold,healthy,unhealthy,allocate,print,die}``, so that a test decides
when something happens instead of waiting for it.
"""

from __future__ import annotations

import argparse
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

from fake_memory import map_file, start_grandchild, touch  # lies beside this file


def parse_size(text: str) -> int:
    """Bytes of ``100MiB``, ``2GiB``, ``4096``."""
    for unit, factor in (("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The switches; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="listen on this loopback port; 0 takes a free one")
    parser.add_argument("--socket", help="listen on this Unix socket")
    parser.add_argument("--name", default="fake", help="model name in answers")
    parser.add_argument("--allocate", type=parse_size, default=0, help="bytes of memory to take and touch")
    parser.add_argument("--mmap", type=parse_size, default=0, help="bytes of a file to map and touch")
    parser.add_argument("--request-bytes", type=parse_size, default=0, help="bytes to take and touch during a request")
    parser.add_argument("--load-seconds", type=float, default=0.0, help="answer 503 on /health for so long")
    parser.add_argument("--load-gate", help="do not listen until somebody opens this fifo for writing")
    parser.add_argument("--unhealthy", action="store_true", help="answer 503 on /health until /control/healthy")
    parser.add_argument("--no-health", action="store_true", help="have no /health: 404, as some servers do")
    parser.add_argument("--ignore-sigterm", action="store_true", help="go on after SIGTERM")
    parser.add_argument("--die-before-listen", action="store_true", help="end instead of listening")
    parser.add_argument("--die-after", type=int, metavar="N", help="end in the middle of the Nth answer")
    parser.add_argument("--exit-code", type=int, default=3, help="exit code of every --die-…; -9 kills itself")
    parser.add_argument("--hang", action="store_true", help="accept requests and never answer them")
    parser.add_argument("--hang-health", action="store_true", help="accept health probes and never answer them")
    parser.add_argument("--hold", action="store_true", help="hold requests until /control/release")
    parser.add_argument("--hold-after", type=int, default=0, metavar="N", help="hold them after N tokens of the answer")
    parser.add_argument(
        "--grandchild",
        choices=["plain", "session", "orphan", "hidden"],
        help="start a process that outlives this one: a child, one in its own session, one whose parent has ended, "
        "one that also has an empty environment",
    )
    parser.add_argument("--grandchild-bytes", type=parse_size, default=0, help="bytes that it takes and touches")
    parser.add_argument("--garbage", choices=["text", "half-json", "bad-sse", "huge", "close"], help="answer nonsense")
    parser.add_argument("--flood", type=parse_size, default=0, help="bytes of log lines to print at start")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer, unless max_tokens is lower")
    parser.add_argument("--tokens-per-second", type=float, help="pace of an answer; none = at once")
    parser.add_argument("--context", type=int, help="refuse prompts of more words, as llama.cpp does")
    return parser.parse_args(arguments)


class State:
    """What tests see and change; shared by the threads of all requests."""

    def __init__(self, switches: argparse.Namespace) -> None:
        self.switches = switches
        self.lock = threading.Condition()
        self.healthy = not switches.unhealthy
        self.healthy_at = time.monotonic() + switches.load_seconds
        self.hold = switches.hold
        self.released = 0
        self.started = 0
        self.finished = 0
        self.cancelled = 0
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
            }

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
        serve = ANSWERS.get(url.path)
        if serve is None:
            self.fail(404, "no such path")
            return
        finished = False
        number = self.server.state.enter()
        try:
            self.misbehave()
            request = json.loads(body) if not url.path.startswith(("/v1/audio", "/v1/images")) else {}
            memory = touch(self.server.state.switches.request_bytes)
            serve(self, request, number)
            del memory
            finished = True
        except ValueError as error:
            self.fail(400, str(error))
        except OSError:
            self.close_connection = True  # the client left
        finally:
            self.server.state.leave(finished)

    def misbehave(self) -> None:
        switches = self.server.state.switches
        if switches.hang:
            threading.Event().wait()
        if switches.garbage == "close":
            raise ConnectionError
        if switches.garbage in ("text", "half-json"):
            body = b"\x00\xff nonsense" if switches.garbage == "text" else b'{"object": "chat.completion", "cho'
            self.raw(body)
            raise ConnectionError
        if switches.garbage == "bad-sse":
            self.head("text/event-stream")
            self.chunk(b"data: {not json\n\nevent: what\ndata: [1, 2\n\n")
            raise ConnectionError
        if switches.garbage == "huge":
            self.head("application/json")
            while True:
                self.chunk(b" " * 65536)

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


def main() -> None:
    """Misbehave as told, then serve for ever."""
    switches = parse_arguments()
    if switches.ignore_sigterm:
        signal.signal(signal.SIGTERM, lambda number, frame: print("SIGTERM ignored", flush=True))
    state = State(switches)
    state.memory.append(touch(switches.allocate))
    if switches.mmap:
        state.memory.append(map_file(switches.mmap))
    if switches.grandchild:
        state.grandchild = start_grandchild(switches.grandchild, switches.grandchild_bytes)
    for number in range(switches.flood // 64):
        print(f"flood {number:09d} ".ljust(63, "x"), flush=False)
    sys.stdout.flush()
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
