"""The settings themselves: defaults, types and the rules between keys."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from pagein.config import Model, Priority, Settings
from pagein.config.schema import ALIASES, DEFAULT_PARALLEL, DEFAULT_TIMEOUTS, Scheduler, Server, section_of
from pagein.config.values import is_loopback, nearest
from pagein.protocol import Capability


def test_everything_has_a_default():
    """An empty configuration is a valid one, on loopback."""
    settings = Settings()
    assert settings.server.host == "127.0.0.1"
    assert settings.budget == {}
    assert settings.models == {}
    assert settings.state_dir.is_absolute()


def test_a_model_needs_one_key():
    """`model` alone is enough."""
    model = Model(model="x.gguf")
    assert model.model == Path("x.gguf")
    assert model.priority is Priority.MEDIUM
    assert model.context is model.memory is model.timeout is model.parallel is model.keep_alive is None


def test_settings_are_frozen():
    """Nobody changes a setting after the start."""
    with pytest.raises(ValidationError):
        Settings().server.port = 1
    with pytest.raises(ValidationError):
        Settings().budget = {}


def test_time_outs_by_capability_cover_every_capability():
    """The schema cannot import the protocol, so a test keeps the two lists equal."""
    assert list(DEFAULT_TIMEOUTS) == [capability.value for capability in Capability]


def test_a_models_timeout_beats_that_of_the_capability():
    """`timeout` is one figure for all that a model does."""
    assert Model(model="x").timeout_for("embedding") == DEFAULT_TIMEOUTS["embedding"]
    assert Model(model="x", timeout="5s").timeout_for("embedding") == 5.0


def test_a_models_parallel_beats_that_of_the_engine():
    """Engines that keep state per request hold one, the others a few."""
    assert Model(model="x").parallel_for("llama_cpp") == DEFAULT_PARALLEL["llama_cpp"] == 1
    assert Model(model="x").parallel_for("onnx") == 4
    assert Model(model="x", parallel=2).parallel_for("llama_cpp") == 2


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        ("6GiB", {"ram": 6 * 1024**3}),
        (1024**3, {"ram": 1024**3}),
        ("85%", {"ram": 0.85}),
        (0.85, {"ram": 0.85}),
        ("0.85", {"ram": 0.85}),
        (1.0, {"ram": 1.0}),
        ({"ram": "6GiB", "cuda:0": "50%"}, {"ram": 6 * 1024**3, "cuda:0": 0.5}),
    ],
)
def test_budgets(written, budget):
    """A number with a point is a share, one without is bytes; a bare one is of RAM."""
    read = Settings(budget=written).budget
    assert read == budget
    assert [type(value) for value in read.values()] == [type(value) for value in budget.values()]


@pytest.mark.parametrize(
    "written", [0, "0", 0.0, 1, "6", -1, 1.5, "1.5", "0%", "150%", True, math.nan, math.inf, "much"]
)
def test_budgets_that_make_no_sense_are_refused(written):
    """Nothing, a forgotten unit, more than all, and what is no number."""
    with pytest.raises(ValidationError):
        Settings(budget=written)


@pytest.mark.parametrize("pool", ["gpu", "cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "RAM", "ram ", ""])
def test_a_budget_is_for_ram_or_a_numbered_gpu(pool):
    """Other pools do not exist."""
    with pytest.raises(ValidationError, match="there is no memory pool"):
        Settings(budget={pool: "6GiB"})


@pytest.mark.parametrize("value", [True, 1.5, "x", [1], None])
def test_counts_are_whole_numbers(value):
    """`port: true` is not port 1."""
    with pytest.raises(ValidationError):
        Server(port=value)


@pytest.mark.parametrize("value", [True, -1, "-1s", "soon", [1], None, math.inf, math.nan])
def test_durations_are_finite_and_not_negative(value):
    """`max_wait: .inf` would let somebody wait for ever."""
    with pytest.raises(ValidationError):
        Scheduler(max_wait=value)


@pytest.mark.parametrize("device", ["cpu", "gpu", "auto", "cuda:0", "cuda:12"])
def test_devices(device):
    """The words of the issue, and numbered GPUs."""
    assert Model(model="x", device=device).device == device


@pytest.mark.parametrize("device", ["CPU", "cuda", "cuda:", "cuda:x", "cuda:0\n", "tpu", ""])
def test_other_devices_are_refused(device):
    """A device that does not exist is not silently the CPU."""
    with pytest.raises(ValidationError, match="must be cpu, gpu, auto or cuda:N"):
        Model(model="x", device=device)


@pytest.mark.parametrize("name", ["chat", "Qwen2.5-0.5B_q4", "7b", "a" * 64])
def test_names_of_models(name):
    """Letters, digits, dots, dashes and underscores."""
    assert list(Settings(models={name: {"model": "x"}}).models) == [name]


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "a b", "-a", "a\n", "é", "(daemon)", "a" * 65])
def test_names_that_could_be_a_path_or_an_option_are_refused(name):
    """A name becomes a file name and a metric label."""
    with pytest.raises(ValidationError, match="a model's name"):
        Settings(models={name: {"model": "x"}})


def test_commands_are_split_without_a_shell():
    """One line is split as a shell would, and nothing in it is expanded."""
    assert Model(command="srv --port ${port} 'a b' $HOME").command == ["srv", "--port", "${port}", "a b", "$HOME"]
    assert Model(command=["srv", "a b"]).command == ["srv", "a b"]


@pytest.mark.parametrize("command", ["", "  ", [], "srv 'open", 5])
def test_commands_that_are_none_are_refused(command):
    """There must be a program to start."""
    with pytest.raises(ValidationError):
        Model(command=command)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "exactly one of `model` and `command`"),
        ({"model": "x", "command": "y"}, "exactly one of `model` and `command`"),
        ({"command": "y", "recipe": "embedding"}, "not for a command"),
        ({"model": "x", "priority": "high", "keep_alive": "5m"}, "no meaning at priority high"),
        ({"model": "x", "context": 512, "max_context_length": 512}, "the same setting"),
        ({"model": "x", "capabilities": ["chatt"]}, "did you mean chat"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, words):
    """A setting is never dropped silently."""
    with pytest.raises(ValidationError, match=words):
        Model.model_validate(keys)


def test_other_names_of_keys():
    """Two keys may be written as other model managers write them."""
    model = Model.model_validate({"model": "x", "max_context_length": 4096, "estimated_memory_bytes": "600MiB"})
    assert model.context == 4096
    assert model.memory == 600 * 1024**2
    assert set(ALIASES.values()) <= set(Model.model_fields)


def test_numbers_in_the_environment_of_a_worker_become_text():
    """`OMP_NUM_THREADS: 2` needs no quotes."""
    assert Model(model="x", env={"OMP_NUM_THREADS": 2}).env == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize("env", [{"A": True}, {"A": 1.5}, {"A": None}, {"": "x"}, {"A=B": "x"}, {"A": "x\0"}])
def test_an_environment_that_no_process_could_have_is_refused(env):
    """What is not text must be quoted, and names follow the system's rules."""
    with pytest.raises(ValidationError):
        Model(model="x", env=env)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_no_key(host):
    """Only this machine reaches it."""
    assert is_loopback(host)
    assert Settings(server={"host": host}).server.api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "example.org", "127.0.0.1.example.org"])
def test_any_other_address_needs_a_key(host):
    """An open door without a key is refused, also where a name or an empty text hides it."""
    with pytest.raises(ValidationError, match="not a loopback address"):
        Settings(server={"host": host})
    assert Settings(server={"host": host, "api_key": "long-enough"}).server.api_key == "long-enough"


def test_no_secret_is_printed():
    """The key and the variables of a worker appear in no repr, no str and no validation error."""
    settings = Settings(
        server={"api_key": "s3cret-key"}, models={"m": {"model": "x", "env": {"TOKEN": "s3cret-token"}}}
    )
    assert "s3cret" not in repr(settings) + str(settings) + repr(settings.server) + repr(settings.models["m"])
    with pytest.raises(ValidationError) as caught:
        Settings(server={"api_key": ["s3cret-key"], "port": "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_the_longest_back_off_is_not_shorter_than_the_first():
    """A doubling pause cannot end below its start."""
    with pytest.raises(ValidationError, match="shorter than backoff_first"):
        Settings(supervisor={"backoff_first": "10s", "backoff_max": "5s"})


def test_every_key_is_described():
    """The reference page has a meaning for each, and words for a default that depends."""
    for section in (Settings, Model, *(section_of((name,)) for name in ("server", "scheduler", "supervisor"))):
        for name, field in section.model_fields.items():
            assert field.description, name
            if field.default is None:
                assert isinstance(field.json_schema_extra, dict), name
                assert field.json_schema_extra["absent"], name
                assert field.examples, name


def test_the_nearest_word_ignores_case():
    """`Context` is as near to `context` as a word can be."""
    assert nearest("CONTXT", ["context", "command"]) == "context"
    assert nearest("zzz", ["context", "command"]) is None
