"""The whisper engine: with its real weights, and what it says without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pagein.engines.contract import find_engine
from pagein.engines.whisper import Whisper
from pagein.errors import ConfigError, LoadFailed
from pagein.protocol import Endpoint
from tests.engines.conftest import DATA, word_errors
from tests.engines.local.conftest import Reply, request

PATH = "/v1/audio/transcriptions"


def test_the_engine_is_found_by_its_name():
    """The entry point `whisper` leads here, and the version names both libraries."""
    assert find_engine("whisper") is Whisper
    assert "ctranslate2" in Whisper.version()


def test_an_incomplete_folder_is_named_and_nothing_is_fetched(tmp_path: Path, spec_for):
    """Missing files are LoadFailed; the library is not asked, since it would look for the name in a hub."""
    (tmp_path / "config.json").touch()
    with pytest.raises(LoadFailed, match=r"model\.bin, tokenizer\.json missing"):
        Whisper(spec_for(tmp_path, "whisper")).start()


def test_a_broken_model_is_load_failed(tmp_path: Path, spec_for):
    """CTranslate2's own error becomes LoadFailed with the folder."""
    for name in ("model.bin", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(LoadFailed, match="cannot load"):
        Whisper(spec_for(tmp_path, "whisper")).start()


def test_unknown_options_are_refused(tmp_path: Path, spec_for):
    """A misspelt option names the nearest known one."""
    with pytest.raises(ConfigError, match="did you mean 'beam_size'"):
        Whisper(spec_for(tmp_path, "whisper", options={"beamsize": 1}))


@pytest.fixture(scope="module")
def ask(weights, spec_for, running):
    """Transcribe the first recording with some fields."""
    sockets: list[str] = []

    async def act(**fields: str) -> Reply:
        if not sockets:
            sockets.append(running(Whisper(spec_for(weights("whisper-tiny-en"), "whisper"))))
        form = aiohttp.FormData(fields)
        form.add_field("file", (DATA / "voice.wav").read_bytes(), filename="voice.wav", content_type="audio/wav")
        return await request(Endpoint(socket=sockets[0]), "POST", PATH, data=form)

    return act


@pytest.mark.engines
async def test_whisper_understands_people(ask):
    """Less than one word in five is wrong."""
    reply = await ask()
    assert word_errors((DATA / "voice.txt").read_text(), reply.body["text"]) < 0.2


@pytest.mark.engines
async def test_segments_and_words_have_times_inside_the_sound(ask):
    """verbose_json has segments and, where asked, words, in order, within the seven seconds."""
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    body: dict[str, Any] = (await ask(**fields)).body
    assert body["language"] == "en"
    assert body["duration"] == pytest.approx(7.1, abs=0.01)
    times = [(word["start"], word["end"]) for word in body["words"]]
    assert len(times) > 15
    assert times == sorted(times)
    assert all(0 <= start <= end <= 7.2 for start, end in times)
    assert body["segments"][0]["avg_logprob"] < 0


@pytest.mark.engines
@pytest.mark.parametrize(("style", "begins"), [("srt", "1\n00:00:00,"), ("vtt", "WEBVTT\n\n00:00:00.")])
async def test_subtitles(ask, style, begins):
    """Subtitles begin at the start of the sound and hold what was said."""
    reply = await ask(response_format=style)
    assert reply.body.startswith(begins)
    assert "leisure to consider" in " ".join(reply.body.split())


@pytest.mark.engines
@pytest.mark.parametrize(("fields", "param"), [({"language": "xx"}, "language"), ({"task": "translate"}, "task")])
async def test_what_an_english_model_cannot_do_is_refused(ask, fields, param):
    """Other languages and translation are a 400 on their field, not silently English."""
    reply = await ask(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)
