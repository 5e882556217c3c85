"""What a GPU run found, reduced to the few lines of docs/gpu/last_run.json. Used by test_gpu.py."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_jobs import Job
from gpu_record import ROOT

FOUND = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")
LISTED = re.compile(r"^\| (\w+) \|", re.MULTILINE)
# A few rows of the published grid: enough to notice that a change made something slower.
ROWS = ("8192x4 16, 64", "1x32768 16, 64", "8192x4 8, 32", "1x8192 2, 8", "1024x8 16, 16", "32k_4seq 16, 32")


def gpu_facts() -> dict[str, str]:
    facts = {"gpu": "?", "driver": "?"}
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        )
        line = (done.stdout.splitlines() or [""])[0]
        if "," in line:
            facts["gpu"], facts["driver"] = (part.strip() for part in line.split(",", 1))
    return facts


def worst_errors(path: Path) -> dict[str, dict[str, Any]]:
    """tensor -> the largest error relative to its limit, from the lines that the op tests write."""
    worst: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return worst
    with path.open() as f:
        for line in csv.reader(f):
            try:
                _backend, case, tensor, error, limit = line[0], line[1], line[2], float(line[3]), float(line[4])
            except (IndexError, ValueError):
                continue  # two processes wrote at once
            known = worst.get(tensor)
            if limit > 0 and (known is None or error / limit > known["error"] / known["limit"]):
                worst[tensor] = {"error": error, "limit": limit, "case": case}
    return worst


def sanitizer_verdicts(jobs: list[Job], tools: tuple[str, ...]) -> dict[str, str]:
    """tool -> clean, not available, what it found, or why it says nothing. Reports of racecheck count as listed only
    where docs/gpu/racecheck.md names the program."""
    verdicts = {}
    for tool in tools:
        mine = [job for job in jobs if job.group == tool]
        if not mine or any("Device not supported" in job.text for job in mine):
            verdicts[tool] = "not available"
        elif any(job.late or job.code is None for job in mine):
            verdicts[tool] = "unfinished"
        else:
            matches = [FOUND.search(job.text) for job in mine]
            found = sum(int(match[1]) for match in matches if match)
            failed = any(job.code and not match for job, match in zip(mine, matches))
            verdicts[tool] = f"{found} reports" if found else "failed to run" if failed else "clean"
            reporting = {job.name.split(".")[1] for job, match in zip(mine, matches) if match and int(match[1])}
            if tool == "racecheck" and reporting and reporting <= listed_programs():
                verdicts[tool] = f"listed: {found} reports, all in programs that docs/gpu/racecheck.md explains"
    return verdicts


def listed_programs() -> set[str]:
    """First column of the table in docs/gpu/racecheck.md."""
    page = ROOT / "docs/gpu/racecheck.md"
    names = LISTED.findall(page.read_text()) if page.exists() else []
    return {name for short in names for name in (short, f"qla_device_{short}")}


def timings(environment: dict[str, str], folder: Path) -> dict[str, float]:
    """The published grid, measured alone after the tests; the files go to `folder`, some rows and the means into the record."""
    command = [sys.executable, "-m", "qla", "bench", "--grid", "published", "--peers", "none", "--host", "--out", str(folder)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else (late.stdout or "")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.log").write_text(output)
    out: dict[str, float] = {}
    for match in re.finditer(r"^(forward|backward), (.*?): geometric mean ([\d.]+) x (.*?) over", output, re.MULTILINE):
        out[f"{match[1]}, {match[2]}, x {match[4]}"] = float(match[3])
    lines = folder / "cuda.jsonl"
    for line in lines.read_text().splitlines() if lines.exists() else []:
        row = json.loads(line)
        if row.get("ours_ms") and f"{row['lengths']} {row['heads']}" in ROWS:
            out[f"{row['pass']} {row['lengths']} ({row['heads']}), ms"] = round(row["ours_ms"], 4)
    return out


def print_table(record: dict[str, Any], sanitizers: tuple[str, ...]) -> int:
    print(f"\n{record['gpu']}, driver {record['driver']}")
    for name, entry in record["programs"].items():
        counts = f"{entry['passed']:>5.0f} passed {entry['failed']:>3.0f} failed {entry['skipped']:>3.0f} skipped"
        print(f"{name:<30} {counts}  {entry['seconds']:6.1f} s")
    for tensor, entry in record["worst_errors"].items():
        print(f"worst {tensor:<24} {entry['error']:.1e} of {entry['limit']:.1e}  {entry['case']}")
    for tool in sanitizers:
        print(f"{tool:<30} {record['sanitizers'].get(tool, 'not run')}")
    for name, value in record["timings"].items():
        print(f"{name:<50} {value:.4f}")
    if record["unfinished"]:
        print("unfinished: " + ", ".join(record["unfinished"]))
    counts = record["counts"]
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    dirty = [v for v in record["sanitizers"].values() if not v.startswith(("clean", "not available", "listed"))]
    return 1 if counts["failed"] or record["unfinished"] or dirty else 0
