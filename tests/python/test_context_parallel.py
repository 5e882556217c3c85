"""Context parallelism inside one device: one graph for any boundaries and gates, modes, values that are not finite."""

from __future__ import annotations

import math
import random

import pytest
import torch

import qla
import qla.ops
from common import LIMITS, Device, assert_equal
from cut_cases import NAMES_OF_CASES, problem
from qla import _ffi
from qla.testing import recurrent_gated_delta_rule, relative_l2

TOKENS, HEADS = 8192, (2, 8)
PACKINGS = 100


def forward(inputs: dict[str, torch.Tensor], cu: torch.Tensor | None, **options: object) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        o, ht = qla.chunk_gated_delta_rule(**inputs, cu_seqlens=cu, output_final_state=True, **options)
    return {"o": o, "ht": ht}


def random_boundaries(draw: random.Random, tokens: int, sequences: int) -> list[int]:
    """One long sequence, equal ones, empty ones, one of a token: whatever."""
    kind = draw.randrange(4)
    if kind == 0:
        inner = sorted(draw.randrange(tokens + 1) for _ in range(sequences - 1))
    elif kind == 1:
        inner = [tokens * n // sequences for n in range(1, sequences)]
    elif kind == 2:
        inner = sorted(draw.choice((0, 1, 63, 64, 65, tokens - 1, tokens)) for _ in range(sequences - 1))
    else:
        inner = sorted(draw.randrange(tokens // 64 + 1) * 64 for _ in range(sequences - 1))
    end = tokens if draw.random() < 0.7 else draw.randrange(inner[-1] if inner else 1, tokens + 1)
    return [0, *(min(x, end) for x in inner), end]


def random_gates(draw: random.Random, shape: torch.Size) -> torch.Tensor:
    """Heads that never forget, forget at once, forget slowly, stand just beside the threshold of -10 a warm-up, or change on the way."""
    tokens, heads = shape[1], shape[2]
    g = torch.empty(shape)
    for head in range(heads):
        rate = draw.choice((0.0, -8.0, -0.05, -10.0 / 256 * draw.uniform(0.9, 1.1), -10.0 / 64, -0.001))
        g[0, :, head] = rate
        if draw.random() < 0.25:
            at = draw.randrange(tokens)
            g[0, at:, head] = draw.choice((0.0, -0.1))
    return g


@pytest.mark.br(77)
@pytest.mark.parametrize(
    ("sequences", "heads"), [(1, HEADS), (2, HEADS), (3, HEADS), (5, HEADS), (2, (10, 20)), (1, (16, 16)), (2, (16, 16))]
)
def test_one_graph_for_any_packing_and_gate(device: Device, sequences: int, heads: tuple[int, int]) -> None:
    """Boundaries and gates are read on the device: a graph captured once replays any of them, to the bits of an eager call. Two
    sequences of 20 heads are cut where one is long, and stay whole where both are short; groups of one are cut in the fused form."""
    if device.name != "cuda":
        pytest.skip("graphs are CUDA's")
    inputs = device.inputs(TOKENS, heads, sequences=sequences)
    cu = device.cu(*(TOKENS * n // sequences for n in range(sequences + 1)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(inputs, cu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = forward(inputs, cu)
    draw = random.Random(sequences)
    for number in range(PACKINGS if sequences == 3 else PACKINGS // 5):
        boundaries = random_boundaries(draw, TOKENS, sequences)
        cu.copy_(device.cu(*boundaries))
        inputs["g"].copy_(random_gates(draw, inputs["g"].shape))
        held["o"].fill_(float("nan"))
        held["ht"].fill_(float("nan"))
        graph.replay()
        replayed = {name: x.clone() for name, x in held.items()}
        assert_equal(replayed, forward(inputs, cu))
        uncut = forward(inputs, cu, auto_cp=False)
        end = boundaries[-1]
        for name, x, y in (("o", replayed["o"][:, :end], uncut["o"][:, :end]), ("ht", replayed["ht"], uncut["ht"])):
            assert torch.isfinite(x).all(), (number, boundaries, name)
            assert relative_l2(x.float(), y.float()) < 6e-3 or y.numel() == 0, (number, boundaries, name)
        assert (replayed["o"][:, end:] == 0).all()


def test_modes_agree(device: Device) -> None:
    """auto, exact and off compute the same; a plan repeated, the same bits."""
    inputs = device.inputs(8192, (1, 2)) if device.name == "cuda" else device.inputs(1600, (1, 2))
    inputs["g"][:, :, 0] = 0.0  # a head that never forgets beside one that does
    uncut = forward(inputs, None, auto_cp=False)
    limit = 6e-3 if device.name == "cuda" else 1e-5
    for auto_cp in (True, "auto", "exact"):
        for name, x in forward(inputs, None, auto_cp=auto_cp).items():
            assert relative_l2(x.float(), uncut[name].float()) < limit, (auto_cp, name)
    whole = qla.plan(**inputs, auto_cp=False)
    assert_equal(forward(inputs, None, auto_cp=whole), uncut)
    for auto_cp in (True, "exact"):
        made = qla.plan(**inputs, output_final_state=True, auto_cp=auto_cp)
        assert_equal(forward(inputs, None, auto_cp=made), forward(inputs, None, auto_cp=auto_cp))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", NAMES_OF_CASES)
def test_cut_forward(device: Device, name: str, chunks: int) -> None:
    """Outputs and final states of cut sequences, by warm-up where gates allow it and by merges alone, against the recurrence: no
    further from it than twice the uncut ones."""
    inputs, _, _ = problem(device, name)
    norm, cu, h0 = inputs.pop("norm"), inputs.pop("cu_seqlens", None), inputs.get("initial_state")
    with torch.no_grad():
        o, ht = recurrent_gated_delta_rule(
            **{n: x.cpu().double() for n, x in inputs.items()},
            scale=128**-0.5,
            output_final_state=True,
            use_qk_l2norm_in_kernel=norm,
            cu_seqlens=None if cu is None else cu.tolist(),
        )
    want = {"o": o.to(device.name), "ht": ht.to(device.name)}
    ten = [*(inputs[n] for n in ("q", "k", "v", "g", "beta")), h0, cu, None, None, None]

    def results(cp_mode: int, length: int, threshold: float | None) -> dict[str, torch.Tensor]:
        flags = _ffi.FLAG_QK_L2NORM if norm else 0
        o, ht, _ = torch.ops.qla.gdn_forward(*ten, 128**-0.5, flags, cp_mode, length, threshold, 0, True, False, 0)
        return {"o": o, "ht": ht}

    uncut = {n: relative_l2(x, want[n]) for n, x in results(_ffi.CP_OFF, 0, None).items()}
    for threshold in (None, -math.inf):
        got = results(_ffi.CP_FIXED, chunks, threshold)
        for n, x in got.items():
            now = relative_l2(x, want[n])
            assert now <= max(2 * uncut[n], LIMITS[device.dtype][0] / 10), f"{n}: {now:.3g} cut, {uncut[n]:.3g} uncut"
        assert_equal(results(_ffi.CP_FIXED, chunks, threshold), got)


@pytest.mark.br(72, 73)
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((2, 4), (4736, 320)), ((2, 8), (14032, 246, 0))],  # the second: more chains of merges than one sequence of it has alone
)
def test_batch_invariant_with_cuts(device: Device, heads: tuple[int, int], lengths: tuple[int, ...]) -> None:
    """deterministic="batch": a sequence's bits do not depend on what it is packed with, nor on the number of heads."""
    if device.name == "cpu" and heads != (2, 4):
        pytest.skip("on the CPU the first case says it all")
    long, ends = lengths[0], [sum(lengths[: n + 1]) for n in range(len(lengths))]
    inputs = device.inputs(ends[-1], heads, sequences=len(lengths))
    inputs["g"][:, :, 1] = 0.0
    cu = device.cu(0, *ends)
    packed = forward(inputs, cu, deterministic="batch")
    first = {name: x[:1] if name == "initial_state" else x[:, :long].contiguous() for name, x in inputs.items()}
    alone = forward(first, None, deterministic="batch")
    assert_equal({"o": packed["o"][:, :long], "ht": packed["ht"][:1]}, alone)
    half = {
        name: x[:, : heads[1] // 2].contiguous() if name == "initial_state" else x[:, :, : x.shape[2] // 2].contiguous()
        for name, x in inputs.items()
    }
    mine = {"o": packed["o"][:, :, : heads[1] // 2], "ht": packed["ht"][:, : heads[1] // 2]}
    assert_equal(mine, forward(half, cu, deterministic="batch"))


@pytest.mark.br(64)
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("where", ["everywhere", "late"])
@pytest.mark.parametrize("heads", [(2, 4), (16, 16)])  # the GPU cuts the second in its fused form, which looks at the keys itself
def test_keys_that_undo_forgetting(device: Device, heads: tuple[int, int], sequences: int, where: str) -> None:
    """Gates that forget in a chunk or two, and keys of one direction with beta |k|^2 = 2.5 that undo it: along that direction the
    state hardly decays. A cut that saw the gates alone would lose all of it."""
    tokens = 16384 if device.name == "cuda" else 1600
    if device.name == "cpu" and heads == (16, 16):
        heads = (4, 4)  # quicker, and the CPU has one form
    inputs = device.inputs(tokens, heads, sequences=sequences)
    cu = None if sequences == 1 else device.cu(0, tokens - 640, tokens)
    inputs["g"][:] = -0.42  # against log 1.5
    inputs["g"][:, :, 1] = -8.0  # forgets in spite of them
    inputs["g"][:, :, 3] = 0.0
    first = 0 if where == "everywhere" else tokens // 2
    keys = slice(0, 2 * heads[0] // heads[1])  # those of the first two value heads
    direction = torch.nn.functional.normalize(inputs["k"][:, :1, keys].float(), dim=-1)
    inputs["k"][:, first:, keys] = (direction * math.sqrt(2.5)).to(inputs["k"].dtype)
    inputs["beta"][:, first:, :2] = 1.0
    uncut = forward(inputs, cu, auto_cp=False)
    got = forward(inputs, cu)
    assert_equal(got, forward(inputs, cu))
    for other in (got, forward(inputs, cu, auto_cp="exact"), forward(inputs, cu, deterministic="batch")):
        for name, x in other.items():
            for head in range(heads[1]):
                of = (slice(None), slice(None), head) if name == "o" else (slice(None), head)
                assert relative_l2(x[of].float(), uncut[name][of].float()) < 2e-2, (name, head)


@pytest.mark.parametrize("what", ["v", "k", "initial_state", "g", "beta"])
@pytest.mark.parametrize("heads", [(1, 2), (2, 8), (8, 16), (16, 16)])  # the GPU cuts some in its fused form
def test_not_finite_is_not_lost(device: Device, what: str, heads: tuple[int, int]) -> None:
    """A NaN reaches every later token of its value column (of its head, from a key, gate or beta) as in the recurrence, in heads
    that never forget; and in heads that forget wherever the walk passes it. On the GPU a segment that warms up behind a NaN in v or
    in the given state does not see it (docs/decisions/0054): its outputs are finite, and nothing before the NaN is touched."""
    if device.name == "cpu" and heads != (1, 2):
        pytest.skip("the CPU has one form")
    tokens = 16384 if device.name == "cuda" else 1600
    inputs = device.inputs(tokens, heads, sequences=1) if what == "initial_state" else device.inputs(tokens, heads)
    inputs["g"][:] = 0.0
    inputs["g"][:, :, 1::2] = -0.3
    at, column = tokens // 2 + 5, 3
    if what in ("v", "k"):
        inputs[what][0, at, :, column] = math.nan
    elif what in ("g", "beta"):
        inputs[what][0, at] = math.nan
    else:
        at = 0
        inputs["initial_state"][0, :, 1, column] = math.nan
    clean = {**inputs, what: torch.nan_to_num(inputs[what], nan=0.5 if what != "g" else -0.3)}
    got, want = forward(inputs, None)["o"][0].float(), forward(clean, None)["o"][0].float()
    assert torch.isfinite(got[: at // 64 * 64]).all()  # a chunk is computed as a whole: earlier tokens of its own may be touched
    one_column = what in ("v", "initial_state")
    if one_column:  # other value columns never meet this one
        others = [c for c in range(got.shape[2]) if c != column]
        assert torch.equal(got[:, :, others], want[:, :, others])
    seen = got[at + 1 :, :, column].isnan() if one_column else got[at + 1 :].isnan().all(-1)
    assert seen[:, 0::2].all(), "a head that never forgets loses it"
    if device.name == "cpu" or not one_column:
        assert seen[:, 1::2].all(), "a head that forgets loses it"
        return
    for head in range(1, heads[1], 2):
        first_finite = int((~seen[:, head]).float().argmax()) if not seen[:, head].all() else len(seen)
        assert first_finite > 0 and not seen[first_finite:, head].any()


def test_force_intra_cp_cuts_and_computes_the_same(device: Device) -> None:
    """flash_qla's switch: the longest sequence in about eight segments, heads that never forget among them."""
    from flash_qla import _chunk, chunk_gated_delta_rule

    inputs = device.inputs(1600, (1, 2))
    inputs["g"][:, :, 0] = 0.0
    plan = qla.plan(**inputs, auto_cp=_chunk._policy(True, True, 1600))
    assert plan.segment_chunks == 4 and plan.num_segments > 2 * 2
    with torch.no_grad():
        whole = chunk_gated_delta_rule(**inputs, output_final_state=True, auto_cp=False)
        forced = chunk_gated_delta_rule(**inputs, output_final_state=True, force_intra_cp=True)
    for x, y in zip(forced, whole):
        assert relative_l2(x.float(), y.float()) < (6e-3 if device.name == "cuda" else 1e-5)
