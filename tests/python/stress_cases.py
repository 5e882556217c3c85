"""The problems of stress_direct.py: random calls that nothing cuts, each of a kind that is told by qla_gdn_plan."""

from __future__ import annotations

import ctypes
import math
import random
import sys
from ctypes import byref
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

from qla import _ffi
from stress_common import FUSED, HALVES, NAMES, OWN, WHOLE, Library, checked

SMS = 132  # kinds are named for an H200
DTYPES = {
    torch.float32: _ffi.FLOAT32,
    torch.bfloat16: _ffi.BFLOAT16,
    torch.float16: _ffi.FLOAT16,
    torch.int32: _ffi.INT32,
    torch.int64: _ffi.INT64,
    torch.uint8: _ffi.UINT8,
}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = (
    ("one round",) * 8 + ("rounds",) * 3 + ("gates", "gates", "balanced", "both forms") + ("tables",) * 3 + ("two kernels",) * 2
)
MANY = ((16, 16), (32, 32), (5, 5), (2, 8))
MORE_HEADS = {"rounds": MANY, "balanced": MANY, "both forms": ((24, 24), (16, 32), (8, 32))}
HEADS = ((2, 4), (2, 4), (1, 1), (2, 8), (5, 5), (16, 16), (4, 16))
MOST_TOKEN_HEADS = 300_000  # of a problem: 80 MB of v


@dataclass(frozen=True)
class Case:
    seed: int
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    kind: str = "one round"
    form: int = OWN  # which copy of the library
    uncut: bool = False  # by QLA_CP_OFF; else the planner's word
    dense: bool = False  # [B, T], lengths all the same
    behind: int = 0  # tokens behind the last sequence
    half: bool = False  # fp16
    norm: bool = False
    gate: str = "fp32"  # .. bf16, none; raw
    beta: str = "fp32"
    logits: bool = False  # beta's
    h0: bool = True
    ht: bool = True
    v_first: bool = True
    save: bool = False
    saved_same: bool = True  # whether two quiet runs leave the same bytes there
    long_index: bool = False

    def __str__(self) -> str:
        names = ("dense", "norm", "logits", "h0", "ht", "v_first", "save", "long_index", "uncut")
        return (
            f"{self.kind}, {NAMES[self.form]}: {self.heads} {list(self.lengths)}{f' + {self.behind}' if self.behind else ''} "
            f"{'fp16' if self.half else 'bf16'} g {self.gate} beta {self.beta} {' '.join(n for n in names if getattr(self, n))} seed {self.seed}"
        )


SEEN = Case(0, (100, 0, 200), (2, 4))  # gave a wrong o once


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def rounded(n: int) -> int:
    return -(-n // 256) * 256


def place(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Offsets in one piece of memory, each a multiple of 256, and its size."""
    at, offsets = 0, {}
    for name, (shape, dtype) in shapes.items():
        offsets[name] = at
        at += rounded(math.prod(shape) * dtype.itemsize)
    return offsets, max(at, 256)


def view(piece: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return piece[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def described(shape: tuple[int, ...], dtype: torch.dtype) -> _ffi.Tensor:
    tensor = _ffi.Tensor(data=256, dtype=DTYPES[dtype], ndim=len(shape))
    stride = 1
    for axis in reversed(range(len(shape))):
        tensor.shape[axis], tensor.stride[axis] = shape[axis], stride
        stride *= max(shape[axis], 1)
    return tensor


def shapes_of(case: Case) -> tuple[Shapes, Shapes]:
    """Of inputs and outputs, saved excepted."""
    (hk, hv), n = case.heads, len(case.lengths)
    rows = (n, case.lengths[0]) if case.dense else (1, sum(case.lengths) + case.behind)
    dtype = torch.float16 if case.half else torch.bfloat16
    inputs: Shapes = {"q": ((*rows, hk, 128), dtype), "k": ((*rows, hk, 128), dtype), "v": ((*rows, hv, 128), dtype)}
    if case.gate != "none":
        inputs["g"] = ((*rows, hv), FLOATS.get(case.gate, torch.float32))
    inputs["beta"] = ((*rows, hv), FLOATS[case.beta])
    if case.gate == "raw":
        inputs["A_log"] = inputs["dt_bias"] = ((hv,), torch.float32)
    if case.h0:
        inputs["initial_state"] = ((n, hv, 128, 128), torch.float32)
    if not case.dense:
        inputs["cu_seqlens"] = ((n + 1,), torch.int64 if case.long_index else torch.int32)
    outputs: Shapes = {"o": ((*rows, hv, 128), dtype)}
    if case.ht:
        outputs["final_state"] = ((n, hv, 128, 128), torch.float32)
    return inputs, outputs


def arguments_of(case: Case, device: str) -> _ffi.ForwardArgs:
    args = _ffi.ForwardArgs(struct_size=ctypes.sizeof(_ffi.ForwardArgs), scale=float("nan"), cp_warmup_threshold=float("nan"))
    args.backend, args.device = (_ffi.BACKEND_CUDA, 0) if device == "cuda" else (_ffi.BACKEND_CPU, -1)
    args.cp_mode = _ffi.CP_OFF if case.uncut else _ffi.CP_AUTO
    flags = {
        _ffi.FLAG_QK_L2NORM: case.norm,
        _ffi.FLAG_RAW_GATE: case.gate == "raw",
        _ffi.FLAG_BETA_SIGMOID: case.logits,
        _ffi.FLAG_STATE_V_FIRST: case.v_first,
    }
    args.flags = sum(flag for flag, on in flags.items() if on)
    for shapes in shapes_of(case):
        for name, (shape, dtype) in shapes.items():
            setattr(args, name, described(shape, dtype))
    if case.save:
        args.saved = described((1,), torch.uint8)  # how large is asked of the library
    return args


def draw_lengths(draw: random.Random, kind: str) -> tuple[int, ...]:
    if kind == "both forms":
        return tuple(draw.randrange(2500, 3300) for _ in range(3))
    many = kind in ("rounds", "balanced") or (kind == "gates" and draw.random() < 0.5)
    count = draw.randrange(8, 48) if many else draw.choice((1, 1, 2, 3, 3, 4, 6, 10, 20, 32))
    longest = draw.choice((64, 200, 300, 700, 1500) if count > 4 else (100, 300, 1000, 3000, 8000 if kind == "gates" else 2000))
    tail = draw.choice((0, 1, 63, draw.randrange(64)))
    lengths = [draw.choice((0, 1, 64, 65, 100, 128, draw.randrange(1, longest + 1), longest + tail)) for _ in range(count)]
    if kind == "balanced" or draw.random() < 0.15:
        lengths = [longest + tail] * count
    return tuple(lengths) if sum(lengths) else (*lengths[1:], longest)


def draw_case(draw: random.Random, libraries: Library) -> Case:
    """Of a kind that is drawn first, if some tries find one."""
    wanted = draw.choice(KINDS)
    case = SEEN
    for _ in range(60):
        heads = draw.choice(MORE_HEADS.get(wanted, HEADS))
        lengths = draw_lengths(draw, wanted)
        if sum(lengths) * heads[1] > MOST_TOKEN_HEADS * (1.0 if wanted in ("balanced", "gates", "both forms") else 0.2):
            continue
        form = draw.choice(
            {"two kernels": (WHOLE, HALVES, OWN), "tables": (WHOLE, HALVES, HALVES, OWN)}.get(wanted, (OWN, OWN, FUSED))
        )
        dense = len(set(lengths)) == 1 and draw.random() < 0.5
        raw = draw.random() < 0.2
        case = Case(
            draw.randrange(1 << 20),
            lengths,
            heads,
            form=OWN if wanted in ("balanced", "both forms") else form,
            uncut=form != OWN or draw.random() < 0.5,
            dense=dense,
            behind=0 if dense or draw.random() < 0.8 else draw.randrange(1, 100),
            half=draw.random() < 0.25,
            norm=draw.random() < 0.4,
            gate="raw" if raw else draw.choice(("fp32", "fp32", "fp32", "bf16", "fp16", "none")),
            beta=draw.choice(("fp32", "fp32", "bf16")),
            logits=draw.random() < 0.2,
            h0=draw.random() < 0.75,
            ht=draw.random() < 0.8,
            v_first=draw.random() < 0.5,
            save=draw.random() < 0.25,
            long_index=draw.random() < 0.3,
        )
        case = replace(case, kind=kind_of(case, libraries))
        if case.kind == "cut":
            case = replace(case, uncut=True)
            case = replace(case, kind=kind_of(case, libraries))
        if case.kind == wanted:
            break
    return case if case.kind != "cut" else SEEN


def kind_of(case: Case, libraries: Library) -> str:
    args, library = arguments_of(case, "cuda"), libraries.of(case.form)
    plan = _ffi.Plan(struct_size=ctypes.sizeof(_ffi.Plan))
    lengths = (ctypes.c_int64 * len(case.lengths))(*case.lengths)
    checked(library, library.qla_gdn_plan(byref(args), lengths, len(case.lengths), None, byref(plan)))
    seqs, (hk, hv), reason = len(case.lengths), case.heads, plan.reason.decode()
    items, slots = seqs * hv, (sum(case.lengths) + case.behind) // 64 + seqs
    if plan.segment_chunks:
        return "cut"
    if "two parts" in reason:
        return "balanced"
    if "fused for about equal" in reason:
        return "both forms"
    if plan.fused:  # plan::direct_launch
        if items <= SMS:
            return "one round" if slots <= 40 * seqs else "gates"
        return "rounds" if seqs <= 32 and items <= 4 * SMS and slots * hv <= 72 * SMS else "gates"
    tables = seqs <= 32 and items * plan.value_splits <= SMS and slots * hk < SMS
    return "tables" if tables else "two kernels"


def draw_cases(seed: int, process: int, count: int, libraries: Library) -> list[Case]:
    draw = random.Random(5000 * seed + process)
    return list(dict.fromkeys([SEEN, *(draw_case(draw, libraries) for _ in range(count - 1))]))
