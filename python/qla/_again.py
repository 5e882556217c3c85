"""A plain eager call by what calls of its signature share, and the backward of one.

Most calls are like one before. For those, one look in C++ at all tensors (what torch.compile guards its code with: kind, dtype, device, shape,
strides, layout, requires_grad, active modes) stands for the checks, the kinds and the key of the signature, in forward and in backward. Where
torch has no such look, or autocast may cast the inputs, every call goes the long way. A look keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from qla import _args, _call
from qla._args import DUMMY, Inputs, Options

Look = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
MOST_LOOKS = 8  # made for one signature: then its calls differ in what is no part of the key, again and again

# q, k, v, g and beta; with boundaries; with an initial state; with both: what most calls have
FIVE, PACKED, STARTED, BOTH = (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 6), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6)
_USUAL: dict[tuple[int, ...], tuple[int, ...]] = {p: p for p in (FIVE, PACKED, STARTED, BOTH)}

_F_Q, _F_K, _F_V = _call._F_IN[:3]
_B_Q, _B_K, _B_V = _call._B_IN[:3]
_B_DO = _call._B_DO


class Call:
    """What the calls of one signature share. positions: the inputs that are there; same: the look, None where there is none."""

    __slots__ = ("entry", "positions", "words", "options", "want_final", "needs", "max_bytes", "same")

    def __init__(self, entry: Any, inputs: Inputs, options: Options, want_final: bool, needs: int, max_bytes: int) -> None:
        positions = tuple(j for j, x in enumerate(inputs) if x is not None)
        self.entry, self.options, self.want_final, self.needs, self.max_bytes = entry, options, want_final, needs, max_bytes
        self.positions = _USUAL.get(positions, positions)
        self.words = tuple(_call._F_IN[j] for j in positions)
        self.same: Callable[..., bool] | None = None


class _Backward:
    """What the backward calls of one Call with the same upstream gradients share. words: of the tensors; wanted, places: of run_backward."""

    __slots__ = ("entry", "same", "words", "wanted", "places")

    def __init__(self, *fields: Any) -> None:
        self.entry, self.same, self.words, self.wanted, self.places = fields


def _look(tensors: Iterable[Tensor | None]) -> Callable[..., bool] | None:
    if Look is None:
        return None
    try:
        check: Callable[..., bool] = Look(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except TypeError:  # of a torch that makes it in another way
        return None
    return check


def remember(key: Any, call: Call, inputs: Inputs) -> None:
    """For gdn_forward_again."""
    entry, q = call.entry, inputs[0]
    assert q is not None
    if call.positions not in _USUAL or entry.copies or entry.looks >= MOST_LOOKS or torch.is_autocast_enabled(q.device.type):
        return
    call.same = _look(inputs[j] for j in call.positions)
    if call.same is None:
        return
    entry.looks += 1
    if len(_call.repeats) >= _call.MAX_SIGNATURES:
        _call.repeats.clear()
    _call.repeats[key] = call


def _spread(call: Call, present: Iterable[Tensor | None], count: int) -> Inputs:
    inputs: list[Tensor | None] = [None] * count
    for j, x in zip(call.positions, present):
        inputs[j] = x
    return tuple(inputs)


def forward(call: Call, present: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """-> (o, final_state or None, saved or None). present: the inputs that are there."""
    entry = call.entry
    if not entry.copies:
        words = entry.template[:]
        try:
            for at, x in zip(call.words, present):
                words[at] = x.data_ptr() or DUMMY
            if entry.cuda < 0 or not (words[_F_Q] | words[_F_K] | words[_F_V]) & 15:
                return _call.run_forward(entry, words, call.needs != 0)
        except RuntimeError:  # no storage: the long way says so
            pass
    inputs = _spread(call, present, 11)
    return _call.forward_of(entry, inputs, call.options, call.want_final, call.needs != 0, call.needs)


def backward(call: Call, tensors: tuple[Tensor, ...], d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients by the places of a gradient node's arguments: nothing for the call itself, then the inputs that are there. tensors: those
    inputs, and what forward saved."""
    given: tuple[Any, ...]
    if d_final is None:
        given, kind = (*tensors, d_o), call.needs
    else:
        given, kind = (*tensors, d_o, d_final), ~call.needs
    known = call.entry.again.get(kind)
    if known is not None and known.same(*given):
        words = known.entry.template[:]
        for at, x in zip(known.words, given):
            words[at] = x.data_ptr() or DUMMY
        if known.entry.cuda < 0 or not (words[_B_Q] | words[_B_K] | words[_B_V] | words[_B_DO]) & 15:
            gradients: list[Tensor | None] = [None] * known.places
            _call.run_backward(known.entry, words, gradients, known.wanted, call.max_bytes)
            return tuple(gradients)
    return _long_backward(call, tensors, d_o, d_final, given, kind)


def _long_backward(
    call: Call, tensors: tuple[Tensor, ...], d_o: Tensor | None, d_final: Tensor | None, given: tuple[Any, ...], kind: int
) -> tuple[Tensor | None, ...]:
    """given: all of these; kind: of upstream gradients and needs, for the next time."""
    positions, needs = call.positions, call.needs
    saved = tensors[-1] if len(tensors) > len(positions) else None
    inputs = _spread(call, tensors, 10)
    known = call.entry.backwards
    entry = _call.find_backward_entry(inputs, saved, d_o, d_final, needs, call.options, known)
    gradients = _call.backward_of(entry, inputs, saved, d_o, d_final, needs, call.options, call.max_bytes)
    by_input = dict(zip(_args.GRAD_INPUTS, gradients))
    if d_o is not None and not entry.copies and call.entry.backward_looks < MOST_LOOKS:
        same = _look(given)
        if same is not None:
            call.entry.backward_looks += 1
            words = [_call._B_IN[j] for j in positions]
            words += [_call._B_SAVED] * (saved is not None) + [_B_DO] + [_call._B_DHT] * (d_final is not None)
            place = {j: at for at, j in enumerate(positions, 1)}
            wanted = [(_call._B_GRADS[i], place[_args.GRAD_INPUTS[i]], layout) for i, layout in entry.grads]
            call.entry.again[kind] = _Backward(entry, same, tuple(words), tuple(wanted), 1 + len(positions))
    return None, *[by_input.get(j) for j in positions]
