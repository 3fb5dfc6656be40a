"""What KV behind pictures and sounds hangs on beside token ids: which ones they are, and how far positions are off.

All pictures have the same ids. And with M-RoPE a picture takes fewer positions than tokens; transformers keeps the
difference in the model, for the last text alone: `generate` uses it behind a prefix that is there, whoever's it is, and
computes it from the whole prompt where the model has none.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagein.kv.snapshots.key import NO_TOKEN, media_tokens

if TYPE_CHECKING:
    from pagein.kv.cache.tiered import TieredCache

_STAND_INS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
_OFFSETS = "rope_deltas"
_OF: weakref.WeakKeyDictionary[Any, Pictures] = weakref.WeakKeyDictionary()
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Known:
    prompt: list[int]
    offsets: tuple[Any, ...]


class Pictures:
    """What all caches of a model share; for a model of text alone it does nothing."""

    def __init__(self, stand_ins: Collection[int] = (), modules: Sequence[Any] = ()) -> None:
        """``stand_ins``: ids that stand for a piece of any picture; ``modules``: those that keep offsets."""
        self._stand_ins = frozenset(stand_ins)
        self._modules = [weakref.ref(one) for one in modules]  # it is found by the model, and must not keep it
        self._known: weakref.WeakKeyDictionary[TieredCache, _Known] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakSet[TieredCache] = weakref.WeakSet()
        self._met: weakref.WeakSet[TieredCache] = weakref.WeakSet()
        """Turns beside which another one ran: whose offsets the model has at their end nobody knows."""
        self._lock = threading.Lock()

    def told_apart(self, tokens: list[int], prompt: Sequence[int] = ()) -> list[int]:
        """Return tokens in which what stands for a picture is like no other picture's.

        Where the ``prompt`` of the turn has a number in its place, that one: nobody but the caller knows the picture.
        """
        places = [at for at, token in enumerate(tokens) if token in self._stand_ins] if self._stand_ins else []
        if not places:
            return tokens
        told = list(tokens)
        for at, number in zip(places, media_tokens(secrets.token_hex(32), len(places)), strict=True):
            told[at] = prompt[at] if at < len(prompt) and prompt[at] >= NO_TOKEN else number
        return told

    def begin(self, cache: TieredCache, prompt: Sequence[int]) -> None:
        """A turn begins: the model gets the offsets of the cache's last turn, if the prompt goes on from that."""
        if not self._modules:
            return
        with self._lock:
            known = self._known.get(cache)
            if known is not None and list(prompt[: len(known.prompt)]) != known.prompt:
                known = None
            for place, module in enumerate(self._living()):
                setattr(module, _OFFSETS, known.offsets[place] if known is not None else None)
            self._running.add(cache)
            if len(self._running) > 1:
                self._met.update(self._running)

    def end(self, cache: TieredCache, prompt: Sequence[int]) -> None:
        """A turn has ended, with the offsets of its prompt."""
        if not self._modules:
            return
        with self._lock:
            self._known.pop(cache, None)
            if cache not in self._met:
                offsets = tuple(getattr(module, _OFFSETS) for module in self._living())
                self._known[cache] = _Known(list(prompt), offsets)
            self._leave(cache)

    def abandon(self, cache: TieredCache) -> None:
        """A turn broke off; the offsets of the last one still hold."""
        with self._lock:
            self._leave(cache)

    def share(self, cache: TieredCache, other: TieredCache) -> None:
        """Let a fork know what its origin does."""
        with self._lock:
            if (known := self._known.get(cache)) is not None:
                self._known[other] = known

    def _leave(self, cache: TieredCache) -> None:
        self._running.discard(cache)
        self._met.discard(cache)

    def _living(self) -> list[Any]:
        return [module for one in self._modules if (module := one()) is not None]


def pictures_of(model: Any) -> Pictures:
    """Return what all caches of a model share; what is no model shares nothing."""
    if not hasattr(model, "modules"):
        return Pictures()
    with _making:
        if model not in _OF:
            config = getattr(model, "config", None)
            ids = [getattr(config, name, None) for name in _STAND_INS]
            keeping = [one for one in model.modules() if _OFFSETS in vars(one)]
            _OF[model] = Pictures({one for one in ids if isinstance(one, int)}, keeping)
        return _OF[model]
