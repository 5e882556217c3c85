"""`enable()`: transformers' gated delta net layers (Qwen3-Next, Qwen3.5 and those that share their code) compute with `qla`.

The layers look `torch_chunk_gated_delta_rule` up as a global of their module at every call; enable() replaces it in every such module that is
loaded (and loads the Qwen ones), disable() puts the old function back. Not thread-safe; call it before the first forward.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

FUNCTION = "torch_chunk_gated_delta_rule"
MODULES = (
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
)

_originals: dict[str, Callable[..., Any]] = {}


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    from qla.api import chunk_gated_delta_rule

    @functools.wraps(original)
    def chunk(
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        chunk_size: int = 64,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Any = None,
        seq_idx: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        if seq_idx is not None and cu_seqlens is None:
            raise ValueError(
                "seq_idx: expected together with cu_seq_lens_q, got it alone; pass the boundaries of the packed sequences"
            )
        if cu_seqlens is not None and cu_seqlens.device != query.device:
            cu_seqlens = cu_seqlens.to(query.device)
        return chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )

    chunk.__qla__ = True  # type: ignore[attr-defined]
    return chunk


def _targets() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and callable(getattr(module, "__dict__", {}).get(FUNCTION))
    }


def enable() -> list[str]:
    """Replaces the function in every loaded module that has it. -> the names of these modules. A second call finds modules loaded since."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "qla.integrations.transformers: expected transformers to be installed, got an import error; pip install it"
        ) from error
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:  # not in this version
            continue
    targets = _targets()
    if not targets:
        raise RuntimeError(
            f"qla.integrations.transformers: expected a module of transformers with {FUNCTION}, got none in version "
            f"{transformers.__version__}; use a version that has it (5.17 to 5.24 do) or call qla.chunk_gated_delta_rule in your own layer"
        )
    for name, module in targets.items():
        current = getattr(module, FUNCTION)
        if not getattr(current, "__qla__", False):
            _originals[name] = current
            setattr(module, FUNCTION, _wrap(current))
    return sorted(targets)


def disable() -> None:
    """Puts the functions back that enable() replaced; does nothing where it was not called."""
    for name, original in _originals.items():
        module = sys.modules.get(name)
        if module is not None and getattr(getattr(module, FUNCTION, None), "__qla__", False):
            setattr(module, FUNCTION, original)
    _originals.clear()
