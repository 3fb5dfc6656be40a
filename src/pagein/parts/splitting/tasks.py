"""``task_mapping.yaml``: the tasks of a model, how each is called, and sample calls of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from pagein.catalog.split.names import PATTERN, fold
from pagein.catalog.split.reader import prompt_fault
from pagein.config.faults import Fault, Key, Origin, config_error, shown
from pagein.config.source import MAX_BYTES, Tree, read_text
from pagein.config.values import nearest
from pagein.errors import ConfigError

CLASSES = {
    "base": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "image-classification": "AutoModelForImageClassification",
    "object-detection": "AutoModelForObjectDetection",
    "image-text-to-text": "AutoModelForImageTextToText",
    "audio-classification": "AutoModelForAudioClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
}
"""Which of transformers' automatic classes a word stands for."""
MOST_VALUES = 2**24
"""Values of one random input."""


class Kind(StrEnum):
    """How a task is called."""

    GENERATE = "generate"
    """``generate``: tokens one after the other."""
    CLASSIFY = "classify"
    """Labels of a whole input."""
    TOKENS = "tokens"
    """Labels of each token."""
    EMBED = "embed"
    """Vectors."""
    CALL = "call"
    """Any method or module of the model, named by ``call``."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class RandomInput(_Entry):
    """An input of random values: the same for the same seed."""

    shape: tuple[Annotated[int, Field(ge=1)], ...]
    seed: int = 0
    low: int = 0
    high: int | None = None
    """Whole numbers below this; without it, normally distributed floats."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        values = 1
        for side in self.shape:
            values *= side
        if values > MOST_VALUES:
            raise ValueError(f"shape has {values} values, the limit is {MOST_VALUES}")
        if self.high is not None and self.high <= self.low:
            raise ValueError(f"high ({self.high}) must be above low ({self.low})")
        return self


class Sample(_Entry):
    """One sample call: a text, token ids, or inputs by their names."""

    text: str | None = None
    token_ids: list[int] | None = None
    inputs: dict[str, RandomInput | list[Any]] | None = None
    """By the names that the model's call has for them."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("text", "token_ids", "inputs") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"a sample is one of text, token_ids, inputs; this one has {' and '.join(given) or 'none'}"
            )
        return self


def _sample(value: object) -> object:
    """A text alone, or a list of token ids alone, is a sample."""
    if isinstance(value, str):
        return {"text": value}
    return {"token_ids": value} if isinstance(value, list) else value


class TaskEntry(_Entry):
    """One task."""

    kind: Kind
    samples: Annotated[list[Annotated[Sample, BeforeValidator(_sample)]], Field(min_length=1, max_length=256)]
    folder: str | None = None
    """Folder of the task's own fine-tuned model; by default the model that is split."""
    model_class: Annotated[str | None, Field(alias="class")] = None
    adapter: str | None = None
    """Folder of a PEFT LoRA for the model."""
    call: str | None = None
    """Of kind ``call``: the method or module to be called, a path of attributes from the model on."""
    heads: tuple[str, ...] = ()
    """Modules that must turn out to be used by this task, by their paths; a wrong sample is found so."""
    reads: tuple[str, ...] = ()
    """Tasks whose results this one's calls go on from."""
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 8
    prompt: str | None = None
    """Of kind ``generate``: what a chat's last message is put into where the model is served, with ``{text}`` in it for
    the message. Samples are complete prompts already."""

    @field_validator("model_class")
    @classmethod
    def _known_class(cls, value: str | None) -> str | None:
        if value is not None and value not in CLASSES:
            meant = nearest(value, list(CLASSES))
            listing = f"did you mean {meant}?" if meant else f"known: {', '.join(CLASSES)}"
            raise ValueError(f"{shown(value)} is no class of model; {listing}")
        return value

    @field_validator("call")
    @classmethod
    def _plain_path(cls, value: str | None) -> str | None:
        if value is not None and not all(one.isidentifier() and one[0] != "_" for one in value.split(".")):
            raise ValueError(f"{shown(value)} is no path of attributes such as vision_model or text.encoder")
        return value

    @field_validator("prompt")
    @classmethod
    def _one_place(cls, value: str | None) -> str | None:
        if value is not None and (why := prompt_fault(value)) is not None:
            raise ValueError(why)
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prompt is not None and self.kind is not Kind.GENERATE:
            raise ValueError(f"prompt belongs to kind: generate, this task is of kind: {self.kind.value}")
        if (self.call is None) == (self.kind is Kind.CALL):
            raise ValueError("kind: call and the key call go together: what is called, and only there")
        if self.adapter is not None and (self.folder is not None or self.model_class is not None):
            raise ValueError("adapter belongs to the model that is split: give it without folder and class")
        return self


class TaskMapping(_Entry):
    """The whole file."""

    tasks: Annotated[dict[str, TaskEntry], Field(min_length=1, max_length=256)]

    @field_validator("tasks")
    @classmethod
    def _named(cls, value: dict[str, TaskEntry]) -> dict[str, TaskEntry]:
        named: dict[str, TaskEntry] = {}
        for name, entry in value.items():
            folded = fold(name)
            if folded is None:
                raise ValueError(f"{shown(name)} is no name of a task ({PATTERN}, no dot in front)")
            if folded in named:
                raise ValueError(f"{folded} is there twice; capitals do not tell tasks apart")
            named[folded] = entry
        for name, entry in named.items():
            for other in entry.reads:
                if other not in named or other == name:
                    raise ValueError(f"{name} reads {shown(other)}, which is no other task here")
        return named


def read_tasks(path: Path) -> TaskMapping:
    """Read a mapping; folders in it are resolved from the file's own. Raises ConfigError with every fault's line."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}", hint="list the tasks and sample calls in it; see pagein split --help"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    mapping = parse_tasks(text, str(path))
    base = path.absolute().parent
    return TaskMapping(tasks={name: _resolved(entry, base) for name, entry in mapping.tasks.items()})


def parse_tasks(text: str, source: str = "task_mapping.yaml") -> TaskMapping:
    """Read a mapping from text; raises ConfigError."""
    tree = read_text(text, source)
    if tree.faults:
        raise config_error(source, tree.faults)
    try:
        return TaskMapping.model_validate(tree.value if tree.value is not None else {})
    except ValidationError as error:
        raise config_error(source, [_fault(one, tree) for one in error.errors(include_url=False)]) from None


def _resolved(entry: TaskEntry, base: Path) -> TaskEntry:
    found = {name: getattr(entry, name) for name in ("folder", "adapter")}
    return entry.model_copy(update={name: str(base / path) for name, path in found.items() if path is not None})


def _fault(details: ErrorDetails, tree: Tree) -> Fault:
    key = tuple(one for one in details["loc"] if not _is_inner(one))
    for length in range(len(key), 0, -1):
        if key[:length] in tree.lines:
            return Fault(_words(details, key), Origin(key, line=tree.lines[key[:length]]))
    return Fault(_words(details, key), Origin(key, line=1))


def _is_inner(part: object) -> bool:
    """Whether a place is pydantic's own word for the branch of a union, which the file does not have."""
    return isinstance(part, str) and (part in ("RandomInput",) or part.startswith("list["))


def _words(details: ErrorDetails, key: Key) -> str:
    context: Mapping[str, Any] = details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            known = _keys(key)
            meant = nearest(str(key[-1]), known)
            listing = f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
            return f"unknown key; {listing}"
        case "missing":
            return "is needed and not there"
        case "value_error":
            return str(context["error"])
        case "enum":
            return f"must be one of {', '.join(Kind)}, got {shown(details['input'])}"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {shown(details['input'])}"


def _keys(key: Key) -> list[str]:
    section: type[BaseModel] = TaskMapping
    if len(key) > 2:
        section = TaskEntry
    if "samples" in key[2:]:
        section = RandomInput if "inputs" in key[3:-1] else Sample
    return [field.alias or name for name, field in section.model_fields.items()]
