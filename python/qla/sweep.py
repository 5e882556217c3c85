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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qla.bench_grid import (
    Row,
    boundaries,
    find_table,
    lengths_of,
    make_inputs,
    read_rows,
    replay_events,
    replay_once,
    set_count,
    times_between,
)
from qla.progress import Bar

GEOMETRIC = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_CHUNKS = 4
TOLERANCE, TOLERANCE_US = 0.10, 3.0
WORSE = 1.15  # two numbers of segments in a row this much slower than the best: more of them are not tried
# What keeps the planner from all but one form: all of V, halves, the fused form (never cut), or 0: as it likes.
NO_FUSED = "fused_4 1e6\nfused_2 1e6\nfused_1 1e6\nfused_quiet 1e6\n"
NO_WHOLE, NO_HALVES = "main_full 1e6\nmain_full_quiet 1e6\n", "main_half 1e6\nmain_half_quiet 1e6\n"
FUSED = 3
FORMS = {1: "whole", 2: "halves", FUSED: "fused"}
FORCED = {0: "", 1: NO_FUSED + NO_HALVES, 2: NO_FUSED + NO_WHOLE, FUSED: NO_WHOLE + NO_HALVES}


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

    inputs: list[dict[str, Any]]

    def __init__(self, row: Row, sets: int, budget_ms: float, before: Measured | None = None) -> None:
        """before: the row measured last, whose inputs serve again where tokens and heads are the same."""
        import torch

        self.row, self.budget_ms = row, budget_ms
        if before and (sum(before.row.lengths), before.row.heads) == (sum(row.lengths), row.heads):
            state = torch.randn(len(row.lengths), row.heads[1], 128, 128, device="cuda")
            self.inputs = [{**inputs, "initial_state": state} for inputs in before.inputs]
        else:
            if before:
                before.inputs = []
                torch.cuda.empty_cache()
            self.inputs = [make_inputs(row, seed, False) for seed in range(min(sets, set_count(row)))]
        self.cu = boundaries(row)
        self.side = torch.cuda.Stream()
        # One pool of memory for all plans' graphs; this graph stays, so that the pool does when those of a plan have gone.
        self.pool, self.holder = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.side):
            self.holder.capture_begin(pool=self.pool)
            try:
                torch.zeros(1, device="cuda")
            finally:
                self.holder.capture_end()

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

        once = replay_once(graphs)
        count = max(5, min(60, int(self.budget_ms / once)))
        torch.cuda._sleep(200_000)
        for graph in graphs:
            graph.replay()
        events = replay_events(graphs, count)
        events[-1].synchronize()
        return times_between(events)[count // 2] * 1e3


def worker() -> int:
    """Reads one JSON object a line {lengths, heads, segments, ..}; writes {"us": [[segment chunks, microseconds], ..]} a line."""
    import torch

    measured: Measured | None = None
    with torch.no_grad():
        for line in sys.stdin:
            task = json.loads(line)
            row = Row("fwd", "", "", task["lengths"], tuple(task["heads"]), {}, None, "")
            measured = Measured(row, task.get("sets", 2), task.get("budget_ms", 2.0), measured)
            us: dict[int | None, float] = {}
            worse = 0
            for length in task["segments"]:  # longest segments first
                us[length] = measured.us(length)
                worse = worse + 1 if us[length] > WORSE * min(us.values()) else 0
                if worse == 2 and task.get("prune"):
                    break
            for length in task.get("always", ()):
                if length not in us:
                    us[length] = measured.us(length)
            cut = [length for length in us if length]
            if task.get("refine") and cut and min(us[length] for length in cut) < WORSE * min(us.values()):
                best = min(cut, key=lambda length: us[length])
                count = math.ceil(longest_chunks(row.lengths) / best)
                near = [count + d * max(1, count // 8) for d in (-2, -1, 1, 2)]
                for length in segment_lengths(row.lengths, [n for n in near if n >= 2]).values():
                    if length not in us:
                        us[length] = measured.us(length)
            print(json.dumps({"us": list(us.items())}), flush=True)
    return 0


def measure(
    tasks: list[dict[str, Any]], splits: int, progress: Callable[[dict[str, Any], dict[int | None, float]], None] | None = None
) -> list[dict[int | None, float]]:
    """All tasks in one process whose planner takes V whole (1), in halves (2) or as it likes (0)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k != "QLA_COSTS" or splits == 0}
        if FORCED[splits]:
            costs = Path(folder) / "costs"
            costs.write_text(FORCED[splits])
            environment["QLA_COSTS"] = str(costs)
        package = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        words = Path(folder) / "stderr"
        found: list[dict[int | None, float]] = []
        with (
            words.open("w") as errors,
            subprocess.Popen(
                [sys.executable, "-m", "qla.sweep"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            ) as process,
        ):
            assert process.stdin and process.stdout
            for task in tasks:
                try:
                    process.stdin.write(json.dumps(task) + "\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    break
                line = process.stdout.readline()
                while line and not line.startswith("{"):
                    line = process.stdout.readline()
                if not line:
                    break
                found.append(dict(map(tuple, json.loads(line)["us"])))
                if progress:
                    progress(task, found[-1])
            process.stdin.close()
        last = (words.read_text().strip().splitlines() or ["no output"])[-1]
    if len(found) != len(tasks):
        raise ValueError(f"measuring process: {len(found)} of {len(tasks)} rows: {last}")
    return found


# ---- qla bench --sweep ------------------------------------------------------------------------------------------


def planners_choice(row: Row) -> tuple[int, int]:
    """-> (chunks a segment, 0 where the planner does not cut; form), from shapes alone as in a call."""
    from qla import planview

    raw = planview.make_plan(row.lengths, row.heads, "bf16", "cuda").raw
    length = raw.segment_chunks if raw.segment_chunks < longest_chunks(row.lengths) else 0
    return length, FUSED if raw.fused else raw.value_splits


def measure_and_keep(tasks: list[dict[str, Any]], splits: int, out: Path) -> list[dict[int | None, float]]:
    """measure(), with a bar and a file of what is known so far: an interrupted run loses nothing."""
    done = 0
    with Bar(len(tasks), f"V in {splits}", 5) as bar, (out / f"sweep_{splits}.jsonl").open("w") as raw:

        def progress(task: dict[str, Any], us: dict[int | None, float]) -> None:
            nonlocal done
            done += 1
            bar(done, str(task["heads"]))
            raw.write(json.dumps({**task, "splits": splits, "us": list(us.items())}) + "\n")
            raw.flush()

        return measure(tasks, splits, progress)


def sweep(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    rows: dict[tuple[str, tuple[int, int]], Row] = {}
    for row in sorted(read_rows(find_table(args.table), "fwd", args.rows), key=lambda row: (row.heads, sum(row.lengths))):
        rows.setdefault((row.name, row.heads), row)
    chosen = [planners_choice(r) for r in rows.values()]
    args.out.mkdir(parents=True, exist_ok=True)
    forced: dict[int, list[dict[int | None, float]]] = {}
    for form in (1, 2, FUSED):
        tasks = [
            {
                "lengths": r.lengths,
                "heads": r.heads,
                "segments": [0, *(segment_lengths(r.lengths, GEOMETRIC).values() if form != FUSED else ())],
                "always": [length] if own == form else [],
                "prune": True,
                "refine": True,
            }
            for r, (length, own) in zip(rows.values(), chosen)
        ]
        forced[form] = measure_and_keep(tasks, form, args.out)
    results: list[dict[str, Any]] = []
    for number, (row, (length, form)) in enumerate(zip(rows.values(), chosen)):
        every = {(chunks or 0, f): us for f, found in forced.items() for chunks, us in found[number].items()}
        (best_length, best_form), best = min(every.items(), key=lambda item: item[1])
        us = every[length, form]
        results.append(
            {
                "lengths": row.name,
                "heads": f"{row.heads[0]}, {row.heads[1]}",
                "uncut_us": every[0, 1],
                "split_us": every[0, 2],
                "fused_us": every[0, FUSED],
                "best_us": best,
                "best_segment": best_length,
                "best_form": best_form,
                "planner_us": us,
                "planner_segment": length,
                "planner_form": form,
                "gap": us / best - 1,
                "good": us <= max(best * (1 + TOLERANCE), best + TOLERANCE_US),
                "known": row.known,
                "all": [[chunks, s, round(t, 2)] for (chunks, s), t in sorted(every.items())],
            }
        )
    with (args.out / "sweep.jsonl").open("w") as f:
        f.writelines(json.dumps(r) + "\n" for r in results)
    text = table(results, time.perf_counter() - started)
    (args.out / "sweep.md").write_text(text)
    print(text)
    try:
        from qla import plotting

        uncut = {(r["lengths"], r["heads"]): min(r["uncut_us"], r["split_us"], r["fused_us"]) / 1e3 for r in results}
        plotting.context_parallel_picture(args.out / "context_parallel.png", results, uncut)
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
        f"Numbers of segments of the longest sequence: {', '.join(map(str, GEOMETRIC))} where each leaves at least {LEAST_CHUNKS} chunks, "
        f"no more once two in a row are {100 * (WORSE - 1):.0f} % behind the best, then four neighbours of the best; each with all of V "
        "and with halves; the fused form uncut. Bursts of few replays at full clock: for comparing plans of one row.",
        "",
        "| lengths | Hk, Hv | no cut us | V split us | fused us | best us | chunks a segment, form | planner us | .. | gap % | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(results, key=lambda r: -r["gap"]):
        times = " | ".join(f"{r[key]:.1f}" for key in ("uncut_us", "split_us", "fused_us", "best_us"))
        plans = [f"{r[f'{who}_segment'] or 'no cut'}, {FORMS[r[f'{who}_form']]}" for who in ("best", "planner")]
        lines.append(
            f"| {r['lengths']} | {r['heads']} | {times} | {plans[0]} | {r['planner_us']:.1f} | {plans[1]} | {100 * r['gap']:.1f} | "
            f"{'' if r['good'] else 'over'} |"
        )
    return "\n".join(lines) + "\n"


__all__ = ["lengths_of", "measure", "segment_lengths", "sweep"]

if __name__ == "__main__":
    sys.exit(worker())
