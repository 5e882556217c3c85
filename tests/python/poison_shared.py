"""NaN in every multiprocessor's shared memory, where the tests' library was built (tests/device/poison_shared.cu)."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


@cache
def _library() -> ctypes.CDLL | None:
    library = os.environ.get("QLA_LIBRARY")
    places = [Path(library).resolve().parent / folder / "libqla_poison.so" for folder in ("", "tests")] if library else []
    found = [place for place in places if place.exists()]
    return ctypes.CDLL(str(found[0])) if found and torch.cuda.is_available() else None


def poison_shared(x: torch.Tensor) -> None:
    """By a kernel in the current stream of x's device; nothing for tensors of a CPU, or without the library."""
    if not x.is_cuda or _library() is None:
        return
    with torch.cuda.device(x.device):
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        error = _library().qla_poison_shared(x.device.index, stream)
    assert error == 0, f"qla_poison_shared: CUDA error {error}"
