"""What the arguments must look like, said in Python's exception types: TypeError for types and dtypes, ValueError for the rest.

The C ABI checks everything again and has the last word; these checks run once per signature (ops.py caches it), and on fake tensors.
Messages: argument, expected, got, remedy; FLA's wording where FLA raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qla import _ffi

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias", "has_initial_state", "state_indices")


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in x.shape) + "]"


def _short(what: torch.dtype | torch.layout) -> str:
    return str(what).removeprefix("torch.")


def _list(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(_short(d) for d in dtypes)


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        remedy = "it is required" if x is None else "convert it with torch.as_tensor"
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}; {remedy}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested tensor" if x.is_nested else f"layout {_short(x.layout)}"
        remedy = "pack the sequences into one row with cu_seqlens" if x.is_nested else "convert it with .to_dense()"
        raise TypeError(f"{name}: expected a dense tensor (torch.strided), got {kind}; {remedy}")


def whole(name: str, x: Any, what: str, remedy: str) -> int:
    """An int, or what is one in all but name (numpy's)."""
    try:
        return operator.index(x)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name}: expected {what}, got {_brief(x)}; {remedy}") from None


def _brief(x: object) -> str:
    return f"a {type(x).__name__}" if isinstance(x, (Tensor, list, tuple, dict)) else f"{type(x).__name__} {x!r}"


def check_flag(name: str, x: Any) -> bool:
    """What is as good as a bool (numpy's, 0 and 1, None); not what is true or false by what it holds."""
    if not isinstance(x, (Tensor, str, bytes, list, tuple, dict, set)):
        try:
            return bool(x)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise TypeError(f"{name}: expected True or False, got {_brief(x)}; pass a bool")


def check_layouts(inputs: Sequence[object]) -> None:
    """inputs in the order of NAMES: what tells a sparse tensor from a dense one of the same shape."""
    for name, x in zip(NAMES, inputs):
        if x is not None:
            check_tensor(name, x)


def check_scale(scale: Any) -> float:
    if torch.compiler.is_compiling():
        return float(scale)
    remedy = "pass a number, or None for K ** -0.5"
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError(
            "scale: expected a number, got a tensor that requires grad; multiply q by it: scale itself has no gradient"
        )
    if isinstance(scale, (str, bytes)):
        raise TypeError(f"scale: expected a number, got {_brief(scale)}; {remedy}")
    try:
        number = float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"scale: expected a number, got {_brief(scale)}; {remedy}") from None
    if not math.isfinite(number):
        raise ValueError(f"scale: expected a finite number, got {number}; {remedy}")
    return number


def check_dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {_list(allowed)}, got {_short(x.dtype)}; cast it with .to({allowed[0]})")


def check_shape(name: str, x: Tensor, what: str, *sizes: int, remedy: str = "") -> None:
    if x.dim() != len(sizes) or any(a != b for a, b in zip(x.shape, sizes)):
        raise ValueError(f"{name}: expected shape {what} = [{', '.join(map(str, sizes))}], got {_shape(x)}{remedy}")


def check_state(name: str, x: Tensor, count: int | None, heads: int, k_dim: int, v_dim: int, v_first: bool) -> None:
    """[count, HV, K, V], or [.., V, K] if v_first; count None: a pool of any size."""
    rows, cols = (v_dim, k_dim) if v_first else (k_dim, v_dim)
    layout = "[N, HV, V, K]" if v_first else "[N, HV, K, V]"
    if count is None:
        layout, count = layout.replace("N", "P", 1), x.shape[0] if x.dim() else 0
    elif x.dim() == 4 and x.shape[0] != count:
        raise ValueError(
            f"{name}: The number of initial states is expected to be equal to the number of input sequences, "
            f"i.e., {count} rather than {x.shape[0]}; pass one for each sequence (without cu_seqlens each batch row is one)."
        )
    remedy = "; pass one state for each sequence and value head"
    if x.dim() == 4 and rows != cols and (x.shape[2], x.shape[3]) == (cols, rows):
        remedy = f"; this is the other layout: pass state_v_first={not v_first} or transpose the last two dimensions"
    check_shape(name, x, layout, count, heads, rows, cols, remedy=remedy)


def check_upstream(name: str, x: object, q: Tensor) -> None:
    """A gradient that comes in; its shape is the C ABI's to check."""
    if x is not None:
        check_tensor(name, x)
        check_dtype(name, x, FLOATS)  # type: ignore[arg-type]
        if x.device != q.device:  # type: ignore[attr-defined]
            raise ValueError(f"{name}: expected on q's device {q.device}, got {x.device}; move it with .to(q.device)")  # type: ignore[attr-defined]


def check_call(
    inputs: Sequence[Tensor | None],
    flags: int,
    out: Tensor | None = None,
    checkpoints: Tensor | None = None,
    every: int = 0,
) -> None:
    """inputs in the order of NAMES; None where absent. Reads shapes, dtypes and devices only."""
    for name, x in zip(NAMES, inputs):
        if x is not None or name in ("q", "k", "v", "beta"):
            check_tensor(name, x)
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, indices = inputs
    assert q is not None and k is not None and v is not None and beta is not None

    for name, x, what in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dimensions {what}, got {x.dim()} in shape {_shape(x)}; reshape it (head-last layout)"
            )
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"k: q and k must have the same number of heads, but got q.shape[2]={q.shape[2]} and k.shape[2]={k.shape[2]}; "
            "only v may have more: do not repeat k"
        )
    batch, tokens, heads, k_dim = q.shape
    v_heads, v_dim = v.shape[2], v.shape[3]
    check_shape("k", k, "[B, T, H, K] as q", batch, tokens, heads, k_dim, remedy="; q and k need one shape")
    remedy = "; batch and tokens must agree"
    if v_heads == heads and v.shape[1] != tokens:  # perhaps tokens and heads have changed places
        remedy += ": if the tensors lie as [B, heads, T, ..], pass q.transpose(1, 2) and so on"
    check_shape("v", v, "[B, T, HV, V] with q's B and T", batch, tokens, v_heads, v_dim, remedy=remedy)
    if heads == 0 or v_heads % heads != 0 or v_heads == 0:
        raise ValueError(
            f"v: For GVA, num_v_heads (HV={v_heads}) must be evenly divisible by num_heads (H={heads}); "
            "give every query/key head the same number of value heads, at least one"
        )

    check_dtype("q", q, FLOATS)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {_short(q.dtype)} as q, got {_short(x.dtype)}; cast q, k and v to one type")
    for name, x in zip(NAMES, inputs):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected on q's device {q.device}, got {x.device}; move it with .to(q.device)")
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"q: expected a tensor on the CPU or a CUDA device, got {q.device}; move the inputs there")
    if q.is_cuda and q.dtype not in HALVES:
        raise TypeError(
            f"q: expected dtype {_list(HALVES)} on CUDA, got {_short(q.dtype)}; cast q, k and v (torch.autocast does), or compute on the CPU"
        )

    if g is not None:
        check_shape("g", g, "[B, T, HV]", batch, tokens, v_heads, remedy="; one log decay for each token and value head")
        check_dtype("g", g, FLOATS)
    check_shape("beta", beta, "[B, T, HV]", batch, tokens, v_heads, remedy="; one value for each token and value head")
    check_dtype("beta", beta, FLOATS)

    sequences = batch
    if cu is not None:
        check_dtype("cu_seqlens", cu, INTS)
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"cu_seqlens: expected shape [N + 1] with the boundary 0 first, got {_shape(cu)}; see torch.cumsum")
        if batch != 1:
            raise ValueError(
                f"cu_seqlens: The batch size is expected to be 1 rather than {batch} when using `cu_seqlens`. "
                "Please flatten variable-length inputs before processing."
            )
        sequences = cu.shape[0] - 1

    if indices is not None:
        check_shape("state_indices", indices, "[N]", sequences, remedy="; one slot for each sequence, -1 to skip it")
        check_dtype("state_indices", indices, INTS)
        if h0 is None:
            raise ValueError(
                "state_indices: expected with initial_state as the pool [P, HV, K, V], got no initial_state; pass the pool"
            )
    if h0 is not None:
        check_dtype("initial_state", h0, FLOATS)
        v_first = bool(flags & _ffi.FLAG_STATE_V_FIRST)
        check_state("initial_state", h0, None if indices is not None else sequences, v_heads, k_dim, v_dim, v_first)
    if has_h0 is not None:
        check_shape("has_initial_state", has_h0, "[N]", sequences, remedy="; one bool for each sequence")
        check_dtype("has_initial_state", has_h0, (torch.bool,))
        if h0 is None:
            raise ValueError("has_initial_state: expected with initial_state, got no initial_state; pass both or neither")

    if flags & _ffi.FLAG_RAW_GATE:
        if a_log is None:
            raise ValueError(
                "A_log: A_log must be provided when use_gate_in_kernel=True. Expected a tensor [HV], got None; pass it, or the decay itself as "
                "g with use_gate_in_kernel=False"
            )
        if g is None:
            raise ValueError("g: expected the raw gate [B, T, HV] with use_gate_in_kernel=True, got None; pass it")
        for name, x in (("A_log", a_log), ("dt_bias", dt_bias)):
            if x is not None:
                check_shape(name, x, "[HV]", v_heads, remedy="; one value for each value head")
                check_dtype(name, x, FLOATS)
    if flags & _ffi.FLAG_NEG_EIGVAL and not flags & _ffi.FLAG_BETA_SIGMOID:
        raise ValueError(
            "allow_neg_eigval: `allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`. Expected False with beta as it is, got True; "
            "pass both, with logits as beta"
        )

    if out is not None:
        check_shape("out", out, "[B, T, HV, V]", batch, tokens, v_heads, v_dim, remedy="; out has v's shape")
        if out.dtype != q.dtype:
            raise TypeError(f"out: expected dtype {_short(q.dtype)} as q, got {_short(out.dtype)}; allocate it as q's type")
        if out.device != q.device:
            raise ValueError(f"out: expected on q's device {q.device}, got {out.device}; allocate it there")
    check_checkpoints(checkpoints, every, q, v, flags, cu is not None)


def check_checkpoints(x: Tensor | None, every: int, q: Tensor, v: Tensor, flags: int, varlen: bool) -> None:
    if every == 0 and x is None:
        return
    if every <= 0 or every % 64 != 0:
        raise ValueError(
            f"checkpoint_every_n_tokens: expected a positive multiple of 64 with state_checkpoints, got {every}; "
            f"{'round it up, to ' + str(-(-every // 64) * 64) if every > 0 else 'leave state_checkpoints out for none'}"
        )
    if x is None:
        raise ValueError(
            "state_checkpoints: expected a tensor [sum of floor(length / checkpoint_every_n_tokens), HV, K, V] to fill, got None; allocate it"
        )
    assert isinstance(x, Tensor)
    check_dtype("state_checkpoints", x, FLOATS)
    if x.device != q.device:
        raise ValueError(f"state_checkpoints: expected on q's device {q.device}, got {x.device}; allocate it there")
    rows, cols = (v.shape[3], q.shape[3]) if flags & _ffi.FLAG_STATE_V_FIRST else (q.shape[3], v.shape[3])
    if varlen:  # the number of checkpoints depends on the boundaries: at least the layout is known
        count = x.shape[0] if x.dim() else 0
    else:
        count = q.shape[0] * (q.shape[1] // every)
    what = "[sum of floor(length / every), HV, " + ("V, K]" if flags & _ffi.FLAG_STATE_V_FIRST else "K, V]")
    check_shape("state_checkpoints", x, what, count, v.shape[2], rows, cols)
