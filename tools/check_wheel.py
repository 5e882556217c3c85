"""Run by `./dev wheel` in a clean environment from another directory: the wheel imports, answers, and has no stray needs."""

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import flash_qla
import qla

assert "torch" not in sys.modules, "import qla pulled torch in"
assert importlib.util.find_spec("torch") is None, "the clean environment has torch"
package = Path(qla.__path__[0])
assert package.is_relative_to(sys.prefix), f"{package} is not the installed wheel"
for module in (qla, flash_qla):  # the operator needs torch, and says so; nothing else does
    try:
        module.chunk_gated_delta_rule  # noqa: B018
    except ImportError as missing:
        assert "torch" in str(missing), missing
    else:
        raise AssertionError(f"{module.__name__} found a torch that is not there")
(library,) = package.glob("lib/libqla.so")
lib = ctypes.CDLL(str(library))
lib.qla_version.restype = ctypes.c_char_p
assert lib.qla_version().decode() == qla.__version__, (lib.qla_version(), qla.__version__)
needed = {
    line.split()[-1].strip("[]")
    for line in subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout.splitlines()
    if "(NEEDED)" in line
}
system = {
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
assert needed <= system, f"libqla.so needs {sorted(needed - system)}, which a machine may not have"
assert (package / "include/qla/qla.h").exists() and (package / "py.typed").exists()
print(f"wheel: qla {qla.__version__}, libqla.so needs only {', '.join(sorted(needed))}")
