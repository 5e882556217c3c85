"""`qla bench --device cpu`: token-heads a second beside the core's own rate, transformers' torch code, two threads, memory, host cost.

Every time is the least of all repeats within --seconds: on a machine that does other work too, the least is nearest to
what the code costs. On one thread it is the process's own CPU time, which other programs lengthen little; on two threads
it is wall time, and only a quiet machine tells the truth; torch's own threads wait asleep meanwhile (bench.py). Two cores
that do not share a cache are slower than two that do (docs/decisions/0012), and a virtual machine's may change from one
to the other. Nothing here checks results (`qla selftest` does).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qla import fma_rate
from qla.bench import JsonLines, cell, markdown
from qla.progress import Bar

# FLOP a token-head of the 64-token chunk form at K = V = 128 (docs/math.md, work and bytes)
FORWARD_FLOP, BACKWARD_FLOP = 98_304, 262_144


@dataclass
class Case:
    name: str
    tokens: int
    heads: tuple[int, int]
    gate: str = "soft"
    threads: int = 1
    dtype: str = "float32"
    transformers: bool = False
    backward: bool = True


def make_cases(tokens: int, cores: int) -> list[Case]:
    main = Case(f"4->8 heads, T {tokens}", tokens, (4, 8), transformers=True)
    cases = [main, Case(f"4->8 heads, T {tokens}, bf16", tokens, (4, 8), dtype="bfloat16")]
    if cores >= 2:
        cases.append(Case(f"4->8 heads, T {tokens}, 2 threads", tokens, (4, 8), threads=2))
    for gate in ("soft", "zero"):
        for threads in (1, 2) if cores >= 2 else (1,):
            suffix = ", 2 threads" if threads == 2 else ""
            cases.append(
                Case(f"1 head, T 32768, g {'= 0' if gate == 'zero' else 'forgets'}{suffix}", 32768, (1, 1), gate, threads)
            )
    return cases


def make_inputs(case: Case) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    hk, hv = case.heads
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    g = torch.zeros(1, case.tokens, hv) if case.gate == "zero" else torch.nn.functional.logsigmoid(normal(1, case.tokens, hv))
    return {
        "q": normal(1, case.tokens, hk, 128).to(dtype),
        "k": normal(1, case.tokens, hk, 128).to(dtype),
        "v": normal(1, case.tokens, hv, 128).to(dtype),
        "g": g,
        "beta": torch.sigmoid(normal(1, case.tokens, hv)),
    }


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def least(function: Callable[[], Any], seconds: float, at_least: int = 3) -> float:
    import torch

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < at_least or time.perf_counter() < end:
        start = clock()
        function()
        best = min(best, clock() - start)
        count += 1
    return best


def forward_and_backward(
    function: Callable[..., Any], inputs: dict[str, Any], seconds: float, backward: bool
) -> tuple[float, float | None]:
    """Seconds of a forward call without gradients, and of the backward alone."""
    import torch

    with torch.no_grad():
        forward_s = least(lambda: function(**inputs), seconds)
    if not backward:
        return forward_s, None
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, _ = function(**leaves)
    do = torch.randn(o.shape).to(o)
    return forward_s, least(lambda: torch.autograd.grad(o, list(leaves.values()), do, retain_graph=True), seconds)


def peak_extra_mib(function: Callable[[], Any]) -> float | None:
    """Growth of the process's resident peak during one call, results still held; None where the kernel does not tell."""

    def status(field: str) -> int:
        return int(Path("/proc/self/status").read_text().partition(field + ":")[2].split()[0])

    try:
        with contextlib.suppress(OSError, AttributeError):  # what earlier calls freed must not hide what this one takes
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        held = function()
        peak = status("VmHWM") - before
        del held
    except (OSError, ValueError, IndexError):
        return None
    return peak / 1024


def run_case(case: Case, seconds: float, gflops: float) -> dict[str, Any]:
    import qla

    inputs = make_inputs(case)
    keywords: dict[str, Any] = dict(use_qk_l2norm_in_kernel=True)
    work = case.tokens * case.heads[1]
    with threads(case.threads):
        forward_s, backward_s = forward_and_backward(
            lambda **x: qla.chunk_gated_delta_rule(**x, **keywords), inputs, seconds, case.backward
        )
        if case.threads == 1 and case.heads == (1, 1):  # one thread's best: never worse than the uncut run
            uncut = forward_and_backward(
                lambda **x: qla.chunk_gated_delta_rule(**x, auto_cp=False, **keywords), inputs, seconds, case.backward
            )
            forward_s = min(forward_s, uncut[0])
            if backward_s is not None and uncut[1] is not None:
                backward_s = min(backward_s, uncut[1])
        row: dict[str, Any] = {"case": case.name, "threads": case.threads, "dtype": case.dtype, "forward_ms": forward_s * 1e3}
        row["forward_mths"] = work / forward_s / 1e6
        row["forward_share"] = 100 * row["forward_mths"] * 1e6 * FORWARD_FLOP / (gflops * 1e9 * case.threads)
        if backward_s is not None:
            row["backward_ms"] = backward_s * 1e3
            row["backward_mths"] = work / backward_s / 1e6
            row["backward_share"] = 100 * row["backward_mths"] * 1e6 * BACKWARD_FLOP / (gflops * 1e9 * case.threads)
        if case.transformers:
            add_transformers(row, inputs, seconds, forward_s, backward_s)
    return row


def add_transformers(
    row: dict[str, Any], inputs: dict[str, Any], seconds: float, forward_s: float, backward_s: float | None
) -> None:
    try:
        import transformers
        from transformers.models.qwen3_next import modeling_qwen3_next as module
    except ImportError:
        return
    transformers.logging.set_verbosity_error()

    def theirs(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)

    forward_t, backward_t = forward_and_backward(theirs, inputs, seconds, backward_s is not None)
    row["forward_ratio"] = forward_t / forward_s
    row["forward_ms_transformers"] = forward_t * 1e3
    if backward_s is not None and backward_t is not None:
        row["backward_ratio"] = backward_t / backward_s
        row["backward_ms_transformers"] = backward_t * 1e3


def memory_report(tokens: int) -> list[str]:
    """Peaks of a forward and of a backward call as the system saw them, beside what the call hands back (the CPU backend keeps its
    scratch itself: its workspace query answers 0)."""
    import torch

    import qla

    lines = []
    for t in (tokens, 8 * tokens):
        inputs = {name: x.requires_grad_() for name, x in make_inputs(Case("memory", t, (4, 8))).items()}
        held: list[Any] = []
        forward = peak_extra_mib(lambda: held.append(qla.chunk_gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True)))  # noqa: B023
        o = held[0][0]
        do = torch.ones_like(o)
        backward = peak_extra_mib(lambda: torch.autograd.grad(o, list(inputs.values()), do))  # noqa: B023
        out, gradients = o.numel() * 4 / 2**20, sum(x.numel() * x.element_size() for x in inputs.values()) / 2**20
        if forward is not None and backward is not None:
            lines.append(
                f"peak growth of memory, T {t}, 4->8 heads fp32: forward {forward:.0f} MiB, of which o {out:.0f} (limit {out + 64:.0f}); "
                f"backward {backward:.0f} MiB, of which the gradients {gradients:.0f} (limit {gradients + 256:.0f})"
            )
    return lines


def forward_args(tokens: int, heads: tuple[int, int]) -> Any:
    from qla import _ffi, planview

    args = _ffi.ForwardArgs(struct_size=ctypes.sizeof(_ffi.ForwardArgs), scale=float("nan"), cp_warmup_threshold=float("nan"))
    args.backend, args.device = _ffi.BACKEND_CPU, -1
    args.num_threads = len(os.sched_getaffinity(0))
    args.q = args.k = planview.shape_only(_ffi.FLOAT32, 1, tokens, heads[0], 128)
    args.v = args.o = planview.shape_only(_ffi.FLOAT32, 1, tokens, heads[1], 128)
    args.g = args.beta = planview.shape_only(_ffi.FLOAT32, 1, tokens, heads[1])
    return args


def host_cost_us(repeats: int = 2000) -> tuple[float, float]:
    """T = 64, one head, no gradients: microseconds of the Python call, and of the same call straight through the C ABI."""
    import torch

    import qla
    from qla import _ffi

    inputs = make_inputs(Case("host", 64, (1, 1)))
    with threads(1), torch.no_grad():
        python_us = least(lambda: qla.chunk_gated_delta_rule(**inputs), 1.0, repeats) * 1e6
        args = forward_args(64, (1, 1))
        args.num_threads = 1
        tensors = {**inputs, "o": torch.empty_like(inputs["v"])}
        for name, tensor in tensors.items():
            getattr(args, name).data = tensor.data_ptr()
        lib, pointer = _ffi.lib(), ctypes.byref(args)
        size = ctypes.c_size_t(0)
        _ffi.check(lib.qla_gdn_forward_workspace(pointer, ctypes.byref(size)))
        workspace = torch.empty(size.value + 256, dtype=torch.uint8)
        args.workspace, args.workspace_bytes = (workspace.data_ptr() + 255) // 256 * 256, size.value
        _ffi.check(lib.qla_gdn_forward(pointer))
        c_us = least(lambda: lib.qla_gdn_forward(pointer), 1.0, repeats) * 1e6
    return python_us, c_us


def two_thread_ratios(rows: list[dict[str, Any]]) -> list[str]:
    by_name = {row["case"]: row for row in rows}
    lines = []
    for name, row in by_name.items():
        twin = by_name.get(name + ", 2 threads")
        if twin:
            parts = [f"forward {row['forward_ms'] / twin['forward_ms']:.2f}x"]
            if row.get("backward_ms"):
                parts.append(f"backward {row['backward_ms'] / twin['backward_ms']:.2f}x")
            lines.append(f"two threads, {name}: {', '.join(parts)} of one thread's best uncut run (aim 1.8)")
    return lines


COLUMNS = {
    "case": "case, K = V = 128",
    "dtype": "type",
    "threads": "threads",
    "forward_ms": "forward ms",
    "forward_mths": "M token-heads/s",
    "forward_share": "% of FMA rate",
    "forward_ratio": "x transformers",
    "backward_ms": "backward ms",
    "backward_mths": "M token-heads/s ",
    "backward_share": "% of FMA rate ",
    "backward_ratio": "x transformers ",
}


def main(args: argparse.Namespace) -> int:
    import torch

    from qla import _ffi

    cores = len(os.sched_getaffinity(0))
    gflops, how = fma_rate.measure()
    load = os.getloadavg()[0]
    print(
        f"{_ffi.build_info()}; torch {torch.__version__}; {cores} cores, load {load:.1f}{' (busy: times are too long)' if load > 0.7 else ''}"
    )
    print(
        f"one core does {gflops:.1f} GFLOP/s ({how}); floors: {FORWARD_FLOP} FLOP a token-head forward, {BACKWARD_FLOP} backward"
    )
    cases = [c for c in make_cases(args.tokens, cores) if not args.cases or args.cases in c.name]
    if not cases:
        names = ", ".join(f"'{c.name}'" for c in make_cases(args.tokens, cores))
        raise ValueError(f"--cases: no case's name contains {args.cases!r}; there are {names}")
    if args.no_transformers:
        for case in cases:
            case.transformers = False
    common = {"cpu_level": _ffi.cpu_level(), "gflops": round(gflops, 1), "torch": torch.__version__}
    lines = JsonLines(args.out / "cpu.jsonl", common)
    rows = []
    with Bar(len(cases), "bench", 30) as bar:
        for number, case in enumerate(cases, 1):
            row = run_case(case, args.seconds, gflops)
            rows.append(row)
            lines.write(row)
            print("  ".join(f"{title.strip()} {cell(row[key])}" for key, title in COLUMNS.items() if row.get(key) is not None))
            bar(number, case.name)
    notes = two_thread_ratios(rows)
    if not args.cases:
        notes += memory_report(args.tokens)
        python_us, c_us = host_cost_us()
        notes.append(
            f"host cost at T 64, one head: {python_us:.1f} us the Python call, {c_us:.1f} us in C: {python_us - c_us:.1f} us of Python (limit 50)"
        )
    after, _ = fma_rate.measure()
    notes.append(f"the core's rate before and after: {gflops:.1f}, {after:.1f} GFLOP/s")
    table = markdown(COLUMNS, rows)
    print("\n" + table + "\n" + "\n".join(notes))
    header = f"# qla bench --device cpu\n\n{time.strftime('%Y-%m-%d')}, {_ffi.build_info()}, one core {gflops:.1f} GFLOP/s ({how}); least of all repeats.\n\n"
    (args.out / "cpu.md").write_text(header + table + "\n" + "\n".join(f"- {note}" for note in notes) + "\n")
    try:
        from qla import plotting

        for row in rows:
            row["title"] = f"qla on one CPU, fp32, core at {gflops:.0f} GFLOP/s"
        plotting.bench_cpu_picture(args.out / "cpu.png", rows)
    except ImportError:
        pass
    print(f"wrote {args.out}/cpu.jsonl, cpu.md, cpu.png")
    return 0
