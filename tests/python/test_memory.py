"""Forward under a workspace limit: the CUDA backend then takes the chunks in ranges, one after the other, with the states carried in fp32.

The calls here normalise q and k, which the form without such a workspace does not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import qla
from common import Device, upstream
from qla import _call
from qla.testing import relative_l2

rule = functools.partial(qla.chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True)
EDGES = {
    "dense": (2, 2100, None),
    "one sequence": (1, 4000, None),
    "packed": (1, 3000, (0, 1, 1, 700, 2048, 2048, 2050, 2999)),  # empty, tiny, padding behind the end
    "packed, ranges inside": (1, 5000, (0, 4500, 4564, 5000)),
    "many": (1, 2600, tuple(range(0, 2601, 20))),
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """limit(n): forward's workspace stays under n bytes; -> the sizes that calls have taken since."""
    sizes: list[int] = []
    plain = _call._workspace
    monkeypatch.setattr(_call, "_workspace", lambda words, nbytes, cuda: sizes.append(nbytes) or plain(words, nbytes, cuda))

    def limited(nbytes: int) -> list[int]:
        monkeypatch.setattr(_call, "default_forward_bytes", lambda: nbytes)
        _call.clear_cache()
        sizes.clear()
        return sizes

    yield limited
    _call.clear_cache()


def both(limit: Callable[[int], list[int]], call: Callable[[], Any], nbytes: int = 1) -> tuple[Any, Any]:
    """What the call gives with all the workspace it likes, and with at most nbytes."""
    taken = limit(1 << 40)
    whole, most = call(), taken[-1]
    taken = limit(nbytes)
    ranged = call()
    assert taken[-1] < most, "the limit did not bind: the test compares nothing"
    return whole, ranged


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("least", [True, False])
def test_ranges_give_the_same_bits(device: Device, limit: Any, name: str, least: bool) -> None:
    if device.name == "cpu":
        pytest.skip("the CPU's memory does not grow with T")
    batch, tokens, cu = EDGES[name]
    sequences = batch if cu is None else len(cu) - 1
    inputs = device.inputs(tokens, batch=batch, sequences=sequences)
    boundaries = None if cu is None else device.cu(*cu)
    every, counts = 128, [tokens] * batch if cu is None else [b - a for a, b in itertools.pairwise(cu)]
    rows = sum(n // every for n in counts)

    def call() -> list[torch.Tensor]:
        states = torch.zeros(rows, 4, 128, 128, device="cuda")
        o, ht = rule(**inputs, cu_seqlens=boundaries, output_final_state=True, auto_cp=False)
        rule(**inputs, cu_seqlens=boundaries, auto_cp=False, checkpoint_every_n_tokens=every, state_checkpoints=states)
        return [o, ht, states]

    for whole, ranged in zip(*both(limit, call, 1 if least else 2 << 20)):
        assert torch.equal(whole, ranged)


@pytest.mark.parametrize("auto_cp", [True, "exact"])
@pytest.mark.parametrize("kind", ["soft", "zero"])
def test_ranges_with_cuts_inside(device: Device, limit: Any, auto_cp: Any, kind: str) -> None:
    """Sequences are cut inside a range, too; then only the rounding differs: each result is within 5e-3 of the truth."""
    if device.name == "cpu":
        pytest.skip("the CPU's memory does not grow with T")
    cu = (0, 9000, 9100, 12000)
    inputs = device.inputs(12000, sequences=3, kind=kind)

    def call() -> Any:
        return rule(**inputs, cu_seqlens=device.cu(*cu), output_final_state=True, auto_cp=auto_cp)

    whole, ranged = both(limit, call, 6 << 20)
    exact = rule(**inputs, cu_seqlens=device.cu(*cu), output_final_state=True, auto_cp=False)
    for want, a, b in zip(exact, whole, ranged):
        assert relative_l2(a, want) <= 6e-3 and relative_l2(b, want) <= 6e-3


def test_ranges_with_a_pool_of_states(device: Device, limit: Any) -> None:
    if device.name == "cpu":
        pytest.skip("the CPU's memory does not grow with T")
    inputs = device.inputs(3000, sequences=5)
    cu, indices = device.cu(0, 1500, 1600, 2900), device.tensor([4, -1, 2])

    def call() -> list[torch.Tensor]:
        pool = inputs["initial_state"].clone()
        given = {**inputs, "initial_state": pool}
        o, _ = rule(**given, cu_seqlens=cu, state_indices=indices)
        return [o, pool]

    for whole, ranged in zip(*both(limit, call)):
        assert torch.equal(whole, ranged)


def test_gradients_from_a_forward_in_ranges(device: Device, limit: Any) -> None:
    """Backward reuses what every range has left behind."""
    if device.name == "cpu":
        pytest.skip("the CPU's memory does not grow with T")
    inputs = device.inputs(20000)  # Abar and the vectors lie in `saved`: only Pg and the carried states are workspace
    do, dht = upstream(inputs)

    def call() -> list[torch.Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        o, ht = rule(**leaves, output_final_state=True, auto_cp=False)
        sizes.append(taken[-1])
        return list(torch.autograd.grad((o, ht), list(leaves.values()), (do, dht)))

    sizes: list[int] = []
    taken = limit(1 << 40)
    whole = call()
    taken = limit(1)
    ranged = call()
    assert sizes[1] < sizes[0]
    for a, b in zip(whole, ranged):
        assert torch.equal(a, b)


def test_default_limit(device: Device, limit: Any) -> None:
    """512 MiB whatever T: here 1.6 GB of tiles and vectors would be kept at once."""
    if device.name == "cpu":
        pytest.skip("the CPU's memory does not grow with T")
    taken = limit(512 << 20)
    x = torch.zeros(1, 131072, 64, 128, device="cuda", dtype=torch.bfloat16)
    beta = torch.zeros(1, 131072, 64, device="cuda")
    o, _ = rule(x[:, :, :16], x[:, :, :16], x, None, beta)
    assert taken[-1] <= 512 << 20 and not o.any()
