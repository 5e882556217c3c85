"""FlashQLA: the gated delta rule in chunks, forward and backward, on CPUs and Hopper GPUs.

`import qla` needs neither torch nor the library and initialises nothing; the PyTorch side loads at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qla._plan import Plan, Segment, plan
    from qla.api import NotSupportedError, QlaError, can_implement, chunk_gated_delta_rule

__version__ = "0.1.0"

__all__ = [
    "NotSupportedError",
    "Plan",
    "QlaError",
    "Segment",
    "__version__",
    "can_implement",
    "chunk_gated_delta_rule",
    "plan",
]

_HOME = {
    "chunk_gated_delta_rule": "qla.api",
    "can_implement": "qla.api",
    "NotSupportedError": "qla.api",
    "QlaError": "qla.api",
    "Plan": "qla._plan",
    "Segment": "qla._plan",
    "plan": "qla._plan",
}
_SUBMODULES = ("api", "integrations", "ops", "testing")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"qla.{name}")
    else:
        raise AttributeError(f"module 'qla' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
