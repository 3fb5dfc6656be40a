"""Several models on one machine: what must hold, on a real daemon with real workers.

The numbers are those of the public situations that taught each rule.
"""

import signal
import socket

import psutil

from .daemon import Later, Stream, fake


def test_count_is_no_policy(start):
    """2: eight of ten are taken, four are asked for: eight leaves; then two of three stay side by side."""
    d = start("1000MiB", fake("a", memory="800MiB") + fake("b", memory="400MiB") + fake("c", memory="300MiB"))
    assert d.chat("a").status == 200
    answer = d.chat("b")
    assert answer.status == 200
    assert answer.headers["X-Pagein-Evicted"] == "a"
    assert d.chat("c").status == 200
    states = {m["name"]: m["state"] for m in d.get("/api/status")["models"]}
    assert states == {"a": "absent", "b": "resident", "c": "resident"}


def test_what_never_fits_is_refused_and_nothing_is_evicted(start):
    """22: a hopeless request is answered with both numbers; no process starts, nobody leaves."""
    d = start("500MiB", fake("small", memory="200MiB") + fake("huge", memory="2GiB"))
    assert d.chat("small").status == 200
    pid = d.model("small")["pid"]
    refused = d.chat("huge")
    assert refused.status == 507
    assert refused.error["code"] == "model_too_large"
    assert "2.0 GiB" in refused.error["message"]
    assert d.model("small")["pid"] == pid
    assert d.decisions("load", "huge") == []
    assert d.decisions("stop") == []


def test_ten_cold_requests_start_one_process(start):
    """6: exactly one process of a cold model is ever started, and all ten answer."""
    d = start("500MiB", fake("d", memory="200MiB", parallel=10))
    answers = [Later(lambda: d.chat("d").status) for _ in range(10)]
    assert [a.result() for a in answers] == [200] * 10
    assert len(d.decisions("load", "d")) == 1


def test_two_cold_models_at_once_with_room_for_one(start):
    """6: both answer, one after the other."""
    d = start("500MiB", "".join(fake(n, memory="300MiB") for n in "abc"))
    assert d.chat("a").status == 200
    answers = [Later(lambda name=name: d.chat(name).status) for name in "bc"]
    assert [a.result() for a in answers] == [200, 200]
    assert d.pool()["highest_measured"] <= d.pool()["budget"]


def test_a_stream_is_never_cut_by_a_swap(start):
    """8: the stream on A ends whole; B waits, is told so, and is served then."""
    d = start("500MiB", fake("a", "--hold --tokens 6", memory="300MiB") + fake("b", memory="300MiB"))
    stream = Later(lambda: Stream(d, "a").begin())
    d.until_state("a", "resident")
    d.until(lambda: d.control("a", "state")["in_flight"] == 1, "the stream to reach the engine")
    waiting = Later(lambda: Stream(d, "b").begin())
    heartbeat = waiting.result()
    told = heartbeat.line()
    assert told.startswith(b":")
    assert b"a in use" in told
    d.control("a", "release")
    lines = stream.result().rest()
    assert lines[-1] == b"data: [DONE]"
    assert sum(b"word" in line for line in lines) == 6
    assert heartbeat.rest()[-1] == b"data: [DONE]"


def test_a_slow_model_does_not_stall_the_others(start):
    """9: while A hangs and B waits for its room, C keeps serving; the hung request ends at its time-out."""
    models = (
        fake("a", "--hang", memory="300MiB", timeout="2s") + fake("b", memory="300MiB") + fake("c", memory="100MiB")
    )
    d = start("500MiB", models)
    assert d.chat("c").status == 200
    hung = Later(lambda: d.chat("a"))
    d.until_state("a", "resident")
    waiting = Later(lambda: d.chat("b").status)
    assert [d.chat("c").status for _ in range(5)] == [200] * 5
    assert hung.result().status == 504
    assert hung.result().error["code"] == "worker_timeout"
    assert waiting.result() == 200


def test_pinned_models_stay(start):
    """12: what fits only without the pinned model is refused, and the refusal names it."""
    d = start("500MiB", fake("p", memory="300MiB", pin="true") + fake("x", memory="300MiB"))
    assert d.chat("p").status == 200
    pid = d.model("p")["pid"]
    refused = d.chat("x")
    assert refused.status == 507
    assert "p" in refused.error["message"]
    assert d.model("p")["pid"] == pid
    assert d.call("POST", "/api/models/p/unpin").status == 200
    assert d.chat("x").status == 200


def test_a_liar_hurts_only_itself_and_is_known_next_time(start):
    """1: it took more than it said: an idle model leaves, the others serve on, and the next load reserves the peak."""
    models = fake("liar", "--allocate 200MiB", memory="40MiB") + fake("idle", memory="250MiB")
    d = start("420MiB", models)
    assert d.chat("idle").status == 200
    assert d.chat("liar").status == 200
    learned = d.until(lambda: (m := d.model("liar"))["need_source"] == "measured" and m, "the peak to be learned")
    assert learned["need"]["ram"] > 200 * 1024**2
    assert d.pool()["highest_measured"] <= d.pool()["budget"]
    assert d.stop() == 0
    again = start("420MiB", models)
    assert again.model("liar")["need_source"] == "measured"
    assert again.model("liar")["need"]["ram"] > 200 * 1024**2


def test_a_dying_engine_is_explained_and_backed_off(start):
    """18: its last words are in the error, the others are untouched, and a manual retry is possible."""
    models = fake("broken", "--die-before-listen", memory="100MiB") + fake("ok", memory="100MiB")
    d = start("500MiB", models, "supervisor:\n  backoff_first: 30s\n")
    assert d.chat("ok").status == 200
    failed = d.chat("broken")
    assert failed.status == 503
    assert failed.error["code"] == "load_failed"
    assert "exit code 3" in failed.error["message"]
    again = d.chat("broken")
    assert again.status == 503
    assert int(again.headers["Retry-After"]) >= 1
    assert d.call("POST", "/api/models/broken/load").status == 503
    assert len(d.decisions("load", "broken")) == 2
    assert d.chat("ok").status == 200


def test_a_stream_that_breaks_ends_with_an_error_event(start):
    """18: an engine that dies in the middle of an answer never looks like a complete one."""
    d = start("500MiB", fake("a", "--die-after 1 --tokens 8", memory="100MiB"))
    lines = Stream(d, "a").begin().rest()
    assert b"data: [DONE]" not in lines
    assert b'"error"' in lines[-1]
    assert b"exit code 3" in lines[-1]


def test_a_client_that_leaves_frees_its_place(start):
    """20: disconnected while queued and while streaming: nothing stays in use, and the model can be evicted."""
    d = start("500MiB", fake("a", "--hold", memory="300MiB", parallel=1) + fake("b", memory="300MiB"))
    streams = [Stream(d, "a") for _ in range(3)]
    d.until_state("a", "resident")
    d.until(lambda: (m := d.model("a"))["leases"] == 1 and m["waiting"] == 2, "one lease and two waiting")
    for stream in streams:
        stream.hang_up()
    d.until(lambda: (m := d.model("a"))["leases"] == 0 and m["waiting"] == 0, "no lease and no waiter")
    assert d.chat("b").status == 200


def test_low_priority_is_used_and_left(start):
    """G2: a low-priority model goes after its answer, a high one is there from the start and stays."""
    models = fake("low", memory="100MiB", priority="low") + fake("high", memory="100MiB", priority="high")
    d = start("500MiB", models)
    d.until_state("high", "resident")
    assert d.chat("low").status == 200
    d.until_state("low", "absent")
    assert d.model("high")["state"] == "resident"


def test_the_queue_is_bounded_and_the_refusal_says_when_to_try_again(start):
    """G6: one more than the queue holds is refused at once."""
    d = start("500MiB", fake("a", "--hold", memory="100MiB", parallel=1, queue=1))
    first, second = Later(lambda: d.chat("a").status), None
    d.until_state("a", "resident")
    d.until(lambda: d.model("a")["leases"] == 1, "the first to be served")
    second = Later(lambda: d.chat("a").status)
    d.until(lambda: d.model("a")["waiting"] == 1, "the second to wait")
    refused = d.chat("a")
    assert refused.status == 429
    assert refused.headers["Retry-After"] == "1"
    d.control("a", "release")
    assert [first.result(), second.result()] == [200, 200]


def test_nothing_is_left_after_sigterm(start):
    """G12: SIGTERM ends every worker, also one that ignores it and one that hid a grandchild in its own session."""
    models = fake("a", "--ignore-sigterm", memory="100MiB") + fake("b", "--grandchild session", memory="100MiB")
    d = start("500MiB", models, "supervisor:\n  grace: 200ms\n")
    assert [d.chat(name).status for name in "ab"] == [200, 200]
    grandchild = psutil.Process(d.control("b", "state")["grandchild"])
    d.seen.add(grandchild)
    assert d.stop() == 0
    assert d.left() == []


def test_workers_die_with_the_daemon(start):
    """16: after kill -9 of the daemon no worker lives, and the next daemon starts clean."""
    models = fake("a", memory="100MiB") + fake("b", memory="100MiB")
    d = start("500MiB", models)
    assert [d.chat(name).status for name in "ab"] == [200, 200]
    assert len(d.tree()) >= 4
    d.stop(signal.SIGKILL)
    d.until(lambda: not d.left(), "the workers to end with their daemon")
    assert start("500MiB", models).chat("a").status == 200


def test_a_second_daemon_on_one_state_folder_is_refused(start, tmp_path):
    """G11: it ends at once and names the first one."""
    import subprocess
    import sys

    d = start("500MiB", fake("a", memory="100MiB"))
    second = subprocess.run(
        [sys.executable, "-m", "pagein", "serve", str(d.config)], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 11
    assert f"process {d.process.pid} at {d.address}" in second.stderr
    assert d.chat("a").status == 200


def test_only_loopback_is_listened_on(start):
    """Nothing but this machine can reach the daemon unless it is told so."""
    d = start("500MiB", fake("a", memory="100MiB"))
    listening = [c for c in psutil.Process(d.process.pid).net_connections("tcp") if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
    assert {c.family for c in listening} == {socket.AF_INET}
