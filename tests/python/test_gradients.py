"""Recipes about gradients and precision, through the public function and autograd (section A of docs/testing.md)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

import qla
from common import GRADS, Device, assert_close, check, leaves, reference, run, upstream
from qla.testing import relative_l2


def nan_tail(inputs: dict, end: int) -> dict:
    """The same with NaN in every token from `end` on."""
    result = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        result[name] = inputs[name].clone()
        result[name][:, end:] = float("nan")
    return result


@pytest.mark.br(3)
@pytest.mark.parametrize("cu", [(0, 256), (0, 73, 209), (0, 211, 385)])
def test_padding_after_the_last_boundary(device: Device, cu: tuple[int, ...]) -> None:
    inputs = device.inputs(400, sequences=len(cu) - 1, seed=1003)
    do, dht = upstream(inputs, len(cu) - 1)
    do[:, cu[-1] :] = float("nan")
    expected = reference(inputs, do.nan_to_num(0), dht, cu_seqlens=cu)
    actual = run(nan_tail(inputs, cu[-1]), do, dht, cu_seqlens=device.cu(*cu))
    assert_close(actual, expected, device.dtype)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not actual[name][:, cu[-1] :].any(), f"{name}: not exactly 0 past the last boundary"
    assert actual["dq"].double().sum().isfinite()


@pytest.mark.br(3)
@pytest.mark.parametrize("tokens", [10, 100])  # fewer than a chunk; more
def test_no_sequence_is_all_padding(device: Device, tokens: int) -> None:
    inputs = {name: x for name, x in device.inputs(tokens, seed=1003).items() if name in ("q", "k", "v", "g", "beta")}
    do = upstream(inputs)[0]
    soiled = [torch.full_like(x, float("nan")) for x in inputs.values()]  # memory that gradients may get
    xs = leaves(inputs)
    o, _ = qla.chunk_gated_delta_rule(**xs, cu_seqlens=device.cu(0))
    del soiled
    grads = torch.autograd.grad(o, list(xs.values()), do)
    assert not o.any()
    for name, grad in zip(xs, grads, strict=True):
        assert not grad.any(), f"{name}: gradient not exactly 0"


@pytest.mark.br(4)
@pytest.mark.parametrize(("tokens", "cu"), [(400, (0, 256)), (512, (0, 500)), (384, (0, 64, 320))])
def test_padding_gate_gradient(device: Device, tokens: int, cu: tuple[int, ...]) -> None:
    inputs = device.inputs(tokens, sequences=len(cu) - 1, seed=1004)
    do, dht = upstream(inputs, len(cu) - 1)
    actual = run(nan_tail(inputs, cu[-1]), do, dht, cu_seqlens=device.cu(*cu))
    expected = reference(inputs, do, dht, cu_seqlens=cu)
    assert relative_l2(actual["dg"], expected["dg"]) <= (1e-5 if device.name == "cpu" else 1e-2)
    assert not actual["dg"][:, cu[-1] :].any()


@pytest.mark.br(5)
@pytest.mark.parametrize("output_final_state", [False, True])
def test_state_gradient_without_final_state_in_the_loss(device: Device, output_final_state: bool) -> None:
    inputs = device.inputs(200, seed=1005)
    do, _ = upstream(inputs)
    xs = leaves(inputs)
    o, _ = qla.chunk_gated_delta_rule(**xs, output_final_state=output_final_state)
    (dh0,) = torch.autograd.grad(o, [xs["initial_state"]], do)
    expected = reference(inputs, do, None)
    assert_close({"dh0": dh0}, {"dh0": expected["dh0"]}, device.dtype)


@pytest.mark.br(5)
@pytest.mark.parametrize("zeros", [False, True])
def test_final_state_alone_in_the_loss(device: Device, zeros: bool) -> None:
    inputs = device.inputs(200, seed=1005)
    do, dht = upstream(inputs)
    actual = run(inputs, torch.zeros_like(do) if zeros else None, dht)
    expected = reference(inputs, None, dht)
    assert_close(actual, expected, device.dtype)


OPTIONS = ("initial_state", "final_state", "cu_seqlens", "l2norm", "v_first", "scale")


@pytest.mark.br(6)
@pytest.mark.parametrize(
    "subset", list(itertools.product([False, True], repeat=len(OPTIONS))), ids=lambda s: "".join("01"[x] for x in s)
)
def test_every_subset_of_options(device: Device, subset: tuple[bool, ...]) -> None:
    on = dict(zip(OPTIONS, subset))
    cu = (0, 31, 31, 70)
    sequences = len(cu) - 1 if on["cu_seqlens"] else 1
    inputs = device.inputs(70, (1, 2), sequences=sequences, seed=1006)
    options: dict = {
        "use_qk_l2norm_in_kernel": on["l2norm"],
        "state_v_first": on["v_first"],
        "scale": 0.3 if on["scale"] else None,
    }
    if not on["initial_state"]:
        inputs.pop("initial_state")
    elif on["v_first"]:
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    do, dht = upstream(inputs, sequences)
    dht_or_none = dht if on["final_state"] else None
    expected = reference(inputs, do, dht_or_none, **options, cu_seqlens=cu if on["cu_seqlens"] else None)
    actual = run(inputs, do, dht_or_none, **options, cu_seqlens=device.cu(*cu) if on["cu_seqlens"] else None)
    assert_close(actual, expected, device.dtype)
    for name, grad in GRADS.items():
        if name in inputs:
            assert actual[grad].shape == inputs[name].shape and actual[grad].dtype == inputs[name].dtype


@pytest.mark.br(7)
def test_every_way_to_cut_agrees(device: Device) -> None:
    inputs = device.inputs(130, seed=1007)
    do, dht = upstream(inputs)
    base = reference(inputs, do, dht)
    for auto_cp in (True, "auto", "exact", False):
        for deterministic in (None, True, "batch"):
            actual = run(inputs, do, dht, auto_cp=auto_cp, deterministic=deterministic)
            assert_close(actual, base, device.dtype)


@pytest.mark.br(8)
def test_qk_norm_keeps_the_type(device: Device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        inputs = device.inputs(100, dtype=dtype, seed=1008)
        for name in ("q", "k"):
            inputs[name] = (torch.randn(inputs[name].shape) * 3).to(dtype).to(device.name)
            inputs[name][0, 17, 1] = 0
        actual = check(device, inputs, use_qk_l2norm_in_kernel=True)
        assert actual["o"].dtype == dtype
        assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.br(12)
def test_no_gate_is_a_zero_gate(device: Device) -> None:
    inputs = device.inputs(130, kind="zero", seed=1012)
    do, dht = upstream(inputs)
    with_zeros = run(inputs, do, dht)
    without = run({**inputs, "g": None}, do, dht)
    assert_close(without, {name: x.double() for name, x in with_zeros.items() if name != "dg"}, device.dtype)
    assert_close(without, {k: x for k, x in reference(inputs, do, dht).items() if k != "dg"}, device.dtype)


@pytest.mark.br(23)
@pytest.mark.parametrize("kind", ["zero", "soft"])
def test_beta_up_to_two(device: Device, kind: str) -> None:
    inputs = device.inputs(192, kind=kind, seed=1023)
    inputs["beta"] = 2 * torch.randn_like(inputs["beta"]).mul(2**0.5).sigmoid()
    check(device, inputs, factor=10 if device.name == "cpu" else 1)  # the CPU's limit here is 1e-4


@pytest.mark.br(23)
@pytest.mark.parametrize("negative", [False, True])
def test_beta_logits(device: Device, negative: bool) -> None:
    inputs = device.inputs(100, seed=1023)
    logits = torch.randn_like(inputs["beta"])
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": negative}
    do, dht = upstream(inputs)
    actual = run({**inputs, "beta": logits}, do, dht, **options)
    assert_close(
        actual, reference({**inputs, "beta": logits}, do, dht, **options), device.dtype, 10 if device.name == "cpu" else 1
    )
    # the flag equals the expression outside, dbeta included
    x = logits.clone().requires_grad_()
    o, ht = qla.chunk_gated_delta_rule(**{**inputs, "beta": x.sigmoid() * (2 if negative else 1)}, output_final_state=True)
    (dbeta,) = torch.autograd.grad([o, ht], [x], [do, dht])
    assert relative_l2(actual["dbeta"], dbeta) <= (1e-4 if device.name == "cpu" else 1e-2)


@pytest.mark.br(25)
@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_gate_and_beta(device: Device, g_dtype: torch.dtype, beta_dtype: torch.dtype) -> None:
    inputs = device.inputs(80, seed=1025)
    inputs["g"], inputs["beta"] = inputs["g"].to(g_dtype), inputs["beta"].to(beta_dtype)
    do, dht = upstream(inputs)
    actual, expected = run(inputs, do, dht), reference(inputs, do, dht)
    assert actual["dg"].dtype == g_dtype and actual["dbeta"].dtype == beta_dtype
    rounded = {"dg": g_dtype, "dbeta": beta_dtype}
    for name in expected:
        assert_close(
            {name: actual[name]},
            {name: expected[name]},
            rounded.get(name, device.dtype) if device.name == "cpu" else device.dtype,
        )


@pytest.mark.br(30)
def test_gate_gradient_where_everything_is_forgotten(device: Device) -> None:
    inputs = device.inputs(256, seed=1030)
    inputs["g"] = logsigmoid(torch.randn_like(inputs["g"]))
    inputs["g"][:, torch.randperm(256)[:85]] = -30.0
    do, dht = upstream(inputs)
    actual, expected = run(inputs, do, dht), reference(inputs, do, dht)
    assert actual["dg"].isfinite().all()
    big = expected["dg"].abs() > 1e-6 * expected["dg"].abs().max()
    assert relative_l2(actual["dg"][big], expected["dg"][big]) <= (1e-5 if device.name == "cpu" else 1e-2)
    assert (actual["dg"].double() - expected["dg"])[~big].abs().max() <= 1e-5 * expected["dg"].abs().max()


@pytest.mark.br(30)
def test_chained_gate_parameters(device: Device) -> None:
    inputs = device.inputs(256, seed=1030)
    raw = torch.randn_like(inputs["g"]) * 2 + 3
    a_log = torch.linspace(-1, 2.7, inputs["g"].shape[2], device=device.name)

    def gradient(fn, dtype):
        x = a_log.to(dtype).requires_grad_()
        g = -x.exp() * softplus(raw.to(dtype))
        rest = {n: y for n, y in inputs.items() if n != "g"}
        o, _ = fn(**rest, g=g)
        return torch.autograd.grad(o, [x], torch.ones_like(o))[0]

    from qla.testing import recurrent_gated_delta_rule

    got, want = gradient(qla.chunk_gated_delta_rule, torch.float32), gradient(recurrent_gated_delta_rule, torch.float64)
    assert relative_l2(got, want) <= (1e-4 if device.name == "cpu" else 2e-2)


@pytest.mark.br(65)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 15, 100, 300)])
def test_raw_gate(device: Device, bias: bool, cu: tuple[int, ...] | None) -> None:
    heads = 4
    sequences = len(cu) - 1 if cu else 1
    inputs = device.inputs(300, (2, heads), sequences=sequences, seed=1065)
    inputs["g"] = torch.randn_like(inputs["g"]).to(torch.bfloat16)
    inputs["A_log"] = torch.log(torch.rand(heads) * 16 + 1e-3).to(device.name)
    inputs["dt_bias"] = torch.randn(heads).to(device.name) if bias else None
    do, dht = upstream(inputs, sequences)
    expected = reference(inputs, do, dht, use_gate_in_kernel=True, cu_seqlens=cu)
    actual = run(inputs, do, dht, use_gate_in_kernel=True, cu_seqlens=device.cu(*cu) if cu else None)
    dg, want_dg = actual.pop("dg"), expected.pop("dg")
    assert dg.dtype == torch.bfloat16 and relative_l2(dg, want_dg) <= 1e-2  # rounded to the gate's type
    assert_close(actual, expected, device.dtype, 10 if device.name == "cpu" else 2)

    # equals the expression in float32 outside the operator
    bias_value = inputs["dt_bias"] if bias else 0.0
    g = -inputs["A_log"].exp() * softplus(inputs["g"].float() + bias_value)
    plain = {name: x for name, x in inputs.items() if name not in ("A_log", "dt_bias", "g")}
    o, ht = qla.chunk_gated_delta_rule(**plain, g=g, output_final_state=True, cu_seqlens=device.cu(*cu) if cu else None)
    assert_close({"o": actual["o"], "ht": actual["ht"]}, {"o": o.double(), "ht": ht.double()}, device.dtype)


@pytest.mark.br(65)
def test_raw_gate_under_autocast_and_at_extremes(device: Device) -> None:
    inputs = device.inputs(100, seed=1065)
    inputs["A_log"] = torch.tensor([-2.0, 0.0, 1.0, 2.7], device=device.name)
    inputs["dt_bias"] = torch.zeros(4, device=device.name)
    inputs = {n: (x.to(torch.bfloat16) if n in ("q", "k", "v") else x) for n, x in inputs.items()}
    plain, _ = qla.chunk_gated_delta_rule(**inputs, use_gate_in_kernel=True)
    with torch.autocast(device.name, torch.bfloat16):
        cast, _ = qla.chunk_gated_delta_rule(**inputs, use_gate_in_kernel=True)
    assert torch.equal(plain, cast)
    inputs["g"] = torch.where(torch.rand_like(inputs["g"]) < 0.5, 40.0, -40.0)
    actual = check(device, inputs, factor=1, use_gate_in_kernel=True)
    assert all(x.isfinite().all() for x in actual.values())


def test_hooks_on_saved_tensors_may_change_strides(device: Device) -> None:
    """Offloading gives back dense copies of what was a view: the second backward must not take the first one's strides."""
    inputs = device.inputs(100)
    q, k = inputs["q"], inputs["k"]
    both = torch.cat([q, k], dim=2).requires_grad_()
    do, _ = upstream(inputs)

    def gradient() -> torch.Tensor:
        given = {**inputs, "q": both[:, :, : q.shape[2]], "k": both[:, :, q.shape[2] :]}
        o, _ = qla.chunk_gated_delta_rule(**given)
        return torch.autograd.grad(o, both, do)[0]

    plain = gradient()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x):
        hooked = gradient()
    assert torch.equal(plain, hooked) and torch.equal(plain, gradient())


@pytest.mark.br(48)
def test_directional_derivatives(device: Device) -> None:
    """1,000 tokens, two value heads a key head: along its own direction and along a random one, each gradient says how the loss
    changes. Central differences of the float64 forward on the CPU, so that no adjoint written by hand is asked."""
    inputs = device.inputs(1000, seed=1048)
    do, dht = upstream(inputs)
    grads = run(inputs, do, dht)
    wide = {name: x.detach().double().cpu() for name, x in inputs.items()}
    weights = do.double().cpu(), dht.double().cpu()

    def loss(name: str, step: torch.Tensor) -> float:
        o, ht = qla.chunk_gated_delta_rule(**{**wide, name: wide[name] + step}, output_final_state=True, auto_cp=False)
        return float((o * weights[0]).sum() + (ht * weights[1]).sum())

    make = torch.Generator().manual_seed(1048)
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[device.dtype]
    for name, x in wide.items():
        grad = grads[GRADS[name]].double().cpu()
        for kind, direction in (("its own", grad), ("a random", torch.randn(x.shape, generator=make, dtype=torch.float64))):
            step = direction * (1e-4 * x.norm() / direction.norm())
            change = (loss(name, step) - loss(name, -step)) / 2
            said = float((grad * step).sum())
            assert abs(said - change) <= limit * float(grad.norm() * step.norm()), f"{name}, {kind} direction: {said}, {change}"
