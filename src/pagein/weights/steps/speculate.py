"""Several tokens a pass: the next ones are guessed, and each guess is computed beside the others as if it were alone.

``generate`` runs as it always does and asks for one position after the other. When it asks for a position, guesses at
the tokens after it are computed in the same pass over the weights: each is an ordinary forward pass of one token, in
step with the others (`lockstep`), and all share one KV cache. At every block position p writes its keys and values
before position p + 1 reads them, so each position computes the very bits of plain decoding. Where ``generate`` then
chooses the token that was guessed, its next position is there already; else the cache is cut back and nothing remains.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from pagein.errors import BadUsage, ContextTooLong
from pagein.weights.steps.batch import Prompt, tokens_needed
from pagein.weights.steps.caches import Cut, cache_name, cache_of, why_uncut
from pagein.weights.steps.drafts import DraftModel, Drafts, Lookup, check_same_tokens, draft_name, vocabulary
from pagein.weights.steps.lockstep import Lockstep
from pagein.weights.steps.payoff import Payoff

log = logging.getLogger("pagein.weights")

LOOKUP = "prompt lookup"
_COUNTED = ("position_ids", "cache_position")
"""Arguments of a step that are one higher at the next position."""
_DERIVED = ("input_ids", "attention_mask", *_COUNTED)
"""Arguments of a step whose values at the next positions are known."""

_ORDINARY = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "return_dict_in_generate": False,
    "cache_implementation": None,
    "assistant_model": None,
    "cache": None,
    "past_key_values": None,
}
"""Settings of ``generate`` that guessing is made for."""


class _Guess(NamedTuple):
    token: int
    output: Any


class Speculation:
    """One text: answers the steps of ``generate`` from positions that were computed ahead."""

    def __init__(
        self,
        hub: Lockstep,
        cache: Any,
        drafts: Drafts,
        payoff: Payoff,
        most: int,
        clock: Callable[[], float],
    ) -> None:
        """``most``: tokens that the text has at its longest."""
        self._hub, self._cache = hub, cache
        self._drafts, self._payoff, self._most, self._clock = drafts, payoff, most, clock
        self._tokens: list[int] = []
        self._ahead: deque[_Guess] = deque()
        self._cut: Cut | None = None
        self._proposed, self._seconds = 0, 0.0

    def step(self, named: Mapping[str, Any], compute: Callable[..., Any]) -> Any:
        """Return what the forward pass of one step returns; ``compute`` is that pass."""
        new = named["input_ids"][0].tolist()
        self._tokens += new
        if len(new) == 1 and self._ahead and self._ahead[0].token == new[0]:
            assert self._cut is not None
            self._cut.show(self._cache.get_seq_length() + 1)
            return self._ahead.popleft().output
        self.settle(rejected=bool(self._ahead))
        if len(new) > 1:
            return compute(**named)
        return self._pass(named, compute)

    def settle(self, rejected: bool = False) -> None:
        """Give the guesses up that are left, and note what the pass with them was worth."""
        if self._proposed:
            self._payoff.saw(self._seconds, self._proposed, self._proposed - len(self._ahead), rejected)
        self._ahead.clear()
        self._cut, self._proposed = None, 0

    def _pass(self, named: Mapping[str, Any], compute: Callable[..., Any]) -> Any:
        begin = self._clock()
        start = self._cache.get_seq_length()
        guesses = self._guess(named, self._most - start - 2)
        if not guesses:
            output = compute(**named)
            self._payoff.saw_plain(self._clock() - begin)
            return output
        places = range(len(guesses) + 1)
        outputs = self._hub.fork(
            [partial(_position, compute, named, place, guesses) for place in places],
            [partial(self._is_reached, start + place) for place in places],
        )
        self._cut = Cut(self._cache)
        self._cut.show(start + 1)
        self._ahead.extend(_Guess(token, output) for token, output in zip(guesses, outputs[1:], strict=True))
        self._proposed, self._seconds = len(guesses), self._clock() - begin
        return outputs[0]

    def _guess(self, named: Mapping[str, Any], room: int) -> list[int]:
        wanted = self._payoff.wanted(room) if room > 0 else 0
        if not wanted:
            return []
        odd = _underivable(named, self._cache)
        if odd is not None:
            self._payoff.stopped = odd
            return []
        return self._drafts.propose(self._tokens, wanted)[:wanted]

    def _is_reached(self, tokens: int) -> bool:
        """Whether the first layer holds so many tokens: then the position after them may begin."""
        return bool(self._cache.get_seq_length() >= tokens)


def _position(compute: Callable[..., Any], named: Mapping[str, Any], place: int, guesses: list[int]) -> Any:
    """Compute the position that stands ``place`` after the one asked for, just as ``generate`` would ask for it."""
    given = dict(named)
    if place:
        given["input_ids"] = torch.full_like(named["input_ids"], guesses[place - 1])
        for name in _COUNTED:
            if isinstance(named.get(name), torch.Tensor):
                given[name] = named[name] + place
        mask = named.get("attention_mask")
        if mask is not None:
            given["attention_mask"] = torch.cat([mask, mask.new_ones(1, place)], dim=-1)
    return compute(**given)


def _underivable(named: Mapping[str, Any], cache: Any) -> str | None:
    """Say what of a step is not known for the positions after it; None where all is."""
    odd = next((name for name, one in named.items() if isinstance(one, torch.Tensor) and name not in _DERIVED), None)
    if odd is not None:
        return f"the model is given {odd}, whose values for tokens to come are not known"
    mask = named.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        return "the model is given a mask of its own, which is not known for tokens to come"
    if any(layer.keys is None for layer in cache.layers):
        return "layers share their keys and values, which would be those of later tokens"
    return None


class Speculator:
    """Speculation for one model: the texts that are being written, and what was learnt about its worth."""

    def __init__(self, hub: Lockstep, model: Any, folder: Path, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.payoffs: dict[str, Payoff] = {}
        """For each kind of guesses; they outlive the texts."""
        self._hub, self._model, self._folder = hub, model, folder
        self._running: dict[int, Speculation] = {}

    def running(self, named: Mapping[str, Any]) -> Speculation | None:
        """Return the speculation that a forward pass belongs to; `face` asks for each."""
        return self._running.get(id(cache_of(named))) if self._running else None

    def generate(self, prompt: Prompt, speculate: Any, settings: dict[str, Any]) -> torch.Tensor:
        """Return prompt and new tokens, [1, n + new]: what ``model.generate`` returns, whatever was guessed."""
        model = self._model
        ids = torch.as_tensor(prompt, dtype=torch.long, device=model.device)
        if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
            raise BadUsage(f"one prompt has shape [n] or [1, n], not {list(ids.shape)}; generate_batch takes several")
        ids = ids.reshape(1, -1)
        given = {"pad_token_id": 0, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
        size, most = tokens_needed(model, ids, settings), self._hub.most_tokens
        if most is not None and size > most:
            raise ContextTooLong(size, most)
        job = self._job(ids, speculate, given, size)
        if self._hub.is_inside:
            return job()
        with torch.inference_mode():
            return self._hub.run([job], tokens=size)[0]

    def _job(self, ids: torch.Tensor, speculate: Any, given: dict[str, Any], size: int) -> Callable[[], torch.Tensor]:
        draft_tokenizer = given.pop("assistant_tokenizer", None)
        if speculate is None:
            return lambda: self._model.generate(ids, **given)
        drafts = self._drafts(speculate, given, draft_tokenizer)
        kind = LOOKUP if isinstance(drafts, Lookup) else draft_name(speculate)
        payoff = self.payoffs.setdefault(kind, Payoff())
        payoff.stopped = why_uncut(self._model) or _why_not(self._model.generation_config, given)
        if payoff.stopped is not None:
            log.log(logging.INFO if speculate == "auto" else logging.WARNING, "no speculation: %s", payoff.stopped)
            return lambda: self._model.generate(ids, **given)
        return partial(self._generate, ids, drafts, payoff, given, size)

    def _drafts(self, speculate: Any, given: dict[str, Any], draft_tokenizer: Any) -> Drafts:
        if speculate in ("auto", "lookup"):
            return Lookup()
        if isinstance(speculate, str):
            raise BadUsage(f"speculate is 'auto', 'lookup', None or a draft model, not {speculate!r}")
        tokenizer = given.get("tokenizer")
        if not given.get("stop_strings"):
            given.pop("tokenizer", None)  # it was given for the comparison only
        check_same_tokens(self._model, self._folder, speculate, tokenizer, draft_tokenizer)
        return DraftModel(speculate, vocabulary(self._model))

    def _generate(
        self, ids: torch.Tensor, drafts: Drafts, payoff: Payoff, given: dict[str, Any], size: int
    ) -> torch.Tensor:
        model, cache = self._model, DynamicCache(config=self._model.config)
        text = Speculation(self._hub, cache, drafts, payoff, size, self.clock)
        self._running[id(cache)] = text
        try:
            return model.generate(ids, **{str(cache_name(model)): cache}, **given)
        finally:
            del self._running[id(cache)]
            text.settle()

    def forget(self) -> None:
        """Measure anew: the plan has changed, and with it what a pass costs."""
        for payoff in self.payoffs.values():
            payoff.forget()

    def lines(self) -> list[str]:
        """Say for each kind of guesses what came of it."""
        return [f"speculation by {kind}: {payoff.line()}" for kind, payoff in self.payoffs.items()]


def _why_not(config: Any, given: Mapping[str, Any]) -> str | None:
    """Say which wish, of the caller or of the model's own settings, rules guessing out."""
    config = given.get("generation_config") or config
    for name, ordinary in _ORDINARY.items():
        wish = given.get(name, getattr(config, name, ordinary))
        if wish is not None and wish != ordinary:
            return f"{name}={wish if isinstance(wish, int | str) else type(wish).__name__}"
    return None
