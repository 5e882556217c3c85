"""The cost model's constants: Python's coefficients are the library's model, a fit finds them again, a file brings them back."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qla
from qla import calibrate, cli, planbench, sweep
from qla.bench_grid import Row

pytest.importorskip("numpy")
PACKAGES = str(Path(qla.__path__[0]).resolve().parent)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PACKAGES, **environment}
    return subprocess.run([sys.executable, "-m", "qla", *words], capture_output=True, text=True, timeout=300, env=env)


def predicted(lengths: list[int], heads: tuple[int, int], segment: int, **environment: str) -> tuple[int, float]:
    """-> halves of V (1 or 2) and microseconds, as `qla plan` prints them; a quarter of the heads never forget."""
    words = ["plan", "+".join(map(str, lengths)), "--heads", str(heads[0]), str(heads[1]), "--backend", "cuda"]
    words += ["--cp", "fixed", "--segment-chunks", str(segment)] if segment else ["--cp", "off"]
    text = run(*words, "--log-decay", "0", "-0.05", "-0.05", "-0.05", **environment).stdout
    found = re.search(r"V in (\d) part.*predicted ([\d.]+) us", text)
    assert found, text
    return int(found[1]), float(found[2])


def ours(lengths: list[int], heads: tuple[int, int], segment: int, splits: int) -> float:
    row = calibrate.coefficients(lengths, heads, segment, splits, 132, calibrate.SHIPPED, lasting=True)
    return sum(calibrate.SHIPPED[name] * x for name, x in row.items()) - calibrate.direct_saving(
        lengths, heads, segment, splits, 132
    )


@pytest.mark.parametrize(
    ("lengths", "heads", "segment"),
    [
        ([2048], (2, 8), 0),
        ([32768], (2, 8), 32),
        ([32768], (2, 8), 64),
        ([2048] * 4, (16, 64), 0),
        ([1024] * 8, (16, 16), 0),
        ([8192], (4, 16), 16),
        ([16384, 16384], (16, 32), 0),
    ],
)
def test_coefficients_are_the_librarys_model(lengths: list[int], heads: tuple[int, int], segment: int, tmp_path: Path) -> None:
    without_fused = tmp_path / "costs.txt"
    without_fused.write_text(planbench.NO_FUSED)
    splits, us = predicted(lengths, heads, segment, QLA_COSTS=str(without_fused))
    assert abs(ours(lengths, heads, segment, splits) - us) <= 0.6 + 0.01 * us  # printed to one microsecond


# lengths that the library does not refine
@pytest.mark.parametrize(("lengths", "heads", "segment"), [([32768], (16, 16), 48), ([16384], (32, 32), 32)])
def test_coefficients_of_cuts_in_the_fused_form(lengths: list[int], heads: tuple[int, int], segment: int, tmp_path: Path) -> None:
    row = Row("fwd", "", "", lengths, heads)
    gates = [0.0, -3.2, -3.2, -3.2] * (heads[1] // 4) * sum(math.ceil(n / 64) for n in lengths)
    library = planbench.open_copies(tmp_path)[planbench.FUSED]
    plan = planbench.plan_with(library, planbench.shape_args(row, planbench.Planned(segment, planbench.FUSED)), row, gates)
    assert plan.fused == 1 and plan.segment_chunks == segment
    assert abs(ours(lengths, heads, segment, planbench.FUSED) - plan.predicted_us) <= 0.01 * plan.predicted_us


def test_fit_finds_constants_again(tmp_path: Path) -> None:
    draw = random.Random(1)
    truth = {name: value * draw.uniform(0.7, 1.4) for name, value in calibrate.SHIPPED.items()}
    samples = []
    for lengths, heads, segments in calibrate.CASES:
        for segment in segments:
            for form in (1, 2) if segment and heads[0] != heads[1] else (1, 2, planbench.FUSED):
                row = calibrate.coefficients(lengths, heads, segment, form, 132, truth)
                us = sum(truth[name] * x for name, x in row.items()) - calibrate.direct_saving(lengths, heads, segment, form, 132)
                samples.append({"lengths": lengths, "heads": heads, "segment": segment, "form": form, "us": us})
    found, rms, worst = calibrate.fit(samples, 132, calibrate.SHIPPED)
    assert rms < 1e-3 and worst < 5e-3
    for name, value in truth.items():
        assert abs(found[name] - value) < 0.05 * value + 0.02, (name, found[name], value)
    # the same by the command, whose file then changes what the library predicts
    measured, costs = tmp_path / "samples.jsonl", tmp_path / "costs.txt"
    measured.write_text("".join(json.dumps(s) + "\n" for s in samples))
    done = run("calibrate", "--samples", str(measured), "--out", str(costs))
    assert done.returncode == 0, done.stderr
    costs.write_text(costs.read_text() + planbench.NO_FUSED)
    chosen, us = predicted([32768], (2, 8), 64, QLA_COSTS=str(costs))
    row = calibrate.coefficients([32768], (2, 8), 64, chosen, 132, truth, lasting=True)
    assert abs(us - sum(truth[name] * x for name, x in row.items())) <= 0.6 + 0.02 * us


def test_a_bad_file_is_refused_with_its_line(tmp_path: Path) -> None:
    costs = tmp_path / "costs.txt"
    costs.write_text("# constants\nmain_ful 2\n")
    done = run("plan", "8192", "--backend", "cuda", QLA_COSTS=str(costs))
    assert done.returncode == 2 and f"{costs}:2" in done.stderr and "main_full" in done.stderr
    done = run("plan", "8192", "--backend", "cuda", QLA_COSTS=str(tmp_path / "none"))
    assert done.returncode == 2 and "qla calibrate" in done.stderr


def test_calibrate_without_a_gpu_says_so(tmp_path: Path) -> None:
    done = run("calibrate", "--out", str(tmp_path / "costs.txt"))
    assert done.returncode == 2 and "no GPU" in done.stderr and not (tmp_path / "costs.txt").exists()


def test_samples_without_the_fused_form_keep_its_constants(tmp_path: Path) -> None:
    samples, costs = [], tmp_path / "folder/costs.txt"
    for lengths, heads, segments in calibrate.CASES:
        for segment in segments:
            for form in (1, 2):
                row = calibrate.coefficients(lengths, heads, segment, form, 132, calibrate.SHIPPED)
                us = 1.1 * sum(calibrate.SHIPPED[name] * x for name, x in row.items())
                samples.append({"lengths": lengths, "heads": heads, "segment": segment, "form": form, "us": us})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    done = run("calibrate", "--samples", str(tmp_path / "samples.jsonl"), "--out", str(costs))
    assert done.returncode == 0, done.stderr
    kept = [line.split()[0] for line in done.stdout.splitlines() if "not fitted: as shipped" in line]
    assert kept == ["fused_4", "fused_2", "fused_1", "fused_quiet", "intra_launch", "fused_cut", "cut_fused"]
    text = costs.read_text()
    assert f"no call has them: {', '.join(kept)}" in text and "fused_4 2.34\n" in text and "launches 16.17\n" in text
    assert run("plan", "8192", "--backend", "cuda", QLA_COSTS=str(costs)).returncode == 0  # the library reads it


GOOD = {"lengths": [64], "heads": [2, 8], "segment": 0, "form": 1, "us": 9.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Title\n", ":1: expected a call"),
        (json.dumps(GOOD) + '\n{"pass": "fwd", "lengths": "1x64", "heads": "2, 8"}\n', ":2: expected a call"),
        (json.dumps({**GOOD, "us": 0}), "got '{"),
        (json.dumps({**GOOD, "heads": [2, 3]}), "got '{"),
        (json.dumps({**GOOD, "form": 4}), "got '{"),
        (json.dumps({**GOOD, "lengths": []}), "got '{"),
        ("", "empty file"),
        (json.dumps(GOOD), "expected at least"),
        (40 * (json.dumps(GOOD) + "\n"), "different calls"),
    ],
)
def test_samples_that_are_none_are_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples").write_text(text)
    assert cli.main(["calibrate", "--samples", str(tmp_path / "samples"), "--out", str(tmp_path / "costs.txt")]) == 2
    error = capsys.readouterr().err
    assert "--samples: " in error and said in error and "qla calibrate --keep" in error, error
    assert not (tmp_path / "costs.txt").exists()


def test_calibrate_without_numpy_says_so(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('hidden')")
    done = run("calibrate", "--samples", "x", PYTHONPATH=os.pathsep.join([str(tmp_path), PACKAGES]))
    assert done.returncode == 2 and "pip install numpy" in done.stderr and "Traceback" not in done.stderr


def test_segment_lengths_of_a_sweep() -> None:
    assert sweep.segment_lengths([2048], (2, 3, 4, 8, 16)) == {2: 16, 3: 11, 4: 8, 8: 4}  # never below 4 chunks
    assert sweep.segment_lengths([100], range(2, 65)) == {}
    for chunks in range(8, 520, 7):
        found = sweep.segment_lengths([64 * chunks - 5], list(range(2, 65)))
        assert all(length >= 4 and length < chunks for length in found.values())
        assert len(set(found.values())) == len(found)


def test_each_copy_of_the_library_plans_one_form(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from qla.bench_grid import Row
from qla.planbench import AUTO, FORMS, FUSED, HALVES, OWN, WHOLE, Planned, open_copies, plan_with, shape_args

libraries = open_copies(Path(sys.argv[1]))
for lengths, heads in (([32768], (2, 8)), ([8192] * 4, (16, 64)), ([1024, 7168], (4, 16))):
    row = Row("fwd", "", "", lengths, heads)
    for form, segment in [(f, s) for f in (WHOLE, HALVES) for s in (0, 16)] + [(FUSED, 0)]:
        plan = plan_with(libraries[form], shape_args(row, Planned(segment, form)), row)
        assert (FUSED if plan.fused else plan.value_splits) == form and plan.segment_chunks == segment, (lengths, form, segment)
    own = plan_with(libraries[OWN], shape_args(row, Planned(AUTO, OWN)), row)
    assert own.predicted_us < 1e5, own.predicted_us
kept = plan_with(libraries[HALVES], shape_args(row, Planned(16, HALVES, uncut=20)), row)
assert (kept.segment_chunks, kept.uncut_chunks, kept.value_splits) == (16, 20, 2)
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PACKAGES}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr


FAKE_GPU = """
import argparse, contextlib, random, sys
from pathlib import Path
import torch
from qla import planbench, sweep

def on_cpu(make):
    return lambda *args, **options: make(*args, **{k: v for k, v in options.items() if k != "device"})

torch.cuda.is_available, torch.cuda.init, torch.cuda.synchronize = (lambda: True), (lambda: None), (lambda: None)
torch.cuda._sleep, torch.cuda.stream = (lambda cycles: None), (lambda stream: contextlib.nullcontext())
torch.cuda.Stream = type("Stream", (), {"cuda_stream": 1})
torch.randn, torch.empty, torch.tensor = on_cpu(torch.empty), on_cpu(torch.empty), on_cpu(torch.tensor)

def inputs(row, seed, grads):
    tokens, (hk, hv) = sum(row.lengths), row.heads
    shapes = {"q": (hk, 128), "k": (hk, 128), "v": (hv, 128), "g": (hv,), "beta": (hv,)}
    return {name: torch.empty(1, tokens, *shape) for name, shape in shapes.items()}

class Driver:
    calls = []
    def __call__(self, name, *arguments):
        Driver.calls.append(name)
        if name == "cuEventElapsedTime":
            arguments[0]._obj.value = random.uniform(0.1, 0.13)

class Library:
    def __init__(self, real):
        self.real = real
    def __getattr__(self, name):
        if name in ("qla_gdn_forward", "qla_prepare"):
            return lambda *arguments: 0
        if name == "qla_gdn_forward_workspace_range":
            def sizes(args, least, best):
                least._obj.value, best._obj.value = 1000, 2000
                return 0
            return sizes
        return getattr(self.real, name)

planbench.make_inputs, planbench.Driver = inputs, Driver
real = planbench.open_copies
planbench.open_copies = lambda folder: {form: Library(library) for form, library in real(folder).items()}
sweep.sweep(argparse.Namespace(out=Path(sys.argv[1]), table=None, rows="2:8"))
from qla.asked import asked
assert asked(argparse.Namespace(out=Path(sys.argv[1]))) in (0, 1)
count = Driver.calls.count
assert count("cuGraphInstantiateWithFlags") == count("cuGraphExecDestroy") == count("cuStreamEndCapture") > 50
"""


def test_sweep_from_the_first_row_to_the_table(tmp_path: Path) -> None:
    """With a GPU that takes random times: every plan is asked for, every graph freed, every row written."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PACKAGES}
    done = subprocess.run([sys.executable, "-c", FAKE_GPU, str(tmp_path)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert len(rows) == 19 and "of 19 rows" in (tmp_path / "sweep.md").read_text()
    for row in rows:
        assert [0, 1] in [plan[:2] for plan in row["all"]] and row["best_us"] > 0 and row["planner_us"] > 0
    asked = [json.loads(line)["plan"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert asked.count("given") == 5 and "planner" in asked  # the planner may come to ask about others
    lengths = {segment for segment, form, _ in next(r for r in rows if r["lengths"] == "1x32768")["all"] if form == 2}
    assert {0, 8, 16, 256} <= lengths  # none, and 64, 32 and 2 segments


def test_sweep_table_names_rows_that_are_over() -> None:
    row = {
        "lengths": "1x2048",
        "heads": "2, 8",
        "uncut_us": 80.0,
        "split_us": 60.0,
        "best_us": 50.0,
        "best_segment": 8,
        "best_form": 2,
        "fused_us": 90.0,
        "planner_segment": 0,
        "planner_form": planbench.FUSED,
        "known": {"FlashQLA published": 0.0784, "FLA published": 0.1},
    }
    good = {**row, "planner_us": 52.9, "gap": 0.058, "good": True, "all": [[0, 1, 80.0]]}
    over = {**row, "planner_us": 56.0, "gap": 0.12, "good": False, "all": [[0, 1, 80.0]]}
    text = sweep.table([good, over], 3, 1.0)
    assert "1 of 2 rows" in text and "1 rows were not measured" in text and text.count("| over |") == 1
    assert "78.4 | FlashQLA published | 1.40 | over |" in text and "Rows that the planner cuts" not in text
    cut = {**good, "planner_segment": 8, "planner_us": 40.0, "known": {"FlashQLA published": 0.12}}
    text = sweep.table([cut, {**cut, "known": {"FlashQLA published": 0.03}}], 2, 1.0)  # 3 and 3 / 4 of ours
    assert (
        "cuts: 2." in text
        and "1.50 times as long as with them" in text
        and "1.50 times as long as ours with cuts, 1.00 times" in text
    )


def test_fused_form_is_in_the_model(tmp_path: Path) -> None:
    costs = tmp_path / "costs.txt"
    costs.write_text(planbench.FORCED[planbench.FUSED])
    for lengths, heads in (([8192] * 4, (16, 32)), ([1024] * 8, (16, 16)), ([4096], (2, 8))):
        _, us = predicted(lengths, heads, 0, QLA_COSTS=str(costs))
        assert abs(ours(lengths, heads, 0, planbench.FUSED) - us) <= 0.6 + 0.01 * us


def test_picture_of_context_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from qla import plotting

    rows = [
        {"pass": "fwd", "lengths": f"1x{n}", "heads": heads, "ours_ms": n * 6e-6 + 0.03, "known": {"FlashInfer 0.7.4": n * 4e-5}}
        for n in (2048, 8192)
        for heads in ("2, 8", "4, 16")
    ]
    plotting.context_parallel_picture(tmp_path / "picture.png", rows, {("1x2048", "2, 8"): 0.05})
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    plotting.context_parallel_picture(tmp_path / "none.png", [])
    assert not (tmp_path / "none.png").exists()
