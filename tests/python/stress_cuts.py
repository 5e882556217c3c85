"""Forced plans of cut sequences, other forms between them, from many processes at a time: `stress.py --kind cuts`.

    [git apply tests/python/forced_pieces.patch; build the library; git apply -R ..]

With that patch of the planner (no kernel changes) pieces of the pre-pass and segments of merging heads are drawn, too; without it they
are the planner's. Each process has some problems, one workspace for all of them and a second stream on which a graph of other work
runs. Rounds are of two kinds: one call after the other, the workspace filled with NaN, garbage or what another problem left, everything
looked at after each; or a chain of calls with nothing between them. A result that differs is reported with where it lies (sequence,
head, chunk, segment, columns), and where calls were looked at one by one with which part of the workspace differs from that of a good
run.
"""

from __future__ import annotations

import ctypes
import math
import random
import sys
import time
from ctypes import byref, c_size_t
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

from qla import _ffi
from qla.planview import shape_only
from stress_common import (
    FUSED,
    HALVES,
    NAMES,
    OWN,
    WHOLE,
    Library,
    checked,
    checksum,
    differing_states,
    differing_tokens,
    relative_l2,
    spans,
    words,
)

LIMIT, UNDONE_LIMIT = 6e-3, 2e-2  # cut against uncut, relative L2 (tests/python/test_context_parallel.py)
THRESHOLD = -10.0  # of warm-ups, 16-bit types
OUTPUTS = 4  # of a problem in one chain


@dataclass(frozen=True)
class Problem:
    seed: int
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    form: int  # which copy of the library
    segment: int  # chunks; 0: as the planner likes, -1: uncut
    pieces: int = 1
    first: int = 1
    merged: int = 0
    gates: str = "never"
    norm: bool = False
    h0: bool = True
    half: bool = False  # fp16
    mib: int = 0  # workspace, 0: what is best

    def __str__(self) -> str:
        return (
            f"{NAMES[self.form]} {self.heads} {list(self.lengths)} segment {self.segment} pieces {self.first},{self.pieces} merged {self.merged} "
            f"{self.gates}{' norm' if self.norm else ''}{'' if self.h0 else ' no h0'}{' fp16' if self.half else ''}{f' {self.mib} MiB' if self.mib else ''}"
        )


HISTORY = Problem(0, (18282, 0, 0, 0), (5, 5), FUSED, 15, 2, 2)


def draw_problem(draw: random.Random) -> Problem:
    kind = draw.random()
    sequences = draw.choice((1, 1, 2, 3, 4, 4))
    seed, gates = draw.randrange(1 << 20), draw.choice(("never", "never", "never", "some", "mixed", "forget", "undone"))
    more = {"norm": draw.random() < 0.4 and gates != "undone", "h0": draw.random() < 0.7, "half": draw.random() < 0.2}
    if kind < 0.15:
        return HISTORY
    if kind < 0.7:  # cut in the fused form, by cut_few
        heads = draw.choice((1, 2, 3, 5, 5, 8, 12, 16))
        longest = draw.randrange(40, 400) * 64 // max(1, heads // 6) + draw.choice((0, 0, 1, 17, 42))
        segment = draw.randrange(4, 40)
        first, pieces = draw.choice(((1, 1), (2, 1), (2, 2), (2, 2), (4, 2), (1, 2), (3, 2), (3, 3)))
        merged = draw.choice((0, 0, 0, draw.randrange(3, segment + 1)))
        form, head_pair = FUSED, (heads, heads)
    elif kind < 0.85:  # cut in two kernels, cut_few beside chunk_intra, or cut_items where there are many segments
        head_pair = draw.choice(((2, 8), (4, 16), (2, 4), (8, 8), (8, 32), (3, 6)))
        longest = draw.randrange(40, 250) * 64 // max(1, head_pair[1] // 8) + draw.choice((0, 5, 63))
        segment = draw.randrange(4, 30)
        first, pieces = draw.choice(((1, 1), (2, 1), (2, 2), (4, 2)))
        merged, form = draw.choice((0, 0, draw.randrange(3, segment + 1))), draw.choice((WHOLE, HALVES))
    else:  # whatever the planner makes of it
        head_pair = draw.choice(((16, 16), (8, 32), (8, 24), (2, 8), (5, 5), (16, 48)))
        count = draw.choice((1, 2, 3, 8))
        lengths = tuple(draw.choice((64, 700, 1024, 2048, 3000)) for _ in range(count))
        return Problem(seed, lengths, head_pair, OWN, draw.choice((0, 0, -1)), gates=gates, mib=draw.choice((0, 0, 12)), **more)
    drawn = [0] * sequences
    drawn[draw.choice((0, draw.randrange(sequences)))] = longest
    for n in range(sequences):
        if drawn[n] == 0 and draw.random() < 0.4:
            drawn[n] = draw.choice((1, 64, 100, longest // 3, longest // 2))
    return Problem(seed, tuple(drawn), head_pair, form, segment, pieces, first, merged, gates, **more)


def problems_of(seed: int, process: int, count: int) -> list[Problem]:
    draw = random.Random(1000 * seed + process)
    return [HISTORY, *(draw_problem(draw) for _ in range(count - 1))]


def shape_args(p: Problem) -> _ffi.ForwardArgs:
    (hk, hv), n, tokens = p.heads, len(p.lengths), sum(p.lengths)
    args = _ffi.ForwardArgs(struct_size=ctypes.sizeof(_ffi.ForwardArgs), scale=float("nan"), cp_warmup_threshold=float("nan"))
    args.backend, args.device = _ffi.BACKEND_CUDA, 0
    dtype = _ffi.FLOAT16 if p.half else _ffi.BFLOAT16
    args.q = args.k = shape_only(dtype, 1, tokens, hk, 128)
    args.v = args.o = shape_only(dtype, 1, tokens, hv, 128)
    args.g = args.beta = shape_only(_ffi.FLOAT32, 1, tokens, hv)
    args.final_state = shape_only(_ffi.FLOAT32, n, hv, 128, 128)
    if p.h0:
        args.initial_state = args.final_state
    args.cu_seqlens = shape_only(_ffi.INT32, n + 1)
    args.flags = _ffi.FLAG_QK_L2NORM if p.norm else 0
    if p.segment > 0:
        args.cp_mode, args.cp_segment_chunks = _ffi.CP_PLAN, p.segment
        # forced_pieces.patch reads pieces off the threshold's last digits; to all others it is -10
        args.cp_warmup_threshold = THRESHOLD - 1e-8 * (p.pieces + 10 * p.first + 100 * p.merged)
    else:
        args.cp_mode = _ffi.CP_AUTO if p.segment == 0 else _ffi.CP_OFF
    return args


def make_inputs(p: Problem) -> dict[str, torch.Tensor]:
    make = torch.Generator(device="cuda").manual_seed(p.seed)
    (hk, hv), n, tokens = p.heads, len(p.lengths), sum(p.lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, device="cuda")

    dtype = torch.float16 if p.half else torch.bfloat16
    x = {name: torch.nn.functional.normalize(normal(1, tokens, hk, 128), dim=-1).to(dtype) for name in ("q", "k")}
    x["v"] = normal(1, tokens, hv, 128).to(dtype)
    x["beta"] = normal(1, tokens, hv).sigmoid()
    g = torch.nn.functional.logsigmoid(normal(1, tokens, hv)) / 16
    if p.gates == "never":
        g.zero_()
    elif p.gates == "some":
        g[:, :, ::3] = 0
    elif p.gates == "mixed":
        g[:, : tokens // 2, ::2] = 0
        g[:, tokens // 3 :, 1::2] *= 0.02
    elif p.gates == "undone":  # keys that undo forgetting: the fused form distrusts the first head's cut and walks it again
        g.fill_(-0.42)
        x["k"][:, :, 0] = torch.nn.functional.normalize(x["k"][:, :1, 0].float(), dim=-1).mul(math.sqrt(2.5)).to(dtype)
        x["beta"][:, :, : hv // hk] = 1
    x["g"] = g
    x["initial_state"] = normal(n, hv, 128, 128)
    x["cu_seqlens"] = torch.tensor([0, *torch.tensor(p.lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return x


class Call:
    """A problem's inputs and its filled arguments."""

    def __init__(self, p: Problem, libraries: Library) -> None:
        self.p, self.library, self.x = p, libraries.of(p.form), make_inputs(p)
        self.args = shape_args(p)
        for name in ("q", "k", "v", "g", "beta", "cu_seqlens"):
            getattr(self.args, name).data = self.x[name].data_ptr()
        if p.h0:
            self.args.initial_state.data = self.x["initial_state"].data_ptr()
        least, best = c_size_t(0), c_size_t(0)
        checked(self.library, self.library.qla_gdn_forward_workspace_range(byref(self.args), byref(least), byref(best)))
        self.bytes = max(least.value, p.mib << 20) if p.mib else best.value
        self.outputs = [(torch.empty_like(self.x["v"]), torch.empty_like(self.x["initial_state"])) for _ in range(OUTPUTS)]
        self.o, self.ht = self.outputs[0]

    def __call__(self, space: torch.Tensor, stream: Any, o: torch.Tensor | None = None, ht: torch.Tensor | None = None) -> None:
        args, o, ht = self.args, self.o if o is None else o, self.ht if ht is None else ht
        args.o.data, args.final_state.data = o.data_ptr(), ht.data_ptr()
        args.workspace, args.workspace_bytes, args.stream = space.data_ptr(), self.bytes, stream.cuda_stream
        checked(self.library, self.library.qla_gdn_forward(byref(args)))

    def empty(self, number: int = 1) -> None:
        for o, ht in self.outputs[:number]:
            o.fill_(float("nan"))
            ht.fill_(float("nan"))


# ---- the quiet results


def quiet(seed: int, processes: list[int], count: int, out: Path) -> None:
    """Checksums of all problems, twice each, in a process that has the card to itself; cut against uncut."""
    libraries = Library(out)
    stream, results, worst = torch.cuda.current_stream(), {}, {}
    for p in dict.fromkeys(p for n in processes for p in problems_of(seed, n, count)):
        call = Call(p, libraries)
        space = torch.full((call.bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        sums = []
        for _ in range(2):
            call.empty()
            call(space, stream)
            sums.append((checksum(call.o), checksum(call.ht)))
            space.random_(0, 256)
        if sums[0] != sums[1]:
            print(f"QUIET: not the same bits twice: {p}", flush=True)
        results[p] = sums[0]
        if p.segment >= 0:
            other = Call(Problem(**{**p.__dict__, "segment": -1, "form": OWN, "mib": 0}), libraries)
            other(torch.full((other.bytes,), 0xFF, dtype=torch.uint8, device="cuda"), stream)
            far = max(relative_l2(call.o, other.o), relative_l2(call.ht, other.ht))
            if not far < (UNDONE_LIMIT if p.gates == "undone" else LIMIT):
                print(f"QUIET: {far:.3g} from uncut: {p}", flush=True)
            if p.gates != "undone":
                worst[p] = far
        del call
    torch.save({"sums": results}, out / "quiet.pt")
    if worst:
        p = max(worst, key=worst.__getitem__)
        print(
            f"quiet: {len(results)} problems; furthest from uncut {worst[p]:.3g}: {p}; {worst[HISTORY]:.3g}: {HISTORY}",
            flush=True,
        )


# ---- under pressure


def where(p: Problem, got: torch.Tensor, want: torch.Tensor, ht: torch.Tensor, want_ht: torch.Tensor) -> list[str]:
    return differing_tokens(p.lengths, got[0], want[0], max(p.segment, 0)) + differing_states(ht, want_ht)


def spaces(bad: torch.Tensor, good: torch.Tensor) -> list[str]:
    """Which 256-byte blocks of two workspaces differ; items, lists and counters may."""
    n = bad.numel() // 256 * 256
    blocks = torch.nonzero(
        (bad[:n].view(-1, 32, 8).view(torch.int64) != good[:n].view(-1, 32, 8).view(torch.int64)).flatten(1).any(1)
    ).flatten()
    return [f"  workspace of {n} bytes: {len(blocks)} blocks of 256 bytes differ: {spans(blocks)}"]


class Worker:
    def __init__(self, seed: int, process: int, count: int, folder: Path) -> None:
        self.draw = random.Random(77 * seed + process)
        self.process, self.failures, self.singles, self.chained = process, 0, 0, 0
        quiet_sums = torch.load(folder / "quiet.pt", weights_only=False)["sums"]
        own = folder / f"p{process}"
        own.mkdir()
        libraries = Library(own)
        self.stream = torch.cuda.current_stream()
        self.calls = [Call(p, libraries) for p in dict.fromkeys(problems_of(seed, process, count))]
        self.space = torch.empty(max(c.bytes for c in self.calls) + 256, dtype=torch.uint8, device="cuda")
        self.want = []
        for c in self.calls:
            for attempt in range(3):
                self.space.fill_(0xFF)
                c.empty()
                c(self.space, self.stream)
                if (checksum(c.o), checksum(c.ht)) == quiet_sums[c.p]:
                    break
                self.failures += 1
                print(f"MISMATCH process {process}, first run {attempt} against the quiet one: {c.p}", flush=True)
            self.want.append((c.o.clone(), c.ht.clone()))
        self.garbage = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
        self.neighbour()
        torch.cuda.synchronize()

    def neighbour(self) -> None:
        """A graph of other work on a stream of its own: calls with a workspace of their own, products, a copy."""
        self.side = torch.cuda.Stream()
        other = self.calls[self.draw.randrange(len(self.calls))]
        space, o, ht = torch.empty_like(self.space[: other.bytes]), torch.empty_like(other.o), torch.empty_like(other.ht)
        x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.graph = torch.cuda.CUDAGraph()
        self.side.wait_stream(self.stream)
        with torch.cuda.stream(self.side):
            y = x @ x
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.side):
            for _ in range(2):
                other(space, self.side, o, ht)
                torch.matmul(x, x, out=y)
                space.fill_(0xFF)
        self.held, self.other = (space, o, ht, x, y), other
        self.events: list[torch.cuda.Event] = []

    def press(self) -> None:
        """The neighbour's graph again, if not much of it is waiting."""
        self.events = [e for e in self.events if not e.query()]
        if len(self.events) < 3 and self.draw.random() < 0.6:
            with torch.cuda.stream(self.side):
                self.graph.replay()
                event = torch.cuda.Event()
                event.record()
            self.events.append(event)

    def foul(self, call: Call) -> str:
        """What the workspace holds before a call."""
        kind = self.draw.choice(("nan", "garbage", "left", "left", "zeros", "own"))
        space = self.space[: call.bytes]
        if kind == "nan":
            space.fill_(0xFF)
        elif kind == "zeros":
            space.zero_()
        elif kind == "garbage":
            step = len(self.garbage)
            for at in range(0, call.bytes, step):
                space[at : at + step].copy_(self.garbage[: min(step, call.bytes - at)])
        elif kind == "left":
            self.calls[self.draw.randrange(len(self.calls))](self.space, self.stream)
        return kind  # own: its last run's, or the last one's of whoever ran last

    def report(self, i: int, how: str, space: torch.Tensor | None, o: torch.Tensor, ht: torch.Tensor) -> None:
        self.failures += 1
        c, (want_o, want_ht) = self.calls[i], self.want[i]
        lines = [f"MISMATCH process {self.process}, {how}, after {self.singles} single and {self.chained} chained calls: {c.p}"]
        lines += where(c.p, o, want_o, ht, want_ht)
        for attempt in range(3):
            self.space.fill_(0xFF)
            c.empty()
            c(self.space, self.stream)
            same = torch.equal(words(c.o), words(want_o)) and torch.equal(words(c.ht), words(want_ht))
            lines.append(
                f"  again, {attempt}: {'good' if same else 'bad'}{', as before' if torch.equal(words(c.o), words(o)) else ''}"
            )
            if same and space is not None and "nan" in how:
                lines += spaces(space, self.space[: c.bytes])
                space = None
        if self.failures <= 5:
            print("\n".join(lines), flush=True)

    def one_by_one(self, calls: int) -> None:
        for _ in range(calls):
            i = self.draw.randrange(len(self.calls)) if self.draw.random() < 0.6 else 0
            c = self.calls[i]
            self.press()
            kind = self.foul(c)
            c.empty()
            c(self.space, self.stream)
            want_o, want_ht = self.want[i]
            differ = (words(c.o) != words(want_o)).any() | (words(c.ht) != words(want_ht)).any()
            self.singles += 1
            if bool(differ):
                self.report(i, f"alone, workspace {kind}", self.space[: c.bytes].clone(), c.o.clone(), c.ht.clone())

    def chain(self, calls: int) -> None:
        """Calls with nothing between them; all outputs are looked at behind the last one."""
        order: list[int] = []
        while len(order) < calls:
            i = self.draw.randrange(len(self.calls))
            if order.count(i) < OUTPUTS:
                order.append(i)
        for i in set(order):
            self.calls[i].empty(order.count(i))
        for at, i in enumerate(order):
            self.press()
            self.calls[i](self.space, self.stream, *self.calls[i].outputs[order[:at].count(i)])
        flags = {}
        for i in set(order):
            for n, (o, ht) in enumerate(self.calls[i].outputs[: order.count(i)]):
                flags[i, n] = (words(o) != words(self.want[i][0])).any() | (words(ht) != words(self.want[i][1])).any()
        self.chained += calls
        bad = torch.stack(list(flags.values())).tolist()
        for (i, n), differ in zip(flags, bad):
            if differ:
                o, ht = (x.clone() for x in self.calls[i].outputs[n])
                self.report(i, f"time {n} in a chain {order}", None, o, ht)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.failures < 20:
            self.one_by_one(20)
            for _ in range(3):
                self.chain(12)
        torch.cuda.synchronize()
        same = torch.equal(words(self.held[1]), words(self.want[self.calls.index(self.other)][0]))
        if not same:
            self.failures += 1
            print(f"MISMATCH process {self.process}, in the neighbour's graph: {self.other.p}", flush=True)
        print(
            f"process {self.process}: {self.singles} single, {self.chained} chained calls, {self.failures} failures", flush=True
        )
