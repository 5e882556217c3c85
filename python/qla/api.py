"""`qla.chunk_gated_delta_rule`, in FLA's argument order, and `qla.can_implement`."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import math
import os
import warnings
from typing import Any

from qla import _need_torch  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from qla import _args, _call, _checks, _ffi, ops
from qla._ffi import NotSupportedError, QlaError
from qla._plan import Plan

__all__ = ["NotSupportedError", "QlaError", "can_implement", "chunk_gated_delta_rule"]

log = logging.getLogger("qla")
_VALIDATE = _ffi.FLAG_VALIDATE if os.environ.get("QLA_VALIDATE", "0") not in ("", "0") else 0


def cp_policy(auto_cp: object) -> tuple[int, int, float | None, int]:
    """auto_cp -> (cp_mode, cp_segment_chunks, cp_warmup_threshold, cp_uncut_chunks)."""
    word = auto_cp if isinstance(auto_cp, str) else None
    if auto_cp is True or word == "auto":
        return _AUTO
    if auto_cp is False or auto_cp is None or word == "off":
        return _ffi.CP_OFF, 0, None, 0
    if word == "exact":
        return _ffi.CP_EXACT, 0, None, 0
    if isinstance(auto_cp, Plan):
        if not isinstance(auto_cp.segment_chunks, int) or auto_cp.segment_chunks < 0:
            raise ValueError(
                f"auto_cp: expected a plan of segment_chunks 0 (whole sequences) or more, got {auto_cp.segment_chunks!r}; see qla.plan"
            )
        threshold = -math.inf if auto_cp.exact else None
        if auto_cp.uncut_chunks is not None:
            return _ffi.CP_PLAN, auto_cp.segment_chunks, threshold, auto_cp.uncut_chunks
        return (_ffi.CP_FIXED, auto_cp.segment_chunks, threshold, 0) if auto_cp.segment_chunks > 0 else (_ffi.CP_OFF, 0, None, 0)
    raise ValueError(f'auto_cp: expected True, "auto", "exact", False or a qla.Plan, got {auto_cp!r}; see qla.plan')


_AUTO = (_ffi.CP_AUTO, 0, None, 0)


def _autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast q, k and v are cast to its type, as torch casts the operands of a matrix product (float64 stays)."""
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


@functools.lru_cache(maxsize=256)
def _meant(keyword: str) -> str:
    """The argument that an unknown keyword is probably a misspelling of; "" where none is near."""
    known = [name for name in _SIGNATURE.parameters if name != "kwargs"]
    near = difflib.get_close_matches(keyword, known, 1, 0.85) or [n for n in known if len(keyword) > 5 and n.startswith(keyword)]
    return near[0] if near else ""


# Unknown keywords that ask for another way of computing: the values that ask for nothing, and what to use instead.
_ASKED: dict[str, tuple[tuple[object, ...], str]] = {
    "force_intra_cp": (
        (None, False),
        "long sequences are cut where that pays; auto_cp=qla.Plan.fixed(segment_chunks) cuts every longer one, and so does "
        "flash_qla.chunk_gated_delta_rule(..., force_intra_cp=True)",
    ),
    "chunk_size": ((None, 64), "chunks are of 64 tokens always, results do not depend on it; leave it out"),
}
_told: set[str] = set()


def _asked_in_vain(name: str, value: object) -> str:
    """What to use instead of an ignored keyword that asks for something; "" where it does not, and the second time."""
    if name not in _ASKED or name in _told:
        return ""
    idle, instead = _ASKED[name]
    if value is None or (isinstance(value, int) and value in idle):
        return ""
    _told.add(name)
    return instead


def _unknown(kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """Old spellings are honoured or refused, unknown keywords ignored; what looks misspelt, or asks for what there is not, is warned of.
    -> state_v_first"""
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(
                "transpose_state_layout: Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`."
            )
        if not torch.compiler.is_compiling():
            warnings.warn(
                "`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, stacklevel=4
            )
        state_v_first = bool(kwargs.pop("transpose_state_layout"))
    if kwargs.pop("head_first", False):
        raise ValueError("head_first: head_first has been removed. Inputs must be in `[B, T, H, ...]` format; transpose them.")
    if kwargs and not torch.compiler.is_compiling():
        for name, value in kwargs.items():
            if instead := _asked_in_vain(name, value):
                warnings.warn(f"`{name}` is no argument of qla.chunk_gated_delta_rule and is ignored: {instead}", stacklevel=4)
            elif meant := _meant(name):
                warnings.warn(
                    f"`{name}` is no argument of chunk_gated_delta_rule and is ignored; was `{meant}` meant?", stacklevel=4
                )
        log.debug("qla.chunk_gated_delta_rule: ignored unknown keywords %s", ", ".join(sorted(kwargs)))
    return state_v_first


def _flags(qk_l2norm: bool, beta_sigmoid: bool, neg_eigval: bool, v_first: bool) -> int:
    flags = _VALIDATE
    if _checks.check_flag("use_qk_l2norm_in_kernel", qk_l2norm):
        flags |= _ffi.FLAG_QK_L2NORM
    if _checks.check_flag("use_beta_sigmoid_in_kernel", beta_sigmoid):
        flags |= _ffi.FLAG_BETA_SIGMOID
    if _checks.check_flag("allow_neg_eigval", neg_eigval):
        flags |= _ffi.FLAG_NEG_EIGVAL
    if _checks.check_flag("state_v_first", v_first):
        flags |= _ffi.FLAG_STATE_V_FIRST
    return flags


class _Prepared:
    """A call after everything that needs no library: what the operators take."""

    __slots__ = ("inputs", "options", "want_final", "needs", "out", "checkpoints", "every", "max_bytes")

    inputs: _args.Inputs
    options: _args.Options
    want_final: bool
    needs: int
    out: Tensor | None
    checkpoints: Tensor | None
    every: int
    max_bytes: int


def _prepare(
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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    auto_cp: object = True,
    deterministic: object = None,
    out: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    state_checkpoints: Tensor | None = None,
    backward_mib: int | None = None,
    kwargs: dict[str, Any] | None = None,
) -> _Prepared:
    if kwargs:
        state_v_first = _unknown(kwargs, state_v_first)
    if cp_context is not None:
        raise NotSupportedError(
            "cp_context: expected None, got a context of context parallelism over several devices; one device only: pass cp_context=None"
        )
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens: expected with cu_seqlens_cpu, got None; pass the boundaries on q's device as cu_seqlens")
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(beta, Tensor)):
        for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta)):
            _checks.check_tensor(name, x)
    cp = _AUTO if auto_cp is True else cp_policy(auto_cp)
    flags = _flags(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first)
    if _checks.check_flag("use_gate_in_kernel", use_gate_in_kernel):
        flags |= _ffi.FLAG_RAW_GATE
    else:
        A_log = dt_bias = None
    if deterministic is not None:
        if isinstance(deterministic, str) and deterministic == "batch":
            flags |= _ffi.FLAG_BATCH_INVARIANT
        elif not isinstance(deterministic, bool):  # results are always the same from run to run
            raise ValueError(
                f'deterministic: expected None, True, False or "batch", got {deterministic!r}; "batch" also makes results independent of '
                "what a sequence is packed with, the others change nothing"
            )
    q, k, v = _autocast(q, k, v)

    call = _Prepared()
    call.inputs = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, has_initial_state, state_indices)
    call.options = (None if scale is None else _checks.check_scale(scale), flags, *cp)
    call.want_final = _checks.check_flag("output_final_state", output_final_state)
    call.needs = ops.needs_grad(call.inputs)
    every = checkpoint_every_n_tokens
    if type(every) is not int:
        every = _checks.whole("checkpoint_every_n_tokens", every, "a multiple of 64", "0 stores none")
    call.out, call.checkpoints, call.every = out, state_checkpoints, every
    call.max_bytes = 0
    for name, given in (("out", out), ("state_checkpoints", state_checkpoints)):
        if given is not None:
            _checks.check_tensor(name, given)
            if given.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: expected a tensor without requires_grad, got one with it; pass {name}.detach()")
    if backward_mib is not None:
        backward_mib = _checks.whole("backward_mib", backward_mib, "a whole number of MiB", "None is the default")
        if backward_mib < 0:
            raise ValueError(
                f"backward_mib: expected 0 (as little as possible) or more MiB, got {backward_mib}; None is the default"
            )
        call.max_bytes = max(1, min(backward_mib, 1 << 40) << 20)
    if call.needs:
        for name, given in (("out", out), ("state_indices", state_indices), ("state_checkpoints", state_checkpoints)):
            if given is not None:
                raise ValueError(
                    f"{name}: expected None when gradients are needed, got a tensor, which has no gradient; "
                    "call under torch.no_grad(), or leave it out"
                )
        if every:
            raise ValueError(
                f"checkpoint_every_n_tokens: expected 0 when gradients are needed, got {every}; call under torch.no_grad()"
            )
    return call


def chunk_gated_delta_rule(
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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    auto_cp: bool | str | Plan = True,
    deterministic: bool | str | None = None,
    out: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    state_checkpoints: Tensor | None = None,
    backward_mib: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole sequences: for each token and value head, with state S [K, V],

        S <- exp(g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale * S^T q_t

    Args:
        q, k: `[B, T, H, K]`; bfloat16 or float16, on the CPU also float32 and float64. Keys of length 1 (`use_qk_l2norm_in_kernel`, or
            normalised before): with longer ones and beta near 1 the recurrence itself grows without bound.
        v: `[B, T, HV, V]`, HV a multiple of H: value head h reads query/key head h // (HV // H).
        g: `[B, T, HV]` decay in log space (natural), usually <= 0; None: no decay. The raw gate with `use_gate_in_kernel`.
        beta: `[B, T, HV]` write strength, required (it has a default only for FLA's order); logits with
            `use_beta_sigmoid_in_kernel`.
        scale: factor of the outputs; None: K ** -0.5.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`), any float dtype; N sequences, B without `cu_seqlens`.
        output_final_state: also return the state after each sequence's last token, float32 (float64 for float64 tensors).
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum x^2 + 1e-6).
        use_beta_sigmoid_in_kernel: beta <- sigmoid(beta), twice that with `allow_neg_eigval`.
        state_v_first: states are `[.., V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64 boundaries of sequences packed into one row (B = 1), on q's device. Tokens past the last one
            are ignored; their outputs and gradients are 0.
        cu_seqlens_cpu, chunk_indices: taken for FLA's sake and not needed.
        use_gate_in_kernel: g <- -exp(A_log) * softplus(g + dt_bias), in float32; `A_log`, `dt_bias`: `[HV]`.
        auto_cp: cut long sequences into segments that run at the same time: True or "auto"; "exact" (merge states exactly everywhere);
            False; a `qla.Plan`, which is repeated; `qla.Plan.fixed(n)`: after every n chunks of 64 tokens.
        deterministic: results never change from run to run; "batch": nor with what a sequence is packed with.
        out: `[B, T, HV, V]` to write into. No gradients.
        state_indices: `[N]` slots of the pool `initial_state` `[P, HV, K, V]`, read and written in place; -1 skips the sequence, its
            output is 0. No gradients.
        has_initial_state: `[N]` bool; a sequence where it is False starts from zero.
        checkpoint_every_n_tokens, state_checkpoints: also store the state after every n tokens (a multiple of 64) into
            `[sum of floor(length / n), HV, K, V]`. No gradients.
        backward_mib: workspace that backward may take (default: QLA_BACKWARD_MIB, else 2048); less is slower.
        Unknown keywords are ignored (logged at debug level; with a warning where one looks like a misspelt argument, and at the first
            `force_intra_cp` or `chunk_size` that asks for something).

    Returns:
        (o, final_state): `[B, T, HV, V]` in q's dtype, and the final states or None. With `state_indices` the pool itself.

    Raises:
        ValueError, TypeError: a wrong argument, named with what was expected; nothing was computed.
        NotSupportedError (a NotImplementedError and a ValueError): valid, but this device or build has no kernel for it. Raised at
        forward also for what backward could not do when gradients are needed.
    """
    plain = (
        auto_cp is True
        and use_gate_in_kernel is False
        and not kwargs
        and type(checkpoint_every_n_tokens) is int
        and checkpoint_every_n_tokens == 0
        and cp_context is cu_seqlens_cpu is out is state_indices is has_initial_state is state_checkpoints is None
        and deterministic is backward_mib is None
    )
    key = None
    if plain and not torch.compiler.is_compiling() and (scale is None or type(scale) is float):
        try:
            key = (
                scale, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, q.shape,
                v.shape, torch.is_grad_enabled(),
            )  # fmt: skip
            call = ops.remembered(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor, a nested one, a flag that is none: the long way says so
            key = call = None
        if call is not None:
            done = ops.gdn_forward_again(call, q, k, v, g, beta, initial_state, cu_seqlens)
            if done is not None:
                return done
    if plain and isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(beta, Tensor):
        # what most calls are: _prepare would come to the same
        flags = _flags(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first)
        q, k, v = _autocast(q, k, v)
        inputs = (q, k, v, g, beta, initial_state, cu_seqlens, None, None, None, None)
        options = (None if scale is None else _checks.check_scale(scale), flags, *_AUTO)
        want_final = _checks.check_flag("output_final_state", output_final_state)
        return ops.gdn_forward(inputs, options, want_final, ops.needs_grad(inputs), 0, key)
    call = _prepare(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context, use_gate_in_kernel, A_log, dt_bias, auto_cp, deterministic,
        out, state_indices, has_initial_state, checkpoint_every_n_tokens, state_checkpoints, backward_mib, kwargs,
    )  # fmt: skip
    if out is None and state_indices is None and state_checkpoints is None and not call.every:
        return ops.gdn_forward(call.inputs, call.options, call.want_final, call.needs, call.max_bytes)
    if out is None:
        out = torch.empty(call.inputs[2].shape, dtype=call.inputs[0].dtype, device=call.inputs[2].device)  # type: ignore[union-attr]
    final = ops.gdn_forward_into(call.inputs, call.options, call.want_final, out, call.checkpoints, call.every)
    if state_indices is not None and call.want_final:
        final = initial_state
    return out, final


def can_implement(*args: Any, needs_grad: bool = False, **kwargs: Any) -> tuple[bool, str]:
    """(True, "") when `chunk_gated_delta_rule` would serve these arguments, else (False, why not). Computes nothing, reads no data, never
    raises for what the call would refuse. needs_grad: also ask for backward, whatever the tensors' requires_grad."""
    try:
        _implementable(args, kwargs, needs_grad)
    except (ValueError, TypeError, NotImplementedError, ImportError, AttributeError, MemoryError, QlaError) as error:
        return False, str(error)
    return True, ""


def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Prepared:
    """The prepared call of these arguments; a TypeError as the call's own for a wrong argument list."""
    arguments = dict(_SIGNATURE.bind(*args, **kwargs).arguments)
    arguments["kwargs"] = dict(arguments.get("kwargs", {}))
    return _prepare(**arguments)


def _implementable(args: tuple[Any, ...], kwargs: dict[str, Any], needs_grad: bool) -> None:
    call = bind(args, kwargs)
    _checks.check_layouts(call.inputs)
    serving = call.out is not None or call.inputs[10] is not None or call.checkpoints is not None or call.every
    if needs_grad and serving:
        raise ValueError(
            "out, state_indices, state_checkpoints: expected none of them when gradients are needed, got one, which has no gradient; leave it out"
        )
    needs = ops._all_needs(call.inputs[:10]) if needs_grad or call.needs else 0
    if not serving:
        return _call.check_forward(call.inputs, call.options, call.want_final, needs)
    out = call.out
    if isinstance(out, Tensor) and not out.is_meta and not ops.writable_in_place(out):
        _checks.check_call(call.inputs, call.options[1], out, call.checkpoints, call.every)
        out = None  # computed beside it
    extras = _args.Extras(out, call.checkpoints, call.every)
    _call.check_forward(call.inputs, call.options, call.want_final, needs, extras)


_SIGNATURE = inspect.signature(chunk_gated_delta_rule)
