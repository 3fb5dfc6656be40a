"""Messages and paths between the daemon and a worker.

The daemon starts ``python -m pagein.worker`` in a session of its own and writes one line of JSON, the `WorkerSpec`, to
its standard input. Standard input then stays open: its end tells the worker that the daemon is gone. The worker answers
with lines of JSON on the pipe whose number is in ``PAGEIN_CONTROL_FD``: `Hello`, then `Ready` or `Failed`. The pipe is
inherited, so what arrives on it comes from the child that was started and from nobody else; ``token`` is echoed to
prove it. Standard output and error go to the model's log.

A worker whose spec has ``adopt_wait`` outlives a daemon that was killed: for so long it accepts connections on
`ADOPTION_SOCKET` in its folder. The next daemon sends `Adopt` with the worker's token and gets `Adopted`, with the
reading end of the worker's output as a descriptor beside it (``SCM_RIGHTS``), and `Ready`. From then on that connection
is what standard input and the control pipe were: its end tells that the daemon is gone, and `Failed` goes out on it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum

CONTROL_FD_VARIABLE = "PAGEIN_CONTROL_FD"
LOG_FD_VARIABLE = "PAGEIN_LOG_FD"
"""The reading end of the worker's own output: while it holds that, its engine can print without a daemon."""
ADOPTION_SOCKET = "adopt.sock"


class Capability(StrEnum):
    """What a model can be asked for; the value is also the word in configuration, status and metrics."""

    CHAT = "chat"
    """Answer messages (`/v1/chat/completions`)."""
    COMPLETION = "completion"
    """Continue a prompt (`/v1/completions`)."""
    EMBEDDING = "embedding"
    """Texts to vectors (`/v1/embeddings`)."""
    RERANK = "rerank"
    """Order documents by a query (`/v1/rerank`)."""
    TRANSCRIPTION = "transcription"
    """Speech to text (`/v1/audio/transcriptions`)."""
    CLASSIFICATION = "classification"
    """Image to labels with scores (`/v1/images/classifications`)."""
    SALIENCY = "saliency"
    """Image to a map of what matters in it (`/v1/images/saliency`)."""
    TEXT_CLASSIFICATION = "text-classification"
    """Text to labels with scores (`/v1/texts/classifications`)."""
    TOKEN_CLASSIFICATION = "token-classification"  # noqa: S105 - no password
    """A label with a score for every token of a text (`/v1/texts/token-classifications`)."""


PATHS: dict[Capability, str] = {
    Capability.CHAT: "/v1/chat/completions",
    Capability.COMPLETION: "/v1/completions",
    Capability.EMBEDDING: "/v1/embeddings",
    Capability.RERANK: "/v1/rerank",
    Capability.TRANSCRIPTION: "/v1/audio/transcriptions",
    Capability.CLASSIFICATION: "/v1/images/classifications",
    Capability.SALIENCY: "/v1/images/saliency",
    Capability.TEXT_CLASSIFICATION: "/v1/texts/classifications",
    Capability.TOKEN_CLASSIFICATION: "/v1/texts/token-classifications",
}
"""The path of each capability, the same outside (gateway) and inside (worker): the gateway proxies, it does not
translate."""

HEALTH_PATH = "/health"
SLEEP_PATH, WAKE_PATH = "/sleep", "/wake_up"
"""Where a worker that sleeps is told so (POST), as vLLM has it: asleep it keeps its process and gives memory back; the
answer to either comes when it is done, and requests that come between are answered 503."""
ALLOWANCE_PATH = "/allowance"
"""Where a worker that can live with other bytes than it was started with is told so (POST ``{"bytes": N}``, and a
``"pool"`` that must be its own where one is named), while it computes: it answers once it keeps to them, or refuses
with both numbers and stays as it was."""
KV_PATH = "/kv"
"""Where a worker that keeps KV caches by itself (`BLOCKS_WAY`) shows its pool (GET), and lets go of what it is told to
(POST, one of ``{"forget": [[tenant, conversation], …]}``, ``{"idle": seconds}``, ``{"all": true}``): it answers
``{"conversations": N, "bytes": N}`` once that is gone, but for turns under way, which it forgets as they end. On
``{"check": PLACE}`` (``""``: from the beginning) it reads a part of its blocks on the disk through, drops what is
damaged, and answers ``{"checked": N, "bytes": N, "faults": [[block, reason], …], "left": BYTES, "next": PLACE}``, the
last of these null where all was read."""
KV_TENANT_HEADER, KV_CONVERSATION_HEADER = "X-Pagein-KV-Tenant", "X-Pagein-KV-Conversation"
"""Whose turn a request is, told to such a worker with each; the daemon makes both, nothing of a client's gets there."""
TASK_HEADER = "X-Pagein-Task"
"""Which task of a split model a request is for, told to its worker; the daemon makes it, nothing of a client's gets
there. Without it a worker of one task takes that one."""
ROUTE_HEADER = "X-Pagein-Route"
"""The key by which a request takes part in the roll-out of a split model: the same key, the same answer to whether only
the parts of its task are in memory or all of the model. The daemon makes it of the conversation, the user or the
request; without it a worker makes one for each request."""
SILENCE_HEADER = "X-Pagein-Silence"
"""Seconds after which a worker that says nothing is taken for hung, told to it with each request where they are so few
that `QUIET` would be too long."""
QUIET = 15.0
"""Seconds without a word after which a worker that computes shows life: a long prompt may take minutes."""
SIGNS = 3
"""It does so that many times within the silence that it may keep."""
PARTS_PATH = "/parts"
"""Where a worker that serves a split model shows its parts (GET, with ``?after=SEQ`` for the events since; it never
loads and never waits for a load), and does what it is told (POST, one of ``{"load": PART}``, ``{"unload": PART}``,
``{"pin": PART}``, ``{"unpin": PART}``, ``{"replace": {"part": PART, "by": PART}}``, ``{"refresh": true}``,
``{"rollout": {"level": WORD, "percent": NUMBER}}``) and then answers as to GET."""
BLOCKS_WAY = "kv-blocks"
"""`StateFacts.way` of a worker that keeps, restores and shares KV caches by itself, block by block."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker answers HTTP: a Unix socket, or a loopback port where the engine cannot use one."""

    socket: str | None = None
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a worker needs to start; travels over standard input, never in the process list."""

    name: str
    """The configured name of the model."""
    engine: str
    """An entry of the group ``pagein.engines``."""
    token: str
    """Random; echoed in every message of this worker."""
    socket_dir: str
    """A folder for this worker's socket, readable by the owner only."""
    path: str | None = None
    """Model file or folder; None for a command."""
    command: list[str] | None = None
    """Arguments of a command engine, with ``${port}`` and ``${socket}`` still in them."""
    recipe: str | None = None
    """The pre/post-processing recipe of the onnx engine."""
    context: int | None = None
    """Tokens of context per request slot; None = the engine's default."""
    parallel: int = 1
    """Requests that the worker holds at once."""
    threads: int | None = None
    """Compute threads; None = one per allowed core."""
    cpus: list[int] | None = None
    """CPU affinity; None = all."""
    device: str = "cpu"
    """``cpu`` or ``cuda:N``."""
    allowance: dict[str, int] = field(default_factory=dict)
    """Bytes per pool that the daemon granted."""
    ready_timeout: float = 300.0
    """Seconds until the daemon gives the load up; an engine that waits for a server of its own uses the same bound."""
    environ: dict[str, str | None] = field(default_factory=dict)
    """What this worker's environment must change before its engine is imported; None removes a variable."""
    options: dict[str, object] = field(default_factory=dict)
    """Engine options from the configuration, for example ``{"cache_ram": 0}``."""
    adopt_wait: float = 0.0
    """Seconds that it waits for the next daemon once this one is gone; 0 = it ends with this one."""
    slots_dir: str | None = None
    """A folder on a disk, readable by the owner only, where the engine makes one of its own for saved conversations;
    None = in ``socket_dir``, which may lie in memory."""
    kv_dir: str | None = None
    """A folder of this model's own, where an engine that keeps KV caches by itself puts blocks; None = nowhere."""
    kv_disk: int | None = None
    """Bytes that it may take there."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a worker: it is alive and has read its spec."""

    token: str
    pid: int


@dataclass(frozen=True, slots=True)
class StateFacts:
    """How the KV cache of this worker's conversations is saved and restored, and what a saved one depends on.

    What lies in ``folder`` was written by the engine without any care: whoever keeps it checks, and removes the file.
    """

    way: str
    """Who can talk to it; ``llama-slots`` = llama.cpp's slot files, `BLOCKS_WAY` = it sees to all of that itself."""
    folder: str
    """Where the engine writes and reads the files: its own, readable by the owner only, removed by the daemon; with
    `BLOCKS_WAY` its store, which stays, or empty where it has none."""
    slots: int
    """Conversations that it holds at once."""
    build: str
    """Version and build of what computes."""
    context: int | None
    """Tokens that one conversation may use."""
    kv_type_k: str
    kv_type_v: str
    layout: dict[str, str] = field(default_factory=dict)
    """Whatever else two workers must have in common to read each other's files, beside the weights."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and the endpoint answers."""

    token: str
    endpoint: Endpoint
    capabilities: list[Capability]
    engine_version: str
    context: int | None = None
    """Tokens that one request may use, as loaded; None where it has no meaning."""
    sleeps: bool = False
    """It has `SLEEP_PATH` and `WAKE_PATH`."""
    state: StateFacts | None = None
    """None where conversations cannot be saved."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded, or (after `Ready`) its engine ended; the worker exits after this message."""

    token: str
    message: str
    code: str = "load_failed"
    """The code of the error in ``errors/``."""
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """What a new daemon says to a worker that outlived its own."""

    token: str
    """Of the worker, from its record: only a daemon of the same state folder can know it."""
    adopt_wait: float
    """Seconds that it shall wait for the daemon after this one."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The worker agrees; the descriptor of its output comes with this message, `Ready` follows."""

    token: str
    pid: int
    output: str
    """The last of what it printed while nobody listened."""
    lost: int
    """Bytes printed before that, which were not kept."""


Message = Hello | Ready | Failed | Adopted
"""What a worker says."""


_KINDS: dict[str, type[Message | WorkerSpec | Adopt]] = {
    kind.__name__: kind for kind in (Hello, Ready, Failed, WorkerSpec, Adopt, Adopted)
}


def encode(message: Message | WorkerSpec | Adopt) -> bytes:
    """One line of JSON, with its kind."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message | WorkerSpec | Adopt:
    """Read one line back; raises ValueError for anything that `encode` did not write."""
    try:
        body = json.loads(line)
        kind = body.pop("kind")
        if kind == "Ready":
            body["endpoint"] = Endpoint(**body["endpoint"])
            body["capabilities"] = [Capability(c) for c in body["capabilities"]]
            if body.get("state") is not None:
                body["state"] = StateFacts(**body["state"])
        return _KINDS[kind](**body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a worker message: {line[:200]!r}") from error
