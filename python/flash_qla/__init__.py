"""The original FlashQLA's names, argument order and return values on top of `qla`. FLA's dispatch finds this package by its name alone.

`__version__` is the original's version whose surface this is, then ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_qla._chunk import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

__version__ = "0.1.3+qla.0.1.0"

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "chunk_gated_delta_rule_fwd"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in __all__:
        value = getattr(importlib.import_module("flash_qla._chunk"), name)
    elif name in ("ops", "utils"):
        value = importlib.import_module(f"flash_qla.{name}")
    else:
        raise AttributeError(f"module 'flash_qla' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "ops", "utils"})
