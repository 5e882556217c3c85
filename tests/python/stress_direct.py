"""Small and medium calls that nothing cuts, from many processes at a time: `stress.py --kind direct` (plain library, no patch).

Direct launches of one and of several rounds of items, fused calls behind plan_and_gates, balanced ones, both forms, two kernels whose
tables chunk_intra makes or plan_segments: kinds are told apart by qla_gdn_plan, and each is drawn in its turn. A process has lines:
some calls of random problems, prepared, each with outputs of its own. A line runs call by call or as a graph, on one of two streams:

    poisoned   outputs and workspace are filled (NaN, 0xFF) by kernels right before each call, shared memory before every other one
    fresh      .. and so are the inputs, which are then copied from others: the call begins under the end of a copy
    bare       nothing between the calls, the workspace as the one before left it
    allocated  memory from torch's allocator at every call, as the operator does it, and given back to it

One comparison looks at a line's outputs; once all lines have run the answers are read. What differs is told where, and kept in a file.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections import Counter
from ctypes import byref, c_size_t
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

from poison_shared import poison_shared
from qla import _ffi
from stress_cases import Case, arguments_of, described, draw_cases, place, rounded, shapes_of, view
from stress_common import (
    Library,
    checked,
    checksum,
    differing_states,
    differing_tokens,
    relative_l2,
    spans,
    words,
)

MODES = ("poisoned", "poisoned", "fresh", "bare", "allocated")
SHOWN = 5  # mismatches of a process that are told and kept in full


# ---- calls


class Call:
    """A problem's inputs, in one piece of memory, and its arguments without the addresses of outputs and workspace."""

    def __init__(self, case: Case, library: ctypes.CDLL, device: str) -> None:
        self.case, self.library = case, library
        self.args = arguments_of(case, device)
        self.inputs, self.outputs = shapes_of(case)
        self.space_bytes = 0
        if case.save:
            size = c_size_t(0)
            checked(library, library.qla_gdn_forward_saved(byref(self.args), byref(size)))
            self.args.saved = described((size.value,), torch.uint8)
            if case.saved_same:
                self.outputs["saved"] = ((size.value,), torch.uint8)
            else:  # not compared
                self.space_bytes = rounded(size.value)
        self.saved_in_space = self.space_bytes > 0
        least, best = c_size_t(0), c_size_t(0)
        checked(library, library.qla_gdn_forward_workspace_range(byref(self.args), byref(least), byref(best)))
        self.workspace_at, self.workspace_bytes = self.space_bytes, best.value
        self.space_bytes += rounded(max(best.value, 256))
        self.input_at, self.input_bytes = place(self.inputs)
        self.output_at, self.output_bytes = place(self.outputs)
        self.piece = piece(self.input_bytes, device)
        self.fill_inputs(device)

    def input(self, name: str) -> torch.Tensor:
        return view(self.piece, self.input_at[name], *self.inputs[name])

    def fill_inputs(self, device: str) -> None:
        make = torch.Generator(device=device).manual_seed(self.case.seed)
        for name, (shape, _) in self.inputs.items():
            if name == "cu_seqlens":
                x = torch.tensor([0, *self.case.lengths], device=device).cumsum(0)
            else:
                x = torch.randn(*shape, generator=make, device=device)
            if name in ("q", "k"):
                x = torch.nn.functional.normalize(x, dim=-1)
            elif name == "g" and self.case.gate != "raw":
                x = torch.nn.functional.logsigmoid(x) / 16
            elif name == "beta" and not self.case.logits:
                x = x.sigmoid()
            self.input(name).copy_(x)

    def outputs_of(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: view(out, at, *self.outputs[name]) for name, at in self.output_at.items()}

    def placed(self, out: torch.Tensor, space: torch.Tensor, inputs: torch.Tensor | None = None) -> _ffi.ForwardArgs:
        """Arguments with these addresses, without a stream."""
        args = _ffi.ForwardArgs.from_buffer_copy(self.args)
        for names, piece in ((self.input_at, self.piece if inputs is None else inputs), (self.output_at, out)):
            for name, at in names.items():
                getattr(args, name).data = piece.data_ptr() + at
        if self.saved_in_space:
            args.saved.data = space.data_ptr()
        args.workspace, args.workspace_bytes = space.data_ptr() + self.workspace_at, self.workspace_bytes
        return args

    def run(self, args: _ffi.ForwardArgs, stream: int) -> None:
        args.stream = stream
        if self.library.qla_gdn_forward(byref(args)):
            raise _ffi.QlaError(self.library.qla_last_error().decode("utf-8", "replace"))


def piece(nbytes: int, device: str) -> torch.Tensor:
    """Memory at a multiple of 256, full of 0xFF."""
    x = torch.empty(nbytes + 256, dtype=torch.uint8, device=device)
    x = x[-x.data_ptr() % 256 :][:nbytes]
    return x.fill_(0xFF)


def raw_stream(device: str) -> int:
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else 0


def poison(x: torch.Tensor) -> None:
    words(x).fill_(-1)


# ---- the quiet results


def quiet_case(case: Case, libraries: Library, device: str) -> tuple[Case, int]:
    """-> the case, without a comparison of what is saved if two runs leave different bytes there, and the checksum of its outputs."""
    call = Call(case, libraries.of(case.form), device)
    out, space = piece(call.output_bytes, device), piece(call.space_bytes, device)
    args, made = call.placed(out, space), []
    for _ in range(2):
        poison(out)
        call.run(args, raw_stream(device))
        made.append(out.clone())
        space.random_(0, 256)
    if not torch.equal(*made):
        compared = call.output_at.get("saved", 0)
        if compared and torch.equal(made[0][:compared], made[1][:compared]):
            return quiet_case(replace(case, saved_same=False), libraries, device)
        print(f"QUIET: not the same bits twice: {case}", flush=True)
    nan = [n for n, x in call.outputs_of(out).items() if x.is_floating_point() and bool(x.isnan().any())]
    if nan:
        print(f"QUIET: NaN in {', '.join(nan)}: {case}", flush=True)
    return case, checksum(out)


def quiet(seed: int, processes: list[int], count: int, folder: Path, device: str = "cuda") -> dict[int, list[tuple[Case, int]]]:
    """Cases of all processes with the checksums of their outputs, from a process that has the card to itself."""
    own = folder / "quiet_direct"
    own.mkdir()
    libraries = Library(own, device == "cuda")
    begin = time.monotonic()
    drawn = {n: draw_cases(seed, n, count, libraries) for n in processes}
    kinds = Counter(c.kind for cases in drawn.values() for c in cases)
    told = ", ".join(f"{n} {k}" for k, n in kinds.most_common())
    print(f"direct: {kinds.total()} problems in {time.monotonic() - begin:.1f} s: {told}", flush=True)
    if device == "cpu":  # what is quick there
        drawn = {n: [c for c in cases if sum(c.lengths) * c.heads[1] < 8000][:8] for n, cases in drawn.items()}
    results = {n: [quiet_case(c, libraries, device) for c in cases] for n, cases in drawn.items()}
    same, held = sum(c.saved_same for cases in results.values() for c, _ in cases), sum(len(cases) for cases in results.values())
    print(f"quiet, direct: {held} problems, of {held - same} what is saved is not compared", flush=True)
    torch.save(results, folder / "quiet_direct.pt")
    return results


# ---- under pressure


class Line:
    """Some calls, prepared, with a place for the outputs of each; one of the modes."""

    def __init__(self, mode: str, calls: list[Call], want: dict[Call, torch.Tensor], device: str) -> None:
        self.mode, self.calls, self.device = mode, calls, device
        ends = [0]
        for c in calls:
            ends.append(ends[-1] + c.output_bytes)
        self.ends = ends
        self.out = piece(ends[-1], device)
        self.want = torch.cat([want[c] for c in calls])
        self.parts = [self.out[a:b] for a, b in zip(ends, ends[1:])]
        space = piece(max(c.space_bytes for c in calls), device)
        self.spaces = [space[: c.space_bytes] for c in calls]
        inputs = piece(max(c.input_bytes for c in calls), device) if mode == "fresh" else None
        self.inputs = [None if inputs is None else inputs[: c.input_bytes] for c in calls]
        each = zip(calls, self.parts, self.spaces, self.inputs)
        self.args = [call.placed(out, space, x) for call, out, space, x in each]
        self.flag = torch.zeros((), dtype=torch.bool, device=device)
        self.graph: Any = None
        self.held: list[torch.Tensor] = []

    def run(self) -> None:
        stream = raw_stream(self.device)
        if self.mode == "allocated":
            return self.run_allocated(stream)
        if self.mode == "bare":
            poison(self.out)
        each = zip(self.calls, self.args, self.parts, self.spaces, self.inputs)
        for number, (call, args, out, space, inputs) in enumerate(each):
            if inputs is not None:
                poison(inputs)
            if self.mode != "bare":
                poison(out)
                poison(space)
            if inputs is not None and number % 2:
                inputs.copy_(call.piece)  # no kernel
            elif inputs is not None:
                torch.mul(words(call.piece), 1, out=words(inputs))
            if self.mode == "poisoned" and number % 2:
                poison_shared(out)
            call.run(args, stream)

    def run_allocated(self, stream: int) -> None:
        for call, kept in zip(self.calls, self.parts):
            out, space = piece(call.output_bytes, self.device), piece(call.space_bytes, self.device)
            call.run(call.placed(out, space), stream)
            del space
            kept.copy_(out)
            self.held.append(piece(random.randrange(1, 1 << 20), self.device))  # so that the next ones lie elsewhere
            if len(self.held) > 8:
                self.held.pop(random.randrange(8))

    def compare(self) -> None:
        self.flag.copy_((words(self.out) != words(self.want)).any())

    def wrong(self) -> list[int]:
        return [n for n, (a, b) in enumerate(zip(self.ends, self.ends[1:])) if not torch.equal(self.out[a:b], self.want[a:b])]


class Worker:
    def __init__(
        self, seed: int, process: int, folder: Path, keep: Path, device: str = "cuda", lines: int = 12, length: int = 16
    ) -> None:
        self.draw, self.device, self.process, self.keep = random.Random(99 * seed + process), device, process, keep
        self.failures, self.made, self.told = 0, Counter[str](), 0
        own = folder / f"d{process}"
        own.mkdir()
        libraries = Library(own, device == "cuda")
        self.want: dict[Call, torch.Tensor] = {}
        for case, checks in torch.load(folder / "quiet_direct.pt", weights_only=False)[process]:
            call = Call(case, libraries.of(case.form), device)
            self.first_run(call, checks)
        self.calls = list(self.want)
        modes = [*dict.fromkeys(MODES), *(self.draw.choice(MODES) for _ in range(lines))][:lines]
        self.lines = [Line(mode, self.draw_line(length), self.want, device) for mode in modes]
        if device == "cuda":
            self.streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
            self.busy = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
            self.product = self.busy @ self.busy
            torch.cuda.synchronize()
            for line in self.lines:
                if line.mode != "allocated":
                    line.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(line.graph, stream=self.streams[1]):
                        line.run()
            torch.cuda.synchronize()

    def draw_line(self, length: int) -> list[Call]:
        """Every third call of what was seen to fail; of the large ones few."""
        line: list[Call] = []
        for n in range(length):
            pick = self.calls[0] if n % 3 == 0 else self.draw.choice(self.calls)
            line.append(pick if sum(c.output_bytes for c in line) + pick.output_bytes < 64 << 20 else self.calls[0])
        return line

    def first_run(self, call: Call, checks: int) -> None:
        out, space = piece(call.output_bytes, self.device), piece(call.space_bytes, self.device)
        args = call.placed(out, space)
        made = []
        for attempt in range(3):
            poison(out)
            poison(space)
            call.run(args, raw_stream(self.device))
            if checksum(out) == checks:
                self.want[call] = out.clone()
                break
            made.append(out.clone())
            self.failures += 1
            print(f"MISMATCH process {self.process}, first run {attempt} against the quiet one: {call.case}", flush=True)
        if made and call in self.want:
            self.tell(call, made[0], self.want[call], "first run")

    def tell(self, call: Call, got: torch.Tensor, want: torch.Tensor, how: str) -> None:
        self.told += 1
        if self.told > SHOWN:
            return
        x, y = call.outputs_of(got), call.outputs_of(want)
        lines = [f"MISMATCH process {self.process}, {how}, after {self.made.total()} calls: {call.case}"]
        case, flat = call.case, (-1, call.case.heads[1], 128)
        lengths = [*case.lengths, case.behind] if case.behind else case.lengths
        lines += differing_tokens(lengths, x["o"].reshape(flat), y["o"].reshape(flat))
        if case.ht:
            lines += differing_states(x["final_state"], y["final_state"], "vk" if case.v_first else "kv")
        if "saved" in x:
            bad = torch.nonzero(x["saved"] != y["saved"]).flatten()
            if len(bad):
                lines.append(f"  saved: {len(bad)} of {x['saved'].numel()} bytes, blocks of 256: {spans(bad // 256)}")
        out, space = piece(call.output_bytes, self.device), piece(call.space_bytes, self.device)
        again = []
        for _ in range(3):
            poison(out)
            call.run(call.placed(out, space), raw_stream(self.device))
            again.append("good" if torch.equal(out, want) else "as before" if torch.equal(out, got) else "bad")
        lines.append(f"  o {relative_l2(x['o'], y['o']):.3g} relative L2; again: {', '.join(again)}")
        self.keep.mkdir(parents=True, exist_ok=True)
        file = self.keep / f"wrong_{self.process}_{self.told}.pt"
        inputs = {name: call.input(name).cpu().clone() for name in call.inputs}
        held = {"case": repr(case), "how": how, "inputs": inputs}
        torch.save({**held, **{k: {n: t.cpu().clone() for n, t in z.items()} for k, z in (("got", x), ("want", y))}}, file)
        print("\n".join([*lines, f"  kept in {file}"]), flush=True)

    def launch(self, line: Line) -> str:
        how = "graph" if line.graph is not None and self.draw.random() < 0.4 else "calls"
        if how == "graph":
            poison(line.out)
            line.graph.replay()
        else:
            line.run()
        line.compare()
        return how

    def round(self) -> None:
        """Every line once, on one stream or the other; then what differs."""
        how: dict[Line, str] = {}
        for line in self.draw.sample(self.lines, len(self.lines)):
            if self.device == "cuda":
                number = self.draw.randrange(2)
                with torch.cuda.stream(self.streams[number]):
                    if self.draw.random() < 0.2:
                        torch.matmul(self.busy, self.busy, out=self.product)
                    how[line] = f"{self.launch(line)}, stream {number}"
            else:
                how[line] = self.launch(line)
            self.made[line.mode] += len(line.calls)
        if self.device == "cuda":
            torch.cuda.synchronize()
        for line, differs in zip(self.lines, torch.stack([line.flag for line in self.lines]).tolist()):
            for n in line.wrong() if differs else ():
                self.failures += 1
                a, b = line.ends[n], line.ends[n + 1]
                before = line.calls[n - 1].case if n else "the line's first"
                self.tell(line.calls[n], line.out[a:b], line.want[a:b], f"{line.mode}, {how[line]}, call {n} behind {before}")

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.round()
        counts = ", ".join(f"{n} {mode}" for mode, n in self.made.items())
        print(f"process {self.process}: {self.made.total()} calls ({counts}), {self.failures} failures", flush=True)


def dry(seed: int, processes: list[int], count: int, folder: Path) -> int:
    """Without a card: everything is drawn and a few problems go through all of it on the CPU backend; then one with a planted fault."""
    quiet(seed, processes, count, folder, "cpu")
    failures = 0
    for n in processes:
        worker = Worker(seed, n, folder, folder / "kept", "cpu", len(MODES), 6)
        worker.run(1.0)
        failures += worker.failures
    line = worker.lines[0]
    words(line.want)[line.ends[0] // 8 + 5000] ^= 1 << 13
    worker.failures = worker.told = 0
    worker.round()
    print(f"planted one wrong element: {worker.failures} found")
    return failures + (worker.failures != 1)
