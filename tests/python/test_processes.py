"""What a process of its own shows: the first call of a spawned worker, and how much memory a first call takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qla
from common import ROOT, Device
from qla import _ffi

SPAWN = """
import hashlib
import multiprocessing
import sys
import torch
from common import Device


def call(results):
    import qla

    inputs = {name: x.requires_grad_() for name, x in Device(sys.argv[1]).inputs(700).items()}
    o, state = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    grads = torch.autograd.grad(o.float().sum() + state.sum(), list(inputs.values()))
    results.put([hashlib.sha256(x.detach().float().cpu().numpy().tobytes()).hexdigest() for x in (o, state, *grads)])


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    workers = [spawn.Process(target=call, args=(results,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    call(results)
    found = [results.get() for _ in range(3)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert found[0] == found[1] == found[2]
    print("the same bits")
"""


@pytest.mark.br(70)
def test_first_call_of_spawned_workers(device: Device, tmp_path: Path) -> None:
    """Beside the parent's own first call."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests/python")])}
    if device.name == "cuda":  # one device of those that there are
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[-1]
    environment.setdefault("QLA_LIBRARY", str(Path(str(_ffi.library_path())).resolve()))
    done = subprocess.run(
        [sys.executable, str(script), device.name], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stderr[-2000:]


@pytest.mark.br(87)
def test_a_first_call_takes_what_is_documented(device: Device) -> None:
    """300 MiB for outputs and workspace of 8,192 tokens with 32 value heads; nothing of it stays."""
    if device.name == "cpu":
        pytest.skip("torch counts the device's memory")
    inputs = device.inputs(8192, (8, 32))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, reserved, total = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction((reserved + (300 << 20)) / total)
    try:
        with torch.no_grad():
            o, state = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    outputs = o.numel() * o.element_size() + state.numel() * state.element_size()
    assert peak <= outputs + (256 << 20) and kept <= outputs + (1 << 20)
    finite = bool(torch.isfinite(o).all())
    assert finite
    del o, state
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
