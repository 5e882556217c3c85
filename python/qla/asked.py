"""`qla bench --asked`: what a call pays on a GPU for having asked whether to cut, where the card finds nothing to cut.

Equal packings that this device's planner asks about and leaves whole, by the planner's own plan; and some that only a given plan asks
about, in halves of V, short enough that launches are what they cost. Each with cuts off and asking, in turn, graph replays, sustained; both run the
same items. (What planning itself takes on the card: `qla_device_test_plan time`.)
"""

from __future__ import annotations

import argparse
import json

from qla.bench_grid import Row
from qla.planbench import AUTO, HALVES, OWN, PlanBench, Planned

# what an H200's planner asked about when this was written, and more: those are taken that it asks about now
PLANNER = [
    ((8, 32), 2, 16384), ((16, 32), 2, 12288), ((8, 24), 2, 8192), ((4, 16), 3, 3072), ((16, 16), 3, 4096), ((4, 16), 5, 8192),
    ((2, 8), 5, 8192), ((2, 4), 12, 3072),
]  # fmt: skip
GIVEN = [((2, 8), 2, 2048), ((2, 8), 2, 4096), ((4, 16), 2, 2048), ((4, 16), 2, 8192), ((8, 32), 2, 4096)]
SEGMENT = 16  # chunks; few enough for one range of workspace
LIMIT_US = 3.0


def asked(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    good = True
    with PlanBench() as bench, (args.out / "asked.jsonl").open("w") as lines:
        for which, rows in (("planner", PLANNER), ("given", GIVEN)):
            for heads, sequences, tokens in rows:
                bench.row(Row("fwd", "", f"{tokens}x{sequences}", [tokens] * sequences, heads))
                plans = [Planned(0, HALVES), Planned(SEGMENT, HALVES, uncut=-(-tokens // 64))]
                if which == "planner":
                    plans = [Planned(0, OWN), Planned(AUTO, OWN)]
                    plan = bench.plan(plans[1])
                    if plan.segment_chunks == 0 or plan.num_segments > sequences:
                        continue
                for one in plans:
                    bench.burst(one, 1)  # never captured before it has run
                off, on = bench.sustained(plans, warm_ms=25.0, each_ms=50.0)
                if which == "planner":
                    good &= on - off <= LIMIT_US
                found = {
                    "lengths": bench.now.name,
                    "heads": f"{heads[0]}, {heads[1]}",
                    "plan": which,
                    "off_us": off,
                    "asked_us": on,
                }
                lines.write(json.dumps(found) + "\n")
                lines.flush()
                said = "" if which == "planner" else " (by a given plan)"
                print(
                    f"({heads[0]}, {heads[1]}) {bench.now.name}{said}: cuts off {off:.1f} us, asked {on:.1f}, more {on - off:.1f}"
                )
    print(f"at most {LIMIT_US:.0f} us more wherever the planner asks: {'yes' if good else 'no'}")
    return 0 if good else 1
