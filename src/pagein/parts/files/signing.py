"""Signs a split, and refuses one that is not signed by the key that is trusted, before anything of it is looked at.

ECDSA on P-256, P-384 or P-521, as OpenSSF Model Signing does with keys (`bundle` has the format): its ``verify key``
proves what is signed here, and what its ``sign key`` signs is trusted here. Ed25519 is none of its kinds of keys.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from pagein.catalog.split.names import part_of_file
from pagein.catalog.split.plan import PLAN_NAME, SplitPlan
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import BadUsage, EngineMissing, PartRefused, PlanRefused, SplitBroken
from pagein.parts.files.bundle import IGNORED, LIMIT, SIGNATURE_NAME, Bundle, encode, files_of, pae, parse, statement
from pagein.weights.packed.shards import write_whole

_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The digest that belongs to a curve."""
_KEY_LIMIT = 64 * 1024
_CHUNK = 4 * 1024**2
_DEEPEST = 16
_ONLY = "an elliptic-curve key on P-256, P-384 or P-521 is needed"


def sign_split(folder: Path, key: bytes, passphrase: bytes | None = None) -> tuple[Path, int]:
    """Sign every file of a split's folder and return the signature's path and the number of files.

    ``key`` is the text of a private key (PEM). Raises BadUsage for another key or a wrong passphrase, PlanRefused and
    SplitBroken where the split is not whole or has what a signature cannot cover; then no signature was written.
    """
    private = _private(key, passphrase)
    with PartsRoot(folder) as root:
        read: list[bytes] = []
        plan = read_plan(root, read.append)
        digests = dict(_digests(root, parts=True))
        if digests.get(PLAN_NAME) != hashlib.sha256(read[0]).hexdigest():
            raise SplitBroken(f"{folder}: the split was changed meanwhile, nothing was signed", hint="sign it again")
        for _, _, entry in plan.files():
            if digests.get(entry.file) != entry.sha256:
                raise SplitBroken(
                    f"{entry.file} is not what the plan says, and so was not signed",
                    hint=f"see: pagein split check {folder}",
                )
        payload = statement(folder.resolve().name, digests)
        made = Bundle(payload, private.sign(pae(payload), _algorithm(private)), _hint(private.public_key()))
    write_whole(folder / SIGNATURE_NAME, encode(made))
    return folder / SIGNATURE_NAME, len(digests)


class Trust:
    """A public key: whose splits are used."""

    def __init__(self, key: str | Path) -> None:
        """``key`` is the path of a public key (PEM); raises BadUsage, EngineMissing without `cryptography`."""
        self._key = _public(Path(key))
        self._name = str(key)

    def check(self, folder: Path) -> None:
        """Raise PlanRefused unless the key signed the split in a folder."""
        with PartsRoot(folder) as root:
            read_plan(root, self.vouch(root))

    def confirm(self, root: PartsRoot, plan: SplitPlan) -> None:
        """Raise PlanRefused unless all is still as it was when the plan was proven.

        Asked once the settings were read: that is done by their paths, which may mean other files by then.
        """
        if not root.is_at_its_path or read_plan(root, self.vouch(root)).digest != plan.digest:
            raise _refused(f"{root.folder} was changed while the model was built from it", "load it again")

    def vouch(self, root: PartsRoot) -> Callable[[bytes], None]:
        """Return what raises PlanRefused unless the key signed the plan of this text, and the files beside it.

        Parts are not read: the plan has their digests, and each is proven as it is loaded.
        """

        def prove(plan: bytes) -> None:
            signed = self.signed_files(root)
            if signed.get(PLAN_NAME) != hashlib.sha256(plan).hexdigest():
                raise _refused(f"{PLAN_NAME} has changed since it was signed", _SIGN_AGAIN)
            there = set(root.names())
            for name, digest in _digests(root, parts=False):
                if name == PLAN_NAME:
                    continue
                if name not in signed:
                    raise _refused(f"{name} was put beside the plan and is not signed", _SIGN_AGAIN)
                if signed[name] != digest:
                    raise _refused(f"{name} has changed since it was signed", _SIGN_AGAIN)
                there.add(name)
            gone = [one for one in signed if part_of_file(one) is None and not _is_ignored(one) and one not in there]
            if gone:
                raise _refused(f"{min(gone)} is signed and not there", _SIGN_AGAIN)

        return prove

    def signed_files(self, root: PartsRoot) -> dict[str, str]:
        """Return the sha256 of each file that the key signed in a folder; raises PlanRefused."""
        data = _read_signature(root)
        try:
            bundle = parse(data)
        except ValueError as error:
            raise _refused(str(error), _SIGN_AGAIN) from None
        mine = _hint(self._key)
        if bundle.hint is not None and bundle.hint != mine:
            why = f"was made with another key ({bundle.hint[:16]}…) than the trusted {self._name} ({mine[:16]}…)"
            raise _refused(why)
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(bundle.signature, bundle.signed, _algorithm(self._key))
        except InvalidSignature:
            raise _refused(f"is none of the trusted key {self._name} over this text") from None
        try:
            return files_of(bundle.payload)
        except ValueError as error:
            raise _refused(str(error)) from None


_SIGN_AGAIN = "let who holds the private key sign it: pagein split sign FOLDER --key KEY.pem"


def _refused(why: str, hint: str | None = None) -> PlanRefused:
    return PlanRefused(SIGNATURE_NAME, "signature", why, hint=hint)


def _read_signature(root: PartsRoot) -> bytes:
    if SIGNATURE_NAME not in root.names():
        raise _refused("is not there, and only signed splits are trusted", _SIGN_AGAIN)
    try:
        descriptor, status = root.open(SIGNATURE_NAME)
    except PartRefused as error:
        raise _refused(str(error.details["reason"])) from None
    with open(descriptor, "rb") as file:
        if status.st_size > LIMIT:
            raise _refused(f"has {status.st_size} bytes, the limit is {LIMIT}")
        return file.read(LIMIT + 1)


def _digests(root: PartsRoot, *, parts: bool) -> Iterator[tuple[str, str]]:
    """Yield path and sha256 of each file below a folder that a signature covers; ``parts``: of parts' files, too.

    Raises PlanRefused for links and for what is no regular file.
    """
    for path, folders, files, descriptor in os.fwalk(".", onerror=_unread, dir_fd=root.descriptor):
        prefix = "" if path == "." else f"{path.removeprefix('./')}/"
        if prefix.count("/") > _DEEPEST:
            raise _refused(f"{prefix[:200]} lies more than {_DEEPEST} folders deep")
        folders[:] = sorted(name for name in folders if not _is_ignored(f"{prefix}{name}"))
        for name in [*folders, *sorted(files)]:
            if _is_link(name, descriptor, prefix):
                raise _refused(f"{prefix}{name} is a link, which no signature covers")
        for name in sorted(files):
            covered = not _is_ignored(f"{prefix}{name}")
            if covered and (parts or prefix or part_of_file(name) is None):
                yield f"{prefix}{name}", _digest(name, descriptor, prefix)


def _is_link(name: str, folder: int, prefix: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError as error:
        raise _refused(f"{prefix}{name} cannot be read: {error.strerror}") from None


def _unread(error: OSError) -> NoReturn:
    """Refuse a folder that cannot be listed: it is not known what it has."""
    raise _refused(f"the folder {str(error.filename)[:200]!r} cannot be read: {error.strerror}") from None


def _digest(name: str, folder: int, prefix: str) -> str:
    hashed = hashlib.sha256()
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(opened, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise _refused(f"{prefix}{name} is no regular file")
            while chunk := file.read(_CHUNK):
                hashed.update(chunk)
    except OSError as error:
        raise _refused(f"{prefix}{name} cannot be read: {error.strerror}") from None
    return hashed.hexdigest()


def _is_ignored(path: str) -> bool:
    return path.partition("/")[0] in IGNORED


def _private(key: bytes, passphrase: bytes | None) -> Any:
    serialization, ec = _cryptography()
    try:
        found = serialization.load_pem_private_key(key, passphrase)
    except TypeError:
        encrypted = passphrase is None
        raise BadUsage(f"the private key {'is' if encrypted else 'is not'} encrypted") from None
    except Exception:  # whatever the library makes of it: nothing of a private key is repeated
        raise BadUsage(f"this is no private key (PEM), or the passphrase is wrong; {_ONLY}", hint=_MAKE) from None
    if not isinstance(found, ec.EllipticCurvePrivateKey) or found.curve.name not in _CURVES:
        raise BadUsage(f"the private key is of another kind; {_ONLY}", hint=_MAKE)
    return found


_MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem; openssl ec -in KEY.pem -pubout -out PUBLIC.pem"


def needs_passphrase(key: bytes) -> bool:
    """Tell whether a private key is encrypted."""
    return b"ENCRYPTED" in key


def _public(path: Path) -> Any:
    serialization, ec = _cryptography()
    try:
        with path.open("rb") as file:
            data = file.read(_KEY_LIMIT)
    except OSError as error:
        raise BadUsage(f"the trusted key {path} cannot be read: {error.strerror}") from None
    if b"PRIVATE" in data:
        raise BadUsage(f"{path} is a private key; trust takes the public one", hint=_MAKE)
    try:
        found = serialization.load_pem_public_key(data)
    except Exception as error:
        raise BadUsage(f"{path} is no public key (PEM): {str(error)[:120]}", hint=_MAKE) from None
    if not isinstance(found, ec.EllipticCurvePublicKey) or found.curve.name not in _CURVES:
        raise BadUsage(f"{path} is a key of another kind; {_ONLY}", hint=_MAKE)
    return found


def _algorithm(key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(getattr(hashes, _CURVES[key.curve.name])())


def _hint(public: Any) -> str:
    serialization, _ = _cryptography()
    text = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(text).hexdigest()


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError:
        hint = "pip install 'pagein[sign]'"
        raise EngineMissing("signatures need the package cryptography, which is not installed", hint=hint) from None
    return serialization, ec
