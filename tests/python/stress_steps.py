"""Forward and backward of random calls, from many processes at a time: `stress.py --kind steps`.

A problem is a call through `qla.chunk_gated_delta_rule` with gradients of everything: packed or dense, with and without states,
norms, logits and the raw gate, cut by the planner, exactly, or not at all. One process that has the card to itself makes checksums
of o, the end state and all gradients; then each process repeats its own, several steps in a row before anything is looked at,
memory of the allocator full of NaN in between.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

import qla
from stress_common import checksum, relative_l2

HEADS = ((2, 4), (2, 8), (4, 16), (1, 1), (5, 5), (16, 16), (8, 32))
MOST_TOKEN_HEADS = 80_000


@dataclass(frozen=True)
class Step:
    seed: int
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    dense: bool
    half: bool
    norm: bool
    logits: bool
    raw: bool
    states: bool
    v_first: bool
    cp: bool | str


def draw_step(draw: random.Random) -> Step:
    heads = draw.choice(HEADS)
    most = MOST_TOKEN_HEADS // heads[1]
    dense, count = draw.random() < 0.3, draw.choice((1, 1, 2, 3, 5, 9))
    kinds = (lambda: draw.randrange(1, 300), lambda: draw.choice((0, 1, 63, 64, 65, 128)), lambda: draw.randrange(300, 9000))
    lengths = [min(draw.choice(kinds)(), most // count) for _ in range(count)]
    if dense or sum(lengths) == 0:
        lengths = [max(lengths[0], 1)] * count
    flags = [draw.random() < 0.4 for _ in range(4)]
    half, norm, logits, raw = flags
    return Step(
        draw.randrange(1 << 20), tuple(lengths), heads, dense, half, norm, logits, raw, draw.random() < 0.7, draw.random() < 0.5,
        draw.choice((True, True, "exact", False)),
    )  # fmt: skip


class Call:
    def __init__(self, p: Step, device: str) -> None:
        self.p = p
        make = torch.Generator(device=device).manual_seed(p.seed)
        dtype = torch.float16 if p.half else torch.bfloat16
        batch = len(p.lengths) if p.dense else 1
        tokens, (heads, v_heads) = (p.lengths[0] if p.dense else sum(p.lengths)), p.heads

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=make, device=device)

        unit = torch.nn.functional.normalize
        q, k = (normal(batch, tokens, heads, 128) for _ in range(2))
        self.wanted: dict[str, Any] = {
            "q": (q if p.norm else unit(q, dim=-1)).to(dtype),
            "k": (k if p.norm else unit(k, dim=-1)).to(dtype),
            "v": normal(batch, tokens, v_heads, 128).to(dtype),
            "g": normal(batch, tokens, v_heads) if p.raw else torch.nn.functional.logsigmoid(normal(batch, tokens, v_heads)) / 16,
            "beta": normal(batch, tokens, v_heads) if p.logits else normal(batch, tokens, v_heads).sigmoid(),
        }
        if p.states:
            shape = (len(p.lengths), v_heads, 128, 128)
            self.wanted["initial_state"] = normal(*shape) / 8
            self.dht = normal(*shape) / 8
        if p.raw:
            self.wanted |= {"A_log": normal(v_heads) / 4 - 1, "dt_bias": normal(v_heads)}
        for x in self.wanted.values():
            x.requires_grad_()
        self.do = normal(batch, tokens, v_heads, 128).to(dtype)
        self.others: dict[str, Any] = {
            "use_qk_l2norm_in_kernel": p.norm,
            "use_beta_sigmoid_in_kernel": p.logits,
            "use_gate_in_kernel": p.raw,
            "state_v_first": p.v_first,
            "output_final_state": p.states,
            "auto_cp": p.cp,
        }
        if not p.dense:
            self.others["cu_seqlens"] = torch.tensor([0, *p.lengths], device=device).cumsum(0).int()

    def __call__(self) -> dict[str, torch.Tensor]:
        o, ht = qla.chunk_gated_delta_rule(**self.wanted, **self.others)
        outputs: Any
        outputs, upstream = ([o, ht], [self.do, self.dht]) if self.p.states else ([o], [self.do])
        grads = torch.autograd.grad(outputs, list(self.wanted.values()), upstream)
        made = {"o": o.detach(), **{f"d{name}": x for name, x in zip(self.wanted, grads)}}
        return made | {"ht": ht.detach()} if ht is not None else made


def sums(made: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: checksum(padded(x)) for name, x in made.items()}


def padded(x: torch.Tensor) -> torch.Tensor:
    """Its bytes, a multiple of eight of them."""
    flat = x.contiguous().view(torch.uint8).flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8))


def foul(device: str, nbytes: int) -> None:
    """What the allocator gives out next holds NaN."""
    torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(0xFF)


def quiet(seed: int, processes: list[int], count: int, folder: Path, device: str = "cuda") -> None:
    results: dict[int, list[tuple[Step, dict[str, int]]]] = {}
    nan: list[Step] = []
    for n in processes:
        draw = random.Random(77 * seed + n)
        results[n] = []
        for p in (draw_step(draw) for _ in range(count)):
            foul(device, 64 << 20)
            made = Call(p, device)()
            if any(bool(x.isnan().any()) for x in made.values()):
                nan.append(p)
            results[n].append((p, sums(made)))
    print(f"quiet, steps: {sum(map(len, results.values()))} problems, {len(nan)} with NaN {nan[:2]}", flush=True)
    torch.save(results, folder / "quiet_steps.pt")


class Worker:
    def __init__(self, seed: int, process: int, folder: Path, device: str = "cuda") -> None:
        self.draw, self.device, self.process = random.Random(31 * seed + process), device, process
        self.failures = self.made = 0
        held = torch.load(folder / "quiet_steps.pt", weights_only=False)[process]
        self.calls = [(Call(p, device), want) for p, want in held]
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def round(self) -> None:
        picks = [self.draw.randrange(len(self.calls)) for _ in range(6)]
        made = []
        for n in picks:
            if self.draw.random() < 0.5:
                foul(self.device, self.draw.randrange(1 << 20, 64 << 20))
            made.append(self.calls[n][0]())
        for n, results in zip(picks, made):
            self.made += 1
            call, want = self.calls[n]
            wrong = [name for name, x in sums(results).items() if x != want[name]]
            if wrong:
                self.failures += 1
                self.tell(n, call, results, wrong)
            else:
                self.kept.setdefault(n, results)

    def tell(self, n: int, call: Call, results: dict[str, torch.Tensor], wrong: list[str]) -> None:
        if self.failures > 20:
            return
        print(f"MISMATCH process {self.process}, after {self.made} steps, {', '.join(wrong)}: {call.p}", flush=True)
        for name in wrong if n in self.kept else ():
            x, y = results[name].float(), self.kept[n][name].float()
            bad = torch.nonzero(x.flatten() != y.flatten()).flatten()
            where = f" from {int(bad[0])} to {int(bad[-1])}, {relative_l2(x, y):.3g} relative L2" if len(bad) else ""
            print(f"  {name} {tuple(x.shape)}: {len(bad)} elements differ{where}", flush=True)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.round()
        print(f"process {self.process}: {self.made} calls (steps), {self.failures} failures", flush=True)
