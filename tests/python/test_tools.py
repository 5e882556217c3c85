"""What ./dev reads and says: test counts, the ptxas gate, the GPU record."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
if not TOOLS.exists():
    pytest.skip("not a source tree", allow_module_level=True)

GTEST = """<testsuites><testsuite name="S">
<testcase name="Good" classname="S" status="run" result="completed"/>
<testcase name="Bad" classname="S" status="run" result="completed"><failure message="x"/></testcase>
<testcase name="Left" classname="S" status="run" result="skipped"><skipped message="why"/></testcase>
</testsuite></testsuites>"""
CTEST = """<testsuite><testcase name="op" classname="op" status="{op}"/><testcase name="example" classname="example" status="run"/></testsuite>"""
PYTEST = """<testsuites><testsuite><testcase classname="t" name="a"/><testcase classname="t" name="b"><skipped/></testcase></testsuite></testsuites>"""


def tool(name: str, *words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(root / "tools" / name), *words], capture_output=True, text=True, timeout=60)


def reports(folder: Path, gtest: str | None, op: str = "run") -> Path:
    (folder / "gtest").mkdir()
    if gtest is not None:
        (folder / "gtest/qla_test_op.xml").write_text(gtest)
    (folder / "ctest.xml").write_text(CTEST.format(op=op))
    (folder / "pytest.xml").write_text(PYTEST)
    return folder


def test_counts_of_all_suites_are_the_last_line(tmp_path):
    done = tool("count_tests.py", str(reports(tmp_path, GTEST, op="fail")))
    assert done.stdout.splitlines()[-1] == "3 passed, 1 failed, 2 skipped" and done.returncode == 1
    assert "S.Bad" in done.stdout


def test_a_program_that_died_without_a_report_is_a_failure(tmp_path):
    done = tool("count_tests.py", str(reports(tmp_path, GTEST[:60], op="fail")))
    assert done.stdout.splitlines()[-1] == "2 passed, 1 failed, 1 skipped" and done.returncode == 1


def test_a_program_that_failed_after_its_report_is_a_failure(tmp_path):
    passing = GTEST.replace('<failure message="x"/>', "")
    done = tool("count_tests.py", str(reports(tmp_path, passing, op="fail")))
    assert done.stdout.splitlines()[-1] == "4 passed, 1 failed, 2 skipped"
    assert done.returncode == 1


def test_no_test_at_all_is_a_failure(tmp_path):
    done = tool("count_tests.py", str(tmp_path))
    assert done.stdout.splitlines()[-1] == "0 passed, 0 failed, 0 skipped" and done.returncode == 1


LOG = """ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_90a'
ptxas info    : Function properties for _Z5firstPf
    0 bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 128 bytes smem
{remark}"""


@pytest.fixture
def tree(tmp_path):
    """A tree of its own, so that the record of this one stays as it is."""
    shutil.copytree(TOOLS, tmp_path / "tools")
    for folder in ("src/cuda", "src/core", "src/plan", "src/api", "include", "python/qla", "docs/gpu", "build"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/cuda/kernel.cu").write_text("// one\n")
    (tmp_path / "python/qla/_ffi.py").write_text("A = 1\n")
    (tmp_path / "build/first.o").write_text("")
    return tmp_path


def compile_says(tree: Path, spill: int = 0, registers: int = 40, remark: str = "") -> None:
    (tree / "build/first.o.nvcc.log").write_text(LOG.format(spill=spill, registers=registers, remark=remark))


def gate(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return tool("ptxas_report.py", str(tree / "build"), *words, root=tree)


def test_ptxas_gate_passes_what_is_recorded_and_refuses_the_rest(tree):
    compile_says(tree)
    assert gate(tree).returncode == 1  # nothing is recorded yet
    assert gate(tree, "--record").returncode == 0
    assert gate(tree).returncode == 0
    compile_says(tree, registers=41)
    assert gate(tree).returncode == 1 and "41 registers, recorded 40" in gate(tree).stdout
    compile_says(tree, spill=8)
    assert "spills 8 / 8 bytes" in gate(tree).stdout and gate(tree, "--record").returncode == 1
    compile_says(tree, remark="ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized")
    assert "C7510" in gate(tree).stdout and gate(tree).returncode == 1
    (tree / "build/first.o").unlink()  # the object is gone: its log no longer counts, its recorded row is missed
    assert "no such kernel" in gate(tree).stdout


def test_gpu_record_belongs_to_the_sources(tree):
    def check() -> subprocess.CompletedProcess[str]:
        return tool("gpu_record.py", "--check", root=tree)

    assert check().returncode == 1
    now = tool("gpu_record.py", root=tree).stdout.split()[1]
    record = {"hash": now, "gpu": "H200", "counts": {"passed": 3, "failed": 0, "skipped": 0}}
    (tree / "docs/gpu/last_run.json").write_text(json.dumps(record))
    assert check().returncode == 0
    for damage in ({"counts": {"passed": 2, "failed": 1, "skipped": 0}}, {"unfinished": ["pytest"]}):
        (tree / "docs/gpu/last_run.json").write_text(json.dumps({**record, **damage}))
        assert check().returncode == 1, damage
    (tree / "docs/gpu/last_run.json").write_text(json.dumps(record))
    for changed in ("src/cuda/kernel.cu", "python/qla/_ffi.py"):
        before = (tree / changed).read_text()
        (tree / changed).write_text(before + "\n")
        assert check().returncode == 1, changed
        (tree / changed).write_text(before)
    (tree / "src/plan/new.hpp").write_text("")
    assert check().returncode == 1
    (tree / "docs/gpu/UNVERIFIED.md").write_text("# Not run\n")
    assert check().returncode == 1  # a heading alone says nothing
    (tree / "docs/gpu/UNVERIFIED.md").write_text("# Not run\n\nnew.hpp: no machine was free.\n")
    assert check().returncode == 0 and "no machine was free" in check().stdout


def test_racechecks_reports_count_as_listed_by_their_program(tmp_path):
    code = """
import sys
from gpu_jobs import Job
from gpu_report import sanitizer_verdicts
found = "RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
jobs = [Job(f"racecheck.{name}", [], "racecheck", code=99, text=found) for name in sys.argv[1:]]
print(sanitizer_verdicts(jobs, ("racecheck",))["racecheck"])
"""

    def verdict(*names: str) -> str:
        return subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=TOOLS, check=True).stdout

    assert verdict("qla_test_op.0", "qla_test_op.1", "qla_device_test_forward").startswith("listed: 9 reports")
    assert verdict("qla_test_op.0", "qla_device_test_nobody") == "6 reports\n"


def test_file_check_refuses_length_and_blanks(tmp_path):
    shutil.copytree(TOOLS, tmp_path / "tools")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "long.cpp").write_text("int x;\n" * 601)
    (tmp_path / "blank.py").write_text("x = 1 \n")
    done = subprocess.run([sys.executable, "tools/check_files.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "long.cpp: 601 lines" in done.stdout and "blank.py:1" in done.stdout


def test_readme_figures_are_written_only_when_asked_for(tmp_path):
    shutil.copytree(TOOLS, tmp_path / "tools")
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "docs/bench", tmp_path / "docs/bench")
    recorded = (ROOT / "README.md").read_text()
    changed = recorded.replace("GFLOP/s of AVX2", "GFLOP/s or so of AVX2").replace("no row slower", "some rows slower")
    assert changed != recorded
    (tmp_path / "README.md").write_text(changed)
    for words, code in ((("--help",), 0), (("--check",), 1), (("--nothing",), 2)):
        assert tool("readme_figures.py", *words, root=tmp_path).returncode == code
        assert (tmp_path / "README.md").read_text() == changed, words
    assert tool("readme_figures.py", root=tmp_path).returncode == 0
    assert (tmp_path / "README.md").read_text() == recorded
