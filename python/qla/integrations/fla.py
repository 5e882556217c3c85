"""`enable()`: flash-linear-attention's `chunk_gated_delta_rule` computes with `qla` wherever `qla` can.

FLA finds our `flash_qla` package by itself, but asks it only for what the original could do. This registers a backend of its own in FLA's
registry, at a better priority, which also takes the raw gate, beta logits, other head sizes and types, and the CPU. What `qla` refuses goes on
to the next backend. FLA_QLA=0 turns it off.
"""

from __future__ import annotations

import os
from typing import Any

OPERATION = "gated_delta_rule"
NAME = "qla"
KEYWORDS = ("use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout", "chunk_size")


def _verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    import torch

    from qla.api import can_implement

    kwargs = dict(kwargs)
    if kwargs.get("cp_context") is not None:
        return False, "qla does not support context parallelism over several devices"
    if "head_first" in kwargs:
        return False, "head_first was removed"
    chunk_size = kwargs.pop("chunk_size", 64)
    if chunk_size not in (16, 32, 64):
        return False, f"chunk_size must be 16, 32, or 64, got {chunk_size}"
    unknown = sorted(set(kwargs) - set(KEYWORDS) - _known())
    if unknown:
        return False, f"qla does not know {', '.join(unknown)}"
    served, reason = can_implement(*args, **kwargs, needs_grad=_wants_grad(args, kwargs) and torch.is_grad_enabled())
    return served, None if served else reason


def _wants_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(getattr(x, "requires_grad", False) for x in (*args, *kwargs.values()))


def _known() -> set[str]:
    from qla.api import _SIGNATURE

    return set(_SIGNATURE.parameters)


def _make_backend(base: type) -> Any:
    class QlaBackend(base):  # type: ignore[misc]
        """FlashQLA through its own interface."""

        backend_type = NAME
        package_name = "qla"
        env_var = "FLA_QLA"
        default_enable = True
        priority = 2  # FLA asks flash_qla at 3

        def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _verify(*args, **kwargs)

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
            from qla.api import chunk_gated_delta_rule

            kwargs.pop("chunk_size", None)  # our chunks are our own
            return chunk_gated_delta_rule(*args, **kwargs)

    return QlaBackend()


def _registry() -> tuple[Any, type]:
    try:
        from fla.ops.backends import BackendRegistry, BaseBackend
    except Exception as error:  # FLA raises more than ImportError where Triton is missing
        raise ImportError(
            f"qla.integrations.fla: expected flash-linear-attention with fla.ops.backends (0.5.2 or later), got: {error}; install or update it"
        ) from error
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError(
            "qla.integrations.fla: expected FLA's dispatch to be on, got FLA_DISABLE_BACKEND_DISPATCH=1; unset it before fla is imported"
        )
    BackendRegistry.ensure_initialized(OPERATION)
    registry = BackendRegistry._registries.get(OPERATION)
    if registry is None:
        raise RuntimeError(
            f"qla.integrations.fla: expected FLA to have backends for {OPERATION}, got none; use FLA 0.5.2 or later"
        )
    return registry, BaseBackend


def enable() -> None:
    """Registers the backend; again is harmless."""
    registry, base = _registry()
    if NAME not in registry._backends:
        registry.register(_make_backend(base))


def disable() -> None:
    """Takes the backend out of FLA's registry."""
    registry, _ = _registry()
    if registry._backends.pop(NAME, None) is not None:
        registry._active = None
        registry._update_active_backend()
