"""Speculation saves passes over the weights and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.errors import BadUsage, ContextTooLong, ModelUnsuited
from pagein.weights.steps.payoff import TRIALS, Payoff
from pagein.weights.steps.speculate import LOOKUP

pytestmark = pytest.mark.torch

REPEATED = [5, 6, 7, 8] * 4
RANDOM = [311, 42, 7, 499, 250, 18, 93, 404, 77, 160, 333]
NEW = 24
SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Fixed(Payoff):
    """Guesses so many tokens, whatever they cost."""

    def __init__(self, guesses: int) -> None:
        super().__init__()
        self.guesses = guesses

    def wanted(self, most: int) -> int:
        return 0 if self.stopped is not None else min(self.guesses, most)


class Scores:
    """A logits processor that keeps what it sees: the logits of every position."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.seen.append(scores.clone())
        return scores


def fix(model: Any, guesses: int, kind: str = LOOKUP) -> Fixed:
    payoff = Fixed(guesses)
    model.pagein.speculator.payoffs[kind] = payoff
    return payoff


def plainly(model: Any, prompt: list[int], new: int = NEW, **settings: Any) -> Any:
    with torch.inference_mode():
        return model.generate(torch.tensor([prompt]), max_new_tokens=new, **{**SETTINGS, **settings})


def passes_of(model: Any) -> float:
    ring = model.pagein._placement.stream.ring
    return ring.counts.units / len(ring.layouts)


def assert_same_bits(model: Any, prompt: list[int], **settings: Any) -> None:
    alone, guessed = Scores(), Scores()
    expected = plainly(model, prompt, logits_processor=[alone])
    found = model.pagein.generate(prompt, NEW, logits_processor=[guessed], **{**SETTINGS, **settings})
    assert torch.equal(found, expected)
    assert len(alone.seen) == len(guessed.seen) == NEW
    assert all(torch.equal(one, other) for one, other in zip(alone.seen, guessed.seen, strict=True))


@pytest.mark.parametrize("share", [1.0, 0.7, 0.45])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3-moe", "gpt2"])
def test_every_logit_is_that_of_plain_decoding(make_model: Any, load: Any, kind: str, share: float) -> None:
    """Whatever is guessed and however the model is placed, each position has the bits of plain decoding, in bf16."""
    model = load(make_model(kind), share)
    accepted = 0
    for guesses in (1, 3, 8):
        payoff = fix(model, guesses)
        for prompt in (REPEATED, RANDOM):
            assert_same_bits(model, prompt, speculate="lookup")
        accepted += payoff.totals.accepted
    assert accepted, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_masks_that_are_built_are_those_of_plain_decoding(make_model: Any, load: Any, kind: str) -> None:
    """Attention that is given a whole mask sees as much of the cache as in plain decoding, also in the first block."""
    model = load(make_model(kind), {"llama": 0.3, "gpt2": 0.45}[kind])
    assert 0 not in model.pagein.plan.resident
    model.set_attn_implementation("eager")
    payoff = fix(model, 5)
    assert_same_bits(model, REPEATED, speculate="lookup")
    assert payoff.totals.accepted > 0


@pytest.mark.parametrize("guesses", range(1, 9))
def test_passes_are_saved(make_model: Any, load: Any, guesses: int) -> None:
    """Each accepted guess saves one pass over the ring, for every number of guesses."""
    model = load(make_model("llama"), 0.5)
    payoff = fix(model, guesses)
    before = passes_of(model)
    model.pagein.generate(REPEATED, NEW, speculate="lookup", **SETTINGS)
    assert payoff.totals.accepted > 0
    assert passes_of(model) - before == NEW - payoff.totals.accepted
    assert payoff.totals.passes == NEW - 1 - payoff.totals.accepted, "the prompt's own pass is not counted"


def test_the_model_s_own_text_as_draft_takes_the_fewest_passes(make_model: Any, load: Any) -> None:
    """A draft that is always right gives guesses + 1 tokens a pass."""
    folder = make_model("qwen2")
    model, draft = load(folder, 0.5), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    payoff = fix(model, 4, f"draft model {folder}")
    before = passes_of(model)
    assert_same_bits(model, RANDOM, speculate=draft)
    assert payoff.totals.accepted == payoff.totals.proposed > 0
    assert passes_of(model) - before == NEW + 1 + -(-(NEW - 1) // 5), "plain, then the prompt and a pass each five"


def test_a_wrong_draft_costs_passes_and_no_bit(make_model: Any, load: Any) -> None:
    """A draft of other weights changes no logit; after its trials the gate has switched it off and says why."""
    model, folder = load(make_model("llama"), 0.5), make_model("llama-tied", "float32")
    torch.manual_seed(9)
    draft = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    positions = []
    model.register_forward_pre_hook(lambda *given: positions.append(1))
    model.pagein.speculator.clock = lambda: float(len(positions))  # as if computing were all that takes time
    assert_same_bits(model, RANDOM, speculate=draft)
    (payoff,) = model.pagein.speculator.payoffs.values()
    assert payoff.totals.guessed_passes == TRIALS
    assert not payoff.is_on
    assert any("off: " in line and "times plain decoding" in line for line in model.pagein.report.lines())


def test_the_gate_goes_on_where_only_the_disk_counts(make_model: Any, load: Any) -> None:
    """With a clock that counts what is read, guesses at a text that repeats itself pay and their number grows."""
    model = load(make_model("llama"), 0.5)
    ring = model.pagein._placement.stream.ring
    model.pagein.speculator.clock = lambda: float(ring.counts.units)
    text = model.pagein.generate(REPEATED, 100, **SETTINGS)
    assert torch.equal(text, plainly(model, REPEATED, 100))
    payoff = model.pagein.speculator.payoffs[LOOKUP]
    assert payoff.is_on
    assert payoff.totals.tokens_per_pass > 1.5
    assert payoff.why.startswith("on: ")


def test_the_gate_goes_off_where_nothing_is_streamed(make_model: Any, load: Any) -> None:
    """A resident model computes each position for itself, so guesses cost what they give and are switched off."""
    model = load(make_model("llama"), 1.0)
    positions = []
    model.register_forward_pre_hook(lambda *given: positions.append(1))
    model.pagein.speculator.clock = lambda: float(len(positions))
    text = model.pagein.generate(REPEATED, 100, **SETTINGS)
    assert torch.equal(text, plainly(model, REPEATED, 100))
    payoff = model.pagein.speculator.payoffs[LOOKUP]
    assert payoff.totals.proposed > 0
    assert not payoff.is_on


def test_an_end_among_accepted_guesses_ends_the_text(make_model: Any, load: Any) -> None:
    """The end-of-text token stops the text where plain decoding stops, though later positions were computed."""
    model = load(make_model("llama"), 0.5)
    text = plainly(model, REPEATED)[0].tolist()
    payoff = fix(model, 8)
    ends = {text[at] for at in range(len(REPEATED) + 6, len(text))}
    stopped = 0
    for end in sorted(ends):
        expected = plainly(model, REPEATED, eos_token_id=end)
        found = model.pagein.generate(REPEATED, NEW, speculate="lookup", **{**SETTINGS, "eos_token_id": end})
        assert torch.equal(found, expected)
        stopped += expected.shape[1] < len(text)
    assert stopped
    assert payoff.totals.accepted > 0


def test_sampling_draws_what_plain_sampling_draws(make_model: Any, load: Any) -> None:
    """With the same seed the same tokens are drawn, guessed at or not."""
    model = load(make_model("llama"), 0.5)
    payoff = fix(model, 5)
    sampling = {"do_sample": True, "temperature": 0.05, "top_k": 20}
    torch.manual_seed(5)
    expected = plainly(model, REPEATED, **sampling)
    torch.manual_seed(5)
    found = model.pagein.generate(REPEATED, NEW, speculate="lookup", **{**SETTINGS, **sampling})
    assert torch.equal(found, expected)
    assert payoff.totals.proposed > 0


def test_a_streamer_hears_each_token_in_its_turn(make_model: Any, load: Any) -> None:
    """Accepted tokens reach the streamer one by one, in order, after the prompt."""

    class Heard:
        def __init__(self) -> None:
            self.parts: list[Any] = []
            self.ended = False

        def put(self, part: Any) -> None:
            self.parts.append(part.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    model, heard = load(make_model("llama"), 0.5), Heard()
    fix(model, 6)
    text = model.pagein.generate(REPEATED, NEW, speculate="lookup", streamer=heard, **SETTINGS)
    assert heard.ended
    assert heard.parts[0] == REPEATED
    assert heard.parts[1:] == [[token] for token in text[0, len(REPEATED) :].tolist()]


def test_others_in_step_are_not_disturbed(make_model: Any, load: Any) -> None:
    """An ordinary participant beside a guessed text gives what it gives alone, and they share their passes."""
    model = load(make_model("llama"), 0.5)
    payoff = fix(model, 4)
    alone = [plainly(model, RANDOM), plainly(model, REPEATED)]
    before = passes_of(model)
    with torch.inference_mode():
        beside = model.pagein.lockstep.run(
            [
                lambda: model.generate(torch.tensor([RANDOM]), max_new_tokens=NEW, **SETTINGS),
                lambda: model.pagein.generate(REPEATED, NEW, speculate="lookup", **SETTINGS),
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
    assert payoff.totals.accepted > 0
    assert passes_of(model) - before == NEW, "the ordinary one takes a pass a token, the other none of its own"


def test_a_guessed_text_that_is_cancelled_leaves_nothing(make_model: Any, load: Any) -> None:
    """Cancelled in the middle of a pass with guesses, it frees its tokens; the next text is right."""
    model = load(make_model("llama"), 0.5)
    hub = model.pagein.lockstep
    fix(model, 4)
    with torch.inference_mode():
        seat = hub.submit(lambda: model.pagein.generate(REPEATED, NEW, speculate="lookup", **SETTINGS), tokens=64)
        while hub.turn():
            if len(hub.seats) > 3:
                hub.cancel(seat)
    assert seat.cancelled
    assert hub.is_idle
    assert hub.taken_tokens == 0
    assert not model.pagein.speculator._running
    assert_same_bits(model, REPEATED, speculate="lookup")


def test_memory_can_change_in_the_middle_of_a_guessed_text(make_model: Any, load: Any) -> None:
    """Bytes given back and taken again between two passes with guesses change nothing of what is said."""
    model = load(make_model("llama"), 0.9)
    streamed, hub, needs = model.pagein, model.pagein.lockstep, model.pagein.plan.needs
    expected = plainly(model, REPEATED)
    fix(model, 4)
    budgets = [needs.fixed + int((needs.whole - needs.fixed) * share) for share in (0.45, 1.0, 0.7)]
    with torch.inference_mode():
        seat = hub.submit(lambda: streamed.generate(REPEATED, NEW, speculate="lookup", **SETTINGS))
        while hub.turn():
            if budgets and len(hub.seats) > 3:
                hub.settle()
                streamed.set_memory(budgets.pop())
    assert torch.equal(seat.result(), expected)
    assert not budgets


@pytest.mark.parametrize(("kind", "why"), [("gemma3", "DynamicSlidingWindowLayer"), ("t5", "encoder-decoder")])
def test_what_cannot_be_cut_back_is_decoded_plainly_and_says_so(
    make_model: Any, load: Any, kind: str, why: str
) -> None:
    """A sliding window or an encoder switches speculation off with the reason in the report, and the text is right."""
    model = load(make_model(kind), 0.5)
    expected = plainly(model, REPEATED, 9)
    assert torch.equal(model.pagein.generate(REPEATED, 9, **SETTINGS), expected)
    assert any("off: " in line and why in line for line in model.pagein.report.lines())


@pytest.mark.parametrize("wish", [{"num_beams": 2}, {"use_cache": False}])
def test_wishes_that_rule_guessing_out_are_granted(make_model: Any, load: Any, wish: dict[str, Any]) -> None:
    """Beams, or no cache, are decoded as transformers does, with the reason in the report."""
    model = load(make_model("llama"), 0.5, chunk=64)
    model.generation_config.prefill_chunk_size = None
    expected = plainly(model, RANDOM, 5, **wish)
    assert torch.equal(model.pagein.generate(RANDOM, 5, **{**SETTINGS, **wish}), expected)
    (name,) = wish
    assert any(f"off: {name}=" in line for line in model.pagein.report.lines())


def test_a_draft_of_other_tokens_is_refused_before_anything_is_computed(make_model: Any, load: Any) -> None:
    """A draft model with another vocabulary raises an error that names both sizes."""
    model = load(make_model("llama"), 0.5)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    draft = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=300, **shape))
    with pytest.raises(ModelUnsuited, match=r"300 tokens.*512"):
        model.pagein.generate(RANDOM, 5, speculate=draft, **SETTINGS)
    assert not model.pagein.report.passes
    assert not model.pagein.speculator.lines()


@pytest.mark.parametrize(
    ("prompt", "speculate", "why"), [([RANDOM, RANDOM], "auto", r"\[2, 11\]"), (RANDOM, "medusa", "not 'medusa'")]
)
def test_what_cannot_be_asked_is_refused(make_model: Any, load: Any, prompt: Any, speculate: Any, why: str) -> None:
    """Several prompts at once, or an unknown kind of guesses, raise an error that says what is taken."""
    with pytest.raises(BadUsage, match=why):
        load(make_model("llama"), 0.5).pagein.generate(prompt, 5, speculate=speculate, **SETTINGS)


def test_a_text_longer_than_the_plan_is_refused(make_model: Any, load: Any) -> None:
    """Prompt and new tokens beyond the planned cache are refused with both numbers."""
    model = load(make_model("llama"), 0.5)
    with pytest.raises(ContextTooLong, match=r"411 tokens.*256"):
        model.pagein.generate(RANDOM, 400, **SETTINGS)


def test_the_report_counts_a_pass_with_guesses_once(make_model: Any, load: Any) -> None:
    """Positions computed in step are one pass of several tokens, with its bytes counted once."""
    model = load(make_model("llama"), 0.5)
    payoff = fix(model, 3)
    model.pagein.generate(REPEATED, NEW, speculate="lookup", **SETTINGS)
    passes = list(model.pagein.report.passes)
    assert len(passes) == payoff.totals.passes + 1
    assert max(one.tokens for one in passes[1:]) == 4
    assert sum(one.nbytes for one in passes) == model.pagein._placement.stream.ring.counts.nbytes
