"""ps, explain, plan and top --once: tables for people, JSON for programs, errors for both."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from pagein.cli.bars import PoolBar, shares
from pagein.cli.decode import status_of
from pagein.cli.frame import collapse, frame
from pagein.cli.views import clock, model_table, short_duration
from pagein.errors import DaemonUnreachable, NeverFits, Unauthorized
from pagein.gateway.ports import Decision, RoomView

LISTS = [("ps",), ("explain", "chat"), ("plan", "vit"), ("top",)]


def rendered(content, width, **options):
    """Return what a terminal of this width shows, line by line."""
    console = Console(width=width, force_terminal=True, color_system=None, **options)
    with console.capture() as capture:
        console.print(content)
    return capture.get().splitlines()


def test_ps_shows_every_model(pagein, daemon):
    """Each model has a line with its state, bytes, use and priority; problems stand below."""
    lines = pagein("ps").stdout.splitlines()
    assert lines[0].split()[:4] == ["MODEL", "STATE", "HELD", "NEED"]
    chat = next(line for line in lines if line.startswith("chat"))
    words = " ".join(chat.split())
    assert words == "chat resident 512 MiB 512 MiB measured 512 MiB 1+2 0s pinned llama_cpp chat, completion"
    assert "rerank: the worker died before it was ready: exit status 1 (again in 12.0 s)" in lines
    assert any("own 60.0 MiB" in line and "releasing 160 MiB" in line for line in lines)


def test_ps_json_is_the_status(pagein, daemon):
    """--json prints the status with exact bytes."""
    assert json.loads(pagein("ps", "--json").stdout) == asdict(daemon.status)


def test_ps_without_models(pagein, daemon):
    """An empty daemon says so instead of printing an empty table."""
    daemon.status = replace(daemon.status, models=[])
    assert pagein("ps").stdout.startswith("no models are configured")


def troubled(daemon, **changes):
    """Return a daemon under pressure, with a smaller budget than it was given, leases and a sleeper."""
    pool = replace(daemon.status.pools[0], effective=700 * 1024**2, outside=100 * 1024**2, left=61 * 1024**2, free=0)
    rooms = [
        RoomView(f"lease-{i}", "ram", 50 * 1024**2, "held", "train", 77, 90.0, "chat left for it") for i in range(3)
    ]
    models = [replace(daemon.status.models[0], state="asleep"), *daemon.status.models[1:]]
    signs = ["2.0 GiB of 64.0 GiB are available", "swap in 14 MiB/s"]
    given = {"pools": [pool], "rooms": rooms, "models": models, "pressure": "tight", "pressure_signs": signs}
    return replace(daemon.status, **(given | {"limits": "a cgroup for each worker"} | changes))


def test_ps_tells_the_state_of_the_house(pagein, daemon):
    """Pressure with its signs, the limits, what can be had of the budget, what others hold, who sleeps."""
    assert "pressure: calm" in pagein("ps").stdout.splitlines()
    daemon.status = troubled(daemon)
    lines = pagein("ps").stdout.splitlines()
    assert "pressure: tight: 2.0 GiB of 64.0 GiB are available, swap in 14 MiB/s" in lines
    assert "limits: a cgroup for each worker" in lines
    assert "lease-2: 50.0 MiB of ram held by train, pid 77, 90s left; chat left for it" in lines
    assert any("only 700 MiB of it can be had now, others hold the rest" in line for line in lines)
    assert any("left 61.0 MiB" in line and "outside 100 MiB" in line for line in lines)
    assert any(line.split()[:2] == ["chat", "asleep"] for line in lines)
    assert json.loads(pagein("ps", "--json").stdout) == asdict(daemon.status)


def test_a_budget_that_can_be_had_is_not_mentioned(pagein, daemon):
    """What is as it should be takes no room."""
    daemon.status = troubled(daemon, pools=[replace(daemon.status.pools[0], effective=daemon.status.pools[0].budget)])
    assert "can be had now" not in pagein("ps").stdout


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [20, 40])
def test_a_troubled_house_fits_the_screen(daemon, width, height):
    """Pressure and the first leases stand at the head of top, cut to the width, and the rest is counted."""
    console = Console(width=width, force_terminal=True, color_system=None)
    lines = rendered(frame(troubled(daemon), daemon.history * 10, console, height), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert "1 asleep" in lines[0]
    assert lines[1].startswith("pressure: tight: 2.0 GiB")
    assert lines[2].startswith("lease-0: ")
    assert lines[4] == "… and 1 more lease, see pagein lease".ljust(len(lines[4]))


def test_an_older_daemon_is_understood(daemon):
    """A daemon without leases and pressure is calm."""
    body = asdict(daemon.status)
    for name in ("rooms", "pressure", "pressure_signs", "limits"):
        del body[name]
    assert status_of(body) == daemon.status


def test_newer_daemon_is_understood(daemon):
    """Fields that this version does not know are passed over."""
    body = asdict(daemon.status) | {"colour": "green"}
    body["models"][0]["mood"] = "good"
    assert status_of(body) == daemon.status


def test_other_server_is_told_apart(pagein, daemon):
    """An answer without the daemon's fields is named as a stranger's, with exit code 8."""
    with pytest.raises(DaemonUnreachable, match="no Pagein daemon of this version"):
        status_of({"pools": []})


def test_explain_gives_reasons(pagein, daemon):
    """explain prints where the need comes from and each decision with its reason, and only those of the model."""
    out = pagein("explain", "chat").stdout
    assert "chat is resident; holds 512 MiB; pinned; 41 uses, 3 loads, last load 1.4 s" in out
    assert "needs 512 MiB (measured): weights 491 MiB + KV 24 MiB + runtime 90 MiB, × 1.2" in out
    assert "loaded in 1.4 s, took 498 MiB of the reserved 541 MiB" in out
    assert "embed" not in out


def test_explain_limit_and_json(pagein, daemon):
    """--limit asks for the last N; --json has the model and its decisions."""
    body = json.loads(pagein("explain", "chat", "--limit", "2", "--json").stdout)
    assert body["model"]["name"] == "chat"
    assert [decision["seq"] for decision in body["decisions"]] == [3, 4]


def test_explain_without_decisions(pagein, daemon):
    """A model about which nothing was decided yet says so."""
    assert "no decision about it since the daemon started" in pagein("explain", "vit").stdout


def test_plan_names_who_would_leave(pagein, daemon):
    """plan prints the outcome, the numbers and each eviction with its reason."""
    out = pagein("plan", "vit").stdout
    assert "vit would be loaded after evictions" in out
    assert "needs 210 MiB of ram, 161 MiB are free" in out
    assert any(line.split()[:3] == ["chat", "512", "MiB"] for line in out.splitlines())
    assert json.loads(pagein("plan", "vit", "--json").stdout)["outcome"] == "evict"


def test_top_prints_one_frame_in_a_pipe(pagein, daemon):
    """Outside a terminal top prints one frame: daemon, pools, models by state, newest decision first."""
    lines = pagein("top").stdout.splitlines()
    assert lines[0].startswith("pagein 0.1.0  running, up 2h05m  1 resident  1 loading")
    names = [
        line.split()[0] for line in lines if line.split() and line.split()[0] in {m.name for m in daemon.status.models}
    ]
    assert names == ["chat", "embed", "speech-moonshine-tiny-en", "rerank", "vit"]
    decisions = lines[next(i for i, line in enumerate(lines) if line.startswith("TIME")) + 1 :]
    assert "waits for 131 MiB" in decisions[0]
    assert any("grant" in line and "(2 times) resident" in line for line in decisions)
    assert pagein("top", "--once").stdout.splitlines()[0] == lines[0]


def test_top_json(pagein, daemon):
    """top --json has the status and the decisions."""
    body = json.loads(pagein("top", "--json").stdout)
    assert body["status"] == asdict(daemon.status)
    assert len(body["decisions"]) == 6


@pytest.mark.parametrize("command", LISTS)
def test_no_daemon(pagein, nowhere, command):
    """Without a daemon: one line with the address, a hint, exit code 8."""
    result = pagein(*command)
    assert result.exit_code == 8
    assert result.stderr.startswith(
        "error: no daemon answers at http://127.0.0.1:9 (given): connection refused\nhint: "
    )
    assert result.stdout == ""


def test_a_host_that_nobody_knows(pagein):
    """The resolver's own words, not a number that only it knows."""
    result = pagein("ps", "--url", "http://no-such-host.invalid:7311")
    assert result.exit_code == 8
    assert "no daemon answers at http://no-such-host.invalid:7311 (given): " in result.stderr
    assert "unknown error" not in result.stderr


@pytest.mark.parametrize("command", ["explain", "plan", "logs", "load", "unload", "pin", "unpin"])
def test_unknown_model(pagein, daemon, command):
    """A misspelt model is refused with exit code 4, the known models and the nearest one."""
    result = pagein(command, "embedd")
    assert result.exit_code == 4
    assert "there is no model 'embedd'; configured: chat, embed" in result.stderr
    assert result.stderr.endswith("hint: did you mean 'embed'?\n")


def test_wrong_key(pagein, daemon):
    """A refused key names the variable to set."""
    daemon.fail = Unauthorized("the API key is missing or wrong")
    result = pagein("ps")
    assert result.exit_code == 1
    assert "PAGEIN_SERVER__API_KEY" in result.stderr


def test_key_is_sent(pagein, daemon, monkeypatch):
    """The key of the environment goes with every request."""
    monkeypatch.setenv("PAGEIN_SERVER__API_KEY", "sesame123")
    pagein("ps")
    assert daemon.keys == ["Bearer sesame123"]


def test_daemon_error_keeps_its_code(pagein, daemon):
    """An error of the daemon ends with the exit code of its class, its message and its hint."""
    daemon.fail = NeverFits("big", "ram", 8 * 1024**3, 5 * 1024**3, 6 * 1024**3, [])
    result = pagein("load", "chat")
    assert result.exit_code == 5
    assert "needs 8.0 GiB of ram, the budget can give it at most 5.0 GiB of 6.0 GiB" in result.stderr
    assert "hint: raise the budget" in result.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit(daemon, width):
    """No line of a frame is wider than the screen, no model name is broken and none is missing."""
    console = Console(width=width, force_terminal=True, color_system=None)
    lines = rendered(frame(daemon.status, daemon.history, console, 40), width)
    assert max(map(len, lines)) <= width
    for model in daemon.status.models:
        assert any(line.startswith(f"{model.name} ") for line in lines)


@pytest.mark.parametrize("height", [14, 24, 40])
def test_frame_fits_the_height(daemon, height):
    """A frame has at most as many lines as the screen, and says how many models it left out."""
    models = [replace(daemon.status.models[3], name=f"m{i}") for i in range(30)]
    console = Console(width=80, force_terminal=True, color_system=None)
    status = replace(daemon.status, models=models)
    lines = rendered(frame(status, daemon.history * 10, console, height), 80)
    assert len(lines) <= height
    assert any(line.startswith("… and ") for line in lines)


def test_long_names_fold(daemon):
    """A name of 64 letters is shown whole, over several lines."""
    name = "m" * 64
    lines = rendered(model_table([replace(daemon.status.models[0], name=name)], 80), 80)
    assert sum(line.count("m") for line in lines[1:] if line.startswith("m")) == 64


def test_gpu_pools_are_named(daemon):
    """Bytes of more pools than RAM stand on a line each, with the pool."""
    model = replace(daemon.status.models[0], held={"ram": 1024**3, "cuda:0": 3 * 1024**3})
    lines = rendered(model_table([model], 80), 80)
    assert any("cuda:0 3.0 GiB" in line for line in lines)
    assert any("ram 1.0 GiB" in line for line in lines)


def test_bar_without_colours_differs_by_glyph(daemon):
    """Without colours every part of a bar has a glyph of its own."""
    bar = rendered(PoolBar(daemon.status.pools[0]), 80)[0]
    assert [glyph for glyph in "█▓▒░·" if glyph in bar] == list("█▓▒░·")


@pytest.mark.parametrize(
    ("parts", "cells"), [([1, 0, 10**12], 10), ([1, 1, 1], 10), ([5, 0, 0], 7), ([1] * 5, 5), ([999, 1, 1, 1], 8)]
)
def test_shares_fill_the_bar(parts, cells):
    """The cells of a bar are all used, and every part that is not 0 gets one."""
    widths = shares(parts, cells)
    assert sum(widths) == cells
    assert all((width > 0) == (part > 0) for width, part in zip(widths, parts, strict=True))


def test_shares_of_nothing():
    """An empty pool has an empty bar; too few cells go to the largest parts without a crash."""
    assert shares([0, 0], 10) == [0, 0]
    assert sum(shares([1, 2, 3, 4], 2)) == 2


def test_collapse_counts_runs():
    """Runs of the same kind about the same model become one line with their number, and others stay."""
    given = [Decision(i, 0.0, kind, "a", "why") for i, kind in enumerate(["grant", "grant", "wait", "grant"])]
    assert [(d.seq, d.reason) for d in collapse(given)] == [(1, "(2 times) why"), (2, "why"), (3, "why")]


def test_short_duration():
    """Idle times take at most four columns."""
    assert [short_duration(s) for s in (0.4, 119, 120, 7199, 7200, 200000)] == ["0s", "119s", "2m", "120m", "2h", "2d"]


def test_clock_gives_the_date_of_old_decisions():
    """A decision of another day carries its date."""
    assert clock(0).startswith(("01-01", "12-31"))
