"""`qla bench --asked`: what a call pays on a GPU for having asked whether to cut, where the card finds nothing to cut.

Packings of two equal sequences in halves of V, uncut: once with cuts off, and once by a plan that would cut a longer sequence. Both run
the same items; in turn, graph replays, sustained. (What planning itself takes on the card: `qla_device_test_plan time`.)
"""

from __future__ import annotations

import argparse
import json

from qla.bench_grid import Row
from qla.planbench import HALVES, PlanBench, Planned

ROWS = [((2, 8), 2048), ((2, 8), 4096), ((4, 16), 2048), ((4, 16), 8192), ((8, 32), 4096)]
SEGMENT = 16  # chunks; few enough for one range of workspace
LIMIT_US = 3.0


def asked(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    good = True
    with PlanBench() as bench, (args.out / "asked.jsonl").open("w") as lines:
        for heads, tokens in ROWS:
            bench.row(Row("fwd", "", f"{tokens}+{tokens}", [tokens, tokens], heads))
            plans = [Planned(0, HALVES), Planned(SEGMENT, HALVES, uncut=-(-tokens // 64))]
            for plan in plans:
                bench.burst(plan, 1)  # never captured before it has run
            off, on = bench.sustained(plans, warm_ms=25.0, each_ms=50.0)
            good &= on - off <= LIMIT_US
            found = {"lengths": bench.now.name, "heads": f"{heads[0]}, {heads[1]}", "off_us": off, "asked_us": on}
            lines.write(json.dumps(found) + "\n")
            lines.flush()
            print(f"({heads[0]}, {heads[1]}) {bench.now.name}: cuts off {off:.1f} us, asked {on:.1f}, more {on - off:.1f}")
    print(f"at most {LIMIT_US:.0f} us more in every row: {'yes' if good else 'no'}")
    return 0 if good else 1
