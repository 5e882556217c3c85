"""Context parallelism in the backward: every gradient with sequences cut, by warm-up and by merges in both directions, against the uncut
one and the float64 recurrence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import qla
import qla.ops
from common import LIMITS, Device, reference, upstream
from cut_cases import NAMES_OF_CASES, problem
from qla import _args, _ffi
from qla.testing import relative_l2

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
OFF = (_ffi.CP_OFF, 0, None)


def backward(
    inputs: dict[str, Any],
    do: Tensor,
    dht: Tensor | None,
    cut: tuple[int, int, float | None],
    mib: int = 0,
    saved: Tensor | None = None,
) -> list[Tensor]:
    """The gradients by the operator, which takes a warm-up threshold: -inf merges every boundary."""
    cp_mode, chunks, threshold = cut
    h0 = inputs.get("initial_state")
    given = [inputs[n] for n in ("q", "k", "v", "g", "beta")]
    arguments = [*given, h0, inputs.get("cu_seqlens"), None, None, None, saved, do, dht]
    needs = 0b111111 if h0 is not None else 0b011111
    flags = _ffi.FLAG_QK_L2NORM if inputs.get("norm") else 0
    grads = torch.ops.qla.gdn_backward(*arguments, 128**-0.5, flags, cp_mode, chunks, threshold, 0, needs, mib << 20)
    return list(grads[: 6 if h0 is not None else 5])


def distance(x: Tensor, y: Tensor) -> float:
    """relative_l2 without the copy to the host"""
    return (torch.linalg.vector_norm((x - y).float()) / torch.linalg.vector_norm(y.float())).item()


def truth(inputs: dict[str, Any], do: Tensor, dht: Tensor | None) -> list[Tensor]:
    named = {n: x for n, x in inputs.items() if n not in ("norm", "cu_seqlens")}
    cu = inputs.get("cu_seqlens")
    out = reference(
        named, do, dht, scale=128**-0.5, use_qk_l2norm_in_kernel=inputs["norm"], cu_seqlens=None if cu is None else cu.tolist()
    )
    return [out[n] for n in NAMES if n in out]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", NAMES_OF_CASES)
def test_cut_backward(device: Device, name: str, chunks: int) -> None:
    inputs, do, final = problem(device, name)

    want = truth(inputs, do, final)
    uncut = [relative_l2(x, y) for x, y in zip(backward(inputs, do, final, OFF), want)]
    for threshold in (None, -math.inf):
        cut = (_ffi.CP_FIXED, chunks, threshold)
        got = backward(inputs, do, final, cut)
        for grad, x, y, error in zip(NAMES, got, want, uncut):
            now = relative_l2(x, y)
            assert now <= max(2 * error, LIMITS[device.dtype][1] / 10), f"{grad}: {now:.3g} cut, {error:.3g} uncut"
        for x, y in zip(got, backward(inputs, do, final, cut)):
            assert torch.equal(x, y), "two runs differ"


def test_ranges_equal_one_range(device: Device) -> None:
    """A workspace that holds few chunks' snapshots: the same bits, with states and gradients carried from range to range."""
    if device.name == "cpu":
        pytest.skip("the CPU has no ranges")
    for lengths in ((1500,), (700, 30, 1000, 0, 64)):
        inputs: dict[str, Any] = device.inputs(sum(lengths), seed=1207)
        inputs["norm"] = True
        if len(lengths) > 1:
            inputs["cu_seqlens"] = device.cu(*(sum(lengths[:i]) for i in range(len(lengths) + 1)))
        do, dht = upstream(inputs, len(lengths))
        inputs["initial_state"] = torch.randn_like(dht)
        one = backward(inputs, do, dht, OFF, 4096)
        for mib in (1, 8, 12):
            for grad, x, y in zip(NAMES, backward(inputs, do, dht, OFF, mib), one):
                assert torch.equal(x, y), f"{grad} with {mib} MiB"


def test_what_forward_kept_gives_the_same_gradients(device: Device) -> None:
    """Abar and the gate vectors from forward's buffer, or made again: the same bits where both are made by two kernels, which `cut` or the
    flag asks for; else the fused form, which sums norms in another order, may have made what was kept (decision 0079)."""
    batch = _ffi.FLAG_BATCH_INVARIANT
    fixed = (_ffi.CP_FIXED, 2, None)
    for lengths, cut, flags in (((700,), OFF, 0), ((700,), OFF, batch), ((130, 1, 0, 400), OFF, 0), ((450,), fixed, 0)):
        inputs: dict[str, Any] = device.inputs(sum(lengths), seed=1307)
        inputs.pop("initial_state", None)
        inputs["norm"] = True
        if len(lengths) > 1:
            inputs["cu_seqlens"] = device.cu(*(sum(lengths[:i]) for i in range(len(lengths) + 1)))
        do, dht = upstream(inputs, len(lengths))
        arguments = [inputs[n] for n in ("q", "k", "v", "g", "beta")] + [None, inputs.get("cu_seqlens"), None, None, None]
        flags |= _ffi.FLAG_QK_L2NORM
        saved = torch.ops.qla.gdn_forward(*arguments, 128**-0.5, flags, *cut, 0, False, True, 0)[2]
        one_form = device.name == "cpu" or flags & batch or cut is not OFF
        for grad, x, y in zip(NAMES, backward(inputs, do, dht, cut, saved=saved), backward(inputs, do, dht, cut)):
            assert torch.equal(x, y) if one_form else distance(x, y) <= 3e-3, grad


def test_few_chunks_keep_nothing(device: Device) -> None:
    """Under _args.FEW_CHUNK_HEADS forward runs as without gradients, the same bits, and the node holds no buffer; from there on it does."""
    few = _args.FEW_CHUNK_HEADS
    for tokens, kept in ((64, False), (64 * (few // 4), True)):
        inputs: dict[str, Any] = device.inputs(tokens, seed=1407)
        inputs.pop("initial_state", None)
        q, v = inputs["q"], inputs["v"]
        assert _args.keeps(q, v, None) == kept
        with torch.no_grad():
            plain = qla.chunk_gated_delta_rule(**inputs)[0]
        o = qla.chunk_gated_delta_rule(**{n: x.requires_grad_() for n, x in inputs.items()})[0]
        if not kept:
            assert torch.equal(o, plain)
        held = [x for x in o.grad_fn.saved_tensors if x is not None and x.dtype is torch.uint8]  # type: ignore[union-attr]
        assert len(held) == (kept and device.name == "cuda")


def test_one_graph_serves_any_boundaries_and_gates(device: Device) -> None:
    if device.name == "cpu":
        pytest.skip("no graphs on the CPU")
    tokens, sequences = 8192, 3
    make = torch.Generator(device="cuda").manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, device="cuda")

    def data() -> dict[str, Any]:
        inputs: dict[str, Any] = {
            n: normal(1, tokens, h, 128).to(device.dtype) for n, h in (("q", 2), ("k", 2), ("v", 4), ("do", 4))
        }
        pace = torch.tensor([0.0, 1.0, 0.05, 8.0], device="cuda")[torch.randperm(4, generator=make, device="cuda")]
        inputs["g"] = torch.nn.functional.logsigmoid(normal(1, tokens, 4)) / 16 * pace
        inputs["beta"] = torch.rand(1, tokens, 4, generator=make, device="cuda")
        ends = torch.sort(torch.randint(0, tokens + 1, (sequences,), generator=make, device="cuda")).values
        inputs["cu_seqlens"] = torch.cat([torch.zeros_like(ends[:1]), ends]).int()
        inputs["dht"] = normal(sequences, 4, 128, 128) / 8
        inputs["initial_state"] = normal(sequences, 4, 128, 128)
        inputs["norm"] = True
        return inputs

    def call(x: dict[str, Any]) -> list[Tensor]:
        return backward(x, x["do"], x["dht"], (_ffi.CP_AUTO, 0, None))

    fixed = data()
    call(fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(fixed)
    for _ in range(100):
        now = data()
        for n, x in now.items():
            if isinstance(x, Tensor):
                fixed[n].copy_(x)
        graph.replay()
        for grad, x, y in zip(NAMES, out, call(now)):
            assert torch.equal(x, y), f"{grad}: the graph and an eager call differ"
        uncut = backward(now, now["do"], now["dht"], OFF)
        for grad, x, y in zip(NAMES, out, uncut):
            assert distance(x, y) <= LIMITS[device.dtype][1], grad


def test_a_long_training_step_in_any_number_of_ranges(device: Device) -> None:
    """262,144 tokens: one range, what the default budget gives, and many ranges have the same bits; cut, they agree within rounding."""
    if device.name == "cpu":
        pytest.skip("the CPU has no ranges")
    tokens, heads, v_heads = 262144, 4, 8
    make = torch.Generator(device="cuda").manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, device="cuda").to(device.dtype)

    inputs: dict[str, Any] = {n: normal(1, tokens, heads, 128) for n in ("q", "k")}
    inputs["v"] = normal(1, tokens, v_heads, 128)
    inputs["g"] = torch.nn.functional.logsigmoid(normal(1, tokens, v_heads).float()) / 16
    inputs["g"][:, :, 0] = 0
    inputs["beta"] = torch.rand(1, tokens, v_heads, generator=make, device="cuda")
    inputs["norm"] = True
    do = normal(1, tokens, v_heads, 128)
    one = backward(inputs, do, None, OFF, 8192)
    for mib in (0, 700):
        for grad, x, y in zip(NAMES, backward(inputs, do, None, OFF, mib), one):
            assert torch.equal(x, y), f"{grad} with {mib or 'the default'} MiB"
    for grad, x, y in zip(NAMES, backward(inputs, do, None, (_ffi.CP_AUTO, 0, None), 8192), one):
        assert distance(x, y) <= LIMITS[device.dtype][1], grad
