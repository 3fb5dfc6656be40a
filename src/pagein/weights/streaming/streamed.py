"""A model under a byte budget: its plan, its figures, and the promise that it keeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import psutil
import torch

from pagein.errors import ContextTooLong, DoesNotFit, WeightsAway
from pagein.units import format_bytes, parse_bytes
from pagein.weights.planning.anatomy import dissect
from pagein.weights.planning.demand import Needs, touched_bytes
from pagein.weights.planning.plan import Plan, make_plan
from pagein.weights.reading.checkpoint import Checkpoint
from pagein.weights.reading.disk import DiskSpeed
from pagein.weights.reading.reader import Reader
from pagein.weights.reading.sources import Source
from pagein.weights.routed.experts import RoutedExperts
from pagein.weights.steps.batch import Prompt, generate_batch
from pagein.weights.steps.caches import cache_of, length_of
from pagein.weights.steps.lockstep import Lockstep
from pagein.weights.steps.speculate import Speculator
from pagein.weights.streaming.placement import Placement, Progress
from pagein.weights.streaming.report import Report
from pagein.weights.streaming.stage import Stage
from pagein.weights.streaming.structure import Structure


class Streamed:
    """What ``model.pagein`` is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        structure: Structure,
        sources: Mapping[str, Source],
        needs: Callable[[Placement], Needs],
        memory: int,
        speed: DiskSpeed,
        depth: int | None,
        stage: Stage,
    ) -> None:
        self.checkpoint = checkpoint
        self.speed = speed
        self._turn = RLock()
        """Held by the thread that computes, for the length of a pass, and by one that changes what is in memory."""
        self._depth = depth
        self._is_closed = False
        self._reader = Reader(speed.mode, speed.threads, speed.chunk, checkpoint.stamps)
        # At exit too: threads that still read while the interpreter goes would bring it down.
        weakref.finalize(self, Reader.close, self._reader)
        experts = RoutedExperts(structure, sources, dissect(checkpoint).active_experts or None, stage)
        self._placement = Placement(structure, sources, self._reader, experts, stage)
        self._needs = needs(self._placement)
        self.report = Report(self._placement)
        self.plan = self._make_plan(memory)
        self.speculator = Speculator(self.lockstep, structure.model, checkpoint.folder)
        self.report.also.append(self.speculator.lines)
        structure.model.register_forward_pre_hook(self._guard, with_kwargs=True)

    @property
    def notes(self) -> list[str]:
        """What the plan cannot tell: experts that are not read one by one, the host's memory before a device."""
        staging = self._placement.staging(self.plan)
        words = " + ".join(f"{name} {format_bytes(size)}" for name, size in staging.items())
        host = [f"beside the device, {format_bytes(sum(staging.values()))} of the host: {words}"] if staging else []
        return [*self._placement.experts.notes, *host]

    @property
    def lockstep(self) -> Lockstep:
        """The hub for several forward passes in step."""
        return self._placement.lockstep

    def load(self, progress: Progress | None = None) -> None:
        """Read what the plan keeps in memory, and begin to read ahead."""
        with self._changing():
            self._placement.apply(self.plan, progress)
        self.lockstep.most_tokens = self.plan.needs.context * self.plan.needs.batch
        self.report.watch()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let one thread compute at a time. Raises WeightsAway where there is nothing to compute with."""
        self._reader.check_process()
        with self._turn:
            self._placement.check()
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Wait for the pass of another thread, and for those in step to come between two passes."""
        with self._turn:
            if self.lockstep.is_inside:
                raise WeightsAway("the memory of a model cannot change while it computes: do that between two passes")
            if self._is_closed:
                raise WeightsAway(f"{self.checkpoint.folder.name} was closed: load it again")
            self.lockstep.settle()
            yield

    def generate_batch(self, prompts: Sequence[Prompt], **settings: Any) -> list[Any]:
        """Generate for many prompts of any lengths at once (`batch.generate_batch`)."""
        with self.computing():
            return generate_batch(self.lockstep, self._placement.structure.model, prompts, **settings)

    def generate(self, prompt: Prompt, max_new_tokens: int, speculate: Any = "auto", **settings: Any) -> torch.Tensor:
        """Return prompt and new tokens, [1, n + new], greedily unless ``do_sample``; guesses save passes, nothing else.

        ``speculate``: "auto" or "lookup" guess from the text so far, a draft model (an ordinary transformers model in
        memory with the same tokenizer; load it first, so that the plan counts its bytes) guesses by itself, None is
        plain decoding. Guessing goes on while it measures faster (`report`). ``settings``: what ``generate`` takes.
        """
        with self.computing():
            return self.speculator.generate(prompt, speculate, {"max_new_tokens": max_new_tokens, **settings})

    def set_memory(self, memory: int | str, batch: int | None = None) -> Plan:
        """Change the budget, and with ``batch`` the sequences at once; call it between two passes.

        ``memory`` is bytes, or text like "4GiB". Raises DoesNotFit and changes nothing.
        """
        budget = parse_bytes(memory) if isinstance(memory, str) else memory
        with self._changing():
            self.plan = self._make_plan(budget, batch)
            self._placement.apply(self.plan)
        self.lockstep.most_tokens = self.plan.needs.context * self.plan.needs.batch
        self.report.watch()
        self.speculator.forget()
        return self.plan

    def check_memory(self, memory: int, batch: int) -> None:
        """Raise DoesNotFit where a budget is too small for so many sequences at once."""
        self._make_plan(memory, batch)

    def _make_plan(self, memory: int, batch: int | None = None) -> Plan:
        stage = self._placement.stage
        needs = self._needs if batch is None else self._needs.for_batch(batch)
        if stage.alignment is not None:
            memory = min(memory, stage.free())  # a device has nothing to swap to
        plan = make_plan(
            needs,
            memory,
            depth=self._depth,
            bytes_per_second=self.speed.bytes_per_second,
            compute_seconds=self._compute_seconds(),
        )
        staging = self._placement.staging(plan)
        need, there = sum(staging.values()), int(psutil.virtual_memory().available)
        if staging and need > there:
            raise DoesNotFit(need, there, staging, "that is the host's memory, which weights pass on their way")
        return plan

    def _compute_seconds(self) -> float | None:
        """Seconds that a token computes: as the passes until now were, else as products of this size take."""
        if (measured := self.report.compute_seconds) is not None:
            return measured
        rate = self._placement.stage.products(self._placement.structure.model.dtype)
        return None if rate is None else touched_bytes(self._needs) / rate

    def _guard(self, model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Refuse a pass whose cache or activations would outgrow what the plan keeps for them."""
        tokens = _first_tensor(inputs, named)
        if tokens is None:
            return
        cache = cache_of(named)
        past = length_of(cache) if cache is not None else 0
        rows, new = tokens.shape[0], tokens.shape[1]
        most = self.plan.needs.context * self.plan.needs.batch
        if rows * (past + new) > most:
            raise ContextTooLong(rows * (past + new), most)

    def rest(self) -> None:
        """Give all memory back for a while; `load` reads it again. Waits for the pass of another thread. Idempotent."""
        with self._changing():
            self._placement.close()

    def close(self) -> None:
        """Give all memory back; the model cannot compute any more. Waits for a pass of another thread. Idempotent."""
        if not self._is_closed:
            with self._changing():
                self._is_closed = True
                self._placement.close()
                self._reader.close()


def _first_tensor(inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor | None:
    for found in (*inputs[:1], named.get("decoder_input_ids"), named.get("input_ids"), named.get("inputs_embeds")):
        if isinstance(found, torch.Tensor) and found.dim() >= 2:
            return found
    return None
