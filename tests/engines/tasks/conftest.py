"""Small split models with a tokeniser of bytes, made as users make them, behind the real engine."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagein.engines.contract import Engine, Started, find_engine
from pagein.protocol import PARTS_PATH, TASK_HEADER, WorkerSpec
from tests.engines.local.conftest import Reply, request
from tests.engines.writing.conftest import PRINTABLE, write_tokeniser
from tests.parts.models import lora, mapping, quiet

ROOMY = 4 * 1024**3
WORDS = 258
PROMPT = "<{text}>\n"
LABELS = {
    "sentiment": ("good", "bad", "neither"),
    "topic": ("sport", "news"),
    "tag": ("name", "place", "other", "verb"),
}
BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS,
    "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 512, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": 0,
}  # fmt: skip


def split(folder: Path, base: Path, tasks: Any) -> Path:
    """Analyse and write a split."""
    from pagein.parts.splitting.analyse import analyse
    from pagein.parts.splitting.apply import apply

    apply(analyse(base, mapping(**tasks)), folder)
    return folder


def add_loras(root: Path, base: Path) -> Path:
    """A language model with two LoRAs, one task of its own, and one of vectors."""
    tasks: dict[str, Any] = {
        name: {"kind": "generate", "adapter": str(lora(root / name, seed)), "samples": ["ab"], **more}
        for seed, (name, more) in enumerate({"email": {"prompt": PROMPT}, "grammar": {}}.items())
    }
    tasks["plain"] = {"kind": "generate", "samples": ["ab"]}
    tasks["vector"] = {"kind": "embed", "samples": ["ab"]}
    tasks["inner"] = {"kind": "call", "call": "model", "samples": ["ab"]}
    return split(root / "split", base, tasks)


def language_model(folder: Path, **changes: Any) -> Path:
    """A small Llama that writes printable letters, and does not repeat one of them."""
    import torch
    import transformers as t

    quiet()
    torch.manual_seed(1)
    model: Any = t.LlamaForCausalLM(t.LlamaConfig(**{**LLAMA, **changes}))
    model.lm_head.weight.data *= 40
    model.lm_head.weight.data[PRINTABLE:] = 0
    model.save_pretrained(folder)
    write_tokeniser(folder, template=None)
    return folder


def classifiers(root: Path) -> dict[str, Path]:
    """Two classifiers and a tagger over one BERT."""
    import torch
    import transformers as t

    quiet()
    torch.manual_seed(1)
    base = t.BertModel(t.BertConfig(**BERT)).state_dict()
    kinds = {"sentiment": t.BertForSequenceClassification, "topic": t.BertForSequenceClassification}
    folders: dict[str, Path] = {}
    for seed, (name, labels) in enumerate(LABELS.items()):
        torch.manual_seed(10 + seed)
        kind = kinds.get(name, t.BertForTokenClassification)
        model: Any = kind(t.BertConfig(**BERT, id2label=dict(enumerate(labels))))
        body = {key: value for key, value in base.items() if name != "tag" or "pooler" not in key}
        model.bert.load_state_dict(body)
        folders[name] = root / name
        model.save_pretrained(folders[name])
        write_tokeniser(folders[name], template=None)
    return folders


@pytest.fixture(scope="session")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split of a language model: its tasks are LoRAs."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("writes")
    return add_loras(root, language_model(root / "base"))


@pytest.fixture(scope="session")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split of three models of one backbone: two classifiers and a tagger."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("reads")
    folders = classifiers(root)
    kinds = {"sentiment": "classify", "topic": "classify", "tag": "tokens"}
    tasks = {name: {"kind": kinds[name], "folder": str(folder), "samples": ["ab"]} for name, folder in folders.items()}
    return split(root / "split", folders["sentiment"], tasks)


class Running:
    """A started engine."""

    def __init__(self, engine: Engine, started: Started) -> None:
        self.engine, self.started = engine, started

    @property
    def parts(self) -> Any:
        """What `model.pagein` is."""
        return self.engine._model.pagein

    @property
    def beside(self) -> int:
        """Bytes of the allowance that no part gets."""
        from pagein.catalog.estimate_parts import beside
        from pagein.catalog.split.describe import describe_split

        spec = self.engine.spec
        return beside(describe_split(Path(spec.path)), spec.context, spec.parallel, spec.device)

    async def ask(self, path: str, task: str | None, body: Any, **headers: str) -> Reply:
        """Ask for a task as the daemon does."""
        named = {**headers, **({TASK_HEADER: task} if task is not None else {})}
        return await request(self.started.endpoint, "POST", path, json=body, headers=named)

    async def tell(self, body: Any) -> Reply:
        """Tell it what to do with its parts."""
        return await request(self.started.endpoint, "POST", PARTS_PATH, json=body)

    async def look(self, after: int = 0) -> Any:
        """Look at its parts."""
        reply = await request(self.started.endpoint, "GET", f"{PARTS_PATH}?after={after}")
        assert reply.status == 200, reply.body
        return reply.body

    async def states(self) -> dict[str, tuple[str, int]]:
        """Where each part is, and how many calls use it."""
        return {one["name"]: (one["state"], one["leases"]) for one in (await self.look())["parts"]}


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    """Start the engine on a split folder; stopped after the test."""
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:

        def act(path: Path, **fields: Any) -> Running:
            given = {"context": 256, "parallel": 3, "threads": 2, "allowance": {"ram": ROOMY}} | fields
            spec = WorkerSpec("m", "parts", "t", folder, str(path), **given)
            engine = find_engine("parts")(spec)
            engines.append(engine)
            return Running(engine, engine.start())

        yield act
        for engine in engines:
            engine.stop()


class Gate:
    """Holds the threads that compute at a layer of the model; counts the passes that went through."""

    def __init__(self, layer: Any) -> None:
        self.passes = 0
        self.arrived = threading.Event()
        """A pass stands here."""
        self._open = threading.Event()
        self._tickets = threading.Semaphore(0)
        layer.register_forward_pre_hook(self._wait)

    def let(self, passes: int) -> None:
        """Let so many go on."""
        for _ in range(passes):
            self._tickets.release()

    def open(self) -> None:
        """Let all go on."""
        self._open.set()
        self.let(64)

    def _wait(self, module: Any, inputs: Any) -> None:
        if not self._open.is_set():
            self.arrived.set()
            assert self._tickets.acquire(timeout=60)
            self.arrived.clear()
        self.passes += 1


@pytest.fixture
def gate() -> Iterator[Callable[[Running], Gate]]:
    """Put a gate before the last layer of a language model; open at the end of the test."""
    gates: list[Gate] = []

    def act(running: Running) -> Gate:
        gates.append(Gate(running.engine._model.model.layers[-1]))
        return gates[-1]

    yield act
    for one in gates:
        one.open()
