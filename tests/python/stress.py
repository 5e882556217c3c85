"""Calls under pressure, each held to the bits of a quiet first run. Not a test of the suite but for a part of it that `./dev test-gpu`
runs: it looks for faults of timing that come once in some ten thousand calls.

    python tests/python/stress.py --seconds 40 --processes 16 [--kind cuts|direct|steps|both] [--seed N] [--keep FOLDER] [--library FILE]
        [--beside COMMAND]
    python tests/python/stress.py --dry --processes 2    # no card: that all of the direct kind is drawn, runs and sees a fault

Kinds: cuts (stress_cuts.py), forced plans of cut sequences; direct (stress_direct.py), small and medium calls that nothing cuts; steps
(stress_steps.py), forward and backward; both: the first two in turn. One process makes the quiet results (checksums) of all problems.
Then so many processes share the card, with another library (one whose kernels pause, -DQLA_JITTER=ON) or beside a command (a program
under compute-sanitizer disturbs most) if asked for. A wrong result is told with where it lies, of a process that does not end where
its Python and, with cuda-gdb, its warps are.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stress_cuts
import stress_direct
import stress_steps


def kinds_of(a: argparse.Namespace) -> dict[int, str]:
    """What each process runs."""
    return {n: a.kind if a.kind != "both" else ("cuts", "direct")[n % 2] for n in range(a.processes)}


def quiet_runs(a: argparse.Namespace) -> None:
    kinds = kinds_of(a)
    if "cuts" in kinds.values():
        stress_cuts.quiet(a.seed, [n for n, kind in kinds.items() if kind == "cuts"], a.problems, a.folder)
    if "direct" in kinds.values():
        direct = [n for n, kind in kinds.items() if kind == "direct"]
        stress_direct.quiet(a.seed, direct, a.direct_problems, a.folder)
    if "steps" in kinds.values():
        stress_steps.quiet(a.seed, [n for n, kind in kinds.items() if kind == "steps"], a.problems, a.folder)


def work(a: argparse.Namespace) -> int:
    faulthandler.register(signal.SIGUSR1)
    worker: stress_cuts.Worker | stress_direct.Worker | stress_steps.Worker
    kind = kinds_of(a)[a.process]
    if kind == "cuts":
        worker = stress_cuts.Worker(a.seed, a.process, a.problems, a.folder)
    elif kind == "steps":
        worker = stress_steps.Worker(a.seed, a.process, a.folder)
    else:
        worker = stress_direct.Worker(a.seed, a.process, a.folder, a.keep)
    print(f"process {a.process} ready, {len(worker.calls)} problems, first runs {worker.failures} failures", flush=True)
    (a.folder / f"ready{a.process}").touch()
    begin = time.monotonic()
    while len(list(a.folder.glob("ready*"))) < a.processes and time.monotonic() - begin < 40:
        time.sleep(0.05)
    worker.run(a.seconds)
    return worker.failures > 0


def look_at_hanging(workers: dict[int, subprocess.Popen[bytes]]) -> None:
    """Where they are: their Python's stack, and of the first one what its warps wait at, if there is cuda-gdb. Then they end."""
    for n, w in workers.items():
        print(f"HANGS: process {n}", flush=True)
        w.send_signal(signal.SIGUSR1)
    if workers and shutil.which("cuda-gdb"):
        time.sleep(1)  # the stacks
        words = ["info cuda kernels", "info cuda blocks", "info cuda warps", "x/4i $pc-32"]
        command = ["cuda-gdb", "-batch", "-p", str(next(iter(workers.values())).pid), *(w for x in words for w in ("-ex", x))]
        try:
            print(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout[-6000:], flush=True)
        except subprocess.TimeoutExpired:
            print("cuda-gdb said nothing for 30 s", flush=True)
    for w in workers.values():
        w.kill()


def main() -> int:
    parse = argparse.ArgumentParser()
    parse.add_argument("--seconds", type=float, default=40)
    parse.add_argument("--processes", type=int, default=8)
    parse.add_argument("--kind", choices=("cuts", "direct", "steps", "both"), default="both", help="both: cuts, direct in turn")
    parse.add_argument("--problems", type=int, default=6, help="of a process, cuts and steps")
    parse.add_argument("--direct-problems", type=int, default=24, help="of a process, direct")
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "qla_stress", help="folder for wrong results")
    parse.add_argument(
        "--library",
        type=Path,
        help="of the processes under pressure: one built with -DQLA_JITTER=ON, say; default that of the quiet run",
    )
    parse.add_argument(
        "--beside",
        default="",
        help="a command that runs again and again meanwhile; a program under compute-sanitizer disturbs most",
    )
    parse.add_argument("--patience", type=float, default=60, help="seconds after which a process that should have ended hangs")
    parse.add_argument(
        "--dry", action="store_true", help="no card: the direct kind on the CPU backend, a planted fault at the end"
    )
    parse.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    parse.add_argument("--process", type=int, default=-1, help=argparse.SUPPRESS)
    parse.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    a = parse.parse_args()
    if a.quiet:
        quiet_runs(a)
        return 0
    if a.process >= 0:
        return work(a)
    with tempfile.TemporaryDirectory() as folder:
        if a.dry:
            return stress_direct.dry(a.seed, list(range(a.processes)), a.direct_problems, Path(folder)) > 0
        names = ("seconds", "processes", "kind", "problems", "direct_problems", "seed", "keep")
        again = [sys.executable, __file__, "--folder", folder, *(f"--{n.replace('_', '-')}={getattr(a, n)}" for n in names)]
        begin = time.monotonic()
        if subprocess.run([*again, "--quiet"]).returncode:
            print("FAILED: the quiet run")
            return 1
        print(f"quiet run {time.monotonic() - begin:.1f} s", flush=True)
        pressed = {**os.environ, "QLA_LIBRARY": str(a.library.resolve())} if a.library else None
        workers = [subprocess.Popen([*again, f"--process={n}"], env=pressed) for n in range(a.processes)]
        end, beside, times = time.monotonic() + a.seconds + a.patience, None, 0
        while any(w.poll() is None for w in workers) and time.monotonic() < end:
            if a.beside and (beside is None or beside.poll() is not None):
                beside = subprocess.Popen(shlex.split(a.beside), stdout=subprocess.DEVNULL, start_new_session=True)
                times += 1
            time.sleep(0.1)
        if beside is not None:
            print(f"beside: begun {times} times, status of the last one {beside.poll()}", flush=True)
            if beside.poll() is None:
                os.killpg(beside.pid, signal.SIGKILL)
        look_at_hanging({n: w for n, w in enumerate(workers) if w.poll() is None})
        failed = sum(w.wait() != 0 for w in workers)
        print(f"{failed} of {a.processes} processes with failures, {time.monotonic() - begin:.1f} s")
        return failed > 0


if __name__ == "__main__":
    sys.exit(main())
