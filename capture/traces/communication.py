"""What recorders call collectives and number formats: one name per collective, bytes per element. Reads no file."""

from __future__ import annotations

import math
import re
from typing import Any, TypeAlias

__all__ = ["KNOWN", "Dims", "collective_name", "element_bytes", "elements", "kernel_collective", "rank_list"]

NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "alltoallv": "all_to_all", "broadcast": "broadcast", "bcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "barrier": "barrier", "send": "send", "recv": "recv", "sendrecv": "send_recv",
    "allreducesparse": "all_reduce",
}  # fmt: skip
KNOWN = frozenset(NAMES.values())
DROPPED = ("base", "coalesced", "intotensor", "tensor", "single", "block", "anysource")
Dims: TypeAlias = list[int | list[int | list[int]]]
"""One shape, a list of shapes, or one of such lists."""
BYTES = {
    "double": 8, "long": 8, "longint": 8, "int64": 8, "uint64": 8, "float64": 8, "complexfloat": 8, "complex64": 8,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "complexhalf": 4, "half": 2, "float16": 2,
    "bfloat16": 2, "short": 2, "shortint": 2, "int16": 2, "uint16": 2, "char": 1, "signedchar": 1, "byte": 1,
    "unsignedchar": 1, "int8": 1, "uint8": 1, "bool": 1, "complexdouble": 16, "complex128": 16,
}  # fmt: skip
KERNEL = re.compile(r"(?:nccl|rccl|msccl)\w*?Kernel(?:_?([A-Z][A-Za-z]+))?")


def collective_name(text: str) -> str:
    """One name for all spellings of a collective.

    >>> [collective_name(text) for text in ("c10d::allreduce_", "_all_gather_base", "ALL_TO_ALL", "alltoallv")]
    ['all_reduce', 'all_gather', 'all_to_all', 'all_to_all']
    """
    word = re.sub(r"[^a-z]", "", text.rpartition(":")[2].lower())
    for dropped in DROPPED:
        word = word.replace(dropped, "")
    return NAMES.get(word, text.rpartition(":")[2].strip("_").lower())


def kernel_collective(kernel: str) -> str | None:
    """What a kernel of a communication library does, None for other kernels.

    >>> kernel_collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    """
    match = KERNEL.search(kernel)
    return None if match is None else collective_name(match[1] or "generic")


def element_bytes(dtype: str) -> int | None:
    """Bytes of an element by what a recorder calls its type.

    >>> [element_bytes(dtype) for dtype in ("Float", "c10::BFloat16", "long int", "Float8_e4m3fn", "TensorList")]
    [4, 2, 8, 1, None]
    """
    word = re.sub(r"[^a-z0-9]", "", dtype.rpartition("::")[2].lower())
    return 1 if word.startswith("float8") else BYTES.get(word)


def elements(dims: list[Any]) -> int:
    """Elements of one shape, or of a list of shapes.

    >>> elements([4, 3]), elements([[4, 3], [2]]), elements([])
    (12, 14, 1)
    """
    if any(isinstance(dim, list) for dim in dims):
        return sum(elements(dim) for dim in dims if isinstance(dim, list))
    return math.prod(dim for dim in dims if isinstance(dim, int))


def rank_list(told: Any) -> tuple[int, ...]:  # noqa: ANN401 - whatever the recorder wrote
    """Ranks of a group (or sizes of a shape), a list or its text; none where the recorder cut the text short.

    >>> rank_list("[0, 1]"), rank_list([2, 3]), rank_list("[0, 1, ..., 127]"), rank_list(None)
    ((0, 1), (2, 3), (), ())
    """
    if isinstance(told, str):
        words = [word.strip() for word in told.strip("[] ").split(",")]
        told = [int(word) if word.isdecimal() else None for word in words]
    if not isinstance(told, list) or not all(isinstance(rank, int) for rank in told):
        return ()
    return tuple(told)
