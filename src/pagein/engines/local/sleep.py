"""Sleep of a model in this process: its memory goes back, process and socket stay.

The two paths and their meaning are vLLM's, whose ``level`` is taken and makes no difference here: weights are always
dropped and read again, since a copy in RAM would be memory that nobody granted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from aiohttp import web

from pagein.engines.local.answer import Answer, Work
from pagein.engines.local.compute import Computed
from pagein.engines.local.memory import give_back_now
from pagein.errors import BadRequest, LoadFailed
from pagein.protocol import SLEEP_PATH, WAKE_PATH

_LEVELS = ("1", "2")
T = TypeVar("T")


class Compute(Protocol):
    """The thread that computes, as far as sleep is concerned."""

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> Computed[T]:
        """Run work in it once what was asked for before is done, and wait for it."""
        ...


class Sleeper(Protocol):
    """What an engine that can sleep gives to its server. Called from the compute thread only, never twice in a row."""

    def sleep(self) -> None:
        """Give the model's memory back; raises PageinError, and changes nothing, when it stays."""
        ...

    def wake(self) -> None:
        """Take it again; raises LoadFailed, and stays asleep, when that is not possible."""
        ...


class Bed:
    """Whether a model sleeps. Changed and read in the compute thread, so that a change falls between two requests."""

    def __init__(self, name: str, sleeper: Sleeper, compute: Compute) -> None:
        self._name, self._sleeper, self._compute = name, sleeper, compute
        self._asleep = False

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Answer the paths of sleep; both are answered when it is done, and doing them twice is once."""
        router.add_post(SLEEP_PATH, self._on_sleep)
        router.add_post(WAKE_PATH, self._on_wake)
        router.add_get("/is_sleeping", self._on_question)

    def awake(self, work: Work) -> Work:
        """Return the work of a request, which raises LoadFailed (503) when its turn comes while the model sleeps."""

        def guarded(abandoned: Callable[[], bool]) -> Answer:
            self.check()
            return work(abandoned)

        return guarded

    def check(self) -> None:
        """Raise LoadFailed (503) while the model sleeps."""
        if self._asleep:
            raise LoadFailed(f"model {self._name!r} is asleep", hint=f"POST {WAKE_PATH} first")

    async def _on_sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in _LEVELS:
            raise BadRequest(f"level is {level[:20]!r}; known: {', '.join(_LEVELS)}")
        return await self._become(asleep=True)

    async def _on_wake(self, _: web.Request) -> web.Response:
        return await self._become(asleep=False)

    async def _on_question(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._asleep})

    async def _become(self, *, asleep: bool) -> web.Response:
        done = await self._compute.run(lambda _: self._change(asleep))
        if done.value:
            print(f"{'fell asleep' if asleep else 'woke up'} in {done.took:.2f} s", flush=True)  # to the model's log
        return web.json_response({"is_sleeping": asleep})

    def _change(self, asleep: bool) -> bool:
        """False where it was so already."""
        if asleep == self._asleep:
            return False
        if asleep:
            self._sleeper.sleep()
        else:
            self._sleeper.wake()
        self._asleep = asleep
        give_back_now()  # also after waking: reading weights leaves scratch behind
        return True
