"""Finding an engine by its name."""

from __future__ import annotations

import ast
import sys
import types
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import pytest

from pagein.catalog.option_names import ENGINE_OPTIONS
from pagein.engines import contract
from pagein.engines.command import Command
from pagein.engines.contract import BUILT_IN, find_engine
from pagein.errors import EngineMissing


def test_the_built_in_engines_are_those_of_the_package():
    """The short way and the entry points of the installed package name the same classes."""
    registered = {entry.name: entry.value for entry in entry_points(group="pagein.engines")}
    assert registered.items() >= BUILT_IN.items()


OPTION_CLASSES = {"llama_cpp": ("llama_settings.py", "LlamaOptions")} | {
    name: (f"{name}.py", f"{name.capitalize()}Options") for name in BUILT_IN if name != "llama_cpp"
}


@pytest.mark.parametrize("engine", BUILT_IN)
def test_the_daemons_table_of_options_is_the_same(engine):
    """The names that the catalog knows are the fields of each engine's own class; read as text, none is imported."""
    file, name = OPTION_CLASSES[engine]
    tree = ast.parse((Path(contract.__file__).parent / file).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}
    assert fields == ENGINE_OPTIONS[engine]


def test_a_built_in_engine_is_found():
    """By its name in the configuration."""
    assert find_engine("command") is Command


def test_an_engine_of_another_package_is_found(monkeypatch):
    """Third parties register in the entry-point group."""
    monkeypatch.setitem(sys.modules, "warp_engine", types.SimpleNamespace(Warp=Command))
    entry = EntryPoint("warp", "warp_engine:Warp", "pagein.engines")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints([entry]))
    assert find_engine("warp") is Command


def test_an_unknown_engine_is_refused_with_the_known_ones():
    """The error lists what there is."""
    known = "command, llama_cpp, onnx, parts, transformers, whisper"
    with pytest.raises(EngineMissing, match=rf"there is no engine 'warp'; known: {known}"):
        find_engine("warp")


def test_an_absent_library_names_the_extra(monkeypatch):
    """The hint is the command that installs it."""
    monkeypatch.setitem(contract.BUILT_IN, "warp_drive", "no_such_module_here:Warp")
    with pytest.raises(EngineMissing, match="no_such_module_here") as caught:
        find_engine("warp_drive")
    assert caught.value.hint == "pip install 'pagein[warpdrive]'"
