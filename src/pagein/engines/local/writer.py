"""The interface of models that write text piece by piece, several requests at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from pagein.engines.local.model import Embeddings
from pagein.engines.local.sampling import Sampling
from pagein.protocol import Capability

Message = Mapping[str, str]
"""``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a text continues, as the model's own token numbers."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text ended, and what it took."""

    reason: str
    """OpenAI's ``finish_reason``: ``stop`` or ``length``."""
    prompt_tokens: int
    completion_tokens: int


Deliver = Callable[[str | Ending | Exception], None]
"""Takes pieces of text, then one ending or one fault. Called in the compute thread; must not block."""


class Writer(ABC):
    """A loaded model that writes. Its methods are called on the event loop or in a thread beside it."""

    capabilities: Sequence[Capability]
    context: int
    """Tokens of one prompt and what is written after it."""

    @abstractmethod
    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        """Put messages into the model's own chat template; blocks for milliseconds. Raises BadRequest."""

    @abstractmethod
    def text(self, prompt: str) -> Prompt:
        """Turn a text into tokens; blocks for milliseconds."""

    @abstractmethod
    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver) -> Callable[[], None]:
        """Begin to write; returns what calls it off. Raises ContextLengthExceeded with both numbers."""

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> Awaitable[Embeddings]:
        """Return one vector of length 1 per text; called on the event loop, and cancelled there."""
