"""The three functions of the original. The gated delta rule itself is `qla.chunk_gated_delta_rule`'s."""

from __future__ import annotations

from typing import Any

from qla import _need_torch  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from qla import _args, _call, _checks, api

CHUNK = _args.CHUNK
FORCED_SEGMENTS = 8  # force_intra_cp cuts the longest possible sequence into about as many
MIN_SEGMENT_CHUNKS = 4


def _known_float(x: Tensor | None) -> Tensor | None:
    """The original takes any float type of gates and states; the rare ones are cast."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in _checks.FLOATS:
        return x.float()
    return x


def _policy(auto_cp: object, force_intra_cp: bool, tokens: int) -> Any:
    if not _checks.check_flag("force_intra_cp", force_intra_cp):
        return auto_cp
    from qla._plan import Plan

    chunks = -(-tokens // CHUNK)
    return Plan.fixed(max(MIN_SEGMENT_CHUNKS, -(-chunks // FORCED_SEGMENTS)))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    cp_context: Any = None,
    force_intra_cp: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """-> (o, final_state). The arguments are those of `qla.chunk_gated_delta_rule`; what only this function has:

    head_first: must be False: tensors lie as `[B, T, H, ..]`; transpose those that lie as `[B, H, T, ..]`.
    force_intra_cp: cut sequences even where that does not pay, whatever auto_cp says: the longest possible one, of T tokens, into about 8
        segments of 4 chunks (256 tokens) or more. Results are those of auto_cp=True but for the rounding.
    enable_fwd_cp_cache: no effect; nothing is cached between calls.
    """
    if _checks.check_flag("head_first", head_first):
        raise ValueError("head_first: head_first=True is not supported; pass inputs in [B, T, H, ...] format")
    tokens = q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else 0  # what is wrong with q the call says
    return api.chunk_gated_delta_rule(
        q,
        k,
        v,
        _known_float(g),
        _known_float(beta),
        scale=scale,
        initial_state=_known_float(initial_state),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        auto_cp=_policy(auto_cp, force_intra_cp, tokens),
    )


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, state: Tensor | None, cu: Tensor | None,
    v_first: bool, auto_cp: Any, cp_context: Any,
) -> tuple[_args.Inputs, _args.Options]:  # fmt: skip
    with torch.no_grad():
        call = api._prepare(
            q, k, v, _known_float(g), _known_float(beta), scale, _known_float(state), cu_seqlens=cu, state_v_first=v_first,
            auto_cp=auto_cp, cp_context=cp_context,
        )  # fmt: skip
    _checks.check_call(call.inputs, call.options[1])
    return call.inputs, call.options


def _num_chunks(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """Chunks of a batch row; with cu_seqlens of all sequences, which synchronises."""
    if cu_seqlens is None:
        return -(-q.shape[1] // CHUNK)
    return sum(-(-n // CHUNK) for n in torch.diff(cu_seqlens).tolist())


@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
    cp_context: Any = None,
    is_train: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Any]:
    """-> (g, A, o, h, final_state, cp_cache), without gradients. g: cumulative sum of the log decay in each chunk of 64 tokens, float32;
    A: [B, T, HV, 64], the inverse without the gate (F2); h: [B, chunks, HV, K, V], the state at each chunk's start, or None; cp_cache: None.
    """
    inputs, options = _prepare(q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first, auto_cp, cp_context)
    batch, tokens, _, k_dim = q.shape
    v_heads, v_dim = v.shape[2], v.shape[3]
    g_cumsum = torch.empty(batch, tokens, v_heads, dtype=_args.state_dtype(q.dtype), device=q.device)
    a_inv = torch.empty(batch, tokens, v_heads, CHUNK, dtype=q.dtype, device=q.device)
    h = rows = None
    if output_h:
        chunks = _num_chunks(q, cu_seqlens)
        state = (v_dim, k_dim) if state_v_first else (k_dim, v_dim)
        h = torch.empty(batch, chunks, v_heads, *state, dtype=k.dtype, device=q.device)
        rows = h.view(batch * chunks, v_heads, *state)
    extras = _args.Extras(a_inv=a_inv, g_cumsum=g_cumsum, h=rows)
    o, final, _ = _call.forward(inputs, options, output_final_state, extras=extras)
    return g_cumsum, a_inv, o, h, final, None


def _raw_gate(g_cumsum: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The log decay of each token, from its cumulative sum in each chunk. Stays on the device."""
    tokens = g_cumsum.shape[1]
    at = torch.arange(tokens, device=g_cumsum.device)
    if cu_seqlens is not None and cu_seqlens.shape[0] > 1:
        ends = cu_seqlens[1:].to(at.dtype)
        sequence = torch.searchsorted(ends, at, right=True).clamp_(max=ends.shape[0] - 1)
        at = at - cu_seqlens[:-1].to(at.dtype)[sequence]
    before = torch.nn.functional.pad(g_cumsum[:, :-1], (0, 0, 1, 0)) if tokens else g_cumsum
    return torch.where((at % CHUNK == 0)[None, :, None], g_cumsum, g_cumsum - before)


@torch.no_grad()
def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: Any = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """-> (dq, dk, dv, db, dg, dh0). g and A as the forward returned them (A is made again, not read: a rounded A would cost accuracy);
    dg: float32, the gradient of each token's log decay, already summed; dh0: float32, None without initial_state."""
    for name, x in (("q", q), ("g", g), ("do", do)):
        _checks.check_tensor(name, x)
    if cu_seqlens is not None:
        _checks.check_tensor("cu_seqlens", cu_seqlens)
        _checks.check_dtype("cu_seqlens", cu_seqlens, _checks.INTS)
    if g.dim() != 3:
        raise ValueError(f"g: expected 3 dimensions [B, T, HV], got shape {list(g.shape)}; pass the forward's g")
    _checks.check_upstream("do", do, q)
    _checks.check_upstream("dht", dht, q)
    raw = _raw_gate(g, cu_seqlens)
    inputs, options = _prepare(q, k, v, raw, beta, scale, initial_state, cu_seqlens, state_v_first, auto_cp, cp_context)
    _checks.check_shape("do", do, "[B, T, HV, V] as o", *v.shape, remedy="; the gradient of the forward's o")
    if dht is not None:
        shape = _args.final_shape(q, v, cu_seqlens, options[1])
        _checks.check_shape("dht", dht, "of the forward's final_state", *shape, remedy="; None where it has no gradient")
    needs = 0b11111 | (0b100000 if initial_state is not None else 0)
    dq, dk, dv, dg, db, dh0, _, _ = _call.backward(inputs[:10], None, do, dht, needs, options)
    assert dq is not None and dk is not None and dv is not None and db is not None and dg is not None
    return dq, dk, dv, db, dg, dh0
