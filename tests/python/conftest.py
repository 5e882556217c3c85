"""Fixtures of the torch-side tests: the device, and NaN in everything the library is about to write."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if os.environ.get("QLA_LIBRARY"):  # tests start processes in other folders
    os.environ["QLA_LIBRARY"] = os.path.abspath(os.environ["QLA_LIBRARY"])
if importlib.util.find_spec("qla") is None:  # run from the sources
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from common import Device
from poison_shared import poison_shared
from qla import _call, _ffi


def _cuda_served() -> bool:
    return torch.cuda.is_available() and _ffi.device_count() > 0 and bool(_ffi.device_info(0).served)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    wanted = os.environ.get("QLA_TEST_DEVICE")
    names = [wanted] if wanted else ["cpu"] + (["cuda"] if _cuda_served() else [])
    metafunc.parametrize("device", [Device(name) for name in names], ids=names)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, scratch and shared memory begin as NaN (recipe BR-88): what is not written shows."""
    plain_empty, plain_workspace = _call._empty_of, _call._workspace

    def empty_of(cuda):
        allocate = plain_empty(cuda)

        def empty(*args):
            x = allocate(*args)
            x.fill_(float("nan")) if x.is_floating_point() else x.fill_(255)
            poison_shared(x)  # last: what runs next is the library's
            return x

        return empty

    def workspace(words, nbytes, cuda):
        space = plain_workspace(words, nbytes, cuda).fill_(255)
        poison_shared(space)
        return space

    monkeypatch.setattr(_call, "_empty_of", empty_of)
    monkeypatch.setattr(_call, "_workspace", workspace)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
