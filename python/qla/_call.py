"""Torch tensors to C calls. One filled args struct is kept for each signature (shapes, strides, dtypes, options); a warm call copies it,
writes the pointers and calls (an array of 64-bit words: less time than a ctypes object). Nothing here reads tensor data, synchronises or looks at gradients.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from array import array
from collections.abc import Callable, Iterable
from ctypes import byref, c_size_t
from typing import Any

import torch
from torch import Tensor

from qla import _checks, _ffi
from qla._args import (
    BACKWARD_INPUTS,
    DUMMY,
    FORWARD_INPUTS,
    GRADS,
    Extras,
    Inputs,
    Layout,
    Options,
    backward_args,
    fill_contiguous,
    final_shape,
    forward_args,
    keeps,
    last_contiguous,
    layout_of,
    needed_copies,
    state_dtype,
    wants_copy,
)

log = logging.getLogger("qla")


def _fast_empty(name: str, device: str) -> Any:
    """(shape, strides, dtype) -> tensor. What Inductor's code allocates with costs a quarter of torch.empty; without it, torch.empty_strided."""
    plain = functools.partial(torch.empty_strided, device=device)
    return getattr(
        getattr(torch._C._dynamo, "guards", None), name, lambda shape, stride, dtype: plain(shape, stride, dtype=dtype)
    )


_empty_cpu = _fast_empty("_empty_strided_cpu", "cpu")
_empty_cuda = _fast_empty("_empty_strided_cuda", "cuda")  # on the current device
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # a torch without CUDA has none of these
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def _empty_of(cuda: int) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What allocates outputs and scratch, by shape, strides and dtype; tests put one here that fills them with NaN. cuda: device index,
    -1 for the CPU."""
    if cuda < 0:
        return _empty_cpu
    if cuda == _current_device():
        return _empty_cuda
    device = torch.device("cuda", cuda)
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)


MAX_SIGNATURES = 2048  # then the cache starts anew
DEFAULT_FORWARD_MIB, DEFAULT_BACKWARD_MIB = 512, 2048


def _word(struct: type[ctypes.Structure], name: str) -> int:
    return getattr(struct, name).offset // 8


_F_IN = tuple(_word(_ffi.ForwardArgs, n) for n in FORWARD_INPUTS)
_F_O, _F_HT, _F_SAVED = (_word(_ffi.ForwardArgs, n) for n in ("o", "final_state", "saved"))
_F_CHECKPOINTS, _F_A, _F_G, _F_H = (_word(_ffi.ForwardArgs, n) for n in ("state_checkpoints", "a_inv", "g_cumsum", "h"))
_B_IN = tuple(_word(_ffi.BackwardArgs, n) for n in BACKWARD_INPUTS)
_B_SAVED, _B_DO, _B_DHT = (_word(_ffi.BackwardArgs, n) for n in ("saved", "d_o", "d_final_state"))
_B_GRADS = tuple(_word(_ffi.BackwardArgs, n) for n in GRADS)
_W_STREAM, _W_WORKSPACE, _W_BYTES, _W_THREADS = (
    _word(_ffi.ForwardArgs, n) for n in ("stream", "workspace", "workspace_bytes", "num_threads")
)


class _Entry:
    """What one signature needs at every call."""

    __slots__ = (
        "template", "cuda", "threads", "copies", "bytes", "best", "usual", "saved_bytes", "o_layout", "ht_layout", "backward_ok", "backwards", "again",
        "backward_looks", "grads", "looks",
    )  # fmt: skip

    def __init__(self) -> None:
        self.template = array("Q")
        self.cuda = -1  # device index, -1 on the CPU
        self.threads = 0  # the word of flags and threads, without the threads
        self.copies: tuple[int, ...] = ()  # inputs that must be made contiguous first
        self.bytes = 0
        self.best = self.usual = 0  # backward: without a limit by the caller
        self.saved_bytes = 0
        self.o_layout: Layout = ((), (), torch.float32)
        self.ht_layout: Layout | None = None
        self.backward_ok: set[int] = set()
        self.backwards: dict[Any, _Entry] = {}  # of the gradient nodes that this signature's calls leave
        self.again: dict[int, Any] = {}  # .. and what a backward of them like one before needs (_again.py)
        self.grads: tuple[tuple[int, Layout], ...] = ()
        self.looks = self.backward_looks = 0  # that were made for it (_again.py)


_forward_entries: dict[Any, _Entry] = {}
repeats: dict[Any, Any] = {}  # of _again.py
_backward_entries: dict[Any, _Entry] = {}
_local = threading.local()
_run_forward: Any = None
_run_backward: Any = None


def clear_cache() -> None:
    """Forgets every signature (tests)."""
    _forward_entries.clear()
    _backward_entries.clear()
    repeats.clear()


def _mebibytes(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if not text:
        return default << 20
    if not text.isdigit():
        raise ValueError(f"{variable}: expected a whole number of MiB, got {text!r}; unset it for {default}")
    return int(text) << 20


@functools.cache
def default_forward_bytes() -> int:
    """Workspace that forward stays under as far as the library can: QLA_FORWARD_MIB, else 512 MiB."""
    return _mebibytes("QLA_FORWARD_MIB", DEFAULT_FORWARD_MIB)


@functools.cache
def default_backward_bytes() -> int:
    """The same for backward: QLA_BACKWARD_MIB, else 2 GiB."""
    return _mebibytes("QLA_BACKWARD_MIB", DEFAULT_BACKWARD_MIB)


def _copied(inputs: Inputs, copies: tuple[int, ...]) -> Inputs:
    # clone: contiguous() keeps a tensor whose base is misaligned
    return tuple(x.clone(memory_format=torch.contiguous_format) if i in copies else x for i, x in enumerate(inputs))  # type: ignore[union-attr]


def _forward_entry(inputs: Inputs, options: Options, output_final_state: bool, save: bool, extras: Extras | None) -> _Entry:
    if extras is None:
        _checks.check_call(inputs, options[1])
    else:
        _checks.check_call(inputs, options[1], extras.out, extras.state_checkpoints, extras.checkpoint_every)
    q, v = inputs[0], inputs[2]
    assert q is not None and v is not None
    entry = _Entry()
    entry.copies = needed_copies(inputs)
    if entry.copies:
        names = ", ".join(_checks.NAMES[i] for i in entry.copies)
        log.info("qla: %s copied at every call: strides that the %s kernels cannot address", names, q.device.type)
        return entry
    args = forward_args(inputs, options, output_final_state, extras)
    library = _ffi.lib()
    _ffi.check(library.qla_gdn_forward_check(byref(args)))
    least, best, size = c_size_t(0), c_size_t(0), c_size_t(0)
    _ffi.check(library.qla_gdn_forward_saved(byref(args), byref(size)))
    entry.saved_bytes = size.value if save and keeps(q, v, inputs[6]) else 0
    if entry.saved_bytes:  # what is kept decides which kernels run, and those what workspace they need
        fill_contiguous(args.saved, (entry.saved_bytes,), torch.uint8)
    _ffi.check(library.qla_gdn_forward_workspace_range(byref(args), byref(least), byref(best)))
    entry.bytes = max(least.value, min(best.value, default_forward_bytes()))
    args.saved = _ffi.Tensor()
    if q.is_cuda:
        entry.cuda = q.get_device()
        _ffi.check(library.qla_prepare(entry.cuda))
    entry.template = array("Q", bytes(args))
    entry.threads = options[1] << 32
    entry.o_layout = layout_of(tuple(v.shape), q.dtype)
    if output_final_state and inputs[10] is None:
        entry.ht_layout = layout_of(final_shape(q, v, inputs[6], options[1]), state_dtype(q.dtype))
    return entry


def _sig(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def _workspace(words: Any, nbytes: int, cuda: int) -> Tensor:
    """Scratch of the call; the caching allocator reuses it in stream order. On the CPU small ones are kept for each thread."""
    if cuda >= 0:
        space = _empty_of(cuda)((nbytes,), (1,), torch.uint8)
        words[_W_WORKSPACE] = space.data_ptr()
    else:
        kept: Tensor | None = getattr(_local, "space", None)
        if kept is not None and kept.numel() >= nbytes + 256:
            space = kept
        else:
            space = _empty_of(-1)((nbytes + 256,), (1,), torch.uint8)
            if nbytes <= 4 << 20:
                _local.space = space
        words[_W_WORKSPACE] = (space.data_ptr() + 255) & ~255
    words[_W_BYTES] = nbytes
    return space


def find_forward_entry(inputs: Inputs, options: Options, output_final_state: bool, save: bool, extras: Extras | None) -> _Entry:
    """The entry of this signature; checks the arguments when it is new."""
    global _run_forward
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0, indices = inputs
    try:
        key: Any = (
            options, output_final_state, save, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,  # type: ignore[union-attr]
            v.shape, v.stride(), v.dtype, v.device, beta.shape, beta.stride(), beta.dtype, beta.device,  # type: ignore[union-attr]
            None if g is None else (g.shape, g.stride(), g.dtype, g.device),
            None if h0 is None else (h0.shape, h0.stride(), h0.dtype, h0.device),
            None if cu is None else (cu.shape, cu.stride(), cu.dtype, cu.device),
        )  # fmt: skip
        if a_log is not None or dt_bias is not None or has_h0 is not None or indices is not None:
            key = (key, _sig(a_log), _sig(dt_bias), _sig(has_h0), _sig(indices))
        if extras is not None:
            e = extras
            key = (key, _sig(e.out), _sig(e.state_checkpoints), e.checkpoint_every, _sig(e.a_inv), _sig(e.g_cumsum), _sig(e.h))
        entry = _forward_entries.get(key)
    except (AttributeError, RuntimeError):  # not a tensor, or one without strides: the checks say which
        entry = key = None
    if entry is None:
        entry = _forward_entry(inputs, options, output_final_state, save, extras)
        if len(_forward_entries) >= MAX_SIGNATURES:
            _forward_entries.clear()
        _forward_entries[key] = entry
        _run_forward = _ffi.lib().qla_gdn_forward
    return entry


def require_backward(entry: _Entry, inputs: Inputs, needs: int, options: Options, output_final_state: bool) -> None:
    """Raises what backward could not do with these inputs."""
    if needs not in entry.backward_ok:
        check_backward(inputs, needs, options, output_final_state)
        entry.backward_ok.add(needs)


def check_forward(
    inputs: Inputs, options: Options, output_final_state: bool, needs: int = 0, extras: Extras | None = None
) -> None:
    """Raises what forward would raise before it runs. Reads no data."""
    entry = find_forward_entry(inputs, options, output_final_state, bool(needs), extras)
    if entry.copies:
        copied = tuple(x.new_empty(x.shape) if i in entry.copies else x for i, x in enumerate(inputs))  # type: ignore[union-attr]
        check_forward(copied, options, output_final_state, needs, extras)
    elif needs:
        require_backward(entry, inputs, needs, options, output_final_state)


def forward(
    inputs: Inputs,
    options: Options,
    output_final_state: bool = False,
    save: bool | int = False,
    needs: int = 0,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """-> (o, final_state or None, saved or None). save: keep what backward reuses, where that pays; a number: in a buffer of so many bytes.
    needs: bits of the gradients that backward will be asked for, refused here when it cannot serve them."""
    entry = find_forward_entry(inputs, options, output_final_state, bool(save), extras)
    return forward_of(entry, inputs, options, output_final_state, save, needs, extras)


def forward_of(
    entry: _Entry,
    inputs: Inputs,
    options: Options,
    output_final_state: bool,
    save: bool | int,
    needs: int = 0,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same, by the entry of its signature."""
    if entry.copies:
        return forward(_copied(inputs, entry.copies), options, output_final_state, save, needs, extras)
    if needs:
        require_backward(entry, inputs, needs, options, output_final_state)

    q, v = inputs[0], inputs[2]
    words = entry.template[:]
    try:
        for at, x in zip(_F_IN, inputs):
            if x is not None:
                words[at] = x.data_ptr() or DUMMY
    except RuntimeError:  # no storage: sparse, though its signature is a dense tensor's
        _checks.check_layouts(inputs)
        raise
    assert q is not None and v is not None
    if entry.cuda >= 0:
        if (words[_F_IN[0]] | words[_F_IN[1]] | words[_F_IN[2]]) & 15:
            misaligned = tuple(i for i in (0, 1, 2) if words[_F_IN[i]] & 15)
            return forward(_copied(inputs, misaligned), options, output_final_state, save, needs, extras)
    return run_forward(entry, words, save, extras)


def run_forward(
    entry: _Entry, words: Any, save: bool | int, extras: Extras | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """words: the entry's template with the inputs' addresses."""
    cuda = entry.cuda
    if cuda >= 0:
        words[_W_STREAM] = _stream(cuda)
    else:
        words[_W_THREADS] = entry.threads | torch.get_num_threads()
    empty = _empty_of(cuda)
    if extras is None:
        o = empty(*entry.o_layout)
    else:
        o = extras.out if extras.out is not None else empty(*entry.o_layout)
        for at, x in (
            (_F_CHECKPOINTS, extras.state_checkpoints),
            (_F_A, extras.a_inv),
            (_F_G, extras.g_cumsum),
            (_F_H, extras.h),
        ):
            if x is not None:
                words[at] = x.data_ptr() or DUMMY
    words[_F_O] = o.data_ptr() or DUMMY
    final: Tensor | None = None
    if entry.ht_layout is not None:
        final = empty(*entry.ht_layout)
        words[_F_HT] = final.data_ptr() or DUMMY
    saved: Tensor | None = None
    if save and entry.saved_bytes:
        size = entry.saved_bytes if save is True else save
        if size < entry.saved_bytes:
            raise _ffi.QlaError(
                f"saved: expected {entry.saved_bytes} bytes by the library, got {size}; qla and libqla.so differ in version"
            )
        saved = empty((size,), (1,), torch.uint8)
        _set_saved(words, _F_SAVED, saved)
    space = _workspace(words, entry.bytes, cuda) if entry.bytes else None
    status = _run_forward(words.buffer_info()[0])
    del space
    if status:
        raise _ffi.error_for(status)
    return o, final, saved


def _set_saved(words: Any, at: int, saved: Tensor) -> None:
    words[at] = saved.data_ptr()
    words[at + 1] = 1 << 32 | _ffi.UINT8  # ndim, dtype
    words[at + 2] = saved.numel()
    words[at + 6] = 1


def check_backward(inputs: Inputs, needs: int, options: Options, output_final_state: bool) -> None:
    """Raises what backward would: called by forward when gradients are needed."""
    q, v = inputs[0], inputs[2]
    assert q is not None and v is not None
    args, _ = backward_args(inputs[:10], None, None, None, needs, options)
    fill_contiguous(args.d_o, tuple(v.shape), q.dtype)
    if output_final_state:
        fill_contiguous(args.d_final_state, final_shape(q, v, inputs[6], options[1]), state_dtype(q.dtype))
    _ffi.check(_ffi.lib().qla_gdn_backward_check(byref(args)))


def _backward_entry(
    inputs: Inputs, saved: Tensor | None, d_o: Tensor | None, d_final: Tensor | None, needs: int, options: Options
) -> _Entry:
    q = inputs[0]
    assert q is not None
    _checks.check_upstream("d_o", d_o, q)
    _checks.check_upstream("d_final_state", d_final, q)
    entry = _Entry()
    entry.copies = needed_copies(inputs)
    if d_o is not None and wants_copy(d_o):
        entry.copies += (10,)
    if d_final is not None and not last_contiguous(d_final):
        entry.copies += (11,)
    if entry.copies:
        return entry
    args, entry.grads = backward_args(inputs, saved, d_o, d_final, needs, options)
    library = _ffi.lib()
    _ffi.check(library.qla_gdn_backward_check(byref(args)))
    least, best = c_size_t(0), c_size_t(0)
    _ffi.check(library.qla_gdn_backward_workspace(byref(args), byref(least), byref(best)))
    entry.bytes, entry.best = least.value, max(best.value, least.value)
    entry.usual = max(entry.bytes, min(entry.best, default_backward_bytes()))
    entry.template = array("Q", bytes(args))
    entry.threads = options[1] << 32
    entry.cuda = q.get_device() if q.is_cuda else -1
    return entry


def find_backward_entry(
    inputs: Inputs,
    saved: Tensor | None,
    d_o: Tensor | None,
    d_final: Tensor | None,
    needs: int,
    options: Options,
    known: dict[Any, _Entry] | None = None,
) -> _Entry:
    """The entry of this signature; checks the arguments when it is new. known: from the forward call of these inputs."""
    global _run_backward
    q, k, v, g, beta, h0, cu, a_log, dt_bias, has_h0 = inputs
    assert q is not None and k is not None and v is not None and beta is not None
    entries = _backward_entries if known is None else known
    key: Any
    if known is not None:  # forward has seen shapes and devices; hooks on saved tensors may have changed how they lie
        key = (
            needs, q.stride(), k.stride(), v.stride(), beta.stride(), q.dtype, g is not None and (g.stride(), g.dtype), beta.dtype,
            h0 is not None and (h0.stride(), h0.dtype), d_o is not None and (d_o.stride(), d_o.dtype, d_o.device),
            d_final is not None and (d_final.stride(), d_final.dtype), saved is not None,
        )  # fmt: skip
    else:
        key = (
            options, needs, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(),
            v.dtype, v.device, beta.shape, beta.stride(), beta.dtype, beta.device,
            None if g is None else (g.shape, g.stride(), g.dtype, g.device),
            None if h0 is None else (h0.shape, h0.stride(), h0.dtype, h0.device),
            None if d_o is None else (d_o.shape, d_o.stride(), d_o.dtype, d_o.device),
            None if d_final is None else (d_final.shape, d_final.stride(), d_final.dtype, d_final.device),
            None if cu is None else (cu.shape, cu.stride(), cu.dtype, cu.device),
            None if saved is None else (saved.shape, saved.device),
        )  # fmt: skip
        if a_log is not None or dt_bias is not None or has_h0 is not None:
            key = (key, _sig(a_log), _sig(dt_bias), _sig(has_h0))
    entry = entries.get(key)
    if entry is None:
        entry = _backward_entry(inputs, saved, d_o, d_final, needs, options)
        if len(entries) >= MAX_SIGNATURES:
            entries.clear()
        entries[key] = entry
        _run_backward = _ffi.lib().qla_gdn_backward
    return entry


def backward(
    inputs: Inputs,
    saved: Tensor | None,
    d_o: Tensor | None,
    d_final: Tensor | None,
    needs: int,
    options: Options,
    max_bytes: int = 0,
) -> list[Tensor | None]:
    """inputs: the first ten of forward's. -> gradients in the order of GRAD_INPUTS, None where not asked for. max_bytes: workspace to
    stay under as far as the library can (0: the default)."""
    entry = find_backward_entry(inputs, saved, d_o, d_final, needs, options)
    return backward_of(entry, inputs, saved, d_o, d_final, needs, options, max_bytes)


def backward_of(
    entry: _Entry,
    inputs: Inputs,
    saved: Tensor | None,
    d_o: Tensor | None,
    d_final: Tensor | None,
    needs: int,
    options: Options,
    max_bytes: int,
) -> list[Tensor | None]:
    """The same, by the entry of its signature."""
    if entry.copies:
        *copied, d_o, d_final = _copied((*inputs, d_o, d_final), entry.copies)
        return backward(tuple(copied), saved, d_o, d_final, needs, options, max_bytes)

    words = entry.template[:]
    for at, x in zip(_B_IN, inputs):
        if x is not None:
            words[at] = x.data_ptr() or DUMMY
    for at, x in ((_B_SAVED, saved), (_B_DO, d_o), (_B_DHT, d_final)):
        if x is not None:
            words[at] = x.data_ptr() or DUMMY
    if entry.cuda >= 0:
        pointers = [words[_B_IN[0]], words[_B_IN[1]], words[_B_IN[2]], words[_B_DO]]
        if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15:
            misaligned = tuple(i for i, p in zip((0, 1, 2, 10), pointers) if p & 15)
            *copied, d_o, d_final = _copied((*inputs, d_o, d_final), misaligned)
            return backward(tuple(copied), saved, d_o, d_final, needs, options, max_bytes)
    grads: list[Tensor | None] = [None] * len(GRADS)
    run_backward(entry, words, grads, [(_B_GRADS[i], i, layout) for i, layout in entry.grads], max_bytes)
    return grads


def run_backward(
    entry: _Entry, words: Any, grads: list[Tensor | None], wanted: Iterable[tuple[int, int, Layout]], max_bytes: int
) -> None:
    """words: the entry's template with the addresses of inputs and upstream gradients. wanted: of each gradient its word, its place in
    grads, its layout."""
    cuda = entry.cuda
    if cuda >= 0:
        words[_W_STREAM] = _stream(cuda)
    else:
        words[_W_THREADS] = entry.threads | torch.get_num_threads()
    empty = _empty_of(cuda)
    for at, place, layout in wanted:
        grads[place] = grad = empty(*layout)
        words[at] = grad.data_ptr() or DUMMY
    nbytes = entry.usual if max_bytes == 0 else max(entry.bytes, min(entry.best, max_bytes))
    space = _workspace(words, nbytes, cuda) if nbytes else None
    status = _run_backward(words.buffer_info()[0])
    del space
    if status:
        raise _ffi.error_for(status)
