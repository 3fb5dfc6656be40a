"""check: the plan of a configuration, and its exit codes."""

from __future__ import annotations

import json
import sys

import pytest
from tests.parts.build import split

from pagein.memory.snapshot import MachineSnapshot, PoolReading

GIB = 1024**3
PLAN = """\
models:
  keeper: {command: server, memory: 512MiB, pin: true}
  small: {command: server, memory: 256MiB}
  large: {command: server, memory: 400MiB}
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with 2 GiB of memory and a state folder of its own."""
    snapshot = MachineSnapshot({"ram": PoolReading("ram", 2 * GIB, GIB, "physical memory")})
    monkeypatch.setattr("pagein.cli.check.read_machine", lambda: snapshot)
    monkeypatch.setenv("PAGEIN_STATE_DIR", str(tmp_path / "state"))


def write(tmp_path, text):
    (tmp_path / "pagein.yaml").write_text(text.replace("command: server", f"command: {sys.executable}"))


def test_plan_with_numbers(pagein, tmp_path):
    """The plan says of each model whether it stays, fits or pages, with its bytes and the reason."""
    write(tmp_path, "budget: 1GiB\n" + PLAN)
    result = pagein("check")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "pagein.yaml is valid: 3 models; 1 stays, 1 fits, 1 pages"
    assert lines[1] == "ram: budget 1.0 GiB (configured 1.0 GiB), about 64.0 MiB of it for the daemon"
    rows = {line.split()[0]: line for line in lines if "MiB" in line and line[0] not in " r"}
    assert rows["keeper"].split()[1:5] == ["512", "MiB", "stays", "pinned"]
    assert "256 MiB  fits" in rows["small"]
    assert rows["large"].endswith("needs 400 MiB of ram, 192 MiB is left beside keeper, small: others leave for it")


def test_default_budget(pagein, tmp_path):
    """Without a budget it is 90 % of what the machine has."""
    write(tmp_path, PLAN)
    assert "ram: budget 1.8 GiB (90 % of physical memory)" in pagein("check").stdout


def test_never_fits(pagein, tmp_path):
    """A model that can never fit is named with both numbers, and the exit code is 5."""
    write(tmp_path, PLAN)
    result = pagein("check", "--budget", "700MiB")
    assert result.exit_code == 5
    assert "2 never fit" in result.stdout
    assert "needs 256 MiB of ram, the budget of 700 MiB can give it at most 124 MiB, with keeper kept" in result.stdout


def test_broken_model(pagein, tmp_path):
    """A model that cannot be served is named with the reason, and the exit code is 1."""
    (tmp_path / "pagein.yaml").write_text("models: {chat: {model: nowhere.gguf}}\n")
    result = pagein("check")
    assert result.exit_code == 1
    assert "1 model; 1 broken" in result.stdout
    assert "nowhere.gguf" in result.stdout


def test_json(pagein, tmp_path):
    """--json has budgets and models with exact bytes, and keeps the exit code."""
    write(tmp_path, PLAN)
    result = pagein("check", "--budget", "700MiB", "--json")
    assert result.exit_code == 5
    body = json.loads(result.stdout)
    assert body["budgets"] == [{"name": "ram", "bytes": 700 * 1024**2, "source": "configured 700 MiB"}]
    assert [(model["name"], model["verdict"]) for model in body["models"]] == [
        ("keeper", "stays"),
        ("small", "never"),
        ("large", "never"),
    ]
    assert body["models"][0]["need"] == {"ram": 512 * 1024**2}
    assert body["models"][0]["engine"] == "command"


def test_no_models(pagein, tmp_path):
    """A configuration without models is valid and says so."""
    write(tmp_path, "budget: 1GiB\n")
    result = pagein("check")
    assert result.exit_code == 0
    assert "no models are configured" in result.stdout


def test_budget_beyond_the_machine(pagein, tmp_path):
    """A budget that the machine does not have is refused with both numbers."""
    write(tmp_path, PLAN)
    result = pagein("check", "--budget", "8GiB")
    assert result.exit_code == 2
    assert "8.0 GiB is more than there is: physical memory has 2.0 GiB" in result.stderr


def test_every_fault_at_once(pagein, tmp_path):
    """All faults of a file are listed with their lines, and nothing else is printed."""
    (tmp_path / "bad.yaml").write_text("budgte: 1GiB\nserver: {port: high}\nmodels: {chat: {contxt: 1}}\n")
    result = pagein("check", "bad.yaml")
    assert result.exit_code == 2
    assert result.stdout == ""
    for words in ("budgte", "server.port", "contxt"):
        assert words in result.stderr


# ── split models ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small split model, as if the engine for it were installed."""
    monkeypatch.setattr("pagein.catalog.engines.version", lambda name: "1.0")
    split(tmp_path / "office")
    (tmp_path / "pagein.yaml").write_text("models: {assistant: {model: office}}\n")
    return tmp_path / "office"


def test_a_split_model_is_planned(pagein, folder):
    """It fits like any other, and programs are told its tasks."""
    result = pagein("check", "--json")
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    (model,) = body["models"]
    assert (model["engine"], model["verdict"], model["tasks"]) == ("parts", "fits", ["embed", "summarize", "tag"])
    assert body["remarks"] == []


def test_a_part_that_is_away_is_remarked(pagein, folder):
    """The model can be served, and what of it cannot is named with its tasks."""
    next(folder.glob("both-*.safetensors")).unlink()
    result = pagein("check")
    assert result.exit_code == 0
    assert "assistant: part both cannot be loaded" in result.stdout
    assert result.stdout.rstrip().endswith("tasks that need it: summarize, tag")


def test_too_little_memory_is_remarked(pagein, folder, tmp_path):
    """Memory that its largest task does not fit in is said before anything is loaded."""
    (tmp_path / "pagein.yaml").write_text("models: {assistant: {model: office, memory: 100MiB}}\n")
    assert "assistant: memory is 100 MiB; for its largest task it takes about" in pagein("check").stdout


def test_a_damaged_plan_is_a_broken_model(pagein, folder):
    """A plan that is refused makes its own model broken, with the field, and no other."""
    plan = folder / "split_plan.json"
    plan.write_text(plan.read_text().replace('"role":"backbone"', '"role":"spine"'))
    result = pagein("check")
    assert result.exit_code == 1
    assert "1 model; 1 broken" in result.stdout
    assert "'spine' is no role" in result.stdout
