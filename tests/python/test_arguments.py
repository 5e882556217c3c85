"""Wrong arguments: the message names argument, expected, got and remedy, nothing is computed, the next call works. And the arguments
of serving callers: out, pools of states, checkpoints."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import qla
from common import Device, assert_close, check
from qla.testing import recurrent_gated_delta_rule, relative_l2

CPU = Device("cpu")

# argument, what to pass for it (from the good inputs), exception, words of the message
WRONG = {
    "q not a tensor": ("q", lambda x: x["q"].tolist(), TypeError, r"q: expected a torch.Tensor, got list"),
    "k not a tensor": ("k", lambda x: None, TypeError, r"k: expected a torch.Tensor, got NoneType"),
    "beta missing": ("beta", lambda x: None, TypeError, r"beta: expected a torch.Tensor, got NoneType; it is required"),
    "g not a tensor": ("g", lambda x: -0.1, TypeError, r"g: expected a torch.Tensor, got float"),
    "q 3-D": ("q", lambda x: x["q"][0], ValueError, r"q: expected 4 dimensions \[B, T, H, K\], got 3"),
    "v 5-D": ("v", lambda x: x["v"][None], ValueError, r"v: expected 4 dimensions"),
    "k other heads": ("k", lambda x: x["k"][:, :, :1], ValueError, r"k: q and k must have the same number of heads.*only v may"),
    "k other tokens": ("k", lambda x: x["k"][:, 1:], ValueError, r"k: expected shape .* got \[1, 69, 2, 24\]"),
    "k other size": ("k", lambda x: x["k"][..., :8], ValueError, r"k: expected shape"),
    "v other tokens": ("v", lambda x: x["v"][:, 1:], ValueError, r"v: expected shape"),
    "v no heads": ("v", lambda x: x["v"][:, :, :0], ValueError, r"v: .*evenly divisible"),
    "k other dtype": ("k", lambda x: x["k"].double(), TypeError, r"k: expected dtype float32 as q, got float64"),
    "v other dtype": ("v", lambda x: x["v"].bfloat16(), TypeError, r"v: expected dtype float32 as q, got bfloat16"),
    "q integer": ("q", lambda x: x["q"].long(), TypeError, r"q: expected dtype .*, got int64"),
    "g shape": ("g", lambda x: x["g"][..., :2], ValueError, r"g: expected shape \[B, T, HV\] = \[1, 70, 4\], got \[1, 70, 2\]"),
    "g integer": ("g", lambda x: x["g"].int(), TypeError, r"g: expected dtype"),
    "beta shape": ("beta", lambda x: x["beta"][..., None], ValueError, r"beta: expected shape"),
    "beta boolean": ("beta", lambda x: x["beta"] > 0, TypeError, r"beta: expected dtype"),
    "state count": (
        "initial_state",
        lambda x: x["initial_state"].repeat(2, 1, 1, 1),
        ValueError,
        r"i.e., 1 rather than 2; pass one for each sequence",
    ),
    "state layout": ("initial_state", lambda x: x["initial_state"].mT, ValueError, r"initial_state: .*pass state_v_first=True"),
    "state 3-D": ("initial_state", lambda x: x["initial_state"][0], ValueError, r"initial_state: expected shape"),
    "state integer": ("initial_state", lambda x: x["initial_state"].int(), TypeError, r"initial_state: expected dtype"),
    "cu_seqlens float": (
        "cu_seqlens",
        lambda x: torch.tensor([0.0, 70.0]),
        TypeError,
        r"cu_seqlens: expected dtype int32 or int64",
    ),
    "cu_seqlens 2-D": ("cu_seqlens", lambda x: torch.tensor([[0, 70]]), ValueError, r"cu_seqlens: expected shape \[N \+ 1\]"),
    "cu_seqlens empty": ("cu_seqlens", lambda x: torch.tensor([], dtype=torch.int32), ValueError, r"cu_seqlens: expected"),
    "cu_seqlens list": ("cu_seqlens", lambda x: [0, 70], TypeError, r"cu_seqlens: expected a torch.Tensor, got list"),
    "cu_seqlens descending": ("cu_seqlens", lambda x: torch.tensor([0, 70, 30]), ValueError, r"cu_seqlens"),
    "cu_seqlens negative": ("cu_seqlens", lambda x: torch.tensor([0, -3]), ValueError, r"cu_seqlens"),
    "cu_seqlens past the end": ("cu_seqlens", lambda x: torch.tensor([0, 71]), ValueError, r"cu_seqlens"),
    "cu_seqlens not from 0": ("cu_seqlens", lambda x: torch.tensor([1, 70]), ValueError, r"cu_seqlens"),
    "array for a word": ("auto_cp", lambda x: torch.zeros(3).numpy(), ValueError, r"auto_cp: expected .*got array"),
    "deterministic array": (
        "deterministic",
        lambda x: torch.zeros(3).numpy(),
        ValueError,
        r"deterministic: expected .*got array",
    ),
    "checkpoints tensor": (
        "checkpoint_every_n_tokens",
        lambda x: torch.zeros(3),
        TypeError,
        r"checkpoint_every_n_tokens: expected a multiple of 64, got a Tensor; 0 stores none",
    ),
    "flag list": (
        "output_final_state",
        lambda x: [True],
        TypeError,
        r"output_final_state: expected True or False, got a list; .*bool",
    ),
    "flag tensor": (
        "use_qk_l2norm_in_kernel",
        lambda x: torch.tensor(True),
        TypeError,
        r"use_qk_l2norm_in_kernel: expected True or False, got a Tensor",
    ),
    "flag string": (
        "allow_neg_eigval",
        lambda x: "False",
        TypeError,
        r"allow_neg_eigval: expected True or False, got str 'False'",
    ),
    "flag of the gate": (
        "use_gate_in_kernel",
        lambda x: x["g"],
        TypeError,
        r"use_gate_in_kernel: expected True or False, got a Tensor",
    ),
    "flag of the state": ("state_v_first", lambda x: {}, TypeError, r"state_v_first: expected True or False, got a dict"),
    "auto_cp": ("auto_cp", lambda x: "fast", ValueError, r"auto_cp: expected"),
    "deterministic": ("deterministic", lambda x: "always", ValueError, r'deterministic: expected.*"batch" also makes'),
    "cp_context": ("cp_context", lambda x: object(), NotImplementedError, r"cp_context: expected None"),
    "head_first": ("head_first", lambda x: True, ValueError, r"head_first: head_first has been removed"),
    "allow_neg_eigval": ("allow_neg_eigval", lambda x: True, ValueError, r"requires `use_beta_sigmoid_in_kernel=True`"),
    "no A_log": ("use_gate_in_kernel", lambda x: True, ValueError, r"A_log must be provided when use_gate_in_kernel=True"),
    "state_indices alone": ("state_indices", lambda x: torch.tensor([0, 1]), ValueError, r"state_indices: expected shape \[N\]"),
    "has_initial_state int": (
        "has_initial_state",
        lambda x: torch.tensor([1]),
        TypeError,
        r"has_initial_state: expected dtype bool",
    ),
    "out shape": ("out", lambda x: torch.empty(1, 70, 4, 1), ValueError, r"out: expected shape"),
    "out dtype": ("out", lambda x: torch.empty(1, 70, 4, 40).double(), TypeError, r"out: expected dtype float32"),
    "interval": (
        "checkpoint_every_n_tokens",
        lambda x: 32,
        ValueError,
        r"checkpoint_every_n_tokens: expected a positive multiple of 64 .*got 32; round it up, to 64",
    ),
    "no checkpoints": ("checkpoint_every_n_tokens", lambda x: 64, ValueError, r"state_checkpoints: expected a tensor"),
    "interval float": (
        "checkpoint_every_n_tokens",
        lambda x: 64.0,
        TypeError,
        r"checkpoint_every_n_tokens: expected a multiple of 64, got float",
    ),
    "out not a tensor": ("out", lambda x: 3, TypeError, r"out: expected a torch.Tensor, got int"),
    "out sparse": ("out", lambda x: torch.empty(1, 70, 4, 40).to_sparse(), TypeError, r"out: .*got layout sparse_coo"),
    "out expanded": ("out", lambda x: torch.empty(1, 1, 4, 40).expand(1, 70, 4, 40), ValueError, r"out: .*elements lie apart"),
    "q sparse": ("q", lambda x: x["q"].to_sparse(), TypeError, r"q: expected a dense tensor .*layout sparse_coo; .*to_dense"),
    "g sparse": ("g", lambda x: x["g"].to_sparse(), TypeError, r"g: expected a dense tensor"),
    "state sparse": ("initial_state", lambda x: x["initial_state"].to_sparse(), TypeError, r"initial_state: expected a dense"),
    "k nested": ("k", lambda x: torch.nested.nested_tensor([x["k"][0]]), TypeError, r"k: .*nested tensor; .*cu_seqlens"),
    "v jagged": (
        "v",
        lambda x: torch.nested.nested_tensor([x["v"][0]], layout=torch.jagged),
        TypeError,
        r"v: .*nested tensor; .*cu_seqlens",
    ),
    "scale text": ("scale", lambda x: "0.5", TypeError, r"scale: expected a number, got str '0.5'; .*None"),
    "scale list": ("scale", lambda x: [0.5], TypeError, r"scale: expected a number, got a list; .*None"),
    "scale of two": ("scale", lambda x: torch.ones(2), TypeError, r"scale: expected a number, got a Tensor; .*None"),
    "scale NaN": ("scale", lambda x: float("nan"), ValueError, r"scale: expected a finite number, got nan; .*None"),
    "scale inf": ("scale", lambda x: float("inf"), ValueError, r"scale: expected a finite number, got inf; .*None"),
    "scale learnt": ("scale", lambda x: torch.ones((), requires_grad=True), ValueError, r"scale: .*multiply q by it"),
    "backward_mib text": ("backward_mib", lambda x: "a", TypeError, r"backward_mib: expected a whole number of MiB, got str 'a'"),
    "backward_mib half": ("backward_mib", lambda x: 0.5, TypeError, r"backward_mib: expected a whole number of MiB, got float"),
    "backward_mib below 0": ("backward_mib", lambda x: -1, ValueError, r"backward_mib: expected 0 .*got -1; None is the default"),
    "plan below 0": (
        "auto_cp",
        lambda x: qla.Plan(-1, 0, 0, 0, 0, 1, 0, 0.0, False, ""),
        ValueError,
        r"auto_cp: expected a plan of segment_chunks 0 .*got -1",
    ),
    "cu_seqlens_cpu alone": (
        "cu_seqlens_cpu",
        lambda x: torch.tensor([0, 70]),
        ValueError,
        r"cu_seqlens: expected with cu_seqlens_cpu",
    ),
}


@pytest.mark.br(44)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(case: str) -> None:
    name, make, error, words = WRONG[case]
    inputs = CPU.inputs(70)
    wrong = {**inputs, name: make(inputs)}
    if name == "cu_seqlens" and isinstance(wrong[name], torch.Tensor) and wrong[name].shape[0] > 2:
        wrong["initial_state"] = inputs["initial_state"].repeat(wrong[name].shape[0] - 1, 1, 1, 1)
    out = torch.full((1, 70, 4, 40), 7.0)
    if name != "out":
        wrong["out"] = out
    before = {k: x.clone() for k, x in inputs.items()}
    with pytest.raises(error, match=words):
        qla.chunk_gated_delta_rule(**wrong)
    assert (out == 7).all()
    assert all(torch.equal(x, before[k]) for k, x in inputs.items())
    if "cu_seqlens" not in case or "descending negative past from".find(case.split()[1]) < 0:
        wrong.pop("out") if name != "out" else None
        served, reason = qla.can_implement(**wrong)
        assert not served and reason or name == "cu_seqlens"
    o, _ = qla.chunk_gated_delta_rule(**inputs)  # the next call works
    assert_close({"o": o}, {"o": recurrent_gated_delta_rule(**inputs)[0]}, torch.float32)


def test_sparse_after_a_dense_call_of_the_same_signature() -> None:
    inputs = CPU.inputs(70)
    qla.chunk_gated_delta_rule(**inputs)
    sparse = {**inputs, "beta": inputs["beta"].to_sparse()}
    with pytest.raises(TypeError, match=r"beta: expected a dense tensor"):
        qla.chunk_gated_delta_rule(**sparse)
    assert not qla.can_implement(**sparse)[0]


def test_out_has_memory_of_its_own() -> None:
    inputs = CPU.inputs(70)
    before = inputs["v"].clone()
    with pytest.raises(ValueError, match=r"out: expected memory of its own, got memory that v uses"):
        qla.chunk_gated_delta_rule(**inputs, out=inputs["v"])
    assert torch.equal(inputs["v"], before)


@pytest.mark.parametrize("name", ["out", "state_checkpoints"])
def test_outputs_that_want_gradients(name: str) -> None:
    given = {"out": torch.empty(1, 70, 4, 40), "state_checkpoints": torch.empty(1, 4, 24, 40)}
    every = {"checkpoint_every_n_tokens": 64} if name == "state_checkpoints" else {}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"{name}: expected a tensor without requires_grad"):
        qla.chunk_gated_delta_rule(**CPU.inputs(70), **{name: given[name]}, **every)
    with torch.no_grad():
        qla.chunk_gated_delta_rule(**CPU.inputs(70), **{name: given[name]}, **every)


@pytest.mark.br(44)
def test_boundaries_need_one_row() -> None:
    inputs = CPU.inputs(70, batch=2)
    with pytest.raises(ValueError, match=r"The batch size is expected to be 1 rather than 2 when using `cu_seqlens`"):
        qla.chunk_gated_delta_rule(**inputs, cu_seqlens=CPU.cu(0, 70))


@pytest.mark.br(44)
def test_boundaries_on_another_device() -> None:
    inputs = CPU.inputs(70)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected on q's device cpu, got meta"):
        qla.chunk_gated_delta_rule(**inputs, cu_seqlens=torch.tensor([0, 70], device="meta"))


@pytest.mark.br(83)
@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state"])
def test_mixed_devices(name: str) -> None:
    inputs = CPU.inputs(70)
    with pytest.raises(ValueError, match=rf"{name}: expected on q's device cpu, got meta; move it"):
        qla.chunk_gated_delta_rule(**{**inputs, name: inputs[name].to("meta")})


def test_unserved_device() -> None:
    inputs = {n: x.to("meta") for n, x in CPU.inputs(70).items()}
    with pytest.raises(NotImplementedError, match=r"q: expected a tensor on the CPU or a CUDA device, got meta"):
        qla.chunk_gated_delta_rule(**inputs)
    assert qla.can_implement(**inputs) == (
        False,
        "q: expected a tensor on the CPU or a CUDA device, got meta; move the inputs there",
    )


def test_can_implement_agrees_with_the_call() -> None:
    inputs = CPU.inputs(70)
    assert qla.can_implement(**inputs) == (True, "")
    assert qla.can_implement(**inputs, needs_grad=True) == (True, "")
    assert qla.can_implement(inputs["q"], inputs["k"])[0] is False
    assert "unexpected" not in qla.can_implement(**inputs, something_new=1)[1]


@pytest.mark.parametrize("name", ["out", "state_indices", "state_checkpoints"])
def test_no_gradients_through_serving_arguments(name: str) -> None:
    inputs = CPU.inputs(70)
    value = {
        "out": torch.empty(1, 70, 4, 40),
        "state_indices": torch.tensor([0]),
        "state_checkpoints": torch.empty(1, 4, 24, 40),
    }[name]
    extra = {"checkpoint_every_n_tokens": 64} if name == "state_checkpoints" else {}
    inputs["q"].requires_grad_()
    with pytest.raises(ValueError, match=rf"{name}: expected None when gradients are needed"):
        qla.chunk_gated_delta_rule(**inputs, **{name: value}, **extra)
    with torch.no_grad():
        qla.chunk_gated_delta_rule(**inputs, **{name: value}, **extra)


def test_unknown_keywords_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="qla"):
        qla.chunk_gated_delta_rule(**CPU.inputs(10), use_cache=True, layer_idx=3)
    assert "ignored unknown keywords layer_idx, use_cache" in caplog.text


@pytest.mark.parametrize(
    "keyword, meant",
    [("use_qk_l2norm", "use_qk_l2norm_in_kernel"), ("cu_seq_lens", "cu_seqlens"), ("use_cache", ""), ("layer_idx", "")],
)
def test_misspelt_keywords_are_warned_of(keyword: str, meant: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        qla.chunk_gated_delta_rule(**CPU.inputs(10), **{keyword: None})
    said = [str(w.message) for w in seen if "is ignored" in str(w.message)]
    assert len(said) == bool(meant) and all(f"`{keyword}`" in s and f"`{meant}`" in s for s in said), said


@pytest.mark.parametrize(
    "keyword, value, instead",
    [
        ("force_intra_cp", True, "qla.Plan.fixed"),
        ("force_intra_cp", "x", "qla.Plan.fixed"),
        ("force_intra_cp", False, ""),
        ("chunk_size", 128, "64 tokens"),
        ("chunk_size", torch.ones(2), "64 tokens"),
        ("chunk_size", 64, ""),
        ("chunk_size", None, ""),
    ],
)
def test_keywords_that_ask_in_vain_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, keyword: str, value: object, instead: str
) -> None:
    monkeypatch.setattr(qla.api, "_told", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            qla.chunk_gated_delta_rule(**CPU.inputs(10), **{keyword: value})
    said = [w for w in seen if "is ignored" in str(w.message)]
    assert len(said) == bool(instead) and all(instead in str(w.message) and w.filename == __file__ for w in said), said


def test_heads_before_tokens_is_recognised() -> None:
    inputs = {name: x.transpose(1, 2) for name, x in CPU.inputs(10).items()}
    with pytest.raises(ValueError, match=r"transpose\(1, 2\)"):
        qla.chunk_gated_delta_rule(**inputs)


def test_copies_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    inputs = CPU.inputs(11)
    inputs["q"] = inputs["q"].transpose(-1, -2).contiguous().transpose(-1, -2)
    with caplog.at_level(logging.INFO, logger="qla"):
        for _ in range(3):
            qla.chunk_gated_delta_rule(**inputs)
    assert caplog.text.count("q copied at every call") == 1


def test_positional_order_is_flas() -> None:
    inputs = CPU.inputs(70)
    q, k, v, g, beta, h0 = (inputs[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    a = qla.chunk_gated_delta_rule(q, k, v, g, beta, 0.2, h0, True, True, False, False, False, CPU.cu(0, 70), None, None, None)
    b = qla.chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, scale=0.2, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=CPU.cu(0, 70),
    )  # fmt: skip
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# ---- serving ---------------------------------------------------------------------------------------------------------


def test_out(device: Device) -> None:
    inputs = device.inputs(70)
    expected, _ = qla.chunk_gated_delta_rule(**inputs)
    out = torch.full_like(expected, float("nan"))
    o, ht = qla.chunk_gated_delta_rule(**inputs, out=out)
    assert o is out and ht is None and torch.equal(out, expected)
    wide = torch.full(
        (1, 70, 4, expected.shape[-1] + 1), 7.0, dtype=device.dtype, device=device.name
    )  # rows that TMA cannot address
    o, _ = qla.chunk_gated_delta_rule(**inputs, out=wide[..., :-1])
    assert torch.equal(o, expected) and (wide[..., -1] == 7).all()
    transposed = torch.empty(*expected.shape[:2], expected.shape[3], 4, dtype=device.dtype, device=device.name).mT
    assert torch.equal(qla.chunk_gated_delta_rule(**inputs, out=transposed)[0], expected)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_of_states(device: Device, v_first: bool, dtype: torch.dtype) -> None:
    cu = (0, 30, 100, 130)
    inputs = device.inputs(130, sequences=3)
    states = inputs.pop("initial_state").to(dtype)
    if v_first:
        states = states.transpose(-1, -2).contiguous()
    expected, end = qla.chunk_gated_delta_rule(
        **inputs, initial_state=states, cu_seqlens=device.cu(*cu), output_final_state=True, state_v_first=v_first, auto_cp=False
    )
    holder = torch.full((6, 2, *states.shape[1:]), 7.0, dtype=dtype, device=device.name)
    pool = holder[:, 1]  # padded slots
    pool[4], pool[2] = states[0], states[2]
    indices = device.tensor([4, -1, 2], dtype=torch.int32)
    o, final = qla.chunk_gated_delta_rule(
        **inputs, initial_state=pool, state_indices=indices, cu_seqlens=device.cu(*cu), output_final_state=True, state_v_first=v_first,
        auto_cp=False,
    )  # fmt: skip
    assert final is pool
    assert torch.equal(o[:, :30], expected[:, :30]) and torch.equal(o[:, 100:], expected[:, 100:]) and not o[:, 30:100].any()
    assert torch.equal(pool[4], end[0].to(dtype)) and torch.equal(pool[2], end[2].to(dtype))
    assert (holder[:, 0] == 7).all() and (pool[[0, 1, 3, 5]] == 7).all()


def test_pool_slots_that_hold_nothing_yet(device: Device) -> None:
    inputs = device.inputs(100, sequences=2)
    pool = inputs.pop("initial_state").repeat(2, 1, 1, 1)
    pool[3] = float("nan")
    cu, has = device.cu(0, 40, 100), device.tensor([True, False])
    begin = torch.stack([pool[1], torch.zeros_like(pool[0])])
    expected, end = qla.chunk_gated_delta_rule(**inputs, initial_state=begin, cu_seqlens=cu, output_final_state=True)
    indices = device.tensor([1, 3])
    o, _ = qla.chunk_gated_delta_rule(**inputs, initial_state=pool, state_indices=indices, has_initial_state=has, cu_seqlens=cu)
    assert torch.equal(o, expected) and torch.equal(pool[1], end[0]) and torch.equal(pool[3], end[1])


@pytest.mark.parametrize("kind", ["qwen", "soft", "zero"])
@pytest.mark.parametrize("auto_cp", [True, "exact"])
def test_pool_and_checkpoints_of_cut_sequences(device: Device, kind: str, auto_cp: bool | str) -> None:
    """Long enough to be cut, each head by its own gates: no more than the rounding changes, slot for slot."""
    cu, every = (0, 3000, 3000, 3001, 8192), 256
    rows = sum((b - a) // every for a, b in zip(cu, cu[1:]))
    inputs = device.inputs(8192, (1, 4), sequences=4, kind=kind)
    boundaries, states = device.cu(*cu), inputs.pop("initial_state")
    indices = device.tensor([5, 0, 2, 1])
    results = []
    for cp in (False, auto_cp):
        pool = states.new_full((6, *states.shape[1:]), 7.0)
        pool[indices] = states
        checkpoints = states.new_full((rows, *states.shape[1:]), float("nan"))
        out = torch.full_like(inputs["v"], float("nan"))
        qla.chunk_gated_delta_rule(
            **inputs, initial_state=pool, state_indices=indices, cu_seqlens=boundaries, out=out, auto_cp=cp,
            checkpoint_every_n_tokens=every, state_checkpoints=checkpoints,
        )  # fmt: skip
        assert (pool[[3, 4]] == 7).all() and torch.equal(pool[0], states[1])
        results.append((out, checkpoints, pool))
    limit = 1e-5 if device.name == "cpu" else 5e-3 * 2**0.5  # two results with errors of their own
    for name, want, got in zip(("out", "checkpoints", "pool"), *results):
        for head in range(4):
            axis = 2 if name == "out" else 1
            assert relative_l2(got.select(axis, head), want.select(axis, head)) <= limit, (name, head)


@pytest.mark.parametrize("index", [6, -2])
def test_pool_index_outside(index: int) -> None:
    inputs = CPU.inputs(70)
    with pytest.raises(ValueError, match="state_indices"):
        qla.chunk_gated_delta_rule(**inputs, state_indices=torch.tensor([index]))


@pytest.mark.parametrize("cu", [None, (0, 63, 256, 256, 391)])
def test_state_checkpoints(device: Device, cu: tuple[int, ...] | None) -> None:
    every = 64
    bounds = cu or (0, 391)
    inputs = device.inputs(391, sequences=len(bounds) - 1)
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    count = sum(n // every for n in lengths)
    k_dim, v_dim = inputs["q"].shape[3], inputs["v"].shape[3]
    checkpoints = torch.full((count, 4, k_dim, v_dim), float("nan"), device=device.name)
    boundaries = None if cu is None else device.cu(*cu)
    qla.chunk_gated_delta_rule(**inputs, cu_seqlens=boundaries, checkpoint_every_n_tokens=every, state_checkpoints=checkpoints)
    row = 0
    for n, (a, length) in enumerate(zip(bounds, lengths)):
        for stop in range(every, length + 1, every):
            piece = {name: inputs[name][:, a : a + stop] for name in ("q", "k", "v", "g", "beta")}
            _, want = recurrent_gated_delta_rule(
                **piece, initial_state=inputs["initial_state"][n : n + 1], output_final_state=True
            )
            assert relative_l2(checkpoints[row], want[0]) <= (1e-5 if device.name == "cpu" else 5e-3), (n, stop)
            row += 1
    assert row == count


def test_backward_memory_budget(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from common import run, upstream
    from qla import _call

    inputs = device.inputs(200)
    do, dht = upstream(inputs)
    sizes = []
    plain = _call._workspace
    monkeypatch.setattr(_call, "_workspace", lambda words, nbytes, cuda: sizes.append(nbytes) or plain(words, nbytes, cuda))
    results = []
    for mib in (None, 0, 1, 4096):
        sizes.clear()
        results.append((run(inputs, do, dht, backward_mib=mib), sizes[-1] if sizes else 0))
    check(device, inputs, backward_mib=1)
    for result, _ in results[1:]:
        assert_close(result, {n: x.double() for n, x in results[0][0].items()}, device.dtype)
    assert results[2][1] <= results[3][1]
