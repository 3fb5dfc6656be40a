"""YAML text into plain values, each key with its line; bounded, so that a hostile file cannot hurt.

The types are those of YAML 1.2: ``on``, ``1_000``, ``08`` and ``2024-01-01`` are text. Keys are always text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from pagein.config.faults import Fault, Key, Origin, config_error, is_secret, shown
from pagein.errors import ConfigError

MAX_BYTES = 256 * 1024
"""Longest file; a thousand models fit."""
MAX_VALUES = 20_000
"""Most values in a file, each use of an anchor counted."""
MAX_DEPTH = 24
"""Deepest nesting."""

_TAG = "tag:yaml.org,2002:"


@dataclass(slots=True)
class Tree:
    """The values of a file, where each stands, and what was wrong with them."""

    value: Any = None
    lines: dict[Key, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


class _TooDeep(yaml.MarkedYAMLError):
    """The nesting passes `MAX_DEPTH`."""


class _Loader(yaml.SafeLoader):
    """SafeLoader's composer with a bound on nesting and the types of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node; raises where it is nested too deeply."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _TooDeep(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"[-+]?[0-9]+\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(rf"(?:{_FLOAT})\Z"), list("-+.0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


def read_text(text: str, source: str) -> Tree:
    """Read a whole file; raises ConfigError where it is no YAML, or too much of it."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise config_error(source, [Fault(f"{size} bytes, the limit is {MAX_BYTES}", Origin(()))])
    tree = Tree()
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            tree.value = _Reader(tree).read(node, ())
    except yaml.YAMLError as error:
        raise config_error(source, [_syntax_fault(error, text)]) from None
    return tree


def read_value(text: str) -> Any:
    """Read one value of an environment variable; raises ValueError where it is none."""
    try:
        tree = read_text(text, "value")
    except ConfigError as error:
        raise ValueError(str(error.message).split("\n")[-1].strip()) from None
    if tree.faults:
        raise ValueError(tree.faults[0].message)
    return tree.value


def _syntax_fault(error: yaml.YAMLError, text: str) -> Fault:
    """Say what the parser met, without repeating the line, which may hold a key."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem is not None:
        mark = error.problem_mark or error.context_mark
        column = f" (column {mark.column + 1})" if mark is not None else ""
        return Fault(f"{error.problem}{column}", Origin((), line=mark.line + 1 if mark is not None else None))
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Fault("a control character, which YAML does not allow", Origin((), line=line))
    return Fault("not YAML", Origin(()))


class _Reader:
    """Turns nodes into values and counts them: an anchor is shared while composed, and unfolds here."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.count = 0

    def read(self, node: yaml.Node, key: Key) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"more than {MAX_VALUES} values", node.start_mark)
        if len(key) > MAX_DEPTH:  # an anchor that contains itself
            raise yaml.MarkedYAMLError(None, None, f"nested deeper than {MAX_DEPTH} levels", node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return self._list(node, key)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        self._fault(node, key, f"the tag {shown(node.tag)} is not allowed here")
        return None

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                self._fault(name_node, key, "a key must be one word")
                continue
            name = name_node.value
            here = (*key, name)
            if name == "<<":
                self._fault(name_node, key, "merge keys (<<) are not supported: write the keys out")
            elif name in values:
                self._fault(name_node, here, f"given twice, first on line {self.tree.lines[here]}")
            else:
                self.tree.lines[here] = name_node.start_mark.line + 1
                values[name] = self.read(value_node, here)
        return values

    def _list(self, node: yaml.SequenceNode, key: Key) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            self.tree.lines[(*key, index)] = item.start_mark.line + 1
            values.append(self.read(item, (*key, index)))
        return values

    def _scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        text = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "int" if re.fullmatch(r"[-+]?[0-9]{1,30}", text):
                return int(text)
            case "float" if re.fullmatch(_FLOAT, text):
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        got = "" if is_secret(key) else f": {shown(text)}"
        self._fault(node, key, f"not a value of the type {shown(node.tag.removeprefix(_TAG))}{got}")
        return None

    def _fault(self, node: yaml.Node, key: Key, message: str) -> None:
        self.tree.faults.append(Fault(message, Origin(key, line=node.start_mark.line + 1)))
