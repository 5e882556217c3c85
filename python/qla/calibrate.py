"""`qla calibrate`: measures the constants of the planner's cost model on this GPU and writes them for QLA_COSTS.

The model (src/plan/model.hpp) is linear in its constants once it is known which items run together; so are its coefficients here, and one
non-negative least-squares fit over some eighty calls, relative errors weighted alike, gives all constants the forward has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from qla.bench_grid import Row
from qla.planbench import FUSED, PlanBench, Planned

# as in src/plan/model.hpp and costs.hpp
ASSUMED_WARMUP, ASSUMED_EXACT_SHARE, ASSUMED_FORGETTING, MOST_ROUNDS, TAIL, QUIET_SHARE = 4, 0.25, 13, 12.0, 0.3, 0.75
SEGMENT_ENDS, WARM_FROM, WARM_TO = 0.283, 0.5, 0.9
DIRECT_CHUNKS, DIRECT_LAUNCH = 40, 14.0
DIRECT_CHUNKS_OF_ROUNDS, DIRECT_SEQUENCES, DIRECT_ROUNDS, DIRECT_ROUNDS_LAUNCH = 72, 32, 4, 3.5
MERGE_SMS = 4
SHIPPED = {
    "main_full": 1.505, "main_half": 0.934, "main_full_quiet": 1.487, "main_half_quiet": 0.979, "state_half": 0.727,
    "intra_4": 0.962, "intra_2": 1.176, "intra_1": 1.99, "merge": 0.8, "item": 5.58, "launches": 14.7, "packed": 3.73, "cut": 8.2,
    "cut_item": 0.0376, "fused_4": 2.34, "fused_2": 2.39, "fused_1": 2.52, "fused_quiet": 2.34, "intra_launch": 0.5,
    "fused_cut": 2.14, "cut_fused": 12.6,
}  # fmt: skip

# lengths, heads, segment lengths in chunks (0: no cut); each with and without V split
CASES: list[tuple[list[int], tuple[int, int], list[int]]] = [
    ([2048], (2, 8), [0, 8]),
    ([8192], (2, 8), [0, 8, 16, 32]),
    ([32768], (2, 8), [22, 32, 64]),
    ([8192], (4, 16), [0, 16, 32]),
    ([32768], (4, 16), [64, 128]),
    ([32768], (8, 32), [0, 128]),
    ([16384], (16, 16), [16, 64]),
    ([8192], (32, 32), [32]),
    ([8192], (16, 32), [0, 32]),
    ([16384], (32, 32), [0, 64]),
    ([8192] * 4, (2, 8), [0]),
    ([2048] * 4, (4, 16), [0]),
    ([1024] * 8, (2, 8), [0]),
    ([1024] * 8, (16, 16), [0]),
    ([4096] * 8, (16, 32), [0]),
    ([8192] * 4, (16, 64), [0]),
    ([8192] * 4, (32, 32), [0]),
    ([12288, 4096], (4, 16), [0, 32]),
    ([16384, 16384], (16, 32), [0, 128]),
]


class Walk(NamedTuple):
    """What a multiprocessor does, in constants of the model."""

    chunks: float = 0.0
    items: float = 0.0  # an item's ends
    merges: float = 0.0  # steps that it waits for

    def plus(self, other: Walk, times: float = 1.0) -> Walk:
        return Walk(*(a + times * b for a, b in zip(self, other)))


def makespan(groups: list[tuple[float, Walk]], each: Callable[[Walk], float], sms: int) -> Walk:
    """Of the slowest multiprocessor. groups: (how many, what each does); each: its microseconds."""
    groups = [(n, walk) for n, walk in groups if n > 0]
    if not groups:
        return Walk()
    count = sum(n for n, _ in groups)
    longest = max((walk for _, walk in groups), key=each)
    if count <= sms:
        return longest
    total = Walk()
    for n, walk in groups:
        total = total.plus(walk, n)
    if count <= MOST_ROUNDS * sms:  # item by item, the longest first, to the multiprocessor that is free first
        free = [(0.0, float(sms), Walk())]  # when, how many, what they have done
        for left, walk in sorted(groups, key=lambda group: -each(group[1])):
            while left > 0:
                at, many, done = free.pop(0)
                now = min(left, many)
                left -= now
                if now < many:
                    free.insert(0, (at, many - now, done))
                free.append((at + each(walk), now, done.plus(walk)))
                free.sort()
        return free[-1][2]
    if each(total) / sms + TAIL * each(longest) < each(longest):
        return longest
    return Walk().plus(total, 1.0 / sms).plus(longest, TAIL)


def chunk_constants(form: int, sharing: str, rounds: float, share: float, cut: bool) -> dict[str, float]:
    """What a chunk of the main pass costs, in constants; rounds: items a multiprocessor, share: chunks a multiprocessor."""
    if form == FUSED:
        limit, warm = 0.1, float(rounds > QUIET_SHARE)
    else:
        limit, warm = 0.19, min(1.0, max(0.0, (rounds - WARM_FROM) / (WARM_TO - WARM_FROM)))
    power = 1.0 + limit * warm * min(1.0, share / 128.0)
    if form != FUSED:
        name, busy = "main_half" if form == 2 else "main_full", min(1.0, rounds)
        return {name: busy * power, name + "_quiet": (1.0 - busy) * power}
    whole = int(rounds)
    if cut:
        return {"fused_cut": power}
    if rounds <= QUIET_SHARE:
        return {"fused_quiet": 1.0}
    if 0.0 < rounds - whole <= QUIET_SHARE and whole <= 3:  # a last round that leaves much of the card idle
        return {f"fused_{sharing}": whole * power / (whole + 1.0), "fused_quiet": 1.0 / (whole + 1.0)}
    return {f"fused_{sharing}": power}


def coefficients(
    lengths: list[int],
    heads: tuple[int, int],
    segment: int,
    form: int,
    sms: int,
    costs: dict[str, float],
    lasting: bool = False,
) -> dict[str, float]:
    """How often each constant enters the predicted time of a forward call; costs say only which walk is the longest. form: parts of
    V (1 or 2), or the fused form. lasting: with what the model adds for a card at its limit of power, which bursts
    do not meet."""
    hk, hv = heads
    chunks = [math.ceil(n / 64) for n in lengths]
    pieces = [max(1, math.ceil(c / segment)) if segment else 1 for c in chunks]
    exact = int(hv * ASSUMED_EXACT_SHARE + 0.5)
    splits, group = (2 if form == 2 else 1), hv // hk
    items = sum(pieces) * hv * splits
    sharing = "4" if group >= 4 else "2" if group >= 2 else "1"
    each = chunk_constants(form, sharing, items / sms, sum(chunks) * hv / sms if lasting else 0.0, segment > 0)
    per_chunk = sum(times * costs[name] for name, times in each.items())
    main: list[tuple[float, Walk]] = []
    pre: list[tuple[float, Walk]] = []
    chain = max((p - 1 for p in pieces), default=0) if exact else 0
    chains = exact * sum(p > 1 for p in pieces)
    free = items - exact * splits * sum(p - 1 for p in pieces)
    hidden = free - splits * len(lengths) * hv <= sms - MERGE_SMS * chains
    for c, p in zip(chunks, pieces):
        length = math.ceil(c / p)
        ends = 1.0 if p == 1 else SEGMENT_ENDS
        main.append((hv * splits, Walk(length, ends)))
        if p == 1:
            continue
        main.append((exact * splits * (p - 1), Walk(length, ends, p - 1 if hidden else 0)))
        main.append(((hv - exact) * splits * (p - 1), Walk(length + ASSUMED_WARMUP, ends)))
        pre.append((exact * 2 * (2 * (p - 1) - 1), Walk(length)))
        early = min(p - 1, (ASSUMED_FORGETTING - 1) // segment)
        pre.append(((hv - exact) * 2 * (2 * early - 1), Walk(length)))
    walked = makespan(main, lambda walk: walk.chunks * per_chunk + walk.items * costs["item"] + walk.merges * costs["merge"], sms)
    before = makespan(pre, lambda walk: walk.chunks * costs["state_half"], sms)
    intra = sum(chunks) * hv / sms
    stage = {f"intra_{sharing}": intra}
    if form == FUSED:  # cut: of the heads that merge
        stage = {f"intra_{sharing}": intra * exact / hv} if max(pieces) > 1 else {"intra_launch": -1.0}
    return {
        "launches": 1.0,
        **stage,
        "packed": float(len(lengths) > 1),
        "cut_fused" if form == FUSED else "cut": float(segment > 0),
        "cut_item": items / splits if max(pieces) > 1 else 0.0,
        **{name: times * walked.chunks for name, times in each.items()},
        "item": walked.items,
        "state_half": before.chunks,
        "merge": walked.merges + (0 if hidden else chain),
    }


def direct_saving(lengths: list[int], heads: tuple[int, int], segment: int, form: int, sms: int) -> float:
    """Microseconds that a direct launch of the fused form saves: no constant of a device."""
    sequences, items, slots = len(lengths), len(lengths) * heads[1], sum(lengths) // 64 + len(lengths)
    if form != FUSED or segment:
        return 0.0
    if items <= sms:
        return DIRECT_LAUNCH if slots <= DIRECT_CHUNKS * sequences and max(lengths) <= 64 * DIRECT_CHUNKS else 0.0
    several = sequences <= DIRECT_SEQUENCES and items <= DIRECT_ROUNDS * sms
    return DIRECT_ROUNDS_LAUNCH if several and slots * heads[1] <= DIRECT_CHUNKS_OF_ROUNDS * sms else 0.0


def non_negative_fit(matrix: Any, right: Any) -> Any:
    """Least squares with no negative coefficient: the active set of Lawson and Hanson."""
    import numpy

    columns = matrix.shape[1]
    kept = numpy.zeros(columns, dtype=bool)
    x = numpy.zeros(columns)
    for _ in range(10 * columns):
        gradient = matrix.T @ (right - matrix @ x)
        candidates = numpy.where(~kept & (gradient > 1e-9))[0]
        if len(candidates) == 0:
            break
        kept[candidates[numpy.argmax(gradient[candidates])]] = True
        while True:
            trial = numpy.zeros(columns)
            trial[kept] = numpy.linalg.lstsq(matrix[:, kept], right, rcond=None)[0]
            if (trial[kept] > 0).all():
                x = trial
                break
            falling = kept & (trial <= 0)
            step = min(x[falling] / (x[falling] - trial[falling]))
            x = x + step * (trial - x)
            kept &= x > 1e-12
            x[~kept] = 0.0
    return x


def fit(samples: list[dict[str, Any]], sms: int, start: dict[str, float]) -> tuple[dict[str, float], float, float]:
    """-> constants, root mean square and largest relative error. samples: lengths, heads, segment, form, us."""
    import numpy

    names, costs = list(start), dict(start)
    worst = rms = 0.0
    for _ in range(4):  # which walk is the longest depends, a little, on the constants
        rows = [coefficients(s["lengths"], s["heads"], s["segment"], s["form"], sms, costs) for s in samples]
        whole = [s["us"] + direct_saving(s["lengths"], s["heads"], s["segment"], s["form"], sms) for s in samples]
        matrix = numpy.array([[row.get(name, 0.0) / us for name in names] for row, us in zip(rows, whole)])
        seen = numpy.abs(matrix).sum(axis=0) > 0  # a constant that no sample has keeps its value
        found = non_negative_fit(matrix[:, seen], numpy.ones(len(samples)))
        costs.update(dict(zip([n for n, s in zip(names, seen) if s], map(float, found))))
        errors = matrix[:, seen] @ found - 1
        rms, worst = float(numpy.sqrt((errors**2).mean())), float(numpy.abs(errors).max())
    return costs, rms, worst


def without_calls(samples: list[dict[str, Any]], sms: int, costs: dict[str, float]) -> list[str]:
    """The constants that no sample has: fit() keeps them."""
    rows = [coefficients(s["lengths"], s["heads"], s["segment"], s["form"], sms, costs) for s in samples]
    return [name for name in costs if not any(row.get(name, 0.0) for row in rows)]


def make_folders(args: argparse.Namespace) -> None:
    for path in filter(None, (args.out, args.keep)):
        path.parent.mkdir(parents=True, exist_ok=True)


def count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def is_sample(row: Any) -> bool:
    if not isinstance(row, dict) or not {"lengths", "heads", "segment", "form", "us"} <= row.keys():
        return False
    lengths, heads, us = row["lengths"], row["heads"], row["us"]
    return (
        isinstance(lengths, list)
        and len(lengths) > 0
        and all(count(n, 1) for n in lengths)
        and isinstance(heads, list)
        and len(heads) == 2
        and all(count(n, 1) for n in heads)
        and heads[1] % heads[0] == 0
        and count(row["segment"], 0)
        and row["form"] in (1, 2, FUSED)
        and type(us) in (int, float)
        and 0 < us < math.inf
    )


def read_samples(path: Path) -> list[dict[str, Any]]:
    advice = "`qla calibrate --keep FILE` writes such a file on a GPU"
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not is_sample(row):
            shown = line if len(line) <= 60 else line[:60] + " .."
            raise ValueError(
                f'--samples: {path}:{number}: expected a call, {{"lengths": [8192], "heads": [2, 8], "segment": 16, "form": 1, "us": 100.5}} '
                f"(segment: chunks, 0 uncut; form: 1 whole, 2 halves of V, {FUSED} fused), got {shown!r}; {advice}"
            )
        samples.append(row)
    if not samples:
        raise ValueError(f"--samples: expected a line for each call, got the empty file {path}; {advice}")
    return samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("qla_costs.txt"),
        help="the file to write, with its folder; QLA_COSTS then names it (default qla_costs.txt)",
    )
    parser.add_argument(
        "--samples",
        type=Path,
        help="fit these JSON lines (lengths, heads, segment, form, us) and measure nothing; constants that none of them has are kept as shipped",
    )
    parser.add_argument("--keep", type=Path, help="also write what was measured, as JSON lines")
    parser.add_argument("--multiprocessors", type=int, help="with --samples: of the device they come from (default 132)")


def take_samples() -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    with PlanBench() as bench:
        for lengths, heads, segments in CASES:
            bench.row(Row("fwd", "", "", lengths, heads))
            for plan in [Planned(segment, form) for form in (1, 2, FUSED) for segment in segments]:
                if bench.exists(plan):
                    us = bench.burst(plan, 20)
                    samples.append({"lengths": lengths, "heads": heads, "segment": plan.segment, "form": plan.form, "us": us})
    return samples


def main(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    if args.multiprocessors is not None and not args.samples:
        raise ValueError(
            "--multiprocessors: expected with --samples, got it alone; without --samples the GPU at hand says how many it has"
        )
    if args.multiprocessors is not None and args.multiprocessors < 1:
        raise ValueError(f"--multiprocessors: expected 1 or more, got {args.multiprocessors}; an H200 has 132")
    for module in ("numpy",) if args.samples else ("torch", "numpy"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"needs {module} ({error}): pip install {module}") from error
    if args.samples:
        samples = read_samples(args.samples)
        sms, name = args.multiprocessors or 132, str(args.samples)
    else:
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "no GPU: torch sees none; the planner's constants are a GPU's (--samples fits measurements made elsewhere)"
            )
        device = torch.cuda.get_device_properties(0)
        sms, name = device.multi_processor_count, device.name
        make_folders(args)  # before anything is measured for them
        samples = take_samples()
    kept = without_calls(samples, sms, SHIPPED)
    different = len({json.dumps([s[name] for name in ("lengths", "heads", "segment", "form")]) for s in samples})
    if different < len(SHIPPED) - len(kept):
        raise ValueError(
            f"--samples: expected at least {len(SHIPPED) - len(kept)} different calls for the {len(SHIPPED) - len(kept)} constants that "
            f"they have, got {different}; `qla calibrate --keep FILE` measures some eighty"
        )
    make_folders(args)
    if args.keep:
        args.keep.write_text("".join(json.dumps(s) + "\n" for s in samples))
    costs, rms, worst = fit(samples, sms, SHIPPED)
    head = [
        f"# constants of the cost model, microseconds: {name}, {sms} multiprocessors, {time.strftime('%Y-%m-%d')}",
        f"# {len(samples)} calls, {100 * rms:.1f} % rms, largest error {100 * worst:.1f} %",
    ]
    if kept:
        head.append(f"# not fitted, an H200's as shipped, because no call has them: {', '.join(kept)}")
    lines = [f"{key} {value:.4g}" for key, value in costs.items()]
    args.out.write_text("\n".join(head + lines) + "\n")
    notes = ["not fitted: as shipped" if key in kept else f"H200 as shipped: {SHIPPED[key]}" for key in costs]
    print("\n".join(head + [f"{line}    ({note})" for line, note in zip(lines, notes)]))
    if kept:
        print(
            "what was fitted and what was kept may come from different libraries, and the planner compares them: measure both with `qla calibrate`"
        )
    print(f"{time.perf_counter() - started:.1f} s; use it with QLA_COSTS={args.out}")
    return 0
