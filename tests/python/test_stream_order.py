"""A call begins behind whatever is before it in its stream, also where its first kernel sets itself up under the end of that: calls that
read what calls before them wrote, copies, memsets and other streams' kernels, one by one and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qla
from common import Device, assert_equal

FORMS: dict[str, tuple[tuple[int, int], list[int]]] = {  # what the planner makes of them on an H200
    "an item a multiprocessor": ((16, 16), [700, 1, 0, 1024]),
    "a few items a CTA": ((32, 32), [1024, 900, 0, 1100, 64, 1024, 1500, 300]),
    "fused": ((32, 32), [4096, 3000, 4096, 5000]),
    "halves": ((4, 16), [1024, 900]),
    "small": ((2, 4), [100, 30]),
    "one sequence": ((2, 8), [300]),
    "cut": ((2, 8), [8192]),
    "cut in the fused form": ((16, 16), [8192]),
    "a long one beside a short one": ((8, 24), [7168, 1024]),
}
STEPS: list[dict[str, Any]] = [
    {},
    {},
    {"auto_cp": False},
    {"auto_cp": "exact"},
    {"deterministic": "batch"},
    {"auto_cp": False},
    {},
]


def problem(device: Device, form: str) -> tuple[dict[str, Tensor], Tensor | None]:
    heads, lengths = FORMS[form]
    if device.name == "cpu":
        heads, lengths = (2, 4), [min(n, 150) for n in lengths]
    inputs = device.inputs(sum(lengths), heads, sequences=len(lengths))
    if len(lengths) == 1:
        return inputs, None
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return inputs, device.cu(*ends.tolist())


def chain(inputs: dict[str, Tensor], cu: Tensor | None, between: Any) -> dict[str, Tensor]:
    """Each call's values are the outputs of the one before, its initial state is that one's final state; then a gradient's way back
    into a call."""
    x, made = dict(inputs), {}
    for number, options in enumerate(STEPS):
        with torch.no_grad():
            o, ht = qla.chunk_gated_delta_rule(**x, cu_seqlens=cu, output_final_state=True, **options)
        between()
        x["v"], x["initial_state"] = o, ht
        made[f"o {number}"], made[f"ht {number}"] = o, ht
    leaf = x["v"].detach().requires_grad_()
    o, ht = qla.chunk_gated_delta_rule(**{**x, "v": leaf}, cu_seqlens=cu, output_final_state=True)
    between()
    (dv,) = torch.autograd.grad([o, ht], [leaf], [inputs["v"], inputs["initial_state"].to(ht.dtype)])
    between()
    with torch.no_grad():
        made["last"], _ = qla.chunk_gated_delta_rule(**{**x, "v": dv}, cu_seqlens=cu)
    return {**made, "dv": dv}


@pytest.mark.br(77)
@pytest.mark.parametrize("form", FORMS)
def test_calls_that_read_what_the_call_before_wrote(device: Device, form: str) -> None:
    inputs, cu = problem(device, form)
    apart = chain(inputs, cu, torch.cuda.synchronize if device.name == "cuda" else lambda: None)
    for name, x in apart.items():
        assert torch.isfinite(x).all(), name
    assert_equal(chain(inputs, cu, lambda: None), apart)
    if device.name == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = chain(inputs, cu, lambda: None)
    for _ in range(3):
        for x in held.values():
            x.fill_(float("nan"))
        graph.replay()
        assert_equal({name: x.clone() for name, x in held.items()}, apart)


@pytest.mark.br(77)
@pytest.mark.parametrize("form", FORMS)
def test_behind_copies_memsets_and_other_streams(device: Device, form: str) -> None:
    if device.name == "cpu":
        pytest.skip("streams are CUDA's")
    inputs, cu = problem(device, form)
    with torch.no_grad():
        want = qla.chunk_gated_delta_rule(
            **{**inputs, "initial_state": torch.zeros_like(inputs["initial_state"])}, cu_seqlens=cu
        )[0]
    torch.cuda.synchronize()
    x = {name: torch.full_like(tensor, float("nan")) for name, tensor in inputs.items()}
    boundaries = None if cu is None else torch.zeros_like(cu)
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")

    def fill_and_call() -> Tensor:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            busy @ busy
            for name in ("q", "k", "g"):
                torch.mul(inputs[name], 1, out=x[name])
        x["beta"].copy_(inputs["beta"])
        x["initial_state"].zero_()
        if boundaries is not None:
            boundaries.copy_(cu)
        torch.cuda.current_stream().wait_stream(other)
        x["v"].copy_(inputs["v"])
        with torch.no_grad():
            return qla.chunk_gated_delta_rule(**x, cu_seqlens=boundaries)[0]

    assert_equal({"o": fill_and_call()}, {"o": want})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = fill_and_call()
    for _ in range(3):
        for tensor in (*x.values(), held):
            tensor.fill_(float("nan"))
        graph.replay()
        assert_equal({"o": held.clone()}, {"o": want})
