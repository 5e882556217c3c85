"""`qla bench`: arguments, reports and the choice of device; the measuring is in bench_cpu.py and bench_cuda.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


def item_range(text: str) -> tuple[int, int]:
    """ "64:" or "64" at least, ":63" at most, "64:128" between."""
    first, _, last = text.partition(":")
    try:
        least, most = int(first or 0), int(last or 10**9)
    except ValueError:
        least, most = 1, 0
    if not 0 <= least <= most:
        raise argparse.ArgumentTypeError(f"expected e.g. 64: (at least 64), :63 (at most) or 64:128, got {text!r}")
    return least, most


# Options that a bench of the CPU would ignore, and what they are when not given.
ONLY_ON_A_GPU: dict[str, Any] = {
    "direction": "both", "rows": None, "items": None, "table": None, "budget": 0.1, "peers": "auto", "rounds": 3,
    "flash_qla_path": None, "kernels": False, "host": False,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda with --grid, else cpu")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/bench"),
        help="folder of the JSON lines, the table and the picture (default out/bench)",
    )
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--tokens", type=int, default=4096, help="tokens of the main case (default 4096)")
    cpu.add_argument(
        "--seconds", type=float, default=2.0, help="time for each figure (default 2); the least of all repeats counts"
    )
    cpu.add_argument("--no-transformers", action="store_true", help="do not time transformers' torch code beside it")
    cpu.add_argument("--cases", help="only cases whose name contains this")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--grid", choices=["published"], help="the 171 forward and 32 backward rows that the peers publish")
    gpu.add_argument(
        "--sweep",
        action="store_true",
        help="forward rows of the published grid under every plan (number of segments, V split), beside the planner's choice",
    )
    gpu.add_argument(
        "--asked",
        action="store_true",
        help="what a call pays for having asked whether to cut, where nothing is cut",
    )
    gpu.add_argument("--pass", dest="direction", choices=["fwd", "bwd", "both"], help="rows of which pass (default both)")
    gpu.add_argument(
        "--rows",
        help="only rows whose 'pass model lengths Hk,Hv' contains every one of these comma-separated words, e.g. '1x,2:8'",
    )
    gpu.add_argument("--table", type=Path, help="the peers' table (default bench/peers_h200.csv of the source tree)")
    gpu.add_argument(
        "--budget",
        type=float,
        help="seconds of timed replays for a row, after 25 ms that are not timed (default 0.1)",
    )
    gpu.add_argument(
        "--peers",
        help="measured beside ours: auto (those that import), none, or a list of fla,flashinfer,flash_qla",
    )
    gpu.add_argument("--rounds", type=int, help="with peers: how often ours and theirs are timed in turn (default 3)")
    gpu.add_argument("--items", type=item_range, help="only rows of so many sequences x value heads: 64: or :63")
    gpu.add_argument("--flash-qla-path", type=Path, help="a checkout of the original FlashQLA, timed in its own process")
    gpu.add_argument("--kernels", action="store_true", help="also the time of each kernel of a call (torch.profiler)")
    gpu.add_argument("--host", action="store_true", help="also the host cost of a call, eager and captured")
    parser.set_defaults(**ONLY_ON_A_GPU)


def main(args: argparse.Namespace) -> int:
    # Read when torch's OpenMP library is loaded: its threads would spin for milliseconds after each of torch's own parallel
    # regions, on the cores that two threads of ours are timed on.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"needs torch ({error}): pip install torch numpy") from error
    if args.sweep:
        from qla.sweep import sweep

        if not torch.cuda.is_available():
            raise ValueError("--sweep: torch sees no GPU; the plans are a GPU's")
        return sweep(args)
    if args.asked:
        from qla.asked import asked

        if not torch.cuda.is_available():
            raise ValueError("--asked: torch sees no GPU; calls are timed on one")
        return asked(args)
    device = args.device or ("cuda" if args.grid else "cpu")
    check(args, device)
    if device == "cpu":
        if args.grid:
            raise ValueError("--grid: the published rows are GPU rows; use --device cuda, or leave --grid away")
        from qla import bench_cpu

        return bench_cpu.main(args)
    from qla import bench_cuda

    return bench_cuda.main(args)


def check(args: argparse.Namespace, device: str) -> None:
    """What argparse cannot see."""
    for name, default in ONLY_ON_A_GPU.items() if device == "cpu" else ():
        if getattr(args, name) != default:
            option = "pass" if name == "direction" else name.replace("_", "-")
            raise ValueError(f"--{option}: expected on a GPU, got a bench of the CPU; add --grid published, or leave it out")
    for name in ("tokens", "seconds", "budget", "rounds"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}: expected more than 0, got {getattr(args, name)}")


class JsonLines:
    """Appends a line as soon as it is known: what was measured survives an interrupted run."""

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")
        self.common = {"date": time.strftime("%Y-%m-%d"), **common}

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps({**row, **self.common}) + "\n")
        self.file.flush()


def cell(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def markdown(columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """columns: key -> heading."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"
