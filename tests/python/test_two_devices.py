"""Two devices in one process: attributes and caches for each, the caller's device restored, calls on both at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import qla
from common import Device, assert_equal, run, upstream

HEADS, TOKENS = (2, 8), 8192  # cut by the planner


@pytest.fixture
def two(device: Device) -> Device:
    if device.name == "cpu":
        pytest.skip("CUDA only")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    return device


def on(index: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().to(f"cuda:{index}") for name, x in tensors.items()}


@pytest.mark.br(83)
def test_second_device(two: Device) -> None:
    inputs = two.inputs(200)
    do, dht = upstream(inputs)
    first = run(inputs, do, dht)
    other = on(1, inputs)
    for _ in range(2):
        second = run(other, do.to("cuda:1"), dht.to("cuda:1"))
        assert torch.cuda.current_device() == 0
        assert_equal(on(0, second), first)
        assert_equal(run(inputs, do, dht), first)
    with pytest.raises(ValueError, match="expected on q's device"):
        qla.chunk_gated_delta_rule(**{**inputs, "k": other["k"]})


@pytest.mark.br(83)
def test_both_devices_at_once(two: Device) -> None:
    """Threads of their own, cut calls with backward, current device 0 in both: the bits of a call alone."""
    inputs = two.inputs(TOKENS, HEADS)
    do, dht = upstream(inputs)
    alone = run(inputs, do, dht)
    found: dict[tuple[int, int], dict[str, Tensor]] = {}

    def work(index: int) -> None:
        here, gradients = on(index, inputs), (do.to(f"cuda:{index}"), dht.to(f"cuda:{index}"))
        for number in range(5):
            found[index, number] = run(here, *gradients)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for result in found.values():
        assert_equal(on(0, result), alone)


@pytest.mark.br(83)
def test_a_graph_on_the_second_device(two: Device) -> None:
    """Captured with device 1 current, replayed with device 0 current, other boundaries and gates each time."""
    inputs = on(1, two.inputs(TOKENS, HEADS, sequences=2))
    cu = torch.tensor((0, TOKENS // 2, TOKENS), dtype=torch.int32, device="cuda:1")

    def call() -> dict[str, Tensor]:
        with torch.no_grad():
            o, ht = qla.chunk_gated_delta_rule(**inputs, cu_seqlens=cu, output_final_state=True)
        return {"o": o, "ht": ht}

    with torch.cuda.device(1):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # a stream of this device: torch's own one for captures belongs to the device of the process's first capture
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            held = call()
    for first in (1, 1024, 4096, TOKENS):
        with torch.cuda.device(1):
            cu.copy_(torch.tensor((0, first, TOKENS), dtype=torch.int32))
            inputs["g"].mul_(0.5)
            graph.replay()
            torch.cuda.synchronize()
        replayed = {name: x.clone() for name, x in held.items()}
        assert_equal(replayed, call())  # eager, from device 0
        assert torch.cuda.current_device() == 0
