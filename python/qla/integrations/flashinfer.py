"""FlashInfer's call: `from qla.integrations.flashinfer import chunk_gated_delta_rule` in the place of
`from flashinfer.gdn_prefill import chunk_gated_delta_rule` (0.7.4), for prefill in a server, on CPUs too.

Packed [T, H, K] tensors, the decay itself instead of its logarithm, states [N, H, V, K], tensors to write into. It refuses, with the reason:
states of 8 bits, reads from one slot with writes to another, and the names of FlashInfer's own backends.
"""

from __future__ import annotations

from typing import Any

from qla import _need_torch  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from qla import _checks
from qla._ffi import NotSupportedError


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    gate_domain: str = "linear",
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_is_logit: bool = False,
    cu_seqlens_cpu: Any = None,
    output_state_indices: Tensor | None = None,
    checkpoint_state_indices: Tensor | None = None,
    prefix_lens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashInfer's arguments, in its order. q has Hq heads, k Hk, v Hv; H is max(Hq, Hv). Hv is a multiple of Hq = Hk, or Hq of Hk = Hv.

    Args:
        q, k: `[T, Hq, K]`, `[T, Hk, K]`, all sequences after one another. Keys of length 1, or `use_qk_l2norm_in_kernel`.
        v: `[T, Hv, V]`.
        g: `[T, H]` the decay itself, 0 to 1, None: no decay. A logarithm passed here gives NaN: say `gate_domain="log"`. The raw gate with
            `use_gate_in_kernel`, which then needs `A_log` and `dt_bias`, `[H]`.
        beta: `[T, H]`, None: 1. Logits with `beta_is_logit`.
        scale: None or 0: K ** -0.5.
        cu_seqlens: `[N + 1]` int32 or int64, required; `[0, T]` for one sequence.
        initial_state: `[N, H, V, K]`; with `state_indices` the pool `[P, H, V, K]`, which is written in place, output_final_state or not.
        state_indices: `[N]` slots of the pool; -1 skips the sequence.
        output, output_state: `[T, H, V]` and `[N, H, V, K]` to write into. output_state only with output_final_state; with state_indices it
            is None or the pool.
        checkpoint_every_n_tokens, state_checkpoints: the states after every n tokens (a multiple of 64), into
            `[sum of floor(length / n), H, V, K]`.
        use_cp: False cuts no sequence, everything else is `auto_cp`'s default.
        max_seqlen, cu_seqlens_cpu, checkpoint_cu_starts: taken and not needed.

    Returns:
        o `[T, H, V]`; with output_final_state (o, states `[N, H, V, K]`), with state_indices (o, pool). No gradients, as FlashInfer's.
    """
    from qla import api

    for name, x in (("q", q), ("k", k), ("v", v)):
        _checks.check_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name}: expected packed [T, H, K], got shape {list(x.shape)}; take the batch dimension away")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected {q.shape[0]} tokens as q, got {x.shape[0]}; q, k and v hold the same tokens")
    hq, hk, hv = q.shape[1], k.shape[1], v.shape[1]
    if min(hq, hk, hv) == 0 or not ((hq == hk and hv % hq == 0) or (hk == hv and hq % hk == 0)):
        raise ValueError(
            f"{'v' if hq == hk else 'k'}: expected Hv a multiple of Hq = Hk, or Hq a multiple of Hk = Hv, "
            f"got Hq = {hq}, Hk = {hk}, Hv = {hv}; pass q, k and v with such heads"
        )
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: expected the boundaries [N + 1] of the packed sequences, got None; pass [0, T] for one")
    _checks.check_tensor("cu_seqlens", cu_seqlens)
    tokens, heads = q.shape[0], max(hq, hv)
    for name, gate in (("g", g), ("beta", beta)):
        if gate is not None:
            _checks.check_tensor(name, gate)
            _checks.check_shape(name, gate, "[T, max(Hq, Hv)]", tokens, heads, remedy="; one value for each token and head")
            _checks.check_dtype(name, gate, _checks.FLOATS)
    for name, given in (
        ("output_state_indices", output_state_indices),
        ("checkpoint_state_indices", checkpoint_state_indices),
        ("prefix_lens", prefix_lens),
        ("_cp_chunk_len", _cp_chunk_len),
    ):
        if given is not None:
            raise NotSupportedError(f"{name}: expected None, got a value; qla reads and writes a sequence's own slot")
    if backend not in ("auto", "flashinfer"):
        raise NotSupportedError(f'backend: expected "auto" or "flashinfer", got {backend!r}; qla is the backend here')
    if gate_domain not in ("linear", "log"):
        raise ValueError(f'gate_domain: expected "linear" or "log", got {gate_domain!r}; linear is the decay itself')
    if state_indices is not None and initial_state is None:
        raise ValueError("initial_state: expected the pool [P, H, V, K] with state_indices, got None; pass the pool")
    if state_indices is not None and output_state is not None and output_state is not initial_state:
        raise NotSupportedError(
            "output_state: expected the pool of initial_state with state_indices, got another tensor; leave it out: qla updates the pool"
        )
    if output is not None:
        _checks.check_tensor("output", output)
        _checks.check_shape("output", output, "[T, max(Hq, Hv), V]", tokens, heads, v.shape[2], remedy="; allocate it so")
        if not torch.is_autocast_enabled(q.device.type) and output.dtype != q.dtype:
            raise TypeError(f"output: expected dtype {q.dtype} as q, got {output.dtype}; allocate it so")
    if output_final_state and output_state is not None and state_indices is None:
        _checks.check_tensor("output_state", output_state)
        sizes = (cu_seqlens.shape[0] - 1 if cu_seqlens.dim() else 0, heads, v.shape[2], q.shape[2])
        _checks.check_shape("output_state", output_state, "[N, max(Hq, Hv), V, K]", *sizes, remedy="; allocate it so")
        _checks.check_dtype("output_state", output_state, _checks.FLOATS)
    if use_gate_in_kernel and (g is None or A_log is None or dt_bias is None):
        raise ValueError("A_log: expected g, A_log and dt_bias with use_gate_in_kernel, got None for one of them; pass all three")

    with torch.no_grad():
        if hq > hk:  # several queries share a key
            k, v = (x.repeat_interleave(hq // hk, 1) for x in (k, v))
        if g is not None and not use_gate_in_kernel and gate_domain == "linear":
            g = g.log()  # 0 forgets all: -inf is a gate like any other
        if beta is None:
            beta = torch.ones(tokens, heads, device=q.device)
            beta_is_logit = False
        o, state = api.chunk_gated_delta_rule(
            q[None],
            k[None],
            v[None],
            None if g is None else g[None],
            beta[None],
            None if isinstance(scale, (int, float)) and scale == 0 else scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=beta_is_logit,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            state_indices=state_indices,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            auto_cp=use_cp is not False,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            state_checkpoints=state_checkpoints,
            out=None if output is None else output[None],
        )
        if output_final_state and state_indices is None and output_state is not None:
            assert state is not None
            state = output_state.copy_(state)
    result = output if output is not None else o[0]
    if not output_final_state:
        return result
    assert state is not None
    return result, state
