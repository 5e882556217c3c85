"""No source file is longer than 600 lines (400 is the aim, printed), none has tabs or trailing blanks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HARD, AIM = 600, 400
SOURCES = {".c", ".cpp", ".hpp", ".h", ".cu", ".cuh", ".inl", ".py", ".cmake", ".sh"}


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    faults, long = [], []
    for name in listed:
        path = Path(name)
        if path.suffix not in SOURCES and name not in ("dev", ".ci/run", "CMakeLists.txt") or not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > HARD:
            faults.append(f"{name}: {len(lines)} lines; at most {HARD}: split it by what it does")
        elif len(lines) > AIM:
            long.append(f"{name} {len(lines)}")
        for number, line in enumerate(lines, 1):
            if "\t" in line or line != line.rstrip():
                faults.append(f"{name}:{number}: tab or trailing blank")
                break
    if long:
        print(f"over the aim of {AIM} lines: " + ", ".join(long))
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
