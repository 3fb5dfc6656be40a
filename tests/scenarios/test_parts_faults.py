"""Split models when something goes wrong: damaged files, hung and killed workers, too little memory, a bad new part.

Numbers in the docstrings are those of the situations in README.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading

import pytest

from .daemon import Later, fake
from .splits import READS, act, data_of, lazy, part_file, parts, read, split_model
from .test_orphans import ADOPT, killed

pytestmark = pytest.mark.torch

CONTEXT, PARALLEL = 64, 4
AT_ONCE = "  min_residency: 0s\n"


@pytest.fixture
def own_copy(reads_folder, tmp_path):
    """The split of classifiers, to be changed."""
    return shutil.copytree(reads_folder, tmp_path / "split")


def flip(file, at=-1):
    """Change one byte of a file in place."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_damaged_part_fails_alone(start, own_copy):
    """14: its task is refused with file and digest, every time; the others answer, and nothing of it is published."""
    file = part_file(own_copy, "topic")
    flip(file)
    d = start("2GiB", split_model("reads", own_copy))
    for _ in range(2):
        refused = read(d, "topic")
        assert (refused.status, refused.error["code"]) == (503, "part_refused")
        assert file.name in refused.error["message"]
        assert "digest" in refused.error["message"]
    for task in ("sentiment", "tag"):
        assert read(d, task).status == 200
    damaged = parts(d, "reads")["topic"]
    assert (damaged["state"], damaged["bytes"], damaged["loads"], damaged["leases"]) == ("failed", 0, 0, 0)
    assert file.name in damaged["last_error"]
    assert any(one["data"].get("event") == "refuse" for one in d.decisions("part", "reads"))
    assert len(d.decisions("load", "reads")) == 1, "no other loader is tried, and no worker is started for it"
    flip(file)
    d.until(lambda: read(d, "topic").status == 200, "the mended file to be used")
    assert parts(d, "reads")["topic"]["state"] == "hot"


def test_health_lazy_never_waits_and_never_loads(start, reads_folder):
    """18: before and while its model loads, and while its worker hangs: an answer, with the age of what it says."""
    d = start("2GiB", split_model("reads", reads_folder))
    assert lazy(d, "reads")["state"] == "absent"
    assert d.decisions() == []
    loading = Later(lambda: read(d, "tag"))
    d.until_state("reads", "loading", "resident")
    assert lazy(d, "reads")["state"] in ("loading", "resident")
    assert loading.result().status == 200
    pid = d.model("reads")["pid"]
    before = lazy(d, "reads")["parts"]["parts"]
    os.kill(pid, signal.SIGSTOP)
    try:
        hung = d.get("/health/lazy")["models"]["reads"]
        assert (hung["state"], hung["parts"]["age_seconds"] > 0) == ("resident", True)
        assert [one["state"] for one in hung["parts"]["parts"]] == [one["state"] for one in before]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert read(d, "topic").status == 200
    os.kill(pid, signal.SIGKILL)
    d.until_state("reads", "absent", "failed")
    assert {one["state"] for one in parts(d, "reads").values()} == {"absent"}


def test_a_rollout_outlives_eviction_and_not_another_configuration(start, reads_folder):
    """19: the next worker begins with what was set by hand; a configuration that says otherwise takes its place."""
    other = fake("other", "--allocate 10MiB", memory="400MiB")
    d = start("1000MiB", split_model("reads", reads_folder) + other, AT_ONCE)
    assert act(d, "reads", "rollout", {"level": "manual", "percent": 50}).status == 200
    assert d.decisions("load") == []
    assert read(d, "tag").status == 200
    first = lazy(d, "reads")["parts"]
    assert (first["level"], first["percent"]) == ("manual", 50)
    assert act(d, "reads", "rollout", {"level": "off"}).status == 200
    assert d.call("POST", "/api/reload").json["changed"] == []
    assert d.chat("other").status == 200
    d.until_state("reads", "absent")
    assert (lazy(d, "reads")["parts"]["level"], parts(d, "reads")["topic"]["state"]) == ("off", "absent")
    assert read(d, "tag").status == 200
    assert (lazy(d, "reads")["parts"]["level"], parts(d, "reads")["topic"]["state"]) == ("off", "hot")
    d.config.write_text(d.config.read_text().replace("device: cpu", "device: cpu\n    options: {level: manual}"))
    assert d.call("POST", "/api/reload").json["changed"] == ["reads"]
    d.until_state("reads", "absent")
    assert lazy(d, "reads")["parts"]["level"] == "manual"
    assert read(d, "tag").status == 200
    assert (lazy(d, "reads")["parts"]["level"], parts(d, "reads")["topic"]["state"]) == ("manual", "cold")


def test_a_worker_with_a_rollout_of_its_own_is_taken_over(start, reads_folder):
    """19: the next daemon takes it for the worker that is configured, and remembers how it was set."""
    first = start("2GiB", split_model("reads", reads_folder), supervisor=ADOPT)
    assert act(first, "reads", "rollout", {"level": "off"}).status == 200
    wanted = data_of(read(first, "topic"))
    pid = first.model("reads")["pid"]
    killed(first)
    second = start("2GiB", split_model("reads", reads_folder), supervisor=ADOPT)
    assert (second.model("reads")["state"], second.model("reads")["pid"]) == ("resident", pid)
    assert {one["state"] for one in parts(second, "reads").values()} == {"hot"}
    assert data_of(read(second, "topic")) == wanted
    assert second.decisions("load") == []
    assert second.call("POST", "/api/models/reads/unload").status == 200
    assert act(second, "reads", "parts/tag/load").json["level"] == "off"


def test_a_head_is_replaced_while_calls_run(start, own_copy, tmp_path):
    """6: each answer is all of the old head or all of the new one; a bad new file leaves the old one serving."""
    import torch
    from safetensors.torch import load_file, save_file

    from pagein.parts.splitting.joining import join_version

    d = start("2GiB", split_model("reads", own_copy))
    old = data_of(read(d, "topic"))
    tensors = load_file(part_file(own_copy, "topic"))
    torch.manual_seed(7)
    for name in ("topic-2", "topic-3"):
        save_file({key: torch.randn_like(one) for key, one in tensors.items()}, tmp_path / f"{name}.safetensors")
        join_version(own_copy, tmp_path / f"{name}.safetensors", "topic", name)
    assert act(d, "reads", "parts/topic/replace", {"by": "topic-2"}).status == 404, "it does not know the new plan yet"
    assert {"topic-2", "topic-3"} <= {one["name"] for one in act(d, "reads", "parts/refresh").json["parts"]}
    over = threading.Event()

    def call():
        seen = []
        while not over.is_set() or not seen:
            seen.append(data_of(read(d, "topic")))
        return seen

    calling = [Later(call) for _ in range(3)]
    replaced = act(d, "reads", "parts/topic/replace", {"by": "topic-2"})
    new = data_of(read(d, "topic"))
    over.set()
    seen = [one for caller in calling for one in caller.result()]
    assert replaced.status == 200, replaced.body
    assert new != old
    assert [one for one in seen if one not in (old, new)] == []
    assert parts(d, "reads")["topic-2"]["stands_for"] == "topic"
    flip(part_file(own_copy, "topic-3"))
    refused = act(d, "reads", "parts/topic/replace", {"by": "topic-3"})
    assert (refused.status, refused.error["code"]) == (503, "part_refused")
    assert data_of(read(d, "topic")) == new
    assert act(d, "reads", "parts/topic/replace", {"by": "topic"}).status == 200
    assert data_of(read(d, "topic")) == old


def test_one_task_more_than_fits_is_served_and_told(start, reads_folder):
    """13: called in turn, every call is answered within the allowance, and `/health/lazy` says that it thrashes."""
    from pagein.catalog.estimate_parts import beside
    from pagein.catalog.split.describe import describe_split

    model = split_model("reads", reads_folder, context=CONTEXT, parallel=PARALLEL)
    d = start("2GiB", model)
    wanted = {task: data_of(read(d, task)) for task in READS}
    sizes = {name: one["file_bytes"] for name, one in parts(d, "reads").items()}
    taken = beside(describe_split(reads_folder), CONTEXT, PARALLEL, "cpu")
    two = sizes["backbone"] + sum(sorted(sizes[task] for task in READS)[1:]) + 64
    told = d.call("POST", "/api/models/reads/allowance", {"memory": taken + two})
    assert told.status == 200, told.body
    loads = sum(one["loads"] for one in parts(d, "reads").values())
    for _ in range(8):
        for task in READS:
            assert data_of(read(d, task)) == wanted[task]
            now = lazy(d, "reads")["parts"]
            assert now["owned"] <= now["allowance"] == two
    thrash = lazy(d, "reads")["parts"]["thrash"]
    assert thrash["thrashing"]
    assert len(thrash["parts"]) >= 2
    again = sum(one["loads"] for one in parts(d, "reads").values()) - loads
    assert thrash["reloads"] <= again <= 8 * len(READS)
    too_small = d.call("POST", "/api/models/reads/allowance", {"memory": taken + 1024})
    assert (too_small.status, too_small.error["code"]) == (507, "part_too_large")
    assert lazy(d, "reads")["parts"]["allowance"] == two
