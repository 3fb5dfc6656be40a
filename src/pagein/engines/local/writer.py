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
class Whose:
    """Whose turn a request is, as the daemon tells it."""

    tenant: str = ""
    """Tenants share nothing."""
    conversation: str | None = None
    """The kept conversation; None where there is none, and it is known by its tokens only."""
    reuse: bool = True
    """The client's own wish (``cache_prompt``): whether anything is reused for it, and kept of it."""


@dataclass(frozen=True, slots=True)
class Reused:
    """What of a prompt was there already."""

    cached: int
    """Tokens that were not computed."""
    restored: int
    """Those of them that came back from a lower tier."""
    miss: str | None = None
    """Why there were none, as ``kind: reason``."""
    prompt_seconds: float = 0.0
    """Until the first token was there."""
    write_seconds: float = 0.0
    """From then on to the last one."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text ended, and what it took."""

    reason: str
    """OpenAI's ``finish_reason``: ``stop`` or ``length``."""
    prompt_tokens: int
    completion_tokens: int
    reused: Reused | None = None
    """None where nothing is said of that."""


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
    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver, whose: Whose) -> Callable[[], None]:
        """Begin to write; returns what calls it off. Raises ContextLengthExceeded with both numbers."""

    @abstractmethod
    def beats(self) -> int:
        """Return a number that grows while something is computed: whoever waits can tell that from a hang."""

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> Awaitable[Embeddings]:
        """Return one vector of length 1 per text; called on the event loop, and cancelled there."""
