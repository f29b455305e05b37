"""The number formats that chips compute in and tensors are stored in. Knows nothing of chips."""

from __future__ import annotations

from enum import Enum

__all__ = ["DType"]


class DType(Enum):
    """A number format; its value is the name used in files.

    >>> DType("bf16").nbytes
    2.0
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT8 = "int8"

    @property
    def nbytes(self) -> float:
        """Bytes an element takes in memory, block scales included.

        >>> DType.MXFP8.nbytes  # 1 byte + an 8-bit scale per 32 elements
        1.03125
        """
        return _NBYTES[self]


_NBYTES = {
    DType.FP32: 4.0,
    DType.TF32: 4.0,  # TF32 is a way to multiply; it is stored as FP32.
    DType.BF16: 2.0,
    DType.FP16: 2.0,
    DType.FP8: 1.0,
    DType.MXFP8: 1.0 + 1.0 / 32.0,  # an E8M0 scale per 32 elements: OCP Microscaling Formats v1.0, section 5.2
    DType.NVFP4: 0.5 + 1.0 / 16.0,  # an E4M3 scale per 16 elements: NVIDIA's NVFP4 description, 2025-06
    DType.INT8: 1.0,
}
