"""What the torch-side tests share: sizes for each device, calls with gradients, and the limits of docs/testing.md."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qla
from qla.testing import random_inputs, recurrent_gated_delta_rule, relative_l2

# The reference is thousands of tiny torch operators: more threads only wait for each other. Tests of threads set their own number.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
GRADS = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "g": "dg",
    "beta": "dbeta",
    "initial_state": "dh0",
    "A_log": "dA_log",
    "dt_bias": "ddt_bias",
}
# (o and final state, gradients)
LIMITS = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5e-3, 1e-2),
    torch.float16: (5e-3, 1e-2),
}


@dataclass(frozen=True)
class Device:
    """A device and the sizes that suit it: small heads in float32 on the CPU, what the kernels serve on CUDA."""

    name: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.name == "cpu" else torch.bfloat16

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        halves = (torch.bfloat16, torch.float16)
        return (torch.float32, torch.float64, *halves) if self.name == "cpu" else halves

    @property
    def sizes(self) -> dict[str, int]:
        return {"k_dim": 24, "v_dim": 40} if self.name == "cpu" else {"k_dim": 128, "v_dim": 128}

    @property
    def square(self) -> dict[str, int]:
        return {"k_dim": 32, "v_dim": 32} if self.name == "cpu" else {"k_dim": 128, "v_dim": 128}

    def inputs(self, tokens: int = 130, heads: tuple[int, int] = (2, 4), batch: int = 1, **kwargs: Any) -> dict[str, Tensor]:
        kwargs = {"dtype": self.dtype, "device": self.name, **self.sizes, **kwargs}
        return random_inputs(batch, tokens, *heads, **kwargs)

    def tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(*args, device=self.name, **kwargs)

    def cu(self, *boundaries: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(boundaries, dtype=dtype, device=self.name)


def upstream(inputs: dict[str, Tensor], sequences: int | None = None, seed: int = 7) -> tuple[Tensor, Tensor]:
    """do ~ N(0, 1) in the outputs' type, dht ~ N(0, 1) / 8 in the states'."""
    make = torch.Generator().manual_seed(seed)
    q, v = inputs["q"], inputs["v"]
    do = torch.randn(v.shape, generator=make).to(q.dtype).to(q.device)
    count = q.shape[0] if sequences is None else sequences
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    dht = torch.randn(count, v.shape[2], q.shape[3], v.shape[3], generator=make).to(wide).to(q.device) / 8
    return do, dht


def leaves(inputs: dict[str, Any], wide: bool = False) -> dict[str, Any]:
    """Copies that need gradients, in float64 if wide."""
    result = {}
    for name, x in inputs.items():
        if name in GRADS and x is not None:
            x = (x.detach().double() if wide else x.detach().clone()).requires_grad_()
        result[name] = x
    return result


def run(inputs: dict[str, Any], do: Tensor | None, dht: Tensor | None, fn: Any = None, **options: Any) -> dict[str, Tensor]:
    """o, ht and every gradient of <o, do> + <ht, dht>, by `qla.chunk_gated_delta_rule` or fn."""
    fn = fn or qla.chunk_gated_delta_rule
    xs = leaves(inputs)
    return _collect(fn, xs, do, dht, options)


def reference(inputs: dict[str, Any], do: Tensor | None, dht: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """The same by the float64 token recurrence, from the rounded inputs."""
    return _collect(recurrent_gated_delta_rule, leaves(inputs, wide=True), do, dht, options)


def _collect(fn: Any, xs: dict[str, Any], do: Tensor | None, dht: Tensor | None, options: dict[str, Any]) -> dict[str, Tensor]:
    o, ht = fn(**xs, output_final_state=True, **options)
    named = {name: x for name, x in xs.items() if isinstance(x, Tensor) and x.requires_grad}
    if dht is not None and options.get("state_v_first"):
        dht = dht.transpose(-1, -2)
    pairs = [(y, d.to(y.dtype)) for y, d in ((o, do), (ht, dht)) if d is not None]
    grads = torch.autograd.grad([y for y, _ in pairs], list(named.values()), [d for _, d in pairs], allow_unused=True)
    result = {"o": o.detach(), "ht": ht.detach()}
    for (name, x), grad in zip(named.items(), grads):
        result[GRADS[name]] = torch.zeros_like(x) if grad is None else grad
    return result


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, factor: float = 1.0) -> None:
    """Relative L2 error of every tensor under its limit, finite, of the same shape."""
    failures = []
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        limit = LIMITS[dtype][0 if name in ("o", "ht") else 1] * factor
        error = relative_l2(got, want)
        if not error <= limit:  # NaN fails too
            failures.append(f"{name}: relative L2 error {error:.3g} over the limit {limit:.3g}{_worst(got, want)}")
    assert not failures, "; ".join(failures)


def _worst(got: Tensor, want: Tensor) -> str:
    if got.numel() == 0:
        return ""
    difference = (got.double().cpu() - want.double().cpu()).abs().nan_to_num(nan=float("inf"))
    flat = int(difference.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
    return f" (worst at {at}: {got[at].item():.6g}, expected {want[at].item():.6g})"


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    for name, want in expected.items():
        assert torch.equal(actual[name], want), f"{name} differs{_worst(actual[name], want)}"


def check(
    device: Device, inputs: dict[str, Any], sequences: int | None = None, factor: float = 1.0, **options: Any
) -> dict[str, Tensor]:
    """Outputs and gradients against the recurrence; -> what the call gave."""
    do, dht = upstream(inputs, sequences)
    actual = run(inputs, do, dht, **options)
    assert_close(actual, reference(inputs, do, dht, **options), inputs["q"].dtype, factor)
    for name, grad in GRADS.items():
        if grad in actual:
            assert actual[grad].dtype == inputs[name].dtype, (
                f"{grad} has dtype {actual[grad].dtype}, {name} has {inputs[name].dtype}"
            )
    return actual


def subprocess_python(code: str, timeout: int = 60, env: dict[str, str] | None = None, *flags: str) -> str:
    """Runs code in a fresh interpreter (watchdog); -> its output. Fails on a non-zero exit."""
    from qla import _ffi

    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python") + os.pathsep + str(ROOT / "tests" / "python"), **(env or {})}
    library = _ffi.library_path()
    if library is not None:
        environment.setdefault("QLA_LIBRARY", str(Path(library).resolve()))
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
