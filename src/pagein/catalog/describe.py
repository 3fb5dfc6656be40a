"""From the headers of each format to the catalog's one value, `ModelInfo`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pagein.catalog.attention import attention_of
from pagein.catalog.blocks import spread_of
from pagein.catalog.bounded import bad
from pagein.catalog.ctranslate2 import read_ctranslate2
from pagein.catalog.folder import files_in, inside
from pagein.catalog.gguf import GgufHeader, read_gguf
from pagein.catalog.gguf_geometry import geometry
from pagein.catalog.hf_config import has_chat_template, read_config, read_traits
from pagein.catalog.model import Format, ModelInfo
from pagein.catalog.onnx import read_onnx
from pagein.catalog.ort import read_ort
from pagein.catalog.safetensors import read_sharded

MOST_PARTS = 512
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SHARD = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.safetensors$")
_OPERATORS_SHOWN = 200


def describe_gguf(path: Path) -> ModelInfo:
    """A GGUF file, with the further parts of a split one."""
    header = read_gguf(path)
    parts = [header, *(read_gguf(part) for part in _further_parts(header))]
    shape = geometry(header)
    by_type: dict[str, int] = {}
    for part in parts:
        for kind, size in part.bytes_by_type.items():
            by_type[kind] = by_type.get(kind, 0) + size
    embeddings = [part.token_embedding[1] for part in parts if part.token_embedding]
    return ModelInfo(
        path=path,
        format=Format.GGUF,
        files=tuple(part.path for part in parts),
        file_bytes=sum(part.size for part in parts),
        weight_bytes=sum(part.weight_bytes for part in parts),
        parameters=sum(part.parameters for part in parts),
        **asdict(shape),
        metadata={
            "name": _text(header, "general.name"),
            "kind": _text(header, "general.type"),
            "attention": attention_of(header).value,
            "bytes_by_type": by_type,
            "token_embedding_bytes": sum(embeddings),
        },
    )


def _further_parts(header: GgufHeader) -> list[Path]:
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_PARTS:
        raise bad(header.path, f"is split into {count!r} parts, the limit is {MOST_PARTS}")
    if count <= 1:
        return []
    match = _PART.search(header.path.name)
    if match is None or int(match[2]) != count:
        raise bad(header.path, f"is one of {count} parts, but is not named like one (…-00001-of-{count:05d}.gguf)")
    if int(match[1]) != 1:
        raise bad(header.path, f"is part {int(match[1])} of {count}", hint="name the first part")
    stem = header.path.name[: match.start()]
    return [inside(header.path.parent, f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(2, count + 1)]


def _text(header: GgufHeader, key: str) -> str | None:
    value = header.metadata.get(key)
    return value if isinstance(value, str) else None


def describe_safetensors(path: Path, shards: Sequence[Path]) -> ModelInfo:
    """One safetensors file (path is it) or the shards of a folder (path is the folder)."""
    folder = path if path.is_dir() else path.parent
    if folder is not path and _SHARD.search(path.name):
        raise bad(path, "is one of several shards", hint="name the folder")
    tables = read_sharded(folder, list(shards), indexed=path.is_dir(), places=True)
    shape = replace(read_config(folder), has_chat_template=has_chat_template(folder))
    by_type: dict[str, int] = {}
    for table in tables:
        for kind, size in table.bytes_by_type.items():
            by_type[kind] = by_type.get(kind, 0) + size
    spread = spread_of((tensor for table in tables for tensor in table.tensors or ()), shape.vocabulary)
    return ModelInfo(
        path=path,
        format=Format.SAFETENSORS,
        files=tuple(table.path for table in tables),
        file_bytes=sum(table.size for table in tables),
        weight_bytes=sum(table.weight_bytes for table in tables),
        parameters=sum(table.parameters for table in tables),
        **asdict(shape),
        metadata={
            "bytes_by_type": by_type,
            **read_traits(folder),
            "largest_block": spread.largest_block,
            "largest_experts": spread.largest_experts,
            "outside_blocks": spread.rest,
        },
    )


def describe_onnx(path: Path, graphs: Sequence[Path]) -> ModelInfo:
    """One ONNX graph, or all graphs of a folder (an encoder and its decoder)."""
    read = [read_onnx(graph) for graph in graphs]
    external = sorted({file for graph in read for file in graph.external})
    operators = sorted(set().union(*(graph.operators for graph in read)))
    return ModelInfo(
        path=path,
        format=Format.ONNX,
        files=(*(graph.path for graph in read), *external),
        file_bytes=sum(graph.size for graph in read) + sum(file.stat().st_size for file in external),
        weight_bytes=sum(graph.weight_bytes for graph in read),
        parameters=sum(graph.parameters for graph in read),
        unpacked_bytes=sum(graph.unpacked_bytes for graph in read),
        metadata={
            "opset": max((graph.opset for graph in read if graph.opset is not None), default=None),
            "producer": read[0].producer,
            "inputs": {graph.path.name: graph.inputs for graph in read},
            "outputs": {graph.path.name: graph.outputs for graph in read},
            "operators": operators[:_OPERATORS_SHOWN],
        },
    )


def describe_ort(path: Path, files: Sequence[Path]) -> ModelInfo:
    """One ORT file, or all of a folder; their weights are taken to be all of the file."""
    headers = [read_ort(file) for file in files]
    size = sum(header.size for header in headers)
    return ModelInfo(
        path=path,
        format=Format.ORT,
        files=tuple(header.path for header in headers),
        file_bytes=size,
        weight_bytes=size,
        metadata={"format_version": headers[0].format_version},
    )


def describe_ctranslate2(folder: Path, file: Path) -> ModelInfo:
    """A CTranslate2 folder with its ``model.bin``."""
    model = read_ctranslate2(file)
    if not any("vocabulary" in name for name in files_in(folder)):
        raise bad(folder, "has a CTranslate2 model, but no vocabulary beside it")
    embeddings = model.shapes.get("decoder/embeddings/weight", (None, None))
    width = model.shapes.get("encoder/conv1/weight", (embeddings[-1],))[0]
    return ModelInfo(
        path=folder,
        format=Format.CTRANSLATE2,
        files=(file,),
        file_bytes=model.size,
        weight_bytes=model.weight_bytes,
        parameters=model.parameters,
        architecture=model.specification,
        vocabulary=embeddings[0],
        embedding_length=width,
        metadata={"bytes_by_type": dict(model.bytes_by_type)},
    )
