"""How the operator behaves inside PyTorch: autograd, compile, export, modes, threads, processes (sections D, E, F of docs/testing.md)."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import qla
from common import Device, assert_close, assert_equal, leaves, reference, run, subprocess_python, upstream
from qla import _call, _ffi, ops

CPU = Device("cpu")


# ---- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.br("D-4")
def test_double_backward_is_refused(device: Device) -> None:
    xs = leaves(device.inputs(70))
    o, _ = qla.chunk_gated_delta_rule(**xs)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(o.sum(), [xs["q"]], create_graph=True)


@pytest.mark.br("D-8")
@pytest.mark.parametrize("reduce", ["sum", "transposed", "narrow"])
def test_upstream_gradients_of_any_layout(device: Device, reduce: str) -> None:
    """o.sum() gives an expanded gradient."""
    xs = leaves(device.inputs(70))
    o, ht = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
    if reduce == "sum":
        do, dht = torch.ones_like(o), torch.ones_like(ht)
        grads = torch.autograd.grad(o.sum() + ht.sum(), list(xs.values()))
    else:
        do, dht = torch.randn_like(o), torch.randn_like(ht)
        view_o = do.mT.contiguous().mT if reduce == "transposed" else torch.cat([do, do], -1)[..., : do.shape[-1]]
        view_ht = dht.mT.contiguous().mT if reduce == "transposed" else torch.cat([dht, dht], -1)[..., : dht.shape[-1]]
        grads = torch.autograd.grad([o, ht], list(xs.values()), [view_o, view_ht])
    o, ht = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
    expected = torch.autograd.grad([o, ht], list(xs.values()), [do, dht])
    for name, a, b in zip(xs, grads, expected):
        assert torch.equal(a, b), name


@pytest.mark.br("D-9")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_edits_of_saved_inputs_are_detected(device: Device, name: str) -> None:
    inputs = device.inputs(70)
    inputs["v"].requires_grad_() if name != "v" else inputs["q"].requires_grad_()
    o, _ = qla.chunk_gated_delta_rule(**inputs)
    with torch.no_grad():
        inputs[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.br("D-9")
@pytest.mark.parametrize("which", ["out", "pool", "checkpoints"])
def test_autograd_sees_what_a_call_writes(device: Device, which: str) -> None:
    inputs = device.inputs(70)
    buffers = {
        "out": torch.empty(inputs["v"].shape, dtype=device.dtype, device=device.name),
        "pool": inputs.pop("initial_state"),
        "checkpoints": torch.empty(1, 4, *device.sizes.values(), device=device.name),
    }
    saved = buffers[which].requires_grad_(False)
    factor = torch.ones(saved.shape[-1], dtype=saved.dtype, device=device.name, requires_grad=True)
    product = (factor * saved).sum()  # keeps `saved` for backward
    qla.chunk_gated_delta_rule(
        **inputs, initial_state=buffers["pool"], state_indices=device.tensor([0]), out=buffers["out"], checkpoint_every_n_tokens=64,
        state_checkpoints=buffers["checkpoints"],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        qla.chunk_gated_delta_rule(**inputs, out=torch.empty_like(buffers["out"]))


@pytest.mark.br("D-10")
def test_backward_twice_and_checkpointing(device: Device) -> None:
    inputs = device.inputs(130)
    do, dht = upstream(inputs)
    xs = leaves(inputs)
    o, ht = qla.chunk_gated_delta_rule(**xs, output_final_state=True)
    first = torch.autograd.grad([o, ht], list(xs.values()), [do, dht], retain_graph=True)
    second = torch.autograd.grad([o, ht], list(xs.values()), [do, dht])
    for use_reentrant in (False, True):
        names = list(xs)

        def block(*args, names=names):
            return qla.chunk_gated_delta_rule(**dict(zip(names, args)), output_final_state=True)

        ys = leaves(inputs)
        o, ht = checkpoint(block, *ys.values(), use_reentrant=use_reentrant)
        torch.autograd.backward([o, ht], [do, dht])
        for name, a, b, c in zip(names, first, second, ys.values()):
            assert torch.equal(a, b) and torch.equal(a, c.grad), name


def test_only_what_is_needed(device: Device) -> None:
    """Each input alone asks for its gradient alone, with the same numbers."""
    inputs = device.inputs(70)
    do, dht = upstream(inputs)
    every = run(inputs, do, dht)
    for name, grad in (("q", "dq"), ("k", "dk"), ("v", "dv"), ("g", "dg"), ("beta", "dbeta"), ("initial_state", "dh0")):
        x = inputs[name].clone().requires_grad_()
        o, ht = qla.chunk_gated_delta_rule(**{**inputs, name: x}, output_final_state=True)
        (alone,) = torch.autograd.grad([o, ht], [x], [do, dht])
        assert torch.equal(alone, every[grad]), name


def test_nothing_is_kept_without_gradients(device: Device) -> None:
    inputs = device.inputs(70)
    o, ht = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o.grad_fn is None and ht is not None and ht.grad_fn is None
    xs = leaves(inputs)
    with torch.no_grad():
        assert qla.chunk_gated_delta_rule(**xs)[0].grad_fn is None
    with torch.inference_mode():
        assert torch.equal(qla.chunk_gated_delta_rule(**xs)[0], o)


def test_saved_tensor_hooks(device: Device) -> None:
    inputs = device.inputs(70)
    do, dht = upstream(inputs)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        actual = run(inputs, do, dht)
    assert len(packed) >= 6
    assert_equal(actual, run(inputs, do, dht))


@pytest.mark.br(74)
def test_deterministic(device: Device) -> None:
    inputs = device.inputs(130, (1, 8))
    do, dht = upstream(inputs)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first = run(inputs, do, dht)
        for _ in range(50):
            assert_equal(run(inputs, do, dht), first)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.br(74)
def test_the_number_of_threads_changes_nothing() -> None:
    inputs = CPU.inputs(700)
    do, dht = upstream(inputs)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(inputs, do, dht))
    finally:
        torch.set_num_threads(before)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_torch_threads_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    inputs = CPU.inputs(70)
    qla.chunk_gated_delta_rule(**inputs)
    plain = _call._run_forward
    monkeypatch.setattr(
        _call, "_run_forward", lambda words: seen.append(_ffi.ForwardArgs.from_address(words).num_threads) or plain(words)
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        qla.chunk_gated_delta_rule(**inputs)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


# ---- results belong to the caller ------------------------------------------------------------------------------------


@pytest.mark.br(80)
def test_results_are_not_reused(device: Device) -> None:
    x1, x2 = device.inputs(70, seed=1), device.inputs(70, seed=2)
    o1, h1 = qla.chunk_gated_delta_rule(**x1, output_final_state=True)
    kept = o1.clone(), h1.clone()
    o2, _ = qla.chunk_gated_delta_rule(**x2, output_final_state=True)
    assert torch.equal(o1, kept[0]) and torch.equal(h1, kept[1]) and not torch.equal(o1, o2)


@pytest.mark.br(80)
def test_threads(device: Device) -> None:
    inputs = [device.inputs(70 + i, seed=i) for i in range(4)]
    ups = [upstream(x) for x in inputs]
    expected = [run(x, *up) for x, up in zip(inputs, ups)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(10):
                assert_equal(run(inputs[i], *ups[i]), expected[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.br(80)
def test_two_streams(device: Device) -> None:
    if device.name == "cpu":
        pytest.skip("streams are CUDA's")
    inputs = [device.inputs(2000, seed=i) for i in range(2)]
    ups = [upstream(x) for x in inputs]
    expected = [run(x, *up) for x, up in zip(inputs, ups)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream, x, up in zip(streams, inputs, ups):
            with torch.cuda.stream(stream):
                results.append(run(x, *up))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert_equal(result, expected[i % 2])


# ---- compile, export, transforms -------------------------------------------------------------------------------------


@pytest.mark.br(82)
def test_compile(device: Device) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(q, k, v, g, beta, initial_state, cu):
        o, ht = qla.chunk_gated_delta_rule(
            q, k * 1.0, v, g, beta, initial_state=initial_state, cu_seqlens=cu, output_final_state=True, use_cache=False
        )
        return o * 2, ht

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens, cu in ((64, (0, 20, 64)), (100, (0, 50, 60, 100)), (257, (0, 1, 2, 100, 257))):
        inputs = device.inputs(tokens, sequences=len(cu) - 1)
        do, dht = upstream(inputs, len(cu) - 1)
        results = []
        for fn in (layer, compiled):
            xs = leaves(inputs)
            o, ht = fn(**xs, cu=device.cu(*cu))
            results.append((o, ht, *torch.autograd.grad([o, ht], list(xs.values()), [do, dht])))
        for eager, traced in zip(*results):
            assert torch.equal(eager, traced)
    assert counter.frame_count <= 2


@pytest.mark.br(82)
def test_compile_with_inductor(device: Device) -> None:
    torch._dynamo.reset()

    def layer(q, k, v, g, beta, initial_state):
        return qla.chunk_gated_delta_rule(q, k, v, g, beta.sigmoid(), initial_state=initial_state, use_qk_l2norm_in_kernel=True)[
            0
        ]

    inputs = device.inputs(100)
    do, _ = upstream(inputs)
    results = []
    for fn in (layer, torch.compile(layer, fullgraph=True)):
        xs = leaves(inputs)
        o = fn(**xs)
        results.append((o, *torch.autograd.grad(o, list(xs.values()), do)))
    for name, eager, traced in zip(("o", *inputs), *results):
        assert_close({name: traced}, {name: eager.double()}, device.dtype, 2)


@pytest.mark.br(82)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(device: Device, grad: bool) -> None:
    inputs = device.inputs(70, sequences=2)
    x = {n: y.requires_grad_(grad) for n, y in inputs.items()}
    cu = device.cu(0, 33, 70)
    for flags, gate in ((0, (None, None)), (_ffi.FLAG_RAW_GATE | _ffi.FLAG_QK_L2NORM, (torch.ones(4), torch.zeros(4)))):
        a_log, dt_bias = (y if y is None else y.to(device.name).requires_grad_(grad) for y in gate)
        tensors = (x["q"], x["k"], x["v"], x["g"], x["beta"], x["initial_state"], cu, a_log, dt_bias, None)
        torch.library.opcheck(torch.ops.qla.gdn_forward.default, (*tensors, None, flags, 0, 0, None, 0, True, grad, 0))
        plain = [y.detach() if y is not None else None for y in tensors]
        do, dht = upstream(inputs, 2)
        needs = ops._all_needs(tuple(tensors))
        torch.library.opcheck(torch.ops.qla.gdn_backward.default, (*plain, None, do, dht, None, flags, 0, 0, None, 0, needs, 0))


@pytest.mark.br(82)
def test_opcheck_of_the_writing_operator(device: Device) -> None:
    x = device.inputs(70)
    out = torch.empty_like(qla.chunk_gated_delta_rule(**x)[0])
    pool, indices = x["initial_state"].repeat(3, 1, 1, 1), device.tensor([1])
    args = (
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        pool,
        None,
        None,
        None,
        None,
        indices,
        None,
        0,
        0,
        0,
        None,
        0,
        True,
        out,
        None,
        0,
    )
    torch.library.opcheck(torch.ops.qla.gdn_forward_into.default, args)


@pytest.mark.br(82)
def test_compile_of_serving_arguments(device: Device) -> None:
    torch._dynamo.reset()
    inputs = device.inputs(70)
    pool = inputs.pop("initial_state").repeat(3, 1, 1, 1)
    indices = device.tensor([2])

    def step(pool, out):
        return qla.chunk_gated_delta_rule(**inputs, initial_state=pool, state_indices=indices, out=out, output_final_state=True)

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        mine, out = pool.clone(), torch.empty(inputs["v"].shape, dtype=device.dtype, device=device.name)
        fn(mine, out)
        results.append((mine, out))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.br(82)
def test_export(device: Device) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta, initial_state):
            return qla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)

    inputs = device.inputs(100)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    dynamic = {name: {1: tokens} if name != "initial_state" else None for name in inputs}
    program = torch.export.export(Layer(), (), inputs, dynamic_shapes=dynamic)
    for n in (100, 257):
        other = device.inputs(n)
        o, ht = program.module()(**other)
        want_o, want_ht = qla.chunk_gated_delta_rule(**other, output_final_state=True)
        assert torch.equal(o, want_o) and torch.equal(ht, want_ht)


def test_wrong_arguments_under_compile() -> None:
    torch._dynamo.reset()
    inputs = CPU.inputs(70)
    inputs["beta"] = inputs["beta"][..., :1]
    with pytest.raises(Exception, match=r"beta: expected shape"):
        torch.compile(lambda **x: qla.chunk_gated_delta_rule(**x), fullgraph=True, backend="aot_eager")(**inputs)


def test_vmap_is_refused(device: Device) -> None:
    inputs = device.inputs(10)
    stacked = torch.stack([inputs["q"]] * 2)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: qla.chunk_gated_delta_rule(**{**inputs, "q": q})[0])(stacked)
    with pytest.raises(NotImplementedError, match="vmap"):
        grad = torch.func.grad(lambda q: qla.chunk_gated_delta_rule(**{**inputs, "q": q})[0].float().sum())
        torch.vmap(grad)(stacked)


@pytest.mark.parametrize("name", ["q", "g", "initial_state"])
def test_forward_mode_is_refused(device: Device, name: str) -> None:
    inputs = device.inputs(10)
    x = inputs[name]
    call = lambda x: qla.chunk_gated_delta_rule(**{**inputs, name: x})[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match=rf"^{name}: expected no tangent, got one; .*reverse mode"):
        torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(call(x), call(x.clone()))  # no tangent: nothing to lose
        with pytest.raises(NotImplementedError, match=rf"^{name}: expected no tangent"):
            call(torch.autograd.forward_ad.make_dual(x, x))


def test_functional_gradient(device: Device) -> None:
    inputs = device.inputs(70)
    (expected,) = torch.autograd.grad(
        qla.chunk_gated_delta_rule(**{**inputs, "q": (x := inputs["q"].clone().requires_grad_())})[0].sum(), x
    )
    actual = torch.func.grad(lambda q: qla.chunk_gated_delta_rule(**{**inputs, "q": q})[0].sum())(inputs["q"])
    assert torch.equal(actual, expected)


def test_fake_tensors(device: Device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) for n, x in device.inputs(70).items()}
        o, ht = qla.chunk_gated_delta_rule(**fakes, output_final_state=True)
    assert o.shape == fakes["v"].shape and ht is not None and ht.shape == fakes["initial_state"].shape
    assert ht.dtype == torch.float32


def test_dispatch_modes_see_the_operator(device: Device) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = device.inputs(70)
    expected, _ = qla.chunk_gated_delta_rule(**inputs)
    with Seen() as seen:
        o, _ = qla.chunk_gated_delta_rule(**inputs)
    assert any("qla.gdn_forward" in name for name in seen.names) and torch.equal(o, expected)


# ---- processes and imports -------------------------------------------------------------------------------------------


@pytest.mark.br(84)
def test_import_has_no_side_effects() -> None:
    code = """
import sys
import qla, flash_qla
assert 'torch' not in sys.modules and 'numpy' not in sys.modules
import torch, qla.api, flash_qla.utils, qla.ops
from qla import chunk_gated_delta_rule
from flash_qla import chunk_gated_delta_rule as other
from qla import _ffi
assert not torch.cuda.is_initialized() and _ffi._library is None
print('clean')
"""
    assert "clean" in subprocess_python(code, env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.br(84)
def test_fork_after_use() -> None:
    code = """
import os, torch, qla
from common import Device, leaves
x = leaves(Device('cpu').inputs(700))
def step():
    o, ht = qla.chunk_gated_delta_rule(**x, output_final_state=True)
    return torch.autograd.grad(o.sum() + ht.sum(), [x['q']])[0]
torch.set_num_threads(2)
mine = step()
pid = os.fork()
if pid == 0:
    torch.set_num_threads(1)  # torch's own operators hang in a forked child with more
    os._exit(0 if torch.equal(step(), mine) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print('forked')
"""
    # torch refuses autograd in a forked child once its engine has threads for GPUs; this is about the library's own threads
    assert "forked" in subprocess_python(code, env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.br(84)
def test_missing_library_is_said_at_first_use(tmp_path) -> None:
    code = """
import qla, flash_qla, torch
from common import Device
x = Device('cpu').inputs(10)
try:
    qla.chunk_gated_delta_rule(**x)
except ImportError as error:
    assert 'QLA_LIBRARY' in str(error) and 'nowhere.so' in str(error), error
    print('said', qla.can_implement(**x)[0])
"""
    assert "said False" in subprocess_python(code, env={"QLA_LIBRARY": str(tmp_path / "nowhere.so")})


@pytest.mark.parametrize(
    "line",
    [
        "import qla; qla.chunk_gated_delta_rule",
        "import qla; qla.plan(1, 2, 3)",
        "import qla.ops",
        "import qla.testing",
        "import qla.integrations.flashinfer",
        "import flash_qla; flash_qla.chunk_gated_delta_rule",
        "import flash_qla.utils",
    ],
)
def test_missing_torch_is_said(line: str) -> None:
    code = f"import sys\nsys.modules['torch'] = None\ntry:\n    {line}\nexcept ImportError as error:\n    print(error)"
    assert "pip install torch numpy" in subprocess_python(code)


@pytest.mark.br(85)
def test_unserved_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library refuses becomes NotImplementedError with its list, also for backward, at forward."""
    inputs = CPU.inputs(70)
    _call.clear_cache()
    real = _ffi.lib()

    class Refusing:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, attribute: str):
            if attribute == self.name:
                return lambda args: _ffi.NOT_SUPPORTED
            if attribute == "qla_last_error":
                return lambda: b"device: expected compute capability 9.0, got 8.9; kernels: sm90"
            return getattr(real, attribute)

    for name, grad in (("qla_gdn_forward_check", False), ("qla_gdn_backward_check", True)):
        monkeypatch.setattr(_ffi, "_library", Refusing(name))
        _call.clear_cache()
        xs = {n: x.clone().requires_grad_(grad) for n, x in inputs.items()}
        with pytest.raises(NotImplementedError, match=r"expected compute capability 9.0, got 8.9"):
            qla.chunk_gated_delta_rule(**xs)
        assert qla.can_implement(**xs, needs_grad=grad) == (
            False,
            "device: expected compute capability 9.0, got 8.9; kernels: sm90",
        )
    with torch.no_grad():  # forward alone is served
        qla.chunk_gated_delta_rule(**xs)
    monkeypatch.setattr(_ffi, "_library", real)
    _call.clear_cache()
    qla.chunk_gated_delta_rule(**inputs)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def _cuda(device: Device) -> None:
    if device.name == "cpu":
        pytest.skip("CUDA only")


@pytest.mark.br(76)
def test_no_hidden_synchronisation(device: Device) -> None:
    _cuda(device)
    inputs = device.inputs(300, sequences=2)
    cu = device.cu(0, 100, 300)
    do, dht = upstream(inputs, 2)
    run(inputs, do, dht, cu_seqlens=cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs, do, dht, cu_seqlens=cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.br(77)
def test_graph_capture_serves_any_boundaries(device: Device) -> None:
    _cuda(device)
    inputs = device.inputs(512, sequences=3)
    cu = device.cu(0, 100, 356, 512)
    do, dht = upstream(inputs, 3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(inputs, do, dht, cu_seqlens=cu)
    torch.cuda.current_stream().wait_stream(side)
    xs = leaves(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, ht = qla.chunk_gated_delta_rule(**xs, cu_seqlens=cu, output_final_state=True)
        grads = torch.autograd.grad([o, ht], list(xs.values()), [do, dht])
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    for boundaries in ((0, 100, 356, 512), (0, 1, 511, 512), (0, 512, 512, 512)):
        cu.copy_(device.cu(*boundaries))
        graph.replay()
        replayed = {"o": o, "ht": ht, **dict(zip(names, grads))}
        assert_equal({n: x.clone() for n, x in replayed.items()}, run(inputs, do, dht, cu_seqlens=cu))
        assert_close(replayed, reference(inputs, do, dht, cu_seqlens=boundaries), device.dtype)
