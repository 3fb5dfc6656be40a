"""task_mapping.yaml: what it may say, and that each fault is told with its line."""

from __future__ import annotations

import pytest

from pagein.errors import ConfigError
from pagein.parts.splitting.tasks import Kind, RandomInput, parse_tasks, read_tasks

GOOD = """\
tasks:
  Summarize:
    kind: generate
    adapter: loras/sum
    samples: [Read this., [1, 2, 3]]
    max_new_tokens: 4
  see:
    kind: call
    call: vision_model.encoder
    samples:
      - inputs: {pixel_values: {shape: [1, 3, 8, 8], seed: 7}, mask: [[1, 1]]}
    heads: [visual_projection]
    reads: [summarize]
"""


def test_a_mapping_is_read():
    """Names are folded; a bare text and a bare list of ids are samples; random inputs have shapes and seeds."""
    tasks = parse_tasks(GOOD).tasks
    assert list(tasks) == ["summarize", "see"]
    assert tasks["summarize"].kind is Kind.GENERATE
    assert [one.text or one.token_ids for one in tasks["summarize"].samples] == ["Read this.", [1, 2, 3]]
    inputs = tasks["see"].samples[0].inputs
    assert inputs == {"pixel_values": RandomInput(shape=(1, 3, 8, 8), seed=7), "mask": [[1, 1]]}


def test_folders_begin_at_the_file(tmp_path):
    """A relative folder is that beside the mapping, wherever the command is called from."""
    (tmp_path / "tasks.yaml").write_text(GOOD)
    assert read_tasks(tmp_path / "tasks.yaml").tasks["summarize"].adapter == str(tmp_path / "loras/sum")


FAULTS = [
    (
        "tasks:\n  a: {kind: generate, samples: [x], adaptr: y}",
        "line 2: tasks.a.adaptr: unknown key; did you mean adapt",
    ),
    ("tasks:\n  a:\n    kind: sing\n    samples: [x]", "line 3: tasks.a.kind: must be one of generate, classify"),
    ("tasks:\n  a:\n    kind: embed", "line 2: tasks.a.samples: is needed and not there"),
    ("tasks:\n  a:\n    kind: embed\n    samples: []", "line 4: tasks.a.samples:"),
    ("tasks:\n  a:\n    kind: embed\n    samples:\n      - {text: x, token_ids: [1]}", "text and token_ids"),
    ("tasks:\n  a:\n    kind: embed\n    samples: [{inputs: {x: {shape: [0]}}}]", "line 4: tasks.a.samples[0].inputs"),
    ("tasks:\n  a: {kind: embed, samples: [x], class: token-clasification}", "did you mean token-classification?"),
    ("tasks:\n  a: {kind: embed, samples: [x], call: encode}", "go together"),
    ("tasks:\n  a: {kind: call, samples: [x]}", "go together"),
    ("tasks:\n  a: {kind: call, samples: [x], call: __class__.mro}", "is no path of attributes"),
    ("tasks:\n  a: {kind: embed, samples: [x], folder: b, adapter: c}", "adapter belongs to the model that is split"),
    ("tasks:\n  a b: {kind: embed, samples: [x]}", "is no name of a task"),
    ('tasks:\n  a: {kind: generate, samples: [x], prompt: "say"}', "0 places '{text}' for what is asked"),
    ('tasks:\n  a: {kind: generate, samples: [x], prompt: "{text}{text}"}', "2 places"),
    ('tasks:\n  a: {kind: generate, samples: [x], prompt: "{text}\\0"}', "cannot be printed"),
    ('tasks:\n  a: {kind: embed, samples: [x], prompt: "{text}"}', "prompt belongs to kind: generate"),
    ("tasks:\n  A: {kind: embed, samples: [x]}\n  a: {kind: embed, samples: [x]}", "capitals do not tell"),
    ("tasks:\n  a: {kind: embed, samples: [x], reads: [b]}", "which is no other task"),
    ("tasks: {}", "tasks:"),
    ("task: {}", "unknown key; did you mean tasks?"),
    ("", "tasks: is needed"),
    ("tasks: [", "line 1"),
]


@pytest.mark.parametrize(("text", "words"), FAULTS)
def test_faults_are_told_with_place_and_words(text, words):
    """What is wrong is named with its line and field, and nothing is guessed."""
    with pytest.raises(ConfigError) as found:
        parse_tasks(text, "tasks.yaml")
    assert words in found.value.message
    assert found.value.message.startswith("tasks.yaml: ")


def test_no_file(tmp_path):
    """A mapping that is not there is an error of its own."""
    with pytest.raises(ConfigError, match="there is no file"):
        read_tasks(tmp_path / "none.yaml")
