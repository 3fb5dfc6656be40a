"""How a text is to be written: OpenAI's fields, with the further ones that llama.cpp and vLLM share."""

from __future__ import annotations

from dataclasses import dataclass

from pagein.engines.local.fields import Fields, refuse

MOST_STOPS = 16
LONGEST_STOP = 256
"""Characters: text is held back for so long at most, until it is clear that no stop begins in it."""
_MOST_TOKENS = 1 << 24
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of the OpenAI API that this engine cannot do, and the values of them that ask for nothing."""
_IGNORED = ("parallel_tool_calls", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that have no effect on what is written here."""
FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "cache_prompt",
    *_NEUTRAL,
    *_IGNORED,
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a text is written; what is None is as the model's own ``generation_config.json`` says, else greedy."""

    max_tokens: int | None = None
    """None = as many as the context holds."""
    temperature: float | None = None
    """0 = always the likeliest token."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


def read_sampling(fields: Fields) -> Sampling:
    """Read and check the fields; raises BadRequest, also for each that this engine cannot do."""
    for name, values in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
        ):
            refuse(name, f"{name} is not supported by this engine; leave it out")
    return Sampling(
        max_tokens=_max_tokens(fields),
        temperature=fields.number("temperature", 0.0, 5.0),
        top_p=fields.number("top_p", 0.0, 1.0),
        top_k=fields.whole("top_k", 0, 1 << 20),
        min_p=fields.number("min_p", 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10.0),
        seed=fields.whole("seed", -(1 << 63), (1 << 63) - 1),
        stop=_stops(fields),
    )


def _max_tokens(fields: Fields) -> int | None:
    given = [fields.whole(name, 1, _MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
    return next((count for count in given if count is not None), None)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or any(not isinstance(one, str) or not one for one in stops):
        refuse("stop", "stop must be a text, or a list of texts, that are not empty")
    if len(stops) > MOST_STOPS:
        refuse("stop", f"stop has {len(stops)} texts, at most {MOST_STOPS} are taken")
    longest = max(map(len, stops), default=0)
    if longest > LONGEST_STOP:
        refuse("stop", f"stop has a text of {longest} characters, at most {LONGEST_STOP} are taken")
    return tuple(stops)
