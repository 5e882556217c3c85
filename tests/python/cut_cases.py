"""Problems in which a cut is delicate, for forward and backward: gates, states and lengths that decide between warm-up and merge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common import Device, upstream


def gates(inputs: dict[str, Any], low: float, high: float, never: tuple[int, ...]) -> None:
    """Log gates of one token between low and high; heads that never forget."""
    inputs["g"] = inputs["g"].uniform_(low, high)
    for head in never:
        inputs["g"][:, :, head] = 0


def near_threshold(device: Device, factor: float) -> float:
    """The gate at which one chunk just reaches the warm-up threshold of this type, times factor."""
    return (-18 if device.name == "cpu" else -10) / 64 * factor


CASES = {
    "one sequence": {"lengths": (400,)},
    "a chunk in the middle": {"lengths": (300, 64, 410)},
    "a token in the middle, no h0": {"lengths": (300, 1, 257), "h0": False},
    "an empty one in the middle": {"lengths": (130, 0, 200)},
    "no dht": {"lengths": (500,), "dht": False},
    "dht only": {"lengths": (260,), "h0": False, "do": False},
    "strong gates": {"lengths": (450,), "gates": (-3.0, -1.0)},
    "slow gates, all heads": {"lengths": (450,), "gates": (-0.02, -0.001), "never": ()},
    "large h0": {"lengths": (450,), "gates": (-0.35, -0.3), "size": 1e4},
    "long keys, not normalised": {"lengths": (256,), "gates": (-0.6, -0.4), "keys": 1.2, "never": ()},
}
NAMES_OF_CASES = [*CASES, "just above the threshold", "just below the threshold"]


def problem(device: Device, name: str) -> tuple[dict[str, Any], Tensor, Tensor | None]:
    """-> the inputs with norm (normalised inside or not) and, where there are several sequences, cu_seqlens; do; dht."""
    case: dict[str, Any] = CASES.get(name, {"lengths": (450,), "never": (1,)})
    lengths = case["lengths"]
    inputs: dict[str, Any] = device.inputs(sum(lengths), seed=1107)
    inputs.pop("initial_state", None)
    inputs["norm"] = "keys" not in case
    if not inputs["norm"]:
        for n in ("q", "k"):
            inputs[n] = (torch.nn.functional.normalize(inputs[n].float(), dim=-1) * case["keys"]).to(device.dtype)
    low, high = case.get("gates", (-0.3, 0.0))
    if "threshold" in name:  # two chunks' worth, a little to either side
        low = high = near_threshold(device, 0.5 * (1.01 if "above" in name else 0.99))
    gates(inputs, low, high, case.get("never", (0,)))
    if len(lengths) > 1:
        inputs["cu_seqlens"] = device.cu(*(sum(lengths[:i]) for i in range(len(lengths) + 1)))
    do, dht = upstream(inputs, len(lengths))
    if case.get("h0", True):
        inputs["initial_state"] = torch.randn_like(dht) * case.get("size", 1.0)
    if not case.get("do", True):
        do.zero_()
    return inputs, do, dht if case.get("dht", True) else None
