"""Reads a plan that nobody vouches for: every field, its type and its limit; the first fault refuses the whole.

What the fields mean to each other is `checks`' business. Unknown fields are faults: a newer plan may mean by them
something that must not be overlooked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from pagein.catalog.bounded import no_duplicates
from pagein.catalog.safetensors import BITS
from pagein.catalog.split.checks import check_plan
from pagein.catalog.split.names import PATTERN, file_name, is_name
from pagein.catalog.split.packed import LAYOUTS
from pagein.catalog.split.plan import (
    MESSAGE,
    PRECISIONS,
    VERSION,
    Model,
    Part,
    PartFile,
    Role,
    Saving,
    SplitPlan,
    Task,
    TensorEntry,
)
from pagein.errors import PlanRefused

PLAN_LIMIT = 16 * 1024**2
"""Bytes of a plan's text."""
MOST_ITEMS = 400_000
"""Commas and opening brackets of the text, counted before it is parsed: what parsing it can cost."""
MOST_TASKS = 256
MOST_PARTS = 1024
MOST_TENSORS = 65_536
"""In all files together."""
MOST_DIMENSIONS = 16
LONGEST_TEXT = 1024
FILE_LIMIT = 2**40
"""Bytes; the limit on what is loaded at once is that of the loader, and far lower."""
DTYPES = frozenset(
    {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
)
"""Types that a part may have."""

_HEX = re.compile(r"[0-9a-f]{64}")
_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_TENSOR = re.compile(r"[!-~]{1,512}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,199}")
"""A file or folder beside the plan: no separator, no dot or dash in front."""
_T = TypeVar("_T")


def parse_plan(data: bytes, file: object = "split_plan.json") -> SplitPlan:
    """Return the plan of a text; raises PlanRefused with the field. ``file`` is how messages name the text."""
    if len(data) > PLAN_LIMIT:
        raise PlanRefused(file, "the plan", f"has {len(data)} bytes, the limit is {PLAN_LIMIT}", bytes=len(data))
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    if items > MOST_ITEMS:
        raise PlanRefused(file, "the plan", f"has {items} items, the limit is {MOST_ITEMS}", items=items)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanRefused(file, "the plan", f"is not valid JSON: {str(error)[:200]}") from None
    plan = _plan(_Field(file, "plan", value))
    check_plan(plan, file)
    return plan


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


class _Field:
    """One value of the text and where it stands."""

    def __init__(self, file: object, path: str, value: object) -> None:
        self.file, self.path, self.value = file, path, value

    def refuse(self, why: str) -> PlanRefused:
        return PlanRefused(self.file, self.path, why)

    def under(self, key: str, value: object) -> _Field:
        return _Field(self.file, f"{self.path}.{key[:80]!r}" if not is_name(key) else f"{self.path}.{key}", value)

    def record(self, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, _Field]:
        """The fields of an object: all that are needed, and none that nobody knows."""
        fields = dict(self.members(64))
        for key in needed:
            if key not in fields:
                raise self.refuse(f"lacks {key!r}")
        for key in fields:
            if key not in needed and key not in optional:
                raise self.refuse(f"has the unknown field {key[:80]!r}")
        return fields

    def members(self, most: int) -> Iterator[tuple[str, _Field]]:
        if not isinstance(self.value, dict):
            raise self.refuse(f"is no object but {_kind(self.value)}")
        if len(self.value) > most:
            raise self.refuse(f"has {len(self.value)} entries, the limit is {most}")
        for key, value in self.value.items():
            yield key, self.under(key, value)

    def items(self, most: int) -> Iterator[_Field]:
        if not isinstance(self.value, list):
            raise self.refuse(f"is no list but {_kind(self.value)}")
        if len(self.value) > most:
            raise self.refuse(f"has {len(self.value)} entries, the limit is {most}")
        for index, value in enumerate(self.value):
            yield _Field(self.file, f"{self.path}[{index}]", value)

    def text(self, pattern: re.Pattern[str] | None = None, what: str = "text") -> str:
        if not isinstance(self.value, str):
            raise self.refuse(f"is no text but {_kind(self.value)}")
        if len(self.value) > LONGEST_TEXT:
            raise self.refuse(f"has {len(self.value)} characters, the limit is {LONGEST_TEXT}")
        if pattern is not None and pattern.fullmatch(self.value) is None:
            raise self.refuse(f"{self.value[:80]!r} is no {what}")
        if not self.value.isprintable():
            raise self.refuse(f"{self.value[:80]!r} has characters that cannot be printed")
        return self.value

    def whole(self, most: int) -> int:
        if type(self.value) is not int:  # True is an int, too
            raise self.refuse(f"is no whole number but {_kind(self.value)}")
        if not 0 <= self.value <= most:
            raise self.refuse(f"is {str(self.value)[:40]}, allowed are 0 to {most}")
        return self.value

    def name(self) -> str:
        return checked_name(self, self.text())


def checked_name(where: _Field, name: str) -> str:
    """Return a name of a task or part; a plan has them folded already."""
    if not is_name(name):
        raise where.refuse(f"{name[:80]!r} is no name ({PATTERN}, no dot in front)")
    return name


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _named(fields: _Field, most: int, read: Callable[[str, _Field], _T]) -> dict[str, _T]:
    found: dict[str, _T] = {}
    for key, one in fields.members(most):
        found[checked_name(one, key)] = read(key, one)
    return found


def _texts(fields: _Field, most: int, key_pattern: re.Pattern[str], what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, one in fields.members(most):
        _Field(one.file, one.path, key).text(key_pattern, what)
        found[key] = one.text()
    return found


def _plan(root: _Field) -> SplitPlan:
    if isinstance(root.value, dict) and root.value.get("version") != VERSION:
        raise root.refuse(f"has version {str(root.value.get('version'))[:40]}, this program reads {VERSION}")
    needed = ("version", "model", "source", "tasks", "parts", "tied", "buffers", "untouched", "saves", "made")
    top = root.record(needed)
    top["version"].whole(VERSION)
    count = [MOST_TENSORS]
    return SplitPlan(
        _model(top["model"]),
        _sources(top["source"]),
        _named(top["tasks"], MOST_TASKS, _task),
        _named(top["parts"], MOST_PARTS, lambda name, one: _part(name, one, count)),
        tuple(_tensor_names(group, MOST_TENSORS) for group in top["tied"].items(MOST_TENSORS)),
        _texts(top["buffers"], MOST_TENSORS, _TENSOR, "name of a tensor"),
        _tensor_names(top["untouched"], MOST_TENSORS),
        _named(top["saves"], MOST_TASKS, _saving),
        _texts(top["made"], 16, _PLAIN, "name"),
    )


def _model(field: _Field) -> Model:
    record = field.record(("class", "config_digest"), ("folder",))
    folder = record["folder"].text(_PLAIN, "plain name of a folder") if "folder" in record else None
    return Model(record["class"].text(_CLASS, "name of a class"), record["config_digest"].text(_HEX, "sha256"), folder)


def _sources(field: _Field) -> dict[str, str]:
    files = field.record(("files",))["files"]
    found: dict[str, str] = {}
    for name, one in files.members(4096):
        _Field(one.file, one.path, name).text(_PLAIN, "plain name of a file")
        found[name] = one.text(_HEX, "sha256")
    return found


def _task(name: str, field: _Field) -> Task:
    record = field.record(("parts", "kind"), ("inputs", "prompt"))
    inputs = _texts(record["inputs"], 64, _TENSOR, "name of an input") if "inputs" in record else {}
    parts = tuple(one.name() for one in record["parts"].items(MOST_PARTS))
    prompt = _prompt(record["prompt"]) if "prompt" in record else None
    return Task(name, parts, record["kind"].name(), inputs, prompt)


def _prompt(field: _Field) -> str:
    """A text of several lines with one place for what is asked."""
    if not isinstance(field.value, str):
        raise field.refuse(f"is no text but {_kind(field.value)}")
    if (why := prompt_fault(field.value)) is not None:
        raise field.refuse(why)
    return field.value


def prompt_fault(prompt: str) -> str | None:
    """Say what is wrong with a task's prompt; None where nothing is."""
    if len(prompt) > LONGEST_TEXT:
        return f"has {len(prompt)} characters, the limit is {LONGEST_TEXT}"
    if (places := prompt.count(MESSAGE)) != 1:
        return f"has {places} places {MESSAGE!r} for what is asked, it needs one"
    if not all(sign.isprintable() or sign in "\n\t" for sign in prompt):
        return f"{prompt[:80]!r} has characters that cannot be printed"
    return None


def _part(name: str, field: _Field, left: list[int]) -> Part:
    record = field.record(("role", "tasks", "files"), ("replaces",))
    role = record["role"].text()
    if role not in list(Role):
        raise record["role"].refuse(f"{role[:80]!r} is no role ({', '.join(Role)})")
    tasks = tuple(one.name() for one in record["tasks"].items(MOST_TASKS))
    files: dict[str, PartFile] = {}
    for precision, one in record["files"].members(len(PRECISIONS)):
        if precision not in PRECISIONS:
            raise one.refuse(f"is no precision ({', '.join(PRECISIONS)})")
        files[precision] = _file(name, one, left)
    if not files:
        raise record["files"].refuse("has no file")
    return Part(name, Role(role), tasks, files, record["replaces"].name() if "replaces" in record else None)


def _file(part: str, field: _Field, left: list[int]) -> PartFile:
    record = field.record(("file", "bytes", "sha256", "tensors"), ("layout",))
    sha256 = record["sha256"].text(_HEX, "sha256")
    file = record["file"].text()
    if file != file_name(part, sha256):
        raise record["file"].refuse(f"{file[:80]!r} is not {file_name(part, sha256)!r}, as part and digest make it")
    tensors: dict[str, TensorEntry] = {}
    for name, one in record["tensors"].members(left[0]):
        _Field(one.file, one.path, name).text(_TENSOR, "name of a tensor")
        tensors[name] = _tensor(one)
    left[0] -= len(tensors)
    if not tensors:
        raise record["tensors"].refuse("has no tensor")
    nbytes, least = record["bytes"].whole(FILE_LIMIT), 10 + sum(one.nbytes for one in tensors.values())
    if nbytes < least:
        raise record["bytes"].refuse(f"is {nbytes}, its tensors and their header take {least} at least")
    layout = record["layout"].text() if "layout" in record else None
    if layout is not None and layout not in LAYOUTS:
        raise record["layout"].refuse(f"{layout[:40]!r} is no layout ({', '.join(LAYOUTS)})")
    return PartFile(file, nbytes, sha256, tensors, layout)


def _tensor(field: _Field) -> TensorEntry:
    record = field.record(("shape", "dtype", "bytes"))
    dtype = record["dtype"].text()
    if dtype not in DTYPES:
        raise record["dtype"].refuse(f"{dtype[:40]!r} is no type that a part may have")
    shape = tuple(one.whole(FILE_LIMIT) for one in record["shape"].items(MOST_DIMENSIONS))
    values = 1
    for side in shape:
        values *= side
        if values > FILE_LIMIT:
            raise record["shape"].refuse(f"has more than {FILE_LIMIT} values")
    nbytes = record["bytes"].whole(FILE_LIMIT)
    if values * BITS[dtype] // 8 != nbytes:
        raise record["bytes"].refuse(f"is {nbytes}, {dtype} of shape {list(shape)} takes {values * BITS[dtype] // 8}")
    return TensorEntry(shape, dtype, nbytes)


def _tensor_names(field: _Field, most: int) -> tuple[str, ...]:
    return tuple(one.text(_TENSOR, "name of a tensor") for one in field.items(most))


def _saving(name: str, field: _Field) -> Saving:
    record = field.record(("bytes", "share"))
    share = record["share"].value
    if type(share) not in (int, float) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise record["share"].refuse("is no share from 0 to 1")
    return Saving(record["bytes"].whole(FILE_LIMIT), float(share))
