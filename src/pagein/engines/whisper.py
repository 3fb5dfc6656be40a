"""The whisper engine: faster-whisper (CTranslate2) in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from faster_whisper import WhisperModel

from pagein.engines.contract import Engine, Started
from pagein.engines.local.fields import refuse
from pagein.engines.local.memory import give_back_freed_blocks, give_back_now
from pagein.engines.local.model import SAMPLE_RATE, Floats, Hearing, Segment, Transcriber, Transcript, Word
from pagein.engines.local.serve import LocalServer
from pagein.engines.local.threads import compute_threads
from pagein.engines.options import read_options
from pagein.errors import InferenceFailed, LoadFailed
from pagein.protocol import WorkerSpec

_FILES = ("model.bin", "config.json", "tokenizer.json")
_DETAILS = ("seek", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")


@dataclass(frozen=True, slots=True)
class WhisperOptions:
    """Options of the engine."""

    compute_type: Literal["int8", "int8_float16", "int8_float32", "float16", "float32", "default"] = "int8"
    """How weights are held and multiplied."""
    beam_size: int = 5
    """Candidates that decoding follows; 1 is fastest."""
    max_seconds: float = 600.0
    """Longest sound that is taken."""


class Whisper(Engine):
    """One Whisper model in CTranslate2's format behind a local HTTP server.

    Its OpenMP threads spin unless OMP_WAIT_POLICY=passive is in the environment before the process starts.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._options = read_options(WhisperOptions, spec.options, spec.name)
        self._server: LocalServer | None = None

    @classmethod
    def version(cls) -> str:
        """Versions of faster-whisper and of CTranslate2, which computes."""
        return f"faster-whisper {version('faster-whisper')}, ctranslate2 {version('ctranslate2')}"

    def start(self) -> Started:
        """Load the model and answer HTTP."""
        folder = self._folder()
        give_back_freed_blocks()
        try:
            loaded = WhisperModel(
                str(folder),
                device=self.spec.device.partition(":")[0],
                device_index=0,  # the daemon shows this process its own device only
                compute_type=self._options.compute_type,
                cpu_threads=compute_threads(self.spec),
                num_workers=1,
                local_files_only=True,
            )
        except (RuntimeError, ValueError) as error:
            raise LoadFailed(f"faster-whisper cannot load {folder}: {error}") from error
        give_back_now()
        model = _Listener(loaded, self._options)
        self._server = LocalServer(self.spec, model, Weights(loaded.model, folder))
        return Started(self._server.start(), [model.capability], None, sleeps=True)

    def wait(self) -> str:
        """Block until the HTTP server ends."""
        assert self._server is not None, "wait() before start()"
        return self._server.wait()

    def stop(self) -> None:
        """Close the HTTP server."""
        if self._server is not None:
            self._server.stop()

    def _folder(self) -> Path:
        """The model's folder; without this check the library would look a missing name up in a hub."""
        path = Path(self.spec.path or "")
        folder = path if path.is_dir() else path.parent
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if self.spec.path is None or missing:
            raise LoadFailed(f"{folder} is no CTranslate2 model of Whisper: {', '.join(missing)} missing")
        return folder


class Weights:
    """The weights of a loaded CTranslate2 model, which can leave and return while the model object stays.

    Whisper tiny.en at int8 (two threads) takes 138 MiB awake and 96 MiB asleep, of which 60 MiB are Python and the
    libraries, and is back in 0.2 s. Its own way to sleep, ``to_cpu``, does nothing on a CPU.
    """

    TRIES = 400
    PAUSE = 0.005

    def __init__(self, model: Any, folder: Path, pause: Callable[[float], None] = time.sleep) -> None:
        self._model, self._folder, self._pause = model, folder, pause

    def sleep(self) -> None:
        """Drop the weights; raises InferenceFailed when they are still there after two seconds.

        The library refuses without a word while it counts a batch as running, which lasts some milliseconds longer
        than the call that asked for it (7 to 20 ms seen), so it is asked until it says that nothing is loaded.
        """
        for _ in range(self.TRIES):
            self._model.unload_model()
            if not self._model.model_is_loaded:
                return
            self._pause(self.PAUSE)
        seconds = self.TRIES * self.PAUSE
        raise InferenceFailed(self._folder.name, f"it did not fall asleep: still loaded after {seconds:g} s")

    def wake(self) -> None:
        """Read them again; raises LoadFailed."""
        try:
            self._model.load_model()
        except (RuntimeError, ValueError) as error:
            raise LoadFailed(f"faster-whisper cannot load {self._folder} again: {error}") from error


class _Listener(Transcriber):
    has_times = True

    def __init__(self, model: Any, options: WhisperOptions) -> None:
        self._model, self._options = model, options
        self.max_seconds = options.max_seconds

    def transcribe(self, samples: Floats, hearing: Hearing, abandoned: Callable[[], bool]) -> Transcript:
        self._check(hearing)
        found, info = self._model.transcribe(
            samples,
            language=hearing.language,
            task="translate" if hearing.translate else "transcribe",
            beam_size=self._options.beam_size,
            # without a temperature from the request: greedy first, then less and less so while the result is poor
            temperature=hearing.temperature or (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
            initial_prompt=hearing.prompt,
            word_timestamps=hearing.word_times,
        )
        segments = tuple(_until(found, abandoned))
        text = "".join(segment.text for segment in segments).strip()
        return Transcript(text, len(samples) / SAMPLE_RATE, info.language, segments)

    def _check(self, hearing: Hearing) -> None:
        known = self._model.supported_languages
        if hearing.language is not None and hearing.language not in known:
            listing = ", ".join(known[:100])
            refuse("language", f"language is {hearing.language[:20]!r}; this model knows {listing}")
        if hearing.translate and not self._model.model.is_multilingual:
            refuse("task", "task is 'translate'; this model knows English only")


def _until(found: Iterable[Any], abandoned: Callable[[], bool]) -> Iterable[Segment]:
    """Each segment is computed when it is asked for, so an abandoned request ends with the next one."""
    for part in found:
        words = tuple(Word(word.start, word.end, word.word.strip()) for word in part.words or ())
        details = {name: getattr(part, name) for name in _DETAILS}
        yield Segment(part.start, part.end, part.text, words, {**details, "tokens": list(part.tokens)})
        if abandoned():
            return
