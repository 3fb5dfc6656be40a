"""Other precisions of a part: rounded as torch rounds, refused where a value would be lost."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import BadUsage, SplitBroken
from pagein.parts.splitting.conversions import conversion
from pagein.parts.splitting.loading import tensor_source
from pagein.parts.splitting.making import SourceTensor

pytestmark = pytest.mark.torch


def converted(tensor: torch.Tensor, precision: str, name: str = "w", cut: int = 7) -> tuple[str, torch.Tensor]:
    """Convert a tensor whose bytes come in pieces that end within a value."""
    whole = tensor_source(tensor, name)
    data = b"".join(map(bytes, whole.chunks()))
    source = SourceTensor(whole.dtype, whole.shape, lambda: [data[at : at + cut] for at in range(0, len(data), cut)])
    ((key, made),) = conversion(precision).convert(name, source).items()
    assert key == name
    assert made.shape == tuple(tensor.shape)
    kinds = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F64": torch.float64,
        "I64": torch.int64,
    }
    found = torch.frombuffer(bytearray(b"".join(map(bytes, made.chunks()))), dtype=kinds[made.dtype])
    return made.dtype, found.reshape(made.shape)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_values_are_rounded_as_torch_does(precision: str, dtype: torch.dtype) -> None:
    """Each value is the nearest one; NaN and infinity stay what they are; pieces may end anywhere."""
    values = torch.cat([torch.randn(101), torch.tensor([float("nan"), float("inf"), -0.0])])
    kind, found = converted(values, precision)
    assert kind == {"bf16": "BF16", "fp16": "F16"}[precision]
    assert torch.equal(found.view(torch.int16), values.to(dtype).view(torch.int16))


def test_what_need_not_change_does_not() -> None:
    """Whole numbers, a LoRA's scaling, and what has the precision already are the same tensors."""
    assert converted(torch.arange(5), "bf16")[0] == "I64"
    assert converted(torch.tensor([0.3], dtype=torch.float64), "fp16", "p/q.scaling")[0] == "F64"
    assert converted(torch.ones(3, dtype=torch.float16), "fp16")[0] == "F16"
    assert converted(torch.ones(3, dtype=torch.bfloat16), "fp32")[0] == "F32"


def test_a_value_that_does_not_fit_is_refused() -> None:
    """A value beyond the type's range is named with both numbers, not turned into infinity."""
    with pytest.raises(SplitBroken, match=r"'w' has the value 70000, F16 holds at most 65504"):
        converted(torch.tensor([1.0, 70000.0]), "fp16")


def test_others_are_refused() -> None:
    """A precision that the runtime could not read is refused."""
    with pytest.raises(BadUsage, match="bf16"):
        conversion("int3")
