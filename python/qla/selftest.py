"""`qla selftest`: does this installation compute what the float64 token recurrence says? Forward and every gradient."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Relative L2 limits of docs/testing.md: outputs and state, gradients.
LIMITS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-5), "bfloat16": (5e-3, 1e-2), "float16": (5e-3, 1e-2)}


@dataclass
class Case:
    tokens: int
    heads: tuple[int, int]
    sizes: tuple[int, int]
    dtype: str
    gate: str
    lengths: tuple[int, ...] = ()
    l2norm: bool = False
    v_first: bool = False
    raw_gate: bool = False
    cp: Any = True

    def __str__(self) -> str:
        options = [name for name in ("l2norm", "v_first", "raw_gate") if getattr(self, name)]
        packed = f" packed {'+'.join(map(str, self.lengths))}" if self.lengths else ""
        return (
            f"{self.dtype:<8} T {self.tokens:<5} heads {self.heads[0]}->{self.heads[1]} K,V {self.sizes[0]},{self.sizes[1]} gate {self.gate:<6} "
            f"cp {self.cp}{packed} {' '.join(options)}"
        ).rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="start no new case after this time (default 120); the plainest come first"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every case")


def cases(cuda: bool, seed: int) -> Iterator[Case]:
    """The plain ones first, so that a short run already means something; then products of everything, in an order by the seed."""
    dtypes = ("bfloat16", "float16") if cuda else ("float32", "float64", "bfloat16", "float16")
    sizes = ((128, 128),) if cuda else ((128, 128), (64, 32), (40, 72), (256, 128))
    for dtype in dtypes:
        yield Case(200, (2, 4), (128, 128), dtype, "soft")
        yield Case(321, (1, 3), (128, 128), dtype, "mixed", lengths=(0, 1, 63, 65, 192), l2norm=True)
        yield Case(130, (2, 2), (128, 128), dtype, "strong", v_first=True)
    yield Case(1024, (1, 2), (128, 128), dtypes[0], "soft", cp="exact")
    yield Case(1024, (1, 2), (128, 128), dtypes[0], "strong", cp=True)
    yield Case(257, (2, 4), (128, 128), dtypes[0], "soft", raw_gate=True)
    gates, lengths, heads_of = ("soft", "zero", "strong", "mixed"), (1, 64, 65, 300), ((1, 1), (2, 6))
    everything = list(itertools.product(sizes, dtypes, gates, lengths, heads_of, (True, False)))
    random.Random(seed).shuffle(everything)
    for size, dtype, gate, tokens, heads, cp in everything:
        yield Case(tokens, heads, size, dtype, gate, l2norm=tokens == 300, v_first=tokens == 65, cp=cp)


def make_inputs(case: Case, device: str, generator: Any) -> dict[str, Any]:
    import torch

    dtype = getattr(torch, case.dtype)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    (hk, hv), (kd, vd), t = case.heads, case.sizes, case.tokens

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = normal(1, t, hk, kd), normal(1, t, hk, kd)
    if not case.l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    soft = torch.nn.functional.logsigmoid(normal(1, t, hv)) / 16
    keep = torch.rand(1, t, hv, generator=generator, dtype=torch.float64) < 0.5
    g = {
        "soft": soft,
        "zero": torch.zeros_like(soft),
        "strong": -16 * torch.nn.functional.softplus(0.5 * normal(1, t, hv) + 1),
        "mixed": torch.where(keep, soft * 16, torch.zeros_like(soft)),
    }[case.gate]
    n = len(case.lengths) or 1
    state = (n, hv, vd, kd) if case.v_first else (n, hv, kd, vd)
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(1, t, hv, vd).to(dtype),
        "g": g.to(wide),
        "beta": torch.sigmoid(normal(1, t, hv)).to(wide),
        "initial_state": normal(*state).to(wide),
    }
    if case.raw_gate:
        inputs["g"] = (0.5 * normal(1, t, hv)).to(wide)
        inputs["A_log"] = (0.3 * normal(hv)).to(wide)
        inputs["dt_bias"] = normal(hv).to(wide)
    return {name: x.to(device).requires_grad_() for name, x in inputs.items()}


def options(case: Case, device: str) -> dict[str, Any]:
    import torch

    out: dict[str, Any] = dict(
        output_final_state=True, use_qk_l2norm_in_kernel=case.l2norm, state_v_first=case.v_first, use_gate_in_kernel=case.raw_gate
    )
    if case.lengths:
        out["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    return out


def relative(x: Any, truth: Any, size: float = 0.0) -> float:
    """|x - truth| / |truth|; where |truth| is below the size that it has without cancellation: of that."""
    x, truth = x.detach().double().cpu(), truth.detach().double().cpu()
    norm = max(float(truth.norm()), size)
    error = float((x - truth).norm())
    # a true value of nearly nothing (dh0 behind a gate that forgets everything) has no relative error
    return error / norm if norm > 1e-6 * truth.numel() ** 0.5 else error


def run_case(case: Case, device: str, generator: Any) -> dict[str, float]:
    """name -> relative L2 error of each output, and of each gradient where this device serves the backward."""
    import torch

    import qla
    from qla.testing import recurrent_gated_delta_rule

    call: Any = qla.chunk_gated_delta_rule
    truth: Any = recurrent_gated_delta_rule
    inputs, keywords = make_inputs(case, device, generator), options(case, device)
    backward, _ = qla.can_implement(**inputs, **keywords, auto_cp=case.cp, needs_grad=True)
    if not backward:
        inputs = {name: x.detach() for name, x in inputs.items()}
    exact = {name: x.detach().double().cpu().requires_grad_(backward) for name, x in inputs.items()}
    o, state = call(**inputs, **keywords, auto_cp=case.cp)
    o_true, state_true = truth(**exact, **{n: (x.cpu() if hasattr(x, "cpu") else x) for n, x in keywords.items()})
    errors = {"o": relative(o, o_true), "final_state": relative(state, state_true)}
    if backward:
        do = torch.randn(o.shape, generator=generator).to(o)
        ds = torch.randn(state.shape, generator=generator).to(state) / 8
        grads = torch.autograd.grad((o, state), list(inputs.values()), (do, ds))
        grads_true = torch.autograd.grad((o_true, state_true), list(exact.values()), (do.double().cpu(), ds.double().cpu()))
        for name, x, x_true in zip(inputs, grads, grads_true):
            size = 0.0
            if name == "g" and case.tokens == 1:
                # One inner product <S, dS> of random signs, of some |S| |dS| / sqrt(K V): by chance it may be nearly 0, and then what
                # the 16-bit operands cost (testing.md's rule for values that are nearly 0) is no small part of it.
                decay = exact["g"].detach().exp().reshape(-1)
                sizes = (
                    exact["initial_state"].detach().flatten(2).norm(dim=-1) * ds.double().cpu().flatten(2).norm(dim=-1)
                ).reshape(-1)
                size = float((decay * sizes).norm()) / (case.sizes[0] * case.sizes[1]) ** 0.5
            errors[f"d{name}"] = relative(x, x_true, size)
    return errors


def main(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's idle threads would else spin on cores that others use
    try:
        import torch
    except ImportError as missing:
        raise ImportError(f"needs torch ({missing}): pip install torch numpy") from missing
    from qla import _ffi
    from qla.progress import Bar

    kind, _, index = args.device.partition(":")
    cuda = kind == "cuda"
    if args.device != "cpu" and not (cuda and (args.device == kind or index.isdigit())):
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {args.device!r}")
    if cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU; use --device cpu")
    if cuda and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: torch sees {torch.cuda.device_count()} GPUs, got {args.device}; counting begins at cuda:0")
    if not args.seconds > 0:
        raise ValueError(f"--seconds: expected a time above 0, got {args.seconds:g}; 5 runs the plain cases")
    print(_ffi.build_info())
    generator = torch.Generator().manual_seed(args.seed)
    todo = list(cases(cuda, args.seed))
    failures: list[str] = []
    worst: dict[str, tuple[float, str]] = {}
    done = 0
    start = time.perf_counter()
    with Bar(len(todo), "selftest", seconds=args.seconds) as bar:
        for case in todo:
            if time.perf_counter() - start > args.seconds:
                break
            errors = run_case(case, args.device, generator)
            done += 1
            limit_out, limit_grad = LIMITS[case.dtype]
            for name, error in errors.items():
                limit = limit_out if name in ("o", "final_state") else limit_grad
                if not error <= limit:  # NaN fails
                    failures.append(f"{case}: {name} {error:.1e}, limit {limit:g}")
                key = f"{case.dtype} {'outputs' if name in ('o', 'final_state') else 'gradients'}"
                if error > worst.get(key, (-1.0, ""))[0]:
                    worst[key] = (error, f"{name}, {case}")
            if args.verbose:
                print(f"{case}: " + " ".join(f"{n} {e:.1e}" for n, e in errors.items()))
            bar(done, f"{len(failures)} wrong")
    print("largest relative L2 error against the float64 token recurrence")
    for key, (error, where) in worst.items():
        kind = key.split()[1]
        print(f"  {key:<20} {error:.1e}  (limit {LIMITS[key.split()[0]][kind == 'gradients']:g})  {where}")
    for failure in failures[:20]:
        print("WRONG", failure)
    if done < len(todo):
        print(
            f"stopped after {args.seconds:g} s with {done} of {len(todo)} cases, the plain ones first; a larger --seconds runs more"
        )
    if not any("gradients" in key for key in worst):
        print("forward only: no backward is served on this device")
    print(f"selftest: {done} cases, {len(failures)} wrong values, {time.perf_counter() - start:.0f} s")
    return 1 if failures or not done else 0
