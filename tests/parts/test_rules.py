"""The three rules, on influence matrices made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagein.catalog.split.plan import Role
from pagein.errors import SplitBroken
from pagein.parts.splitting.rules import BACKBONE, Influence, TensorUse, assign, shared_name

MIB = 1024**2
SAMPLES = {"summarize": 3, "grammar": 3, "tag": 2}


def use(nbytes: int, *tasks: str, readers: tuple[str, ...] = (), **calls: int) -> TensorUse:
    """A tensor that these tasks' calls always need, or as often as said."""
    return TensorUse(nbytes, {**{task: SAMPLES[task] for task in tasks}, **calls}, frozenset(readers))


def split(tied: tuple[tuple[str, ...], ...] = (), **tensors: TensorUse):
    return assign(Influence(SAMPLES, tensors, tied))


def test_what_one_task_uses_alone_is_its_part():
    """Used by all: backbone; by one alone, in every call: that task's part; by some: a part that they share."""
    found = split(
        body=use(100 * MIB, *SAMPLES),
        head=use(9 * MIB, "tag"),
        bias=use(1, "tag"),
        decoder=use(50 * MIB, "summarize", "grammar"),
        lm=use(20 * MIB, "summarize"),
    )
    assert {name: part.tensors for name, part in found.parts.items()} == {
        BACKBONE: ("body",),
        "shared.grammar.summarize": ("decoder",),
        "summarize": ("lm",),
        "tag": ("head", "bias"),
    }
    assert found.parts["shared.grammar.summarize"].role is Role.SHARED
    assert found.tasks["summarize"] == (BACKBONE, "shared.grammar.summarize", "summarize")
    assert found.tasks["grammar"] == (BACKBONE, "shared.grammar.summarize")
    assert found.tasks["tag"] == (BACKBONE, "tag")
    assert found.kept == ()
    assert sum(part.nbytes for part in found.parts.values()) == found.nbytes


def test_rule_1_an_output_that_another_task_reads():
    """What another task reads the output of stays in the backbone, with the reason."""
    found = split(body=use(MIB, *SAMPLES), encoder=use(5 * MIB, "tag", readers=("grammar",)))
    assert found.parts[BACKBONE].tensors == ("body", "encoder")
    assert (found.kept[0].rule, found.kept[0].tensor) == (1, "encoder")
    assert "'grammar' reads what 'tag' computes" in found.kept[0].reason


def test_rule_1_readers_that_use_it_anyhow_are_no_strangers():
    """A task that owns a tensor may read what is computed from it."""
    found = split(body=use(MIB, *SAMPLES), head=use(5 * MIB, "tag", readers=("tag",)))
    assert found.parts["tag"].tensors == ("head",)


def test_rule_2_tied_tensors_are_one():
    """Names of one tensor are stored once, and whoever uses one of them uses the tensor."""
    found = split(
        tied=(("embed", "lm"),), embed=use(30 * MIB, *SAMPLES), lm=use(30 * MIB, "summarize"), head=use(MIB, "tag")
    )
    assert found.parts[BACKBONE].tensors == ("embed",)
    assert found.nbytes == 31 * MIB
    assert found.tied == (("embed", "lm"),)


def test_rule_2_tied_over_two_tasks_are_shared():
    """A tensor that two tasks know by two names is in the part that both share, once."""
    found = split(tied=(("a", "b"),), body=use(MIB, *SAMPLES), a=use(5 * MIB, "grammar"), b=use(5 * MIB, "tag"))
    assert found.parts["shared.grammar.tag"].tensors == ("a",)


def test_rule_3_a_branch_that_not_every_call_takes():
    """What only some calls of a task need stays in the backbone, so that a part is always needed whole."""
    found = split(body=use(MIB, *SAMPLES), branch=use(5 * MIB, tag=1), other=use(5 * MIB, "grammar", tag=1))
    assert found.parts[BACKBONE].tensors == ("body", "branch", "other")
    assert {one.rule for one in found.kept} == {3}
    assert found.kept[0].reason == "1 of 2 calls of 'tag' need it"


def test_what_nobody_uses_is_reported_and_kept():
    """Tensors that no sample touched stay with the backbone: a sample may have been missing."""
    found = split(body=use(MIB, *SAMPLES), head=use(MIB, "tag"), old=use(7 * MIB))
    assert found.untouched == ("old",)
    assert "old" in found.parts[BACKBONE].tensors
    assert any("1 tensors (7.0 MiB) were used by no task" in line for line in found.verdict())


def test_a_small_shared_group_is_not_worth_a_part():
    """Below the least size shared tensors stay in the backbone; a task's own are its part however small."""
    found = split(body=use(MIB, *SAMPLES), norm=use(1000, "tag", "grammar"), scale=use(4, "tag"))
    assert set(found.parts) == {BACKBONE, "tag"}
    assert "share only 1000 B: not worth" in found.kept[0].reason
    sure = assign(Influence(SAMPLES, {"norm": use(1000, "tag", "grammar"), "scale": use(4, "tag")}), least_shared=1)
    assert "shared.grammar.tag" in sure.parts


def test_a_prompt_task_model_saves_nothing():
    """Where the task is in the prompt, every task uses all weights, and the verdict says so."""
    found = split(body=use(100 * MIB, *SAMPLES), head=use(MIB, "tag"))
    assert found.saves_nothing
    assert found.verdict()[-1] == "the split saves nothing: every task needs the same weights"
    assert "grammar: needs 100 MiB, 99.0 % of 101 MiB: saves nothing" in found.verdict()


def test_savings_are_said_by_task():
    """Each task's line has both numbers; one that saves does not make the others' lines milder."""
    found = split(body=use(10 * MIB, *SAMPLES), lm=use(90 * MIB, "summarize"))
    assert not found.saves_nothing
    assert found.saves["tag"].nbytes == 90 * MIB
    assert found.saves["tag"].share == 0.9
    assert "summarize: needs 100 MiB, 100.0 % of 100 MiB: saves nothing" in found.verdict()
    assert "tag: needs 10.0 MiB, 10.0 % of 100 MiB: saves 90.0 MiB" in found.verdict()


def test_one_task_alone_has_no_parts():
    """With one task there is nothing that another could do without."""
    found = assign(Influence({"tag": 1}, {"body": TensorUse(MIB, {"tag": 1}), "old": TensorUse(MIB)}))
    assert set(found.parts) == {BACKBONE}
    assert found.saves_nothing


@pytest.mark.parametrize(
    ("influence", "words"),
    [
        (Influence({}, {}), "no task"),
        (Influence({"backbone": 1}, {}), "cannot be a task's name"),
        (Influence({"shared.x": 1}, {}), "cannot be a task's name"),
        (Influence({"Tag": 1}, {}), "cannot be a task's name"),
        (Influence({"tag": 0}, {}), "not run with any sample"),
        (Influence({"tag": 1}, {"a": TensorUse(1, {"other": 1})}), "'other', which is no task"),
    ],
)
def test_what_is_no_matrix_is_refused(influence, words):
    """Tasks without a name or a sample, and users that are no tasks, are errors."""
    with pytest.raises(SplitBroken, match=words):
        assign(influence)


def test_long_names_of_shared_parts():
    """Names of parts have a longest length; those of many tasks become a digest of theirs."""
    assert shared_name(["b", "a"]) == "shared.a.b"
    long = shared_name([f"{'task' * 8}-{n}" for n in range(5)])
    assert len(long) <= 64
    assert long != shared_name([f"{'task' * 8}-{n}" for n in range(6)])


TASKS = ["a", "b", "c"]
USES = st.builds(
    TensorUse,
    st.integers(1, 4 * MIB),
    st.dictionaries(st.sampled_from(TASKS), st.integers(0, 2)),
    st.frozensets(st.sampled_from(TASKS), max_size=1),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(USES, min_size=1, max_size=20), st.sets(st.tuples(st.integers(0, 9), st.integers(10, 19)), max_size=1))
def test_every_task_has_what_it_touched(uses, pairs):
    """For any matrix: each tensor in one part, each task leases all that it ever touched, owners need all of theirs."""
    tensors = {f"t{n}": one for n, one in enumerate(uses)}
    tied = tuple((f"t{a}", f"t{b}") for a, b in pairs if b < len(uses))
    found = assign(Influence(dict.fromkeys(TASKS, 2), tensors, tied))
    home = {name: part for part, one in found.parts.items() for name in one.tensors}
    assert sum(len(one.tensors) for one in found.parts.values()) == len(home)
    stored = {name: group[0] for group in tied for name in group}
    assert set(home) == {stored.get(name, name) for name in tensors}
    for name, one in tensors.items():
        part = home[stored.get(name, name)]
        for task, calls in one.calls.items():
            assert calls == 0 or part in found.tasks[task]
        if part != BACKBONE:
            assert found.parts[part].tasks != tuple(TASKS)
            assert one.readers <= set(found.parts[part].tasks)
    for task, saving in found.saves.items():
        needed = sum(found.parts[part].nbytes for part in found.tasks[task])
        assert needed + saving.nbytes == found.nbytes
