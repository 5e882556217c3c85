"""`qla bench --sweep`: brute force over the planner's choices on a GPU, beside what it chose. The forward alone.

Every number of segments of the longest sequence from 2 to 64 that leaves at least four chunks each, with all of V, with halves and, where
there is such a plan, in the fused form; and each form uncut. In two stages: all plans in short bursts, then the best few of a row and the
planner's own call in turn, sustained, as the published grid is measured. A row is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

from qla.bench_grid import Row, find_table, read_rows
from qla.planbench import AUTO, FORMS, FUSED, HALVES, OWN, WHOLE, PlanBench, Planned, longest_chunks
from qla.progress import Bar

MOST_SEGMENTS, LEAST_CHUNKS = 64, 4
TOLERANCE, TOLERANCE_US = 0.10, 3.0
BURST_CALLS = 3
HOPELESS = 1.3  # a plan whose first call takes so many times the best's time is not called again
FINALISTS, CLOSE = 4, 1.12  # that many, where bursts had them so near to the best


def segment_lengths(lengths: list[int], pieces: tuple[int, ...] | list[int] | range) -> dict[int, int]:
    """pieces of the longest sequence -> chunks a segment, where each leaves at least 4 chunks; one entry a length."""
    chunks = longest_chunks(lengths)
    found: dict[int, int] = {}
    for count in pieces:
        length = math.ceil(chunks / count)
        if chunks // count >= LEAST_CHUNKS and length < chunks and length not in found.values():
            found[count] = length
    return found


def all_plans(bench: PlanBench, lengths: list[int]) -> list[Planned]:
    cuts = [0, *segment_lengths(lengths, range(2, MOST_SEGMENTS + 1)).values()]
    return [plan for form in FORMS for plan in (Planned(length, form) for length in cuts) if bench.exists(plan)]


def planners_choice(bench: PlanBench) -> Planned:
    raw = bench.plan(Planned(AUTO, OWN))
    longest = longest_chunks(bench.now.lengths)
    length = raw.segment_chunks if 0 < raw.segment_chunks < longest > raw.uncut_chunks else 0
    return Planned(length, FUSED if raw.fused else HALVES if raw.value_splits == 2 else WHOLE)


def sweep_row(bench: PlanBench, row: Row) -> dict[str, Any]:
    bench.row(row)
    own = planners_choice(bench)
    coarse: dict[Planned, float] = {}
    best = math.inf
    for plan in all_plans(bench, row.lengths):
        coarse[plan] = bench.burst(plan, BURST_CALLS, HOPELESS * best)
        best = min(best, coarse[plan])
    ranked = sorted(coarse, key=lambda plan: coarse[plan])
    finalists = [plan for plan in ranked[:FINALISTS] if coarse[plan] <= CLOSE * best]
    bench.burst(Planned(AUTO, OWN), 1)  # never captured before it has run
    times = bench.sustained([*finalists, Planned(AUTO, OWN)], guess_us=best)
    us = times.pop()
    best_plan, best_us = min(zip(finalists, times), key=lambda found: found[1])
    uncut = {form: next((t for p, t in coarse.items() if p == Planned(0, form)), None) for form in FORMS}
    return {
        "lengths": row.name,
        "heads": f"{row.heads[0]}, {row.heads[1]}",
        "uncut_us": uncut[WHOLE],
        "split_us": uncut[HALVES],
        "fused_us": uncut[FUSED],
        "best_us": best_us,
        "best_segment": best_plan.segment,
        "best_form": best_plan.form,
        "planner_us": us,
        "planner_segment": own.segment,
        "planner_form": own.form,
        "gap": us / best_us - 1,
        "good": us <= max(best_us * (1 + TOLERANCE), best_us + TOLERANCE_US),
        "known": row.known,
        "finalists": [[p.segment, p.form, round(t, 2)] for p, t in zip(finalists, times)],
        "all": [[p.segment, p.form, round(t, 2)] for p, t in sorted(coarse.items())],
    }


def sweep(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    rows: dict[tuple[str, tuple[int, int]], Row] = {}
    for row in sorted(read_rows(find_table(args.table), "fwd", args.rows), key=lambda row: (row.heads, sum(row.lengths))):
        rows.setdefault((row.name, row.heads), row)
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []

    def write() -> str:
        text = table(results, len(rows), time.perf_counter() - started)
        (args.out / "sweep.md").write_text(text)
        return text

    with PlanBench() as bench, Bar(len(rows), "rows", 5) as bar, (args.out / "sweep.jsonl").open("w") as lines:
        for row in rows.values():
            results.append(sweep_row(bench, row))
            lines.write(json.dumps(results[-1]) + "\n")
            lines.flush()
            if len(results) % 10 == 0:
                write()
            bar(len(results), row.label())
    print(write())
    try:
        from qla import plotting

        uncut = {(r["lengths"], r["heads"]): uncut_us(r) / 1e3 for r in results}
        plotting.context_parallel_picture(args.out / "context_parallel.png", results, uncut)
    except ImportError:  # no matplotlib
        pass
    return 0 if all(r["good"] for r in results) else 1


def uncut_us(r: dict[str, Any]) -> float:
    """The best form without cuts."""
    return min(filter(None, (r["uncut_us"], r["split_us"], r["fused_us"])))


def with_and_without(results: list[dict[str, Any]]) -> str:
    """Geometric means over the rows that the planner cuts."""

    def mean(ratios: list[float]) -> str:
        return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}"

    cut = [r for r in results if r["planner_segment"]]
    if not cut or not all(r["known"] for r in cut):
        return ""
    ours, without = [r["planner_us"] for r in cut], [uncut_us(r) for r in cut]
    peers = [min(r["known"].values()) * 1e3 for r in cut]
    return (
        f"Rows that the planner cuts: {len(cut)}. Geometric means over them: without cuts (best form, bursts) "
        f"{mean([a / b for a, b in zip(without, ours)])} times as long as with them; the best known peer "
        f"{mean([a / b for a, b in zip(peers, ours)])} times as long as ours with cuts, {mean([a / b for a, b in zip(peers, without)])} times "
        "without."
    )


def table(results: list[dict[str, Any]], rows: int, seconds: float) -> str:
    good = sum(r["good"] for r in results)
    worst = max(results, key=lambda r: r["gap"])
    lines = [
        "# qla bench --sweep: the planner's choice and the best of a brute-force search",
        "",
        f"{good} of {len(results)} rows within {TOLERANCE:.0%} or {TOLERANCE_US:.0f} us of the best; mean gap "
        f"{100 * sum(max(r['gap'], 0.0) for r in results) / len(results):.1f} %, largest {100 * worst['gap']:.1f} % "
        f"({worst['lengths']}, {worst['heads']}). {sum(len(r['all']) for r in results)} plans in {seconds:.0f} s."
        + (f" Interrupted: {rows - len(results)} rows were not measured." if len(results) < rows else ""),
        "",
        f"Numbers of segments of the longest sequence: all from 2 to {MOST_SEGMENTS} that leave at least {LEAST_CHUNKS} chunks and a length of "
        "their own; each with all of V, with halves, and fused where there is such a plan; each form uncut. First all in bursts of "
        f"{BURST_CALLS} calls (the three columns of uncut times); then up to {FINALISTS} that were within {CLOSE - 1:.0%} of the best there, in turn "
        "with the planner's own call: graph replays, sustained. A negative gap: the planner's own call came out ahead of the same plan. Peer: the "
        "best known time (bench/peers_h200.csv).",
        "",
        *filter(None, [with_and_without(results)]),
        "",
        "| lengths | Hk, Hv | no cut us | V split us | fused us | best us | chunks a segment, form | planner us | .. | gap % "
        "| uncut / planner | peer us | which | peer / planner | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(results, key=lambda r: -r["gap"]):
        times = " | ".join(f"{r[key]:.1f}" if r[key] else "" for key in ("uncut_us", "split_us", "fused_us", "best_us"))
        plans = [f"{r[f'{who}_segment'] or 'no cut'}, {FORMS[r[f'{who}_form']]}" for who in ("best", "planner")]
        which = min(r["known"], key=r["known"].get, default="")
        peer = f"{r['known'][which] * 1e3:.1f} | {which} | {r['known'][which] * 1e3 / r['planner_us']:.2f}" if which else " | | "
        lines.append(
            f"| {r['lengths']} | {r['heads']} | {times} | {plans[0]} | {r['planner_us']:.1f} | {plans[1]} | {100 * r['gap']:.1f} | "
            f"{uncut_us(r) / r['planner_us']:.2f} | {peer} | {'' if r['good'] else 'over'} |"
        )
    return "\n".join(lines) + "\n"
