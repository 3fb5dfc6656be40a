"""Moonshine: its vocabulary, its chunks, its decoding loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.engines.local.model import Hearing
from pagein.engines.recipes.contract import Place
from pagein.engines.recipes.moonshine import Moonshine, loudness, read_vocabulary, split_at_silence, to_text
from pagein.errors import BadRequest, ConfigError, LoadFailed
from tests.engines.recipes.fakes import FakeSession, Value, opener

PIECES = [b"<unk>", b"<s>", b"</s>", "▁red".encode(), "▁blue".encode(), b"ish", "é".encode()[:1], "é".encode()[1:]]
END = 2
HIDDEN = 5


def vocabulary_file(folder: Path, pieces: list[bytes] = PIECES) -> Path:
    """Write pieces in the format of tokenizer.bin."""
    lengths = [bytes([len(p)]) if len(p) < 128 else bytes([len(p) % 128 + 128, len(p) // 128]) for p in pieces]
    file = folder / "tokenizer.bin"
    file.write_bytes(b"".join(length + piece for length, piece in zip(lengths, pieces, strict=True)))
    return file


@given(st.lists(st.binary(max_size=400), max_size=20))
def test_the_vocabulary_reads_back(tmp_path_factory, pieces):
    """Pieces of any length up to two bytes of it come back as they were written."""
    assert read_vocabulary(vocabulary_file(tmp_path_factory.mktemp("v"), pieces)) == pieces


def test_a_cut_vocabulary_is_refused(tmp_path: Path):
    """A file that ends inside a piece is LoadFailed with both numbers."""
    file = vocabulary_file(tmp_path)
    file.write_bytes(file.read_bytes() + b"\x09abc")
    with pytest.raises(LoadFailed, match="piece 8 says 9 bytes, 3 follow"):
        read_vocabulary(file)


def test_pieces_become_text():
    """The lower bar is a space, marks vanish, bytes of one letter meet, unknown numbers are left out."""
    assert to_text(PIECES, [1, 3, 5, 4, 6, 7, 2, 999]) == "redish blueé"


@given(st.lists(st.sampled_from([0.0, 0.5]), min_size=1, max_size=60), st.integers(1, 20))
def test_chunks_lose_nothing(levels, longest):
    """Whatever the sound, its chunks are at most the longest and together are the sound."""
    samples = np.repeat(np.array(levels, np.float32), 320) + np.arange(len(levels) * 320, dtype=np.float32) * 1e-6
    chunks = list(split_at_silence(samples, longest * 960))
    assert np.array_equal(np.concatenate(chunks), samples)
    assert all(0 < len(chunk) <= longest * 960 for chunk in chunks)


def test_chunks_end_in_the_pause():
    """The cut lies inside the only silent stretch of the last third."""
    samples = np.full(16000 * 30, 0.3, np.float32)
    samples[16000 * 16 : 16000 * 17] = 0
    first, second = split_at_silence(samples, 16000 * 20)
    assert 16000 * 16 < len(first) < 16000 * 17
    assert len(first) + len(second) == len(samples)


def test_loudness_of_less_than_a_frame():
    """Even a few samples have a loudness."""
    assert np.allclose(loudness(np.full(10, 0.5, np.float32)), [0.5])
    assert np.allclose(loudness(np.full(700, 0.5, np.float32)), [0.5, 0.5])


class Decoder:
    """Says the given tokens, then the end, for every chunk; checks its caches at every step as it goes."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.heard: list[int] = []
        self.steps = 0

    def __call__(self, feed):
        step = 0 if not feed["use_cache_branch"][0] else self.steps
        past = feed["past_key_values.0.decoder.key"].shape[2]
        assert past == step, "the decoder's cache must hold one entry per step taken"
        assert feed["encoder_attention_mask"].shape[1] > 7999, "the mask is the sound's, not the hidden states'"
        if step > 0:
            assert (feed["past_key_values.0.encoder.key"] == 7).all(), "the encoder's cache is the first step's"
        self.heard.append(int(feed["input_ids"][0, 0]))
        best = self.tokens[step] if step < len(self.tokens) else END
        logits = np.zeros((1, 1, len(PIECES)), np.float32)
        logits[0, 0, best] = 1
        self.steps = step + 1
        encoder = np.full((1, 2, HIDDEN, 4), 7, np.float32) if step == 0 else np.zeros((1, 2, 0, 4), np.float32)
        return [logits, np.zeros((1, 2, step + 1, 4), np.float32), encoder]


def listener(folder: Path, tokens: list[int], **options: object):
    """A recipe built on fake sessions; also its encoder and decoder."""
    vocabulary_file(folder)
    for name in ("encoder_model.ort", "decoder_model_merged.ort"):
        (folder / name).touch()
    sound = [Value("input_values", ["b", "n"]), Value("attention_mask", ["b", "n"])]
    encoder = FakeSession(sound, [], lambda feed: [np.zeros((1, HIDDEN, 3), np.float32)])
    cache = [Value(f"past_key_values.0.{side}.key", ["b", 2, "n", 4]) for side in ("decoder", "encoder")]
    names = ("input_ids", "encoder_hidden_states", "encoder_attention_mask", "use_cache_branch")
    decode = Decoder(tokens)
    outputs = [Value(name, []) for name in ("logits", "present.0.decoder.key", "present.0.encoder.key")]
    decoder = FakeSession([*(Value(name, []) for name in names), *cache], outputs, decode)
    return Moonshine(**options).build(Place("m", folder), opener(encoder, decoder)), encoder, decode


SOUND = np.full(16000, 0.1, np.float32)


def never() -> bool:
    """Nobody leaves."""
    return False


def test_words_are_decoded_until_the_end_mark(tmp_path: Path):
    """Each step is given the last token, starting with the start mark, and the text is what was said."""
    model, _, decode = listener(tmp_path, [3, 5, 4])
    found = model.transcribe(SOUND, Hearing(language="en"), never)
    assert (found.text, found.language, found.duration, found.segments) == ("redish blue", "en", 1.0, None)
    assert decode.heard == [1, 3, 5, 4]


def test_a_decoder_that_repeats_itself_is_stopped(tmp_path: Path):
    """At most 6.5 tokens per second of sound."""
    model, _, decode = listener(tmp_path, [3] * 100)
    assert model.transcribe(np.tile(SOUND, 2), Hearing(), never).text == " ".join(["red"] * 13)
    assert len(decode.heard) == 13


def test_silence_is_not_decoded(tmp_path: Path):
    """The model hears words in silence, so silence is not shown to it."""
    model, encoder, _ = listener(tmp_path, [3])
    assert model.transcribe(np.zeros(16000, np.float32), Hearing(), never).text == ""
    assert encoder.feeds == []


def test_short_sound_is_filled_up(tmp_path: Path):
    """Sound shorter than half a second reaches the encoder with silence after it."""
    model, encoder, _ = listener(tmp_path, [])
    model.transcribe(SOUND[:100], Hearing(), never)
    assert encoder.feeds[0]["input_values"].shape == (1, 8000)


def test_long_sound_is_heard_in_chunks(tmp_path: Path):
    """The texts of the chunks are joined by spaces."""
    model, encoder, _ = listener(tmp_path, [3], chunk_seconds=2.0)
    found = model.transcribe(np.tile(SOUND, 5), Hearing(), never)
    assert len(encoder.feeds) >= 3
    assert found.text == " ".join(["red"] * len(encoder.feeds))


def test_an_abandoned_request_stops_at_the_next_token(tmp_path: Path):
    """Once nobody waits, no further step is computed."""
    model, _, decode = listener(tmp_path, [3] * 100)
    model.transcribe(SOUND, Hearing(), lambda: len(decode.heard) >= 2)
    assert len(decode.heard) == 2


@pytest.mark.parametrize(
    ("hearing", "param"),
    [
        (Hearing(language="de"), "language"),
        (Hearing(prompt="names"), "prompt"),
        (Hearing(temperature=0.5), "temperature"),
        (Hearing(translate=True), "task"),
    ],
)
def test_what_the_model_cannot_do_is_refused(tmp_path: Path, hearing, param):
    """Wishes that would be dropped in silence are a BadRequest on their field."""
    model, _, _ = listener(tmp_path, [3])
    with pytest.raises(BadRequest) as caught:
        model.transcribe(SOUND, hearing, never)
    assert caught.value.details["param"] == param


def test_chunks_need_a_length(tmp_path: Path):
    """A chunk of less than a second is refused as an option."""
    with pytest.raises(ConfigError, match="chunk_seconds"):
        listener(tmp_path, [], chunk_seconds=0.5)
