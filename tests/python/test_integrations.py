"""transformers' layers and FLA's dispatch reach `qla`."""

from __future__ import annotations

import copy
import importlib
import sys
import types

import pytest
import torch

import qla
from common import LIMITS, Device, assert_close, reference, run, upstream
from qla import ops
from qla.testing import relative_l2

# ---- transformers ----------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")
MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@pytest.fixture
def integration():
    module = importlib.import_module("qla.integrations.transformers")
    yield module
    module.disable()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """Counts what reaches the operator."""
    seen: list = []
    plain = ops.gdn_forward
    monkeypatch.setattr(ops, "gdn_forward", lambda *args: seen.append(args) or plain(*args))
    return seen


def modeling(name: str):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def layer(name: str, device: Device) -> torch.nn.Module:
    module = modeling(name)
    sizes = {
        "hidden_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": device.square["k_dim"],
        "linear_value_head_dim": device.square["v_dim"],
    }
    config_class, layer_class = {
        "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
        "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet"),
    }[name]
    torch.manual_seed(0)
    config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), config_class)(**sizes)
    return getattr(module, layer_class)(config, 0).to(device.name, device.dtype)


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_with_qla(device: Device, integration, calls: list, name: str) -> None:
    net = layer(name, device)
    x = torch.randn(2, 100, 32, dtype=device.dtype, device=device.name)

    def step(net=net, x=x):
        y = x.clone().requires_grad_()
        out = net(y)
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        return out, *torch.autograd.grad(wide.square().sum(), [y, net.A_log, net.dt_bias])

    before = step()
    assert not calls
    assert f"transformers.models.{name}.modeling_{name}" in integration.enable()
    during = step()
    assert len(calls) == 1
    integration.disable()
    after = step()
    assert len(calls) == 1
    # A layer in bf16 is off by 1e-2 and more whatever computes the operator: both are compared with the layer in float64.
    truth = step(copy.deepcopy(net).double(), x.double())
    for what, a, b, c, t in zip(("out", "dx", "dA_log", "ddt_bias"), before, during, after, truth):
        assert torch.equal(a, c)
        theirs, mine = relative_l2(a, t), relative_l2(b, t)
        limit = 2e-5 if device.name == "cpu" else LIMITS[device.dtype][what != "out"]
        assert mine <= max(limit, 2 * theirs), f"{what}: {mine:.2e} from the truth, transformers' own operator {theirs:.2e}"


def test_enable_twice_then_disable(integration) -> None:
    module = modeling("qwen3_next")
    original = module.torch_chunk_gated_delta_rule
    assert integration.enable() == integration.enable()
    assert module.torch_chunk_gated_delta_rule is not original
    integration.disable()
    assert module.torch_chunk_gated_delta_rule is original
    integration.disable()


def test_packed_sequences_where_torch_refuses(device: Device, integration) -> None:
    integration.enable()
    function = modeling("qwen3_next").torch_chunk_gated_delta_rule
    x = device.inputs(100, sequences=2)
    cu = device.cu(0, 40, 100)
    o, ht = function(
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=x["initial_state"], output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=cu, use_cache=True, output_attentions=False,
    )  # fmt: skip
    want = qla.chunk_gated_delta_rule(**x, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)
    assert torch.equal(o, want[0]) and torch.equal(ht, want[1])
    with pytest.raises(ValueError, match="seq_idx"):
        function(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], seq_idx=cu)


def test_old_versions_are_refused(integration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_targets", lambda: {})
    with pytest.raises(
        RuntimeError, match=r"expected a module of transformers with torch_chunk_gated_delta_rule, got none in version"
    ):
        integration.enable()


def test_transformers_missing(integration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="expected transformers to be installed"):
        integration.enable()


# ---- FLA, by a stand-in with its registry's behaviour ----------------------------------------------------------------


class BaseBackend:
    backend_type, package_name, env_var, default_enable, priority = "base", None, None, True, 5

    def is_available(self) -> bool:
        return self.package_name is None or importlib.util.find_spec(self.package_name) is not None

    def is_enabled(self) -> bool:
        import os

        return self.env_var is None or os.environ.get(self.env_var, "1" if self.default_enable else "0") != "0"

    can_use = is_enabled

    def verify(self, name: str, *args, **kwargs):
        verifier = getattr(self, f"{name}_verifier", None)
        try:
            return verifier(*args, **kwargs) if verifier else (True, None)
        except Exception as error:
            return False, str(error)


class FlashQLABackend(BaseBackend):
    """Asks for what FLA's backend for the original asks, and calls it as FLA does."""

    backend_type, package_name, priority = "flash_qla", "flash_qla", 3
    hopper = True

    def chunk_gated_delta_rule_verifier(self, q, k, v, g, beta, **kwargs):
        if not self.hopper or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] != 128 or v.shape[-1] != 128:
            return False, "not for the original"
        if kwargs.get("use_gate_in_kernel") or kwargs.get("use_beta_sigmoid_in_kernel"):
            return False, "not in the original"
        return True, None

    def chunk_gated_delta_rule(self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                               use_qk_l2norm_in_kernel=False, state_v_first=False, cu_seqlens=None, **kwargs):  # fmt: skip
        import flash_qla

        return flash_qla.chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first, cu_seqlens=cu_seqlens, auto_cp=True,
        )  # fmt: skip


class BackendRegistry:
    _registries: dict = {}

    def __init__(self, operation: str) -> None:
        self._backends: dict = {}
        self._active = None
        BackendRegistry._registries[operation] = self

    def register(self, backend) -> None:
        self._backends[backend.backend_type] = backend

    def _update_active_backend(self) -> None:
        pass

    @classmethod
    def ensure_initialized(cls, operation: str) -> None:
        if operation == "gated_delta_rule" and operation not in cls._registries:
            cls(operation).register(FlashQLABackend())


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch):
    """A module tree `fla.ops.backends`, and dispatch as FLA does it. -> call(**kwargs) giving (backend's name, result)"""
    BackendRegistry._registries.clear()
    for name in ("fla", "fla.ops", "fla.ops.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.ops.backends"].BackendRegistry = BackendRegistry  # type: ignore[attr-defined]
    sys.modules["fla.ops.backends"].BaseBackend = BaseBackend  # type: ignore[attr-defined]

    def call(*args, **kwargs):
        BackendRegistry.ensure_initialized("gated_delta_rule")
        backends = BackendRegistry._registries["gated_delta_rule"]._backends.values()
        for backend in sorted(backends, key=lambda b: b.priority):
            if backend.is_available() and backend.is_enabled() and backend.verify("chunk_gated_delta_rule", *args, **kwargs)[0]:
                return backend.backend_type, backend.chunk_gated_delta_rule(*args, **kwargs)
        return "triton", None

    yield call
    integration = importlib.import_module("qla.integrations.fla")
    integration.disable()


def test_fla_finds_flash_qla_by_itself(fla) -> None:
    inputs = Device("cpu").inputs(70, dtype=torch.bfloat16, k_dim=128, v_dim=128)
    name, (o, ht) = fla(**inputs, output_final_state=True)
    want = qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert name == "flash_qla" and torch.equal(o, want[0]) and torch.equal(ht, want[1])


def test_fla_backend_of_our_own(fla, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashQLABackend, "hopper", False)  # what ours refuses goes on to Triton, not to the original's backend
    integration = importlib.import_module("qla.integrations.fla")
    inputs = device.inputs(100)
    raw = {**inputs, "A_log": torch.zeros(4, device=device.name), "dt_bias": torch.zeros(4, device=device.name)}
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    assert fla(**raw, **options)[0] == "triton"
    integration.enable()
    integration.enable()
    do, dht = upstream(inputs)

    def through_fla(**kwargs):
        name, result = fla(**kwargs)
        assert name == "qla"
        return result

    assert_close(run(raw, do, dht, fn=through_fla, **options), reference(raw, do, dht, **options), device.dtype, 10)
    for refused in ({"cp_context": object()}, {"chunk_size": 17}, {"head_first": False}, {"novel": 1}, {"cu_seqlens": [0, 100]}):
        assert fla(**inputs, **refused)[0] != "qla"
    assert fla(**inputs, chunk_size=32)[0] == "qla"
    with pytest.warns(DeprecationWarning):
        assert fla(**{**inputs, "initial_state": None}, transpose_state_layout=True)[0] == "qla"
    integration.disable()
    assert fla(**raw, **options)[0] == "triton"


def test_fla_backend_off_by_environment(fla, monkeypatch: pytest.MonkeyPatch) -> None:
    integration = importlib.import_module("qla.integrations.fla")
    integration.enable()
    inputs = Device("cpu").inputs(70)
    assert fla(**inputs)[0] == "qla"
    monkeypatch.setenv("FLA_QLA", "0")
    assert fla(**inputs)[0] == "triton"
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
        integration.enable()
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH")


def test_fla_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    integration = importlib.import_module("qla.integrations.fla")
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="expected flash-linear-attention"):
        integration.enable()


# ---- FlashInfer's call -----------------------------------------------------------------------------------------------


def as_flashinfer(x: dict[str, torch.Tensor], cu: torch.Tensor) -> dict[str, torch.Tensor]:
    packed = {n: y[0] for n, y in x.items() if n != "initial_state"}
    packed["g"] = packed["g"].exp()
    return {**packed, "initial_state": x["initial_state"].transpose(-1, -2).contiguous(), "cu_seqlens": cu.long()}


def test_flashinfer_call(device: Device) -> None:
    """Packed tensors, linear gates (a 0 among them), V-first states, tensors to write into: the numbers of our own call, bit for bit."""
    from qla.integrations.flashinfer import chunk_gated_delta_rule as theirs

    cu = device.cu(0, 100, 100, 300)
    x = device.inputs(300, (2, 4), sequences=3)
    x["g"][:, 150, 1] = -torch.inf
    given = as_flashinfer(x, cu)
    ours = {**x, "g": given["g"].log()[None], "initial_state": given["initial_state"]}
    o, state = qla.chunk_gated_delta_rule(**ours, cu_seqlens=cu, output_final_state=True, state_v_first=True)
    output, output_state = torch.full_like(o[0], torch.nan), torch.full_like(state, torch.nan)
    got = theirs(**given, output_final_state=True, output=output, output_state=output_state, max_seqlen=200)
    assert got[0] is output and got[1] is output_state
    assert torch.equal(output, o[0]) and torch.equal(output_state, state)
    alone = theirs(**{n: y.requires_grad_(y.is_floating_point()) for n, y in given.items()}, scale=0.0)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o[0]) and not alone.requires_grad
    logs = theirs(**{**given, "g": x["g"][0]}, gate_domain="log")
    assert relative_l2(logs.float(), o[0].float()) < LIMITS[device.dtype][0]


def test_flashinfer_call_of_a_server(device: Device) -> None:
    """A pool in place, checkpoints, logits, a raw gate, no gates at all, queries that share a key."""
    from qla.integrations.flashinfer import chunk_gated_delta_rule as theirs

    cu = device.cu(0, 130, 300)
    x = device.inputs(300, (2, 4), sequences=2)
    given = as_flashinfer(x, cu)
    want, state = theirs(**given, output_final_state=True)
    pool = torch.zeros(5, *state.shape[1:], device=state.device)
    slots = device.tensor([3, 1])
    pool[slots.long()] = given["initial_state"].float()
    points = torch.full((2 + 2, *state.shape[1:]), torch.nan, device=state.device)
    o, written = theirs(
        **{**given, "initial_state": pool},
        output_final_state=True,
        output_state=pool,
        state_indices=slots,
        state_checkpoints=points,
        checkpoint_every_n_tokens=64,
        checkpoint_cu_starts=device.cu(0, 2, 4),
    )
    # checkpoints choose another form on CUDA, which rounds elsewhere: bit for bit only against our own call with the same arguments
    same = {n: y for n, y in given.items() if n not in ("initial_state", "cu_seqlens", "g")}
    ours, ours_pool, ours_points = torch.empty_like(o), torch.zeros_like(pool), torch.zeros_like(points)
    ours_pool[slots.long()] = given["initial_state"].float()
    qla.chunk_gated_delta_rule(
        **{n: y[None] for n, y in same.items()},
        g=given["g"].log()[None],
        initial_state=ours_pool,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=given["cu_seqlens"],
        out=ours[None],
        state_indices=slots,
        checkpoint_every_n_tokens=64,
        state_checkpoints=ours_points,
    )
    assert written is pool and torch.equal(o, ours) and torch.equal(pool, ours_pool) and torch.equal(points, ours_points)
    limit = LIMITS[device.dtype][0]
    assert relative_l2(o.float(), want.float()) < limit and relative_l2(pool[slots.long()], state.float()) < limit
    assert not points.isnan().any() and not pool[[0, 2, 4]].any()

    logits = torch.logit(given["beta"].float().clamp(1e-3, 1 - 1e-3))
    raw = {**given, "beta": logits, "g": torch.randn_like(logits)}
    a_log, dt_bias = torch.rand(4, device=state.device), torch.randn(4, device=state.device)
    fused = theirs(**raw, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias, beta_is_logit=True)
    alpha = (-a_log.exp() * torch.nn.functional.softplus(raw["g"] + dt_bias)).exp()
    plain = theirs(**{**given, "beta": logits.sigmoid(), "g": alpha})
    assert relative_l2(fused.float(), plain.float()) < LIMITS[device.dtype][0]

    bare = {n: given[n] for n in ("q", "k", "v", "cu_seqlens")}
    ones = torch.ones_like(logits)
    assert relative_l2(theirs(**bare).float(), theirs(**bare, g=ones, beta=ones).float()) < limit
    wide = {
        **given,
        "q": torch.cat((given["q"], given["q"].flip(1)), 1),
        "v": given["v"][:, :2].clone(),
    }  # 4 queries, 2 keys and values
    each = {**wide, "k": wide["k"].repeat_interleave(2, 1), "v": wide["v"].repeat_interleave(2, 1)}
    assert torch.equal(theirs(**wide), theirs(**each))


def test_flashinfer_call_refuses_what_it_cannot() -> None:
    from qla.integrations.flashinfer import chunk_gated_delta_rule as theirs

    x = torch.zeros(64, 2, 128)
    cu = torch.tensor([0, 64])
    state = torch.zeros(1, 2, 128, 128)
    for said, wrong in (
        ("cu_seqlens", {"cu_seqlens": None}),
        ("q: expected packed", {"q": x[None]}),
        ("backend", {"backend": "cudnn"}),
        ("prefix_lens", {"prefix_lens": cu}),
        ("gate_domain", {"gate_domain": "log2"}),
        ("A_log", {"use_gate_in_kernel": True}),
        ("output_state", {"state_indices": torch.tensor([0]), "initial_state": state, "output_state": state.clone()}),
        ("initial_state", {"state_indices": torch.tensor([0])}),
        ("output_state: expected shape", {"output_final_state": True, "output_state": state[:, :1]}),
        ("output_state: expected dtype", {"output_final_state": True, "output_state": state.int()}),
        (r"output: expected shape \[T, max\(Hq, Hv\), V\] = \[64, 2, 128\]", {"output": x[None]}),
        ("output: expected dtype", {"output": x.half()}),
        ("checkpoint_every_n_tokens", {"state_checkpoints": state}),
        ("g: expected a torch.Tensor", {"g": 0.9}),
        (r"g: expected shape .* got \[1, 64, 2\]", {"g": x[None, ..., 0]}),
        ("beta: expected a torch.Tensor", {"beta": [1.0]}),
        ("v: expected 64 tokens", {"v": x[:9]}),
        ("v: expected Hv a multiple", {"v": x[:, :1]}),
        ("k: expected Hv a multiple", {"k": x[:, :1]}),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=said):
            theirs(**{"q": x, "k": x, "v": x, "cu_seqlens": cu, **wrong})
