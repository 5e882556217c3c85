"""Programs run side by side under one deadline, each with its own log. Used by test_gpu.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

SUMMARY = re.compile(r"(\d+) passed,? (\d+) failed")


@dataclass
class Job:
    name: str
    command: list[str]
    group: str  # jobs of a group are counted together
    extra: dict[str, str] = field(default_factory=dict)
    timeout: float = 1e9
    alone: bool = False  # the exit status is all it says: one test
    report: Path | None = None  # a JUnit file that the program writes
    code: int | None = None  # None: never began
    late: bool = False
    text: str = ""
    seconds: float = 0.0

    def summary(self) -> tuple[int, int]:
        """(passed, failed) of a program that says so in words."""
        found = SUMMARY.findall(self.text)
        return (int(found[-1][0]), int(found[-1][1])) if found else (0, int(not self.late))


def run(job: Job, environment: dict[str, str], logs: Path, end: float) -> Job:
    start = time.monotonic()
    allowed = min(job.timeout, end - start)
    if allowed <= 0:
        return job
    log = logs / f"{job.name}.log"
    with log.open("w") as out:
        # a session of its own: at the deadline the whole family goes, pytest's workers too
        process = subprocess.Popen(
            job.command, env={**environment, **job.extra}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            job.code = process.wait(timeout=allowed)
        except subprocess.TimeoutExpired:
            job.late = True
            os.killpg(process.pid, signal.SIGKILL)
            job.code = process.wait()
    job.text = log.read_text(errors="replace")
    job.seconds = time.monotonic() - start
    return job


def run_all(jobs: list[Job], environment: dict[str, str], logs: Path, deadline: float, after_each: Callable[[], None]) -> None:
    end = time.monotonic() + deadline
    with ThreadPoolExecutor(max_workers=max(16, 2 * (os.cpu_count() or 1))) as pool:
        futures = [pool.submit(run, job, environment, logs, end) for job in jobs]
        for done in as_completed(futures):
            job = done.result()
            verdict = "out of time" if job.late else "never began" if job.code is None else f"exit {job.code}"
            print(f"-- {job.name:<34} {verdict:<12} {job.seconds:6.1f} s", flush=True)
            if job.code and not job.late:
                print("\n".join(line[:240] for line in job.text.splitlines()[-12:]), flush=True)
            after_each()
