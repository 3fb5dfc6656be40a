"""In which floating type a part computes. Pure."""

from __future__ import annotations

from pagein.catalog.split import packed
from pagein.catalog.split.plan import STORED, Part, Role

KINDS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""The type of each precision that is a floating type."""
_COMPUTED = ("F64", "F32", "BF16", "F16")
_SEPARATOR, _LORA = "/", (".lora_A.weight", ".lora_B.weight", ".scaling")


def kind_of(part: Part, precision: str) -> str | None:
    """Return the type that a part computes in, that of most of its bytes; None where it takes on that of its inputs.

    Packed weights take the type of what they are multiplied with, and LoRAs cast what goes in and out.
    """
    if precision in packed.PRECISIONS and STORED in part.files:
        precision = STORED  # all that has a type of its own is as stored
    sums: dict[str, int] = {}
    for name, one in part.file(precision).tensors.items():
        lora = part.role is Role.ADAPTER and _SEPARATOR in name and name.endswith(_LORA)
        if one.dtype in _COMPUTED and not lora and packed.stem_of(name) is None:
            sums[one.dtype] = sums.get(one.dtype, 0) + one.nbytes
    return max(sums, key=lambda kind: (sums[kind], kind)) if sums else None
