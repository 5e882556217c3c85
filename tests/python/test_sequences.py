"""Recipes about lengths, packing, states carried on, head groups and plans (sections B and D of docs/testing.md)."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import qla
from common import Device, assert_close, assert_equal, check, reference, run, subprocess_python, upstream
from qla import _call
from qla.testing import recurrent_gated_delta_rule, relative_l2

PER_TOKEN = ("q", "k", "v", "g", "beta")


def part(inputs: dict, begin: int, end: int, state: int | None = None) -> dict:
    result = {name: inputs[name][:, begin:end] for name in PER_TOKEN}
    if state is not None and "initial_state" in inputs:
        result["initial_state"] = inputs["initial_state"][state : state + 1]
    return result


@pytest.mark.br(33)
@pytest.mark.parametrize("with_state", [False, True])
def test_empty_sequences_forward(device: Device, with_state: bool) -> None:
    cu = (0, 0, 64, 64, 64, 130, 130)
    inputs = device.inputs(130, sequences=6, seed=1033)
    if not with_state:
        inputs.pop("initial_state")
    o, ht = qla.chunk_gated_delta_rule(**inputs, cu_seqlens=device.cu(*cu), output_final_state=True, auto_cp=False)
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        if a == b:
            expected = inputs["initial_state"][n] if with_state else torch.zeros_like(ht[n])
            assert torch.equal(ht[n], expected)
            continue
        alone, end = qla.chunk_gated_delta_rule(**part(inputs, a, b, n), output_final_state=True, auto_cp=False)
        assert torch.equal(o[:, a:b], alone) and torch.equal(ht[n], end[0])


@pytest.mark.br(34)
@pytest.mark.parametrize("cu", [(0, 100, 256, 256, 256), (0, 0, 0, 5)])
def test_repeated_boundaries_with_gradients(device: Device, cu: tuple[int, ...]) -> None:
    sequences = len(cu) - 1
    inputs = device.inputs(cu[-1], sequences=sequences, seed=1034)
    do, dht = upstream(inputs, sequences)
    actual = run(inputs, do, dht, cu_seqlens=device.cu(*cu))
    assert_close(actual, reference(inputs, do, dht, cu_seqlens=cu), device.dtype)
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        if a == b:
            assert torch.equal(actual["dh0"][n], dht[n])


EMPTY = """
import torch, qla
from common import Device
device = Device({name!r})
for cu in {cases!r}:
    inputs = device.inputs(cu[-1], (1, 2), sequences=len(cu) - 1, **({{'k_dim': 8, 'v_dim': 8}} if device.name == 'cpu' else {{}}))
    xs = {{n: x.requires_grad_() for n, x in inputs.items()}}
    o, ht = qla.chunk_gated_delta_rule(**xs, cu_seqlens=device.cu(*cu), output_final_state=True)
    lengths = [b - a for a, b in zip(cu, cu[1:])]
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(ht[n], xs['initial_state'][n])
    (o.sum() + ht.sum()).backward()
    assert torch.equal(xs['initial_state'].grad[[n for n, x in enumerate(lengths) if x == 0]],
                       torch.ones_like(xs['initial_state'].grad[[n for n, x in enumerate(lengths) if x == 0]]))
inputs = device.inputs(0, (1, 2), batch=3)
o, ht = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
assert o.shape[:2] == (3, 0) and torch.equal(ht, inputs['initial_state'])
inputs.pop('initial_state')
o, ht = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
assert not ht.any()
print('done')
"""


@pytest.mark.br(35)
def test_nothing_hangs_on_empty_sequences(device: Device) -> None:
    many = [0] * 2048 + [9] * 2049  # 4,096 sequences, one of them with tokens
    code = EMPTY.format(name=device.name, cases=[(0, 0, 0), (0, 0, 70), (0, 70, 70), tuple(many)])
    assert "done" in subprocess_python(code)


@pytest.mark.br(42)
@pytest.mark.parametrize("lengths", [(37, 91), (64, 64), (1, 127)])
def test_packed_sequences_do_not_see_each_other(device: Device, lengths: tuple[int, int]) -> None:
    first, second = lengths
    cu = device.cu(0, first, first + second)
    inputs = device.inputs(first + second, sequences=2, seed=1042)
    do, dht = upstream(inputs, 2)
    changed = {**inputs, "v": inputs["v"].clone()}
    changed["v"][:, :first] += 1
    a, b = run(inputs, do, dht, cu_seqlens=cu), run(changed, do, dht, cu_seqlens=cu)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(a[name][:, first:], b[name][:, first:]), name
    for name in ("ht", "dh0"):
        assert torch.equal(a[name][1], b[name][1]), name


@pytest.mark.br(45)
def test_int32_and_int64_boundaries(device: Device) -> None:
    cu = (0, 37, 128, 130)
    inputs = device.inputs(130, sequences=3, seed=1045)
    do, dht = upstream(inputs, 3)
    first = run(inputs, do, dht, cu_seqlens=device.cu(*cu))
    for _ in range(2):
        for dtype in (torch.int64, torch.int32):
            assert_equal(run(inputs, do, dht, cu_seqlens=device.cu(*cu, dtype=dtype)), first)


@pytest.mark.br(46)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("splits", [(100, 237), tuple(range(1, 300))], ids=["three", "tokens"])
def test_state_carried_from_call_to_call(device: Device, v_first: bool, splits: tuple[int, ...]) -> None:
    inputs = device.inputs(300, seed=1046)
    if v_first:
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    whole, end = qla.chunk_gated_delta_rule(**inputs, output_final_state=True, state_v_first=v_first)
    state, outputs = inputs["initial_state"], []
    for a, b in zip((0, *splits), (*splits, 300)):
        o, state = qla.chunk_gated_delta_rule(
            **part(inputs, a, b), initial_state=state, output_final_state=True, state_v_first=v_first
        )
        outputs.append(o)
    limit = 1e-5 if device.name == "cpu" else 5e-3
    assert relative_l2(torch.cat(outputs, 1), whole) <= limit and relative_l2(state, end) <= limit


@pytest.mark.br(46)
def test_state_carried_packed(device: Device) -> None:
    """Three sequences of 100 tokens, each split at another point."""
    inputs = device.inputs(300, sequences=3, seed=1046)
    cu = (0, 100, 200, 300)
    whole, end = qla.chunk_gated_delta_rule(**inputs, cu_seqlens=device.cu(*cu), output_final_state=True)
    cuts = (13, 64, 99)
    early = [(a, a + c) for a, c in zip(cu, cuts)]
    late = [(a + c, b) for a, b, c in zip(cu, cu[1:], cuts)]

    def half(pieces, state):
        packed = {name: torch.cat([inputs[name][:, a:b] for a, b in pieces], 1) for name in PER_TOKEN}
        bounds = [0]
        for a, b in pieces:
            bounds.append(bounds[-1] + b - a)
        o, ht = qla.chunk_gated_delta_rule(**packed, initial_state=state, cu_seqlens=device.cu(*bounds), output_final_state=True)
        return o, ht, bounds

    o1, mid, b1 = half(early, inputs["initial_state"])
    o2, final, b2 = half(late, mid)
    joined = torch.cat([x for n in range(3) for x in (o1[:, b1[n] : b1[n + 1]], o2[:, b2[n] : b2[n + 1]])], 1)
    limit = 1e-5 if device.name == "cpu" else 5e-3
    assert relative_l2(joined, whole) <= limit and relative_l2(final, end) <= limit


@pytest.mark.br(48)
@pytest.mark.parametrize("heads", [(1, 8), (2, 8), (16, 48), (4, 4), (3, 9)], ids=str)
def test_grouped_value_heads(device: Device, heads: tuple[int, int]) -> None:
    sizes = {"k_dim": 16, "v_dim": 16} if device.name == "cpu" else {}
    inputs = device.inputs(70, heads, seed=1048, **sizes)
    do, dht = upstream(inputs)
    actual, expected = run(inputs, do, dht), reference(inputs, do, dht)
    assert_close(actual, expected, device.dtype)
    for name in ("o", "dv"):
        for h in range(heads[1]):
            assert relative_l2(actual[name][:, :, h], expected[name][:, :, h]) <= (1e-5 if device.name == "cpu" else 1e-2), (
                name,
                h,
            )
    for name in ("dq", "dk"):
        for h in range(heads[0]):
            assert relative_l2(actual[name][:, :, h], expected[name][:, :, h]) <= (1e-5 if device.name == "cpu" else 1e-2), (
                name,
                h,
            )


@pytest.mark.br(48)
@pytest.mark.parametrize("heads", [(2, 5), (4, 2)], ids=str)
def test_uneven_groups_are_refused(device: Device, heads: tuple[int, int]) -> None:
    inputs = device.inputs(10, heads)
    with pytest.raises(ValueError, match=r"v: .*evenly divisible"):
        qla.chunk_gated_delta_rule(**inputs)


@pytest.mark.br(72)
def test_batch_invariance(device: Device) -> None:
    sizes = {"k_dim": 16, "v_dim": 16} if device.name == "cpu" else {}
    make = torch.Generator().manual_seed(1072)
    lengths = torch.randint(1, 40, (61,), generator=make).tolist()
    x = device.inputs(777, (1, 2), seed=1072, **sizes)
    alone, end = qla.chunk_gated_delta_rule(**x, output_final_state=True, deterministic="batch")
    for position in (0, 30, 61):
        pieces = [device.inputs(n, (1, 2), seed=i, **sizes) for i, n in enumerate(lengths)]
        pieces.insert(position, x)
        packed = {name: torch.cat([p[name] for p in pieces], 1) for name in PER_TOKEN}
        packed["initial_state"] = torch.cat([p["initial_state"] for p in pieces])
        bounds = torch.tensor([0, *[p["q"].shape[1] for p in pieces]]).cumsum(0).to(device.name)
        o, ht = qla.chunk_gated_delta_rule(**packed, cu_seqlens=bounds, output_final_state=True, deterministic="batch")
        begin = int(bounds[position])
        assert torch.equal(o[:, begin : begin + 777], alone) and torch.equal(ht[position], end[0])


@pytest.mark.br(73)
@pytest.mark.parametrize("auto_cp", [False, True, "eight chunks a segment"])
def test_heads_split_over_calls(device: Device, auto_cp: bool | str) -> None:
    """Tensor-parallel shards: the plan must not change the numbers with cuts off or fixed, and hardly with automatic ones."""
    heads, sizes = (4, {"k_dim": 16, "v_dim": 16}) if device.name == "cpu" else (16, {})
    lengths = (98, 1612, 93, 1612) if device.name == "cpu" else (988, 16128, 936, 16128)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(device.name)
    inputs = device.inputs(sum(lengths), (heads, heads), sequences=4, seed=1073, **sizes)
    policy = (
        auto_cp
        if isinstance(auto_cp, bool)
        else dataclasses.replace(qla.plan(**inputs, cu_seqlens=cu), segment_chunks=8, uncut_chunks=None)
    )
    whole, _ = qla.chunk_gated_delta_rule(**inputs, cu_seqlens=cu, auto_cp=policy)
    for shard in (heads // 4, 1):
        parts = []
        for h in range(0, heads, shard):
            mine = {n: (x[:, h : h + shard] if n == "initial_state" else x[:, :, h : h + shard]) for n, x in inputs.items()}
            parts.append(qla.chunk_gated_delta_rule(**mine, cu_seqlens=cu, auto_cp=policy)[0])
        joined = torch.cat(parts, 2)
        if auto_cp is not True:
            assert torch.equal(joined, whole)
        else:
            assert (joined - whole).abs().max() <= 5e-4 and relative_l2(joined, whole) <= 2e-3


@pytest.mark.br("D-2")
def test_one_token_beside_a_long_sequence(device: Device) -> None:
    cu = (0, 1, 1, 600, 601)
    inputs = device.inputs(601, sequences=4)
    check_packed = run(inputs, *upstream(inputs, 4), cu_seqlens=device.cu(*cu))
    assert_close(check_packed, reference(inputs, *upstream(inputs, 4), cu_seqlens=cu), device.dtype)


@pytest.mark.br("D-6")
def test_one_token_is_one_step(device: Device) -> None:
    """Decoding through the chunk function."""
    inputs = device.inputs(1)
    o, ht = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    ref_o, ref_ht = recurrent_gated_delta_rule(**inputs, output_final_state=True)
    assert_close({"o": o, "ht": ht}, {"o": ref_o, "ht": ref_ht}, device.dtype)


@pytest.mark.br(41)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 65), (3, 28), (3, 130)])
def test_dense_equals_packed(device: Device, batch: int, tokens: int) -> None:
    inputs = device.inputs(tokens, batch=batch, seed=1041)
    do, dht = upstream(inputs)
    dense = run(inputs, do, dht, auto_cp=False)
    flat = {name: inputs[name].flatten(0, 1)[None] for name in PER_TOKEN}
    flat["initial_state"] = inputs["initial_state"]
    cu = torch.arange(batch + 1, device=device.name) * tokens
    packed = run(flat, do.flatten(0, 1)[None], dht, cu_seqlens=cu, auto_cp=False)
    for name, x in packed.items():
        assert torch.equal(x.reshape(dense[name].shape), dense[name]), name


def test_every_dtype(device: Device) -> None:
    for dtype in device.dtypes:
        check(device, device.inputs(150, dtype=dtype))


def test_states_from_an_unset_flag(device: Device) -> None:
    """has_initial_state: where False the sequence starts from zero, whatever its slot holds, and its dh0 is 0."""
    cu = (0, 40, 90, 100)
    inputs = device.inputs(100, sequences=3)
    has = device.tensor([True, False, True])
    do, dht = upstream(inputs, 3)
    expected = reference(inputs, do, dht, cu_seqlens=cu, has_initial_state=has)
    poisoned = {**inputs, "initial_state": inputs["initial_state"].clone()}
    poisoned["initial_state"][1] = float("nan")
    actual = run(poisoned, do, dht, cu_seqlens=device.cu(*cu), has_initial_state=has)
    assert_close(actual, expected, device.dtype)
    assert not actual["dh0"][1].any()


GUARD = 1 << 16  # bytes before and behind whatever a call allocates


@pytest.mark.br(44)
@pytest.mark.parametrize(
    ("heads", "tokens", "sequences"),
    [((2, 8), 8192, 1), ((2, 8), 8192, 3), ((16, 16), 8192, 1), ((16, 32), 8192, 2), ((8, 24), 8192, 2)]  # cut
    + [((16, 48), 4096, 2), ((16, 64), 2048, 8), ((32, 32), 1024, 40), ((2, 8), 130, 3)],  # both forms, balanced, many, direct
)
def test_boundaries_that_make_no_sense_on_a_device(
    device: Device, heads: tuple[int, int], tokens: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks at them there: the results mean nothing, but nothing outside outputs and workspace is written, the call comes
    back, and the next one is right."""
    if device.name == "cpu":
        pytest.skip("refused: test_wrong_argument")
    held: list[tuple[torch.Tensor, int]] = []

    def empty_of(cuda: int):
        def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = (1 + sum((n - 1) * s for n, s in zip(shape, stride))) * dtype.itemsize if min(shape, default=1) else 0
            buffer = torch.full((size + 2 * GUARD,), 0xAB, dtype=torch.uint8, device=device.name)
            held.append((buffer, size))
            return buffer[GUARD : GUARD + size].view(dtype).as_strided(shape, stride)

        return empty

    monkeypatch.setattr(_call, "_empty_of", empty_of)
    inputs = device.inputs(tokens, heads, sequences=sequences)
    inputs["g"][:, :, 0] = 0.0  # a head that merges
    do, dht = upstream(inputs, sequences)
    good = device.cu(*(tokens * n // sequences for n in range(sequences + 1)))
    expected = run(inputs, do, dht, cu_seqlens=good)
    draw = random.Random(tokens + sequences)
    values = (-(2**31), -5, 0, 1, 63, 64, tokens // 2, tokens - 1, tokens, tokens + 1, tokens + 640, 2**31 - 1)
    for auto_cp in (True, True, True, "exact", "exact", False, False):
        bad = device.cu(*(draw.choice(values) for _ in range(sequences + 1)))
        for gradients in (True, False):
            held.clear()
            if gradients:
                run(inputs, do, dht, cu_seqlens=bad, auto_cp=auto_cp)
            else:
                with torch.no_grad():
                    qla.chunk_gated_delta_rule(**inputs, cu_seqlens=bad, output_final_state=True, auto_cp=auto_cp)
            torch.cuda.synchronize()
            for buffer, size in held:
                outside = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
                assert (outside == 0xAB).all(), f"{bad.tolist()}, auto_cp {auto_cp}: bytes beside an allocation of {size} changed"
    assert_equal(run(inputs, do, dht, cu_seqlens=good), expected)
