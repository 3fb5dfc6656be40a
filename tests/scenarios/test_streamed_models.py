"""A model that can live with other bytes, on a real daemon: its memory changes and its process stays."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engines.writing.conftest import KINDS, write_tokeniser

from .test_orphans import ADOPT, killed
from .test_reload import rewrite

pytestmark = pytest.mark.torch
MIB = 1024**2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder that transformers wrote."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    model = KINDS["llama"](transformers).to(torch.bfloat16)
    model.lm_head.weight.data *= 8  # so that greedy text does not repeat one token
    model.save_pretrained(folder)
    write_tokeniser(folder)
    return folder


def models(folder, memory):
    """The configuration of it."""
    return f"  tiny: {{model: {folder}, memory: {memory}, context: 128, threads: 2, device: cpu}}\n"


def said(d):
    """What it writes, always the same."""
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 16, "temperature": 0}
    reply = d.call("POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def test_edited_memory_is_taken_without_a_reload(start, tiny):
    """Larger and smaller; what the worker refuses, as less than it can do with, reloads it, and is refused then."""
    d = start("3GiB", models(tiny, "900MiB"))
    wanted, pid = said(d), d.model("tiny")["pid"]
    for memory in ("1000MiB", "800MiB"):
        rewrite(d, models(tiny, memory), budget="3GiB")
        assert d.call("POST", "/api/reload").json["changed"] == ["tiny"]
        d.until(lambda size=memory: d.model("tiny")["need"] == {"ram": int(size[:-3]) * MIB}, f"{memory} to be taken")
        assert d.model("tiny")["pid"] == pid
        assert said(d) == wanted
    assert len(d.decisions("load")) == 1
    rewrite(d, models(tiny, "100MiB"), budget="3GiB")
    d.call("POST", "/api/reload")
    d.until(lambda: d.model("tiny")["need"] == {"ram": 100 * MIB}, "it to leave")
    assert any("its allowance stays: streaming" in one["reason"] for one in d.decisions(model="tiny"))
    d.until_state("tiny", "absent")


def test_a_set_allowance_outlives_the_daemon_and_ends_with_the_worker(start, tiny):
    """The next daemon charges what was set, not what is configured; a load after that has the configured bytes."""
    first = start("3GiB", models(tiny, "900MiB"), supervisor=ADOPT)
    wanted, pid = said(first), first.model("tiny")["pid"]
    answer = first.call("POST", "/api/models/tiny/allowance", {"memory": "1100MiB"})
    assert (answer.status, answer.json["held"]["ram"]) == (200, 1100 * MIB)
    assert any("memory" in line for line in answer.json["plan"])
    assert first.call("POST", "/api/reload").status == 200
    assert first.model("tiny")["need"] == {"ram": 1100 * MIB}
    killed(first)
    second = start("3GiB", models(tiny, "900MiB"), supervisor=ADOPT)
    taken = second.model("tiny")
    assert (taken["state"], taken["pid"], taken["held"]["ram"]) == ("resident", pid, 1100 * MIB)
    assert said(second) == wanted
    assert second.call("POST", "/api/models/tiny/unload").status == 200
    assert second.model("tiny")["need"] == {"ram": 900 * MIB}
    second.tree()
    second.seen |= first.seen
    assert second.stop(signal.SIGTERM) == 0
    assert second.left() == []


def test_what_is_refused_has_both_numbers(start, tiny):
    """More than is free, less than it can do with, another pool: nothing changes."""
    d = start("1200MiB", models(tiny, "900MiB"))
    wanted = said(d)
    more = d.call("POST", "/api/models/tiny/allowance", {"memory": "2GiB"})
    assert (more.status, more.error["code"]) == (503, "no_room")
    assert more.error["need_bytes"] == (2048 - 900) * MIB
    less = d.call("POST", "/api/models/tiny/allowance", {"memory": "100MiB"})
    assert (less.status, less.error["code"], less.error["memory_bytes"]) == (507, "plan_too_large", 100 * MIB)
    other = d.call("POST", "/api/models/tiny/allowance", {"memory": "800MiB", "pool": "cuda:0"})
    assert "only what it has of ram" in other.error["message"]
    assert d.model("tiny")["held"]["ram"] == 900 * MIB
    assert said(d) == wanted
