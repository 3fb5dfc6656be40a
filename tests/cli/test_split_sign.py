"""pagein split sign, check --trust and compare."""

from __future__ import annotations

import importlib.util
import json
import types

import pytest
from tests.parts.build import split

from pagein.cli import split_compare, split_sign
from pagein.errors import SplitBroken

ROW = {
    "event": "compared", "task": "tag", "precision": "int8", "nbytes": 1048576, "stored_bytes": 4194304, "samples": 2,
    "values": 90, "most": 1.23456, "mean": 0.0123456, "scale": 7.5, "agree": 0.975,
}  # fmt: skip


@pytest.fixture
def keys(tmp_path):
    """A private key's and its public key's file."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    for name, how in (("key", NoEncryption()), ("locked", BestAvailableEncryption(b"open"))):
        (tmp_path / f"{name}.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    text = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(text)
    return tmp_path


def test_a_split_is_signed_and_checked(pagein, keys):
    """What was signed is trusted, what was not is refused with exit code 3; nothing printed is of the private key."""
    folder = keys / "split"
    split(folder)
    trust = ("--trust", str(keys / "public.pem"))
    refused = pagein("split", "check", str(folder), *trust)
    assert refused.exit_code == 3
    assert "only signed splits are trusted" in refused.stderr
    signed = pagein("split", "sign", str(folder), "--key", str(keys / "key.pem"))
    assert signed.exit_code == 0, signed.stderr
    assert "signed 5 files" in signed.stdout
    assert "PRIVATE" not in signed.stdout + signed.stderr
    assert pagein("split", "check", str(folder), *trust).exit_code == 0
    told = json.loads(pagein("split", "sign", str(folder), "--key", str(keys / "key.pem"), "--json").stdout)
    assert told == {"signature": str(folder / "model.sig"), "files": 5}


def test_a_passphrase_is_asked_for_on_a_terminal_only(pagein, keys, monkeypatch):
    """An encrypted key needs somebody who types: never an option, which process lists show."""
    folder = keys / "split"
    split(folder)
    command = ("split", "sign", str(folder), "--key", str(keys / "locked.pem"))
    result = pagein(*command)
    assert result.exit_code == 2
    assert "no terminal" in result.stderr
    monkeypatch.setattr(split_sign, "sys", types.SimpleNamespace(stdin=types.SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr(split_sign.getpass, "getpass", lambda words: "open")
    assert pagein(*command).exit_code == 0
    monkeypatch.setattr(split_sign.getpass, "getpass", lambda words: "wrong")
    result = pagein(*command)
    assert result.exit_code == 2
    assert "wrong" not in result.stderr.replace("passphrase is wrong", "")


def test_options_belong_to_their_verbs(pagein, keys):
    """What a verb does not have is refused, what it needs is asked for, and a key that is not there is named."""
    folder = str(keys)
    for command, words in (
        (("sign", folder), "sign needs --key"),
        (("sign", folder, "--key", "none.pem"), "none.pem cannot be read"),
        (("compare", folder), "compare needs --tasks"),
        (("check", folder, "--key", "none.pem"), "check has no option --key"),
        (("apply", folder, "--trust", "none.pem"), "apply has no option --trust"),
    ):
        result = pagein("split", *command)
        assert result.exit_code != 0
        assert words in result.stderr


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Take the place of the process that computes."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "tasks.yaml").write_text("tasks:\n  tag: {kind: tokens, samples: [x]}\n")
    asked = []

    def says(*steps):
        def events(module, arguments, what):
            asked.append((module, arguments))
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                yield step

        monkeypatch.setattr(split_compare, "events", events)
        return asked

    return says


def test_differences_are_shown(pagein, process, tmp_path):
    """A row for each task and precision, with both sizes; as JSON the numbers themselves."""
    asked = process(ROW, {**ROW, "task": "embed", "agree": None, "most": None, "mean": None})
    command = ("split", "compare", "made", "--tasks", str(tmp_path / "tasks.yaml"), "--precision", "int8")
    result = pagein(*command)
    assert result.exit_code == 0, result.stderr
    assert asked == [
        ("pagein.parts.splitting.comparing", ["made", "--tasks", str(tmp_path / "tasks.yaml"), "--precision", "int8"])
    ]
    rows = [line.split() for line in result.stdout.splitlines()[1:3]]
    assert rows[0] == ["tag", "int8", "1.0", "MiB", "4.0", "MiB", "2", "1.235", "0.01235", "7.5", "97.5", "%"]
    assert rows[1][-6:] == ["not", "finite", "not", "finite", "7.5", "-"]
    body = {key: value for key, value in ROW.items() if key != "event"}
    assert json.loads(pagein(*command, "--json").stdout)["compared"][0] == body


def test_nothing_to_compare_and_errors_are_told(pagein, process, tmp_path):
    """A split without other precisions says how to make some; the process's error keeps its exit code."""
    command = ("split", "compare", "made", "--tasks", str(tmp_path / "tasks.yaml"))
    process()
    assert "--precision" in pagein(*command).stdout
    process(SplitBroken("sample 1 fails"))
    result = pagein(*command)
    assert result.exit_code == 3
    assert "sample 1 fails" in result.stderr
