"""What the kinds of stress.py share: copies of the library, one a form, and where two results differ."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

from qla import _ffi
from qla.planbench import FUSED, HALVES, OWN, WHOLE, checked, open_copy

NAMES = {OWN: "own", WHOLE: "whole", HALVES: "halves", FUSED: "fused"}


class Library:
    """A copy of the library a form (qla.planbench.open_copy), opened when it is asked for."""

    def __init__(self, folder: Path, on_card: bool = True) -> None:
        self.folder, self.on_card = folder, on_card
        self.opened: dict[int, ctypes.CDLL] = {OWN: _ffi.lib()}
        self.prepare(OWN)

    def prepare(self, form: int) -> None:
        if self.on_card:
            checked(self.opened[form], self.opened[form].qla_prepare(0))

    def of(self, form: int) -> ctypes.CDLL:
        if form not in self.opened:
            self.opened[form] = open_copy(self.folder, form)
            self.prepare(form)
        return self.opened[form]


def words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64).flatten()


def checksum(x: torch.Tensor) -> int:
    """Of the bits, places included."""
    w = words(x)
    at = torch.arange(1, w.numel() + 1, device=w.device) * 0x1E3779B97F4A7C15
    return int(((w ^ at) * (at | 1)).sum())


def relative_l2(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float((x - y).norm() / y.norm().clamp_min(1e-30)) if y.numel() else 0.0


def spans(values: torch.Tensor) -> str:
    """What numbers these are, as runs."""
    at = torch.unique(values).tolist()
    runs: list[list[int]] = []
    for n in at:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs[:8])
    return shown + (f" .. ({len(runs)} runs)" if len(runs) > 8 else "")


def differing_tokens(
    lengths: tuple[int, ...] | list[int], got: torch.Tensor, want: torch.Tensor, segment: int = 0, chunk: int = 64
) -> list[str]:
    """Where o [tokens, HV, V] differs. segment: chunks, 0 where nothing is cut."""
    lines, bits = [], {2: torch.int16, 4: torch.int32}[got.element_size()]
    bad = got.view(bits) != want.view(bits)
    for head in torch.nonzero(bad.any(-1).any(0)).flatten().tolist():
        tokens = torch.nonzero(bad[:, head].any(-1)).flatten()
        begin = 0
        for n, length in enumerate(lengths):
            of = tokens[(tokens >= begin) & (tokens < begin + length)] - begin
            if len(of):
                chunks = of // chunk
                x, y = got[begin : begin + length, head].double(), want[begin : begin + length, head].double()
                off = float((x - y).abs().nan_to_num(nan=math.inf).max())
                columns = torch.nonzero(bad[begin : begin + length, head].any(0)).flatten()
                in_first = torch.nonzero(bad[begin + int(of[0]), head]).flatten()
                lines.append(
                    f"  o: sequence {n} head {head}: {int(bad[begin : begin + length, head].sum())} of {y.numel()} elements, {len(of)} tokens "
                    f"from {int(of[0])} (chunk {int(chunks[0])}, row {int(of[0]) % chunk}"
                    f"{f', segment {int(chunks[0]) // segment}' if segment > 0 else ''}) to {int(of[-1])}; chunks {spans(chunks)}; "
                    f"rows {spans(of % chunk)}; columns {spans(columns)}, in the first token {spans(in_first)}; largest difference {off:.3g} "
                    f"of {float(y.abs().max()):.3g}, relative {relative_l2(x, y):.3g}, NaN {int(x.isnan().sum())}"
                )
            begin += length
    return lines


def differing_states(got: torch.Tensor, want: torch.Tensor, axes: str = "kv") -> list[str]:
    """Where final states [N, HV, .., ..] differ. axes: what the last two are."""
    lines = []
    bad = got.view(torch.int32) != want.view(torch.int32)
    for n, head in torch.nonzero(bad.any(-1).any(-1)).tolist():
        b, x, y = bad[n, head], got[n, head].double(), want[n, head].double()
        lines.append(
            f"  ht: sequence {n} head {head}: {int(b.sum())} of {b.numel()}; {axes[0]} {spans(torch.nonzero(b.any(1)).flatten())}; "
            f"{axes[1]} {spans(torch.nonzero(b.any(0)).flatten())}; relative {relative_l2(x, y):.3g}, NaN {int(x.isnan().sum())}"
        )
    return lines
