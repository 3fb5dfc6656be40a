"""The folders that transformers loads give what the models gave in the format that they came in."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
VOICE = ROOT / "examples" / "five_models" / "data" / "voice.wav"

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs pagein[torch]", allow_module_level=True)

import onnx
import onnxruntime
import torch
import transformers


@pytest.fixture
def folder(monkeypatch):
    """Make a folder of `scripts/make_encoder_folders.py`, or find it made."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("make_encoder_folders")

    def make(name: str) -> Path:
        if not (MODELS / module.ENCODERS[name].source).is_file():
            assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
            pytest.skip("the example weights are not here: run scripts/setup dev")
        module.make_encoder_folder(name, MODELS)
        return MODELS / name

    yield make
    sys.modules.pop("make_encoder_folders", None)


def session(model: bytes) -> onnxruntime.InferenceSession:
    """Run an ONNX model."""
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


@torch.no_grad()
def test_minilm_gives_the_vectors_of_the_onnx_file(folder):
    """The same tokens, and the same vector of each."""
    from tokenizers import Tokenizer

    home = folder("minilm-hf")
    texts = ["The printer is broken again.", "Who pays 30 euros for it, and when?"]
    plain, tokenizer = (
        Tokenizer.from_file(str(MODELS / "minilm" / "tokenizer.json")), transformers.AutoTokenizer.from_pretrained(home)
    )  # fmt: skip
    original = session((MODELS / "minilm" / "model.onnx").read_bytes())
    model = transformers.BertModel.from_pretrained(home, add_pooling_layer=False).eval()
    for text in texts:
        found = tokenizer(text, return_tensors="pt")
        assert found.input_ids[0].tolist() == plain.encode(text).ids
        feed = {name: one.numpy() for name, one in found.items()}
        feed["token_type_ids"] = np.zeros_like(feed["input_ids"])
        wanted = original.run(None, feed)[0]
        ours = model(**found).last_hidden_state.numpy()
        assert wanted.shape == ours.shape
        assert np.abs(ours - wanted).max() < 1e-4 * np.abs(wanted).max()


@torch.no_grad()
def test_dinov2_gives_what_the_backbone_of_the_onnx_file_gives(folder):
    """The last norm's output, which the file's own head takes, is the model's."""
    home = folder("dinov2-s-hf")
    file = onnx.load(MODELS / "vit-focus" / "model.onnx")
    last = [node.output[0] for node in file.graph.node if node.name.startswith("/backbone/layernorm/")][-1]
    file.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    picture = np.random.default_rng(4).normal(size=(1, 3, 224, 224)).astype(np.float32)
    wanted = session(file.SerializeToString()).run([last], {"input_image": picture})[0]
    model = transformers.AutoModel.from_pretrained(home).eval()
    ours = model(torch.from_numpy(picture)).last_hidden_state.numpy()
    assert wanted.shape == ours.shape == (1, 257, 384)
    assert np.abs(ours - wanted).max() < 1e-3 * np.abs(wanted).max()


@torch.no_grad()
def test_whisper_hears_what_ctranslate2_hears(folder):
    """The encoder's output is the same, and so are the words."""
    import ctranslate2
    from faster_whisper import WhisperModel
    from faster_whisper.audio import decode_audio

    home = folder("whisper-tiny-en-hf")
    sound = decode_audio(str(VOICE), 16_000)
    extract = transformers.AutoFeatureExtractor.from_pretrained(home)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(home).eval()
    features = extract(sound, sampling_rate=16_000, return_tensors="pt").input_features
    original = WhisperModel(
        str(MODELS / "whisper-tiny-en"), device="cpu", compute_type="float32", cpu_threads=2, local_files_only=True
    )
    wanted = np.array(original.model.encode(ctranslate2.StorageView.from_array(features.numpy())))
    ours = model.get_encoder()(features).last_hidden_state.numpy()
    assert np.abs(ours - wanted).max() < 1e-3 * np.abs(wanted).max()
    words = " ".join(segment.text.strip() for segment in original.transcribe(sound, beam_size=1, temperature=0)[0])
    ids = model.generate(features, do_sample=False)[0]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == words
