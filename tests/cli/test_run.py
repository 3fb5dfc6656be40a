"""run: what each kind of input asks for, what is sent, and how the answer is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pagein.cli.inputs import Kind, read_input, recognise
from pagein.errors import BadUsage

WAV = b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00" + bytes(24)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(24)
HELLO = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"content": "Hel"}}]},
    {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"total_tokens": 5}},
]


def offer(daemon, model, *capabilities):
    """Let one model offer other capabilities."""
    models = [replace(m, capabilities=list(capabilities)) if m.name == model else m for m in daemon.status.models]
    daemon.status = replace(daemon.status, models=models)


def test_prompt_is_a_streamed_chat(pagein, daemon):
    """A prompt goes to chat with the options, and the pieces are printed as one text with one newline."""
    daemon.answers["/v1/chat/completions"] = HELLO
    result = pagein("run", "chat", "Hi there", "--system", "Be brief", "--max-tokens", "9", "--temperature", "0")
    assert (result.stdout, result.exit_code) == ("Hello\n", 0)
    (path, body), *rest = daemon.seen
    assert rest == []
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "chat",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi there"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
    }


def test_chat_json_is_not_streamed(pagein, daemon):
    """--json asks for the whole answer and prints it as it came."""
    daemon.answers["/v1/chat/completions"] = {"choices": [{"message": {"content": "Hello"}}]}
    result = pagein("run", "chat", "Hi", "--json")
    assert json.loads(result.stdout) == daemon.answers["/v1/chat/completions"]
    assert "stream" not in daemon.seen[0][1]


def test_completion_can_be_chosen(pagein, daemon):
    """--as chooses among what the model does with this input."""
    daemon.answers["/v1/completions"] = [{"choices": [{"text": " world"}]}]
    assert pagein("run", "chat", "Hello", "--as", "completion").stdout == " world\n"
    assert daemon.seen[0][1]["prompt"] == "Hello"


def test_text_file_and_standard_input_are_prompts(pagein, daemon, tmp_path):
    """A text file's content, and standard input for -, take the place of the prompt."""
    daemon.answers["/v1/chat/completions"] = HELLO
    (tmp_path / "q.txt").write_text("From a file: ä")
    pagein("run", "chat", "q.txt")
    pagein("run", "chat", "-", input="From a pipe")
    assert [body["messages"][0]["content"] for _, body in daemon.seen] == ["From a file: ä", "From a pipe"]


def test_recording_is_transcribed(pagein, daemon, tmp_path):
    """A recording is uploaded for transcription, and the text printed."""
    daemon.answers["/v1/audio/transcriptions"] = {"text": " Hello there. "}
    (tmp_path / "voice.wav").write_bytes(WAV)
    assert pagein("run", "speech-moonshine-tiny-en", "voice.wav").stdout == "Hello there.\n"
    path, body = daemon.seen[0]
    assert path == "/v1/audio/transcriptions"
    assert body == {"model": "speech-moonshine-tiny-en", "file": WAV}


def test_recording_from_a_pipe(pagein, daemon):
    """Bytes on standard input are told by what they are, not by a name."""
    daemon.answers["/v1/audio/transcriptions"] = {"text": "Hi"}
    assert pagein("run", "speech-moonshine-tiny-en", "-", input=WAV).stdout == "Hi\n"


def test_embedding_is_shortened(pagein, daemon):
    """A vector is printed shortened for people and whole with --json."""
    daemon.answers["/v1/embeddings"] = {"data": [{"embedding": [0.6, 0.8] + [0.0] * 382}]}
    out = pagein("run", "embed", "some text").stdout
    assert out.startswith("[0.6000, 0.8000, 0.0000")
    assert "…]  384 dimensions, length 1.000" in out
    whole = json.loads(pagein("run", "embed", "some text", "--json").stdout)
    assert len(whole["data"][0]["embedding"]) == 384


def test_image_is_classified(pagein, daemon, tmp_path):
    """An image goes to the classifier where the model is one; labels are printed with their scores."""
    offer(daemon, "vit", "classification")
    daemon.answers["/v1/images/classifications"] = {"data": [{"label": "tabby cat", "score": 0.75, "index": 281}]}
    (tmp_path / "cat.png").write_bytes(PNG)
    assert pagein("run", "vit", "cat.png").stdout == "0.7500  tabby cat\n"
    assert daemon.seen[0][1]["file"] == PNG


def test_saliency_is_drawn(pagein, daemon, tmp_path):
    """--as saliency draws the map as shades, dark to bright, and names its peak."""
    grid = {"width": 2, "height": 2, "values": [0.0, 0.5, 0.75, 1.0]}
    daemon.answers["/v1/images/saliency"] = {"map": grid, "peak": {"x": 0.75, "y": 0.5, "score": 0.99}}
    (tmp_path / "cat.png").write_bytes(PNG)
    lines = pagein("run", "vit", "cat.png", "--as", "saliency").stdout.splitlines()
    assert lines == [
        "  ▒▒",
        "▓▓██",
        "peak at 75 % from the left, 50 % from the top, score 0.9900; map from 0.0000 to 1.0000",
    ]


def test_flat_saliency(pagein, daemon, tmp_path):
    """A map without any difference is drawn without a crash."""
    offer(daemon, "vit", "saliency")
    grid = {"width": 1, "height": 1, "values": [0.5]}
    daemon.answers["/v1/images/saliency"] = {"map": grid, "peak": {"x": 0, "y": 0, "score": 0.5}}
    (tmp_path / "cat.png").write_bytes(PNG)
    assert pagein("run", "vit", "cat.png").exit_code == 0


def test_rerank_needs_and_orders_documents(pagein, daemon):
    """A reranker prints the documents in the order of the answer, with scores; without documents it is refused."""
    daemon.answers["/v1/rerank"] = {
        "results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
    }
    assert pagein("run", "rerank", "q", "-d", "first", "-d", "second").stdout == "0.9000  second\n0.1000  first\n"
    refused = pagein("run", "rerank", "q")
    assert refused.exit_code == 2
    assert "--document" in refused.stderr


def test_answer_of_another_shape(pagein, daemon):
    """An answer that has not the documented shape is one readable line, not a traceback."""
    daemon.answers["/v1/embeddings"] = {"vectors": []}
    result = pagein("run", "embed", "text")
    assert result.exit_code == 8
    assert "'data'" in result.stderr
    assert "--json" in result.stderr


def test_input_that_the_model_cannot_take(pagein, daemon, tmp_path):
    """A recording for a chat model is refused with what the model does, before anything is sent."""
    (tmp_path / "voice.wav").write_bytes(WAV)
    result = pagein("run", "chat", "voice.wav")
    assert result.stderr == "error: model 'chat' cannot do transcription; it offers: chat, completion\n"
    assert daemon.seen == []


def test_wish_that_the_input_does_not_fit(pagein, daemon, tmp_path):
    """--as must fit the input."""
    (tmp_path / "voice.wav").write_bytes(WAV)
    result = pagein("run", "chat", "voice.wav", "--as", "chat")
    assert result.exit_code == 2
    assert "voice.wav is audio: chat does not take it; transcription would" in result.stderr


def test_unknown_model(pagein, daemon):
    """A misspelt model is refused with the nearest one."""
    result = pagein("run", "chatt", "Hi")
    assert result.exit_code == 4
    assert result.stderr.endswith("hint: did you mean 'chat'?\n")


def test_missing_file_is_not_a_prompt(pagein, daemon):
    """What looks like a media file and is not there is an error, not a prompt."""
    result = pagein("run", "chat", "voise.wav")
    assert result.exit_code == 2
    assert "there is no file 'voise.wav'" in result.stderr


def test_error_in_a_stream(pagein, daemon):
    """An error in the middle of a stream ends the line and the command with that error."""
    error = {"error": {"message": "the worker ended: signal 9", "code": "worker_died", "hint": None}}
    daemon.answers["/v1/chat/completions"] = [HELLO[1], error]
    result = pagein("run", "chat", "Hi")
    assert result.stdout == "Hel\n"
    assert result.stderr == "error: the worker ended: signal 9\n"
    assert result.exit_code == 1


def test_model_cannot_drive_the_terminal(pagein, daemon):
    """Control characters in an answer are not passed on."""
    daemon.answers["/v1/chat/completions"] = [{"choices": [{"delta": {"content": "a\x1b]0;x\x07b\n"}}]}]
    assert pagein("run", "chat", "Hi").stdout == "a]0;xb\n"


def test_no_daemon(pagein, nowhere):
    """Without a daemon run ends with exit code 8."""
    assert pagein("run", "chat", "Hi").exit_code == 8


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (WAV, Kind.AUDIO),
        (b"ID3\x04\x00\x00\xff\xfe", Kind.AUDIO),
        (b"ID3 is a text about tags", Kind.TEXT),
        (PNG, Kind.IMAGE),
        (b"BM is how this text begins", Kind.TEXT),
        (b"BM\x9a\x00\x00\x00", Kind.IMAGE),
        ("Grüße".encode(), Kind.TEXT),
    ],
)
def test_recognise(data, kind):
    """The kind is told by the bytes; what is UTF-8 text is text."""
    assert recognise(data, "x").kind is kind


@pytest.mark.parametrize("data", [b"", b" \n", b"\x00\x01\x02\x03", b"\xff\xfe\xfd"])
def test_recognise_refuses(data):
    """Nothing, and bytes of no known kind, are refused."""
    with pytest.raises(BadUsage):
        recognise(data, "x")


def test_long_prompt_is_no_file_name():
    """A prompt longer than any file name is a prompt."""
    assert read_input("why " * 5000).kind is Kind.TEXT
