"""The parts of split models: listed, moved by hand, and shown by ps, top and explain."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console
from tests.cli.conftest import MIB, assistant, five_models, part_view, parts_view, status_view

from pagein.cli.decode import parts_of, status_of
from pagein.cli.frame import collapse, frame
from pagein.cli.parts_tables import part_table, parts_line, trouble_lines
from pagein.errors import DaemonUnreachable, InUse
from pagein.gateway.parts_ports import ThrashView
from pagein.gateway.ports import Decision

PATH = "/api/models/assistant"


@pytest.fixture
def office(daemon):
    """A daemon whose models include a split one that is loaded."""
    daemon.status = status_view([assistant(), *five_models()])
    return daemon


def rendered(content, width=80):
    """Return what a terminal of this width shows, line by line."""
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return capture.get().splitlines()


def test_parts_lists_parts_and_tasks(pagein, office):
    """Each part has a line with what it holds, its file, its use; below stand the tasks and what each needs."""
    lines = [" ".join(line.split()) for line in pagein("parts", "assistant").stdout.splitlines()]
    assert lines[0] == "assistant: 2 of 4 parts in memory, 259 MiB of 300 MiB; level auto"
    backbone = "backbone backbone hot 257 MiB 257 MiB 1 - 1 - 250 ms stored pinned email, grammar, summarise"
    assert backbone in lines
    assert "grammar adapter cold - 2.0 MiB - - 2 2 - stored - grammar" in lines
    assert "email chat, completion backbone, email" in lines
    assert office.seen == []


def test_parts_json_is_the_view(pagein, office):
    """--json has everything that the daemon knows of the parts."""
    assert json.loads(pagein("parts", "assistant", "--json").stdout) == asdict(office.parts)


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        (["load", "assistant", "email"], "/parts/email/load", {}),
        (["unload", "assistant", "email"], "/parts/email/unload", {}),
        (["pin", "assistant", "email"], "/parts/email/pin", {}),
        (["unpin", "assistant", "email"], "/parts/email/unpin", {}),
        (["replace", "assistant", "email", "grammar"], "/parts/email/replace", {"by": "grammar"}),
        (["refresh", "assistant"], "/parts/refresh", {}),
        (["rollout", "assistant", "--level", "backbone"], "/rollout", {"level": "backbone"}),
        (["rollout", "assistant", "--percent", "12.5"], "/rollout", {"percent": 12.5}),
        (["rollout", "assistant", "--percent", "0", "--level", "off"], "/rollout", {"level": "off", "percent": 0}),
    ],
)
def test_what_is_done_with_parts(pagein, office, words, path, body):
    """Each verb is one request, and the parts are listed as they are afterwards."""
    result = pagein("parts", *words)
    assert result.exit_code == 0, result.output
    assert office.seen == [(PATH + path, body)]
    assert result.stdout.startswith("assistant: 2 of 4 parts in memory")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["load", "assistant"], "pagein parts load MODEL PART"),
        (["replace", "assistant", "email"], "pagein parts replace MODEL PART BY"),
        (["refresh", "assistant", "email"], "pagein parts refresh MODEL"),
        (["evict", "assistant", "email"], "there is nothing called 'evict'"),
        (["assistant", "--level", "off"], "--level is for rollout"),
        (["load", "assistant", "email", "--percent", "5"], "--percent is for rollout"),
        (["rollout", "assistant"], "--level, --percent or both"),
        (["rollout", "assistant", "--level", "full"], "must be one of off, backbone, manual, auto"),
        (["rollout", "assistant", "--percent", "101"], "--percent"),
    ],
)
def test_what_makes_no_sense_is_refused(pagein, office, words, complaint):
    """Wrong words end with exit code 2 before the daemon is asked."""
    result = pagein("parts", *words)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert office.seen == []


def test_a_model_may_be_called_like_a_verb(pagein, office):
    """A verb alone is the name of a model."""
    office.status = status_view([assistant(name="load")])
    assert pagein("parts", "load").stdout.startswith("load: 2 of 4")


def test_errors_keep_their_code(pagein, office):
    """What the daemon refuses has its own words and exit code."""
    result = pagein("parts", "pin", "assistant", "poetry")
    assert result.exit_code == 4
    assert "backbone, email, grammar, summarise" in result.stderr
    office.fail = InUse("part 'email' is in use by 2 calls")
    assert pagein("parts", "unload", "assistant", "email").exit_code == InUse.exit_code


def test_ps_says_what_is_in_memory(pagein, office):
    """Below the models, a line for each split one that is loaded; its troubles are named."""
    failed = part_view("summarise", state="failed", last_error="summarise-12.safetensors: has 5 bytes, the plan says 9")
    parts = [*office.parts.parts[:3], failed]
    office.status = status_view([assistant(parts=parts_view(parts=parts)), *five_models()])
    lines = pagein("ps").stdout.splitlines()
    assert "assistant: 2 of 4 parts in memory, 259 MiB of 300 MiB; level auto" in lines
    assert "  summarise: summarise-12.safetensors: has 5 bytes, the plan says 9" in lines
    office.status = status_view([assistant(state="absent", parts=parts_view(allowance=None, owned=0))])
    assert "parts in memory" not in pagein("ps").stdout


def test_ps_json_has_all_of_it(pagein, office):
    """Programs get the parts with the model."""
    models = json.loads(pagein("ps", "--json").stdout)["models"]
    assert models[0]["parts"]["parts"][0]["name"] == "backbone"
    assert models[1]["parts"] is None


def test_explain_has_the_parts(pagein, office):
    """explain says how the parts stand, and what was decided about them."""
    office.history = [Decision(1, 0.0, "part", "assistant", "evicts grammar: idle for 40 s", None, {"part": "grammar"})]
    out = pagein("explain", "assistant").stdout
    assert "parts: 2 of 4 parts in memory, 259 MiB of 300 MiB; level auto" in out
    assert "evicts grammar: idle for 40 s" in out


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_fit(width):
    """No line is longer than the terminal, and no cell is lost in it."""
    parts = [*parts_view().parts, part_view("a-very-long-name-of-a-part-that-folds", stands_for="email", bytes=3 * MIB)]
    lines = rendered(part_table(parts, width), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "\n".join(lines)


def test_a_roll_out_and_an_old_report_are_said():
    """What only some requests take part in, and what the worker has not told for long, is no matter of course."""
    line = parts_line("a", parts_view(percent=5.0, level="manual", age_seconds=75.0, waiting=2)).plain
    assert "2 calls waiting for room" in line
    assert "level manual for 5 % of the requests, the others take all of it; told 75s ago" in line


def test_thrashing_is_said_with_numbers():
    """Parts that push each other out are named."""
    view = parts_view(thrash=ThrashView(40, 31, 20, 30.0, ["email", "grammar"], True))
    assert trouble_lines(view)[0].plain == (
        "thrashing: 31 parts came back in the last minute (email, grammar), at most 20 are let through; "
        "give it more memory"
    )


def test_what_came_in_since_is_no_trouble():
    """A part keeps the error of its last failed load; once it is there again, nothing is wrong with it."""
    wrong = "tag-12.safetensors: its digest differs"
    parts = [part_view("tag", state="hot", last_error=wrong), part_view("topic", state="failed", last_error=wrong)]
    assert [line.plain for line in trouble_lines(parts_view(parts=parts))] == [f"topic: {wrong}"]


def test_top_lists_what_is_in_memory(office):
    """Below a split model stand its parts that are in memory, the largest first; those on the disk do not."""
    console = Console(width=80, force_terminal=True, color_system=None)
    lines = rendered(frame(office.status, [], console, None))
    at = next(number for number, line in enumerate(lines) if line.startswith("assistant"))
    assert lines[at + 1].split() == ["backbone", "hot", "257", "MiB", "257", "MiB", "1", "-", "pinned"]
    assert lines[at + 2].split() == ["email", "hot", "2.0", "MiB", "2.0", "MiB", "-", "12s", "adapter"]
    assert "grammar" not in "\n".join(lines)


@pytest.mark.parametrize("height", [16, 20, 24, 40])
def test_top_with_parts_fits_the_height(office, height):
    """However many parts a model has, the frame fits, and the models above all stay in it."""
    many = [part_view(f"part-{number:02}", state="hot", bytes=MIB) for number in range(30)]
    status = replace(office.status, models=[assistant(parts=parts_view(parts=many)), *five_models()])
    console = Console(width=80, height=height, force_terminal=True, color_system=None)
    lines = rendered(frame(status, office.history, console, height))
    assert len(lines) <= height
    assert any(line.startswith("assistant") for line in lines)
    if height >= 24:
        assert any(line.startswith("vit") for line in lines)
    if height >= 40:
        assert any("more" in line and line.startswith("  …") for line in lines)


def test_runs_of_parts_are_told_apart():
    """What happened to two parts, or two things that happened to one, are no run of one thing."""
    told = [("load", "x"), ("load", "x"), ("load", "y"), ("evict", "y")]
    events = [Decision(0, 0.0, "part", "a", f"{e} {p}", None, {"event": e, "part": p}) for e, p in told]
    assert [one.reason for one in collapse(events)] == ["(2 times) load x", "load y", "evict y"]


def test_an_answer_of_another_shape_is_a_stranger():
    """What has no parts is not taken for a model without any."""
    for body in ({}, {"tasks": {}}, {"tasks": [], "parts": []}, None):
        with pytest.raises(DaemonUnreachable):
            parts_of(body)


def test_a_newer_daemon_is_understood(office):
    """Fields that this version does not know are passed over, also inside."""
    body = asdict(office.status)
    body["models"][0]["parts"]["mood"] = "fine"
    body["models"][0]["parts"]["parts"][0]["mood"] = "fine"
    assert status_of(body) == office.status


# ── run ─────────────────────────────────────────────────────────────────────────────────────


def test_run_asks_a_task(pagein, office):
    """The task behind the model's name decides what is asked, and goes to the daemon as it was given."""
    office.answers["/v1/chat/completions"] = [{"choices": [{"delta": {"content": "Yours, A."}}]}]
    assert pagein("run", "assistant:Email", "decline").stdout == "Yours, A.\n"
    path, body = office.seen[0]
    assert (path, body["model"]) == ("/v1/chat/completions", "assistant:Email")


def test_run_classifies_texts_and_tokens(pagein, office):
    """Labels come with their scores, the best first; those of tokens in the order of the text."""
    tasks = parts_view().tasks
    tasks["topic"] = replace(tasks["email"], kind="classify", capabilities=["text-classification"])
    tasks["names"] = replace(tasks["email"], kind="tokens", capabilities=["token-classification"])
    office.status = status_view([assistant(parts=parts_view(tasks=tasks))])
    scores = {"sport": 0.1, "work": 0.9}
    office.answers["/v1/texts/classifications"] = {
        "data": [{"index": 0, "label": "work", "score": 0.9, "scores": scores}]
    }
    assert pagein("run", "assistant:topic", "Printer!").stdout == "0.9000  work\n0.1000  sport\n"
    token = {"text": "Ada", "label": "PER", "score": 0.75, "start": 0, "end": 3}
    office.answers["/v1/texts/token-classifications"] = {"data": [{"index": 0, "tokens": [token]}]}
    assert pagein("run", "assistant:names", "Ada came.").stdout == "0.7500  PER  Ada\n"
    assert [body["input"] for _, body in office.seen] == ["Printer!", "Ada came."]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("assistant:poetry", "there is no task 'poetry'; the model has: email, grammar, summarise"),
        ("chat:email", "'chat' is not split: it has no tasks"),
        ("asistant:email", "did you mean 'assistant'?"),
    ],
)
def test_run_knows_what_is_not_there(pagein, office, model, words):
    """A task or model that is not there ends with 4, before anything is sent."""
    result = pagein("run", model, "hello")
    assert result.exit_code == 4
    assert words in result.stderr
    assert office.seen == []
