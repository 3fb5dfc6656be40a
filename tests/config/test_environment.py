"""Variables over the file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.config import parse_settings
from pagein.config.environment import RESERVED, variable_name
from pagein.config.schema import Model, Settings, section_of
from pagein.errors import ConfigError

FILE = """
budget: 6GiB
models:
  chat: {model: /chat.gguf, max_context_length: 512, options: {cache_ram: 8}}
  my-model.v2: {model: /two.gguf}
  chat__big: {model: /big.gguf}
"""


def with_environment(**environ: str) -> Settings:
    """Read the file with variables."""
    return parse_settings(FILE, "file", environ={"HOME": "/home/ann", "PAGEINX": "1", **environ})


def refusal(**environ: str) -> str:
    """Return the message with which variables are refused."""
    with pytest.raises(ConfigError) as caught:
        with_environment(**environ)
    return caught.value.message


@pytest.mark.parametrize(
    ("variable", "value", "get", "expected"),
    [
        ("BUDGET", "1GiB", lambda s: s.budget, {"ram": 1024**3}),
        ("BUDGET", "85%", lambda s: s.budget, {"ram": 0.85}),
        ("BUDGET", "0.85", lambda s: s.budget, {"ram": 0.85}),
        ("BUDGET__RAM", "1GiB", lambda s: s.budget, {"ram": 1024**3}),
        ("BUDGET__CUDA_0", "50%", lambda s: s.budget, {"ram": 6 * 1024**3, "cuda:0": 0.5}),
        ("BUDGET__cuda:1", "1GiB", lambda s: s.budget["cuda:1"], 1024**3),
        ("SERVER__PORT", "0", lambda s: s.server.port, 0),
        ("server__port", "0", lambda s: s.server.port, 0),
        ("SERVER__API_KEY", "12345678", lambda s: s.server.api_key, "12345678"),
        ("SERVER__CORS", "https://a.example, https://b.example", lambda s: len(s.server.cors), 2),
        ("SCHEDULER__MAX_WAIT", "90", lambda s: s.scheduler.max_wait, 90.0),
        ("STATE_DIR", "/var/lib/x", lambda s: s.state_dir, Path("/var/lib/x")),
        ("MODELS__chat__CONTEXT", "4096", lambda s: s.models["chat"].context, 4096),
        ("MODELS__CHAT__max_context_length", "4096", lambda s: s.models["chat"].context, 4096),
        ("MODELS__CHAT__PIN", "true", lambda s: s.models["chat"].pin, True),
        ("MODELS__CHAT__CPUS", "0,1", lambda s: s.models["chat"].cpus, [0, 1]),
        ("MODELS__CHAT__CPUS", "[0, 1]", lambda s: s.models["chat"].cpus, [0, 1]),
        ("MODELS__CHAT__OPTIONS__CACHE_RAM", "0", lambda s: s.models["chat"].options, {"cache_ram": 0}),
        ("MODELS__CHAT__OPTIONS__x", "{a: [1]}", lambda s: s.models["chat"].options["x"], {"a": [1]}),
        ("MODELS__CHAT__ENV__Some_Token", "7", lambda s: s.models["chat"].env, {"Some_Token": "7"}),
        ("MODELS__MY_MODEL_V2__THREADS", "2", lambda s: s.models["my-model.v2"].threads, 2),
        ("MODELS__my-model.v2__THREADS", "2", lambda s: s.models["my-model.v2"].threads, 2),
        ("MODELS__CHAT__BIG__THREADS", "2", lambda s: s.models["chat__big"].threads, 2),
    ],
)
def test_a_variable_sets_its_key(variable, value, get, expected):
    """Case does not matter, lists may be separated by commas, and other characters of a name are underscores."""
    assert get(with_environment(**{f"PAGEIN_{variable}": value})) == expected


def test_a_model_can_be_pointed_elsewhere(tmp_path, monkeypatch):
    """Paths in a variable start at the current folder, as on a command line."""
    monkeypatch.chdir(tmp_path)
    settings = with_environment(PAGEIN_MODELS__CHAT__MODEL="w/x.gguf", PAGEIN_STATE_DIR="s")
    assert settings.models["chat"].model == tmp_path / "w/x.gguf"
    assert settings.state_dir == tmp_path / "s"


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("BUDGT", "PAGEIN_BUDGT: no such setting; did you mean PAGEIN_BUDGET?"),
        ("SERVR__PORT", "no such setting; did you mean PAGEIN_SERVER__PORT?"),
        ("SERVER__PROT", "no such setting; did you mean PAGEIN_SERVER__PORT?"),
        ("SERVER__PORT__X", "no such setting; did you mean PAGEIN_SERVER__PORT?"),
        ("STATE_DIR__X", "no such setting; did you mean PAGEIN_STATE_DIR?"),
        ("BUDGET__GPU", "there is no memory pool 'gpu'"),
        ("SERVER", "names a whole section: set one of its keys, such as PAGEIN_SERVER__HOST"),
        ("MODELS", "names a whole section"),
        ("MODELS__CHAT__ENV", "names a whole section"),
        ("MODELS__CHAT__CONTXT", "no such setting; did you mean PAGEIN_MODELS__CHAT__CONTEXT?"),
        ("MODELS__CHAT__CONTEXT__X", "no such setting"),
        ("MODELS__CAHT__CONTEXT", "no such model in the file (chat, my-model.v2, chat__big)"),
        ("MODELS__CHAT", "no such model in the file"),
        ("", "PAGEIN_: no such setting"),
    ],
)
def test_a_variable_that_names_nothing_is_refused(variable, words):
    """A misspelt limit is not dropped silently."""
    assert words in refusal(**{f"PAGEIN_{variable}": "1GiB"})


def test_an_empty_value_is_a_value():
    """An empty key is a short one, not an absent one: a secret that was not filled in opens no door."""
    assert "PAGEIN_SERVER__API_KEY: must have at least 8 characters" in refusal(PAGEIN_SERVER__API_KEY="")


def test_variables_of_other_parts_are_left_alone():
    """The prefix is shared with what is no setting."""
    assert with_environment(**dict.fromkeys(RESERVED, "x")) == with_environment()


def test_two_variables_for_one_key_are_refused():
    """Which of them would win cannot be seen."""
    assert "sets the same key as PAGEIN_BUDGET: give one of them" in refusal(
        PAGEIN_BUDGET="1GiB", PAGEIN_BUDGET__RAM="2GiB"
    )


def test_a_variable_that_means_two_models_is_refused():
    """`a-b` and `a.b` are both `A_B`; the exact spelling tells them apart."""
    text = "models: {a-b: {model: /x}, a.b: {model: /y}}"
    with pytest.raises(ConfigError, match=r"means a-b and a\.b"):
        parse_settings(text, environ={"PAGEIN_MODELS__A_B__THREADS": "1"})
    assert parse_settings(text, environ={"PAGEIN_MODELS__a.b__THREADS": "1"}).models["a.b"].threads == 1


def test_a_broken_value_is_refused_under_its_variable():
    """YAML in a variable can be wrong too."""
    assert "PAGEIN_MODELS__CHAT__OPTIONS__X: " in refusal(PAGEIN_MODELS__CHAT__OPTIONS__X="[1")
    assert "PAGEIN_STATE_DIR: '~nosuchuser-x' names no home" in refusal(PAGEIN_STATE_DIR="~nosuchuser-x")


def test_a_variable_over_a_section_that_is_no_section_leaves_the_files_fault():
    """The file's own mistake is reported, not hidden."""
    with pytest.raises(ConfigError, match="line 1: server: must be a mapping of keys, got 5"):
        parse_settings("server: 5", environ={"PAGEIN_SERVER__PORT": "1"})


def test_every_key_has_a_variable():
    """What the reference page promises."""
    keys = [
        (top, name)
        for top in ("server", "scheduler", "supervisor", "state")
        for name in section_of((top,)).model_fields
    ]
    keys += [("models", "chat", name) for name in Model.model_fields if name not in ("env", "options")]
    named = {variable_name(key): "x" for key in keys}
    with pytest.raises(ConfigError) as caught:
        with_environment(**named)
    assert "no such" not in caught.value.message
    assert caught.value.message.count("PAGEIN_") > len(keys) / 2


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.dictionaries(st.text(max_size=40).map(lambda name: f"PAGEIN_{name}"), st.text(max_size=40), max_size=4))
def test_no_environment_breaks_the_reader(environ):
    """Whatever is set, the result is settings or a list of faults."""
    with contextlib.suppress(ConfigError):
        assert parse_settings(FILE, environ=environ).models.keys() == {"chat", "my-model.v2", "chat__big"}
