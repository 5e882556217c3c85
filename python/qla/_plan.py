"""`qla.plan`: how a call would be cut into segments, computed on the host."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qla import _ffi

STARTS = ("zero", "initial", "warmup", "merged")


@dataclass(frozen=True)
class Segment:
    """One piece of one sequence for one value head, in chunks of 64 tokens."""

    sequence: int
    head: int
    first_chunk: int
    num_chunks: int
    warmup_chunks: int
    start: str  # where its start state comes from: one of STARTS


@dataclass(frozen=True)
class Plan:
    """A plan. Passed as `auto_cp` it is repeated, whatever the planner would choose then: the same cuts for the same lengths and gates.
    One made by hand, `Plan.fixed`, cuts every sequence into segments of one length."""

    segment_chunks: int
    num_sequences: int
    total_chunks: int
    num_segments: int
    num_items: int
    value_splits: int
    workspace_bytes: int
    predicted_us: float
    fused: bool
    reason: str
    segments: tuple[Segment, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    # sequences of at most so many chunks stay whole, though longer than a segment; in a packing of two: where the longest has at most so many
    uncut_chunks: int | None = None
    exact: bool = False  # every cut is merged, none warmed up

    @classmethod
    def fixed(cls, segment_chunks: int, *, exact: bool = False) -> Plan:
        """Segments of one length, for calls of any shape: every sequence is cut after each segment_chunks chunks of 64 tokens, also where
        the planner would not. exact: merge the states at every cut; else a head that has forgotten them by then is warmed up instead.

            o, _ = qla.chunk_gated_delta_rule(q, k, v, g, beta, auto_cp=qla.Plan.fixed(16))  # every 1024 tokens
        """
        try:
            chunks = operator.index(segment_chunks)
        except TypeError:
            raise TypeError(f"segment_chunks: expected a whole number of chunks, got {segment_chunks!r}; pass an int") from None
        if chunks < 1:
            raise ValueError(
                f"segment_chunks: expected 1 chunk of 64 tokens or more, got {chunks}; auto_cp=False leaves sequences whole"
            )
        if not isinstance(exact, bool):
            raise TypeError(f"exact: expected True or False, got {exact!r}; pass a bool")
        what = f"segments of {chunks} chunks{', every cut merged' if exact else ''}"
        return cls(
            segment_chunks=chunks,
            num_sequences=0,
            total_chunks=0,
            num_segments=0,
            num_items=0,
            value_splits=1,
            workspace_bytes=0,
            predicted_us=0.0,
            fused=False,
            reason=what,
            text=f"plan: {what}, in calls of any shape",
            exact=exact,
        )

    def __str__(self) -> str:
        return self.text or repr(self)


def plan(*args: Any, lens: Sequence[int] | None = None, chunk_log_decay: Any = None, **kwargs: Any) -> Plan:
    """The plan of `chunk_gated_delta_rule(*args, **kwargs)`. Values are not read, g's neither: without chunk_log_decay gates as models have
    them are assumed, and the call, which does look at its gates, may warm up or merge where this plan says otherwise.

    lens: lengths of the sequences; None: read from `cu_seqlens` (which synchronises on CUDA) or q's shape.
    chunk_log_decay: [sum of chunks, HV] float32 on the CPU, the sum of the log gate over each chunk of 64 tokens, sequence after
        sequence; None: unknown. Of rows of a batch: `torch.stack([part.sum(0) for row in g for part in row.split(64)])`; of packed ones
        `.. for row in g[0, : sum(lens)].split(lens) ..`.
    """
    from qla import _need_torch  # noqa: F401  # isort: skip
    import torch

    from qla import _args, api

    call = api.bind(args, kwargs)
    q, cu = call.inputs[0], call.inputs[6]
    assert q is not None
    if not q.is_meta:
        from qla import _checks

        _checks.check_call(call.inputs, call.options[1])
    if lens is not None:
        lens = _lengths(lens, q.shape[0] if cu is None else cu.shape[0] - 1)
    elif cu is not None:
        lens = torch.diff(cu).tolist()
    struct = _args.forward_args(call.inputs, call.options, call.want_final)
    c_lens = None if lens is None else (ctypes.c_int64 * max(len(lens), 1))(*lens)
    num_lens = 0 if lens is None else len(lens)
    decay = None
    if chunk_log_decay is not None:
        decay = _decays(chunk_log_decay, lens, q, call.inputs[2])
    decay_at = None if decay is None else decay.data_ptr()

    library = _ffi.lib()
    result = _ffi.Plan(struct_size=ctypes.sizeof(_ffi.Plan))
    _ffi.check(library.qla_gdn_plan(ctypes.byref(struct), c_lens, num_lens, decay_at, ctypes.byref(result)))
    segments = (_ffi.Segment * max(result.num_items, 1))()
    result.segments = ctypes.cast(segments, ctypes.POINTER(_ffi.Segment))
    result.segments_capacity = result.num_items
    _ffi.check(library.qla_gdn_plan(ctypes.byref(struct), c_lens, num_lens, decay_at, ctypes.byref(result)))
    return Plan(
        segment_chunks=result.segment_chunks,
        num_sequences=result.num_sequences,
        total_chunks=result.total_chunks,
        num_segments=result.num_segments,
        num_items=result.num_items,
        value_splits=result.value_splits,
        workspace_bytes=result.workspace_bytes,
        predicted_us=result.predicted_us,
        fused=bool(result.fused),
        reason=result.reason.decode("utf-8", "replace"),
        segments=tuple(
            Segment(s.sequence, s.head, s.first_chunk, s.num_chunks, s.warmup_chunks, STARTS[s.start])
            for s in segments[: result.num_items]
        ),
        text=_text(result),
        uncut_chunks=None if call.options[2] == _ffi.CP_FIXED else result.uncut_chunks,
        exact=call.options[2] == _ffi.CP_EXACT or call.options[4] is not None,
    )


def _lengths(given: Any, sequences: int) -> list[int]:
    try:
        lens = [operator.index(n) for n in given]
    except TypeError:
        raise TypeError(
            f"lens: expected whole numbers, the lengths of the sequences, got {given!r}; pass a list of int"
        ) from None
    if len(lens) != sequences:
        raise ValueError(
            f"lens: expected {sequences} lengths, as cu_seqlens or the batch say, got {len(lens)}; one for each sequence"
        )
    return lens


def _decays(given: Any, lens: Sequence[int] | None, q: Any, v: Any) -> Any:
    import torch

    from qla import _args

    chunks = sum(-(-n // _args.CHUNK) for n in (lens if lens is not None else [q.shape[1]] * q.shape[0]))
    try:
        decay = torch.as_tensor(given, dtype=torch.float32, device="cpu").contiguous()
    except (TypeError, ValueError):
        raise TypeError(
            f"chunk_log_decay: expected float32 [chunks, HV], got a {type(given).__name__}; sum g over each chunk of {_args.CHUNK} tokens"
        ) from None
    if tuple(decay.shape) != (chunks, v.shape[2]):
        raise ValueError(
            f"chunk_log_decay: expected shape [chunks, HV] = [{chunks}, {v.shape[2]}], got {list(decay.shape)}; "
            f"one row for each chunk of {_args.CHUNK} tokens, a sequence's last one may be shorter"
        )
    if bool(decay.isnan().any()):
        chunk, head = decay.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"chunk_log_decay: expected sums of log gates, got nan at [{chunk}, {head}]; look for nan in g, or pass None where unknown"
        )
    return decay


def _text(result: _ffi.Plan) -> str:
    library = _ffi.lib()
    length = ctypes.c_size_t(0)
    _ffi.check(library.qla_plan_print(ctypes.byref(result), None, 0, ctypes.byref(length)))
    buffer = ctypes.create_string_buffer(length.value + 1)
    _ffi.check(library.qla_plan_print(ctypes.byref(result), buffer, length.value + 1, ctypes.byref(length)))
    return buffer.value.decode("utf-8", "replace")
