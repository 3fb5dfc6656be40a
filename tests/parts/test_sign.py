"""Signed splits: only what the trusted key signed is used, and nothing of another is looked at."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
torch = pytest.importorskip("torch")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from pagein.catalog.split.plan import Task
from pagein.catalog.split.root import PartsRoot
from pagein.errors import BadUsage, PartRefused, PlanRefused, SplitBroken
from pagein.parts.files import bundle, signing
from pagein.parts.files.check import check_split
from pagein.parts.files.signing import Trust, sign_split
from tests.parts.build import split as small_split
from tests.parts.served import Net, add_part, ids, lora, net, source, split_llama, split_net
from tests.parts.served import llama as whole_llama

pytestmark = pytest.mark.torch
THEIRS = Path(__file__).parents[1] / "fixtures" / "model-signing-1.1.1"


def pem(key, passphrase: bytes | None = None) -> bytes:
    """The text of a private key."""
    how = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def public(key, path: Path) -> Path:
    """Write the public key."""
    how = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, how))
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A private key's text and its public one's file, and those of somebody else."""
    root = tmp_path_factory.mktemp("keys")
    mine, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    return pem(mine), public(mine, root / "mine.pem"), pem(other), public(other, root / "other.pem")


@torch.no_grad()
def test_a_signed_split_is_used(tmp_path, load, keys):
    """What the trusted key signed is loaded, and answers as ever; so is it without any question."""
    mine, trusted, _, _ = keys
    whole = net()
    split_net(tmp_path, whole)
    path, files = sign_split(tmp_path, mine)
    assert (path.name, files) == ("model.sig", len([one for one in tmp_path.iterdir() if one.name[0] != "."]) - 1)
    for trust in (trusted, str(trusted), None):
        assert torch.equal(load(tmp_path, build=Net, trust=trust)(ids(), task="tag"), whole(ids(), "tag"))
    assert check_split(tmp_path, vouch=Trust(trusted).vouch).faults == []


def test_unsigned_and_foreign_ones_are_refused(tmp_path, load, keys):
    """Without a signature, or with somebody else's, nothing is loaded, and both keys are told apart."""
    mine, trusted, other, _ = keys
    split_net(tmp_path, net())
    with pytest.raises(PlanRefused, match="only signed splits are trusted"):
        load(tmp_path, build=Net, trust=trusted)
    sign_split(tmp_path, other)
    with pytest.raises(PlanRefused, match=r"made with another key \(.*than the trusted"):
        load(tmp_path, build=Net, trust=trusted)
    body = json.loads((tmp_path / "model.sig").read_text())
    body["verificationMaterial"]["publicKey"]["hint"] = bundle.parse(signature_of(tmp_path, mine)).hint
    sign_split(tmp_path, other)
    (tmp_path / "model.sig").write_text(json.dumps(body))  # says it is mine
    with pytest.raises(PlanRefused, match="is none of the trusted key"):
        load(tmp_path, build=Net, trust=trusted)


def signature_of(folder: Path, key: bytes) -> bytes:
    """The signature that a key would give, the one that stands left as it is."""
    before = (folder / "model.sig").read_bytes()
    found = sign_split(folder, key)[0].read_bytes()
    (folder / "model.sig").write_bytes(before)
    return found


def test_nothing_of_an_untrusted_plan_is_looked_at(tmp_path, load, keys, monkeypatch):
    """The signature is asked first: a plan that is no plan at all is refused for its signature, unparsed."""
    from pagein.catalog.split import root

    _, trusted, other, _ = keys
    split_net(tmp_path, net())
    sign_split(tmp_path, other)
    monkeypatch.setattr(root, "parse_plan", lambda *given: pytest.fail("it was parsed"))
    (tmp_path / "split_plan.json").write_bytes(b"{")
    with pytest.raises(PlanRefused, match="another key"):
        load(tmp_path, build=Net, trust=trusted)
    (tmp_path / "model.sig").unlink()
    with pytest.raises(PlanRefused, match="only signed"):
        load(tmp_path, build=Net, trust=trusted)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: add_part(folder, "m", {"m/tag.weight": source(torch.ones(5, 16))}), "split_plan.json has"),
        (lambda folder: (folder / "config.json").write_text('{"a": 2}'), "config.json has changed"),
        (lambda folder: (folder / "key" / "config.json").write_text("{}"), "key/config.json has changed"),
        (lambda folder: (folder / "key" / "tokenizer.json").write_text("{}"), "key/tokenizer.json was put beside"),
        (lambda folder: (folder / "generation_config.json").write_text("{}"), "generation_config.json was put beside"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is signed and not there"),
        (lambda folder: (folder / "key" / "chat.jinja").symlink_to(folder / "config.json"), "is a link"),
        (lambda folder: (folder / "other").symlink_to(folder / "key"), "other is a link"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe is no regular file"),
    ],
)  # fmt: skip
def test_what_was_changed_since_is_refused(tmp_path, load, keys, change, why):
    """The plan, a setting, one more file, one less, a link: each is named; signed again by the same key it is used."""
    mine, trusted, _, _ = keys
    split_net(tmp_path, net())
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "config.json").write_text('{"b": 1}')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("nothing of git is signed")
    sign_split(tmp_path, mine)
    (tmp_path / ".git" / "HEAD").write_text("or read")
    load(tmp_path, build=Net, trust=trusted)
    change(tmp_path)
    with pytest.raises(PlanRefused, match=why) as told:
        load(tmp_path, build=Net, trust=trusted)
    assert told.value.details["field"] == "signature"
    if "link" in why or "regular" in why:
        with pytest.raises(PlanRefused, match=why):
            sign_split(tmp_path, mine)
        return
    sign_split(tmp_path, mine)
    load(tmp_path, build=Net, trust=trusted)


@pytest.mark.parametrize("way", ["setting", "folder", "plan"])
def test_what_changes_while_the_model_is_built_is_refused(tmp_path, load, keys, way):
    """Settings are read by their paths after the signature was asked: what is not the same then is not used."""
    mine, trusted, _, _ = keys
    split, other = tmp_path / "split", tmp_path / "other"
    for folder in (split, other):
        split_net(folder, net())
        (folder / "generation_config.json").write_text("{}")
        sign_split(folder, mine)

    def build() -> Net:
        if way == "setting":
            (split / "generation_config.json").write_text('{"max_length": 1}')
        elif way == "plan":
            add_part(split, "m", {"m/tag.weight": source(torch.ones(5, 16))})
            sign_split(split, mine)
        else:
            split.rename(tmp_path / "away")
            other.rename(split)
        return Net()

    with pytest.raises(PlanRefused, match="generation_config.json has changed" if way == "setting" else "while the"):
        load(split, build=build, trust=trusted)
    if way != "setting":
        load(split, build=Net, trust=trusted)


def test_folders_that_cannot_be_looked_through_are_refused(tmp_path, keys):
    """A tree that is too deep is refused by its depth, whoever signs or trusts; so is a folder that nobody may list."""
    mine, trusted, _, _ = keys
    split_net(tmp_path, net())
    sign_split(tmp_path, mine)
    deep = tmp_path.joinpath(*["d"] * 20)
    deep.mkdir(parents=True)
    for act in (lambda: Trust(trusted).check(tmp_path), lambda: sign_split(tmp_path, mine)):
        with pytest.raises(PlanRefused, match="more than 16 folders deep"):
            act()
    if os.geteuid():
        (tmp_path / "d").chmod(0)
        with pytest.raises(PlanRefused, match="cannot be read"):
            sign_split(tmp_path, mine)
        (tmp_path / "d").chmod(0o700)


def test_a_plan_that_changes_while_it_is_signed_is_not_signed(tmp_path, keys, monkeypatch):
    """What is signed is the plan that was looked at, and whose parts were compared."""
    mine, trusted, _, _ = keys
    split_net(tmp_path, net())
    found = signing._digests

    def slow(root, *, parts):
        monkeypatch.setattr(signing, "_digests", found)
        add_part(tmp_path, "m", {"m/tag.weight": source(torch.ones(5, 16))})
        return found(root, parts=parts)

    monkeypatch.setattr(signing, "_digests", slow)
    with pytest.raises(SplitBroken, match="changed meanwhile"):
        sign_split(tmp_path, mine)
    assert not (tmp_path / "model.sig").exists()
    sign_split(tmp_path, mine)
    Trust(trusted).check(tmp_path)


def test_a_damaged_part_is_refused_as_ever(tmp_path, load, keys):
    """The signed plan has the parts' digests: a part that was changed is refused as it is loaded, and never signed."""
    mine, trusted, _, _ = keys
    plan = split_net(tmp_path, net())
    sign_split(tmp_path, mine)
    path = tmp_path / plan.parts["tag"].file("stored").file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model = load(tmp_path, build=Net, trust=trusted)
    with pytest.raises(PartRefused, match="digest"):
        model(ids(), task="tag")
    model(ids(), task="score")
    with pytest.raises(SplitBroken, match=path.name):
        sign_split(tmp_path, mine)


@torch.no_grad()
def test_what_joins_must_be_signed_too(tmp_path, load, keys):
    """A running model takes up a new plan only once it is signed; until then it serves on as it was."""
    mine, trusted, other, _ = keys
    split_llama(tmp_path, whole_llama())
    sign_split(tmp_path, mine)
    model = load(tmp_path, trust=trusted)
    before = model(ids(), task="email").logits
    task = Task("seven", ("backbone", "head", "seven"), "generate")
    add_part(tmp_path, "seven", lora("seven", 7), tasks={"seven": task})
    for key in (None, other):
        if key is not None:
            sign_split(tmp_path, key)
        with pytest.raises(PlanRefused):
            model.pagein.refresh()
        assert torch.equal(model(ids(), task="email").logits, before)
        assert "seven" not in model.pagein.plan.tasks
    sign_split(tmp_path, mine)
    model.pagein.refresh()
    assert not torch.equal(model(ids(), task="seven").logits, before)


def test_every_byte_of_a_signature_counts(tmp_path, keys):
    """A statement or a signature of which one character was changed is refused, whatever it is."""
    mine, trusted, _, _ = keys
    small_split(tmp_path)
    sign_split(tmp_path, mine)
    trust = Trust(trusted)
    body = json.loads((tmp_path / "model.sig").read_text())
    trust.check(tmp_path)
    envelope = body["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    other = payload.replace(b'"files"', b'"filed"')
    for text in (other, payload + b" ", payload[:-1]):
        envelope["payload"] = base64.b64encode(text).decode()
        (tmp_path / "model.sig").write_text(json.dumps(body))
        with pytest.raises(PlanRefused, match="is none of the trusted key"):
            trust.check(tmp_path)
    envelope["payload"] = base64.b64encode(payload).decode()
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    signature[-1] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    (tmp_path / "model.sig").write_text(json.dumps(body))
    with pytest.raises(PlanRefused, match="is none of the trusted key"):
        trust.check(tmp_path)


def hostile(**changes) -> bytes:
    """A bundle's text with one thing otherwise."""
    envelope = {"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": "AA=="}]}
    body = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": ""}, "tlogEntries": []},
        "dsseEnvelope": {**envelope, **changes.pop("envelope", {})},
    }
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1, "a": 1}',
        b"\xff",
        b"[" * 100_000,
        hostile(mediaType="x"),
        hostile(dsseEnvelope=None),
        hostile(verificationMaterial={"certificate": {}}),
        hostile(envelope={"payload": 3}),
        hostile(envelope={"payload": "*"}),
        hostile(envelope={"signatures": []}),
        hostile(envelope={"payloadType": "x"}),
        hostile(),
    ],
)
def test_hostile_signatures_are_refused(tmp_path, keys, text):
    """Whatever lies there in a signature's place is refused with the file's name, and raises nothing else."""
    small_split(tmp_path)
    (tmp_path / "model.sig").write_bytes(text)
    with pytest.raises(PlanRefused, match=r"model\.sig"):
        Trust(keys[1]).check(tmp_path)


def test_a_statement_must_be_of_whole_files(keys):
    """What the key signed for another purpose lists no files, and is none of a split."""
    good = json.loads(bundle.statement("x", {"a": "00" * 32, "b": "11" * 32}))
    assert bundle.files_of(json.dumps(good).encode()) == {"a": "00" * 32, "b": "11" * 32}
    for change in (
        {"_type": "x"}, {"predicateType": "x"}, {"predicate": {}}, {"subject": []},
        {"subject": [{"name": "x", "digest": {"sha256": "22" * 32}}]},
        {"predicate": {**good["predicate"], "serialization": {"method": "shards"}}},
        {"predicate": {**good["predicate"], "resources": [{"name": "a", "algorithm": "blake2", "digest": "00"}]}},
        {"predicate": {**good["predicate"], "resources": [3]}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="statement"):
            bundle.files_of(json.dumps({**good, **change}).encode())


def test_what_model_signing_signed_is_trusted(tmp_path):
    """A signature that `model_signing sign key` (1.1.1) wrote over three files is read and proven as ours are."""
    (tmp_path / "model.sig").write_bytes((THEIRS / "model.sig").read_bytes())
    with PartsRoot(tmp_path) as root:
        signed = Trust(THEIRS / "public.pem").signed_files(root)
    texts = {"a.json": b"a", "split_plan.json": b"plan", "sub/config.json": b"settings"}
    assert signed == {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def test_model_signing_trusts_what_is_signed_here(tmp_path, keys):
    """The verifier of OpenSSF Model Signing proves our signature over the whole folder, where it is installed."""
    verifying = pytest.importorskip("model_signing.verifying")
    small_split(tmp_path)
    sign_split(tmp_path, keys[0])
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=keys[1])
    verifier.verify(tmp_path, tmp_path / "model.sig")


def test_keys_of_other_kinds_are_refused(tmp_path, keys):
    """Ed25519 and curves that Model Signing does not have, a private key as the trusted one, no key at all."""
    small_split(tmp_path / "split")
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256K1())):
        with pytest.raises(BadUsage, match="another kind"):
            sign_split(tmp_path / "split", pem(key))
        with pytest.raises(BadUsage, match="another kind"):
            Trust(public(key, tmp_path / "key.pem"))
    (tmp_path / "key.pem").write_bytes(keys[0])
    with pytest.raises(BadUsage, match="is a private key"):
        Trust(tmp_path / "key.pem")
    (tmp_path / "key.pem").write_bytes(b"no key")
    with pytest.raises(BadUsage, match="no public key"):
        Trust(tmp_path / "key.pem")
    with pytest.raises(BadUsage, match="cannot be read"):
        Trust(tmp_path / "none.pem")
    assert not (tmp_path / "split" / "model.sig").exists()


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_encrypted_keys_and_other_curves(tmp_path, curve):
    """A passphrase opens an encrypted key; without it or with a wrong one nothing is signed or repeated."""
    small_split(tmp_path / "split")
    key = ec.generate_private_key(curve)
    text = pem(key, b"open sesame")
    for passphrase in (None, b"wrong word"):
        with pytest.raises(BadUsage) as told:
            sign_split(tmp_path / "split", text, passphrase)
        assert "wrong word" not in str(told.value)
    sign_split(tmp_path / "split", text, b"open sesame")
    Trust(public(key, tmp_path / "public.pem")).check(tmp_path / "split")


def test_a_plan_of_the_same_key_for_another_folder_is_refused(tmp_path, keys):
    """A signature goes with its files: that of another split of the same key proves nothing of this one."""
    mine, trusted, _, _ = keys
    small_split(tmp_path / "one")
    small_split(tmp_path / "other", seed="other")
    for name in ("one", "other"):
        sign_split(tmp_path / name, mine)
    (tmp_path / "one" / "model.sig").write_bytes((tmp_path / "other" / "model.sig").read_bytes())
    with pytest.raises(PlanRefused, match="has changed"):
        Trust(trusted).check(tmp_path / "one")
