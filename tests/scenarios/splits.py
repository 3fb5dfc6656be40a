"""Split models behind a real daemon: how they are configured, asked and looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .daemon import Reply, Running, Stream

TAGS, LABELS = "/v1/texts/token-classifications", "/v1/texts/classifications"
TEXTS = ("Bonn", "the quick brown fox", "a")
READS = {"sentiment": LABELS, "topic": LABELS, "tag": TAGS}
"""Tasks of the split of three classifiers, with their paths."""
WRITES = ("email", "grammar", "plain")
"""Tasks of the split of a language model that write text."""
CONTEXT = 4096


def split_model(name: str, folder: Path, memory: str = "900MiB", options: str = "", **settings: object) -> str:
    """One model of a configuration; ``options`` are those of its engine, as YAML."""
    rows = {"model": folder, "memory": memory, "threads": 1, "parallel": 4, "device": "cpu", **settings}
    if options:
        rows["options"] = f"{{{options}}}"
    return f"  {name}:\n" + "".join(f"    {key}: {value}\n" for key, value in rows.items())


def read(d: Running, task: str, text: str = TEXTS[0], model: str = "reads") -> Reply:
    """Ask a task of the split of classifiers."""
    return d.call("POST", READS[task], {"model": f"{model}:{task}", "input": text})


def data_of(reply: Reply) -> Any:
    """The labels and scores of an answer, all digits of them."""
    assert reply.status == 200, reply.body
    return reply.json["data"]


def write(d: Running, task: str, prompt: str = "abc", model: str = "writes", **more: Any) -> str:
    """The text that a task of the language model writes, always the same."""
    body = {"model": f"{model}:{task}", "prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
    reply = d.call("POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    text: str = reply.json["choices"][0]["text"]
    assert text
    return text


def endless(d: Running, task: str) -> Stream:
    """A chat that writes for as long as its client stays, once its first word is there."""
    stream = Stream(d, f"writes:{task}", temperature=0, max_tokens=CONTEXT - 64).begin()
    while b'"content":"' not in stream.line().replace(b" ", b""):
        pass
    return stream


def lazy(d: Running, model: str) -> dict[str, Any]:
    """What `/health/lazy` says of one model, once it is seen to agree with itself and with the model's own page."""
    found: dict[str, Any] = d.get("/health/lazy")["models"][model]
    assert found["parts"]["owned"] == sum(one["bytes"] for one in found["parts"]["parts"])
    for one in found["parts"]["parts"]:
        assert (one["bytes"] > 0) == (one["state"] in ("hot", "loading", "draining")), one
        assert one["state"] != "hot" or one["bytes"] >= one["file_bytes"], one
    return found


def parts(d: Running, model: str) -> dict[str, dict[str, Any]]:
    """Its parts by name."""
    return {one["name"]: one for one in lazy(d, model)["parts"]["parts"]}


def own_part(d: Running, model: str, task: str) -> dict[str, Any]:
    """The part that only this task needs."""
    (found,) = [one for one in parts(d, model).values() if one["tasks"] == [task]]
    return found


def part_file(folder: Path, part: str) -> Path:
    """The file of a part."""
    (entry,) = json.loads((folder / "split_plan.json").read_text())["parts"][part]["files"].values()
    return folder / str(entry["file"])


def act(d: Running, model: str, path: str, body: Any = None) -> Reply:
    """Tell the daemon to do something with the parts of a model."""
    return d.call("POST", f"/api/models/{model}/{path}", body)
