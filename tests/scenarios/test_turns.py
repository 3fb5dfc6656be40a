"""Whose turn it is, on a real daemon: storms, agent loops, starvation, time to live."""

import threading

import psutil
import pytest

from .daemon import Later, Stream, fake

MIB = 1024**2
QUICK = "  min_residency: 0s\n  patience: 1s\n"


def loads(d, name):
    return len(d.decisions("load", name))


def test_a_swap_storm_is_served_in_batches(start):
    """3: twenty clients alternate between two models that exclude each other; loads are few, and none serves nobody."""
    d = start("500MiB", "".join(fake(n, memory="300MiB", parallel=4) for n in "ab"), "  patience: 500ms\n")
    answers = [Later(lambda i=i: [d.chat("ab"[(i + k) % 2]).status for k in range(5)]) for i in range(20)]
    assert [a.result() for a in answers] == [[200] * 5] * 20
    total = loads(d, "a") + loads(d, "b")
    assert total <= 20, "a hundred requests in at most twenty batches"
    assert d.model("a")["uses"] + d.model("b")["uses"] == 100
    assert all(d.model(n)["loads"] == loads(d, n) for n in "ab")


def test_two_agent_loops_do_not_thrash(start):
    """4: each loop pauses for its tools; its model is held meanwhile, and both loops get on."""
    models = "".join(fake(n, "--load-seconds 0.3", memory="300MiB") for n in "ab")
    d = start("500MiB", models, "  patience: 1500ms\n  min_residency: 500ms\n")
    pace = threading.Event()

    def loop(name):
        waits = []
        for _ in range(20):
            answer = d.chat(name)
            assert answer.status == 200
            waits.append(int(answer.headers["X-Pagein-Queue-Ms"]))
            pace.wait(0.12)  # the tool runs
        return waits

    loops = [Later(lambda n=n: loop(n)) for n in "ab"]
    waits = [loop.result() for loop in loops]
    assert loads(d, "a") + loads(d, "b") <= 12, "forty requests in a few turns"
    assert all(sum(wait == 0 or wait < 100 for wait in row) >= 12 for row in waits), "most found their model in place"


def test_a_constant_stream_of_requests_does_not_starve_another_model(start):
    """5: overlapping traffic on A never ends; one request for B is served all the same."""
    d = start("500MiB", fake("a", memory="300MiB", parallel=2) + fake("b", memory="300MiB"), QUICK)
    assert d.chat("a").status == 200
    enough = threading.Event()

    def traffic():
        count = 0
        while not enough.is_set():
            assert d.chat("a").status == 200
            count += 1
        return count

    clients = [Later(traffic) for _ in range(3)]
    d.until(lambda: d.model("a")["uses"] > 10, "traffic")
    assert d.chat("b").status == 200
    enough.set()
    assert all(client.result() > 0 for client in clients)
    assert "b" in {r["data"].get("evicted_for") for r in d.decisions("stop", "a")}


def test_a_model_is_not_evicted_before_its_first_use(start):
    """7: B is asked for while A loads; A serves who asked for it, then leaves."""
    models = fake("a", "--unhealthy", memory="300MiB") + fake("b", memory="300MiB")
    d = start("500MiB", models, QUICK)
    first = Later(lambda: d.chat("a"))
    d.until_state("a", "loading")
    d.until(lambda: d.control_of_loading("a", "state"), "the engine to listen")
    second = Later(lambda: d.chat("b"))
    d.until(lambda: d.model("b")["waiting"] == 1, "b to wait")
    d.control_of_loading("a", "healthy")
    assert first.result().status == 200
    assert second.result().status == 200
    kinds = [(r["kind"], r["model"]) for r in d.decisions() if r["kind"] in ("grant", "stop")]
    assert kinds == [("grant", "a"), ("stop", "a"), ("grant", "b")]


def test_a_time_to_live_that_ends_as_a_request_comes_loses_nothing(start):
    """10: 500 requests come right when their model's time is up; all answer, and nothing wedges."""
    names = [f"m{number}" for number in range(4)]
    models = "".join(fake(n, "--slow-stop 0.02", memory="60MiB", keep_alive="20ms") for n in names)
    d = start("500MiB", models, "  min_residency: 0s\n")
    pace = threading.Event()

    def client(name):
        statuses = []
        for turn in range(125):
            statuses.append(d.chat(name).status)
            pace.wait(0.012 + 0.0005 * (turn % 40))
        return statuses

    clients = [Later(lambda n=n: client(n)) for n in names]
    assert [c.result() for c in clients] == [[200] * 125] * 4
    for name in names:
        d.until_state(name, "absent")
        assert d.model(name)["uses"] == 125
    assert not [p for p in psutil.Process(d.process.pid).children(recursive=True) if "--name" in p.cmdline()]


def test_time_to_live_counts_from_the_last_use_and_ends_nothing_in_use(start):
    """11: a generation longer than the time to live is not cut, nor is a load longer than it interrupted."""
    models = fake("a", "--hold --tokens 4", memory="100MiB", keep_alive="100ms")
    models += fake("slow", "--load-seconds 0.5", memory="100MiB", keep_alive="100ms")
    d = start("500MiB", models)
    slow = Later(lambda: d.chat("slow"))
    stream = Later(lambda: Stream(d, "a").begin())
    d.until(lambda: d.model("a")["leases"] == 1, "the stream")
    assert slow.result().status == 200
    d.until_state("slow", "absent")
    assert d.model("a")["state"] == "resident", "its stream is longer than its time to live"
    d.control("a", "release")
    assert stream.result().rest()[-1] == b"data: [DONE]"
    d.until_state("a", "absent")
    assert "keep_alive is 100 ms" in d.decisions("stop", "a")[-1]["reason"]


@pytest.mark.parametrize("wish", [{"keep_alive": 0}, {"keep_alive": "50ms"}])
def test_a_request_may_wish_when_its_model_leaves(start, wish):
    """13: in place of what is configured; -1 keeps it, and neither shows to the engine."""
    d = start("500MiB", fake("a", memory="100MiB", keep_alive="-1"))
    assert d.chat("a", **wish).status == 200
    d.until_state("a", "absent")
    assert d.chat("a", keep_alive=-1).status == 200
    assert d.model("a")["state"] == "resident"
    bad = d.chat("a", keep_alive="soon")
    assert bad.status == 400
    assert "keep_alive" in bad.error["message"]


def test_a_context_wish_never_reloads_a_model(start):
    """14: clients that wish 20k and 8k alternate on one process; more than is loaded is refused with both numbers."""
    d = start("500MiB", fake("a", memory="100MiB", context=20000))
    assert [d.chat("a", num_ctx=n).status for n in (20000, 8000) * 5] == [200] * 10
    assert loads(d, "a") == 1
    refused = d.chat("a", num_ctx=30000)
    assert refused.status == 400
    assert "30000" in refused.error["message"]
    assert "20000" in refused.error["message"]
    assert loads(d, "a") == 1


def test_who_waits_for_a_cold_load_hears_of_it(start):
    """19: a stream gets comments and no false content; without one, 503 and Retry-After while the load goes on."""
    d = start("500MiB", fake("a", "--unhealthy", memory="100MiB"), server="  plain_wait: 300ms\n")
    stream = Later(lambda: Stream(d, "a").begin())
    refused = d.chat("a")
    assert refused.status == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.error["code"] == "wait_timeout"
    assert d.model("a")["state"] == "loading", "the load goes on"
    answer = stream.result()
    first = answer.line()
    assert first.startswith(b": waiting for a")
    d.control_of_loading("a", "healthy")
    lines = answer.rest()
    assert lines[-1] == b"data: [DONE]"
    assert d.chat("a").status == 200
    assert loads(d, "a") == 1


def test_an_embedder_beside_a_large_model_is_never_reloaded(start):
    """22: both fit, and retrieval alternates between them; nothing is loaded twice."""
    d = start("600MiB", fake("llm", memory="350MiB") + fake("embedder", memory="60MiB"))
    for _ in range(100):
        answer = d.call("POST", "/v1/embeddings", {"model": "embedder", "input": "what"})
        assert answer.status == 200
        assert d.chat("llm").status == 200
    assert (loads(d, "llm"), loads(d, "embedder")) == (1, 1)
