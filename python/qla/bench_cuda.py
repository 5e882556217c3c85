"""`qla bench --grid published`: the rows that the peers publish, on this GPU, beside the hardware's floors and the peers' times."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

from qla import bench_beside
from qla.bench import JsonLines, markdown
from qla.bench_beside import Peer
from qla.bench_grid import (
    TAKEN_IN_BURSTS,
    WARM_UP_MS,
    Row,
    boundaries,
    burst_ms,
    find_table,
    floors_ms,
    make_inputs,
    peak_mib,
    prepare,
    read_rows,
    replay_ms,
)
from qla.progress import Bar


def our_call() -> Callable[..., Any]:
    import qla

    return lambda **x: qla.chunk_gated_delta_rule(**x, output_final_state=True)


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


HOST_ROUNDS, HOST_CALLS = 30, 20


def host_us(function: Callable[[], Any]) -> float:
    """Microseconds of host time a call: the median of rounds of calls without a wait, each round on an empty queue."""
    import torch

    for _ in range(HOST_CALLS):
        function()
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()  # the host never waits for room
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            function()
        rounds.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    return sorted(rounds)[HOST_ROUNDS // 2]


def empty_step(leaves: list[Any], d_o: Any) -> Callable[[], Any]:
    """Forward and backward of an autograd.Function of so many tensors that computes and allocates nothing: torch's own share."""
    import torch

    given, gradients = torch.empty_like(d_o), [torch.empty_like(x) for x in leaves]

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs)
            return given

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:  # type: ignore[override]
            _saved = ctx.saved_tensors
            return tuple(gradients)

    return lambda: torch.autograd.grad(Empty.apply(*leaves), leaves, d_o)


def host_cost() -> str:
    """Microseconds of host time a call at T = 64: eager forward, forward + backward, and a graph replay.

    Of forward + backward a good part is torch's: its engine hands the backward of CUDA tensors to a thread of its own, and what
    waking a thread takes is the machine's affair (a virtual one's above all). So an empty Function is timed beside it, and both
    once more without that thread."""
    import torch

    row = Row("fwd", "host", "64", [64], (2, 4))
    call, cu = our_call(), boundaries(row)
    plain, leaves = make_inputs(row, 0, False), make_inputs(row, 0, True)
    with torch.no_grad():
        forward = host_us(lambda: call(**plain, cu_seqlens=cu))
    d_o, wanted = torch.ones(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16), list(leaves.values())
    steps = [lambda: torch.autograd.grad(call(**leaves, cu_seqlens=cu)[0], wanted, d_o), empty_step(wanted, d_o)]
    with_thread = [host_us(step) for step in steps]
    with torch.autograd.set_multithreading_enabled(False):
        without = [host_us(step) for step in steps]
    replay = host_us(prepare(row, call)[0].replay)
    return (
        f"host cost at T 64, us: forward {forward:.1f} (limit 50), forward + backward {with_thread[0]:.1f} (limit 150), an empty "
        f"autograd.Function {with_thread[1]:.1f}; without torch's backward thread {without[0]:.1f} and {without[1]:.1f}; "
        f"graph replay {replay:.1f}"
    )


# ---- the run ----------------------------------------------------------------------------------------------------

COLUMNS = {
    "pass": "pass",
    "model": "model",
    "lengths": "lengths",
    "heads": "Hk, Hv",
    "ours_ms": "qla ms",
    "burst_ms": "qla burst ms",
    "best_ms": "known peer ms",
    "best_is": "which",
    "ratio": "known / qla so taken",
    "beside_ms": "beside ms",
    "beside_is": "which, measured here",
    "ratio_beside": "beside / qla",
    "beside_mhz": "its MHz",
    "beside_difference": "its difference",
    "beside_burst_ms": "beside burst ms",
    "tensor_share": "% of tensor floor",
    "byte_share": "% of byte floor",
    "peak_mib": "qla MiB",
    "peer_mib": "peers MiB",
    "sm_mhz": "SM MHz",
    "spread": "spread %",
}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


RATIOS = {
    "ratio": "the best known peer, ours taken as it was (in bursts or sustained)",
    "ratio_sustained": "the best known peer, ours sustained in any case",
    "ratio_beside": "the best peer measured beside it, both sustained",
    "ratio_burst": "the best peer measured beside it, both in bursts",
}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for direction, title in (("fwd", "forward"), ("bwd", "backward")):
        for key, against in RATIOS.items():
            rated = [r for r in rows if r["pass"] == direction and r.get(key)]
            for name, part in (("all rows", rated), ("sequences x value heads >= 64", [r for r in rated if r["items"] >= 64])):
                if part:
                    slower = sum(r[key] < 1 for r in part)
                    worst = min(part, key=lambda r: r[key])
                    lines.append(
                        f"{title}, {name}: geometric mean {geometric_mean([r[key] for r in part]):.3f} x {against} over {len(part)} rows; "
                        f"{slower} slower; worst {worst[key]:.2f} ({worst['model']} {worst['lengths']} {worst['heads']})"
                    )
    return lines


def columns_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Without the columns of what was not measured."""
    optional = (
        "beside_ms",
        "beside_is",
        "ratio_beside",
        "beside_mhz",
        "beside_difference",
        "beside_burst_ms",
        "peer_mib",
    )
    return {key: title for key, title in COLUMNS.items() if key not in optional or any(key in row for row in rows)}


def measure_row(
    row: Row, call: Callable[..., Any], budget: float, multiprocessors: int, peers: list[Peer], count: int
) -> dict[str, Any]:
    tensor, moved = floors_ms(row, multiprocessors)
    out: dict[str, Any] = {
        "pass": row.direction,
        "model": row.model,
        "lengths": row.name,
        "heads": f"{row.heads[0]}, {row.heads[1]}",
        "items": row.items,
        "tensor_floor_ms": tensor,
        "byte_floor_ms": moved,
        "known": row.known,
        "best_ms": None,
        "best_is": "",
        "ratio": None,
    }
    try:
        graphs = prepare(row, call)
    except NotImplementedError as error:
        return {**out, "error": str(error)}
    out["burst_ms"] = burst_ms(graphs)
    out["peak_mib"] = peak_mib(row, call)

    def sustained(first: bool) -> tuple[float, float, int, float]:
        return replay_ms(graphs, budget, 4 * WARM_UP_MS if first and peers else WARM_UP_MS)

    out.update(bench_beside.rounds(peers, row, sustained, count if peers else 1))
    out.update(tensor_share=100 * tensor / out["ours_ms"], byte_share=100 * moved / out["ours_ms"])
    if row.known:
        out.update(against_known(row.known, out["ours_ms"], out["burst_ms"]))
    bench_beside.rate(out)
    return out


def against_known(known: dict[str, float], sustained: float, burst: float) -> dict[str, Any]:
    """The known peer that is hardest to beat when ours is taken as its time was, and with ours sustained in any case."""
    ratios = {name: ms / (burst if name in TAKEN_IN_BURSTS else sustained) for name, ms in known.items()}
    best = min(ratios, key=lambda name: ratios[name])
    return {"best_is": best, "best_ms": known[best], "ratio": ratios[best], "ratio_sustained": min(known.values()) / sustained}


def main(args: argparse.Namespace) -> int:
    import torch

    from qla import _ffi

    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU, and the published rows are a GPU's; `qla bench` alone measures the CPU")
    least, most = args.items or (0, 10**9)
    rows = [r for r in read_rows(find_table(args.table), args.direction, args.rows) if least <= r.items <= most]
    if not rows:
        raise ValueError(f"--items: no row has {least} to {most} sequences x value heads")
    device = torch.cuda.get_device_properties(0)
    call = our_call()
    peers = bench_beside.wanted(args)
    for peer in peers:
        print(f"{peer.name}: {peer.what}", flush=True)

    stem = "beside" if any(peer.alive for peer in peers) else "cuda"
    lines = JsonLines(args.out / f"{stem}.jsonl", {"gpu": device.name, "build": _ffi.build_info(), "torch": torch.__version__})
    results = []
    started = time.perf_counter()
    with Bar(len(rows), "bench", 5) as bar:
        for number, row in enumerate(rows, 1):
            out = measure_row(row, call, args.budget, device.multi_processor_count, peers, args.rounds)
            if args.kernels and out.get("ours_ms"):
                out["kernels"] = kernel_times(row, call)
            results.append({**out, "gpu": device.name})
            lines.write(out)
            text = f"{out['ours_ms']:.4f} ms  ratio {out['ratio'] or float('nan'):.2f}" if out.get("ours_ms") else out["error"]
            for name, one in out.get("beside", {}).items():
                text += f"  | {name} " + (f"{one['ms']:.4f}, differs {one['difference']:.1g}" if "ms" in one else one["refused"])
            print(f"{row.label():<48} {text}", flush=True)
            for kernel, microseconds in out.get("kernels", []):
                print(f"    {microseconds:9.1f} us  {kernel[:100]}")
            bar(number, row.label())
            torch.cuda.empty_cache()
    for peer in peers:
        peer.close()
    notes = summary(results)
    notes += [f"{peer.name}: {peer.named}" for peer in peers]  # without the path that was printed: it is this machine's
    if args.host:
        notes.append(host_cost())
    notes.append(
        f"{len(rows)} rows in {time.perf_counter() - started:.0f} s; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, all input sets included"
    )
    print("\n" + "\n".join(notes))
    header = f"# qla bench --grid published\n\n{time.strftime('%Y-%m-%d')}, {device.name}, {_ffi.build_info()}, torch {torch.__version__}.\n\n"
    floors = (
        "Floors: 132 SMs' tensor cores at 1.75 GHz and 4.3 TB/s (docs/math.md, work and bytes), 100 % would be the floor itself. "
        "MiB: device memory of one eager call at its peak beyond its inputs, outputs included; backward rows: forward and backward. "
        "Times are sustained unless they say burst (docs/bench/README.md). Known: bench/peers_h200.csv; ours is taken as that column was, in bursts for "
        + ", ".join(TAKEN_IN_BURSTS)
        + ". Beside: measured here, in turn with ours, in a process of its own on the same inputs; its difference: from our results, relative, r.m.s.\n\n"
    )
    (args.out / f"{stem}.md").write_text(
        header + floors + "\n".join(f"- {n}" for n in notes) + "\n\n" + markdown(columns_of(results), results)
    )
    try:
        from qla import plotting

        for direction in ("fwd", "bwd"):
            part = [r for r in results if r["pass"] == direction]
            if any(r.get("ours_ms") for r in part):
                plotting.bench_gpu_picture(
                    args.out / f"{stem}_{direction}.png", part, "Forward" if direction == "fwd" else "Backward"
                )
    except ImportError:
        pass
    return 0
