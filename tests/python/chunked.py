"""The chunk form in float64 with torch's own matrix products: the truth for sequences that are too long for the token recurrence.

What does not depend on the state is made for all chunks at once; only S walks. test_long.py holds it against the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


def _chunks(x: Tensor, count: int) -> Tensor:
    """[T, H, ..] -> [H, chunks, 64, ..], rows past the end 0."""
    padded = x.new_zeros(count * CHUNK, *x.shape[1:])
    padded = torch.cat([x, padded[x.shape[0] :]])
    return padded.unflatten(0, (count, CHUNK)).movedim(2, 0)


def _sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[T, H, .] of one sequence, state [H, K, V]."""
    tokens = q.shape[0]
    count = -(-tokens // CHUNK)
    q, k, v, g, beta = (_chunks(x, count) for x in (q, k, v, g, beta))
    g = g.cumsum(-1)
    gamma, tail = g.exp().unsqueeze(-1), (g[..., -1:] - g).exp().unsqueeze(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    column = beta.unsqueeze(-2)
    identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    unit = identity + (decay * (k @ k.mT) * column).tril(-1)
    wide = torch.linalg.solve_triangular(unit, torch.cat([v, gamma * k], -1), upper=False, unitriangular=True)
    own, of_state = wide.split([v.shape[-1], k.shape[-1]], -1)  # Delta = own - of_state S
    k_tail = (tail * beta.unsqueeze(-1) * k).mT
    states = []
    for c in range(count):
        states.append(state)
        delta = own[:, c] - of_state[:, c] @ state
        state = gamma[:, c, -1:] * state + k_tail[:, c] @ delta
    all_states = torch.stack(states, 1)
    delta = own - of_state @ all_states
    o = scale * (gamma * (q @ all_states) + (decay * (q @ k.mT) * column) @ delta)
    return o.movedim(0, 2).flatten(0, 1)[:tokens], state


def chunked_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Any = None,
    output_final_state: bool = True,
    state_v_first: bool = False,
    **ignored: Any,
) -> tuple[Tensor, Tensor]:
    """Like `qla.testing.recurrent_gated_delta_rule`, of one batch row, on the tensors' device."""
    assert q.shape[0] == 1
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    cu = [0, q.shape[0]] if cu_seqlens is None else [int(x) for x in cu_seqlens]
    outputs, finals = [], []
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        state = q.new_zeros(heads, q.shape[-1], v.shape[-1]) if initial_state is None else initial_state[n].double()
        if state_v_first and initial_state is not None:
            state = state.mT
        if b > a:
            o, state = _sequence(q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], state, scale)
            outputs.append(o)
        finals.append(state)
    final = torch.stack(finals)
    return torch.cat(outputs).unsqueeze(0), final.mT if state_v_first else final
