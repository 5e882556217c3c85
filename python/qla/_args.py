"""What a call is made of, and its C structs: types, layouts, which inputs must be copied first, the filled args."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla import _ffi

DTYPES = {
    torch.float64: _ffi.FLOAT64,
    torch.float32: _ffi.FLOAT32,
    torch.bfloat16: _ffi.BFLOAT16,
    torch.float16: _ffi.FLOAT16,
    torch.int32: _ffi.INT32,
    torch.int64: _ffi.INT64,
    torch.bool: _ffi.BOOL8,
    torch.uint8: _ffi.UINT8,
}


CHUNK = 64
# CUDA's qla_gdn_forward_saved, a chunk slot and value head (Abar's tile, the gate vectors, and a float): the fake operator needs the size as an
# expression of symbolic shapes. The operator compares it with the library's answer at every call.
SAVED_RECORD_BYTES = 5120 + 2048


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


# scale (None: K^-0.5), flags, cp_mode, cp_segment_chunks, cp_warmup_threshold (None: the library's), cp_uncut_chunks
Options = tuple[float | None, int, int, int, float | None, int]


# q k v g beta initial_state cu_seqlens A_log dt_bias has_initial_state state_indices, as in _checks.NAMES
Inputs = tuple[Tensor | None, ...]


class Extras(NamedTuple):
    """What only some forward calls have. The outputs a_inv, g_cumsum and h serve flash_qla's low-level functions."""

    out: Tensor | None = None
    state_checkpoints: Tensor | None = None
    checkpoint_every: int = 0
    a_inv: Tensor | None = None
    g_cumsum: Tensor | None = None
    h: Tensor | None = None


FORWARD_INPUTS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "initial_state",
    "cu_seqlens",
    "A_log",
    "dt_bias",
    "has_initial_state",
    "state_indices",
)


BACKWARD_INPUTS = FORWARD_INPUTS[:-1]


GRADS = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "ddt_bias")


# which input each gradient belongs to
GRAD_INPUTS = (0, 1, 2, 3, 4, 5, 7, 8)


# A present tensor without elements has a NULL data pointer in torch, which means absent in C: it gets this address instead.
_dummy_storage = ctypes.create_string_buffer(512)


DUMMY = (ctypes.addressof(_dummy_storage) + 255) & ~255


# shape, strides, dtype of an output
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of final states and of their gradients."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def fill(t: _ffi.Tensor, x: Tensor, data: int = DUMMY) -> None:
    t.data = data
    t.dtype = DTYPES[x.dtype]
    t.ndim = x.dim()
    t.shape[: x.dim()] = tuple(x.shape)
    t.stride[: x.dim()] = x.stride()


def fill_contiguous(t: _ffi.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    t.data, t.dtype, t.ndim = DUMMY, DTYPES[dtype], len(shape)
    t.shape[: len(shape)] = shape
    t.stride[: len(shape)] = contiguous_strides(shape)


def _common(args: Any, inputs: Inputs, names: tuple[str, ...], options: Options) -> None:
    scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks = options
    q = inputs[0]
    assert q is not None
    args.struct_size = ctypes.sizeof(args)
    args.backend = _ffi.BACKEND_CUDA if q.is_cuda else _ffi.BACKEND_CPU
    args.device = q.get_device() if q.is_cuda else -1
    args.flags = flags
    args.scale = float("nan") if scale is None else scale
    args.cp_mode = cp_mode
    args.cp_segment_chunks, args.cp_uncut_chunks = cp_segment_chunks, cp_uncut_chunks
    args.cp_warmup_threshold = float("nan") if cp_threshold is None else cp_threshold
    for name, x in zip(names, inputs):
        if x is not None:
            fill(getattr(args, name), x)


def last_contiguous(x: Tensor) -> bool:
    return x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1


def tma_strides(x: Tensor) -> bool:
    """Strides that a tensor map can hold: last 1, the others multiples of 16 bytes."""
    return last_contiguous(x) and all(n <= 1 or s * x.element_size() % 16 == 0 for n, s in zip(x.shape[:-1], x.stride()[:-1]))


def wants_copy(x: Tensor) -> bool:
    """Whether the kernels can address a contiguous copy but not the tensor as it lies."""
    if x.is_cuda:
        row = x.shape[-1] * x.element_size()
        return not tma_strides(x) and row > 0 and row % 16 == 0
    return not last_contiguous(x)


def needed_copies(inputs: Inputs) -> tuple[int, ...]:
    """The inputs that the backend cannot address as they lie: q, k, v and a given state, never gates."""
    q = inputs[0]
    assert q is not None
    copies = [i for i in (0, 1, 2) if wants_copy(inputs[i])]  # type: ignore[arg-type]
    state = inputs[5]
    pool = len(inputs) > 10 and inputs[10] is not None  # written in place: never a copy
    if state is not None and not pool and not last_contiguous(state):
        copies.append(5)
    for i in (6, 7, 8, 9, 10):
        x = inputs[i] if i < len(inputs) else None
        if x is not None and not x.is_contiguous():
            copies.append(i)
    return tuple(copies)


def forward_args(inputs: Inputs, options: Options, output_final_state: bool, extras: Extras | None = None) -> _ffi.ForwardArgs:
    """The filled struct with placeholder pointers, for the C queries. Arguments were checked before."""
    args = _ffi.ForwardArgs()
    _common(args, inputs, FORWARD_INPUTS, options)
    q, v, cu, pool = inputs[0], inputs[2], inputs[6], inputs[10]
    assert q is not None and v is not None
    if extras is not None and extras.out is not None:
        fill(args.o, extras.out)
    else:
        fill_contiguous(args.o, tuple(v.shape), q.dtype)
    if output_final_state and pool is None:
        fill_contiguous(args.final_state, final_shape(q, v, cu, options[1]), state_dtype(q.dtype))
    if extras is not None:
        args.checkpoint_every_n_tokens = extras.checkpoint_every
        for name, x in (
            ("state_checkpoints", extras.state_checkpoints),
            ("a_inv", extras.a_inv),
            ("g_cumsum", extras.g_cumsum),
            ("h", extras.h),
        ):
            if x is not None:
                fill(getattr(args, name), x)
    return args


# A call of fewer chunks times value heads keeps nothing for backward, which makes it anew in the launch that makes its tables: forward is
# one launch then, as without gradients, where the host's time is what counts.
FEW_CHUNK_HEADS = 32


def keeps(q: Tensor, v: Tensor, cu: Tensor | None) -> bool:
    """Whether a CUDA forward keeps for backward what it makes of keys and gates."""
    sequences = q.shape[0] if cu is None else cu.shape[0] - 1
    return bool((q.shape[0] * q.shape[1] // CHUNK + sequences) * v.shape[2] >= FEW_CHUNK_HEADS)


def saved_bytes(q: Tensor, v: Tensor, cu: Tensor | None) -> Any:
    """Size of `saved` in the operators: an int, or an expression of symbolic shapes. The CPU saves nothing."""
    if not q.is_cuda:
        return 0
    sequences = q.shape[0] if cu is None else cu.shape[0] - 1
    records = (q.shape[0] * q.shape[1] // CHUNK + sequences) * v.shape[2]
    return records * SAVED_RECORD_BYTES + (records + 63) // 64 * 256


def final_shape(q: Tensor, v: Tensor, cu: Tensor | None, flags: int) -> tuple[int, ...]:
    sequences = q.shape[0] if cu is None else cu.shape[0] - 1
    rows, cols = q.shape[3], v.shape[3]
    if flags & _ffi.FLAG_STATE_V_FIRST:
        rows, cols = cols, rows
    return (sequences, v.shape[2], rows, cols)


def layout_of(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    return shape, contiguous_strides(shape), dtype


def backward_args(
    inputs: Inputs,
    saved: Tensor | None,
    d_o: Tensor | None,
    d_final: Tensor | None,
    needs: int,
    options: Options,
) -> tuple[_ffi.BackwardArgs, tuple[tuple[int, Layout], ...]]:
    args = _ffi.BackwardArgs()
    _common(args, inputs, BACKWARD_INPUTS, options)
    for name, x in (("saved", saved), ("d_o", d_o), ("d_final_state", d_final)):
        if x is not None:
            fill(getattr(args, name), x)
    grads = []
    q = inputs[0]
    assert q is not None
    for i, name in enumerate(GRADS):
        source = inputs[GRAD_INPUTS[i]]
        if needs >> i & 1 and source is not None:
            dtype = state_dtype(q.dtype) if i == 5 else source.dtype
            fill_contiguous(getattr(args, name), tuple(source.shape), dtype)
            grads.append((i, layout_of(tuple(source.shape), dtype)))
    return args, tuple(grads)
