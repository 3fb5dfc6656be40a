"""The example file and the reference page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagein.config import Settings, load_settings, parse_settings
from pagein.config.describe import absent_text, written
from pagein.config.render import EXAMPLE_FILE, FILES, main, render_example, render_reference
from pagein.config.schema import ALIASES, DEFAULT_TIMEOUTS, Model, section_of
from pagein.config.source import read_value
from pagein.units import parse_bytes, parse_duration

ROOT = Path(__file__).parents[2]
SECTIONS = [section_of((name,)) for name in ("server", "scheduler", "supervisor", "state")]
FIELDS = {name: field for section in (Settings, Model, *SECTIONS) for name, field in section.model_fields.items()}
UNSET = [n for n, line in enumerate(render_example().splitlines()) if re.match(r" *#[a-z]", line)]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_committed_files_are_current(path):
    """`python -m pagein.config.render` was run after the last change of the schema."""
    assert (ROOT / path).read_text(encoding="utf-8") == FILES[path]()


def test_the_example_loads():
    """It is a valid configuration as it stands, and sets nothing but its models."""
    settings = load_settings(ROOT / EXAMPLE_FILE, {})
    assert list(settings.models) == ["chat", "speech", "search", "assistant"]
    assert settings.model_copy(update={"models": {}}) == Settings()


def test_the_example_has_every_key():
    """Every key of the schema stands there once, set or not."""
    text = render_example()
    for name in [*Settings.model_fields, *Model.model_fields]:
        assert re.search(rf"^ *#?{name}:", text, re.MULTILINE), name
    assert len(UNSET) == 2 + sum(len(section.model_fields) for section in SECTIONS) + len(Model.model_fields) - 1


@pytest.mark.parametrize("number", UNSET)
def test_each_key_of_the_example_can_be_set(number):
    """Taking one `#` away gives a valid configuration, and a default there changes nothing."""
    lines = render_example().splitlines()
    name = lines[number].strip(" #").split(":")[0]
    lines[number] = lines[number].replace("#", "", 1)
    if name == "command":
        lines = [line for line in lines if line.strip() != "model: models/chat.gguf"]
    settings = parse_settings("\n".join(lines))
    if absent_text(FIELDS[name]) is None:
        assert settings == parse_settings(render_example())


def test_the_reference_has_every_key_capability_and_alias():
    """Nothing is left out of the page."""
    page = render_reference()
    for name in FIELDS:
        assert f"`{name}`" in page, name
    for word in [*DEFAULT_TIMEOUTS, *ALIASES]:
        assert word in page


def test_what_is_rendered_is_the_same_on_every_machine(monkeypatch):
    """No home folder, state folder or key of this machine gets into the files."""
    before = [render() for render in FILES.values()]
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    monkeypatch.setenv("PAGEIN_SERVER__API_KEY", "s3cret-key")
    assert [render() for render in FILES.values()] == before


def test_every_rendered_table_has_even_rows():
    """A cell with a bar would shift the row."""
    for block in render_reference().split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1, block


def test_check_names_what_is_stale_and_writes_nothing(tmp_path, capsys):
    """CI can rely on the exit status."""
    (tmp_path / "pyproject.toml").touch()
    assert main(["--root", str(tmp_path), "--check"]) == 1
    complaint = capsys.readouterr().err
    assert [path for path in FILES if str(path) not in complaint] == []
    assert not (tmp_path / EXAMPLE_FILE).exists()
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / EXAMPLE_FILE).write_text("old")
    capsys.readouterr()
    assert main(["--root", str(tmp_path), "--check"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"{EXAMPLE_FILE} is not current")
    assert "reference" not in complaint


def test_it_writes_into_a_repository_only(tmp_path):
    """Run elsewhere, it does not scatter files."""
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 1024, 1536, 1024**2, 64 * 1024**2, 10 * 1024**3 + 1, 3 * 1024**4])
def test_sizes_are_written_without_rounding(count):
    """A default in the files is the default."""
    assert parse_bytes(written(count, "size")) == count


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1.0, 5.0, 90.0, 300.0, 7200.0])
def test_durations_are_written_without_rounding(seconds):
    """A default in the files is the default."""
    assert parse_duration(written(seconds, "duration")) == seconds


@pytest.mark.parametrize(
    "value", ["a", "7", "true", "a: b", "${port}", "", " x ", [0, "1", "a,b"], {"A": "2", "b:c": 1}]
)
def test_values_are_written_so_that_they_read_back(value):
    """Quotes stand where YAML needs them."""
    assert read_value(written(value)) == value
