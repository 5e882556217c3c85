"""`./dev test-gpu`: every test on CUDA, the four sanitizers on small cases, a short table last, docs/gpu/last_run.json.

Self-contained: needs no network and nothing but python3 with torch and pytest, a driver, and either a build or a folder
given by --prebuilt (libqla.so and the qla_test_* programs, flat or as in build/release). A tool that is missing is
reported as "not available", never as passed. Exits with 1 when a test fails, a sanitizer finds something, or no GPU serves.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from count_tests import count_cases, parse
from gpu_record import RECORD, ROOT, tree_hash

SANITIZERS = ("memcheck", "initcheck", "synccheck", "racecheck")
SMALL = "*Small*"  # the cases that a sanitizer gets through in seconds
GOOGLE, DEVICE = "qla_test_*", "qla_device_*"  # GoogleTest programs; one-primitive programs that print "N passed M failed"
SUMMARY = re.compile(r"(\d+) passed,? (\d+) failed")
FOUND = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev test-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prebuilt", type=Path, help="folder with libqla.so and the test programs; default build/release")
    parser.add_argument("--quick", action="store_true", help="no sanitizers, no Python tests marked slow")
    parser.add_argument("--only", choices=["cpp", "python", "sanitize"], help="one part alone; then nothing is recorded")
    parser.add_argument("--filter", help="of GoogleTest names; then nothing is recorded")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each program (default 300)")
    parser.add_argument("--out", type=Path, help="a second place for last_run.json and the logs")
    return parser.parse_args()


class Runner:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.build = (args.prebuilt or ROOT / "build/release").resolve()
        self.logs = Path(args.out or tempfile.mkdtemp(prefix="qla-gpu-")).resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.library = self.find("libqla.so")
        self.errors = self.logs / "errors.csv"
        self.environment = {
            **os.environ,
            "QLA_LIBRARY": str(self.library),
            "QLA_TEST_BACKEND": "cuda",
            "QLA_TEST_DEVICE": "cuda",
            "QLA_TEST_ERRORS": str(self.errors),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")])),
        }

    def find(self, name: str) -> Path:
        found = [p for p in sorted(self.build.rglob(name)) if p.is_file()]
        if not found:
            sys.exit(f"test-gpu: found no {name} in {self.build}; run ./dev build, or give --prebuilt DIR")
        return found[0]

    def programs(self, *patterns: str) -> list[Path]:
        found = [p for pattern in patterns for p in sorted(self.build.rglob(pattern))]
        return [p for p in found if p.is_file() and os.access(p, os.X_OK) and "." not in p.name]

    def run(self, name: str, command: list[str], **extra: str) -> tuple[int, str, float]:
        start = time.perf_counter()
        print(f"-- {name}", flush=True)
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**self.environment, **extra},
                timeout=self.args.timeout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            text = (
                output.decode(errors="replace") if isinstance(output, bytes) else output
            ) + f"\nstopped after {self.args.timeout:.0f} s"
            code = 124
        (self.logs / f"{name}.log").write_text(text)
        if code:
            print("\n".join(text.splitlines()[-25:]), flush=True)
        return code, text, time.perf_counter() - start


def tally(report: Path, code: int) -> dict[str, int]:
    root = parse(report)
    verdicts = list(count_cases(root).values()) if root is not None else []
    counts = {kind: verdicts.count(kind) for kind in ("passed", "failed", "skipped")}
    if code and not counts["failed"]:
        counts["failed"] = 1  # died, or ran out of time
    return counts


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


def served(runner: Runner) -> tuple[bool, str]:
    os.environ["QLA_LIBRARY"] = str(runner.library)
    sys.path.insert(0, str(ROOT / "python"))
    from qla import _ffi

    if _ffi.device_count() == 0:
        return False, f"the library sees no CUDA device ({_ffi.build_info()})"
    info = _ffi.device_info(0)
    return bool(info.served), f"{info.name.decode()}: {(info.kernels or info.reason).decode()}"


def worst_errors(path: Path) -> dict[str, dict[str, object]]:
    """tensor -> the largest error relative to its limit, from the lines that the op tests write."""
    worst: dict[str, dict[str, object]] = {}
    if not path.exists():
        return worst
    with path.open() as f:
        for line in csv.reader(f):
            try:
                _backend, case, tensor, error, limit = line[0], line[1], line[2], float(line[3]), float(line[4])
            except (IndexError, ValueError):
                continue
            known = worst.get(tensor)
            if known is None or error / limit > float(known["error"]) / float(known["limit"]):  # type: ignore[arg-type]
                worst[tensor] = {"error": error, "limit": limit, "case": case}
    return worst


def main() -> int:
    args = arguments()
    runner = Runner(args)
    facts = gpu_facts()
    ok, why = served(runner)
    print(f"{why}; driver {facts['driver']}; library {runner.library}")
    if not ok:
        print("test-gpu: no device here is served by the kernels: nothing was tested")
        return 1
    table: list[tuple[str, dict[str, int], float]] = []
    sanitizers: dict[str, str] = {}
    if args.only in (None, "cpp"):
        for program in runner.programs(GOOGLE):
            report = runner.logs / f"{program.name}.xml"
            report.unlink(missing_ok=True)
            command = [str(program), "--gtest_brief=1", f"--gtest_output=xml:{report}"]
            if args.filter:
                command.append(f"--gtest_filter={args.filter}")
            code, _, seconds = runner.run(program.name, command)
            table.append((program.name, tally(report, code), seconds))
        for program in runner.programs(DEVICE) if not args.filter else []:
            code, text, seconds = runner.run(program.name, [str(program)])
            last = SUMMARY.findall(text)
            passed, failed = map(int, last[-1]) if last else (0, 1)
            table.append((program.name, {"passed": passed, "failed": max(failed, int(code != 0)), "skipped": 0}, seconds))
    if args.only in (None, "python"):
        report = runner.logs / "pytest.xml"
        report.unlink(missing_ok=True)
        if subprocess.run([sys.executable, "-c", "import pytest, torch"], capture_output=True).returncode == 0:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
            if args.quick:
                command += ["-m", "not slow"]
            code, _, seconds = runner.run("pytest", command)
            table.append(("pytest", tally(report, code), seconds))
        else:
            print("-- pytest: not available")
            table.append(("pytest: not available", {"passed": 0, "failed": 0, "skipped": 1}, 0.0))
    if args.only in (None, "sanitize") and not args.quick:
        sanitizers = run_sanitizers(runner)

    counts = {kind: sum(c[kind] for _, c, _ in table) for kind in ("passed", "failed", "skipped")}
    errors = worst_errors(runner.errors)
    record = {
        "hash": tree_hash(),
        "date": time.strftime("%Y-%m-%d"),
        **facts,
        "counts": counts,
        "programs": {name: {**c, "seconds": round(s, 1)} for name, c, s in table},
        "worst_errors": errors,
        "sanitizers": sanitizers,
        "timings": timings(runner) if args.only is None and not args.filter else {},
    }
    text = json.dumps(record, indent=1) + "\n"
    (runner.logs / "last_run.json").write_text(text)
    if args.only is None and not args.filter:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(text)
    bad = counts["failed"] or any(not verdict.startswith(("clean", "not available", "listed")) for verdict in sanitizers.values())
    print(f"\n{facts['gpu']}, driver {facts['driver']}; logs in {runner.logs}")
    for name, c, seconds in table:
        print(f"{name:<28} {c['passed']:>5} passed {c['failed']:>3} failed {c['skipped']:>3} skipped  {seconds:6.1f} s")
    for tensor, entry in errors.items():
        print(f"worst {tensor:<22} {float(entry['error']):.1e} of {float(entry['limit']):.1e}  {entry['case']}")  # type: ignore[arg-type]
    for tool, verdict in sanitizers.items():
        print(f"{tool:<28} {verdict}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if bad else 0


def run_sanitizers(runner: Runner) -> dict[str, str]:
    """tool -> clean, not available, or what it found. racecheck: reports listed in docs/gpu/racecheck.md are counted, not hidden."""
    tool = shutil.which("compute-sanitizer") or next(iter(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))), "")
    programs = runner.programs("qla_test_op", DEVICE)
    if not tool or not programs:
        return {name: "not available" for name in SANITIZERS}
    verdicts = {}
    for name in SANITIZERS:
        found, failed, refused = 0, False, False
        for program in programs:
            google = program.name.startswith("qla_test_")
            chosen = ["--gtest_brief=1", "--gtest_filter=" + (runner.args.filter or SMALL)] if google else []
            command = [tool, "--tool", name, "--error-exitcode", "99", str(program), *chosen]
            code, text, _ = runner.run(f"{name}-{program.name}", command)
            match = FOUND.search(text)
            refused |= "Device not supported" in text
            found += int(match[1]) if match else 0
            failed |= code != 0 and not match
        verdicts[name] = "not available" if refused else f"{found} reports" if found else "failed to run" if failed else "clean"
    if verdicts["racecheck"].endswith("reports") and (ROOT / "docs/gpu/racecheck.md").exists():
        verdicts["racecheck"] = f"listed: {verdicts['racecheck']}, see docs/gpu/racecheck.md"
    return verdicts


def timings(runner: Runner) -> dict[str, float]:
    """A few rows of the published grid, ms: enough to notice that a change made something slower."""
    chosen = ["fwd,8192x4,16:64", "fwd,1x32768,16:64", "fwd,8192x4,8:32", "fwd,1x8192,2:8", "bwd,32k_4seq,16:32"]
    out: dict[str, float] = {}
    for rows in chosen:
        folder = runner.logs / "bench"
        command = [
            sys.executable,
            "-m",
            "qla",
            "bench",
            "--grid",
            "published",
            "--peers",
            "none",
            "--rows",
            rows,
            "--out",
            str(folder),
        ]
        code, _, _ = runner.run("bench", [*command, "--pass", rows[:3]])
        if code == 0:
            for line in (folder / "cuda.jsonl").read_text().splitlines():
                row = json.loads(line)
                if row.get("ours_ms"):
                    out[f"{row['pass']} {row['lengths']} {row['heads']}"] = round(row["ours_ms"], 4)
    return out


if __name__ == "__main__":
    sys.exit(main())
