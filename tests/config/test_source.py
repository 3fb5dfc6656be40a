"""YAML text into values with lines, within bounds."""

from __future__ import annotations

import math

import pytest

from pagein.config.source import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_text, read_value
from pagein.errors import ConfigError


def message(text: str) -> str:
    """Return the message with which a text is refused."""
    with pytest.raises(ConfigError) as caught:
        read_text(text, "file")
    return caught.value.message


def test_every_key_has_its_line():
    """Keys and items of lists know where they stand, inside flow collections too."""
    tree = read_text("a: 1\n\nb:\n  c: {d: 2,\n    e: 3}\n  f:\n    - x\n    - y\n", "file")
    assert tree.value == {"a": 1, "b": {"c": {"d": 2, "e": 3}, "f": ["x", "y"]}}
    assert tree.lines["a",] == 1
    assert tree.lines["b", "c", "e"] == 5
    assert tree.lines["b", "f", 1] == 8
    assert tree.faults == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("010", 10),
        ("0.85", 0.85),
        ("1e3", 1000.0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ('"7"', "7"),
        ("6GiB", "6GiB"),
        ("cuda:0", "cuda:0"),
        (".inf", math.inf),
        ("!!str 7", "7"),
    ],
)
def test_the_types_are_those_of_yaml_1_2(text, value):
    """No surprise of YAML 1.1: sexagesimals, octals, dates and yes/no stay text or decimal."""
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


def test_keys_are_text():
    """`7:`, `on:` and `null:` are names, not a number, a truth value and nothing."""
    assert read_text("7: a\non: b\nnull: c\n1.50: d\n", "file").value == {"7": "a", "on": "b", "null": "c", "1.50": "d"}


def test_keys_given_twice_are_all_found():
    """Each repetition is a fault that names both lines."""
    tree = read_text("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "file")
    assert [str(f) for f in tree.faults] == [
        "line 4: b.c: given twice, first on line 3",
        "line 5: a: given twice, first on line 1",
    ]


def test_an_empty_text_is_nothing():
    """A file of comments alone is allowed."""
    assert read_text("# nothing\n", "file").value is None


def test_anchors_work_within_bounds():
    """An anchor may be used again."""
    assert read_text("a: &x [1, 2]\nb: *x\n", "file").value == {"a": [1, 2], "b": [1, 2]}


def test_a_billion_laughs_are_refused():
    """Anchors that multiply are counted as they unfold, so a short text cannot fill memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert f"more than {MAX_VALUES} values" in message("\n".join(lines))


def test_an_anchor_that_contains_itself_is_refused():
    """A circle ends at the bound on nesting."""
    assert f"deeper than {MAX_DEPTH} levels" in message("a: &a [*a]")


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000, "? " * 5000])
def test_deep_nesting_is_refused(text):
    """Nesting ends at a bound of ours, not at Python's."""
    assert "deeper than" in message(text)


def test_a_text_that_is_too_long_is_refused():
    """The message has both numbers."""
    assert message("#" * (MAX_BYTES + 1)) == f"file: 1 error\n  {MAX_BYTES + 1} bytes, the limit is {MAX_BYTES}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2\nb: 3\n", "line 2: "),
        ("a: 1\nb: *nothing\n", "line 2: found undefined alias"),
        ("a: 1\n\tb: 2\n", "line 2: "),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
        ("a: 1\nb: \x07\n", "line 2: a control character"),
        ("a: '\n\n", "line 3: "),
    ],
)
def test_broken_yaml_is_one_fault_with_its_line(text, words):
    """The parser's complaint keeps its place."""
    assert words in message(text)


def test_a_broken_line_is_not_repeated():
    """The message does not show the text around the fault, which may hold a key."""
    assert "s3cret" not in message("server: {api_key: s3cret-value: x\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object:os.system {}", "the tag 'tag:yaml.org,2002:python/object:os.system' is not allowed"),
        ("a: !mine x", "not a value of the type"),
        ("a: !!int x", "not a value of the type 'int': 'x'"),
        ("a: " + "9" * 5000, "not a value of the type 'int'"),
        ("a: &b {x: 1}\nc:\n  <<: *b\n", "line 3: c: merge keys (<<) are not supported"),
        ("? [a, b]\n: c\n", "line 1: a key must be one word"),
        ("a: !!set {x, y}", "is not allowed here"),
    ],
)
def test_what_yaml_could_do_beyond_plain_values_is_refused(text, words):
    """Tags, merge keys and keys that are no word are faults with a line, and nothing is constructed."""
    assert words in " ".join(str(fault) for fault in read_text(text, "file").faults)


def test_a_value_that_cannot_be_read_is_a_value_error():
    """Values of environment variables have no file to point at."""
    with pytest.raises(ValueError, match="expected"):
        read_value("[1, 2")
    with pytest.raises(ValueError, match="given twice"):
        read_value("{a: 1, a: 2}")
