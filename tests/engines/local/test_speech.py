"""The transcription endpoint: ways to send sound, answer formats, and what each model refuses."""

from __future__ import annotations

import aiohttp
import pytest

from pagein.engines.local.model import Hearing, Segment
from pagein.engines.local.speech import to_srt, to_vtt
from tests.engines.local.test_audio import hum_wav
from tests.engines.local.tiny import DeafListener, TinyListener

PATH = "/v1/audio/transcriptions"


def form(**fields: str) -> aiohttp.FormData:
    """A form with one second of sound."""
    data = aiohttp.FormData(fields)
    data.add_field("file", hum_wav(16000), filename="a.wav", content_type="audio/wav")
    return data


async def test_json_is_the_default(ask):
    """A form with a file is answered with the text and the seconds used."""
    reply = await ask(TinyListener(), PATH, data=form(model="x"))
    assert reply.body == {"text": "1.00 seconds", "usage": {"type": "duration", "seconds": 1.0}}


async def test_a_raw_body_has_its_fields_in_the_query(ask):
    """Sound may be the body itself."""
    model = TinyListener()
    params = {"language": "de", "response_format": "text"}
    reply = await ask(model, PATH, data=hum_wav(16000), headers={"Content-Type": "audio/wav"}, params=params)
    assert reply.body == "1.00 seconds\n"
    assert model.hearing == Hearing(language="de")


async def test_every_field_reaches_the_model(ask):
    """Language, prompt, temperature, task and word times are passed on."""
    model = TinyListener()
    data = form(language="fr", prompt="names", temperature="0.4", task="translate", response_format="verbose_json")
    data.add_field("timestamp_granularities[]", "word")
    data.add_field("timestamp_granularities[]", "segment")
    reply = await ask(model, PATH, data=data)
    assert reply.status == 200, reply.body
    assert model.hearing == Hearing("fr", "names", 0.4, True, True)
    assert reply.body["task"] == "translate"
    assert reply.body["words"] == [{"start": 0.0, "end": 0.5, "word": " half"}]
    assert [row["id"] for row in reply.body["segments"]] == [0, 1]


@pytest.mark.parametrize(("style", "kind"), [("srt", "application/x-subrip"), ("vtt", "text/vtt")])
async def test_subtitles_have_their_type(ask, style, kind):
    """srt and vtt are texts of their own types."""
    reply = await ask(TinyListener(), PATH, data=form(response_format=style))
    assert reply.headers["Content-Type"] == f"{kind}; charset=utf-8"


@pytest.mark.parametrize("style", ["srt", "vtt", "verbose_json"])
async def test_times_are_refused_where_the_model_has_none(ask, style):
    """A format that needs times is a 400 that says so and lists what works."""
    reply = await ask(DeafListener(), PATH, data=form(response_format=style))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert "knows no times; it can answer json, text" in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"stream": "true"}, "stream"),
        ({"task": "sing"}, "task"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"langauge": "de"}, "langauge"),
    ],
)
async def test_a_fault_names_its_field(ask, fields, param):
    """Bad fields are a 400 with their name."""
    reply = await ask(TinyListener(), PATH, data=form(**fields))
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_form_without_a_file_is_refused(ask):
    """The missing part is named."""
    data = aiohttp.FormData({"model": "x"}, default_to_multipart=True)
    reply = await ask(TinyListener(), PATH, data=data)
    assert (reply.status, reply.error["param"]) == (400, "file")


async def test_a_text_in_place_of_the_file_is_refused(ask):
    """A part called file without a filename is no file."""
    data = aiohttp.FormData({"file": "abc"}, default_to_multipart=True)
    reply = await ask(TinyListener(), PATH, data=data)
    assert (reply.status, reply.error["param"]) == (400, "file")


PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'


@pytest.mark.parametrize(
    "body",
    [
        b"abc",
        b"--x\r\n\r\nabc",
        b"--x\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--x--\r\n",
        PART + b"Content-Transfer-Encoding: none\r\n\r\nabc\r\n--x--\r\n",
        PART + b"Content-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\n\r\nabc\r\n--y--\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="language"\r\n\r\n\xff\r\n--x--\r\n',
    ],
)
async def test_a_damaged_form_is_refused(ask, body):
    """Whatever is wrong with a form, the answer is a 400."""
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    reply = await ask(TinyListener(), PATH, data=body, headers=headers)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")


async def test_sound_longer_than_the_models_limit_is_refused(ask):
    """The model's own limit of seconds is told with both numbers."""
    reply = await ask(TinyListener(), PATH, data=hum_wav(16000, 6), headers={"Content-Type": "audio/wav"})
    assert (reply.status, reply.error["seconds"], reply.error["limit_seconds"]) == (400, 6.0, 5.0)


SEGMENTS = (Segment(0.0, 1.5, " Good\nday "), Segment(3661.0004, 3662.9996, " a <b> & c"))


def test_srt():
    """SubRip counts from 1, writes milliseconds after a comma, and keeps each text on one line."""
    assert to_srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nGood day\n\n2\n01:01:01,000 --> 01:01:03,000\na <b> & c\n"
    )


def test_vtt():
    """WebVTT has a heading, milliseconds after a point, and its markup escaped."""
    assert to_vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nGood day\n\n01:01:01.000 --> 01:01:03.000\na &lt;b&gt; &amp; c\n"
    )


def test_no_speech_is_an_empty_file():
    """Subtitles of silence are valid and empty."""
    assert to_srt(()) == ""
    assert to_vtt(()) == "WEBVTT\n"
