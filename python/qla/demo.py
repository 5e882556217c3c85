"""`qla demo`: a byte-level hybrid language model of transformers' own Qwen3-Next layers, trained with our operator.

The first steps run twice, with transformers' torch code and with ours: same seed, same batches. In fp32 the two loss
curves must agree to 1e-3; the run says how much faster ours is and writes a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOSS_TOLERANCE = 1e-3
MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"


@dataclass
class Run:
    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def median_ms(self) -> float:
        # the first two steps allocate and warm up
        return median(self.seconds[2:] or self.seconds) * 1e3


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="training steps with our operator (default 200)")
    parser.add_argument(
        "--compare-steps", type=int, default=20, help="steps that run with transformers' torch code too (default 20)"
    )
    parser.add_argument("--batch", type=int, default=2, help="sequences in a batch (default 2)")
    parser.add_argument("--length", type=int, default=512, help="tokens (bytes) in a sequence (default 512)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model (default 128)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU that our kernels serve, else the CPU"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo.png"), help="where the picture goes; its folder is made (default out/demo.png)"
    )


def read_corpus(limit: int = 6_000_000) -> bytes:
    """The sources of Python's standard library, in a fixed order: real text that every machine with Python has."""
    parts: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with contextlib.suppress(OSError):
            parts.append(path.read_bytes())
            size += len(parts[-1])
        if size > limit:
            break
    if not parts:
        raise SystemExit("demo: found no Python sources beside the standard library to train on")
    return b"\n".join(parts)


def batches(corpus: Any, batch: int, length: int, seed: int) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - length - 1, (batch,), generator=generator)
        yield torch.stack([corpus[s : s + length] for s in starts.tolist()])


def build_model(hidden: int, length: int, seed: int) -> Any:
    """Two Gated Delta Net layers and one attention layer, head size 128, two key heads, four value heads, dense MLPs."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mlp_only_layers=[0, 1, 2],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return Qwen3NextForCausalLM(config).train()


def pick_device(wanted: str) -> tuple[str, str]:
    """-> (torch device, why)."""
    import torch

    if wanted == "cpu":
        return "cpu", "asked for"
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise SystemExit("demo: --device cuda, but torch sees no GPU; use --device cpu")
        return "cpu", "torch sees no GPU"
    import qla

    q = torch.zeros(1, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
    v, gate = q.new_zeros(1, 64, 4, 128), torch.zeros(1, 64, 4, device="cuda")
    ok, reason = qla.can_implement(q, q, v, gate, gate, needs_grad=True)
    if ok:
        return "cuda", "our kernels serve it, forward and backward"
    if wanted == "cuda":
        raise SystemExit(f"demo: --device cuda: {reason}; use --device cpu")
    return "cpu", f"the GPU cannot train with our kernels: {reason}"


def precision(device: str) -> Any:
    """fp32 on the CPU, where the two loss curves must agree; bf16 on a GPU, whose kernels take 16-bit tensors."""
    import torch

    return torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda")


def train(run: Run, model: Any, source: Iterator[Any], steps: int, device: str, bar: Any) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:  # a short warm-up, then a cosine to a tenth
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / max(steps, 300)))
        ids = next(source).to(device=device, dtype=torch.long)
        start = time.perf_counter()
        with precision(device):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - start)
        bar(step + 1, f"loss {run.losses[-1]:.3f}  {run.seconds[-1] * 1e3:.0f} ms a step")


@contextlib.contextmanager
def our_operator() -> Iterator[None]:
    from qla.integrations import transformers as integration

    integration.enable()
    try:
        yield
    finally:
        integration.disable()


@contextlib.contextmanager
def captured_calls(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Keeps the tensors of every operator call inside the block (the model looks the function up at each call)."""
    module = sys.modules[MODULE]
    inner = module.torch_chunk_gated_delta_rule  # type: ignore[attr-defined]

    def wrapper(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        calls.append(
            dict(q=query.detach(), k=key.detach(), v=value.detach(), g=kwargs["g"].detach(), beta=kwargs["beta"].detach())
        )
        return inner(query, key, value, **kwargs)

    module.torch_chunk_gated_delta_rule = wrapper  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.torch_chunk_gated_delta_rule = inner  # type: ignore[attr-defined]


def operator_ms(call: dict[str, Any], repeats: int = 5) -> float:
    """Forward and backward of the operator alone on one batch's own tensors; least of some repeats."""
    import torch

    function = sys.modules[MODULE].torch_chunk_gated_delta_rule  # type: ignore[attr-defined]
    best = math.inf
    for _ in range(repeats):
        t = {name: x.clone().requires_grad_() for name, x in call.items()}
        start = time.perf_counter()
        o, _ = function(t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"], use_qk_l2norm_in_kernel=True)
        o.sum().backward()
        if o.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def half_lives(calls: list[dict[str, Any]]) -> list[list[float]]:
    """For each Gated Delta Net layer and value head: after how many tokens is half of the state forgotten, on average."""
    return [[math.log(2.0) / max(-float(mean), 1e-9) for mean in call["g"].float().mean(dim=(0, 1))] for call in calls]


def main(args: argparse.Namespace) -> int:
    # Both runs under the same rule, as `qla bench` does: torch's idle threads would else spin on cores that others use.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SystemExit(
            f"demo: needs torch and transformers ({error}); pip install torch numpy transformers matplotlib, or use ./dev demo"
        ) from error
    import qla
    from qla.progress import Bar

    for name, least in (("steps", 1), ("compare_steps", 0), ("length", 2), ("batch", 1), ("hidden", 1)):
        if (got := getattr(args, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')}: expected {least} or more, got {got}")
    started = time.perf_counter()
    transformers.logging.set_verbosity_error()
    device, why = pick_device(args.device)
    compare = min(args.compare_steps, args.steps)
    text = read_corpus()
    if args.length >= len(text):
        raise ValueError(f"--length: expected fewer than the text's {len(text)} bytes, got {args.length}")
    args.out.parent.mkdir(parents=True, exist_ok=True)  # before anything is trained for it
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model = build_model(args.hidden, args.length, args.seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"qla {qla.__version__}, torch {torch.__version__}, transformers {transformers.__version__}; device {device} ({why})")
    print(
        f"model: Qwen3-Next, 2 Gated Delta Net layers + 1 attention layer, {parameters / 1e6:.2f} M parameters, heads 2 -> 4 of size 128"
    )
    print(f"text:  {len(text) / 1e6:.1f} MB of the Python standard library; batches of {args.batch} x {args.length} bytes")

    theirs, ours = Run("transformers' torch code"), Run("qla")
    if compare:
        with Bar(compare, "transformers' torch code") as bar:
            train(theirs, copy.deepcopy(model), batches(corpus, args.batch, args.length, args.seed), compare, device, bar)
    source = batches(corpus, args.batch, args.length, args.seed)
    calls: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    probe = next(batches(corpus, args.batch, args.length, args.seed + 1)).to(device=device, dtype=torch.long)
    with our_operator():
        with torch.no_grad(), precision(device), captured_calls(before):
            model(input_ids=probe, use_cache=False)
        with Bar(args.steps, "qla") as bar:
            train(ours, model, source, args.steps, device, bar)
        with torch.no_grad(), precision(device), captured_calls(calls):
            model(input_ids=probe, use_cache=False)
        operator_ours = operator_ms(calls[0])
    operator_theirs = operator_ms(calls[0])

    result: dict[str, Any] = {
        "device": device,
        "steps": args.steps,
        "tokens_a_step": args.batch * args.length,
        "step_ms": ours.median_ms(),
        "operator_ms": operator_ours,
        "operator_ms_transformers": operator_theirs,
        "first_loss": ours.losses[0],
        "last_loss": sum(ours.losses[-10:]) / len(ours.losses[-10:]),
    }
    last = min(10, args.steps)
    print(
        f"loss {result['first_loss']:.3f} (first step) -> {result['last_loss']:.3f} (mean of the last {last}) nats a byte in {args.steps} steps, "
        f"{ours.median_ms():.0f} ms a step"
    )
    agree = True
    if compare:
        gaps = [abs(a - b) for a, b in zip(ours.losses, theirs.losses)]
        result["step_ms_transformers"] = theirs.median_ms()
        if device == "cpu":  # in bf16 only the curves' ends compare
            result["largest_loss_gap"] = max(gaps)
            agree = max(gaps) <= LOSS_TOLERANCE
            verdict = "agree" if agree else "DO NOT agree"
            print(
                f"first {compare} losses {verdict} with transformers' torch code: largest gap {max(gaps):.1e} (limit {LOSS_TOLERANCE:g})"
            )
        else:
            result["end_loss_gap"] = gaps[-1]
            print(f"after {compare} steps in bf16 the two losses are {ours.losses[compare - 1]:.4f} and {theirs.losses[-1]:.4f}")
        same_steps = median(ours.seconds[2:compare] or ours.seconds) * 1e3
        print(
            f"a whole training step, over the same steps: {theirs.median_ms():.0f} ms with transformers' torch code, {same_steps:.0f} ms "
            f"with qla: {theirs.median_ms() / same_steps:.2f} x as fast"
        )
    print(
        f"the operator alone, forward + backward on one batch of it: {operator_theirs:.1f} ms -> {operator_ours:.1f} ms: "
        f"{operator_theirs / operator_ours:.1f} x as fast"
    )
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    try:
        from qla import plotting

        plotting.demo_picture(args.out, ours, theirs, half_lives(before), half_lives(calls), calls[0])
        print(f"picture: {args.out}")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    print(f"took {time.perf_counter() - started:.0f} s")
    return 0 if agree else 1
