"""FlashInfer's call: `from qla.integrations.flashinfer import chunk_gated_delta_rule` in the place of
`from flashinfer.gdn_prefill import chunk_gated_delta_rule` (0.7.4), for prefill in a server, on CPUs too.

Packed [T, H, K] tensors, the decay itself instead of its logarithm, states [N, H, V, K], tensors to write into. What it refuses it says:
states of 8 bits, reads from one slot and writes to another, and its own backends' names.
"""

from __future__ import annotations

from typing import Any

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
    """o [T, max(Hq, Hv), V], with output_final_state also the states [N, .., V, K]; without gradients, as FlashInfer's.

    use_cp: False cuts no sequence, else `auto_cp`'s default. max_seqlen, cu_seqlens_cpu and checkpoint_cu_starts (which follows from
    cu_seqlens) are taken and not needed. With state_indices the pool is written in place: output_state is initial_state.
    """
    from qla import api

    for name, x in (("q", q), ("k", k), ("v", v)):
        _checks.check_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name}: expected packed [T, H, K], got shape {list(x.shape)}; take the batch dimension away")
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: expected the boundaries [N + 1] of the packed sequences, got None; pass [0, T] for one")
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
        raise ValueError(f'gate_domain: expected "linear" or "log", got {gate_domain!r}')
    if state_indices is not None and (initial_state is None or (output_state is not None and output_state is not initial_state)):
        raise NotSupportedError(
            "output_state: expected the pool of initial_state with state_indices, got another tensor or no pool; qla updates it in place"
        )
    if use_gate_in_kernel and (g is None or A_log is None or dt_bias is None):
        raise ValueError("A_log: expected g, A_log and dt_bias with use_gate_in_kernel, got None for one of them; pass all three")

    with torch.no_grad():
        heads = max(q.shape[1], v.shape[1])
        if (
            q.shape[1] > k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1]
        ):  # several queries share a key
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if g is not None and not use_gate_in_kernel and gate_domain == "linear":
            g = g.log()  # 0 forgets all: -inf is a gate like any other
        if beta is None:
            beta = torch.ones(q.shape[0], heads, device=q.device)
            beta_is_logit = False
        keywords: dict[str, Any] = {}
        if use_gate_in_kernel:
            keywords.update(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
        if checkpoint_every_n_tokens:
            keywords.update(checkpoint_every_n_tokens=checkpoint_every_n_tokens, state_checkpoints=state_checkpoints)
        if output is not None:
            keywords["out"] = output[None]
        o, state = api.chunk_gated_delta_rule(
            q[None],
            k[None],
            v[None],
            None if g is None else g[None],
            beta[None],
            scale or None,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=beta_is_logit,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            state_indices=state_indices,
            auto_cp=use_cp is not False,
            **keywords,
        )
        if output_final_state and state_indices is None and output_state is not None:
            assert state is not None
            if output_state.shape != state.shape:
                raise ValueError(
                    f"output_state: expected shape {list(state.shape)}, got {list(output_state.shape)}; allocate it so"
                )
            state = output_state.copy_(state)
    result = output if output is not None else o[0]
    if not output_final_state:
        return result
    assert state is not None
    return result, state
