"""Engines that fail in every way: each failure is bounded and explained, and hurts nobody else.

In each scenario a second model, `ok`, answers all the time with the same process.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil

from tests.fake_garbage import ENDLESS, FIXED, KEPT

from .daemon import Later, Stream, fake

MIB = 1024**2
QUICK = "supervisor:\n  grace: 200ms\n  backoff_first: 20s\n  backoff_max: 30s\n"


def ok(**settings):
    return fake("ok", memory="60MiB", **settings)


def begin(start, models, more=QUICK, budget="1500MiB"):
    """A daemon whose model `ok` serves; returns it and that model's process."""
    d = start(budget, ok() + models, more)
    assert d.chat("ok").status == 200
    return d, d.model("ok")["pid"]


def assert_unharmed(d, pid):
    """`ok` serves with the process that it had, and no ended process of the daemon stays uncollected."""
    assert d.chat("ok").status == 200
    assert d.model("ok")["pid"] == pid
    d.until(lambda: not zombies(d), "ended processes to be collected")


def zombies(d):
    return [p for p in psutil.Process(d.process.pid).children(recursive=True) if status_of(p) == psutil.STATUS_ZOMBIE]


def status_of(process):
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def is_gone(process):
    """Whether a process has ended; that init collects it late is not Pagein's doing."""
    return not process.is_running() or status_of(process) in (None, psutil.STATUS_ZOMBIE)


def until_only_ok_runs(d):
    """The processes of every other model are gone: what is left are `ok`'s two and a spare worker."""
    d.until(lambda: len(psutil.Process(d.process.pid).children(recursive=True)) <= 3, "the broken engines to be gone")


def last_event(lines):
    """The error of a stream's last event; there must be no end mark beside it."""
    assert b"data: [DONE]" not in lines
    return json.loads(lines[-1].removeprefix(b"data: "))["error"]


# ── deaths ──────────────────────────────────────────────────────────────────────────────────────


DIES = {
    "first": ("--die-before-listen", ["exit code 3 before it was ready", "fake engine: something is missing"]),
    "midway": ("--die-while-loading 3", ["exit code 3 before it was ready", "fake engine: a layer is missing"]),
    "killed": ("--die-while-loading 2 --exit-code -9", ["SIGKILL", "fake engine: a layer is missing"]),
}


def test_engines_that_die_while_they_start(start, tmp_path):
    """18 a, b: five times in a row exit and last words are told; back-off has a cap; a cured one loads by hand."""
    cure = tmp_path / "cure"
    models = "".join(fake(name, f"{how} --cure {cure}", memory="60MiB") for name, (how, _) in DIES.items())
    d, pid = begin(start, models)
    for attempt in range(5):
        ask = d.chat if attempt == 0 else lambda name: d.call("POST", f"/api/models/{name}/load")
        asked = {name: Later(lambda name=name, ask=ask: ask(name)) for name in DIES}
        for name, (_, words) in DIES.items():
            failed = asked[name].result()
            assert (failed.status, failed.error["code"]) == (503, "load_failed")
            assert [word for word in words if word not in failed.error["message"]] == []
        assert_unharmed(d, pid)
    for name in DIES:
        seen = d.until_state(name, "failed")
        assert 20 < seen["retry_in_seconds"] <= 30
        waiting = d.chat(name)
        assert waiting.status == 503
        assert 20 < int(waiting.headers["Retry-After"]) <= 30
        assert len(d.decisions("load", name)) == 5
    until_only_ok_runs(d)
    assert_unharmed(d, pid)
    cure.touch()
    assert [d.call("POST", f"/api/models/{name}/load").status for name in DIES] == [200, 200, 200]
    assert [d.chat(name).status for name in DIES] == [200, 200, 200]


def test_an_engine_that_dies_amid_a_stream(start, tmp_path):
    """18 c: five times in a row the stream ends with the exit as its last word, never with a mark of its end."""
    cure = tmp_path / "cure"
    d, pid = begin(start, fake("bad", f"--die-after 1 --tokens 8 --cure {cure}", memory="60MiB"))
    for _ in range(5):
        assert d.call("POST", "/api/models/bad/load").status == 200
        lines = Stream(d, "bad").begin().rest()
        assert sum(b"word" in line for line in lines) <= 4
        error = last_event(lines)
        assert error["code"] == "worker_died"
        assert "exit code 3" in error["message"]
        d.until_state("bad", "absent", "failed")
    assert_unharmed(d, pid)
    until_only_ok_runs(d)
    cure.touch()
    assert d.call("POST", "/api/models/bad/load").status == 200
    assert Stream(d, "bad").begin().rest()[-1] == b"data: [DONE]"


def test_an_engine_that_dies_idle(start):
    """Nobody asked it anything: its end is noticed and told, its memory is given back, and it can be loaded again."""
    d, pid = begin(start, fake("bad", "--grandchild hidden", memory="60MiB"))
    assert d.chat("bad").status == 200
    hidden = psutil.Process(d.control("bad", "state")["grandchild"])
    d.seen.add(hidden)
    Later(lambda: d.control("bad", "die"))
    d.until_state("bad", "absent", "failed")
    assert any("exit code 3" in decision["reason"] for decision in d.decisions(model="bad"))
    d.until(lambda: is_gone(hidden), "what it forked and hid to end with it")
    assert_unharmed(d, pid)
    assert d.call("POST", "/api/models/bad/load").status == 200
    assert d.chat("bad").status == 200


# ── loads that come to nothing ──────────────────────────────────────────────────────────────────

NEVER_READY = {
    "unhealthy": "--unhealthy",
    "hanging": "--hang-health",
    "silent": "--garbage-health close",
    "foreign-tongue": "--garbage-health not-http",
    "endless": "--garbage-health endless-continue",
    "deaf": "--load-gate {gate}",
}


def test_engines_that_never_become_ready(start, tmp_path):
    """All at once: each is given up at the bound, no process stays, and each can be tried again."""
    import os

    gate, cure = tmp_path / "gate", tmp_path / "cure"
    os.mkfifo(gate)
    models = "".join(
        fake(name, f"{switches.format(gate=gate)} --cure {cure}", memory="60MiB")
        for name, switches in NEVER_READY.items()
    )
    d, pid = begin(start, models, QUICK + "  ready_timeout: 4s\n")
    asked = {name: Later(lambda name=name: d.chat(name)) for name in NEVER_READY}
    d.until(lambda: all(d.model(name)["state"] == "loading" for name in NEVER_READY), "all of them to load")
    assert_unharmed(d, pid)
    for name in NEVER_READY:
        error = asked[name].result().error
        assert error["code"] == "load_failed"
        assert "not ready within 4.0 s" in error["message"]
        d.until_state(name, "failed")
    until_only_ok_runs(d)
    assert_unharmed(d, pid)
    cure.touch()
    again = [Later(lambda name=name: d.call("POST", f"/api/models/{name}/load")) for name in ("silent", "hanging")]
    assert [answer.result().status for answer in again] == [200, 200]


class Squatter:
    """Another program on a port, which answers everything and remembers what it was asked."""

    def __init__(self):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.command)
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, *words):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


def test_another_server_on_its_port(start):
    """What answers there gets no request of a client: it is told apart from our own engine, and named by its port."""
    other = Squatter()
    sleeper = json.dumps(f'{sys.executable} -c "import signal; signal.pause()"')
    bad = f"  bad:\n    command: {sleeper}\n    memory: 60MiB\n    options:\n      port: {other.port}\n"
    d, pid = begin(start, bad)
    for failed in (d.chat("bad"), d.call("POST", "/api/models/bad/load")):
        assert failed.status == 503
        assert f"another program listens on port {other.port}" in failed.error["message"]
    assert "POST" not in other.asked
    assert_unharmed(d, pid)
    until_only_ok_runs(d)
    other.server.shutdown()
    other.server.server_close()


# ── nonsense ────────────────────────────────────────────────────────────────────────────────────

STALLS = {"slow-head", "slow-body", "slow-stream"}
AT_ONCE = sorted({*FIXED, *ENDLESS, *KEPT} - STALLS - {"huge-json", "second-answer", "json-stream"})


ITS_CODES = ("bad_worker_answer", "worker_died", "worker_error")


def ask_for_nonsense(d, kind):
    """Ask for one kind of nonsense, whole and as a stream; returns the two errors that came."""
    whole = d.chat("bad", garbage=kind)
    assert whole.status >= 400
    stream = Stream(d, "bad", garbage=kind).begin()
    lines = stream.rest()
    stream.connection.close()
    return whole.error, last_event(lines) if stream.response.status == 200 else json.loads(lines[-1])["error"]


def test_nonsense_is_never_passed_on_as_an_answer(start):
    """Text, half JSON, wrong lengths, endless heads: each is an error of the API, and the engine may go on."""
    d, pid = begin(start, fake("bad", memory="60MiB", parallel=40))
    assert d.chat("bad").status == 200
    worker = d.model("bad")["pid"]
    asked = {kind: Later(lambda kind=kind: ask_for_nonsense(d, kind)) for kind in AT_ONCE}
    assert_unharmed(d, pid)
    codes = {kind: [error["code"] for error in errors.result()] for kind, errors in asked.items()}
    assert {kind: got for kind, got in codes.items() if not set(got) <= set(ITS_CODES)} == {}
    for _ in range(3):
        assert d.chat("bad", garbage="second-answer").json["choices"] == []
        assert d.chat("bad").json["choices"][0]["message"]["content"].startswith("word0")
    assert d.model("bad")["pid"] == worker
    assert d.model("bad")["leases"] == 0
    assert_unharmed(d, pid)


def test_answers_that_stall(start):
    """Half a head, half a body, one event, and then nothing: bounded by the model's time-out, and told with it."""
    d, pid = begin(start, "".join(fake(k, f"--garbage {k}", memory="60MiB", timeout="500ms") for k in STALLS))
    stream = Later(lambda: last_event(Stream(d, "slow-stream").begin().rest()))
    plain = [Later(lambda kind=kind: d.chat(kind)) for kind in STALLS if kind != "slow-stream"]
    assert [answer.result().status for answer in plain] == [504] * 2
    for error in (stream.result(), *(answer.result().error for answer in plain)):
        assert (error["code"], error["timeout_seconds"]) == ("worker_timeout", 0.5)
    d.until(lambda: sum(d.model(kind)["leases"] for kind in STALLS) == 0, "the leases to come back")
    assert_unharmed(d, pid)


def test_a_body_without_end_takes_no_memory(start):
    """It is passed on as fast as the client reads and no faster; when the client leaves, it ends."""
    d, pid = begin(start, fake("bad", "--garbage huge-json", memory="60MiB"))
    daemon = psutil.Process(d.process.pid)
    assert d.call("POST", "/api/models/bad/load").status == 200
    before = daemon.memory_info().rss
    stream = Stream(d, "bad", stream=False).begin()
    assert len(stream.response.read(64 * MIB)) == 64 * MIB
    assert daemon.memory_info().rss - before < 24 * MIB
    assert_unharmed(d, pid)
    stream.hang_up()
    d.until(lambda: d.model("bad")["leases"] == 0, "the lease to come back")
    assert_unharmed(d, pid)


# ── hangs ───────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_accepts_and_never_answers(start):
    """9: at the time-out its client is told, the engine is ended, C serves throughout, and B gets its room."""
    models = fake("a", "--hang --ignore-sigterm", memory="300MiB", timeout="500ms") + fake("b", memory="300MiB")
    d, pid = begin(start, models, budget="500MiB")
    hung = Later(lambda: d.chat("a"))
    engine = psutil.Process(d.until_state("a", "resident")["pid"])
    waiting = Later(lambda: d.chat("b").status)
    while not hung.done:
        assert d.chat("ok").status == 200
    answer = hung.result()
    assert (answer.status, answer.error["code"], answer.error["timeout_seconds"]) == (504, "worker_timeout", 0.5)
    assert waiting.result() == 200
    d.until(lambda: is_gone(engine), "the hung engine to be gone")
    assert_unharmed(d, pid)
    said = [decision["reason"] for decision in d.decisions(model="a")]
    assert any("hangs" in reason for reason in said), said


def test_a_hung_engine_is_ended_though_nobody_needs_its_room(start, tmp_path):
    """9: it answers health and does no work: the next request is not given to the same process."""
    cure = tmp_path / "cure"
    d, pid = begin(start, fake("a", f"--hang --cure {cure}", memory="60MiB", timeout="500ms"))
    hung = Later(lambda: Stream(d, "a").begin().rest())
    engine = psutil.Process(d.until_state("a", "resident")["pid"])
    error = last_event(hung.result())
    assert (error["code"], error["timeout_seconds"]) == ("worker_timeout", 0.5)
    d.until(lambda: is_gone(engine), "the hung engine to be gone")
    until_only_ok_runs(d)
    cure.touch()
    assert d.call("POST", "/api/models/a/load").status == 200
    assert d.chat("a").status == 200
    assert_unharmed(d, pid)


# ── ends and floods ─────────────────────────────────────────────────────────────────────────────


def test_engines_that_ignore_their_end_and_hide_their_children(start):
    """Unloaded, their whole trees are gone after the grace, and their memory is back."""
    kinds = ("session", "orphan", "hidden")
    models = "".join(fake(kind, f"--ignore-sigterm --grandchild {kind}", memory="60MiB") for kind in kinds)
    d, pid = begin(start, models)
    assert [d.chat(kind).status for kind in kinds] == [200, 200, 200]
    children = [psutil.Process(d.control(kind, "state")["grandchild"]) for kind in kinds]
    d.seen.update(children)
    unloads = [Later(lambda kind=kind: d.call("POST", f"/api/models/{kind}/unload").status) for kind in kinds]
    assert [unload.result() for unload in unloads] == [200, 200, 200]
    assert [child for child in children if not is_gone(child)] == []
    assert [d.model(kind)["held"].get("ram", 0) for kind in kinds] == [0, 0, 0]
    until_only_ok_runs(d)
    assert_unharmed(d, pid)


def test_engines_that_print_without_end(start):
    """Pipes filled by megabytes without a line end, and lines for ever: they serve on, and their logs are bounded."""
    models = fake("line", "--flood-line 4MiB", memory="60MiB") + fake("lines", "--flood 4MiB", memory="60MiB")
    models += fake("ever", "--flood-forever", memory="60MiB")
    models += fake("last", "--flood-line 1MiB --die-before-listen", memory="60MiB")
    d, pid = begin(start, models, QUICK + "  log_bytes: 256KiB\n  log_files: 2\n")
    answers = [Later(lambda name=name: d.chat(name).status) for name in ("ever", "line", "lines")]
    assert [a.result() for a in answers] == [200, 200, 200]
    assert_unharmed(d, pid)
    failed = d.chat("last")
    assert "fake engine: something is missing" in failed.error["message"]
    assert len(failed.error["message"]) < 20_000
    assert d.chat("ever").status == 200
    sizes = [path.stat().st_size for path in (d.state / "logs").iterdir()]
    assert max(sizes) <= 256 * 1024
    assert len(sizes) <= 5 * 3


# ── impatient clients ───────────────────────────────────────────────────────────────────────────


def test_clients_that_leave_at_any_moment(start):
    """20: queued, loading, streaming: nothing stays in use, and the model can be evicted afterwards."""
    models = fake("a", "--hold --hold-after 2", memory="300MiB", parallel=4) + fake("b", memory="300MiB")
    d, pid = begin(start, models, budget="500MiB")
    loading = [Stream(d, "a") for _ in range(10)]
    d.until(lambda: d.model("a")["waiting"] + d.model("a")["leases"] == 10, "ten to ask")
    for stream in loading[::2]:
        stream.hang_up()
    d.until_state("a", "resident")
    queued = [Stream(d, "a") for _ in range(40)]
    d.until(lambda: (m := d.model("a"))["leases"] == 4 and m["waiting"] == 41, "four to be served")
    for number, stream in enumerate([*queued, *loading[1::2]]):
        if number % 3 == 0 and d.model("a")["leases"]:
            d.control("a", "release", "1")
        stream.hang_up()
    d.until(lambda: (m := d.model("a"))["leases"] == 0 and m["waiting"] == 0, "no lease and no waiter")
    assert d.chat("b").status == 200
    assert d.model("a")["state"] == "absent"
    assert_unharmed(d, pid)


def test_a_load_that_nobody_wants_any_more(start):
    """20: its client left while it loads; somebody else needs the room, so the load is called off."""
    models = fake("a", "--unhealthy", memory="300MiB") + fake("b", memory="300MiB")
    d, pid = begin(start, models, budget="500MiB")
    stream = Stream(d, "a").begin()
    d.until_state("a", "loading")
    stream.hang_up()
    d.until(lambda: d.model("a")["waiting"] == 0, "the client to be gone")
    assert d.chat("b").status == 200
    assert_unharmed(d, pid)
