"""EfficientNet-Lite0 from its PyTorch checkpoint to ONNX, without torch.

The checkpoint is a pickle. It is read here by an unpickler that knows exactly four names and builds numpy arrays, and
only after its sha256 was compared with a pinned value. Pagein itself never opens pickles.

Architecture: Tan and Le, "EfficientNet" (arXiv:1905.11946), in the Lite variant of the TensorFlow authors: no
squeeze-and-excitation, ReLU6, stem and head of fixed width, TensorFlow's "same" padding.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH_NORM_EPSILON = 1e-3
STRIDES = (1, 2, 2, 2, 1, 2, 1)
"""Stride of the first block of each stage; further blocks of a stage have stride 1."""
REPEATS = (1, 2, 2, 3, 3, 4, 1)
OPSET = 17
IR_VERSION = 8

State = dict[str, np.ndarray]


class _Storage:
    """A named piece of raw memory that several tensors may look into."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.data: np.ndarray | None = None


class _View:
    """A tensor as the pickle describes it: the storage is filled after the pickle was read."""

    def __init__(self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    def array(self) -> np.ndarray:
        data = self.storage.data
        assert data is not None
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if self.offset < 0 or last >= data.size or min((*self.stride, 0)) < 0:
            raise ValueError(f"a tensor reaches element {last} of a storage of {data.size}")
        strides = [s * data.itemsize for s in self.stride]
        return np.lib.stride_tricks.as_strided(data[self.offset :], self.size, strides).copy()


def _rebuild(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _View:
    return _View(storage, offset, size, stride)


class _StateUnpickler(pickle.Unpickler):
    """Reads a state dictionary of the torch format before 1.6, and nothing else."""

    NAMES: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch", "FloatStorage"): np.dtype("<f4"),
        ("torch", "LongStorage"): np.dtype("<i8"),
    }

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"the checkpoint asks for {module}.{name}, which is not allowed")
        return self.NAMES[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _device, _count, *_ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"the checkpoint refers to a {kind!r}, expected a storage")
        return self.storages.setdefault(key, _Storage(dtype))


def read_state(path: Path) -> State:
    """Return the tensors: the file has four pickles (magic, version, system, state), a list of keys, raw storages."""
    with path.open("rb") as file:
        for _ in range(3):
            _StateUnpickler(file).load()
        reader = _StateUnpickler(file)
        views = reader.load()
        for key in _StateUnpickler(file).load():
            storage = reader.storages[key]
            count = int.from_bytes(file.read(8), "little")
            storage.data = np.frombuffer(file.read(count * storage.dtype.itemsize), storage.dtype)
    return {name: view.array() for name, view in views.items()}


class _Graph:
    """Collects nodes and initializers; each method adds one operation and returns the name of its output."""

    def __init__(self, state: State) -> None:
        self.state, self.nodes, self.tensors = state, [], []
        self.constant("zero", np.float32(0))
        self.constant("six", np.float32(6))

    def constant(self, name: str, value: Any) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def convolution(self, x: str, weight: str, norm: str, stride: int = 1, *, depthwise: bool = False) -> str:
        """A convolution with its batch normalisation folded into weight and bias."""
        kernel = self.state[f"{weight}.weight"]
        scale = self.state[f"{norm}.weight"] / np.sqrt(self.state[f"{norm}.running_var"] + BATCH_NORM_EPSILON)
        bias = self.state[f"{norm}.bias"] - self.state[f"{norm}.running_mean"] * scale
        weights = self.constant(f"{weight}.w", kernel * scale[:, None, None, None])
        return self.node(
            "Conv",
            [x, weights, self.constant(f"{weight}.b", bias)],
            kernel_shape=kernel.shape[2:],
            strides=[stride, stride],
            group=kernel.shape[0] if depthwise else 1,
            auto_pad="SAME_UPPER",
        )

    def relu6(self, x: str) -> str:
        return self.node("Clip", [x, "zero", "six"])

    def block(self, x: str, index: int, stride: int) -> str:
        """One inverted bottleneck: expand, filter each channel, project, and add the input where shapes allow."""
        name = f"_blocks.{index}"
        inside = x
        if f"{name}._expand_conv.weight" in self.state:
            inside = self.relu6(self.convolution(inside, f"{name}._expand_conv", f"{name}._bn0"))
        inside = self.convolution(inside, f"{name}._depthwise_conv", f"{name}._bn1", stride, depthwise=True)
        out = self.convolution(self.relu6(inside), f"{name}._project_conv", f"{name}._bn2")
        first = self.state.get(f"{name}._expand_conv.weight", self.state[f"{name}._depthwise_conv.weight"])
        entering = first.shape[1] if f"{name}._expand_conv.weight" in self.state else first.shape[0]
        same = stride == 1 and entering == self.state[f"{name}._project_conv.weight"].shape[0]
        return self.node("Add", [out, x]) if same else out


def build(state: State) -> onnx.ModelProto:
    """Return the network: `image` 1 × 3 × 224 × 224 (rgb − 127) / 128 → `logits` 1 × 1000."""
    graph = _Graph(state)
    x = graph.relu6(graph.convolution("image", "_conv_stem", "_bn0", stride=2))
    index = 0
    for stride, repeat in zip(STRIDES, REPEATS, strict=True):
        for again in range(repeat):
            x = graph.block(x, index, 1 if again else stride)
            index += 1
    x = graph.relu6(graph.convolution(x, "_conv_head", "_bn1"))
    x = graph.node("Flatten", [graph.node("GlobalAveragePool", [x])])
    weight = graph.constant("_fc.w", state["_fc.weight"])
    last = helper.make_node("Gemm", [x, weight, graph.constant("_fc.b", state["_fc.bias"])], ["logits"], transB=1)
    proto = helper.make_graph(
        [*graph.nodes, last],
        "efficientnet_lite0",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, state["_fc.bias"].size])],
        graph.tensors,
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="pagein-examples")
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model


def export(checkpoint: Path, target: Path) -> None:
    """Write the network of a checkpoint to an ONNX file."""
    onnx.save(build(read_state(checkpoint)), str(target))
