"""``pagein run``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from pagein.cli.address import find_daemon
from pagein.cli.answers import Streamed, show_answer
from pagein.cli.client import Client, call
from pagein.cli.console import errors, print_json
from pagein.cli.inputs import Input, Kind, read_input
from pagein.cli.offers import offered_by
from pagein.cli.options import Json, ModelName, StateDir, Url
from pagein.cli.questions import Extra, question
from pagein.errors import BadUsage, CapabilityMissing
from pagein.protocol import PATHS, Capability

_BY_KIND = {
    Kind.TEXT: (
        Capability.CHAT,
        Capability.COMPLETION,
        Capability.TEXT_CLASSIFICATION,
        Capability.TOKEN_CLASSIFICATION,
        Capability.EMBEDDING,
        Capability.RERANK,
    ),
    Kind.AUDIO: (Capability.TRANSCRIPTION,),
    Kind.IMAGE: (Capability.CLASSIFICATION, Capability.SALIENCY),
}
"""What can be asked with each kind of input, in the order of preference."""
_STREAMED = frozenset({Capability.CHAT, Capability.COMPLETION})


Given = Annotated[
    str, typer.Argument(metavar="INPUT", help="A prompt, a file (text, recording, image), or - for standard input.")
]
Wish = Annotated[
    Capability | None,
    typer.Option("--as", metavar="CAPABILITY", help="What to ask for, where the model can do several things."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of a chat.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer of a chat, in tokens.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, metavar="X", help="Randomness of a chat; 0 has none.")
]
Documents = Annotated[
    list[str] | None,
    typer.Option("--document", "-d", metavar="TEXT", help="Document to rank by the prompt; repeatable."),
]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the model, what it is given, and how it shall answer."""

    model: str
    given: Input
    wish: Capability | None
    extra: Extra = field(default_factory=Extra)
    json: bool = False


def run(
    model: ModelName,
    given: Given,
    wish: Wish = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    document: Documents = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Send a prompt, a recording or an image to a model and print its answer.

    The input decides what is asked: text goes to chat (streamed), classification, embedding or reranking, a recording
    to transcription, an image to classification or saliency. The model is loaded if it is not there. A task of a split
    model is named behind it: assistant:summarise.
    """
    job = Job(model, read_input(given), wish, Extra(system, max_tokens, temperature, document or []), json)
    call(find_daemon(url, state_dir), lambda client: _answer(client, job))


async def _answer(client: Client, job: Job) -> None:
    capability = await _capability(client, job)
    body = question(capability, job.model, job.given, job.extra)
    if capability in _STREAMED and not job.json:
        await _print_stream(client, PATHS[capability], body)
        return
    with errors().status(f"asking {job.model} …"):
        answer = await client.post(PATHS[capability], body)
    if job.json:
        print_json(answer)
    else:
        show_answer(capability, answer, job.extra.documents)


async def _print_stream(client: Client, path: str, body: Any) -> None:
    printed = Streamed(sys.stdout)
    waiting = errors().status(f"waiting for {body['model']} …")
    waiting.start()
    try:
        async for event in client.stream(path, {**body, "stream": True}):
            waiting.stop()
            printed.add(event)
    finally:
        waiting.stop()
        printed.close()


async def _capability(client: Client, job: Job) -> Capability:
    """Choose what to ask for; raises ModelNotFound, CapabilityMissing and BadUsage."""
    offered = offered_by(job.model, (await client.status()).models)
    fitting = _BY_KIND[job.given.kind]
    if job.wish is not None and job.wish not in fitting:
        words = ", ".join(fitting)
        raise BadUsage(f"{job.given.name} is {job.given.kind.value}: {job.wish} does not take it; {words} would")
    wanted = [job.wish] if job.wish is not None else list(fitting)
    if job.wish is None and job.extra.documents:
        wanted = [Capability.RERANK]
    for capability in wanted:
        if capability in offered:
            return capability
    raise CapabilityMissing(job.model, " or ".join(wanted), offered)
