"""Times one forward call under any plan, through the C ABI alone: for `qla bench --sweep` and `qla calibrate`.

A segment length is given by a fixed plan. Whether V is split or the fused form taken is not the caller's to say: each form has a copy of
the library of its own, loaded while QLA_COSTS names a cost model in which the others are prohibitive. Outputs and workspace of a row are
allocated once; graphs are made and freed with the driver's own calls. So torch's allocator never hears of a capture, and its
pools are left alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import tempfile
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from qla import _ffi
from qla.bench_grid import Row, boundaries, make_inputs, set_count

# What keeps the planner from all but one form.
NO_FUSED = "fused_4 1e6\nfused_2 1e6\nfused_1 1e6\nfused_quiet 1e6\nfused_cut 1e6\n"
NO_WHOLE, NO_HALVES = "main_full 1e6\nmain_full_quiet 1e6\n", "main_half 1e6\nmain_half_quiet 1e6\n"
OWN, WHOLE, HALVES, FUSED = 0, 1, 2, 3
FORMS = {WHOLE: "whole", HALVES: "halves", FUSED: "fused"}
FORCED = {WHOLE: NO_FUSED + NO_HALVES, HALVES: NO_FUSED + NO_WHOLE, FUSED: NO_WHOLE + NO_HALVES}
AUTO = -1  # segment length of a call that cuts as it likes; 0: no cut
CAPTURE_THREAD_LOCAL = 1


class Planned(NamedTuple):
    """A plan: chunks a segment (0: no cut, AUTO: the planner's choice) and form (OWN: the planner's choice).

    uncut: sequences of at most so many chunks stay whole, though longer than a segment."""

    segment: int
    form: int
    uncut: int = 0


def longest_chunks(lengths: list[int]) -> int:
    return math.ceil(max(lengths) / 64)


def open_copy(folder: Path, form: int) -> ctypes.CDLL:
    """An instance of the library whose cost model makes all forms but this one prohibitive; it reads its environment once, at its first call."""
    path = _ffi.library_path()
    if path is None:
        _ffi.lib()  # raises, saying where it looked
    assert path is not None
    copy, file = folder / f"libqla_{form}.so", folder / f"costs_{form}"
    shutil.copy(path, copy)
    file.write_text(FORCED[form])
    before = os.environ.get("QLA_COSTS")
    os.environ["QLA_COSTS"] = str(file)
    try:
        library = _ffi.open_library(str(copy))
        row = Row("fwd", "", "", [64], (1, 1))
        plan_with(library, shape_args(row, Planned(0, form)), row)
    finally:
        os.environ.pop("QLA_COSTS")
        if before is not None:
            os.environ["QLA_COSTS"] = before
    return library


def open_copies(folder: Path) -> dict[int, ctypes.CDLL]:
    """One instance of the library a form."""
    return {OWN: _ffi.lib(), **{form: open_copy(folder, form) for form in FORCED}}


def set_plan(args: _ffi.ForwardArgs, plan: Planned) -> None:
    fixed = _ffi.CP_PLAN if plan.uncut or plan.form == FUSED else _ffi.CP_FIXED  # fixed lengths are never fused
    args.cp_mode = _ffi.CP_AUTO if plan.segment == AUTO else fixed if plan.segment else _ffi.CP_OFF
    args.cp_segment_chunks, args.cp_uncut_chunks = max(plan.segment, 0), plan.uncut


def shape_args(row: Row, plan: Planned) -> _ffi.ForwardArgs:
    """The call's arguments without its data."""
    from qla.planview import shape_only

    (hk, hv), n, tokens = row.heads, len(row.lengths), sum(row.lengths)
    args = _ffi.ForwardArgs(struct_size=ctypes.sizeof(_ffi.ForwardArgs), scale=float("nan"), cp_warmup_threshold=float("nan"))
    args.backend, args.device = _ffi.BACKEND_CUDA, 0
    args.q = args.k = shape_only(_ffi.BFLOAT16, 1, tokens, hk, 128)
    args.v = args.o = shape_only(_ffi.BFLOAT16, 1, tokens, hv, 128)
    args.g = args.beta = shape_only(_ffi.FLOAT32, 1, tokens, hv)
    args.initial_state = args.final_state = shape_only(_ffi.FLOAT32, n, hv, 128, 128)
    args.cu_seqlens = shape_only(_ffi.INT32, n + 1)
    set_plan(args, plan)
    return args


def plan_with(library: ctypes.CDLL, args: _ffi.ForwardArgs, row: Row, gates: list[float] | None = None) -> _ffi.Plan:
    """gates: their sums, by chunk and value head; None: usual ones."""
    plan = _ffi.Plan(struct_size=ctypes.sizeof(_ffi.Plan))
    lens = (ctypes.c_int64 * len(row.lengths))(*row.lengths)
    sums = None if gates is None else (ctypes.c_float * len(gates))(*gates)
    checked(library, library.qla_gdn_plan(byref(args), lens, len(row.lengths), sums, byref(plan)))
    return plan


def checked(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise _ffi.QlaError(library.qla_last_error().decode("utf-8", "replace"))


class Driver:
    """Capture, launch and release of graphs by libcuda."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        for name, types in (
            ("cuStreamBeginCapture_v2", [c_void_p, c_int]),
            ("cuStreamEndCapture", [c_void_p, c_void_p]),
            ("cuGraphInstantiateWithFlags", [c_void_p, c_void_p, ctypes.c_ulonglong]),
            ("cuGraphLaunch", [c_void_p, c_void_p]),
            ("cuGraphDestroy", [c_void_p]),
            ("cuGraphExecDestroy", [c_void_p]),
            ("cuEventCreate", [c_void_p, c_uint]),
            ("cuEventRecord", [c_void_p, c_void_p]),
            ("cuEventSynchronize", [c_void_p]),
            ("cuEventElapsedTime", [c_void_p, c_void_p, c_void_p]),
        ):
            getattr(self.cuda, name).argtypes = types

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise _ffi.QlaError(f"{name} gave {status}")


class PlanBench:
    """The rows one after the other: `with PlanBench() as bench: bench.row(row); bench.burst(plan); bench.sustained(plans)`."""

    def __init__(self, most_sets: int = 4) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("no GPU: torch sees none; plans are timed on one")
        torch.cuda.init()
        self.torch, self.most_sets = torch, most_sets
        self.folder = tempfile.TemporaryDirectory()
        self.libraries = open_copies(Path(self.folder.name))
        for library in self.libraries.values():
            checked(library, library.qla_prepare(0))
        self.driver = Driver()
        self.stream = torch.cuda.Stream()
        self.handle = self.stream.cuda_stream
        self.events: list[c_void_p] = []
        self.shape: tuple[int, tuple[int, int]] | None = None
        self.space: Any = torch.empty(0, dtype=torch.uint8, device="cuda")
        self.inputs: list[dict[str, Any]] = []

    def __enter__(self) -> PlanBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.torch.cuda.synchronize()
        self.folder.cleanup()

    # ---- a row's memory

    def row(self, row: Row) -> None:
        """Its inputs (those of the row before where tokens and heads are the same), outputs and boundaries."""
        torch = self.torch
        torch.cuda.synchronize()
        shape = (sum(row.lengths), row.heads)
        if shape != self.shape:
            self.inputs, self.shape = [], shape
            self.inputs = [make_inputs(row, seed, False) for seed in range(min(self.most_sets, set_count(row)))]
            self.o = torch.empty_like(self.inputs[0]["v"])
        self.now, self.cu = row, boundaries(row)
        self.state = torch.randn(len(row.lengths), row.heads[1], 128, 128, device="cuda")
        self.final = torch.empty_like(self.state)
        self.filled: list[_ffi.ForwardArgs] = []
        for inputs in self.inputs:
            args = shape_args(row, Planned(0, OWN))
            args.stream = self.handle
            for name in ("q", "k", "v", "g", "beta"):
                getattr(args, name).data = inputs[name].data_ptr()
            args.initial_state.data, args.cu_seqlens.data = self.state.data_ptr(), self.cu.data_ptr()
            args.o.data, args.final_state.data = self.o.data_ptr(), self.final.data_ptr()
            self.filled.append(args)
        self.sizes: dict[Planned, int] = {}
        torch.cuda.synchronize()

    def plan(self, planned: Planned) -> _ffi.Plan:
        return plan_with(self.libraries[planned.form], shape_args(self.now, planned), self.now)

    def exists(self, planned: Planned) -> bool:
        """Whether the form can be had with this segment length."""
        raw = self.plan(planned)
        form = FUSED if raw.fused else WHOLE if raw.value_splits == 1 else HALVES
        return form == planned.form and (planned.segment == 0) == (raw.segment_chunks == 0)

    def workspace(self, planned: Planned) -> int:
        """Bytes that a call of the Python layer would give; grows the one buffer."""
        if planned not in self.sizes:
            from qla import _call

            library, args = self.libraries[planned.form], self.filled[0]
            set_plan(args, planned)
            least, best = c_size_t(0), c_size_t(0)
            checked(library, library.qla_gdn_forward_workspace_range(byref(args), byref(least), byref(best)))
            self.sizes[planned] = max(least.value, min(best.value, _call.default_forward_bytes()))
            if self.sizes[planned] > self.space.numel():
                self.torch.cuda.synchronize()
                self.space = self.torch.empty(self.sizes[planned] + (64 << 20), dtype=self.torch.uint8, device="cuda")
                self.torch.cuda.synchronize()
        return self.sizes[planned]

    def call(self, planned: Planned, number: int) -> None:
        library, size, args = self.libraries[planned.form], self.workspace(planned), self.filled[number % len(self.filled)]
        set_plan(args, planned)
        args.workspace, args.workspace_bytes = self.space.data_ptr(), size
        checked(library, library.qla_gdn_forward(byref(args)))

    # ---- times

    def mark(self, at: int) -> None:
        while len(self.events) <= at:
            event = c_void_p()
            self.driver("cuEventCreate", byref(event), 0)
            self.events.append(event)
        self.driver("cuEventRecord", self.events[at], self.handle)

    def between(self, first: int, last: int) -> float:
        """Microseconds."""
        self.driver("cuEventSynchronize", self.events[last])
        ms = ctypes.c_float(0)
        self.driver("cuEventElapsedTime", byref(ms), self.events[first], self.events[last])
        return ms.value * 1e3

    def burst(self, planned: Planned, calls: int, enough: float = math.inf) -> float:
        """Median of a few calls right after each other, the host ahead of the card. enough: where the first timed one takes longer,
        nothing more is asked (its time is the answer)."""
        self.call(planned, 0)
        self.mark(0)
        self.call(planned, 1)
        self.mark(1)
        first = self.between(0, 1) if enough < math.inf else 0.0
        if first > enough:
            return first
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(100_000)
        self.mark(0)
        for i in range(calls):
            self.call(planned, i)
            self.mark(i + 1)
        times = sorted(self.between(i, i + 1) for i in range(calls))
        return times[calls // 2]

    def sustained(
        self, plans: list[Planned], warm_ms: float = 15.0, each_ms: float = 8.0, guess_us: float = 100.0
    ) -> list[float]:
        """Medians of graph replays, the plans in turn: each meets the same clock. Untimed replays go before."""
        graphs: list[list[c_void_p]] = []
        try:
            for planned in plans:
                self.workspace(planned)
            for planned in plans:
                graphs.append([])
                for number in range(len(self.filled)):
                    graphs[-1].append(self.capture(planned, number))
            sets, rounds = len(self.filled), max(7, min(150, int(each_ms * 1e3 / guess_us)))
            for i in range(max(2, int(warm_ms * 1e3 / guess_us / len(plans)))):
                for of_plan in graphs:
                    self.driver("cuGraphLaunch", of_plan[i % sets], self.handle)
            at = 0
            self.mark(at)
            for i in range(rounds):
                for of_plan in graphs:
                    self.driver("cuGraphLaunch", of_plan[i % sets], self.handle)
                    at += 1
                    self.mark(at)
            self.between(0, at)
            found = []
            for k in range(len(plans)):
                times = sorted(self.between(i * len(plans) + k, i * len(plans) + k + 1) for i in range(rounds))
                found.append(times[rounds // 2])
            return found
        finally:
            self.torch.cuda.synchronize()
            for of_plan in graphs:
                for graph in of_plan:
                    self.driver("cuGraphExecDestroy", graph)

    def capture(self, planned: Planned, number: int) -> c_void_p:
        graph, executable = c_void_p(), c_void_p()
        self.driver("cuStreamBeginCapture_v2", self.handle, CAPTURE_THREAD_LOCAL)
        try:
            self.call(planned, number)
        finally:
            self.driver("cuStreamEndCapture", self.handle, byref(graph))
        self.driver("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        self.driver("cuGraphDestroy", graph)
        return executable


__all__ = ["AUTO", "FORCED", "FORMS", "FUSED", "HALVES", "NO_FUSED", "OWN", "PlanBench", "Planned", "WHOLE", "longest_chunks"]
