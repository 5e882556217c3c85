"""The PyTorch operators `torch.ops.qla.*`, their fakes and gradients, and the eager path beside them.

    gdn_forward        functional: (o, final_state, saved); an output that was not asked for is empty
    gdn_forward_into   writes given outputs, a pool of states or checkpoints of the state; no gradients
    gdn_backward       the gradients; one that was not asked for is empty

torch.compile, export, fake tensors, subclasses and function transforms go through the operators. A plain eager call goes to `_call` directly,
inside an autograd.Function when gradients are needed: the dispatcher alone would cost more than everything else at T = 64.
"""

from __future__ import annotations

from typing import Any

from qla import _need_torch  # noqa: F401  # isort: skip

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qla import _again, _args, _call, _checks, _ffi
from qla._again import BOTH, FIVE, PACKED, STARTED
from qla._args import Extras, Inputs, Options

_COMMON = "float? scale, int flags, int cp_mode, int cp_segment_chunks, float? cp_warmup_threshold, int cp_uncut_chunks"
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? has_initial_state"
)

library = torch.library.Library("qla", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
library.define(
    f"gdn_forward({_INPUTS}, {_COMMON}, bool output_final_state, bool save, int max_bytes) -> (Tensor o, Tensor final_state, Tensor saved)",
    tags=_TAGS,
)
library.define(
    f"gdn_forward_into({_INPUTS.replace('Tensor? initial_state', 'Tensor(a!)? initial_state')}, Tensor? state_indices, {_COMMON}, "
    "bool output_final_state, Tensor(b!) out, Tensor(c!)? state_checkpoints, int checkpoint_every_n_tokens) -> Tensor final_state",
    tags=_TAGS,
)
library.define(
    f"gdn_backward({_INPUTS}, Tensor? saved, Tensor? d_o, Tensor? d_final_state, {_COMMON}, int needs, int max_bytes) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor d_initial_state, Tensor dA_log, Tensor ddt_bias)",
    tags=_TAGS,
)

_NUM_INPUTS = 10
DOUBLE_BACKWARD = (
    "qla: the gradient of chunk_gated_delta_rule's gradients (double backward, create_graph=True) is not implemented; "
    "call backward without create_graph, or differentiate qla.testing.recurrent_gated_delta_rule"
)
JVP = (
    "forward-mode differentiation (jvp, jacfwd) of chunk_gated_delta_rule is not implemented; use reverse mode (backward, "
    "torch.func.vjp or jacrev), or differentiate qla.testing.recurrent_gated_delta_rule"
)
VMAP = "qla: vmap over chunk_gated_delta_rule is not implemented; put the mapped dimension into the batch dimension of q, k, v, g and beta"


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


# ---- implementations -------------------------------------------------------------------------------------------------


def _forward_impl(
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks, want_final, save, max_bytes
):  # fmt: skip
    inputs = (q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, None)
    options = (scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks)
    size = _args.saved_bytes(q, v, cu) if save else 0
    o, final, saved = _call.forward(inputs, options, want_final, size, _all_needs(inputs) if save else 0)
    return (
        o,
        final if final is not None else q.new_empty(0, dtype=_args.state_dtype(q.dtype)),
        saved if saved is not None else q.new_zeros(size, dtype=torch.uint8),  # nothing kept: the same bytes all the same
    )


def _forward_into_impl(
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, indices, scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks, want_final, out,
    checkpoints, every,
):  # fmt: skip
    inputs = (q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, indices)
    options = (scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks)
    final = forward_into(inputs, options, want_final, Extras(out, checkpoints, every))
    return final if final is not None else q.new_empty(0, dtype=_args.state_dtype(q.dtype))


def writable_in_place(out: Tensor) -> bool:
    """Whether the kernels can write into it."""
    return _args.tma_strides(out) and not out.data_ptr() & 15 if out.is_cuda else _args.last_contiguous(out)


def forward_into(inputs: Inputs, options: Options, want_final: bool, extras: Extras) -> Tensor | None:
    """Forward into extras.out and the pool; a CUDA output that a tensor map cannot address is computed beside it and copied."""
    out = extras.out
    if out is not None and not writable_in_place(out):
        o, final, _ = _call.forward(inputs, options, want_final, extras=extras._replace(out=None))
        out.copy_(o)
    else:
        try:
            _, final, _ = _call.forward(inputs, options, want_final, extras=extras)
        except ValueError as error:  # the C ABI calls it o
            if out is None or not str(error).startswith("o: "):
                raise
            raise type(error)(f"out{str(error)[1:]}") from None
    for x in (out, extras.state_checkpoints, inputs[5] if inputs[10] is not None else None):
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)  # the library wrote behind autograd's back
    return final


def _backward_impl(
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, saved, d_o, d_final, scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks, needs,
    max_bytes,
):  # fmt: skip
    inputs = (q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0)
    if saved is not None and not (saved.numel() and _args.keeps(q, v, cu)):
        saved = None
    grads = _call.backward(
        inputs, saved, d_o, d_final, needs, (scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks), max_bytes
    )
    return tuple(x if x is not None else _empty(q) for x in grads)


for _key in ("CPU", "CUDA"):
    library.impl("gdn_forward", _forward_impl, _key)
    library.impl("gdn_forward_into", _forward_into_impl, _key)
    library.impl("gdn_backward", _backward_impl, _key)


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("qla::gdn_forward", lib=library)
def _forward_fake(
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks, want_final, save, max_bytes
):  # fmt: skip
    _checks.check_call((q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, None), flags)
    dtype = _args.state_dtype(q.dtype)
    final = q.new_empty(_args.final_shape(q, v, cu, flags) if want_final else 0, dtype=dtype)
    size = _args.saved_bytes(q, v, cu) if save else 0
    return q.new_empty(v.shape), final, q.new_empty(size, dtype=torch.uint8)


@torch.library.register_fake("qla::gdn_forward_into", lib=library)
def _forward_into_fake(
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, indices, scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks, want_final, out,
    checkpoints, every,
):  # fmt: skip
    _checks.check_call((q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, indices), flags, out, checkpoints, every)
    want = want_final and indices is None
    return q.new_empty(_args.final_shape(q, v, cu, flags) if want else 0, dtype=_args.state_dtype(q.dtype))


@torch.library.register_fake("qla::gdn_backward", lib=library)
def _backward_fake(
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, saved, d_o, d_final, scale, flags, cp_mode, cp_segment_chunks, cp_threshold, cp_uncut_chunks, needs,
    max_bytes,
):  # fmt: skip
    inputs = (q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0)
    grads = []
    for i, source in enumerate(inputs[j] for j in _args.GRAD_INPUTS):
        if needs >> i & 1 and source is not None:
            grads.append(q.new_empty(source.shape, dtype=_args.state_dtype(q.dtype) if i == 5 else source.dtype))
        else:
            grads.append(_empty(q))
    return tuple(grads)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _needs(flags: Any) -> int:
    """Bits of the gradients, from what autograd says of the ten inputs."""
    needs = 0
    for i, j in enumerate(_args.GRAD_INPUTS):
        if flags[j]:
            needs |= 1 << i
    return needs


def _all_needs(inputs: Inputs) -> int:
    return _needs([x is not None for x in inputs])


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_NUM_INPUTS], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.options = inputs[_NUM_INPUTS : _NUM_INPUTS + 6]
    ctx.max_bytes = inputs[-1]
    ctx.num_args = len(inputs)


def _op_backward(
    ctx: Any, d_o: Tensor | None, d_final: Tensor | None, _d_saved: Tensor | None, *, operator: Any = None
) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    needs = _needs(ctx.needs_input_grad)
    grads = (operator or torch.ops.qla.gdn_backward)(*inputs, saved, d_o, d_final, *ctx.options, needs, ctx.max_bytes)
    result: list[Tensor | None] = [None] * ctx.num_args
    for i, j in enumerate(_args.GRAD_INPUTS):
        if needs >> i & 1:
            result[j] = grads[i]
    return tuple(result)


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> Any:
    raise NotImplementedError(DOUBLE_BACKWARD)


torch.library.register_autograd("qla::gdn_forward", _op_backward, setup_context=_op_setup, lib=library)
torch.library.register_autograd("qla::gdn_backward", _refuse_double_backward, lib=library)


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(VMAP)


for _name in ("gdn_forward", "gdn_backward"):
    torch.library.register_vmap(f"qla::{_name}", _refuse_vmap, lib=library)


class _Eager(torch.autograd.Function):
    """The gradient node of a plain eager call: what the operators do, without the dispatcher. Takes only the inputs that are there: each
    argument costs."""

    @staticmethod
    def forward(ctx: Any, call: _again.Call, *present: Tensor) -> Any:
        o, final, saved = _again.forward(call, present)
        ctx.set_materialize_grads(False)
        if saved is None:
            ctx.save_for_backward(*present)
        else:
            ctx.save_for_backward(*present, saved)
        ctx.call = call
        return o, final

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError(DOUBLE_BACKWARD)
        return _again.backward(ctx.call, ctx.saved_tensors, d_o, d_final)


class _Transformed(torch.autograd.Function):
    """The same for torch.func.grad and vjp; vmap and jvp are refused."""

    @staticmethod
    def forward(*args: Any) -> Any:  # type: ignore[override]
        return torch.ops.qla.gdn_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _op_setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, d_o: Any, d_final: Any, d_saved: Any) -> Any:  # type: ignore[override]
        return _op_backward(ctx, d_o, d_final, d_saved, operator=_TransformedBackward.apply)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(VMAP)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"qla: {JVP}")


class _TransformedBackward(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> Any:  # type: ignore[override]
        return torch.ops.qla.gdn_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(DOUBLE_BACKWARD)

    vmap, jvp = _Transformed.vmap, _Transformed.jvp


# ---- the way in ------------------------------------------------------------------------------------------------------

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_dispatch_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def needs_grad(inputs: Inputs) -> int:
    """Bits of the gradients that a backward would be asked for; 0: none."""
    if not torch.is_grad_enabled():
        return 0
    q, k, v, g, beta, h0, _, a_log, dt_bias, *_ = inputs
    try:
        needs = q.requires_grad | k.requires_grad << 1 | v.requires_grad << 2 | beta.requires_grad << 4  # type: ignore[union-attr]
        if g is not None and g.requires_grad:
            needs |= 1 << 3
        if h0 is not None and h0.requires_grad:
            needs |= 1 << 5
        if a_log is not None and a_log.requires_grad:
            needs |= 1 << 6
        if dt_bias is not None and dt_bias.requires_grad:
            needs |= 1 << 7
    except AttributeError:  # not a tensor: the checks say which
        return 0
    return needs


def _plain_eager(inputs: Inputs) -> bool:
    """No tracer, mode, transform or subclass wants to see the operator."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(inputs)
    if not PLAIN.issuperset(map(type, inputs)):
        odd = next(x for x in inputs if type(x) not in PLAIN)
        if isinstance(odd, Tensor) and odd.is_nested:
            _checks.check_layouts(inputs)
        return not isinstance(odd, Tensor)  # not a tensor at all: the checks of the direct way say so
    for x in inputs:
        if x is not None and x.is_neg():  # its memory holds the negative: the dispatcher makes a copy
            return False
    return _dispatch_modes() == 0 and _transform() is None


def _refuse_tangents(inputs: Inputs) -> None:
    """Inside forward-mode differentiation: a tangent would be lost without a word."""
    for name, x in zip(_checks.NAMES, inputs):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: expected no tangent, got one; {JVP}")


# What Function.apply calls once it knows that no transform is active, which _plain_eager has seen.
_apply_eager = super(torch.autograd.Function, _Eager).apply


# A remembered call, by everything of it but the tensors, and two shapes; None where there is none.
remembered = _call.repeats.get


def gdn_forward_again(
    call: _again.Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    h0: Tensor | None,
    cu: Tensor | None,
) -> tuple[Tensor, Tensor | None] | None:
    """The call, if it is one with a remembered call's tensors; else None."""
    given: tuple[Any, ...]
    positions: tuple[int, ...]
    if h0 is None:
        given, positions = ((q, k, v, g, beta), FIVE) if cu is None else ((q, k, v, g, beta, cu), PACKED)
    else:
        given, positions = ((q, k, v, g, beta, h0), STARTED) if cu is None else ((q, k, v, g, beta, h0, cu), BOTH)
    if call.positions is not positions or not call.same(*given) or forward_ad._current_level >= 0:  # type: ignore[misc]
        return None
    if call.needs:
        return _apply_eager(call, *given)
    o, final, _ = _again.forward(call, given)
    return o, final


def gdn_forward(
    inputs: Inputs, options: Options, want_final: bool, needs: int, max_bytes: int = 0, repeat_key: Any = None
) -> tuple[Tensor, Tensor | None]:
    """inputs: the ten of _COMMON's order and None for state_indices; needs: of needs_grad; repeat_key: of a call that may come again.
    -> (o, final_state or None)."""
    if not torch.compiler.is_compiling() and _plain_eager(inputs):
        entry = _call.find_forward_entry(inputs, options, want_final, needs != 0, None)
        if needs and not entry.copies:
            _call.require_backward(entry, inputs, needs, options, want_final)
        call = _again.Call(entry, inputs, options, want_final, needs, max_bytes)
        if repeat_key is not None:
            _again.remember(repeat_key, call, inputs)
        given = [inputs[j] for j in call.positions]
        if needs:
            return _apply_eager(call, *given)
        o, final, _ = _again.forward(call, tuple(given))
        return o, final
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    operator = _Transformed.apply if transformed else torch.ops.qla.gdn_forward
    o, final, _ = operator(*inputs[:_NUM_INPUTS], *options, want_final, needs != 0, max_bytes)
    return o, final if want_final else None


def gdn_forward_into(
    inputs: Inputs, options: Options, want_final: bool, out: Tensor, checkpoints: Tensor | None, every: int
) -> Tensor | None:
    if not torch.compiler.is_compiling() and _plain_eager(inputs):
        return forward_into(inputs, options, want_final, Extras(out, checkpoints, every))
    final = torch.ops.qla.gdn_forward_into(*inputs, *options, want_final, out, checkpoints, every)
    return final if want_final and inputs[10] is None else None


def flags_of(**named: bool) -> int:
    """Bits by the names of qla.h, in lower case: flags_of(qk_l2norm=True)."""
    return sum(getattr(_ffi, f"FLAG_{name.upper()}") for name, on in named.items() if on)
