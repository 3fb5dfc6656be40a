"""Members are cut out of a body, and nothing else of it changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.gateway.splice import without


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        ('{"x": 1}', "{}"),
        ('{ "x": 1 }', "{  }"),
        ('{"x": 1, "a":  2}', '{"a":  2}'),
        ('{"a":2 ,\n"x": 1}', '{"a":2}'),
        ('{"a": 1,"x": [1, {"x": 2}] , "b" : 1e-05}\n', '{"a": 1 , "b" : 1e-05}\n'),
        ('{"x": 1, "y": 2, "a": "é", "x": 3}', '{"a": "é"}'),
        ('{"\\u0078": 1, "a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": {"x": 1}, "b": "\\"x\\": 1"}', '{"a": {"x": 1}, "b": "\\"x\\": 1"}'),
        ("{}", "{}"),
        (' { "a" : 1 } ', ' { "a" : 1 } '),
    ],
)
def test_members_are_cut(body: str, rest: str) -> None:
    """Only at the top, by their real name, with the comma that would be left over."""
    assert without(body.encode(), ["x", "y"]).decode() == rest


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from("abxy") | st.text(max_size=2), _VALUES),
    st.booleans(),
    st.sampled_from([0, None, 2]),
)
def test_what_is_left_means_the_same(fields: dict[str, object], plain: bool, indent: int | None) -> None:
    """Whatever the object and however it is written, the rest reads as the object without the members."""
    body = json.dumps(fields, ensure_ascii=plain, indent=indent).encode("utf-8", "surrogatepass")
    left = {name: value for name, value in fields.items() if name not in ("x", "y")}
    assert json.loads(without(body, ["x", "y"])) == left


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_members_are_cut_in_every_encoding_that_is_read(encoding: str) -> None:
    """What `json.loads` reads of a body must not reach the engine because of how it was written."""
    body = '{"x": 1, "a": "\\ud800 日本 🎉", "y": 2}'.encode(encoding)
    assert without(body, ["x", "y"]) == '{"a": "\\ud800 日本 🎉"}'.encode(encoding)
    assert without(body, ["b"]) == body
