"""Sums GoogleTest, ctest and pytest results; the last line is `N passed, N failed, N skipped`, failures exit with 1."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def parse(path: Path) -> ET.Element | None:
    try:
        return ET.parse(path).getroot()
    except (OSError, ET.ParseError):  # the program died before it closed its report
        return None


def count_cases(root: ET.Element) -> dict[str, str]:
    """name -> passed, failed or skipped, for GoogleTest's, ctest's and pytest's JUnit dialects."""
    out: dict[str, str] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
            out[name] = "failed"
        elif (
            case.find("skipped") is not None
            or case.get("result") in ("skipped", "suppressed")
            or case.get("status") in ("notrun", "disabled")
        ):
            out.setdefault(name, "skipped")
        else:
            out.setdefault(name, "passed")
    return out


def main() -> int:
    folder = Path(sys.argv[1])
    results: dict[str, str] = {}
    suites = {path.stem: parse(path) for path in sorted((folder / "gtest").glob("*.xml"))}
    for suite, root in suites.items():
        if root is not None:
            results.update({f"{suite}: {name}": verdict for name, verdict in count_cases(root).items()})
    ctest = parse(folder / "ctest.xml")
    for name, verdict in count_cases(ctest).items() if ctest is not None else []:
        # A GoogleTest program was counted test by test above; it counts here when it died without a report.
        program = name.rsplit(".", 1)[-1]
        reported = suites.get(f"qla_test_{program}")
        if reported is None:
            results[f"ctest: {program}"] = verdict
        elif verdict == "failed" and not any(v == "failed" for v in count_cases(reported).values()):
            results[f"ctest: {program} failed as a whole"] = "failed"
    if (folder / "pytest.xml").exists():
        root = parse(folder / "pytest.xml")
        results.update(
            {f"pytest: {n}": v for n, v in count_cases(root).items()} if root is not None else {"pytest: no report": "failed"}
        )

    counts = {kind: sum(1 for v in results.values() if v == kind) for kind in ("passed", "failed", "skipped")}
    for name, verdict in results.items():
        if verdict == "failed":
            print(f"FAILED {name}")
    if not results:
        print("no test ran")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not results else 0


if __name__ == "__main__":
    sys.exit(main())
