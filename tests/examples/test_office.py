"""The office example, end to end and short: train, analyse, apply, answer, and serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.engines.local.conftest import request
from tests.examples.running import EXAMPLES, loads, model_folder, run

from pagein.protocol import PATHS, TASK_HEADER, Capability, Endpoint

pytestmark = pytest.mark.engines

EXAMPLE = EXAMPLES / "office"
ASKED = {
    "summarise": "The car park will be painted at the weekend. Cars still there on Friday evening will be moved.",
    "grammar": "He have two meeting this afternoon.",
    "email": "order 7 is late, when will it come?",
    "translate": "The report is on the table.",
}
"""As `office.py` has them."""
TASKS = tuple(ASKED)


async def test_the_example_runs_from_training_to_answers(tmp_path: Path, start_worker: Any):
    """Each task gets an adapter part of its own, a call of one task loads no other's, and a worker answers the same."""
    model, split = model_folder("smollm2-135m-hf"), tmp_path / "split"
    trained = run(EXAMPLE / "train.py", model, tmp_path, "--steps", 2)
    assert [line.partition(":")[0] for line in trained.splitlines()[:-1]] == list(TASKS)
    mapping = tmp_path / "task_mapping.yaml"
    run("-m", "pagein", "split", "analyze", model, "--tasks", mapping, "--out", split)
    run("-m", "pagein", "split", "apply", split)
    plan = json.loads((split / "split_plan.json").read_text())
    assert {task: of["parts"] for task, of in plan["tasks"].items()} == {
        task: ["backbone", f"{task}.adapter"] for task in TASKS
    }
    said = run(EXAMPLE / "office.py", split, "grammar", "He have two meeting.")
    assert loads(said) == {"backbone": 1, **{f"{task}.adapter": int(task == "grammar") for task in TASKS}}
    told = run(EXAMPLE / "office.py", split)
    spec = {"engine": "parts", "command": None, "path": str(split), "context": 256, "threads": 2, "parallel": 2}
    child = await start_worker(**spec, ready_timeout=120.0, allowance={"ram": 2 * 1024**3})
    answers = await asyncio.gather(*(chat(child.ready.endpoint, task, text) for task, text in ASKED.items()))
    for task, answer in zip(ASKED, answers, strict=True):
        assert f"{task}: {answer}\n" in told


async def chat(endpoint: Endpoint, task: str, text: str) -> str:
    """Ask a task of a worker, as the daemon does."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
    reply = await request(endpoint, "POST", PATHS[Capability.CHAT], json=body, headers={TASK_HEADER: task})
    assert reply.status == 200, reply.body
    answer: str = reply.body["choices"][0]["message"]["content"]
    return answer
