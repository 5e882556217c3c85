"""`qla.plan`, and `qla.testing` itself: the reference every other test trusts."""

from __future__ import annotations

import pytest
import torch

import qla
from common import Device, assert_close, reference, run, upstream
from qla.testing import gate, random_inputs, recurrent_gated_delta_rule, relative_l2

CPU = Device("cpu")


def test_plan_covers_every_chunk_once() -> None:
    inputs = CPU.inputs(3000, (1, 2), sequences=3)
    cu = CPU.cu(0, 100, 100, 3000)
    plan = qla.plan(**inputs, cu_seqlens=cu)
    assert plan.num_sequences == 3 and plan.total_chunks == 2 + 46
    seen = [(s.sequence, s.head, c) for s in plan.segments for c in range(s.first_chunk, s.first_chunk + s.num_chunks)]
    assert sorted(seen) == [(n, h, c) for n, count in ((0, 2), (2, 46)) for h in range(2) for c in range(count)]
    assert plan.reason and str(plan)
    assert all(s.start in ("zero", "initial", "warmup", "merged") for s in plan.segments)


def test_plan_needs_no_data() -> None:
    inputs = {n: x.to("meta") for n, x in CPU.inputs(3000, (1, 2)).items()}
    plan = qla.plan(**inputs, auto_cp=False)
    assert plan.total_chunks == 47 and {(s.first_chunk, s.num_chunks) for s in plan.segments} == {(0, 47)}
    decay = torch.full((47, 2), -20.0)
    decay[:, 1] = 0.0
    cut = qla.plan(**inputs, chunk_log_decay=decay, lens=[3000], auto_cp=qla.Plan.fixed(8))
    starts = {h: {s.start for s in cut.segments if s.head == h and s.first_chunk} for h in (0, 1)}
    assert starts[0] == {"warmup"} and "merged" in starts[1] and "warmup" not in starts[1]  # a head that never forgets


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"lens": "ab"}, TypeError, "lens: expected whole numbers"),
        ({"lens": 70}, TypeError, "lens: expected whole numbers"),
        ({"lens": [35, 35]}, ValueError, "lens: expected 1 lengths"),
        ({"lens": [-1]}, ValueError, r"lens\[0\]"),
        ({"chunk_log_decay": "x"}, TypeError, "chunk_log_decay: expected float32"),
        ({"chunk_log_decay": [1.0]}, ValueError, r"chunk_log_decay: expected shape \[chunks, HV\] = \[2, 4\], got \[1\]"),
        (
            {"chunk_log_decay": [[0.0] * 4, [0.0, float("nan"), 0.0, 0.0]]},
            ValueError,
            r"chunk_log_decay: expected .*nan at \[1, 1\]",
        ),
    ],
)
def test_wrong_lengths_and_gates(given: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        qla.plan(**CPU.inputs(70), **given)


def test_a_plan_is_a_policy() -> None:
    inputs = CPU.inputs(1000, (1, 2), kind="zero")
    do, dht = upstream(inputs)
    expected = reference(inputs, do, dht)
    for segment in (1, 3, 5):
        policy = qla.Plan.fixed(segment)
        assert {s.num_chunks for s in qla.plan(**inputs, auto_cp=policy).segments} <= {segment, 16 % segment}
        assert_close(run(inputs, do, dht, auto_cp=policy), expected, torch.float32, 2)
    made = qla.plan(**inputs)
    assert_close(run(inputs, do, dht, auto_cp=made), expected, torch.float32, 2)


def test_fixed_plans() -> None:
    inputs = CPU.inputs(1000, (1, 2), kind="soft")
    for exact, starts in ((False, {"initial", "warmup"}), (True, {"initial", "merged"})):
        plan = qla.Plan.fixed(3, exact=exact)
        made = qla.plan(**inputs, auto_cp=plan, chunk_log_decay=torch.full((16, 2), -1000.0))
        assert {s.start for s in made.segments} == starts and {s.num_chunks for s in made.segments} == {3, 1}
        assert str(plan).startswith("plan: segments of 3 chunks")
        o, _ = qla.chunk_gated_delta_rule(**inputs, auto_cp=plan)
        again, _ = qla.chunk_gated_delta_rule(**inputs, auto_cp=made)
        assert torch.equal(o, again)
        assert_close({"o": o}, {"o": recurrent_gated_delta_rule(**inputs)[0]}, torch.float32)


@pytest.mark.parametrize(
    "given, options, error, words",
    [
        (0, {}, ValueError, "segment_chunks: expected 1 chunk of 64 tokens or more, got 0; auto_cp=False"),
        (2.0, {}, TypeError, "segment_chunks: expected a whole number of chunks, got 2.0"),
        ("3", {}, TypeError, "segment_chunks: expected a whole number of chunks, got '3'"),
        (3, {"exact": "no"}, TypeError, "exact: expected True or False, got 'no'"),
    ],
)
def test_wrong_fixed_plans(given: object, options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        qla.Plan.fixed(given, **options)


def test_gate_sums_as_the_docstring_of_plan_says() -> None:
    inputs = CPU.inputs(200, batch=2)
    rows = torch.stack([part.sum(0) for row in inputs["g"] for part in row.split(64)])
    assert "torch.stack([part.sum(0) for row in g for part in row.split(64)])" in (qla.plan.__doc__ or "")
    assert qla.plan(**inputs, chunk_log_decay=rows).total_chunks == len(rows) == 8
    packed = CPU.inputs(200, sequences=2)
    lens = [70, 120]
    rows = torch.stack([part.sum(0) for row in packed["g"][0, : sum(lens)].split(lens) for part in row.split(64)])
    assert "for row in g[0, : sum(lens)].split(lens)" in (qla.plan.__doc__ or "")
    assert qla.plan(**packed, cu_seqlens=CPU.cu(0, 70, 190), lens=lens, chunk_log_decay=rows).total_chunks == len(rows) == 4


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_hand_check() -> None:
    ones = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    half = torch.full((1, 2, 1), 0.5, dtype=torch.float64)
    v = torch.tensor([4.0, 8.0], dtype=torch.float64).view(1, 2, 1, 1)
    for fn in (recurrent_gated_delta_rule, qla.chunk_gated_delta_rule):
        o, _ = fn(ones, ones, v, half.log(), half, scale=1.0)
        assert torch.allclose(o.flatten(), torch.tensor([2.0, 4.5], dtype=torch.float64), atol=1e-12)


def test_reference_gradients_are_its_derivatives() -> None:
    x = random_inputs(1, 5, 1, 2, 3, 2, dtype=torch.float64, sequences=2)
    x["A_log"], x["dt_bias"] = torch.zeros(2).double(), torch.ones(2).double()
    names = list(x)

    def f(*args):
        return recurrent_gated_delta_rule(
            **dict(zip(names, args)), use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=[0, 2, 4], output_final_state=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, [y.requires_grad_() for y in x.values()])


def test_reference_packs_as_it_runs_alone() -> None:
    x = random_inputs(1, 20, 1, 2, 4, 6, sequences=3)
    o, ht = recurrent_gated_delta_rule(**x, cu_seqlens=[0, 7, 7, 14], output_final_state=True)
    for n, (a, b) in enumerate(((0, 7), (7, 7), (7, 14))):
        piece = {m: x[m][:, a:b] for m in ("q", "k", "v", "g", "beta")}
        alone, end = recurrent_gated_delta_rule(**piece, initial_state=x["initial_state"][n : n + 1], output_final_state=True)
        assert torch.equal(o[:, a:b], alone) and torch.equal(ht[n], end[0])
    assert not o[:, 14:].any()


@pytest.mark.parametrize("kind", ["soft", "qwen", "zero", "mix", "cliff", -0.5])
def test_gates(kind) -> None:
    g = gate(kind, 2, 70, 3, torch.Generator().manual_seed(0))
    assert g.shape == (2, 70, 3) and (g <= 0).all() and g.isfinite().all()
    if kind == "cliff":
        assert (g == -100).sum() == 6 and (g[:, 37] == -100).all()


def test_relative_l2() -> None:
    assert relative_l2(torch.tensor([3.0]), torch.tensor([2.0])) == 0.5
    assert relative_l2(torch.tensor([3.0]), torch.tensor([0.0])) == 3.0
    assert relative_l2(torch.tensor([float("nan")]), torch.tensor([1.0])) != 0


def test_what_the_reference_needs_is_named() -> None:
    inputs = CPU.inputs(10)
    with pytest.raises(TypeError, match="beta: expected"):
        recurrent_gated_delta_rule(**{**inputs, "beta": None})
    with pytest.raises(ValueError, match="A_log: expected g and A_log"):
        recurrent_gated_delta_rule(**inputs, use_gate_in_kernel=True)
