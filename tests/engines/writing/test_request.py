"""What a request says that it reused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.daemon.blocks import KINDS
from pagein.engines.local.writer import Whose
from pagein.engines.writing.request import reused_of
from pagein.engines.writing.turns import Turn
from pagein.kv.tiers.answers import Reuse, Source, Why

pytestmark = pytest.mark.torch


ANYBODY = Whose()


def told(reuse, whose=ANYBODY):
    """What is said of a turn that found this."""
    return reused_of(Turn(0, None, whose, None, 10, reuse), whose, 1.0, 2.0)


@pytest.mark.parametrize(
    ("source", "restored"), [(Source.LIVE, 0), (Source.SHARED, 0), (Source.HOST, 7), (Source.DISK, 7)]
)
def test_what_came_back_from_below_counts_as_restored(source, restored):
    """What was still on the device does not."""
    found = told(Reuse(7, source, "7 of 9 tokens", 9))
    assert (found.cached, found.restored, found.miss) == (7, restored, None)
    assert (found.prompt_seconds, found.write_seconds) == (1.0, 2.0)


@pytest.mark.parametrize("kind", [*Why, None])
def test_a_miss_has_its_kind(kind):
    """The pool's own, whatever its words are: they are for people."""
    found = told(Reuse(0, Source.NONE, "not worth it, with other weights, is lost", 9, kind=kind))
    assert found.miss == f"{kind or 'tokens'}: not worth it, with other weights, is lost"
    assert found.miss.partition(":")[0] in KINDS


def test_what_is_not_looked_for_is_said():
    """A client's own wish, and a model with an encoder."""
    unwanted = told(Reuse(0, Source.NONE, "nothing", 9), Whose(reuse=False))
    assert (unwanted.cached, unwanted.miss.partition(":")[0]) == (0, "unwanted")
    assert told(None).miss.partition(":")[0] == "encoder"
