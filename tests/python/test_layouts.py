"""Recipes about layouts, strides, types and arguments' meaning (section C of docs/testing.md)."""

from __future__ import annotations

import random

import pytest
import torch

import qla
from common import Device, assert_close, assert_equal, check, leaves, reference, run, subprocess_python, upstream
from qla.testing import recurrent_gated_delta_rule, relative_l2


@pytest.mark.br(56)
def test_views_of_one_fused_projection(device: Device) -> None:
    k_dim, v_dim = device.square["k_dim"], device.square["v_dim"]
    heads, v_heads, tokens = 2, 4, 100
    inputs = device.inputs(tokens, (heads, v_heads), seed=1056, **device.square)
    gap = 64
    width = 2 * heads * k_dim + gap + v_heads * v_dim
    fused = torch.full((1, tokens, width), float("nan"), dtype=device.dtype, device=device.name)
    at_k, at_v = heads * k_dim, 2 * heads * k_dim + gap
    for name, at, count, size in (("q", 0, heads, k_dim), ("k", at_k, heads, k_dim), ("v", at_v, v_heads, v_dim)):
        fused[..., at : at + count * size] = inputs[name].flatten(2)
    fused.requires_grad_()
    views = {
        "q": fused[..., : heads * k_dim].unflatten(-1, (heads, k_dim)),
        "k": fused[..., at_k : at_k + heads * k_dim].unflatten(-1, (heads, k_dim)),
        "v": fused[..., at_v:].unflatten(-1, (v_heads, v_dim)),
    }
    do, dht = upstream(inputs)
    plain = run(inputs, do, dht)
    o, ht = qla.chunk_gated_delta_rule(**{**inputs, **views}, output_final_state=True)
    (grad,) = torch.autograd.grad([o, ht], [fused], [do, dht])
    assert torch.equal(o, plain["o"]) and torch.equal(ht, plain["ht"])
    assert torch.equal(grad[..., :at_k], plain["dq"].flatten(2))
    assert torch.equal(grad[..., at_k : 2 * at_k], plain["dk"].flatten(2))
    assert not grad[..., 2 * at_k : at_v].any()
    assert torch.equal(grad[..., at_v:], plain["dv"].flatten(2))


def token_strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, float("nan"))], 2).flatten(1, 2)[:, ::2]


def head_transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.br(56)
@pytest.mark.parametrize("view", [token_strided, head_transposed, column_major])
def test_strided_views(device: Device, view) -> None:
    inputs = device.inputs(100, seed=1056, **device.square)
    do, dht = upstream(inputs)
    strided = {name: view(x) if name != "initial_state" else x for name, x in inputs.items()}
    assert not strided["q"].is_contiguous()
    assert_equal(_run_keeping_strides(strided, do, dht), run(inputs, do, dht))


def _run_keeping_strides(inputs: dict, do: torch.Tensor, dht: torch.Tensor) -> dict:
    xs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, ht = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
    grads = torch.autograd.grad([o, ht], list(xs.values()), [do, dht])
    names = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dh0"}
    return {"o": o.detach(), "ht": ht.detach(), **{names[n]: x for n, x in zip(xs, grads)}}


@pytest.mark.br(56)
def test_misaligned_base(device: Device) -> None:
    inputs = device.inputs(70, seed=1056, **device.square)
    shifted = dict(inputs)
    for name in ("q", "k", "v", "initial_state"):
        x = inputs[name]
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        shifted[name] = room[1:].view(x.shape).copy_(x)
    do, dht = upstream(inputs)
    assert_equal(_run_keeping_strides(shifted, do, dht), run(inputs, do, dht))


@pytest.mark.br(56)
def test_expanded_beta(device: Device) -> None:
    inputs = device.inputs(100, seed=1056)
    narrow = torch.rand(1, 100, 1, device=device.name)
    do, dht = upstream(inputs)
    x = narrow.clone().requires_grad_()
    o, ht = qla.chunk_gated_delta_rule(**{**inputs, "beta": x.expand(1, 100, 4)}, output_final_state=True)
    (grad,) = torch.autograd.grad([o, ht], [x], [do, dht])
    plain = run({**inputs, "beta": narrow.expand(1, 100, 4).contiguous()}, do, dht)
    assert torch.equal(o, plain["o"])
    assert relative_l2(grad, plain["dbeta"].sum(-1, keepdim=True)) <= 1e-6


@pytest.mark.br(57)
@pytest.mark.parametrize("kind", ["pool", "stepped", "transposed"])
def test_strided_initial_state(device: Device, kind: str) -> None:
    inputs = device.inputs(70, batch=3, seed=1057, **device.square)
    state = inputs["initial_state"]
    holder = None
    if kind == "pool":
        holder = torch.full((3, 2, *state.shape[1:]), float("nan"), device=device.name)
        holder[:, 1] = state
        view = holder[:, 1]
    elif kind == "stepped":
        holder = torch.full((9, *state.shape[1:]), float("nan"), device=device.name)
        holder[::3] = state
        view = holder[::3]
    else:
        view = column_major(state)
    before = None if holder is None else holder.clone()
    do, dht = upstream(inputs)
    assert_equal(_run_keeping_strides({**inputs, "initial_state": view}, do, dht), run(inputs, do, dht))
    if holder is not None:
        assert torch.equal(holder.isnan(), before.isnan()) and torch.equal(holder.nan_to_num(), before.nan_to_num())


@pytest.mark.br(58)
def test_state_layouts(device: Device) -> None:
    inputs = device.inputs(130, seed=1058)
    do, dht = upstream(inputs)
    kv = run(inputs, do, dht)
    vk_inputs = {**inputs, "initial_state": inputs["initial_state"].transpose(-1, -2).contiguous()}
    vk = run(vk_inputs, do, dht, state_v_first=True)
    assert torch.equal(vk["ht"].transpose(-1, -2), kv["ht"]) and torch.equal(vk["dh0"].transpose(-1, -2), kv["dh0"])
    assert_equal(
        {n: vk[n] for n in ("o", "dq", "dk", "dv", "dg", "dbeta")}, {n: kv[n] for n in ("o", "dq", "dk", "dv", "dg", "dbeta")}
    )
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        old, _ = qla.chunk_gated_delta_rule(**vk_inputs, transpose_state_layout=True)
    # against a call without gradients, too: those may run the fused form, which rounds elsewhere
    new, _ = qla.chunk_gated_delta_rule(**vk_inputs, state_v_first=True)
    assert torch.equal(old, new)
    # chained, each in its layout
    o1, s1 = qla.chunk_gated_delta_rule(**{**inputs, "initial_state": kv["ht"]}, output_final_state=True)
    o2, s2 = qla.chunk_gated_delta_rule(**{**inputs, "initial_state": vk["ht"]}, output_final_state=True, state_v_first=True)
    assert torch.equal(o1, o2) and torch.equal(s1, s2.transpose(-1, -2))


@pytest.mark.br(58)
def test_wrong_state_layout_is_refused() -> None:
    device = Device("cpu")
    inputs = device.inputs(10)
    with pytest.raises(ValueError, match=r"initial_state: .*state_v_first"):
        qla.chunk_gated_delta_rule(**inputs, state_v_first=True)


@pytest.mark.br(59)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_types_of_the_state(device: Device, dtype: torch.dtype) -> None:
    inputs = device.inputs(70, seed=1059)
    rounded = inputs["initial_state"].to(dtype)
    do, dht = upstream(inputs)
    plain = run({**inputs, "initial_state": rounded.float()}, do, dht)
    actual = run({**inputs, "initial_state": rounded}, do, dht)
    dh0, plain_dh0 = actual.pop("dh0"), plain.pop("dh0")
    assert dh0.dtype == dtype and torch.equal(dh0, plain_dh0.to(dtype))
    if dtype is torch.float64:  # not rounded to float32 on the way in, where the device keeps it
        assert_close(actual, {n: x.double() for n, x in plain.items()}, device.dtype)
    else:
        assert_equal(actual, plain)


@pytest.mark.br(61)
def test_float32_inputs(device: Device) -> None:
    inputs = device.inputs(100, dtype=torch.float32, seed=1061)
    if device.name == "cpu":
        check(device, inputs)
    else:
        with pytest.raises(TypeError, match=r"q: expected dtype bfloat16 or float16"):
            qla.chunk_gated_delta_rule(**inputs)


@pytest.mark.br(61)
def test_float32_inputs_under_autocast(device: Device) -> None:
    inputs = device.inputs(100, dtype=torch.float32, seed=1061)
    do, dht = upstream(inputs)
    with torch.autocast(device.name, torch.bfloat16):
        xs = leaves(inputs)
        o, ht = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and ht.dtype == torch.float32
    grads = torch.autograd.grad([o, ht], list(xs.values()), [do.to(o.dtype), dht])
    assert all(x.dtype == torch.float32 for x in grads)
    low = {n: x.to(torch.bfloat16) if n in ("q", "k", "v") else x for n, x in inputs.items()}
    expected = run(low, do.to(torch.bfloat16), dht)
    assert torch.equal(o, expected["o"]) and torch.equal(grads[0], expected["dq"].float())


@pytest.mark.br(62)
def test_scale(device: Device) -> None:
    inputs = device.inputs(70, seed=1062)
    do, dht = upstream(inputs)
    zero = run(inputs, do, dht, scale=0.0)
    assert not zero["o"].any() and not zero["dq"].any()
    expected = reference(inputs, do, dht, scale=0.0)
    assert_close({n: zero[n] for n in ("ht", "dv", "dk")}, {n: expected[n] for n in ("ht", "dv", "dk")}, device.dtype)
    default = run(inputs, do, dht)
    assert_equal(run(inputs, do, dht, scale=inputs["q"].shape[-1] ** -0.5), default)
    check(device, inputs, scale=-0.7)


@pytest.mark.br(64)
def test_gate_is_in_log_space(device: Device) -> None:
    inputs = device.inputs(100, seed=1064)
    alpha = torch.rand_like(inputs["g"]) * 0.5 + 0.5
    check(device, {**inputs, "g": alpha.log()})
    check(device, {**inputs, "g": torch.full_like(alpha, 1e-3)})  # slightly positive: no clamp


@pytest.mark.br(64)
def test_linear_gate_is_found_by_validation() -> None:
    code = """
import torch, qla
from common import Device
inputs = Device('cpu').inputs(70)
inputs['g'] = inputs['g'].exp()
try:
    qla.chunk_gated_delta_rule(**inputs)
except ValueError as error:
    assert str(error).startswith('g: '), error
    print('refused')
"""
    assert "refused" in subprocess_python(code, env={"QLA_VALIDATE": "1"})


@pytest.mark.br(49)
def test_head_sizes(device: Device) -> None:
    code = """
import torch, qla
from common import Device, check
assert not __debug__
device = Device({name!r})
served = 0
for k_dim in (16, 32, 48, 64, 80, 96, 128, 160, 192, 256):
    for v_dim in (32, 64, 96, 128, 256):
        for v_first in (False, True):
            inputs = device.inputs(10, (1, 1), k_dim=k_dim, v_dim=v_dim)
            if v_first:
                inputs['initial_state'] = inputs['initial_state'].transpose(-1, -2).contiguous()
            forward, reason = qla.can_implement(**inputs, state_v_first=v_first)
            both, reason_backward = qla.can_implement(**inputs, state_v_first=v_first, needs_grad=True)
            if both:
                check(device, inputs, state_v_first=v_first)
                served += 1
                continue
            for grad, ok, why in ((False, forward, reason), (True, both, reason_backward)):
                if not ok:
                    try:
                        qla.chunk_gated_delta_rule(**{{n: x.requires_grad_(grad) for n, x in inputs.items()}}, state_v_first=v_first)
                        raise SystemExit(f'{{k_dim}} x {{v_dim}}: ran although can_implement said {{why}}')
                    except ValueError as error:
                        assert '128' in str(error) or '256' in str(error), error
print('served', served)
"""
    output = subprocess_python(code.format(name=device.name), 200, {"PYTHONOPTIMIZE": "1"})
    assert int(output.split()[1]) == (100 if device.name == "cpu" else 2)


@pytest.mark.br(49)
@pytest.mark.parametrize("sizes", [(257, 32), (32, 512)], ids=str)
def test_head_sizes_beyond_the_limit(device: Device, sizes: tuple[int, int]) -> None:
    inputs = device.inputs(10, (1, 1), k_dim=sizes[0], v_dim=sizes[1])
    with pytest.raises(ValueError):
        qla.chunk_gated_delta_rule(**inputs)
    check(device, device.inputs(10))  # the next call works


@pytest.mark.br(67)
def test_signatures_in_any_order(device: Device) -> None:
    """No call may be answered with what another shape, type or option left behind."""
    choose = random.Random(1067)
    for i in range(60):
        dtype = choose.choice(device.dtypes)
        heads = choose.choice([(1, 1), (1, 2), (2, 4)])
        packed = choose.choice([False, True])
        sizes = {"k_dim": choose.choice([8, 16]), "v_dim": choose.choice([8, 16])} if device.name == "cpu" else {}
        inputs = device.inputs(choose.choice([40, 70]), heads, sequences=2 if packed else 1, dtype=dtype, seed=i, **sizes)
        tokens = inputs["q"].shape[1]
        inputs["g"] = inputs["g"].to(choose.choice([torch.float32, torch.bfloat16]))
        inputs["beta"] = inputs["beta"].to(choose.choice([torch.float32, torch.float16]))
        options: dict = {"state_v_first": choose.choice([False, True])}
        if not choose.choice([False, True]):
            inputs.pop("initial_state")
        elif options["state_v_first"]:
            inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
        cu = (0, 17, tokens) if packed else None
        boundaries = device.cu(*cu, dtype=choose.choice([torch.int32, torch.int64])) if cu else None
        o, ht = qla.chunk_gated_delta_rule(**inputs, **options, cu_seqlens=boundaries, output_final_state=True)
        want_o, want_ht = recurrent_gated_delta_rule(**inputs, **options, cu_seqlens=cu, output_final_state=True)
        assert_close({"o": o, "ht": ht}, {"o": want_o, "ht": want_ht}, dtype)
