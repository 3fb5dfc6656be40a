"""What a request says that it reused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.engines.local.writer import Whose
from pagein.engines.writing.request import reused_of
from pagein.engines.writing.turns import Turn
from pagein.kv.cache.answers import Reuse, Source
from pagein.kv.worth import Pace

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


def test_a_miss_has_its_kind():
    """By the pool's own words for it: slower by measured speeds, other settings, damaged, other tokens."""
    pace = Pace()
    pace.prefilled(10_000, 0.001)
    slower = pace.can_restore(10, 10**9).reason
    for reason, kind in (
        (slower, "slower"),
        ("computed with other weights (was a, is b)", "settings"),
        ("KV block 3 of 'full' is lost: it does not verify", "damaged"),
        ("nothing that is known begins like this prompt", "tokens"),
    ):
        assert told(Reuse(0, Source.NONE, reason, 9)).miss == f"{kind}: {reason}"


def test_what_is_not_looked_for_is_said():
    """A client's own wish, and a model with an encoder."""
    unwanted = told(Reuse(0, Source.NONE, "nothing", 9), Whose(reuse=False))
    assert (unwanted.cached, unwanted.miss.partition(":")[0]) == (0, "unwanted")
    assert told(None).miss.partition(":")[0] == "encoder"
