"""pagein split analyze and apply: a process with torch does the work; what it found is shown as tables and words."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest
from tests.parts.found import MIB, analysis

from pagein.cli import split_analyze, split_apply
from pagein.errors import SplitBroken
from pagein.parts.splitting.analysis import write_analysis

TASKS = "tasks:\n  sum: {kind: generate, samples: [x]}\n  tag: {kind: tokens, samples: [x]}\n"
FORECAST = {"event": "forecast", "parts": 3, "total_bytes": 4096, "need_bytes": 2048, "free_bytes": 1024**3}
STEP = {"event": "part", "file": "a-0.safetensors", "kept": False, "done_bytes": 9, "total_bytes": 9}
WRITTEN = {"event": "written", "plan": "ab" * 32, "wrote": ["a"], "kept": ["b", "c"], "swept": ["d"], "earlier": []}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty current folder with a mapping."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else name)
    (tmp_path / "tasks.yaml").write_text(TASKS)
    return tmp_path


@pytest.fixture
def process(monkeypatch, here):
    """Take the place of the process: it says these steps, and analyze leaves this analysis; returns its arguments."""
    asked = []

    def says(*steps, found=None):
        def events(module, arguments, what):
            asked.append((module, arguments))
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                yield step
            if found is not None:
                write_analysis(here / "out", found)

        monkeypatch.setattr(split_analyze, "events", events)
        monkeypatch.setattr(split_apply, "events", events)
        return asked

    return says


def analyze(pagein, *more):
    return pagein("split", "analyze", "model", "--tasks", "tasks.yaml", "--out", "out", *more)


def test_what_was_found_is_shown(pagein, process):
    """The matrix, the parts, each task's proof, what is saved, and why the rest stays in the backbone."""
    traced = {"event": "traced", "task": "sum", "sample": 1, "of": 2, "tensors": 4}
    asked = process(traced, {"event": "proven", "task": "sum"}, found=analysis(adapters=1))
    result = analyze(pagein)
    assert result.exit_code == 0, result.output
    assert asked == [("pagein.parts.splitting.analyse", ["model", "--tasks", "tasks.yaml", "--out", "out"])]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["GROUP", "SIZE", "SUM", "TAG"] in lines
    assert ["gate", "1.0", "MiB", "50", "%", "·"] in lines
    assert ["body", "80.0", "MiB", "●", "●"] in lines
    assert any(line[:2] == ["sum0.adapter", "adapter"] for line in lines)
    assert "3 results bit-identical" in result.stdout
    assert "sum: needs 104 MiB, 91.2 % of 114 MiB: saves 10.0 MiB" in result.stdout
    assert "since 1 of 2 calls of 'sum' need it" in result.stdout
    assert "since no task used it in any sample" in result.stdout
    assert "next: pagein split apply out" in result.stdout


def test_json_has_it_all(pagein, process):
    """Programs get the matrix, the parts with their tensors, savings, reasons and the verdict."""
    process(found=analysis())
    told = json.loads(analyze(pagein, "--json").stdout)
    assert told["parts"]["sum"]["tensors"] == ["heads.sum.weight"]
    assert told["tasks"]["sum"]["saves"]["nbytes"] == 10 * MIB
    assert told["tasks"]["tag"]["parts"] == ["backbone", "tag"]
    assert {one["name"] for one in told["groups"]} >= {"body", "gate"}
    assert told["untouched"] == ["idle.weight"]
    assert told["made"]["proof"] == "bit-identical"


def test_a_faulty_mapping_is_told_before_anything_starts(pagein, process, here):
    """The line of the fault is told, and no process is started for it."""
    asked = process()
    (here / "tasks.yaml").write_text(TASKS.replace("kind: tokens", "kind: token"))
    result = analyze(pagein)
    assert result.exit_code == 2
    assert "line 3: tasks.tag.kind" in result.stderr
    assert not asked


def test_a_png_needs_an_extra_that_is_named(pagein, process):
    """Without matplotlib the line that installs it is told, before anything is computed."""
    asked = process()
    result = analyze(pagein, "--png", "matrix.png")
    assert result.exit_code == 9
    assert "pip install 'pagein[plot]'" in result.stderr
    assert not asked


def test_the_png_has_a_row_for_each_group(pagein, process, monkeypatch, here):
    """With matplotlib the matrix is drawn with the groups as rows and the tasks as columns."""
    drawn = {}

    class Axes:
        def __getattr__(self, name):
            return lambda *args, **named: drawn.setdefault(name, (args, named))

    class Figure:
        def __init__(self, **named):
            pass

        def add_subplot(self):
            return Axes()

        def savefig(self, path, format):
            path.write_bytes(b"png")

    agg = types.SimpleNamespace(FigureCanvasAgg=lambda figure: None)
    modules = {"matplotlib.backends.backend_agg": agg, "matplotlib.figure": types.SimpleNamespace(Figure=Figure)}
    for name in ("matplotlib", "matplotlib.backends", *modules):
        monkeypatch.setitem(sys.modules, name, modules.get(name, types.ModuleType(name)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    process(found=analysis())
    result = analyze(pagein, "--png", "matrix.png")
    assert result.exit_code == 0, result.output
    assert (here / "matrix.png").exists()
    assert drawn["imshow"][0][0][0] == [1.0, 1.0]
    assert drawn["set_xticks"][1]["labels"] == ["sum", "tag"]
    assert len(drawn["set_yticks"][1]["labels"]) == len(analysis().groups)


def test_errors_are_the_processes(pagein, process):
    """An error of the process is shown with its hint, and ends with its own exit code."""
    process(SplitBroken("the split is not proven", hint="what to do"))
    result = analyze(pagein)
    assert result.exit_code == SplitBroken.exit_code
    assert "error: the split is not proven" in result.stderr
    assert "hint: what to do" in result.stderr


def test_apply_tells_sizes_and_what_it_wrote(pagein, process, here):
    """What was asked for is what the process is told; sizes, files and the plan's digest are printed."""
    write_analysis(here / "found", analysis())
    asked = process(FORECAST, STEP, WRITTEN)
    result = pagein("split", "apply", "found", "--precision", "bf16", "--precision", "fp16", "--out", "made")
    assert result.exit_code == 0, result.output
    assert asked == [
        ("pagein.parts.splitting.apply", ["found", "--out", "made", "--precision", "bf16", "--precision", "fp16"])
    ]  # fmt: skip
    assert "3 parts, 4 KiB in all; to write: 2 KiB (2048 bytes)" in result.stdout
    assert "made made: 1 files written, 2 kept, 1 left over from before removed" in result.stdout
    assert "plan abab" in result.stdout


def test_apply_writes_beside_the_analysis(pagein, process, here):
    """Without --out the split comes where the analysis is, whether that is named or its folder."""
    path = write_analysis(here / "found", analysis())
    asked = process(FORECAST)
    for target in ("found", str(path)):
        assert pagein("split", "apply", target, "--dry-run").exit_code == 0
    assert [arguments[2:] for _, arguments in asked] == [["found", "--dry-run"], [str(path.parent), "--dry-run"]]
    told = json.loads(pagein("split", "apply", "found", "--json").stdout)
    assert told == {"forecast": {key: value for key, value in FORECAST.items() if key != "event"}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze", "model", "--out", "x"], "analyze needs --tasks FILE and --out FOLDER"),
        (["analyze", "model", "--tasks", "tasks.yaml", "--out", "x", "--dry-run"], "analyze has no option --dry-run"),
        (["apply", "found", "--tasks", "tasks.yaml"], "apply has no option --tasks"),
        (["apply", "found", "--precision", "int3"], "--precision is one of bf16, fp16, fp32"),
        (["check", "found", "--out", "x"], "check has no option --out"),
    ],
)
def test_options_that_do_not_belong_are_refused(pagein, process, here, arguments, words):
    """No option is dropped silently."""
    write_analysis(here / "found", analysis())
    asked = process()
    result = pagein("split", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not asked


def test_apply_of_no_analysis(pagein, process):
    """A folder that analyze did not write says how to get one."""
    asked = process()
    result = pagein("split", "apply", "nowhere")
    assert result.exit_code == SplitBroken.exit_code
    assert "pagein split analyze" in result.stderr
    assert not asked


@pytest.mark.parametrize("verb", [["analyze", "model", "--tasks", "tasks.yaml", "--out", "x"], ["apply", "found"]])
def test_without_torch_the_extra_is_named(pagein, process, here, monkeypatch, verb):
    """Where torch is missing the extra that brings it is named, and nothing is started."""
    asked = process()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    result = pagein("split", *verb)
    assert result.exit_code == 9
    assert "pip install 'pagein[torch]'" in result.stderr
    assert not asked
