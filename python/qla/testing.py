"""For users and tests: the token recurrence in float64, differentiable, in plain torch; inputs like those of real layers; error measures.

Slow and obvious on purpose: it shares no code and no idea with the kernels. T up to about 1,000 with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qla import _need_torch  # noqa: F401  # isort: skip

import torch
from torch import Tensor

__all__ = ["GATES", "gate", "random_inputs", "recurrent_gated_delta_rule", "relative_l2"]


def _boundaries(cu_seqlens: Tensor | Sequence[int] | None, batch: int, tokens: int) -> list[tuple[int, int, int]]:
    """(row, first token, end) of every sequence."""
    if cu_seqlens is None:
        return [(b, 0, tokens) for b in range(batch)]
    cu = [int(x) for x in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    return [(0, a, b) for a, b in zip(cu, cu[1:])]


def _walk(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[N, L, HV, .] tensors of N sequences side by side, state [N, HV, K, V] -> (o, state after the last token)."""
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t].exp()[..., None, None]
        k_t = k[:, t]
        residual = v[:, t] - (k_t.unsqueeze(-2) @ state).squeeze(-2)
        state = state + (beta[:, t, :, None] * k_t).unsqueeze(-1) * residual.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) * scale)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `qla.chunk_gated_delta_rule` computes, token by token in `dtype` (results too), from the inputs as they are rounded."""
    if beta is None:
        raise TypeError("beta: expected [B, T, HV], got None; it is required")
    batch, tokens, heads, k_dim = q.shape
    v_heads, v_dim = v.shape[2:]
    scale = k_dim**-0.5 if scale is None else scale
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if g is not None:
        g = g.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if use_gate_in_kernel:
        if g is None or A_log is None:
            raise ValueError("A_log: expected g and A_log with use_gate_in_kernel, got None for one of them; pass both")
        bias = 0.0 if dt_bias is None else dt_bias.to(dtype)
        g = -A_log.to(dtype).exp() * torch.nn.functional.softplus(g + bias)
    q, k = (x.repeat_interleave(v_heads // heads, dim=2) for x in (q, k))

    sequences = _boundaries(cu_seqlens, batch, tokens)
    count = len(sequences)
    if initial_state is None:
        start = torch.zeros(count, v_heads, k_dim, v_dim, dtype=dtype, device=q.device)
    else:
        start = initial_state.to(dtype)
        if state_v_first:
            start = start.transpose(-1, -2)
        if has_initial_state is not None:
            start = torch.where(has_initial_state.view(-1, 1, 1, 1), start, torch.zeros((), dtype=dtype, device=q.device))

    # Sequences of one length walk side by side; with many different lengths that is one after another.
    o = torch.zeros(batch, tokens, v_heads, v_dim, dtype=dtype, device=q.device)
    finals: list[Tensor] = list(start.unbind(0))
    by_length: dict[int, list[int]] = {}
    for n, (_, a, b) in enumerate(sequences):
        by_length.setdefault(b - a, []).append(n)
    for length, members in by_length.items():
        if length == 0:
            continue
        rows = torch.tensor([sequences[n][0] for n in members], device=q.device)[:, None]
        at = torch.tensor([sequences[n][1] for n in members], device=q.device)[:, None] + torch.arange(length, device=q.device)
        gates = None if g is None else g[rows, at]
        begin = torch.stack([finals[n] for n in members])
        part, end = _walk(q[rows, at], k[rows, at], v[rows, at], gates, beta[rows, at], begin, scale)
        o = o.index_put((rows.expand_as(at), at), part)
        for i, n in enumerate(members):
            finals[n] = end[i]
    if not output_final_state:
        return o, None
    final = torch.stack(finals) if finals else start
    return o, final.transpose(-1, -2) if state_v_first else final


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; where expected is all zero, |actual|."""
    expected = expected.detach().double()
    actual = actual.detach().to(expected)
    size = torch.linalg.vector_norm(expected).item()
    error = torch.linalg.vector_norm(actual - expected).item()
    return error / size if size > 0 else error


GATES = ("soft", "qwen", "zero", "mix", "cliff")


def gate(kind: str | float, batch: int, tokens: int, heads: int, generator: torch.Generator | None = None) -> Tensor:
    """Log decays [B, T, HV] float32 on the CPU. A number: that value everywhere."""
    shape = (batch, tokens, heads)
    if not isinstance(kind, str):
        return torch.full(shape, float(kind))
    noise = torch.randn(shape, generator=generator)
    if kind == "soft":
        return torch.nn.functional.logsigmoid(noise) / 16
    if kind == "qwen":  # from a head that never forgets to one that forgets at once
        a = torch.rand(heads, generator=generator) * 16
        a[0], a[-1] = 0.0, 16.0
        return -a * torch.nn.functional.softplus(0.5 * noise + 1)
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "mix":
        uniform = torch.rand(shape, generator=generator)
        return torch.nn.functional.logsigmoid(uniform) * (torch.rand(shape, generator=generator) < 0.5)
    if kind == "cliff":
        g = torch.full(shape, -0.01)
        g[:, 37 if tokens > 37 else -1 :][:, :1] = -100.0
        return g
    raise ValueError(f"kind: expected a number or one of {', '.join(GATES)}, got {kind!r}")


def random_inputs(
    batch: int = 1,
    tokens: int = 128,
    num_k_heads: int = 2,
    num_v_heads: int = 4,
    k_dim: int = 128,
    v_dim: int = 128,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kind: str | float = "soft",
    sequences: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q k v g beta initial_state of a trained layer's kind: unit q and k, beta in (0, 1), g of `gate(kind, ..)`; made on the CPU from the
    seed, so that every device gets the same numbers. sequences: rows of initial_state (default: batch)."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    q, k = (torch.nn.functional.normalize(normal(batch, tokens, num_k_heads, k_dim), dim=-1) for _ in range(2))
    v = normal(batch, tokens, num_v_heads, v_dim)
    beta = normal(batch, tokens, num_v_heads).sigmoid()
    g = gate(kind, batch, tokens, num_v_heads, make)
    h0 = normal(batch if sequences is None else sequences, num_v_heads, k_dim, v_dim)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    result = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "g": g.to(wide),
        "beta": beta.to(wide),
        "initial_state": h0.to(wide),
    }
    return {name: x.to(device) for name, x in result.items()}
