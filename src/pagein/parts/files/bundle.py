"""The signature of a folder as OpenSSF Model Signing writes and reads it: which files it has, by digest. No key here.

A Sigstore bundle (v0.3, JSON) with a DSSE envelope; in it an in-toto statement of type
``https://model_signing/signature/v1.0``, which lists each file with its sha256. The signature is over the envelope's
payload as it stands (DSSE's PAE), so nothing is parsed before it was proven.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pagein.catalog.bounded import no_duplicates

SIGNATURE_NAME = "model.sig"
IGNORED = (SIGNATURE_NAME, ".split_plan.lock", ".git", ".gitattributes", ".github", ".gitignore")
"""What no signature covers: itself, the writer's lock, and what belongs to git; nothing of it is ever read."""
LIMIT = 16 * 1024**2
"""Bytes of a bundle."""
_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle before anything in it is believed."""

    payload: bytes
    signature: bytes
    hint: str | None
    """The sha256 of the public key's PEM text, which says whose signature it is before it is tried."""

    @property
    def signed(self) -> bytes:
        """The bytes that the signature is over."""
        return pae(self.payload)


def pae(payload: bytes) -> bytes:
    """Return what DSSE signs of a payload (https://github.com/secure-systems-lab/dsse, protocol 1.0)."""
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def statement(name: str, digests: Mapping[str, str]) -> bytes:
    """Return the statement that a folder of this name has these files, by path and sha256."""
    order = sorted(digests, key=PurePosixPath)
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[path]) for path in order)).hexdigest()
    body = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(IGNORED),
            },
            "resources": [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in order],
        },
    }
    return json.dumps(body, separators=(",", ":")).encode()


def encode(bundle: Bundle) -> bytes:
    """Return the text of a bundle."""
    body = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": bundle.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(bundle.payload).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(bundle.signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(body, indent=1).encode() + b"\n"


def parse(data: bytes) -> Bundle:
    """Return a bundle of its text; raises ValueError."""
    body = _object(data, "the bundle")
    if body.get("mediaType") != _MEDIA_TYPE:
        raise ValueError(f"is of type {str(body.get('mediaType'))[:80]!r}, read is {_MEDIA_TYPE}")
    envelope, material = body.get("dsseEnvelope"), body.get("verificationMaterial")
    if not isinstance(envelope, dict) or not isinstance(material, dict):
        raise ValueError("has no DSSE envelope with verification material")
    if envelope.get("payloadType") != _PAYLOAD_TYPE:
        raise ValueError(f"signs {str(envelope.get('payloadType'))[:80]!r}, read is {_PAYLOAD_TYPE}")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise ValueError("does not have one signature")
    key = material.get("publicKey")
    hint = key.get("hint") if isinstance(key, dict) else None
    if not isinstance(key, dict) or not isinstance(hint, str | None):
        raise ValueError("was not made with a key of its own, but with a certificate or by Sigstore")
    return Bundle(_base64(envelope.get("payload")), _base64(signatures[0].get("sig")), hint or None)


def files_of(payload: bytes) -> dict[str, str]:
    """Return the sha256 of each signed file, by path; the payload is proven already. Raises ValueError."""
    body = _object(payload, "the statement")
    for key, wanted in (("_type", _STATEMENT), ("predicateType", _PREDICATE)):
        if body.get(key) != wanted:
            raise ValueError(f"its statement has {key} {str(body.get(key))[:80]!r}, read is {wanted}")
    predicate, subject = body.get("predicate"), body.get("subject")
    resources = predicate.get("resources") if isinstance(predicate, dict) else None
    serialization = predicate.get("serialization") if isinstance(predicate, dict) else None
    if not isinstance(resources, list) or not isinstance(serialization, dict) or not isinstance(subject, list):
        raise ValueError("its statement lists no files")
    if serialization.get("method") != "files" or len(subject) != 1:
        raise ValueError("its statement is not of whole files of one model")
    found: dict[str, str] = {}
    for one in resources:
        name, digest = (one.get("name"), one.get("digest")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(digest, str) or one.get("algorithm") != "sha256":
            raise ValueError(f"its statement has {str(one)[:80]!r}, which is no file with a sha256")
        if found.setdefault(name, digest) != digest:
            raise ValueError(f"its statement has {name[:80]!r} twice")
    root = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in resources)).hexdigest()
    digest = subject[0].get("digest") if isinstance(subject[0], dict) else None
    if not isinstance(digest, dict) or digest.get("sha256") != root:
        raise ValueError("its statement does not have the digest of what it lists")
    return found


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    return value


def _base64(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError("lacks its payload or its signature")
    return base64.b64decode(value, validate=True)
