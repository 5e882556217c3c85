"""Brute force over the planner's choices on a GPU: every number of segments, with and without V split, beside what it chose.

The forward alone. A segment length is given by a fixed plan; whether V is split is not the caller's to say, so each of both has a
process of its own whose cost model (QLA_COSTS) makes the other prohibitive. Times are medians of a few graph replays right after each
other: bursts at full clock, good for comparing plans of one row, not for comparing with other tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qla.bench_grid import Row, boundaries, find_table, lengths_of, make_inputs, read_rows, set_count

GEOMETRIC = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_CHUNKS = 4
TOLERANCE, TOLERANCE_US = 0.10, 3.0
FORCED = {1: "main_half 1e6\nmain_half_quiet 1e6\n", 2: "main_full 1e6\nmain_full_quiet 1e6\nfused 1e6\n", 0: ""}


def longest_chunks(lengths: list[int]) -> int:
    return math.ceil(max(lengths) / 64)


def segment_lengths(lengths: list[int], pieces: tuple[int, ...] | list[int]) -> dict[int, int]:
    """pieces of the longest sequence -> chunks a segment, where each leaves at least 4 chunks; one entry a length."""
    chunks = longest_chunks(lengths)
    found: dict[int, int] = {}
    for count in pieces:
        length = math.ceil(chunks / count)
        if chunks // count >= LEAST_CHUNKS and length < chunks and length not in found.values():
            found[count] = length
    return found


# ---- the measuring process --------------------------------------------------------------------------------------


class Measured:
    """One row's input sets, and the time of a call with any plan."""

    def __init__(self, row: Row, sets: int, budget_ms: float) -> None:
        import torch

        self.row, self.budget_ms = row, budget_ms
        self.inputs = [make_inputs(row, seed, False) for seed in range(min(sets, set_count(row)))]
        self.cu = boundaries(row)
        self.side = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def call(self, inputs: dict[str, Any], segment_chunks: int | None) -> Any:
        """segment_chunks: None is the planner's own choice, 0 no cut."""
        import qla
        from qla import _ffi, api

        policy = api.cp_policy
        if segment_chunks is not None:
            fixed = (_ffi.CP_FIXED, segment_chunks) if segment_chunks else (_ffi.CP_OFF, 0)
            api.cp_policy = lambda auto_cp: fixed
        try:
            return qla.chunk_gated_delta_rule(**inputs, cu_seqlens=self.cu, output_final_state=True)
        finally:
            api.cp_policy = policy

    def us(self, segment_chunks: int | None) -> float:
        import torch

        graphs, keep = [], []
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self.side):
            self.call(self.inputs[0], segment_chunks)
            for inputs in self.inputs:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self.pool)  # torch.cuda.graph() would collect garbage and empty caches each time
                try:
                    keep.append(self.call(inputs, segment_chunks))
                finally:
                    graph.capture_end()
                graphs.append(graph)
        torch.cuda.current_stream().wait_stream(self.side)

        def event() -> Any:
            made = torch.cuda.Event(enable_timing=True)
            made.record()
            return made

        begin = event()
        for graph in graphs:
            graph.replay()
        end = event()
        end.synchronize()
        once = begin.elapsed_time(end) / len(graphs)
        count = max(3 * len(graphs), min(60, int(self.budget_ms / max(once, 1e-3))))
        torch.cuda._sleep(200_000)
        for graph in graphs:
            graph.replay()
        events = [event()]
        for i in range(count):
            graphs[i % len(graphs)].replay()
            events.append(event())
        events[-1].synchronize()
        times = sorted(events[i].elapsed_time(events[i + 1]) for i in range(count))
        return times[count // 2] * 1e3


def worker() -> int:
    """Reads one JSON object a line {lengths, heads, pieces, refine}; writes {"us": {segment chunks: microseconds}} a line."""
    import torch

    with torch.no_grad():
        for line in sys.stdin:
            task = json.loads(line)
            row = Row("fwd", "", "", task["lengths"], tuple(task["heads"]), {}, None, "")
            measured = Measured(row, task.get("sets", 2), task.get("budget_ms", 3.0))
            us: dict[str, float] = {}
            for length in task["segments"]:
                us[str(length)] = min(measured.us(length), us.get(str(length), math.inf))
            if task.get("refine") and len(us) > 1:
                chunks = longest_chunks(row.lengths)
                best = min((key for key in us if key not in ("0", "None")), key=lambda key: us[key])
                count = math.ceil(chunks / int(best))
                near = [count + d * max(1, count // 8) for d in (-2, -1, 1, 2)]
                for length in segment_lengths(row.lengths, [n for n in near if n >= 2]).values():
                    if str(length) not in us:
                        us[str(length)] = measured.us(length)
            del measured
            torch.cuda.empty_cache()
            print(json.dumps({"us": us}), flush=True)
    return 0


def measure(tasks: list[dict[str, Any]], splits: int, deadline_s: float = 600.0) -> list[dict[int | None, float]]:
    """All tasks in one process whose planner takes V whole (1), in halves (2) or as it likes (0)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k != "QLA_COSTS" or splits == 0}
        if FORCED[splits]:
            costs = Path(folder) / "costs"
            costs.write_text(FORCED[splits])
            environment["QLA_COSTS"] = str(costs)
        package = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "qla.sweep"],
            input="".join(json.dumps(task) + "\n" for task in tasks),
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
    lines = [json.loads(line)["us"] for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) != len(tasks):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"measuring process: {len(lines)} of {len(tasks)} rows: {last}")
    return [{None if k == "None" else int(k): v for k, v in line.items()} for line in lines]


# ---- qla bench --sweep ------------------------------------------------------------------------------------------


def sweep(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    rows: dict[tuple[str, tuple[int, int]], Row] = {}
    for row in read_rows(find_table(args.table), "fwd", args.rows):
        rows.setdefault((row.name, row.heads), row)
    base = [{"lengths": r.lengths, "heads": r.heads} for r in rows.values()]
    cuts = [[0, *segment_lengths(r.lengths, GEOMETRIC).values()] for r in rows.values()]
    forced = {s: measure([{**t, "segments": c, "refine": True} for t, c in zip(base, cuts)], s) for s in (1, 2)}
    # The planner's own plan last, and once more where it looks bad: a stray slow run is not its fault.
    chosen = measure([{**t, "segments": [None, None]} for t in base], 0)
    results = []
    for row, whole, halves, auto in zip(rows.values(), forced[1], forced[2], chosen):
        every = {(l, s): us for s, found in ((1, whole), (2, halves)) for l, us in found.items()}
        (length, splits), best = min(every.items(), key=lambda item: item[1])
        us = auto[None]
        results.append(
            {
                "lengths": row.name,
                "heads": f"{row.heads[0]}, {row.heads[1]}",
                "uncut_us": whole[0],
                "split_us": halves[0],
                "best_us": best,
                "best_segment": length,
                "best_splits": splits,
                "planner_us": us,
                "gap": us / best - 1,
                "good": us <= max(best * (1 + TOLERANCE), best + TOLERANCE_US),
                "known": row.known,
                "all": [[l, s, round(t, 2)] for (l, s), t in sorted(every.items())],
            }
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "sweep.jsonl").open("w") as f:
        f.writelines(json.dumps(r) + "\n" for r in results)
    text = table(results, time.perf_counter() - started)
    (args.out / "sweep.md").write_text(text)
    print(text)
    try:
        from qla import plotting

        plotting.context_parallel_picture(args.out / "context_parallel.png", results)
    except ImportError:  # no matplotlib
        pass
    return 0 if all(r["good"] for r in results) else 1


def table(results: list[dict[str, Any]], seconds: float) -> str:
    good = sum(r["good"] for r in results)
    worst = max(results, key=lambda r: r["gap"])
    lines = [
        "# qla bench --sweep: the planner's choice and the best of a brute-force search",
        "",
        f"{good} of {len(results)} rows within {TOLERANCE:.0%} or {TOLERANCE_US:.0f} us of the best; mean gap "
        f"{100 * sum(max(r['gap'], 0.0) for r in results) / len(results):.1f} %, largest {100 * worst['gap']:.1f} % "
        f"({worst['lengths']}, {worst['heads']}). {sum(len(r['all']) for r in results)} plans in {seconds:.0f} s.",
        "",
        f"Numbers of segments tried: {', '.join(map(str, GEOMETRIC))}, and four neighbours of the best, where each leaves at least "
        f"{LEAST_CHUNKS} chunks; each with all of V and with halves. Bursts of few replays: for comparing plans of one row.",
        "",
        "| lengths | Hk, Hv | no cut us | V split us | best us | segment chunks | halves of V | planner us | gap % | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(results, key=lambda r: -r["gap"]):
        lines.append(
            f"| {r['lengths']} | {r['heads']} | {r['uncut_us']:.1f} | {r['split_us']:.1f} | {r['best_us']:.1f} | {r['best_segment'] or 'no cut'} | "
            f"{'yes' if r['best_splits'] == 2 else 'no'} | {r['planner_us']:.1f} | {100 * r['gap']:.1f} | {'' if r['good'] else 'over'} |"
        )
    return "\n".join(lines) + "\n"


__all__ = ["lengths_of", "measure", "segment_lengths", "sweep"]

if __name__ == "__main__":
    sys.exit(worker())
