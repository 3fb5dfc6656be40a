"""The request slots of one llama.cpp worker, over its socket: look, save, restore, erase, and tokenise as it does.

All calls belong to the event loop, are bounded in time, and raise SlotFault: SlotBusy where the slot still generates
(llama.cpp puts the action off until then, and drops it when the caller hangs up), SlotRefused where it says no,
SlotLost where it is gone. No call is repeated. Nothing here decides when to save.

llama.cpp writes a file in place and reads one without checking it, so each save gets a name of its own, and what is
restored must come verified: a truncated file ends the worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import aiohttp

from pagein.errors import SlotBusy, SlotLost, SlotRefused
from pagein.kv.snapshots.llama_file import SlotFile, read_slot_file
from pagein.protocol import Endpoint, StateFacts
from pagein.units import format_duration

WAY = "llama-slots"
LOOK = 2.0
"""Seconds for a look at the slots; the server answers between two steps of its loop, which a long batch takes up."""
LARGEST_ANSWER = 64 * 1024**2
"""Bytes of an answer; a million tokens, as text, have 7 MiB."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One request slot."""

    id: int
    busy: bool
    tokens: int
    """Tokens whose KV it holds."""
    task: int | None
    """The last request that it answered; None = none yet."""

    @property
    def mark(self) -> tuple[int | None, int]:
        """Changes whenever a request changes the content: what has the mark of the last save has nothing new."""
        return self.task, self.tokens


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A file that the engine wrote. Whoever gets it removes it."""

    path: Path
    tokens: tuple[int, ...]
    """As the engine holds them: the prompt's, and all generated but the last, which has no KV yet."""
    bytes: int
    seconds: float
    version: int
    """Of the file's format."""


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """What the engine says that it read."""

    tokens: int
    bytes: int
    seconds: float


class LlamaSlots:
    """The slots of one worker."""

    def __init__(self, model: str, endpoint: Endpoint, facts: StateFacts) -> None:
        assert endpoint.socket is not None, "no state is told of a worker on a port"
        self._model = model
        self._folder = Path(facts.folder)
        self._count = facts.slots
        self._socket = endpoint.socket
        self._restored: dict[int, int] = {}
        """Tokens of restored slots: the server tells the length only of a slot that answered a request."""
        self._abandoned: list[Path] = []
        """Files of saves that were given up, which the engine may have been writing just then."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def folder(self) -> Path:
        """Where files for this worker belong."""
        return self._folder

    def new_file(self) -> Path:
        """A name in the worker's folder that nothing had before: for a payload that is to be restored."""
        return self._folder / f"{token_hex(8)}.kv"

    async def look(self, timeout: float = LOOK) -> list[Slot]:
        """Return the slots as they are now."""
        answer = await self._ask("GET", "/slots", None, timeout, "look at the slots")
        if not isinstance(answer, list):
            raise self._odd("look at the slots", answer)
        return [self._slot(one) for one in answer]

    async def save(self, slot: int, timeout: float) -> SavedSlot | None:
        """Save a slot to a new file, which is checked against what the engine says; None where the slot is empty.

        It takes about 15 ms for 1,000 tokens of a small model, in which no slot generates; a busy slot is saved when it
        is done, which is at the latest after ``timeout``, or not at all.
        """
        self._check(slot)
        self._remove_abandoned()
        path = self.new_file()
        what, begun = f"save slot {slot}", time.monotonic()
        try:
            told = await self._act("save", slot, path.name, timeout)
            seconds = time.monotonic() - begun
            file = await asyncio.to_thread(self._checked, path, told, what)
        except BaseException:
            self._abandoned.append(path)  # it may be written at this very moment
            self._remove_abandoned()
            raise
        if not file.tokens:
            _remove(path)
            return None
        return SavedSlot(path, file.tokens, file.bytes, seconds, file.version)

    async def restore(self, slot: int, path: Path, tokens: Sequence[int], timeout: float) -> RestoredSlot:
        """Let a slot read a verified file of this worker's folder, which must hold exactly these tokens.

        The slot loses what it had, whatever comes of it. The file stays, and is the caller's to remove.
        """
        self._check(slot)
        assert path.parent == self._folder
        what, begun = f"restore slot {slot}", time.monotonic()
        try:
            file = await asyncio.to_thread(read_slot_file, path)
        except OSError as error:
            raise SlotRefused(f"model {self._model!r}: {what}: {error}") from error
        if file.tokens != tuple(tokens) or file.has_media:
            raise SlotRefused(f"model {self._model!r}: {what}: the file holds other tokens than it should")
        self._restored.pop(slot, None)
        told = await self._act("restore", slot, path.name, timeout)
        restored = self._number(told, "n_restored", what)
        if restored != len(tokens):
            await self.erase(slot, LOOK)
            raise SlotRefused(f"model {self._model!r}: {what}: {restored} tokens were read, {len(tokens)} were given")
        self._restored[slot] = restored
        return RestoredSlot(restored, file.bytes, time.monotonic() - begun)

    async def erase(self, slot: int, timeout: float = LOOK) -> None:
        """Empty a slot."""
        self._check(slot)
        self._restored.pop(slot, None)
        await self._act("erase", slot, None, timeout)

    async def tokens_of(self, path: str, body: Mapping[str, object], timeout: float = LOOK) -> list[int] | None:
        """Return the tokens that the engine will make of a request's prompt; None where it has no such list.

        ``path`` is the one of the request: chat (``/v1/chat/completions``), else a completion. The chat template, tools
        and special tokens are the engine's own. Pictures, several prompts and prompts of mixed kinds give None.
        """
        if path.endswith("/chat/completions"):
            if not _is_text(body.get("messages")):
                return None
            told = await self._ask("POST", "/apply-template", body, timeout, "apply its chat template")
            prompt = told.get("prompt") if isinstance(told, dict) else None
            if not isinstance(prompt, str):
                raise self._odd("apply its chat template", told)
            return await self._tokenise(prompt, timeout)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._tokenise(prompt, timeout)
        return list(prompt) if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt) else None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _checked(self, path: Path, told: Mapping[str, Any], what: str) -> SlotFile:
        """Read a file's head and compare it with what the engine says that it wrote."""
        tokens, written = self._number(told, "n_saved", what), self._number(told, "n_written", what)
        try:
            file = read_slot_file(path)
        except OSError as error:
            raise SlotRefused(f"model {self._model!r}: {what}: {error}") from error
        if file.has_media:
            raise SlotRefused(f"model {self._model!r}: {what}: it holds pictures or sound, which have no tokens")
        if (len(file.tokens), file.bytes) != (tokens, written):
            told_so = f"{tokens} tokens in {written} bytes were told"
            raise SlotRefused(
                f"model {self._model!r}: {what}: {told_so}, the file has {len(file.tokens)} in {file.bytes}"
            )
        return file

    def _remove_abandoned(self) -> None:
        self._abandoned = [path for path in self._abandoned if not _remove(path)]

    async def _tokenise(self, text: str, timeout: float) -> list[int]:
        asked = {"content": text, "add_special": True, "parse_special": True}  # as the server treats its prompts
        told = await self._ask("POST", "/tokenize", asked, timeout, "tokenise")
        tokens = told.get("tokens") if isinstance(told, dict) else None
        if not isinstance(tokens, list) or not all(type(one) is int and one >= 0 for one in tokens):
            raise self._odd("tokenise", tokens)
        return tokens

    async def _act(self, action: str, slot: int, name: str | None, timeout: float) -> dict[str, Any]:
        body = {} if name is None else {"filename": name}
        what = f"{action} slot {slot}"
        told = await self._ask("POST", f"/slots/{slot}?action={action}", body, timeout, what)
        if not isinstance(told, dict) or told.get("id_slot") != slot:
            raise self._odd(what, told)
        return told

    async def _ask(self, method: str, path: str, body: object, timeout: float, what: str) -> Any:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._socket, limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(
                method, f"http://worker{path}", json=body, timeout=limit, allow_redirects=False
            ) as answer:
                data = await _read(answer)
        except TimeoutError:
            raise SlotBusy(f"model {self._model!r}: {what}: not done within {format_duration(timeout)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise SlotLost(f"model {self._model!r}: {what}: {error}") from error
        try:
            value = json.loads(data) if data is not None else None
        except (ValueError, RecursionError):
            value = None
        if answer.status != 200:
            raise SlotRefused(f"model {self._model!r}: {what}: {_reason(value, answer.status)}")
        return value

    def _slot(self, one: Any) -> Slot:
        try:
            task, tokens = one.get("id_task"), one.get("n_prompt_tokens", self._restored.get(one["id"], 0))
            if type(one["id"]) is int and type(tokens) is int and tokens >= 0 and (task is None or type(task) is int):
                return Slot(one["id"], bool(one["is_processing"]), tokens, task)
        except (AttributeError, KeyError, TypeError):
            pass
        raise self._odd("look at the slots", one)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self._count:  # llama.cpp takes any number, and acts on some slot
            raise SlotRefused(f"model {self._model!r} has the slots 0 to {self._count - 1}, not {slot}")

    def _number(self, told: Mapping[str, Any], name: str, what: str) -> int:
        value = told.get(name)
        if type(value) is not int or value < 0:
            raise self._odd(what, told)
        return value

    def _odd(self, what: str, told: object) -> SlotRefused:
        return SlotRefused(f"model {self._model!r}: {what}: it answered {str(told)[:200]!r}")


def choose(slots: Sequence[Slot]) -> Slot | None:
    """Return the idle slot that a restore costs least: the emptiest, then the longest unchanged; None = all busy."""
    idle = [slot for slot in slots if not slot.busy]
    return min(idle, key=lambda slot: (slot.tokens, slot.task or 0), default=None)


async def _read(answer: aiohttp.ClientResponse) -> bytes | None:
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > LARGEST_ANSWER:
            return None
    return bytes(data)


def _is_text(messages: object) -> bool:
    """Whether all content is text: what else there is does not become tokens of the vocabulary."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and not all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            return False
    return True


def _reason(value: object, status: int) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message)[:300] if message else f"status {status}"


def _remove(path: Path) -> bool:
    """Remove a file; False where it is not there (yet)."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
