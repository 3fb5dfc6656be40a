"""Keys with values of their own kind (-1, margins, locks by device), and keys that bound each other."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from pagein.config import Model, Settings, load_settings, parse_settings
from pagein.config.schema import Scheduler, Supervisor
from pagein.errors import ConfigError


def complaint(text, environ=None):
    """Return the message for a configuration that is wrong."""
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, "f", environ=environ)
    return caught.value.message


@pytest.mark.parametrize("written", [-1, "-1", "-1m", " -1 ", -1.0])
def test_keep_alive_minus_one_is_for_ever(written):
    """-1 is never for being idle, as Ollama writes it, with a unit or without."""
    assert Model(model="x", keep_alive=written).keep_alive == math.inf


@pytest.mark.parametrize("written", [-2, "-5m", True, "soon", [1], math.nan, math.inf])
def test_other_negative_times_are_refused(written):
    """A time that cannot be is not taken for for ever, and the message says what is."""
    with pytest.raises(ValidationError, match="-1 means never"):
        Model(model="x", keep_alive=written)


@pytest.mark.parametrize(("written", "margin"), [("10%", 0.1), (0.25, 0.25), ("0.25", 0.25), ("256MiB", 256 * 1024**2)])
def test_margins(written, margin):
    """A margin is a share of the allowance or a size."""
    assert Supervisor(limit_margin=written).limit_margin == margin


@pytest.mark.parametrize("written", [10, 0, "110%", "much", True])
def test_margins_that_make_no_sense_are_called_margins(written):
    """A forgotten unit is refused in the words of this key, not in those of a budget."""
    with pytest.raises(ValidationError) as caught:
        Supervisor(limit_margin=written)
    assert "budget" not in str(caught.value)


def test_the_compute_lock_is_one_answer_or_one_by_device():
    """A device that is not named keeps the default."""
    assert Scheduler().locks("cpu")
    assert not Scheduler(compute_lock=False).locks("cuda:3")
    by_device = Scheduler(compute_lock={"cuda:0": False})
    assert (by_device.locks("cuda:0"), by_device.locks("cpu")) == (False, True)


@pytest.mark.parametrize(("text", "lock"), [("false", False), ("True", True), ("{cpu: true, cuda:0: false}", None)])
def test_the_compute_lock_can_be_set_by_a_variable(text, lock):
    """One word, or a mapping as in the file."""
    settings = parse_settings("", environ={"PAGEIN_SCHEDULER__COMPUTE_LOCK": text})
    assert settings.scheduler.compute_lock == ({"cpu": True, "cuda:0": False} if lock is None else lock)


@pytest.mark.parametrize(
    ("lock", "says"),
    [
        ("{gpu: true}", "a device that computes is cpu or cuda:N (cuda:0), not 'gpu'; did you mean cpu?"),
        ("{auto: true}", "a device that computes is cpu or cuda:N"),
        ("{cuda:0: 3}", "must be true or false for 'cuda:0', got 3"),
        ("maybe", "must be true or false, or a mapping such as"),
        ("1", "must be true or false"),
    ],
)
def test_other_locks_are_refused_once(lock, says):
    """One fault with its line, though two types are allowed there."""
    message = complaint(f"scheduler:\n  compute_lock: {lock}\n")
    assert message.startswith("f: 1 error\n  line 2: scheduler.compute_lock: ")
    assert says in message


@pytest.mark.parametrize("key", ["min_residency", "hold"])
def test_a_wish_beyond_the_patience_is_refused(key):
    """What the patience would cut is not accepted in silence; a default is cut, since it says so itself."""
    assert f"{key} (60 s) is longer than patience (30 s)" in complaint(f"scheduler:\n  {key}: 1m\n")
    assert parse_settings("scheduler: {patience: 1s}\n").scheduler.patience == 1


def test_a_plain_wait_beyond_the_longest_wait_is_refused():
    """It would never come to pass."""
    message = complaint("server:\n  plain_wait: 10m\n")
    assert "line 2: server.plain_wait: plain_wait (600 s) is longer than scheduler.max_wait (300 s)" in message
    assert Settings(server={"plain_wait": "10m"}, scheduler={"max_wait": "15m"}).server.plain_wait == 600


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"priority": "high"}, "sleep has no meaning at priority high"),
        ({"engine": "llama_cpp"}, "the engine llama_cpp cannot sleep"),
    ],
)
def test_sleep_where_nothing_can_sleep_is_refused(keys, says):
    """A model that never leaves has no use for sleep, and an engine without it cannot."""
    with pytest.raises(ValidationError, match=says):
        Model(model="x", sleep=True, **keys)
    assert Model(model="x", sleep=True, engine="whisper").sleep


def test_the_example_shows_the_new_keys_as_people_write_them(request):
    """Shares as per cent, sizes with units, a lock by device."""
    text = (request.config.rootpath / "pagein.example.yaml").read_text()
    for line in ("#limit_margin: 10%", "#heavy_above: 1GiB", "#compute_lock: {cpu: true, cuda:0: false}"):
        assert f"  {line}\n" in text
    assert load_settings(request.config.rootpath / "pagein.example.yaml", {}).supervisor.limit_margin == 0.1
