"""Embedding and sparse reranking: what is fed, and how the output becomes vectors and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagein.engines.recipes.contract import Place
from pagein.engines.recipes.embedding import Embedding, mean_pooled, normalised
from pagein.engines.recipes.sparse_rerank import SparseRerank, word_weights
from pagein.errors import LoadFailed
from tests.engines.recipes.fakes import WORDS, FakeSession, Value, opener, write_tokenizer

INPUTS = [Value("input_ids", ["b", "s"]), Value("attention_mask", ["b", "s"])]


def one_hot(feed):
    """Each token's vector has a one at the token's number; padding has nines, which nobody may see."""
    vectors = np.eye(len(WORDS), dtype=np.float32)[feed["input_ids"]]
    vectors[feed["attention_mask"] == 0] = 9
    return [vectors]


def session(compute=one_hot, inputs=INPUTS) -> FakeSession:
    """A session over the seven words."""
    return FakeSession(inputs, [Value("out", ["b", "s", 7])], compute)


def test_vectors_are_means_over_real_tokens_in_the_order_of_the_texts(tmp_path: Path):
    """Sorting and padding inside batches show neither in the order nor in the values."""
    write_tokenizer(tmp_path)
    model = Embedding(normalise=False).build(Place("m", tmp_path / "x.onnx"), opener(session()))
    found = model.embed(["red red blue green", "blue", "red"])
    assert found.tokens == 6 + 3 + 3
    assert np.allclose(found.vectors[0], np.array([0, 0, 1, 1, 2, 1, 1]) / 6)
    assert np.allclose(found.vectors[1], np.array([0, 0, 1, 1, 0, 1, 0]) / 3)
    assert np.allclose(found.vectors[2], np.array([0, 0, 1, 1, 1, 0, 0]) / 3)


def test_cls_pooling_takes_the_first_token(tmp_path: Path):
    """pooling cls gives the vector of the start mark."""
    write_tokenizer(tmp_path)
    model = Embedding(pooling="cls").build(Place("m", tmp_path), opener_in(tmp_path, session()))
    assert model.embed(["red"]).vectors[0].tolist() == [0, 0, 1, 0, 0, 0, 0]


def opener_in(folder: Path, fake: FakeSession):
    """An opener for a folder that has a model file."""
    (folder / "model.onnx").touch()
    return opener(fake)


def test_a_model_that_pools_itself_is_taken_as_it_is(tmp_path: Path):
    """Two-dimensional output is one vector per text already."""
    write_tokenizer(tmp_path)
    pooled = session(lambda feed: [np.tile(np.array([[3, 4]], np.float32), (len(feed["input_ids"]), 1))])
    model = Embedding().build(Place("m", tmp_path / "x.onnx"), opener(pooled))
    assert model.embed(["red", "blue"]).vectors.tolist() == [[np.float32(0.6), np.float32(0.8)]] * 2


def test_batches_are_bounded(tmp_path: Path):
    """No run gets more texts or padded tokens than the recipe says."""
    write_tokenizer(tmp_path)
    fake = session()
    model = Embedding(batch_texts=3, batch_tokens=12).build(Place("m", tmp_path / "x.onnx"), opener(fake))
    model.embed(["red"] * 7 + ["red blue green red"] * 2)
    assert all(feed["input_ids"].size <= 12 and len(feed["input_ids"]) <= 3 for feed in fake.feeds)
    assert sum(len(feed["input_ids"]) for feed in fake.feeds) == 9


def test_wrong_models_are_refused_with_what_they_have(tmp_path: Path):
    """A model without token numbers as input, or with output of other dimensions, is named as such."""
    write_tokenizer(tmp_path)
    place = Place("m", tmp_path / "x.onnx")
    with pytest.raises(LoadFailed, match="the model has image"):
        Embedding().build(place, opener(session(inputs=[Value("image", [1, 3, 8, 8])])))
    flat = session(lambda feed: [np.zeros(3, np.float32)])
    with pytest.raises(LoadFailed, match="the model gives 1"):
        Embedding().build(place, opener(flat)).embed(["red"])


def test_mean_and_norm():
    """The mean leaves padding out; a zero vector stays zero instead of becoming no number."""
    output = np.array([[[1, 3], [3, 5], [100, 100]]], np.float32)
    assert mean_pooled(output, [2]).tolist() == [[2, 4]]
    assert normalised(np.zeros((1, 2), np.float32)).tolist() == [[0, 0]]


def test_word_weights_follow_the_formula():
    """max over real tokens of log(1 + relu(x)), although the largest is taken before the logarithm."""
    logits = np.random.default_rng(2).normal(0, 3, (3, 5, 11)).astype(np.float32)
    lengths = [5, 2, 1]
    wanted = [np.log1p(np.maximum(row[:n], 0)).max(axis=0) for row, n in zip(logits, lengths, strict=True)]
    assert np.allclose(word_weights(logits, lengths), wanted)


def test_documents_are_scored_by_their_common_words(tmp_path: Path):
    """Scores stand in the order of the documents, whatever batches they were computed in."""
    write_tokenizer(tmp_path)
    fake = session(lambda feed: [8 * one_hot(feed)[0] * (feed["attention_mask"][..., None])])
    model = SparseRerank(batch_texts=2).build(Place("m", tmp_path / "x.onnx"), opener(fake))
    found = model.rerank("red blue", ["green", "red blue green", "blue", "red red"])
    marks = 2 * np.log1p(8.0) ** 2
    common = [(score - marks) / np.log1p(8.0) ** 2 for score in found.scores]
    assert np.allclose(common, [0, 2, 1, 1], atol=1e-5)
    assert found.tokens == 4 + 3 + 5 + 3 + 4


def test_documents_are_cut_only_where_asked(tmp_path: Path):
    """A maximum of tokens per document cuts; without one the length is refused."""
    write_tokenizer(tmp_path)
    model = SparseRerank(max_tokens=5).build(Place("m", tmp_path / "x.onnx"), opener(session()))
    assert model.rerank("red", ["red " * 50], max_tokens_per_document=4).tokens == 3 + 4
    with pytest.raises(Exception, match="52 tokens"):
        model.rerank("red", ["red " * 50])
