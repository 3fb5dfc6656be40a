"""An edited configuration on a real daemon: by SIGHUP, by request, by watching the file."""

import signal

from .daemon import Later, Stream, fake


def rewrite(d, models, budget="600MiB", more=""):
    """Write another configuration where the daemon read its own."""
    text = d.config.read_text()
    head = text[: text.index("models:")].replace(text.splitlines()[0], f"budget: {budget}", 1)
    d.config.write_text(f"{head}{more}models:\n{models}")


def test_untouched_models_run_on_and_changed_ones_drain_and_return(start):
    """Its stream ends whole with the old settings; the next request meets the new ones."""
    same, other = fake("same", memory="100MiB"), fake("other", "--hold --tokens 3", memory="100MiB")
    d = start("600MiB", same + other)
    assert d.chat("same").status == 200
    stream = Later(lambda: Stream(d, "other").begin())
    d.until(lambda: d.model("other")["leases"] == 1, "the stream")
    pid = d.model("same")["pid"]
    rewrite(d, same + fake("other", "--tokens 5", memory="120MiB") + fake("new", memory="50MiB"))
    told = d.call("POST", "/api/reload")
    assert told.status == 200
    assert (told.json["changed"], told.json["added"], told.json["unchanged"]) == (["other"], ["new"], ["same"])
    waiting = Later(lambda: d.chat("other"))
    d.control("other", "release")
    assert stream.result().rest()[-1] == b"data: [DONE]"
    assert waiting.result().json["usage"]["completion_tokens"] == 5
    assert d.chat("new").status == 200
    assert d.chat("same").status == 200
    assert d.model("same")["pid"] == pid


def test_a_wrong_file_changes_nothing_and_says_why(start):
    """Every model serves on; the answer names the fault and its line."""
    d = start("600MiB", fake("a", memory="100MiB"))
    assert d.chat("a").status == 200
    pid = d.model("a")["pid"]
    rewrite(d, fake("a", memory="lots"))
    refused = d.call("POST", "/api/reload")
    assert refused.status == 400
    assert refused.error["code"] == "invalid_config"
    assert "memory" in refused.error["message"]
    d.process.send_signal(signal.SIGHUP)
    d.until(lambda: "was not applied" in d.daemon_log(), "the log to say so")
    assert d.chat("a").status == 200
    assert d.model("a")["pid"] == pid


def test_sighup_applies_the_file(start):
    """A removed model finishes what it serves and is gone then; its name is unknown."""
    d = start("600MiB", fake("a", "--hold", memory="100MiB") + fake("b", memory="100MiB"))
    stream = Later(lambda: Stream(d, "a").begin())
    d.until(lambda: d.model("a")["leases"] == 1, "the stream")
    rewrite(d, fake("b", memory="100MiB"), budget="500MiB")
    d.process.send_signal(signal.SIGHUP)
    d.until(lambda: d.pool()["budget"] == 500 * 1024**2, "the new budget")
    assert d.chat("a").status == 404
    d.control("a", "release")
    assert stream.result().rest()[-1] == b"data: [DONE]"
    d.until(lambda: [m["name"] for m in d.get("/api/status")["models"]] == ["b"], "a to go")
    assert d.chat("b").status == 200


def test_the_file_is_watched(start):
    """`serve --watch` applies it whenever it has changed."""
    d = start("600MiB", fake("a", memory="100MiB"), arguments=["--watch"])
    rewrite(d, fake("a", memory="100MiB") + fake("new", memory="50MiB"))
    d.until(lambda: len(d.get("/api/status")["models"]) == 2, "the new model")
    assert d.chat("new").status == 200
