"""`flash_qla`: the original's surface. What FLA's verifier lets through must work (there is no fallback once it has)."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

import flash_qla
import flash_qla.utils as utils
import qla
from common import Device, assert_close, reference, run, upstream
from qla.testing import recurrent_gated_delta_rule, relative_l2

CHUNK = 64


def test_surface() -> None:
    assert importlib.util.find_spec("flash_qla") is not None
    names = {
        "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens head_first "
        "state_v_first auto_cp enable_fwd_cp_cache cp_context force_intra_cp",
        "chunk_gated_delta_rule_fwd": "q k v g beta scale initial_state cu_seqlens output_final_state output_h auto_cp state_v_first "
        "enable_fwd_cp_cache cp_context is_train",
        "chunk_gated_delta_rule_bwd": "q k v g beta A do dht scale initial_state cu_seqlens state_v_first auto_cp cp_cache cp_context",
    }
    for name, parameters in names.items():
        assert list(inspect.signature(getattr(flash_qla, name)).parameters) == parameters.split()
    from flash_qla.ops import chunk_gated_delta_rule as from_ops
    from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    assert from_ops is flash_qla.chunk_gated_delta_rule
    assert chunk_gated_delta_rule_fwd is flash_qla.chunk_gated_delta_rule_fwd
    assert chunk_gated_delta_rule_bwd is flash_qla.chunk_gated_delta_rule_bwd
    assert flash_qla.__version__.startswith("0.1.")
    for name in ("pad_and_reshape", "fill_last_chunk_of_g", "input_guard", "tensor_cache", "l2norm", "l2norm_fwd", "l2norm_bwd", "pack",
                 "unpack", "prepare_chunk_indices", "prepare_chunk_offsets"):  # fmt: skip
        assert callable(getattr(utils, name))


def as_fla_calls(x: dict, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA's backend: every argument by keyword, scale may be None."""
    given = {
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        "use_qk_l2norm_in_kernel": False,
        "state_v_first": False,
    }
    return flash_qla.chunk_gated_delta_rule(**{**given, "cu_seqlens": None, **x, **options}, auto_cp=True)


@pytest.mark.br(25)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_the_verifier_lets_through(device: Device, dtype: torch.dtype, side: torch.dtype) -> None:
    sizes = {"k_dim": 128, "v_dim": 128}
    inputs = device.inputs(100, (1, 2), sequences=4, dtype=dtype, **sizes)
    for name in ("g", "beta", "initial_state"):
        inputs[name] = inputs[name].to(side)
    for name in ("q", "k", "v"):  # not contiguous, as a model's transposes leave them
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    cu = (0, 0, 37, 37, 90)  # empty sequences, padding after the last boundary
    for index in (torch.int32, torch.int64):
        options = {"cu_seqlens": device.cu(*cu, dtype=index), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        o, ht = as_fla_calls(inputs, **options)
        want = recurrent_gated_delta_rule(**inputs, cu_seqlens=cu, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert o.dtype == dtype and not o[:, 90:].any()
        assert_close({"o": o, "ht": ht}, {"o": want[0], "ht": want[1]}, dtype)


def test_gradients_as_fla_takes_them(device: Device) -> None:
    inputs = device.inputs(100, (1, 2), dtype=torch.bfloat16)
    do, dht = upstream(inputs)
    assert_close(run(inputs, do, dht, fn=flash_qla.chunk_gated_delta_rule), reference(inputs, do, dht), torch.bfloat16)


@pytest.mark.br(35)
def test_no_tokens(device: Device) -> None:
    inputs = device.inputs(0, (1, 2), batch=2)
    o, ht = as_fla_calls(inputs, output_final_state=True)
    assert o.shape == inputs["v"].shape and torch.equal(ht, inputs["initial_state"])


def test_options(device: Device) -> None:
    inputs = device.inputs(700, (1, 2))
    expected, _ = flash_qla.chunk_gated_delta_rule(**inputs, auto_cp=False)
    for options in ({"force_intra_cp": True}, {"enable_fwd_cp_cache": False}, {"auto_cp": True}):
        o, ht = flash_qla.chunk_gated_delta_rule(**inputs, **options)
        assert ht is None
        assert_close({"o": o}, {"o": expected.double()}, device.dtype)
    with pytest.raises(ValueError, match="head_first"):
        flash_qla.chunk_gated_delta_rule(**inputs, head_first=True)
    with pytest.raises(NotImplementedError, match="cp_context"):
        flash_qla.chunk_gated_delta_rule(**inputs, cp_context=object())


# ---- the low-level functions -----------------------------------------------------------------------------------------


def chunks_of(cu: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(sequence, first token, end) of every chunk."""
    return [(n, c, min(c + CHUNK, b)) for n, (a, b) in enumerate(zip(cu, cu[1:])) for c in range(a, b, CHUNK)]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 1, 1, 130, 200)])
def test_forward_parts(device: Device, v_first: bool, cu: tuple[int, ...] | None) -> None:
    tokens = 220 if cu else 200  # 20 tokens of padding
    bounds = cu or (0, 200)
    inputs = device.inputs(tokens, sequences=len(bounds) - 1)
    state = inputs["initial_state"]
    given = {**inputs, "initial_state": state.mT.contiguous() if v_first else state}
    boundaries = device.cu(*cu) if cu else None
    g, a, o, h, ht, cache = flash_qla.chunk_gated_delta_rule_fwd(
        **given, cu_seqlens=boundaries, output_h=True, state_v_first=v_first, auto_cp=False
    )
    assert cache is None and g.dtype == torch.float32 and a.dtype == inputs["k"].dtype and h.dtype == inputs["k"].dtype
    want_o, want_ht = recurrent_gated_delta_rule(**given, cu_seqlens=cu, output_final_state=True, state_v_first=v_first)
    assert_close({"o": o, "ht": ht}, {"o": want_o, "ht": want_ht}, device.dtype)
    assert not g[:, bounds[-1] :].any()

    table = chunks_of(bounds)
    assert a.shape == (1, tokens, 4, CHUNK) and h.shape[:3] == (1, len(table), 4)
    limit = 1e-5 if device.name == "cpu" else 5e-3
    for i, (n, begin, end) in enumerate(table):
        rows = end - begin
        assert relative_l2(g[0, begin:end], inputs["g"][0, begin:end].double().cumsum(0)) <= 1e-6
        for head in range(4):
            k = inputs["k"][0, begin:end, head // 2].double()
            beta = inputs["beta"][0, begin:end, head].double()
            inverse = torch.linalg.inv(
                torch.eye(rows, device=k.device, dtype=k.dtype) + beta[:, None] * (k @ k.T).tril(-1)
            )  # (F2)
            assert relative_l2(a[0, begin:end, head, :rows], inverse) <= limit, (n, begin, head)
            assert not a[0, begin:end, head, rows:].any()
        piece = {name: inputs[name][:, bounds[n] : begin] for name in ("q", "k", "v", "g", "beta")}
        _, start = recurrent_gated_delta_rule(**piece, initial_state=state[n : n + 1], output_final_state=True)
        assert relative_l2(h[0, i].mT if v_first else h[0, i], start[0]) <= limit, (n, begin)


@pytest.mark.parametrize("kind", ["qwen", "soft", "zero"])
def test_parts_of_a_forward_that_is_cut(device: Device, kind: str) -> None:
    """What is asked for besides changes no bit of the rest: not the plan of a long sequence either, head by head by its own gates."""
    inputs = device.inputs(16384 if device.name == "cuda" else 1000, (4, 4) if device.name == "cuda" else (1, 2), kind=kind)
    o, ht = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    g, a_inv, o_parts, h, ht_parts, _ = flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_h=True)
    assert torch.equal(o_parts, o) and torch.equal(ht_parts, ht)
    uncut = flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_h=True, auto_cp=False)
    assert torch.equal(g, uncut[0]) and torch.equal(a_inv, uncut[1])
    expected = {"o": uncut[2].double(), "ht": uncut[4].double(), "h": uncut[3].double()}
    assert_close({"o": o, "ht": ht, "h": h}, expected, device.dtype, 2**0.5)  # both have errors of their own


def test_forward_defaults(device: Device) -> None:
    inputs = device.inputs(100, batch=2)
    g, a, o, h, ht, cache = flash_qla.chunk_gated_delta_rule_fwd(**inputs)
    assert h is None and ht is not None and cache is None and o.shape == inputs["v"].shape
    assert flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_final_state=False)[4] is None
    assert flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_h=True)[3].shape[:3] == (2, 2, 4)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 1, 1, 130, 200)])
def test_backward_from_the_forwards_parts(device: Device, v_first: bool, cu: tuple[int, ...] | None) -> None:
    tokens = 220 if cu else 200
    sequences = len(cu) - 1 if cu else 1
    inputs = device.inputs(tokens, sequences=sequences)
    do, dht = upstream(inputs, sequences)
    boundaries = device.cu(*cu) if cu else None
    options = {"cu_seqlens": boundaries, "state_v_first": v_first}
    state = inputs.pop("initial_state")
    given = state.mT.contiguous() if v_first else state
    g, a, *_ = flash_qla.chunk_gated_delta_rule_fwd(**inputs, initial_state=given, **options)
    plain = {n: inputs[n] for n in ("q", "k", "v")}
    dq, dk, dv, db, dg, dh0 = flash_qla.chunk_gated_delta_rule_bwd(
        **plain, g=g, beta=inputs["beta"], A=a, do=do, dht=dht.mT.contiguous() if v_first else dht, initial_state=given, **options
    )
    expected = reference({**inputs, "initial_state": state}, do, dht, cu_seqlens=cu)
    actual = {"dq": dq, "dk": dk, "dv": dv, "dbeta": db, "dg": dg, "dh0": dh0.mT if v_first else dh0}
    assert dg.dtype == torch.float32 and dh0.dtype == torch.float32
    assert_close(actual, {n: expected[n] for n in actual}, device.dtype)


WRONG_PARTS = {
    "do": (lambda x: [1.0], TypeError, "do: expected a torch.Tensor, got list"),
    "do missing": (lambda x: None, TypeError, "do: expected a torch.Tensor, got NoneType"),
    "do short": (lambda x: x["do"][:, 1:], ValueError, r"do: expected shape \[B, T, HV, V\]"),
    "do elsewhere": (lambda x: x["do"].to("meta"), ValueError, "do: expected on q's device"),
    "dht": (lambda x: torch.ones(3), ValueError, "dht: expected shape"),
    "dht whole": (lambda x: torch.ones(1, 4, 24, 40, dtype=torch.int32), TypeError, "dht: expected dtype"),
    "g": (lambda x: None, TypeError, "g: expected a torch.Tensor"),
    "g flat": (lambda x: x["g"][0, 0], ValueError, r"g: expected 3 dimensions \[B, T, HV\]"),
    "cu_seqlens": (lambda x: [0, 70], TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
    "cu_seqlens real": (lambda x: torch.tensor([0.0, 70.0]), TypeError, "cu_seqlens: expected dtype"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_wrong_arguments_of_backward(case: str) -> None:
    make, error, words = WRONG_PARTS[case]
    inputs = Device("cpu").inputs(70)
    inputs.pop("initial_state")
    g, a, o, *_ = flash_qla.chunk_gated_delta_rule_fwd(**inputs)
    given = {**inputs, "g": g, "A": a, "do": torch.ones_like(o)}
    with pytest.raises(error, match=words):
        flash_qla.chunk_gated_delta_rule_bwd(**{**given, case.split()[0]: make(given)})
    flash_qla.chunk_gated_delta_rule_bwd(**given)


@pytest.mark.parametrize("q", [[1.0], torch.ones(3), torch.tensor(1.0)])
def test_forced_cuts_of_no_tensor(q: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^q: expected"):
        flash_qla.chunk_gated_delta_rule(**{**Device("cpu").inputs(70), "q": q}, force_intra_cp=True)


@pytest.mark.parametrize("name", ["force_intra_cp", "head_first"])
def test_switches_are_no_strings(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: expected True or False, got str 'x'"):
        flash_qla.chunk_gated_delta_rule(**Device("cpu").inputs(70), **{name: "x"})


@pytest.mark.br(5)
def test_backward_without_a_state(device: Device) -> None:
    inputs = device.inputs(130)
    inputs.pop("initial_state")
    do, _ = upstream(inputs)
    g, a, *_ = flash_qla.chunk_gated_delta_rule_fwd(**inputs)
    args = [
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g,
        inputs["beta"],
        a,
        do,
        None,
        None,
        None,
        None,
        False,
        True,
    ]  # the original's test's order
    dq, dk, dv, db, dg, dh0 = flash_qla.chunk_gated_delta_rule_bwd(*args)
    assert dh0 is None
    expected = reference(inputs, do, None)
    assert_close(
        {"dq": dq, "dk": dk, "dv": dv, "dbeta": db, "dg": dg},
        {n: expected[n] for n in ("dq", "dk", "dv", "dbeta", "dg")},
        device.dtype,
    )


# ---- utils -----------------------------------------------------------------------------------------------------------


@pytest.mark.br(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_l2norm(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 5, 3, 16) * 3).to(dtype).requires_grad_()
    dy = torch.randn(2, 5, 3, 16).to(dtype)
    y, rstd = utils.l2norm_fwd(x.detach())
    wide = x.detach().double().requires_grad_()
    want = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    (want_dx,) = torch.autograd.grad(want, wide, dy.double())
    (dx,) = torch.autograd.grad(utils.l2norm(x), x, dy)
    assert y.dtype == dtype and dx.dtype == dtype and rstd.shape == x.shape[:-1]
    limit = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float64: 1e-14}[dtype]
    assert relative_l2(y, want) <= limit and relative_l2(dx, want_dx) <= 2 * limit
    assert relative_l2(utils.l2norm_bwd(y, rstd, dy), want_dx) <= 2 * limit
    assert not utils.l2norm_fwd(torch.zeros(3, 4))[0].any()
    with pytest.raises(ValueError, match="dim"):
        utils.l2norm_fwd(x.detach(), dim=1)


def test_pack_and_unpack() -> None:
    cu = torch.tensor([0, 3, 3, 8])
    x = torch.arange(16.0).view(1, 8, 2)
    padded = utils.unpack(x, cu)
    assert padded.shape == (3, 5, 2) and not padded[1].any() and not padded[0, 3:].any()
    assert torch.equal(utils.pack(padded, cu), x)


def test_wrong_boundaries_of_pack_and_unpack() -> None:
    x = torch.ones(1, 3, 4)
    with pytest.raises(TypeError, match="cu_seqlens: expected a torch.Tensor, got list"):
        utils.unpack(x, [0, 3])
    with pytest.raises(ValueError, match="cu_seqlens: expected boundaries up to x's 3 tokens, got 5"):
        utils.unpack(x, torch.tensor([0, 2, 5]))  # one token is left, which would be repeated
    with pytest.raises(ValueError, match=r"x: expected \[2, 5 or more"):
        utils.pack(torch.ones(2, 1, 4), torch.tensor([0, 5, 6]))


def test_chunk_tables() -> None:
    cu = torch.tensor([0, 3, 3, 70, 134], dtype=torch.int32)
    indices = utils.prepare_chunk_indices(cu, CHUNK)
    assert indices.tolist() == [[0, 0], [2, 0], [2, 1], [3, 0]] and indices.dtype == torch.int32
    offsets, total = utils.prepare_chunk_offsets(cu, CHUNK)
    assert offsets.tolist() == [0, 1, 1, 3, 4] and total == 4


def test_padding_into_chunks() -> None:
    x = torch.arange(14.0).view(1, 7, 2)
    y = utils.pad_and_reshape(x, 1, 4)
    assert y.shape == (1, 2, 4, 2) and torch.equal(y.flatten(1, 2)[:, :7], x) and not y[:, 1, 3].any()
    filled = utils.fill_last_chunk_of_g(y[..., 0].clone(), 7, None, 4)
    assert filled[0, 1].tolist() == [8.0, 10.0, 12.0, 12.0]
    back = utils.fill_last_chunk_of_g(torch.ones(1, 2, 4), 7, None, 4, reverse=True)
    assert back[0, 1].tolist() == [1.0, 1.0, 2.0, 1.0]
    packed = utils.fill_last_chunk_of_g(torch.arange(8.0).view(2, 1, 4), 0, torch.tensor([0, 2, 6]), 4)
    assert packed.tolist() == [[[0.0, 1.0, 1.0, 1.0]], [[4.0, 5.0, 6.0, 7.0]]]


def test_tensor_cache() -> None:
    calls = []

    @utils.tensor_cache
    def double(x, factor=2):
        calls.append(1)
        return x * factor

    xs = [torch.ones(2) * i for i in range(5)]
    first = double(xs[0])
    assert double(xs[0]) is first and len(calls) == 1
    assert double(torch.zeros(2)) is not first and double(xs[0], factor=3) is not first
    for x in xs[1:]:
        double(x)
    double(xs[0])
    assert len(calls) == 8  # the first was evicted


def test_input_guard() -> None:
    @utils.input_guard
    def f(x, y=None):
        return x.is_contiguous(), y.is_contiguous()

    x = torch.randn(3, 4).T
    assert f(x, y=x) == (True, True)


def test_both_modules_answer() -> None:
    from qla import chunk_gated_delta_rule

    assert chunk_gated_delta_rule is qla.api.chunk_gated_delta_rule
