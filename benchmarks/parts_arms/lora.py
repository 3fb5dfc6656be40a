"""Tasks that are LoRAs on one model: `python -m parts_arms.lora BASE ADAPTERS SPLIT ROUNDS WAY …`.

WAY is `pagein`, `peft` (all adapters in memory, `set_adapter` before each call) or `hotswap` (PEFT, one adapter in
memory, whose weights are overwritten from the disk). Several are opened in one process and called in turn: two
processes would differ by more than the ways do; one alone shows its memory. A call is one pass over a short prompt:
what a switch costs beside it is the same for any answer. First each adapter comes from a file that is not in the page
cache.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import transformers

from common.disk import drop_from_cache
from kv_arms.say import say
from pagein.kv.trial.memory import Peak
from parts_arms.models import TASKS
from parts_arms.traffic import FIRST, request

SHOWN = 8
"""Logits that are said of each task, so that the ways' answers can be compared."""


class Way(Protocol):
    """A model and its adapters."""

    told: str

    def cool(self, task: str) -> None:
        """Let the task's adapter lie on the disk alone; not timed."""
        ...

    def switch_and_call(self, task: str) -> list[float]:
        """Bring the adapter in where it is not, and pass over the prompt."""
        ...


class Pagein:
    """Adapters are parts."""

    def __init__(self, base: Path, adapters: Path, split: Path) -> None:
        from pagein import __version__, load_parts

        self._model = load_parts(split)
        self._files = list(split.glob("*.safetensors"))
        report = self._model.pagein.report()
        self._parts = {one.tasks[0]: one.part for one in report.parts if one.role == "adapter"}
        self.told = f"Pagein {__version__}"

    def cool(self, task: str) -> None:
        self._model.pagein.unload(self._parts[task])
        drop_from_cache(self._files)

    def switch_and_call(self, task: str) -> list[float]:
        return one_pass(self._model, task=task)


class Peft:
    """All adapters in memory."""

    def __init__(self, base: Path, adapters: Path, split: Path) -> None:
        import peft

        self._adapters = adapters
        self._model = peft.PeftModel.from_pretrained(open_base(base), adapters / TASKS[0], adapter_name=TASKS[0])
        self.told = f"PEFT {peft.__version__}, set_adapter"

    def cool(self, task: str) -> None:
        drop_from_cache(list((self._adapters / task).glob("*.safetensors")))

    def switch_and_call(self, task: str) -> list[float]:
        if task not in self._model.peft_config:
            self._model.load_adapter(self._adapters / task, adapter_name=task)
        self._model.set_adapter(task)
        return one_pass(self._model)


class Hotswap:
    """One adapter in memory, whose weights are those of the task that was asked last."""

    def __init__(self, base: Path, adapters: Path, split: Path) -> None:
        import peft

        self._adapters = adapters
        self._model = peft.PeftModel.from_pretrained(open_base(base), adapters / TASKS[-1])
        self.told = f"PEFT {peft.__version__}, hotswap_adapter"

    def cool(self, task: str) -> None:
        drop_from_cache(list((self._adapters / task).glob("*.safetensors")))

    def switch_and_call(self, task: str) -> list[float]:
        from peft.utils.hotswap import hotswap_adapter

        hotswap_adapter(self._model, self._adapters / task, adapter_name="default")
        return one_pass(self._model)


WAYS: dict[str, type[Way]] = {"pagein": Pagein, "peft": Peft, "hotswap": Hotswap}


def main() -> None:
    """Open, call, and say the seconds of each call."""
    base, adapters, split, rounds, *names = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peak = Peak("cpu")
    ways = {name: WAYS[name](Path(base), Path(adapters), Path(split)) for name in names}
    found: dict[str, dict[str, Any]] = {name: {"disk": [], "other": [], "same": [], "said": {}} for name in names}
    for way in ways.values():
        way.switch_and_call(TASKS[0])  # the first call chooses kernels
    for task in TASKS[::-1]:
        for name, way in ways.items():
            way.cool(task)
            seconds, found[name]["said"][task] = timed(way, task)
            found[name]["disk"].append(seconds)
    in_memory = [name for name in names if name != "hotswap"]
    for number in range(int(rounds)):
        task = TASKS[number % len(TASKS)]
        for name in in_memory[:: 1 if number % 2 else -1]:
            for kind in ("other", "same"):
                found[name][kind].append(timed(ways[name], task)[0])
    say("ran", ways=found, memory=peak.told(), told={name: way.told for name, way in ways.items()})


def timed(way: Way, task: str) -> tuple[float, list[float]]:
    """Seconds of a call, and what it said."""
    begin = perf_counter()
    said = way.switch_and_call(task)
    return perf_counter() - begin, said


def one_pass(model: Any, **more: Any) -> list[float]:
    """Some logits of the last position."""
    ids = torch.tensor([request(FIRST, 0).prompt])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, **more).logits[0, -1]
    found: list[float] = logits[:SHOWN].float().tolist()
    return found


def open_base(folder: Path) -> Any:
    """The model by plain transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()


if __name__ == "__main__":
    main()
