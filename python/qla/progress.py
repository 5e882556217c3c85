"""A progress bar without dependencies: one line redrawn on a terminal, a line now and then in a log."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType


class Bar:
    def __init__(self, total: int, label: str, seconds_between_lines: float = 15.0, seconds: float = math.inf) -> None:
        self.total, self.label, self.seconds = total, label, seconds  # seconds: the run stops after so many, whatever is left
        self.start = self.last = time.perf_counter()
        self.terminal = sys.stderr.isatty()
        self.interval = 0.1 if self.terminal else seconds_between_lines
        self.done, self.text = 0, ""

    def __enter__(self) -> Bar:
        return self

    def __call__(self, done: int, text: str = "") -> None:
        self.done, self.text = done, text
        now = time.perf_counter()
        if now - self.last >= self.interval:
            self.last = now
            self.draw()

    def draw(self, end: bool = False) -> None:
        elapsed = time.perf_counter() - self.start
        left = elapsed / self.done * (self.total - self.done) if self.done else 0.0
        filled = 24 * self.done // max(self.total, 1)
        line = f"{self.label:<26} [{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total}  {self.text}  {elapsed:.0f} s"
        if not end and self.done:
            line += f", {min(left, max(self.seconds - elapsed, 0.0)):.0f} s left"
        if self.terminal:
            print(f"\r{line}\033[K", end="\n" if end else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.draw(end=True)
