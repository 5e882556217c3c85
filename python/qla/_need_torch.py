"""Imported before torch by the modules that need it: says what to install where it is missing."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "torch: expected PyTorch 2.6 or newer for the operators, found none; pip install torch numpy "
        "(the C library, `qla info` and `qla plan` work without it)",
        name="torch",
    )
