"""`/v1/audio/transcriptions`: from request to work, from transcript to each of OpenAI's answer formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web

from pagein.engines.local.answer import Answer, Work, json_answer
from pagein.engines.local.audio import decode_audio
from pagein.engines.local.bodies import read_upload
from pagein.engines.local.fields import Fields, refuse
from pagein.engines.local.model import SAMPLE_RATE, Hearing, Segment, Transcriber, Transcript

_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
_TIMED = frozenset({"srt", "vtt", "verbose_json"})
_FIELDS = ("language", "prompt", "temperature", "task", "response_format", "timestamp_granularities", "stream")


async def transcriptions(name: str, model: Transcriber, request: web.Request) -> Work:
    """Read a request of `/v1/audio/transcriptions`: a form with a file, or the sound with fields in the query."""
    upload = await read_upload(request, "audio", ("file",), _FIELDS)
    style = upload.fields.choice("response_format", _FORMATS)
    if style in _TIMED and not model.has_times:
        usable = ", ".join(known for known in _FORMATS if known not in _TIMED)
        refuse("response_format", f"response_format is {style!r}, but {name!r} knows no times; it can answer {usable}")
    if upload.fields.flag("stream"):
        refuse("stream", f"stream is true, but {name!r} answers only when it is done")
    hearing = _hearing(upload.fields, style)

    def work(abandoned: Callable[[], bool]) -> Answer:
        samples = decode_audio(upload.data, model.max_seconds)
        transcript = model.transcribe(samples, hearing, abandoned)
        return _answer(style, transcript, hearing, f"{len(samples) / SAMPLE_RATE:.1f} s of sound")

    return work


def _hearing(fields: Fields, style: str) -> Hearing:
    grains = fields.get("timestamp_granularities") or []
    grains = grains if isinstance(grains, list) else [grains]
    for grain in grains:
        if grain not in ("word", "segment"):
            refuse("timestamp_granularities", f"timestamp_granularities has {grain!r}; word and segment are known")
    if grains and style != "verbose_json":
        refuse("timestamp_granularities", "timestamp_granularities needs response_format verbose_json")
    return Hearing(
        language=fields.text("language") or None,
        prompt=fields.text("prompt") or None,
        temperature=fields.number("temperature", 0, 1) or 0.0,
        translate=fields.choice("task", ("transcribe", "translate")) == "translate",
        word_times="word" in grains,
    )


def _answer(style: str, transcript: Transcript, hearing: Hearing, note: str) -> Answer:
    match style:
        case "text":
            return Answer(f"{transcript.text}\n".encode(), "text/plain", note)
        case "srt":
            return Answer(to_srt(transcript.segments or ()).encode(), "application/x-subrip", note)
        case "vtt":
            return Answer(to_vtt(transcript.segments or ()).encode(), "text/vtt", note)
        case "verbose_json":
            return json_answer(_verbose(transcript, hearing), note)
        case _:
            return json_answer({"text": transcript.text, "usage": _usage(transcript)}, note)


def _usage(transcript: Transcript) -> dict[str, object]:
    return {"type": "duration", "seconds": round(transcript.duration, 3)}


def _verbose(transcript: Transcript, hearing: Hearing) -> dict[str, object]:
    segments = transcript.segments or ()
    body: dict[str, object] = {
        "task": "translate" if hearing.translate else "transcribe",
        "language": transcript.language,
        "duration": round(transcript.duration, 3),
        "text": transcript.text,
        "segments": [
            {"id": i, "start": found.start, "end": found.end, "text": found.text, **found.details}
            for i, found in enumerate(segments)
        ],
        "usage": _usage(transcript),
    }
    if hearing.word_times:
        body["words"] = [asdict(word) for found in segments for word in found.words]
    return body


def to_srt(segments: tuple[Segment, ...]) -> str:
    """Return segments as SubRip: a number, times with a comma, the text, a blank line."""
    parts = (
        f"{i}\n{_clock(found.start, ',')} --> {_clock(found.end, ',')}\n{_one_line(found.text)}\n"
        for i, found in enumerate(segments, 1)
    )
    return "\n".join(parts)


def to_vtt(segments: tuple[Segment, ...]) -> str:
    """Return segments as WebVTT: a heading, times with a point, the text with its markup escaped, a blank line."""
    parts = (
        f"{_clock(found.start, '.')} --> {_clock(found.end, '.')}\n{_escaped(_one_line(found.text))}\n"
        for found in segments
    )
    return "\n".join(["WEBVTT\n", *parts])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{point}{milliseconds:03d}"
