"""SPLADE-tiny (BERT-tiny with its masked-language-model head) from safetensors to ONNX, without torch.

Architecture: Devlin et al., "BERT" (arXiv:1810.04805); the output is what SPLADE (arXiv:2107.05720) pools.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEAD_WIDTH = 64
"""Width of one attention head in every BERT of the original family; BERT-tiny (128) has two heads."""
EPSILON = 1e-12
MASKED = -1e9
OPSET = 17
IR_VERSION = 8
MAX_HEADER = 1 << 20

State = dict[str, np.ndarray]


def read_safetensors(path: Path) -> State:
    """Return the fp32 tensors of a safetensors file: 8 bytes of header length, a JSON header, then raw data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise ValueError(f"{path}: the header claims {length} bytes, the file has {len(data)}")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if entry["dtype"] != "F32" or not 0 <= start <= end <= len(data) - 8 - length:
            raise ValueError(
                f"{path}: tensor {name} is {entry['dtype']} at {start}..{end}, expected F32 inside the file"
            )
        raw = data[8 + length + start : 8 + length + end]
        tensors[name] = np.frombuffer(raw, "<f4").reshape(entry["shape"])
    return tensors


class _Graph:
    """Collects nodes and initializers; each method adds one operation and returns the name of its output."""

    def __init__(self, state: State) -> None:
        self.state, self.nodes, self.tensors = state, [], []
        self.width = state["bert.embeddings.word_embeddings.weight"].shape[1]
        self.heads = self.width // HEAD_WIDTH

    def constant(self, value: Any, name: str | None = None) -> str:
        name = name or f"constant_{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, name: str) -> str:
        if all(tensor.name != name for tensor in self.tensors):
            self.constant(self.state[name], name)
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def dense(self, x: str, name: str) -> str:
        kernel = self.constant(self.state[f"{name}.weight"].T, f"{name}.kernel")
        return self.node("Add", self.node("MatMul", x, kernel), self.weight(f"{name}.bias"))

    def norm(self, x: str, name: str) -> str:
        return self.node(
            "LayerNormalization", x, self.weight(f"{name}.gamma"), self.weight(f"{name}.beta"), axis=-1, epsilon=EPSILON
        )

    def gelu(self, x: str) -> str:
        """x · ½ (1 + erf(x / √2)), the exact form that BERT uses."""
        erf = self.node("Erf", self.node("Div", x, self.constant(np.float32(math.sqrt(2)))))
        gate = self.node("Mul", self.node("Add", erf, self.constant(np.float32(1))), self.constant(np.float32(0.5)))
        return self.node("Mul", x, gate)

    def split_heads(self, x: str, permutation: list[int]) -> str:
        shape = self.constant(np.array([0, 0, self.heads, HEAD_WIDTH], np.int64))
        return self.node("Transpose", self.node("Reshape", x, shape), perm=permutation)

    def attention(self, x: str, mask: str, name: str) -> str:
        query = self.split_heads(self.dense(x, f"{name}.self.query"), [0, 2, 1, 3])
        key = self.split_heads(self.dense(x, f"{name}.self.key"), [0, 2, 3, 1])
        value = self.split_heads(self.dense(x, f"{name}.self.value"), [0, 2, 1, 3])
        scores = self.node("Div", self.node("MatMul", query, key), self.constant(np.float32(math.sqrt(HEAD_WIDTH))))
        weights = self.node("Softmax", self.node("Add", scores, mask), axis=-1)
        mixed = self.node("Transpose", self.node("MatMul", weights, value), perm=[0, 2, 1, 3])
        joined = self.node("Reshape", mixed, self.constant(np.array([0, 0, self.width], np.int64)))
        return self.norm(self.node("Add", self.dense(joined, f"{name}.output.dense"), x), f"{name}.output.LayerNorm")

    def layer(self, x: str, mask: str, name: str) -> str:
        x = self.attention(x, mask, f"{name}.attention")
        inside = self.gelu(self.dense(x, f"{name}.intermediate.dense"))
        return self.norm(self.node("Add", self.dense(inside, f"{name}.output.dense"), x), f"{name}.output.LayerNorm")

    def embed(self) -> str:
        words = self.node("Gather", self.weight("bert.embeddings.word_embeddings.weight"), "input_ids")
        kinds = self.node("Gather", self.weight("bert.embeddings.token_type_embeddings.weight"), "token_type_ids")
        length = self.node("Gather", self.node("Shape", "input_ids"), self.constant(np.array([1], np.int64)))
        start, axis = self.constant(np.array([0], np.int64)), self.constant(np.array([0], np.int64))
        places = self.node("Slice", self.weight("bert.embeddings.position_embeddings.weight"), start, length, axis)
        return self.norm(self.node("Add", self.node("Add", words, kinds), places), "bert.embeddings.LayerNorm")

    def mask(self) -> str:
        """0 where a token is, a large negative number where padding is, shaped to add to the attention scores."""
        present = self.node("Cast", "attention_mask", to=TensorProto.FLOAT)
        absent = self.node("Sub", self.constant(np.float32(1)), present)
        hidden = self.node("Mul", absent, self.constant(np.float32(MASKED)))
        return self.node("Unsqueeze", hidden, self.constant(np.array([1, 2], np.int64)))

    def head(self, x: str) -> str:
        """The masked-language-model head. Gemm reads the word embeddings transposed, so they are stored once."""
        x = self.gelu(self.dense(x, "cls.predictions.transform.dense"))
        x = self.norm(x, "cls.predictions.transform.LayerNorm")
        flat = self.node("Reshape", x, self.constant(np.array([-1, self.width], np.int64)))
        words = self.weight("bert.embeddings.word_embeddings.weight")
        scores = self.node("Gemm", flat, words, self.weight("cls.predictions.bias"), transB=1)
        shape = self.node("Shape", "input_ids")
        whole = self.node("Concat", shape, self.constant(np.array([-1], np.int64)), axis=0)
        return self.node("Reshape", scores, whole)


def build(state: State) -> onnx.ModelProto:
    """Return the network: ids, mask and types batch × sequence (int64) → `logits` batch × sequence × vocabulary."""
    graph = _Graph(state)
    x, mask = graph.embed(), graph.mask()
    layers = {int(name.split(".")[3]) for name in state if name.startswith("bert.encoder.layer.")}
    for index in sorted(layers):
        x = graph.layer(x, mask, f"bert.encoder.layer.{index}")
    last = helper.make_node("Identity", [graph.head(x)], ["logits"])
    shape = ["batch", "sequence"]
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    proto = helper.make_graph(
        [*graph.nodes, last],
        "splade",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*shape, state["cls.predictions.bias"].size])],
        graph.tensors,
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="pagein-examples")
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model


def export(weights: Path, target: Path) -> None:
    """Write the network of a safetensors file to an ONNX file."""
    onnx.save(build(read_safetensors(weights)), str(target))
