"""A call that repeats one before goes a short way (_again.py): what it must not be taken for, and that its results are the same bits."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

import qla
from common import GRADS, Device, assert_close, assert_equal, leaves, reference, run, upstream
from qla import _again, _call

CPU = Device("cpu")
pytestmark = pytest.mark.skipif(_again.Look is None, reason="this torch has no TensorGuards")


class Long:
    """Counts the calls that go the long way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        plain = _call.find_forward_entry

        def counted(*args: Any) -> Any:
            self.calls += 1
            return plain(*args)

        monkeypatch.setattr(_call, "find_forward_entry", counted)

    def of(self, function: Any) -> tuple[int, Any]:
        before = self.calls
        result = function()
        return self.calls - before, result


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> Long:
    _call.clear_cache()
    return Long(monkeypatch)


@pytest.mark.parametrize("cu", [None, (0, 30, 130)])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_repeat_is_seen_and_gives_the_same_bits(
    device: Device, long: Long, cu: tuple[int, ...] | None, state: bool, grad: bool
) -> None:
    sequences = 1 if cu is None else len(cu) - 1
    options = {"output_final_state": True, "scale": 0.3, "use_qk_l2norm_in_kernel": True}
    results = []
    for seed in (0, 0, 1):
        inputs = device.inputs(130, sequences=sequences, seed=seed)
        if not state:
            inputs.pop("initial_state")
        if cu is not None:
            inputs["cu_seqlens"] = device.cu(*cu)
        do, dht = upstream(inputs, sequences)
        options.pop("output_final_state", None)
        if grad:
            taken, result = long.of(lambda: run(inputs, do, dht, **options))  # noqa: B023
            truth = reference(inputs, do, dht, **options)
        else:
            taken, (o, ht) = long.of(lambda: qla.chunk_gated_delta_rule(**inputs, output_final_state=True, **options))  # noqa: B023
            result, truth = {"o": o, "ht": ht}, None
        results.append(result)
        assert taken == (1 if len(results) == 1 else 0)
        if truth is not None:
            assert_close(result, truth, device.dtype)
    assert_equal(results[1], results[0])
    assert not torch.equal(results[2]["o"], results[0]["o"])


def gradients_of(device: Device, inputs: dict[str, Any], do: Any, dht: Any = None, pack: Any = None) -> dict[str, Any]:
    """Of <o, do> + <ht, dht>, the saved tensors through `pack`."""
    xs = leaves(inputs)
    hooks = contextlib.nullcontext() if pack is None else torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks:
        o, ht = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
    ys = [(y, d) for y, d in ((o, do), (ht, dht)) if d is not None]
    wanted = {name: x for name, x in xs.items() if x.requires_grad}
    grads = torch.autograd.grad([y for y, _ in ys], list(wanted.values()), [d for _, d in ys], allow_unused=True)
    return dict(zip(wanted, grads))


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def test_a_backward_like_one_before_is_seen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """.. and one that differs in how an upstream gradient or a saved tensor lies is not taken for it: the same bits either way."""
    searched = []
    plain = _call.find_backward_entry
    monkeypatch.setattr(_call, "find_backward_entry", lambda *args: searched.append(1) or plain(*args))
    inputs = device.inputs(130)
    do, dht = upstream(inputs)
    truth = run(inputs, do, None)
    want = {name: truth[GRADS[name]] for name in inputs}
    _call.clear_cache()
    for expected in (1, 0, 0):
        searched.clear()
        assert_equal(gradients_of(device, inputs, do), want)
        assert len(searched) == expected
    both = gradients_of(device, inputs, do, dht)
    searched.clear()
    assert_equal(gradients_of(device, inputs, do, dht), both)
    assert not searched
    assert_equal(gradients_of(device, inputs, do), want)
    assert not searched and not torch.equal(both["v"], want["v"])
    rows = do.transpose(1, 2).contiguous().transpose(1, 2)  # heads outermost
    assert rows.stride() != do.stride()
    for other in (rows, shifted(do)):
        for _ in range(2):
            assert_equal(gradients_of(device, inputs, other), want)
    ones = torch.ones_like(do)
    assert_equal(gradients_of(device, inputs, ones[:, :1, :, :1].expand(do.shape)), gradients_of(device, inputs, ones))
    for pack in (lambda x: x.clone(), shifted, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x):
        for _ in range(2):
            assert_equal(gradients_of(device, inputs, do, pack=pack), want)
    last = gradients_of(device, inputs, None, dht)
    assert_equal(gradients_of(device, inputs, None, dht), last)
    some = {**inputs, "q": inputs["q"].clone()}
    xs = leaves(some)
    for name in ("k", "beta"):
        xs[name] = xs[name].detach()
    for _ in range(2):
        o, _ = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
        names = [name for name in xs if xs[name].requires_grad]
        assert_equal(
            dict(zip(names, torch.autograd.grad(o, [xs[name] for name in names], do))), {name: want[name] for name in names}
        )


def test_a_node_whose_saved_input_changed_is_refused(device: Device) -> None:
    inputs = device.inputs(70)
    for _ in range(2):
        gradients_of(device, inputs, upstream(inputs)[0])
    xs = leaves(inputs)
    o, _ = qla.chunk_gated_delta_rule(**xs)
    with torch.no_grad():
        xs["k"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def differing(inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Calls of which none is a repeat of the one with `inputs`."""
    q, v, beta = inputs["q"], inputs["v"], inputs["beta"]
    return {
        "strides": {**inputs, "q": torch.stack([q, q], 3)[:, :, :, 0]},
        "dtype": {**inputs, "beta": beta.bfloat16()},
        "tokens": {name: x if name == "initial_state" else x[:, 1:] for name, x in inputs.items()},
        "value heads": {**inputs, "q": q[:, :, :1], "k": inputs["k"][:, :, :1]},
        "no state": {**inputs, "initial_state": None},
        "no gate": {**inputs, "g": None},
        "parameter": {**inputs, "q": torch.nn.Parameter(q)},
        "gradient": {**inputs, "q": q.clone().requires_grad_()},
        "scale": {**inputs, "scale": 0.5},
        "norms": {**inputs, "use_qk_l2norm_in_kernel": True},
        "final state": {**inputs, "output_final_state": True},
        "sigmoid": {**inputs, "use_beta_sigmoid_in_kernel": True},
        "boundaries": {**inputs, "cu_seqlens": torch.tensor([0, 70])},
        "cuts": {**inputs, "auto_cp": False},
        "negative": {**inputs, "g": torch._neg_view(-inputs["g"])},
        "out": {**inputs, "out": torch.empty_like(v)},
    }


@pytest.mark.parametrize("case", list(differing(CPU.inputs(70))))
def test_what_is_no_repeat(long: Long, case: str) -> None:
    inputs = CPU.inputs(70)
    other = differing(inputs)[case]
    want = [qla.chunk_gated_delta_rule(**x)[0].detach().clone() for x in (inputs, other)]
    for x, o in ((inputs, want[0]), (other, want[1]), (inputs, want[0]), (other, want[1])):
        got, final = qla.chunk_gated_delta_rule(**x)
        assert torch.equal(got, o)
        assert (final is not None) == bool(x.get("output_final_state"))
        assert got.requires_grad == any(isinstance(t, torch.Tensor) and t.requires_grad for t in x.values())
    if case == "negative":  # the same numbers in other memory
        assert torch.equal(want[0], want[1])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_wrong_inputs_after_a_good_call(name: str) -> None:
    inputs = CPU.inputs(70)
    for _ in range(2):
        qla.chunk_gated_delta_rule(**inputs)
    for wrong, error in (
        (inputs[name].tolist(), TypeError),
        (inputs[name].to_sparse(), TypeError),
        (inputs[name].to("meta"), (ValueError, NotImplementedError)),
        (inputs[name][..., :1], ValueError),
    ):
        with pytest.raises(error, match=rf"^({name}|k|v|g|beta|initial_state): "):
            qla.chunk_gated_delta_rule(**{**inputs, name: wrong})


def test_modes_and_transforms_after_a_good_call(long: Long) -> None:
    inputs = CPU.inputs(70)
    call = lambda **kwargs: qla.chunk_gated_delta_rule(**{**inputs, **kwargs})[0]  # noqa: E731
    want = call()
    call()
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), contextlib.nullcontext()):
        with context:
            for _ in range(2):
                o = call()
                cast = torch.is_autocast_enabled("cpu")
                assert o.dtype == (torch.bfloat16 if cast else torch.float32)
                assert cast or torch.equal(o, want)
    grad = torch.func.grad(lambda q: call(q=q).sum())
    (expected,) = torch.autograd.grad(call(q=(q := inputs["q"].clone().requires_grad_())).sum(), q)
    assert torch.equal(grad(inputs["q"]), expected) and torch.equal(grad(inputs["q"]), expected)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(call(), want)
        with pytest.raises(NotImplementedError, match="^q: expected no tangent"):
            call(q=torch.autograd.forward_ad.make_dual(inputs["q"], inputs["q"]))


def test_looks_are_bounded(long: Long) -> None:
    """A signature whose calls always differ in what its key leaves out does not make a look for every call."""
    inputs = CPU.inputs(70)
    for i in range(4 * _again.MOST_LOOKS):
        q = torch.nn.Parameter(inputs["q"], requires_grad=False) if i % 2 else inputs["q"]
        qla.chunk_gated_delta_rule(**{**inputs, "q": q})
    (entry,) = {id(r.entry): r.entry for r in _call.repeats.values()}.values()
    assert entry.looks == _again.MOST_LOOKS and long.calls >= _again.MOST_LOOKS


def test_threads_of_two_signatures() -> None:
    both = [CPU.inputs(70), CPU.inputs(130, seed=1)]
    want = [qla.chunk_gated_delta_rule(**x)[0] for x in both]
    wrong = []

    def work(which: int) -> None:
        for _ in range(50):
            xs = leaves(both[which])
            o, _ = qla.chunk_gated_delta_rule(**xs)
            o.sum().backward()
            if not torch.equal(o.detach(), want[which]) or xs["q"].grad is None:
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
