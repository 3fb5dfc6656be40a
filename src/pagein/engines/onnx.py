"""The onnx engine: onnxruntime in this process; what a model is fed and how it is read says its recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import onnxruntime

from pagein.engines.contract import Engine, Started
from pagein.engines.local.memory import give_back_freed_blocks, give_back_now
from pagein.engines.local.serve import LocalServer
from pagein.engines.local.threads import compute_threads
from pagein.engines.options import read_options
from pagein.engines.recipes import find_recipe
from pagein.engines.recipes.contract import Place, Session
from pagein.errors import EngineMissing, LoadFailed
from pagein.protocol import WorkerSpec


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """Options of the engine; all others go to the recipe."""

    optimisation: Literal["all", "extended", "basic", "none"] = "all"
    """How far onnxruntime rewrites the graph when it loads."""
    prepack: bool = True
    """Keep a second copy of weights in the fastest layout; false saves their size (Moonshine: 42 MiB, 1.4 × slower)."""


class ReopenedSession:
    """A session that can be closed and opened again under those who use it; open at first."""

    def __init__(self, open_again: Callable[[], Session]) -> None:
        self._open_again = open_again
        self._session: Session | None = open_again()

    def open(self) -> None:
        """Load the file, unless it is."""
        if self._session is None:
            self._session = self._open_again()

    def close(self) -> None:
        """Let go of everything that the session holds."""
        self._session = None

    def run(self, output_names: list[str] | None, input_feed: dict[str, Any]) -> list[Any]:
        """Compute."""
        return self._there.run(output_names, input_feed)

    def get_inputs(self) -> list[Any]:
        """Inputs with name, shape and type."""
        return self._there.get_inputs()

    def get_outputs(self) -> list[Any]:
        """Outputs with name, shape and type."""
        return self._there.get_outputs()

    @property
    def _there(self) -> Session:
        assert self._session is not None, "a model that sleeps was asked to compute"
        return self._session


class Onnx(Engine):
    """One ONNX model behind a local HTTP server."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        own = {entry.name for entry in fields(OnnxOptions)}
        chosen = {name: value for name, value in spec.options.items() if name in own}
        self._options = read_options(OnnxOptions, chosen, spec.name)
        self._recipe = find_recipe(spec.recipe, {k: v for k, v in spec.options.items() if k not in own}, spec.name)
        self._server: LocalServer | None = None
        self._places: list[ReopenedSession] = []

    @classmethod
    def version(cls) -> str:
        """Name and version of onnxruntime."""
        return f"onnxruntime {version('onnxruntime')}"

    def start(self) -> Started:
        """Load the model with its recipe and answer HTTP."""
        if self.spec.path is None or not Path(self.spec.path).exists():
            raise LoadFailed(f"model {self.spec.name!r} has no model file: {self.spec.path} is not there")
        give_back_freed_blocks()
        place = Place(self.spec.name, Path(self.spec.path), self.spec.context)
        model = self._recipe.build(place, self.open_session)
        give_back_now()
        self._server = LocalServer(self.spec, model, self)
        return Started(self._server.start(), [model.capability], model.context, sleeps=True)

    def sleep(self) -> None:
        """Close the sessions, which hold the weights; the recipe's model, tokeniser and all, keeps its places.

        MiniLM goes from 177 to 84 MiB, of which 68 MiB are Python and the libraries, and is back in 0.3 s.
        """
        for place in self._places:
            place.close()

    def wake(self) -> None:
        """Open them again; raises LoadFailed, with all of them closed, where one cannot be opened."""
        try:
            for place in self._places:
                place.open()
        except BaseException:
            self.sleep()
            raise

    def wait(self) -> str:
        """Block until the HTTP server ends."""
        assert self._server is not None, "wait() before start()"
        return self._server.wait()

    def stop(self) -> None:
        """Close the HTTP server."""
        if self._server is not None:
            self._server.stop()

    def open_session(self, file: Path, *, many_runs: bool = False) -> Session:
        """Load one file with this model's threads, device and memory settings."""
        place = ReopenedSession(lambda: self._open(file, many_runs))
        self._places.append(place)
        return place

    def _open(self, file: Path, many_runs: bool) -> Session:
        try:
            session: Session = onnxruntime.InferenceSession(
                str(file), self._session_options(file, many_runs), providers=self._providers()
            )
        except (EngineMissing, LoadFailed):
            raise
        except Exception as error:  # onnxruntime's own errors share no base class
            raise LoadFailed(f"onnxruntime cannot load {file}: {str(error).strip()[:500]}") from error
        if self.spec.device != "cpu" and "CUDAExecutionProvider" not in session.get_providers():  # type: ignore[attr-defined]
            raise LoadFailed(f"onnxruntime fell back from {self.spec.device} to the CPU; its log above says why")
        return session

    def _session_options(self, file: Path, many_runs: bool) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = compute_threads(self.spec)
        options.inter_op_num_threads = 1
        # waiting threads sleep: two pools that spin on the same cores cost a scheduler's slice per operation
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.graph_optimization_level = _LEVELS[self._options.optimisation]
        # The arena keeps the largest request's memory for ever (MiniLM 350 instead of 150 MiB after 1,024 tokens).
        # It pays only where many small runs follow each other (Moonshine's decoder, 20 s: 0.8 instead of 1.7 s).
        options.enable_cpu_mem_arena = many_runs
        options.enable_mem_pattern = False  # plans per input shape, which here differs with every request
        if not self._options.prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        if file.suffix == ".ort":
            # weights stay in the file's mapping: load peak of Moonshine 132 instead of 173 MiB
            options.add_session_config_entry("session.use_memory_mapped_ort_model", "1")
            options.add_session_config_entry("session.use_ort_model_bytes_for_initializers", "1")
        return options

    def _providers(self) -> list[str | tuple[str, dict[str, str]]]:
        device = self.spec.device
        if device == "cpu":
            return ["CPUExecutionProvider"]
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise EngineMissing(
                f"model {self.spec.name!r} is set to {device}, but the installed onnxruntime has no CUDA provider",
                hint="pip install onnxruntime-gpu in place of onnxruntime, or set device: cpu",
            )
        # the daemon shows this process its own device only, so it is number 0 here
        chosen = {"device_id": "0", "arena_extend_strategy": "kSameAsRequested"}
        if device in self.spec.allowance:
            chosen["gpu_mem_limit"] = str(self.spec.allowance[device])
        return [("CUDAExecutionProvider", chosen), "CPUExecutionProvider"]


_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
