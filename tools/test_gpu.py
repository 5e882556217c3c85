"""`./dev test-gpu`: every test on CUDA, the four sanitizers on small cases, a short table last, docs/gpu/last_run.json.

Self-contained: needs no network and nothing but python3 with torch and pytest, a driver, and either a build or a folder
given by --prebuilt (libqla.so, libqla_poison.so and the test programs, flat or as in build/release; jitter/libqla.so, built with
-DQLA_JITTER=ON, in it or beside it). The time goes into the float64 reference on the host, so everything runs side by side; timings
are taken afterwards, alone. A tool that is missing is reported as "not available", never as passed; what the deadline cut off is
listed as unfinished. Exits with 1 when a test fails, a sanitizer finds something, something is unfinished, or no GPU serves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from count_tests import count_cases, parse
from gpu_jobs import Job, run_all
from gpu_record import RECORD, ROOT, tree_hash
from gpu_report import gpu_facts, print_table, sanitizer_verdicts, timings, worst_errors

GOOGLE = ("qla_test_op", "qla_test_fuzz", "qla_test_abi")  # unit looks inside the host library: nothing in it runs on a GPU
DEVICE = "qla_device_*"  # one-primitive programs that print "N passed M failed"
SANITIZERS = ("memcheck", "initcheck", "synccheck", "racecheck")
ONLY_16_BIT = (
    "-*_f32_cuda*:*_f64_cuda*"  # the kernels take 16-bit tensors; that others are refused is tested once, in abi and pytest
)
FUZZ_SEEDS, FUZZ_PARTS = 150, 5
# T <= 400, four heads, guards and gaps in all: what a sanitizer gets through in seconds
SMALL = "*BR03*bf16*:*BR15_T*bf16*:*BR17*bf16*:*BR33*bf16*:*BR38_around*bf16*:*BR40*:*BR56_views*bf16*:*BR57*bf16*"
# program -> what of it a sanitizer gets through in seconds
SANITIZED = {
    "qla_test_op": ["--gtest_brief=1", "--gtest_filter=" + SMALL],
    "qla_device_test_primitives": [],
    "qla_device_test_plan": ["quick"],
    "qla_device_test_cp_merge": ["quick"],
    "qla_device_test_backward_cut": ["quick"],
    "qla_device_test_forward": ["fused"],
    "qla_device_test_forward_balanced": ["quick"],
    "qla_device_test_chunk_intra": ["quick"],
}
JITTER = "jitter"  # folder of the library whose warps pause at random (src/cuda/ptx/jitter.cuh)
RACECHECK_SHARDS = 3  # of qla_test_op, the longest of all sanitizer runs
ARCHIVE_SECONDS = 15.0  # between two versions of the archive: what a machine that goes away takes along


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev test-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prebuilt", type=Path, help="folder with libqla.so and the test programs; default build/release")
    parser.add_argument(
        "--quick", action="store_true", help="no sanitizers, no Python tests marked slow, no timings; nothing is recorded"
    )
    parser.add_argument("--only", choices=["cpp", "python", "sanitize", "bench"], help="one part alone; then nothing is recorded")
    parser.add_argument("--filter", help="of GoogleTest names; then nothing is recorded")
    parser.add_argument("--deadline", type=float, default=200.0, help="seconds for tests and sanitizers together (default 200)")
    parser.add_argument("--shards", type=int, default=16, help="processes of the op table (default 16)")
    parser.add_argument("--out", type=Path, help="folder for logs and a copy of last_run.json")
    parser.add_argument(
        "--tar",
        type=Path,
        help="everything worth keeping in one archive: docs/gpu, docs/bench, logs; written anew every few jobs, so it survives a run that is cut off",
    )
    return parser.parse_args()


def find_tool() -> str | None:
    return shutil.which("compute-sanitizer") or next(iter(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))), None)


class Session:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.build = (args.prebuilt or ROOT / "build/release").resolve()
        self.logs = Path(args.out or tempfile.mkdtemp(prefix="qla-gpu-")).resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        found = sorted(p for p in self.build.rglob("libqla.so") if p.parent.name != JITTER)
        if not found:
            sys.exit(f"test-gpu: found no libqla.so in {self.build}; run ./dev build, or give --prebuilt DIR")
        self.library = found[0]
        places = [self.build / JITTER / "libqla.so", self.build.parent / JITTER / "libqla.so"]
        self.jittered = next((p for p in places if p.exists()), None)
        if self.jittered is None:
            print(f"test-gpu: no {JITTER}/libqla.so: nothing is run with kernels that pause")
        self.environment = {
            **os.environ,
            "QLA_LIBRARY": str(self.library),
            "QLA_TEST_BACKEND": "cuda",
            "QLA_TEST_DEVICE": "cuda",
            "QLA_TEST_ERRORS": str(self.logs / "errors.csv"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")])),
        }

    def programs(self, pattern: str) -> list[Path]:
        return [p for p in sorted(self.build.rglob(pattern)) if p.is_file() and os.access(p, os.X_OK) and "." not in p.name]

    def google_jobs(self) -> list[Job]:
        jobs = []
        for program in [p for name in GOOGLE for p in self.programs(name)]:
            if program.name == "qla_test_fuzz" and not self.args.filter:
                jobs += self.fuzz_jobs(program)
                continue
            shards = {"qla_test_op": self.args.shards}.get(program.name, 1)
            for shard in range(shards):
                name = f"{program.name}.{shard}" if shards > 1 else program.name
                extra = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)} if shards > 1 else {}
                jobs.append(self.google_job(program, name, self.args.filter or ONLY_16_BIT, extra))
        return jobs

    def google_job(self, program: Path, name: str, chosen: str, extra: dict[str, str]) -> Job:
        report = self.logs / f"{name}.xml"
        command = [str(program), "--gtest_brief=1", f"--gtest_output=xml:{report}", f"--gtest_filter={chosen}"]
        return Job(name, command, program.name, extra, report=report)

    def fuzz_jobs(self, program: Path) -> list[Job]:
        """One test of 150 seeds is most of the fuzzer: its seeds are spread over processes, each counted as one test."""
        jobs = [self.google_job(program, f"{program.name}.others", "-*Differential*", {})]
        for first in range(1, FUZZ_SEEDS + 1, FUZZ_SEEDS // FUZZ_PARTS):
            seeds = {"QLA_FUZZ_SEED": str(first), "QLA_FUZZ_CASES": str(FUZZ_SEEDS // FUZZ_PARTS)}
            jobs.append(self.google_job(program, f"{program.name}.seed{first}", "*Differential*", seeds))
        return jobs

    def device_jobs(self) -> list[Job]:
        return [Job(p.name, [str(p)], p.name) for p in self.programs(DEVICE)] if not self.args.filter else []

    def jitter_jobs(self) -> list[Job]:
        """Small cases, random ones and calls from several processes, each held to the undisturbed library's bits, with kernels that pause."""
        if self.jittered is None or self.args.filter:
            return []
        library = {"QLA_LIBRARY": str(self.jittered)}
        library["LD_LIBRARY_PATH"] = os.pathsep.join([str(self.jittered.parent), self.environment["LD_LIBRARY_PATH"]])
        jobs = []
        for program, chosen in (("qla_test_op", SMALL), ("qla_test_fuzz", "*Differential*")):
            for path in self.programs(program):
                job = self.google_job(path, f"{JITTER}.{program}", chosen, {**library, "QLA_FUZZ_CASES": "40"})
                job.group = JITTER
                jobs.append(job)
        return [*jobs, *self.stress_jobs(f"{JITTER}.", ["--library", str(self.jittered)])]

    def stress_jobs(self, prefix: str = "", more: Sequence[str] = ()) -> list[Job]:
        """Calls and training steps from several processes at a time, each held to a first run's bits: one test each."""
        command = [sys.executable, str(ROOT / "tests/python/stress.py"), "--seconds", "15", "--patience", "60"]
        command += ["--processes", "3", "--keep", str(self.logs / "wrong"), *more]
        kinds = ("direct", "steps")
        return [Job(f"{prefix}stress.{k}", [*command, "--kind", k], f"{prefix}stress", timeout=150.0, alone=True) for k in kinds]

    def python_jobs(self) -> list[Job]:
        report = self.logs / "pytest.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        found = subprocess.run([sys.executable, "-c", "import xdist; print(xdist.__version__)"], capture_output=True, text=True)
        version = tuple(int(x) for x in re.findall(r"\d+", found.stdout)[:2])
        if version:
            command += ["-n", str(min(12, os.cpu_count() or 1))]
        if version >= (3, 2):
            command += ["--dist", "worksteal"]  # single tests take up to a fifth of the run
        if self.args.quick:
            command += ["-m", "not slow"]
        return [Job("pytest", command, "pytest", report=report)]

    def command_line_jobs(self) -> list[Job]:
        """The demo trains on the GPU, the self-test compares with the recurrence: each is one test."""
        qla = [sys.executable, "-m", "qla"]
        demo = [*qla, "demo", "--device", "cuda", "--steps", "30", "--out", str(self.logs / "demo.png")]
        return [
            Job("demo", demo, "demo", timeout=150.0, alone=True),
            Job("selftest", [*qla, "selftest", "--device", "cuda", "--seconds", "30"], "selftest", timeout=150.0, alone=True),
        ]

    def sanitizer_jobs(self) -> list[Job]:
        tool = find_tool()
        jobs = []
        for name in SANITIZERS if tool else ():
            for program, chosen in [(p, words) for pattern, words in SANITIZED.items() for p in self.programs(pattern)]:
                command = [str(tool), "--tool", name, "--error-exitcode", "99", "--print-limit", "10000", str(program), *chosen]
                shards = RACECHECK_SHARDS if (name, program.name) == ("racecheck", "qla_test_op") else 1
                for shard in range(shards):
                    extra = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)} if shards > 1 else {}
                    label = f"{name}.{program.name}" + (f".{shard}" if shards > 1 else "")
                    jobs.append(Job(label, command, name, extra))
        return jobs

    def jobs(self) -> list[Job]:
        """The long ones first."""
        only, out = self.args.only, []
        if only in (None, "python"):
            out += self.python_jobs() + self.command_line_jobs()
        if only in (None, "sanitize") and not self.args.quick:
            out += self.sanitizer_jobs()
        if only in (None, "cpp"):
            out += self.google_jobs() + self.device_jobs() + self.jitter_jobs()
            out += self.stress_jobs() if not self.args.filter else []
        return out


def tally(job: Job) -> dict[str, int]:
    if job.alone:
        return {"passed": int(job.code == 0), "failed": int(job.code != 0 and not job.late), "skipped": 0}
    if job.report is None:
        passed, failed = job.summary()
        return {"passed": passed, "failed": max(failed, int(job.code not in (0, None))), "skipped": 0}
    root = parse(job.report)
    verdicts = list(count_cases(root).values()) if root is not None else []
    counts = {kind: verdicts.count(kind) for kind in ("passed", "failed", "skipped")}
    if job.code and not job.late and not counts["failed"]:
        counts["failed"] = 1  # died without a report
    return counts


def served(session: Session) -> tuple[bool, str]:
    os.environ["QLA_LIBRARY"] = str(session.library)
    sys.path.insert(0, str(ROOT / "python"))
    from qla import _ffi

    if _ffi.device_count() == 0:
        return False, f"the library sees no CUDA device ({_ffi.build_info()})"
    info = _ffi.device_info(0)
    return bool(info.served), f"{info.name.decode()}: {(info.kernels or info.reason).decode()}"


def make_record(session: Session, jobs: list[Job], facts: dict[str, str], times: dict[str, float]) -> dict[str, object]:
    programs: dict[str, dict[str, float]] = {}
    for job in jobs:
        if job.group in SANITIZERS or job.code is None:
            continue
        entry = programs.setdefault(job.group, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        for kind, count in tally(job).items():
            entry[kind] += count
        entry["seconds"] = round(max(entry["seconds"], job.seconds), 1)
    return {
        "hash": tree_hash(),
        "date": time.strftime("%Y-%m-%d"),
        **facts,
        "counts": {kind: int(sum(p[kind] for p in programs.values())) for kind in ("passed", "failed", "skipped")},
        "programs": programs,
        "unfinished": [job.name for job in jobs if job.late or job.code is None],
        "worst_errors": worst_errors(session.logs / "errors.csv"),
        "sanitizers": sanitizer_verdicts([j for j in jobs if j.group in SANITIZERS], SANITIZERS),
        "timings": times,
    }


def archive(target: Path, logs: Path) -> None:
    """One file with all that a run has to show. The last version stands until the next is whole."""
    keep = [p for folder in ("docs/gpu", "docs/bench") for p in sorted((ROOT / folder).iterdir()) if p.is_file()]
    part = target.with_name(target.name + ".part")
    with tarfile.open(part, "w:gz", compresslevel=6) as out:
        for path in keep:
            out.add(path, path.relative_to(ROOT))
        out.add(logs, "logs")
    part.replace(target)


def main() -> int:
    args = arguments()
    session = Session(args)
    facts = gpu_facts()
    ok, why = served(session)
    print(f"{why}; driver {facts['driver']}; library {session.library}; logs in {session.logs}")
    if not ok:
        print("test-gpu: no device here is served by the kernels: nothing was tested")
        return 1
    whole = args.only is None and not args.filter and not args.quick

    def write(record: dict[str, object]) -> None:
        text = json.dumps(record, indent=1) + "\n"
        (session.logs / "last_run.json").write_text(text)
        if whole:
            RECORD.parent.mkdir(parents=True, exist_ok=True)
            RECORD.write_text(text)

    jobs = session.jobs()
    archived = time.monotonic()

    def after_each() -> None:  # what was found out survives a machine that goes away
        nonlocal archived
        write(make_record(session, jobs, facts, {}))
        if args.tar and time.monotonic() - archived > ARCHIVE_SECONDS:
            archive(args.tar, session.logs)
            archived = time.monotonic()

    run_all(jobs, session.environment, session.logs, args.deadline, after_each)
    if args.tar:
        archive(args.tar, session.logs)
    times = timings(session.environment, session.logs / "bench") if whole or args.only == "bench" else {}
    if whole:
        for path in (session.logs / "bench").glob("cuda*"):
            shutil.copy(path, ROOT / "docs/bench" / path.name)
    record = make_record(session, jobs, facts, times)
    write(record)
    code = print_table(record, SANITIZERS)
    if args.tar:
        archive(args.tar, session.logs)
    return code


if __name__ == "__main__":
    sys.exit(main())
