"""A file and the environment into settings, with every fault at once."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.config import Settings, load_settings, parse_settings
from pagein.config.schema import ALIASES, Model, Server
from pagein.errors import ConfigError

WORDS = st.sampled_from([*Settings.model_fields, *Model.model_fields, *Server.model_fields, *ALIASES, "ram", "x"])


def faults(text: str, **environ: str) -> list[str]:
    """Return the lines that list the faults of a text."""
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, "file", environ=environ)
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


def test_one_line_is_a_configuration():
    """A model by its file, all else by default."""
    settings = parse_settings("models: {chat: {model: /m/chat.gguf}}")
    assert settings.models["chat"].model == Path("/m/chat.gguf")


def test_an_empty_file_is_a_configuration():
    """So is a section whose keys are all commented out."""
    assert parse_settings("") == parse_settings("server:\n  # port: 80\nscheduler:\nmodels:\nbudget:\n")


def test_every_fault_is_listed_with_its_line():
    """One run shows everything that is wrong, in the order of the file, rules between keys included."""
    text = """\
budgt: 6GiB
server:
  prot: 80
  host: 0.0.0.0
scheduler: {patience: 0s, max_wait: soon}
supervisor: 5
models:
  chat:
    model: x.gguf
    contxt: 5
    priority: hihg
    cpus: [0, true, x]
  none:
    queue: -1
  two: {model: a, command: b}
  bad name: {model: a}
  hot:
    model: a
    keep_alive: 5m
    priority: high
"""
    assert faults(text) == [
        "line 1: budgt: unknown key; did you mean budget?",
        "line 3: server.prot: unknown key; did you mean port?",
        "line 4: server.host: '0.0.0.0' is not a loopback address, so a key is needed: "
        "set server.api_key (or the variable PAGEIN_SERVER__API_KEY)",
        "line 5: scheduler.max_wait: not a duration: 'soon'; write it as 250ms, 30s, 5m or 1h30m",
        "line 5: scheduler.patience: must be above 0, got '0s'",
        "line 6: supervisor: must be a mapping of keys, got 5",
        "line 10: models.chat.contxt: unknown key; did you mean context?",
        "line 11: models.chat.priority: must be one of high, medium, low, got 'hihg'; did you mean high?",
        "line 12: models.chat.cpus[1]: must be a whole number, got true",
        "line 12: models.chat.cpus[2]: must be a whole number, got 'x'",
        "line 13: models.none: a model needs exactly one of `model` and `command`",
        "line 14: models.none.queue: must be at least 0, got -1",
        "line 15: models.two.model: a model needs exactly one of `model` and `command`",
        "line 16: models.'bad name': a model's name starts with a letter or a digit, "
        "goes on with those or . _ - and has at most 64 of them",
        "line 19: models.hot.keep_alive: keep_alive has no meaning at priority high, which never leaves; use medium",
    ]


def test_the_error_counts_and_carries_the_faults():
    """Programs get the same list as values."""
    with pytest.raises(ConfigError) as caught:
        parse_settings("budgt: 1\nserver: {port: x}\n", "my.yaml", environ={"PAGEIN_SERVER__HEARTBEAT": "x"})
    assert caught.value.message.splitlines()[0] == "my.yaml: 3 errors"
    listed = caught.value.details["faults"]
    assert [(f["line"], f["variable"], f["key"]) for f in listed] == [
        (1, None, "budgt"),
        (2, None, "server.port"),
        (None, "PAGEIN_SERVER__HEARTBEAT", "server.heartbeat"),
    ]


@pytest.mark.parametrize("keys", ["model: 5", "modle: x.gguf", "command: srv 'open", "model: x\n    comand: y"])
def test_a_fault_that_follows_from_another_is_not_listed(keys):
    """A model whose `model` is wrong or misspelt is not also told that it has none."""
    assert len(faults(f"models:\n  chat:\n    {keys}\n")) == 1


def test_a_wrong_key_hides_no_rule_that_it_has_nothing_to_do_with():
    """A misspelt `context` does not hide that the model has no source."""
    assert faults("models:\n  chat:\n    contxt: 5\n") == [
        "line 2: models.chat: a model needs exactly one of `model` and `command`",
        "line 3: models.chat.contxt: unknown key; did you mean context?",
    ]


def test_an_unknown_key_of_another_section_is_found_there():
    """`port` at the top level belongs to the server."""
    assert faults("port: 80\n") == ["line 1: port: unknown key; did you mean server.port?"]
    assert faults("server: {zzz: 1}\n") == [
        "line 1: server.zzz: unknown key; known here: host, port, api_key, cors, max_body, plain_wait, heartbeat"
    ]


def test_other_names_of_keys_keep_their_name_and_line():
    """A fault names the key as the file writes it."""
    text = "models:\n  chat:\n    model: x\n    max_context_length: lots\n    estimated_memory_bytes: 0\n"
    assert faults(text) == [
        "line 4: models.chat.max_context_length: must be a whole number, got 'lots'",
        "line 5: models.chat.estimated_memory_bytes: must be above 0, got 0",
    ]
    assert faults("models:\n  chat:\n    model: x\n    context: 99\n    max_context_length: 99\n") == [
        "line 5: models.chat.max_context_length: the same setting as context: give one of them"
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "a budget of 0 B is less than 1.0 MiB"),
        ("6", "a budget of 6 B is less than 1.0 MiB"),
        ("120%", "a percentage must lie above 0 % and at most 100 %: '120%'"),
        ("1.5", "a share must be above 0 and at most 1, got 1.5; write it as 0.85, 85% or 1.5GiB"),
        ("much", "not a size: 'much'; write a size (6GiB) or a share (85%)"),
        ("[1]", "must be a mapping of keys, got a list"),
        ("{gpu: 6GiB}", "there is no memory pool 'gpu': a pool is ram or cuda:N (cuda:0)"),
    ],
)
def test_budget_faults_show_the_value_and_what_is_accepted(value, words):
    """Both sides of the mismatch are in the message."""
    (fault,) = faults(f"\nbudget: {value}\n")
    assert fault.startswith("line 2: budget")
    assert words in fault


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "5"])
def test_a_file_that_is_no_mapping_is_refused(text):
    """The top of the file holds keys."""
    assert "line 1: the file must hold keys with values" in faults(text)[0]


def test_model_and_state_paths_start_at_the_folder_of_the_file(tmp_path, monkeypatch):
    """A configuration can be moved with its models, and `~` is the home folder."""
    monkeypatch.setenv("HOME", "/home/ann")
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "pagein.yaml"
    file.write_text(
        "state_dir: state\nmodels: {a: {model: w/a.gguf}, b: {model: ~/b.gguf}, c: {model: /c}, d: {model: .}}"
    )
    monkeypatch.chdir(tmp_path)
    for path in (file, "deep/pagein.yaml"):
        settings = load_settings(path, {})
        assert settings.state_dir == file.parent / "state"
        assert [model.model for model in settings.models.values()] == [
            file.parent / "w/a.gguf",
            Path("/home/ann/b.gguf"),
            Path("/c"),
            file.parent,
        ]


def test_paths_among_options_start_at_the_folder_of_the_file(tmp_path, monkeypatch):
    """A key that is trusted, and a folder of shards; the names of files beside a model stay names."""
    monkeypatch.setenv("HOME", "/home/ann")
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "pagein.yaml"
    file.write_text(
        "models:\n"
        "  a: {model: a, options: {trust: keys/public.pem, precision: int8}}\n"
        "  b: {model: b, options: {trust: ~/public.pem}}\n"
        "  c: {model: c, options: {shards: shards, labels: labels.txt}}\n"
        "  d: {model: d, options: {trust: 5}}\n"
    )
    monkeypatch.chdir(tmp_path)
    environ = {"PAGEIN_MODELS__D__OPTIONS__TRUST": "/etc/public.pem"}
    options = [model.options for model in load_settings("deep/pagein.yaml", environ).models.values()]
    assert options == [
        {"trust": str(file.parent / "keys/public.pem"), "precision": "int8"},
        {"trust": "/home/ann/public.pem"},
        {"shards": str(file.parent / "shards"), "labels": "labels.txt"},
        {"trust": "/etc/public.pem"},
    ]
    assert load_settings(file, {}).models["d"].options == {"trust": 5}, "the engine says what is wrong with it"
    (fault,) = faults("models: {a: {model: a, options: {trust: ''}}}")
    assert "must name a file or folder" in fault


@pytest.mark.parametrize("path", ['""', '" "', "~nosuchuser-x/y", '"a\\0b"', "[a]"])
def test_paths_that_name_nothing_are_refused(path):
    """An empty path is not the current folder."""
    (fault,) = faults(f"models: {{a: {{model: {path}}}}}")
    assert fault.startswith("line 1: models.a.model: ")


@pytest.mark.parametrize("value", ["short", "[s3cret-list]", "5"])
def test_a_key_is_never_repeated(value):
    """Not even when it is what is wrong."""
    (fault,) = faults(f"server:\n  api_key: {value}\n")
    assert fault.startswith("line 2: server.api_key: must ")
    assert value.strip("[]") not in fault.replace("line 2", "")


def test_variables_of_a_worker_are_never_repeated():
    """Tokens of model hubs stand there."""
    assert faults("models: {a: {model: x, env: {TOKEN: 1.2345}}}") == [
        "line 1: models.a.env.TOKEN: must be text; write it in quotes"
    ]


def test_names_cannot_draw_on_the_terminal():
    """Control characters and endless names in a message are escaped and cut."""
    (fault,) = faults('"a\\e[31m' + "b" * 500 + '": 1\n')
    assert "\x1b" not in fault
    assert len(fault) < 200


def test_a_file_that_is_missing_unreadable_or_too_long_says_so(tmp_path):
    """Each is a configuration error with the file's name."""
    with pytest.raises(ConfigError, match="there is no file") as caught:
        load_settings(tmp_path / "none.yaml", {})
    assert "pagein init" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_settings(tmp_path, {})
    (tmp_path / "long.yaml").write_bytes(b"#" * 300_000)
    with pytest.raises(ConfigError, match=r"larger than 256 KiB"):
        load_settings(tmp_path / "long.yaml", {})
    (tmp_path / "latin.yaml").write_bytes(b"server:\n  host: \xe9\n")
    with pytest.raises(ConfigError, match="line 2: not UTF-8 text"):
        load_settings(tmp_path / "latin.yaml", {})


def test_an_endless_file_is_read_to_the_limit_only():
    """A device file cannot fill memory."""
    with pytest.raises(ConfigError, match="larger than"):
        load_settings(os.devnull.replace("null", "zero"), {})


def test_a_byte_order_mark_is_no_fault(tmp_path):
    """Some editors write one."""
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbfserver: {port: 0}\n")
    assert load_settings(file, {}).server.port == 0


def test_the_environment_beats_the_file_and_the_file_the_default():
    """Three layers, in this order."""
    text = "server: {port: 1}\n"
    assert parse_settings("").server.port == 7311
    assert parse_settings(text).server.port == 1
    assert parse_settings(text, environ={"PAGEIN_SERVER__PORT": "2"}).server.port == 2


def test_a_wrong_value_in_the_file_is_forgiven_where_the_environment_replaces_it():
    """Only the value that is used is judged."""
    assert parse_settings("server: {port: x}\n", environ={"PAGEIN_SERVER__PORT": "2"}).server.port == 2


def test_faults_of_variables_name_the_variable():
    """Values from the environment have no line."""
    assert faults("models: {chat: {model: x}}", PAGEIN_SERVER__PORT="x", PAGEIN_MODELS__CHAT__CONTEXT="1") == [
        "PAGEIN_MODELS__CHAT__CONTEXT: must be at least 16, got '1'",
        "PAGEIN_SERVER__PORT: must be a whole number, got 'x'",
    ]


def test_a_rule_that_a_variable_breaks_names_the_variable():
    """The address came from there."""
    (fault,) = faults("", PAGEIN_SERVER__HOST="0.0.0.0")
    assert fault.startswith("PAGEIN_SERVER__HOST: '0.0.0.0' is not a loopback address")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["6GiB", "5m", "85%"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.dictionaries(WORDS, VALUES, max_size=5))
def test_no_values_break_the_reader(values):
    """Whatever a file holds, the result is settings or a list of faults, each with a line."""
    try:
        parse_settings(json.dumps(values, indent=1))
    except ConfigError as error:
        listed = error.details["faults"]
    else:
        listed = []
    assert [fault for fault in listed if fault["line"] is None] == []


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.text(alphabet=st.sampled_from("ab:{}[]#&*!|>'\"%@`,?- \n\t<~1.")))
def test_no_text_breaks_the_reader(text):
    """Whatever a file holds, there is never another error than one for people."""
    with contextlib.suppress(ConfigError):
        assert parse_settings(text).models == {}
