"""Weights of a transformers model out of an ONNX file, by the names that they had before the export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

Arrays = dict[str, np.ndarray]


def read_onnx(path: Path, prefix: str) -> Arrays:
    """Return the arrays whose names begin with ``prefix``, without it.

    Exporters keep the names of biases, norms and embeddings, but turn the matrices of linear layers and name them anew:
    such a matrix is named after the bias that is added to its product. Weights in int8 are multiplied out.
    """
    graph = onnx.load(path).graph
    known = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    plain = set(known)
    products: Arrays = {}
    for node in graph.node:
        inputs = [known.get(name) for name in node.input]
        match node.op_type:
            case "Constant":
                known[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
            case "Cast" if inputs[0] is not None:
                kind = onnx.helper.tensor_dtype_to_np_dtype(node.attribute[0].i)
                known[node.output[0]] = inputs[0].astype(kind)
                plain.discard(node.input[0])
            case "Mul" if inputs[0] is not None and inputs[1] is not None:
                known[node.output[0]] = inputs[0] * inputs[1]
                plain = plain - set(node.input) | {node.output[0]}
            case "MatMul" if inputs[1] is not None and inputs[1].ndim == 2:
                products[node.output[0]] = inputs[1]
            case "Add":
                for bias, product in ((0, 1), (1, 0)):
                    name = node.input[bias]
                    if name.endswith(".bias") and node.input[product] in products:
                        weight = f"{name.removesuffix('bias')}weight"
                        known[weight] = products[node.input[product]].T
                        plain.add(weight)
    return {name.removeprefix(prefix): known[name] for name in sorted(plain) if name.startswith(prefix)}
