"""Render docs/reference/engines.md from the option classes of the engines and recipes; ``--check`` only compares.

Reads the source as text, so that no engine needs to be installed.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "pagein" / "engines"
TARGET = ROOT / "docs" / "reference" / "engines.md"

PAGES = [
    (
        "Engine `llama_cpp`",
        "llama_settings.py",
        "LlamaOptions",
        "GGUF files: chat, completions, embeddings, reranking.",
    ),
    ("Engine `whisper`", "whisper.py", "WhisperOptions", "Whisper models in CTranslate2's format: transcription."),
    (
        "Engine `transformers`",
        "transformers.py",
        "TransformersOptions",
        "Safetensors folders of any model that transformers has: chat, completions, embeddings. Weights that do not "
        "fit `memory` are streamed from the disk.",
    ),
    (
        "Engine `parts`",
        "parts.py",
        "PartsOptions",
        "Folders of `pagein split apply`: each task is asked by a path of its kind, and its parts come with its "
        "requests ([how](../guides/parts.md#in-the-fleet)).",
    ),
    (
        "Engine `command`",
        "command.py",
        "CommandOptions",
        "Any server with an OpenAI-style API, by its command line. `${socket}` or `${port}` in the command is filled "
        "in, and `${model}` with the model's name.",
    ),
    ("Engine `onnx`, recipe `embedding`", "recipes/embedding.py", "Embedding", ""),
    ("Engine `onnx`, recipe `sparse_rerank`", "recipes/sparse_rerank.py", "SparseRerank", ""),
    ("Engine `onnx`, recipe `classification`", "recipes/classification.py", "Classification", ""),
    ("Engine `onnx`, recipe `saliency`", "recipes/saliency.py", "Saliency", ""),
    ("Engine `onnx`, recipe `moonshine`", "recipes/moonshine.py", "Moonshine", ""),
]

HEAD = """# Engines and recipes

*Rendered from the option classes by `python scripts/render_engines.py`; CI checks that it is current.*

The engine of a model is told from its file's own header: GGUF → `llama_cpp`, ONNX → `onnx`, CTranslate2 → `whisper`,
safetensors → `transformers`, a split model's folder → `parts`.
An ONNX model also needs a `recipe`, which says what goes in and what comes out. Options stand under `options` of a
model; unknown ones are refused with the nearest known name.

```yaml
models:
  embed:
    model: ./minilm          # a folder with model.onnx and tokenizer.json
    recipe: embedding
    options: {max_tokens: 256}
```
"""


def options_of(file: Path, name: str) -> tuple[str, list[tuple[str, str, str, str]]]:
    """The docstring of an option class, and its fields: name, type, default, meaning."""
    tree = ast.parse(file.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = []
    for field, doc in zip(found.body, found.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        assert isinstance(doc, ast.Expr), f"{file}: a field of {name} has no docstring"
        assert isinstance(doc.value, ast.Constant), f"{file}: a field of {name} has no docstring"
        assert isinstance(field.target, ast.Name)
        meaning = " ".join(str(doc.value.value).replace("``", "`").split())
        kind = _named(ast.unparse(field.annotation), tree)
        rows.append((field.target.id, kind, _named(ast.unparse(field.value), tree), meaning))
    return ast.get_docstring(found) or "", rows


def _named(text: str, tree: ast.Module) -> str:
    """A type or default as text; a constant of the module is replaced by its value."""
    special = {"field(default_factory=list)": "[]"}
    if "IMAGENET" in text:
        return "ImageNet's"
    names = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return special.get(text, names.get(text, text))


def _words(kind: str) -> str:
    """A type for people: ``Literal['a', 'b'] | None`` becomes ``a, b or none``."""
    text = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace("'", ""), kind)
    words = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
    words |= {"dict": "settings", "None": "none"}
    text = re.sub(r"list\[(\w+)\]", lambda m: f"list of {words.get(m[1], m[1])}", text)
    return " or ".join(words.get(part, part) for part in text.split(" | "))


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, file, name, words in PAGES:
        doc, rows = options_of(SOURCE / file, name)
        parts += [f"## {title}", "", words or doc, "", "| option | type | default | meaning |", "|---|---|---|---|"]
        for option, kind, default, meaning in rows:
            parts.append(f"| `{option}` | {_words(kind)} | `{default}` | {meaning} |")
        parts.append("")
    return "\n".join(parts)


def main() -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    text = render()
    if "--check" not in sys.argv:
        TARGET.write_text(text)
        return 0
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is stale: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
