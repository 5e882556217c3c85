"""4,096 packed sequences of L tokens each, (12, 12) heads, bf16: what partial chunks cost beside whole ones (recipe BR-89).

    python3 bench/short_sequences.py [--states] [L ...]

Asked for: L < 64 at most 1.3 times L = 64, L = 65 at most 2.2 times. Graph replays, sustained (docs/bench/README.md).
"""

from __future__ import annotations

import argparse

import torch

import qla
from qla.bench_grid import Row, prepare, replay_ms

SEQUENCES, HEADS = 4096, (12, 12)
LIMITS = {length: 1.3 for length in range(1, 64)} | {65: 2.2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[64, 1, 8, 16, 32, 63, 65, 128])
    parser.add_argument("--states", action="store_true", help="initial states given, final states asked for")
    args = parser.parse_args()

    def call(initial_state: torch.Tensor, **rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = initial_state if args.states else None
        return qla.chunk_gated_delta_rule(**rest, initial_state=state, output_final_state=args.states)

    whole, over = 0.0, 0
    for length in [64, *(n for n in args.lengths if n != 64)]:
        row = Row("fwd", "", f"{length}x{SEQUENCES}", [length] * SEQUENCES, HEADS)
        ms, _spread, _count, mhz = replay_ms(prepare(row, call), 0.1)
        whole = whole or ms
        over += ms / whole > LIMITS.get(length, 9.0)
        print(f"L {length:4}  {ms:.3f} ms  {ms / whole:.3f} of L = 64  at {mhz:.0f} MHz", flush=True)
        torch.cuda.empty_cache()
    return int(over > 0)


if __name__ == "__main__":
    raise SystemExit(main())
