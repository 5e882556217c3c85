"""Peers timed beside ours: each in a process of its own that answers row by row, so that both meet the same card in the same second."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qla.bench_grid import Row, find_table

SCRIPT = Path(__file__).resolve().with_name("bench_peer.py")
PEERS = ("flash_qla", "flashinfer", "fla")
START_S, FIRST_ROW_S, ROW_S = 180.0, 600.0, 120.0  # a first call may compile for minutes


class Peer:
    """A peer's process. `what`: what it times, or why it times nothing (then `alive` is false)."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.alive, self.what, self.asked = name, False, "", 0
        self.process: subprocess.Popen[str] | None = None
        if name not in PEERS:
            raise ValueError(f"--peers: expected auto, none or a list of {', '.join(PEERS)}, got {name!r}")
        if name == "flash_qla" and not args.flash_qla_path:
            self.what = "not measured: --flash-qla-path names no checkout of the original"
            return
        if name != "flash_qla" and importlib.util.find_spec(name) is None:
            self.what = "not measured: not installed"
            return
        environment = dict(os.environ)
        if name == "flash_qla":  # our own package has that name: keep it out of the child's way
            environment["PYTHONPATH"] = str(args.flash_qla_path)
        words = [name, str(args.flash_qla_path or ""), str(find_table(args.table).resolve()), str(args.budget)]
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
        )
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process and self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                self.answers.put(json.loads(line))
        self.answers.put(None)

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        try:
            answer = self.answers.get(timeout=seconds)
            why = "" if answer else self._last_words()
        except queue.Empty:
            answer, why = None, f"no answer in {seconds:.0f} s"
        if answer is None:
            self.alive = False
            self.what = f"{self.what + ': ' if self.what else ''}not measured{' any further' if self.asked else ''}: {why}"
            self.close()
        return answer

    def _last_words(self) -> str:
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["its process ended without a word"])[-1]

    @property
    def named(self) -> str:
        """`what` without the path of the file that was imported."""
        return re.sub(r" \(/[^)]*\)", "", self.what)

    def start(self) -> None:
        """Waits until it has imported what it needs. All are started before the first is waited for."""
        if self.process is None:
            return
        answer = self._answer(START_S)
        if answer:
            self.alive, self.what = True, answer["what"]

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        if not self.alive or self.process is None or self.process.stdin is None:
            return {}
        self.asked += 1
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
        except BrokenPipeError:
            pass  # told by the missing answer
        answer = self._answer(seconds)
        return answer["answer"] if answer else {}

    def prepare(self, row: Row) -> dict[str, dict[str, Any]]:
        """-> form of the peer -> difference from ours, captured, burst_ms, peak_mib; or refused: why. The row before is forgotten."""
        return self._ask({"prepare": row.label()}, ROW_S if self.asked else FIRST_ROW_S)

    def time(self, names: list[str]) -> dict[str, list[float]]:
        """-> form -> ms, spread in %, replays, SM clock: what bench_grid.replay_ms returns, of the row that was prepared."""
        return self._ask({"time": names}, ROW_S) if names else {}

    def close(self) -> None:
        if self.process is None:
            return
        if self.process.stdin and not self.process.stdin.closed:
            try:
                self.process.stdin.close()  # it ends at the end of its input
            except BrokenPipeError:
                pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wanted(args: argparse.Namespace) -> list[Peer]:
    """The peers that --peers asks for, their processes started side by side and ready."""
    if args.peers == "none":
        return []
    names = [n for n in PEERS if n != "flash_qla" or args.flash_qla_path] if args.peers == "auto" else args.peers.split(",")
    peers = [Peer(name.strip(), args) for name in names]
    for peer in peers:
        peer.start()
    return peers


HOPELESS = 1.25  # a form that took so many times the best form's time in the first round is not timed again


def rounds(peers: list[Peer], row: Row, ours: Callable[[bool], tuple[float, float, int, float]], count: int) -> dict[str, Any]:
    """Times ours and each peer's forms in turn, `count` times, every other round in the opposite order: what the card's temperature and
    power limit do to one they do to the others. ours(first): replay_ms, with a longer warm-up for the first.

    -> ours_ms and so on, medians of the rounds; `beside`: form -> the same of the peers."""
    forms = [peer.prepare(row) for peer in peers]
    names = [[name for name, told in mine.items() if "refused" not in told] for mine in forms]
    seen: dict[str, list[Any]] = {}
    mine: list[tuple[float, float, int, float]] = []
    for number in range(count):
        order = [*range(len(peers))]
        if number % 2 == 0:
            mine.append(ours(number == 0))
        for i in order if number % 2 == 0 else reversed(order):
            for name, times in peers[i].time(names[i]).items():
                seen.setdefault(name, []).append(times)
        if number % 2 == 1:
            mine.append(ours(False))
        if number == 0 and seen:
            least = min(times[0][0] for times in seen.values())
            names = [[name for name in part if name in seen and seen[name][0][0] <= HOPELESS * least] for part in names]

    def told(times: list[Any]) -> dict[str, Any]:
        middle = [statistics.median(values) for values in zip(*times)]
        return dict(zip(("ms", "spread", "replays", "sm_mhz"), middle))

    beside = {name: one for part in forms for name, one in part.items()}
    for name, times in seen.items():
        beside[name].update(told(times))
    out = told(mine)
    return {"ours_ms": out.pop("ms"), **out, **({"beside": beside} if beside else {})}


def rate(out: dict[str, Any]) -> None:
    """Adds to a row's results the best of the peers beside it, sustained and in bursts, and the ratios to ours."""
    timed = {name: one for name, one in out.get("beside", {}).items() if "ms" in one}
    if not timed:
        return
    out["beside_is"], best = min(timed.items(), key=lambda item: item[1]["ms"])
    out["beside_ms"], out["beside_mhz"], out["beside_difference"] = best["ms"], best["sm_mhz"], best["difference"]
    out["peer_mib"] = "; ".join(f"{name} {one['peak_mib']:.0f}" for name, one in timed.items())
    if not best["captured"]:
        out["beside_is"] += " (eager)"
    out["beside_burst_ms"] = min(one["burst_ms"] for one in timed.values())
    out["ratio_beside"] = out["beside_ms"] / out["ours_ms"]
    out["ratio_burst"] = out["beside_burst_ms"] / out["burst_ms"]
