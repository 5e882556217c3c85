"""The command line: every subcommand answers, wrong input is refused with a sentence, nothing needs more than it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qla
from qla import _ffi, bench_grid, cli, fma_rate, lengths, planview

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = str(Path(qla.__path__[0]).resolve().parent)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PACKAGES, **environment}
    return subprocess.run(
        [sys.executable, "-m", "qla", *words], capture_output=True, text=True, timeout=600, env=env, cwd=ROOT / "tests"
    )


def test_info_says_what_there_is():
    done = run("info")
    assert done.returncode == 0, done.stderr
    for word in ("library", "instruction level", "cuda", "flash_qla", "(ours)"):
        assert word in done.stdout, done.stdout


def test_info_without_a_library_says_where_it_looked():
    done = run("info", QLA_LIBRARY="/nowhere/libqla.so")
    assert done.returncode == 1
    assert "/nowhere/libqla.so" in done.stdout and "Traceback" not in done.stderr


def test_a_library_without_a_slash_is_a_file_here():
    path = _ffi.library_path()
    done = subprocess.run(
        [sys.executable, "-c", "from qla import _ffi; print(_ffi.library_path(), _ffi.build_info())"],
        capture_output=True, text=True, timeout=300, cwd=Path(path).parent,
        env={**os.environ, "PYTHONPATH": PACKAGES, "QLA_LIBRARY": Path(path).name},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith(os.path.realpath(path) + " "), done.stdout + done.stderr


def test_info_names_another_flash_qla(tmp_path):
    (tmp_path / "flash_qla").mkdir()
    (tmp_path / "flash_qla/__init__.py").write_text("")
    done = run("info", PYTHONPATH=os.pathsep.join([str(tmp_path), PACKAGES]))
    assert done.returncode == 0 and "NOT ours" in done.stdout and str(tmp_path) in done.stdout


def test_plan_prints_lists_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    done = run("plan", "1024+7168", "--heads", "2", "4", "--log-decay", "-0.5", "0", "--list", "--png", str(picture))
    assert done.returncode == 0, done.stderr
    assert "sequence head" in done.stdout and picture.stat().st_size > 5000


def test_decays_as_floats_are_written():
    plain, power = (
        run("plan", "65536", "--backend", "cuda", "--log-decay", *words) for words in (("-0.001", "-2"), ("-1e-3", "-2e0"))
    )
    assert power.returncode == 0 and power.stdout == plain.stdout, power.stderr


def test_plan_of_nothing_says_so():
    done = run("plan", "0")
    assert done.returncode == 0 and done.stdout.startswith("plan: no tokens: nothing to compute\n"), done.stdout


def test_plan_for_a_gpu_names_its_workspace():
    done = run("plan", "65536", "--heads", "16", "64", "--backend", "cuda")
    assert done.returncode == 0, done.stderr
    assert re.search(r"workspace 536870912 bytes, in \d+ ranges", done.stdout), done.stdout  # QLA_FORWARD_MIB's default


def test_heads_with_a_comma():
    apart, together = (run("plan", "--heads", *heads, "1x8192", "--backend", "cuda") for heads in (("16", "32"), ("16,32",)))
    assert apart.returncode == 0 and together.stdout == apart.stdout, together.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (("plan", "12y"), "lengths"),
        (("plan", "64", "--cp", "fixed"), "--segment-chunks"),
        (("plan", "64", "--segment-chunks", "3"), "--cp fixed"),
        (("plan", "64", "--backend", "cuda", "--dtype", "fp64"), "q: expected bfloat16 or float16 on CUDA, got float64"),
        (("plan", "64", "--log-decay", "0.5"), "--log-decay: expected finite numbers of 0 or less, got 0.5"),
        (("plan", "64", "--log-decay", "nan"), "--log-decay"),
        (("plan", "64", "--log-decay", "-inf"), "--log-decay: expected finite numbers of 0 or less, got -inf"),
        (("plan", str(1 << 70)), "lengths: expected fewer than"),
        (("plan", "64", "--cp", "fixed", "--segment-chunks", str(1 << 70)), "--segment-chunks: expected at most"),
        (("plan", "64", "--png", "."), "--png: expected a file to write, got the folder"),
        (("selftest", "--device", "gpu"), "cuda:N"),
        (("selftest", "--seconds", "0"), "--seconds"),
        (("bench", "--tokens", "0"), "--tokens"),
        (("bench", "--rows", "1x"), "--grid published"),
        (("bench", "--items", "64:"), "--items: expected on a GPU, got a bench of the CPU; add --grid published"),
        (("bench", "--items", "64:8"), "--items: expected e.g. 64:"),
        (("bench", "--pass", "fwd"), "--pass: expected on a GPU"),
        (("bench", "--peers", "none"), "--peers: expected on a GPU"),
        (("calibrate", "--multiprocessors", "78"), "--multiprocessors: expected with --samples"),
        (("bench", "--cases", "nothing of the kind", "--seconds", "0.01"), "--cases"),
        ((), "usage: qla"),
        (("plan", "64", "--heads", "2", "3"), "multiple"),
        (("bench", "--device", "cpu", "--grid", "published"), "--grid"),
        (("bench", "--device", "cuda"), "no GPU"),
        (("selftest", "--device", "cuda"), "no GPU"),
        (("demo", "--device", "cuda"), "no GPU"),
        (("demo", "--steps", "0"), "--steps: expected 1 or more, got 0"),
        (("demo", "--length", str(1 << 40)), "--length: expected fewer than the text's"),
        (("demo", "--out", "/dev/null/x.png"), "/dev/null"),
        (
            ("bench", "--device", "cpu", "--tokens", "64", "--seconds", "0.01", "--cases", "8 heads, T 64", "--out", "/dev/null"),
            "/dev/null: File exists",
        ),
        (("demo", "--length", "1"), "--length: expected 2 or more, got 1"),
    ],
)
def test_wrong_input_is_refused_with_a_sentence(words, said, capsys):
    if said == "no GPU" or "0.01" in words:  # what hides the GPU, or would set this process's threads
        done = run(*words)
        code, error = done.returncode, done.stderr
    else:
        try:
            code = cli.main(words)
        except SystemExit as stop:  # argparse's own
            code = stop.code
        error = capsys.readouterr().err
    assert code != 0
    assert said in error and "Traceback" not in error, error


def test_selftest_passes_and_can_fail():
    done = run("selftest", "--seconds", "3")
    assert done.returncode == 0 and "0 wrong values" in done.stdout, done.stdout + done.stderr
    broken = "from qla import selftest, cli; selftest.LIMITS = dict.fromkeys(selftest.LIMITS, (0.0, 0.0)); raise SystemExit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", broken, "selftest", "--seconds", "0.1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "WRONG" in done.stdout


def test_bench_writes_a_line_a_table_and_a_picture(tmp_path):
    words = ("--device", "cpu", "--tokens", "192", "--seconds", "0.01", "--cases", "8 heads, T 192", "--no-transformers")
    done = run("bench", *words, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "cpu.jsonl").read_text().splitlines()[0])
    assert row["forward_mths"] > 0 and row["backward_mths"] > 0 and row["gflops"] > 0
    assert (tmp_path / "cpu.md").read_text().count("|") > 20


def test_lengths():
    assert lengths.parse_lengths("8192x4") == [8192] * 4
    assert lengths.parse_lengths("1x32768") == [32768]
    assert lengths.parse_lengths("1024+7168") == [1024, 7168]
    for wrong in ("", "a", "3x4x5", "-1", "64+", "64x0"):
        with pytest.raises(ValueError):
            lengths.parse_lengths(wrong)


def test_grid_rows_are_the_published_ones():
    rows = bench_grid.read_rows(bench_grid.find_table(None), "both", None)
    assert sum(r.direction == "fwd" for r in rows) == 171 and sum(r.direction == "bwd" for r in rows) == 32
    assert len({r.label() for r in rows}) == len(rows)
    for row in rows:
        assert sum(row.lengths) in (2048, 4096, 8192, 16384, 32768), row.label()
        tensor, moved = bench_grid.floors_ms(row, 132)
        assert row.best_ms and row.best_ms > max(tensor, moved), row.label()  # nobody beats the hardware
    with pytest.raises(ValueError, match="--rows"):
        bench_grid.read_rows(bench_grid.find_table(None), "fwd", "no such row")


def test_chunk_decays_sum_each_chunk():
    assert planview.chunk_decays([65, 0, 64], [-1.0, 0.0], 2) == [-64.0, 0.0, -1.0, 0.0, -64.0, 0.0]


def test_fma_loop_is_the_machine_code_it_says():
    code = fma_rate.machine_code()
    # vfmadd231ps ymm0, ymm10, ymm10 and ymm9, ymm10, ymm10 as an assembler writes them
    assert bytes.fromhex("c4c22db8c2") in code and bytes.fromhex("c4422db8ca") in code
    assert code.endswith(bytes.fromhex("c5fc77c3"))
