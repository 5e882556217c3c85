"""The ptxas gate: registers, stack and shared memory of every kernel from the compiler's own words.

  ptxas_report.py BUILD            fails on spills, on a remark that serialises wgmma or ignores setmaxnreg (C7508-C7517), and
                                   where a kernel's registers are not those of docs/kernels/resources.csv
  ptxas_report.py BUILD --record   writes docs/kernels/resources.csv

The words lie beside each object (tools/nvcc_log), so nothing is compiled twice.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/kernels/resources.csv"
FIELDS = [
    "kernel",
    "arch",
    "registers",
    "barriers",
    "static_shared_bytes",
    "stack_bytes",
    "spill_store_bytes",
    "spill_load_bytes",
]
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?")
SHARED = re.compile(r"(\d+) bytes smem")
REMARK = re.compile(r"\b(C75(?:0[89]|1[0-7]))\b")


def demangle(names: list[str]) -> dict[str, str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return {n: n for n in names}
    plain = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    # the arguments after the name and its template arguments say nothing here
    return {n: re.sub(r"\)::|\(anonymous namespace\)::", "", cut_arguments(p)) for n, p in zip(names, plain)}


def cut_arguments(signature: str) -> str:
    signature = signature.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    depth = 0
    for i, c in enumerate(signature):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return signature[:i]
    return signature


def read_logs(build: Path) -> tuple[list[dict[str, str]], list[str]]:
    rows, faults = [], []
    logs = sorted(build.rglob("*.nvcc.log"))
    for log in logs:
        if not log.with_name(log.name.removesuffix(".nvcc.log")).exists():
            continue  # of an object that no longer is
        row: dict[str, str] | None = None
        for line in log.read_text(errors="replace").splitlines():
            if match := REMARK.search(line):
                faults.append(f"{log.name}: {match[1]}: {line.strip()}")
            if match := ENTRY.search(line):
                row = {"kernel": match[1], "arch": match[2]}
                rows.append(row)
            elif row is not None and (match := STACK.search(line)):
                # the lines of called functions follow the kernel's own: keep the worst
                for field, value in zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), match.groups()):
                    row[field] = str(max(int(value), int(row.get(field, 0))))
            elif row is not None and (match := USED.search(line)):
                row["registers"], row["barriers"] = match[1], match[2] or "0"
                shared = SHARED.search(line)
                row["static_shared_bytes"] = shared[1] if shared else "0"
    return rows, faults


def main() -> int:
    build = Path(sys.argv[1])
    rows, faults = read_logs(build)
    names = demangle(sorted({r["kernel"] for r in rows}))
    for row in rows:
        row["kernel"] = names[row["kernel"]]
    rows.sort(key=lambda r: (r["kernel"], r["arch"]))
    for row in rows:
        if row.get("spill_store_bytes", "0") != "0" or row.get("spill_load_bytes", "0") != "0":
            faults.append(f"{row['kernel']} ({row['arch']}): spills {row['spill_store_bytes']} / {row['spill_load_bytes']} bytes")
    width = max([len(r["kernel"]) for r in rows], default=6)
    for row in rows:
        print(f"{row['kernel']:<{width}}  {row['arch']:<8} {row.get('registers', '?'):>4} registers")
    if "--record" in sys.argv[2:]:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        with TABLE.open("w", newline="") as f:
            writer = csv.DictWriter(f, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"wrote {TABLE.relative_to(ROOT)}: {len(rows)} kernels")
    else:
        recorded: dict[tuple[str, str], str] = {}
        if TABLE.exists():
            with TABLE.open() as f:
                recorded = {(r["kernel"], r["arch"]): r["registers"] for r in csv.DictReader(f)}
        now = {(r["kernel"], r["arch"]): r.get("registers", "?") for r in rows}
        for key in sorted(recorded.keys() | now.keys()):
            if recorded.get(key) != now.get(key):
                faults.append(
                    f"{key[0]} ({key[1]}): {now.get(key, 'no such kernel')} registers, recorded {recorded.get(key, 'nothing')}; "
                    "look why, then ./dev ptxas --record"
                )
    for fault in faults:
        print("ptxas:", fault)
    print(f"ptxas: {len(rows)} kernels, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
