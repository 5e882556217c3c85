"""`qla plan`: how sequences of given lengths are cut into work items; printed as text, drawn as PNG. Needs neither torch nor a GPU."""

from __future__ import annotations

import argparse
import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qla import _ffi
from qla.lengths import parse_lengths

CHUNK = 64
MOST_TOKENS = 1 << 40
DTYPES = {"fp64": _ffi.FLOAT64, "fp32": _ffi.FLOAT32, "bf16": _ffi.BFLOAT16, "fp16": _ffi.FLOAT16}
MODES = {"auto": _ffi.CP_AUTO, "exact": _ffi.CP_EXACT, "off": _ffi.CP_OFF, "fixed": _ffi.CP_FIXED}


@dataclass
class Plan:
    num_items: int
    segments: list[_ffi.Segment]
    text: str
    raw: _ffi.Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lengths",
        nargs="+",
        help="sequence lengths in tokens: 4096; 1024+7168 or 1024 7168, two packed sequences; 8192x4, four of 8192",
    )
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(2, 8), metavar=("HK", "HV"), help="key and value heads, 2 8 or 2,8 (the default)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the tensors (default bf16)")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="whose plan; cuda also without a GPU")
    parser.add_argument(
        "--cp", choices=MODES, default="auto", help="context parallelism: where sequences may be cut (default auto)"
    )
    parser.add_argument("--segment-chunks", type=int, default=0, help="with --cp fixed: chunks of 64 tokens a segment")
    parser.add_argument(
        "--log-decay",
        type=float,
        nargs="+",
        metavar="G",
        help="mean log decay a token, one for each value head (repeated in turn); 0 never forgets. "
        "Without it usual gates are assumed, a quarter of the heads never forgetting",
    )
    parser.add_argument("--png", type=Path, help="draw the plan into this file, with its folder (needs matplotlib)")
    parser.add_argument("--list", action="store_true", help="print every work item")


def shape_only(dtype: int, *shape: int) -> _ffi.Tensor:
    """A contiguous tensor that is present but whose data nobody reads."""
    tensor = _ffi.Tensor(data=CHUNK * 4, dtype=dtype, ndim=len(shape))
    stride = 1
    for axis in reversed(range(len(shape))):
        tensor.shape[axis], tensor.stride[axis] = shape[axis], stride
        stride *= max(shape[axis], 1)
    return tensor


def make_plan(
    lengths: list[int],
    heads: tuple[int, int],
    dtype: str = "bf16",
    backend: str = "cpu",
    cp: str = "auto",
    segment_chunks: int = 0,
    chunk_log_decay: list[float] | None = None,
    capacity: int = 1 << 16,
) -> Plan:
    hk, hv = heads
    tokens, code = sum(lengths), DTYPES[dtype]
    args = _ffi.ForwardArgs(struct_size=ctypes.sizeof(_ffi.ForwardArgs), scale=float("nan"), cp_warmup_threshold=float("nan"))
    args.backend, args.device = (_ffi.BACKEND_CUDA, 0) if backend == "cuda" else (_ffi.BACKEND_CPU, -1)
    args.cp_mode, args.cp_segment_chunks = MODES[cp], segment_chunks
    args.q = args.k = shape_only(code, 1, tokens, hk, 128)
    args.v = args.o = shape_only(code, 1, tokens, hv, 128)
    args.g = args.beta = shape_only(_ffi.FLOAT32, 1, tokens, hv)
    args.cu_seqlens = shape_only(_ffi.INT32, len(lengths) + 1)
    lens = (ctypes.c_int64 * len(lengths))(*lengths)
    decay = (ctypes.c_float * len(chunk_log_decay))(*chunk_log_decay) if chunk_log_decay is not None else None
    plan = _ffi.Plan(struct_size=ctypes.sizeof(_ffi.Plan))
    store = (_ffi.Segment * capacity)()
    plan.segments, plan.segments_capacity = store, capacity
    lib = _ffi.lib()
    _ffi.check(lib.qla_gdn_plan(ctypes.byref(args), lens, len(lengths), decay, ctypes.byref(plan)))
    size = ctypes.c_size_t(0)
    _ffi.check(lib.qla_plan_print(ctypes.byref(plan), None, 0, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value + 1)
    _ffi.check(lib.qla_plan_print(ctypes.byref(plan), buffer, size.value + 1, ctypes.byref(size)))
    count = min(plan.num_items, capacity)
    return Plan(plan.num_items, [store[i] for i in range(count)], buffer.value.decode(), plan)


def chunk_decays(lengths: list[int], per_head: list[float], hv: int) -> list[float]:
    """[chunks, HV]: the sum of a constant log gate over each chunk."""
    out = []
    for length in lengths:
        for first in range(0, length, CHUNK):
            tokens = min(CHUNK, length - first)
            out += [tokens * per_head[h % len(per_head)] for h in range(hv)]
    return out


def plan_of_call(q: Any, k: Any, v: Any, g: Any, beta: Any, backend: str | None = None) -> Plan:
    """The plan that a call on these tensors [B, T, ..] would follow, its own gates summed a chunk at a time."""
    import torch

    batch, tokens, hv = g.shape
    padded = torch.nn.functional.pad(g.float(), (0, 0, 0, -tokens % CHUNK))
    sums = padded.reshape(batch, -1, CHUNK, hv).sum(dim=2).reshape(-1).tolist()
    names = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    where = backend or ("cuda" if q.is_cuda else "cpu")
    return make_plan([tokens] * batch, (q.shape[2], hv), names[q.dtype], where, chunk_log_decay=sums)


def main(args: argparse.Namespace) -> int:
    lengths = parse_lengths("+".join(args.lengths))
    if sum(lengths) >= MOST_TOKENS:
        raise ValueError(f"lengths: expected fewer than {MOST_TOKENS} tokens in all, got {sum(lengths)}; split the call")
    hk, hv = args.heads
    if hk < 1 or hv < 1 or hv % hk:
        raise ValueError(f"--heads: expected HK 1 or more and HV a multiple of it, got {hk} {hv}")
    if args.cp == "fixed" and args.segment_chunks < 1:
        raise ValueError(
            f"--segment-chunks: expected 1 or more with --cp fixed, got {args.segment_chunks}; 8 cuts into 512 tokens each"
        )
    if args.segment_chunks > 1 << 24:
        raise ValueError(f"--segment-chunks: expected at most {1 << 24}, got {args.segment_chunks}; --cp off cuts nothing")
    if args.cp != "fixed" and args.segment_chunks:
        raise ValueError(
            f"--segment-chunks: expected with --cp fixed, got {args.segment_chunks} with --cp {args.cp}; add --cp fixed"
        )
    decays = None
    if args.log_decay:
        for value in args.log_decay:
            if not value <= 0 or math.isinf(value):  # NaN too
                raise ValueError(
                    f"--log-decay: expected finite numbers of 0 or less, got {value}; the log of a decay in (0, 1], -100 forgets all"
                )
        decays = chunk_decays(lengths, args.log_decay, hv)
    plan = make_plan(lengths, (hk, hv), args.dtype, args.backend, args.cp, args.segment_chunks, decays)
    print(plan.text.partition("\n  sequence head ")[0].rstrip())  # the items: all of them with --list, drawn with --png
    if args.list:
        starts = ("zero", "initial", "warm-up", "merged")
        print("sequence head first_chunk chunks warmup start")
        for s in plan.segments:
            print(f"{s.sequence:8} {s.head:4} {s.first_chunk:11} {s.num_chunks:6} {s.warmup_chunks:6} {starts[s.start]}")
        if plan.num_items > len(plan.segments):
            print(f"... and {plan.num_items - len(plan.segments)} more")
    if args.png:
        from qla import plotting

        if args.png.is_dir():
            raise ValueError(f"--png: expected a file to write, got the folder {args.png}; add a name, {args.png}/plan.png")
        figure = plotting.new_figure(10, 5)
        plotting.draw_plan(figure.subplots(1, 1), plan)
        plotting.save(figure, args.png)
        print(f"wrote {args.png}")
    return 0
