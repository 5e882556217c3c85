"""`qla bench --grid published`: the rows that the peers publish, on this GPU, beside the hardware's floors and the peers' times."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qla.bench import JsonLines, markdown
from qla.bench_grid import Row, boundaries, find_table, floors_ms, make_inputs, peak_mib, prepare, read_rows, replay_ms
from qla.progress import Bar

PEERS = ("flash_qla", "flashinfer", "fla")


def our_call() -> Callable[..., Any]:
    import qla

    return lambda **x: qla.chunk_gated_delta_rule(**x, output_final_state=True)


def peer_process(args: argparse.Namespace, peer: str) -> tuple[dict[str, dict[str, float]], str]:
    """Times the chosen rows with one peer in a process of its own -> label -> ms and peak_mib, and what was timed or why nothing was."""
    environment = dict(os.environ)
    if peer == "flash_qla":  # our own package has that name: keep it out of the child's way
        environment["PYTHONPATH"] = str(args.flash_qla_path)
    table = find_table(args.table)
    command = [
        sys.executable,
        str(Path(__file__).resolve().with_name("bench_peer.py")),
        peer,
        str(args.flash_qla_path or ""),
        str(table),
        args.direction,
        args.rows or "",
        str(args.budget),
    ]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return {}, "took more than 15 minutes"
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    what = next((a["what"] for a in answers if "what" in a), "")
    times = {a["label"]: a for a in answers if "ms" in a}
    if not times:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {}, f"not measured: {what + ': ' if what else ''}{last}"
    return times, what


def kernel_times(row: Row, call: Callable[..., Any]) -> list[tuple[str, float]]:
    """(kernel, microseconds) of one eager call, in order of start."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    inputs, cu = make_inputs(row, 0, row.direction == "bwd"), boundaries(row)

    def once() -> None:
        if row.direction == "fwd":
            with torch.no_grad():
                call(**inputs, cu_seqlens=cu)
        else:
            o, state = call(**inputs, cu_seqlens=cu)
            torch.autograd.grad((o, state), list(inputs.values()), (o.detach(), state.detach()))

    once()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        once()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.device_time_total) for e in sorted(events, key=lambda e: e.time_range.start)]


def host_cost() -> str:
    """Microseconds of host time a call at T = 64: eager forward, forward + backward, and a graph replay."""
    import torch

    row = Row("fwd", "host", "64", [64], (2, 4), {}, None, "")
    call, cu = our_call(), boundaries(row)
    plain, leaves = make_inputs(row, 0, False), make_inputs(row, 0, True)

    def spent(function: Callable[[], Any], repeats: int) -> float:
        for _ in range(20):
            function()
        total = 0.0
        for _ in range(repeats // 50):
            torch.cuda.synchronize()  # an empty queue: the host never waits for room
            start = time.perf_counter()
            for _ in range(50):
                function()
            total += time.perf_counter() - start
        return total / (repeats // 50 * 50) * 1e6

    with torch.no_grad():
        forward = spent(lambda: call(**plain, cu_seqlens=cu), 1000)
    do = torch.ones(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
    try:
        both = f"{spent(lambda: torch.autograd.grad(call(**leaves, cu_seqlens=cu)[0], list(leaves.values()), do), 500):.1f}"
    except NotImplementedError as error:
        both = f"not served ({error})"
    replay = spent(prepare(row, call)[0].replay, 1000)
    return f"host cost at T 64, us: forward {forward:.1f} (limit 50), forward + backward {both} (limit 150), graph replay {replay:.1f}"


# ---- the run ----------------------------------------------------------------------------------------------------

COLUMNS = {
    "pass": "pass",
    "model": "model",
    "lengths": "lengths",
    "heads": "Hk, Hv",
    "ours_ms": "qla ms",
    "best_ms": "best peer ms",
    "best_is": "which",
    "ratio": "peer / qla",
    "tensor_share": "% of tensor floor",
    "byte_share": "% of byte floor",
    "peak_mib": "qla MiB",
    "peer_mib": "peers MiB",
    "sm_mhz": "SM MHz",
    "spread": "spread %",
}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for direction, title in (("fwd", "forward"), ("bwd", "backward")):
        rated = [r for r in rows if r["pass"] == direction and r.get("ratio")]
        if not rated:
            continue
        for name, part in (("all rows", rated), ("sequences x value heads >= 64", [r for r in rated if r["items"] >= 64])):
            if part:
                slower = sum(r["ratio"] < 1 for r in part)
                worst = min(part, key=lambda r: r["ratio"])
                lines.append(
                    f"{title}, {name}: geometric mean {geometric_mean([r['ratio'] for r in part]):.3f} x the best known peer over {len(part)} rows; "
                    f"{slower} slower; worst {worst['ratio']:.2f} ({worst['model']} {worst['lengths']} {worst['heads']})"
                )
    return lines


def measure_row(row: Row, call: Callable[..., Any], budget: float, multiprocessors: int) -> dict[str, Any]:
    tensor, moved = floors_ms(row, multiprocessors)
    out: dict[str, Any] = {
        "pass": row.direction,
        "model": row.model,
        "lengths": row.name,
        "heads": f"{row.heads[0]}, {row.heads[1]}",
        "items": row.items,
        "tensor_floor_ms": tensor,
        "byte_floor_ms": moved,
        "best_ms": row.best_ms,
        "best_is": row.best_is,
        "known": row.known,
    }
    try:
        ms, spread, count, mhz = replay_ms(prepare(row, call), budget)
    except NotImplementedError as error:
        return {**out, "error": str(error)}
    out.update(ours_ms=ms, spread=spread, replays=count, sm_mhz=mhz, tensor_share=100 * tensor / ms, byte_share=100 * moved / ms)
    out["peak_mib"] = peak_mib(row, call)
    return out


def main(args: argparse.Namespace) -> int:
    import torch

    from qla import _ffi

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU; use --device cpu")
    rows = read_rows(find_table(args.table), args.direction, args.rows)
    device = torch.cuda.get_device_properties(0)
    call = our_call()
    wanted = [] if args.peers == "none" else list(PEERS) if args.peers == "auto" else args.peers.split(",")
    peers = [p for p in wanted if p != "flash_qla" or args.flash_qla_path]
    measured: dict[str, dict[str, dict[str, float]]] = {}
    said: list[str] = []
    for peer in peers:
        times, what = peer_process(args, peer)
        said.append(f"{peer}: {what}")
        print(said[-1])
        if times:
            measured[what.split(" (")[0] + " here"] = times

    lines = JsonLines(args.out / "cuda.jsonl", {"gpu": device.name, "build": _ffi.build_info(), "torch": torch.__version__})
    results = []
    started = time.perf_counter()
    with Bar(len(rows), "bench", 5) as bar:
        for number, row in enumerate(rows, 1):
            out = measure_row(row, call, args.budget, device.multi_processor_count)
            for name, times in measured.items():
                if row.label() in times:
                    out["known"] = {**out["known"], name: times[row.label()]["ms"]}
                    peak = f"{name.removesuffix(' here')} {times[row.label()]['peak_mib']:.0f}"
                    out["peer_mib"] = f"{out['peer_mib']}; {peak}" if "peer_mib" in out else peak
            if out["known"]:
                out["best_is"], out["best_ms"] = min(out["known"].items(), key=lambda item: item[1])
            out["ratio"] = out["best_ms"] / out["ours_ms"] if out.get("ours_ms") and out["best_ms"] else None
            if args.kernels and out.get("ours_ms"):
                out["kernels"] = kernel_times(row, call)
            results.append({**out, "gpu": device.name})
            lines.write(out)
            text = f"{out['ours_ms']:.4f} ms  ratio {out['ratio'] or float('nan'):.2f}" if out.get("ours_ms") else out["error"]
            print(f"{row.label():<48} {text}", flush=True)
            for kernel, microseconds in out.get("kernels", []):
                print(f"    {microseconds:9.1f} us  {kernel[:100]}")
            bar(number, row.label())
            torch.cuda.empty_cache()
    notes = summary(results) + said
    if args.host:
        notes.append(host_cost())
    notes.append(
        f"{len(rows)} rows in {time.perf_counter() - started:.0f} s; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, all input sets included"
    )
    print("\n" + "\n".join(notes))
    header = f"# qla bench --grid published\n\n{time.strftime('%Y-%m-%d')}, {device.name}, {_ffi.build_info()}, torch {torch.__version__}.\n\n"
    floors = (
        "Floors: 132 SMs' tensor cores at 1.75 GHz and 4.3 TB/s (docs/math.md, work and bytes), 100 % would be the floor itself. "
        "MiB: device memory of one eager call at its peak beyond its inputs, outputs included; backward rows: forward and backward.\n\n"
    )
    (args.out / "cuda.md").write_text(header + floors + "\n".join(f"- {n}" for n in notes) + "\n\n" + markdown(COLUMNS, results))
    try:
        from qla import plotting

        for direction in ("fwd", "bwd"):
            part = [r for r in results if r["pass"] == direction]
            if any(r.get("ours_ms") for r in part):
                plotting.bench_gpu_picture(
                    args.out / f"cuda_{direction}.png", part, "Forward" if direction == "fwd" else "Backward"
                )
    except ImportError:
        pass
    return 0
