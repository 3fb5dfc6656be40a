"""The whisper engine: with its real weights, and what it says without them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pagein.engines.contract import find_engine
from pagein.engines.whisper import Weights, Whisper
from pagein.errors import ConfigError, InferenceFailed, LoadFailed
from pagein.memory.probes.process import pss_of
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


class Replica:
    """CTranslate2's side of sleep: refuses without a word for the first so many times."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.model_is_loaded = refusals, True

    def unload_model(self) -> None:
        self.refusals -= 1
        self.model_is_loaded = self.refusals >= 0

    def load_model(self) -> None:
        raise RuntimeError("Unable to open file 'model.bin'")


@pytest.mark.parametrize("refusals", [0, 3])
def test_sleep_is_asked_for_until_it_is_so(refusals):
    """A refusal because of a batch that has just ended is no end of it; one pause after each."""
    pauses: list[float] = []
    model = Replica(refusals)
    Weights(model, Path("w"), pauses.append).sleep()
    assert not model.model_is_loaded
    assert pauses == [Weights.PAUSE] * refusals


def test_a_sleep_that_never_comes_is_an_error():
    """After a bound it is said, with the time that it was tried for."""
    pauses: list[float] = []
    with pytest.raises(InferenceFailed, match="did not fall asleep: still loaded after 2 s"):
        Weights(Replica(10**9), Path("w"), pauses.append).sleep()
    assert len(pauses) == Weights.TRIES


def test_weights_that_cannot_be_read_again_are_load_failed():
    """The folder and the library's own words."""
    with pytest.raises(LoadFailed, match=r"cannot load w again: Unable to open file"):
        Weights(Replica(0), Path("w")).wake()


@pytest.mark.engines
@pytest.mark.skipif(sys.platform != "linux", reason="measures PSS")
async def test_asleep_it_takes_less_and_awake_it_hears_the_same(ask):
    """Sleep gives at least half of the 41 MB of int8 weights back, again and again; no word is lost."""
    before, pid = (await ask()).body["text"], os.getpid()
    for _ in range(2):
        awake = pss_of(pid)
        assert (await ask.post("/sleep")).status == 200
        assert awake - pss_of(pid) > 20 * 1024**2
        assert (await ask()).status == 503
        assert (await ask.post("/wake_up")).status == 200
        assert (await ask()).body["text"] == before


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

    async def post(path: str) -> Reply:
        return await request(Endpoint(socket=sockets[0]), "POST", path)

    act.post = post
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
