"""The record of the last run on a GPU: docs/gpu/last_run.json and whether it belongs to these sources.

  gpu_record.py            prints the tree's hash and the record's
  gpu_record.py --check    exits 1 when they differ, unless docs/gpu/UNVERIFIED.md says which part was not run and why

The hash covers what decides results on a GPU: kernels, plan, API, header and bindings. Comments count: a hash that
understands C++ would be one more thing to verify.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/cuda", "src/core", "src/plan", "src/api", "include")
BINDINGS = ("_[a-z]*.py", "ops*.py", "api*.py")
SUFFIXES = {".cu", ".cuh", ".cpp", ".hpp", ".h", ".inl"}
RECORD = ROOT / "docs/gpu/last_run.json"
UNVERIFIED = ROOT / "docs/gpu/UNVERIFIED.md"


def hashed_files() -> list[Path]:
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    files += [p for pattern in BINDINGS for p in (ROOT / "python/qla").glob(pattern)]
    return sorted(files, key=lambda p: p.relative_to(ROOT).as_posix())


def tree_hash() -> str:
    digest = hashlib.sha256()
    for path in hashed_files():
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def main() -> int:
    now = tree_hash()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    same = recorded.get("hash") == now
    if recorded:
        counts = recorded.get("counts", {})
        print(
            f"last GPU run: {recorded.get('gpu', '?')}, {recorded.get('date', '?')}: {counts.get('passed', '?')} passed, "
            f"{counts.get('failed', '?')} failed, {counts.get('skipped', '?')} skipped"
        )
    if "--check" not in sys.argv[1:]:
        print(f"sources  {now}\nrecorded {recorded.get('hash', 'none')}")
        return 0
    whole = not recorded.get("counts", {}).get("failed") and not recorded.get("unfinished")
    if same and whole:
        print("gpu-record: the last run on a GPU belongs to these sources")
        return 0
    why = (
        "no GPU run is recorded"
        if not recorded
        else "the recorded run failed"
        if same
        else "the sources changed since the recorded run"
    )
    note = UNVERIFIED.read_text().strip() if UNVERIFIED.exists() else ""
    if len([line for line in note.splitlines() if line.strip() and not line.startswith("#")]) >= 1:
        print(f"gpu-record: {why}; docs/gpu/UNVERIFIED.md says so:")
        print(note)
        return 0
    print(f"gpu-record: {why}: run ./dev test-gpu on a machine with a GPU, or say in docs/gpu/UNVERIFIED.md")
    print("which part was not run and why")
    return 1


if __name__ == "__main__":
    sys.exit(main())
