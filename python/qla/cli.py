"""The command `qla`: info, selftest, bench, plan, demo. Each subcommand imports what it needs only when it is called."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    import qla
    from qla import bench, calibrate, demo, planview, selftest

    top = argparse.ArgumentParser(
        prog="qla",
        description="FlashQLA: Gated Delta Net chunked prefill, forward and backward",
        epilog="`qla COMMAND --help` lists a command's options",
    )
    top.add_argument("--version", action="version", version=f"qla {qla.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    commands.add_parser("info", help="backends, instruction set, devices and why one is not served, which flash_qla is imported")
    for name, module, text in (
        (
            "selftest",
            selftest,
            "checks this installation against the float64 token recurrence, for two minutes unless --seconds says otherwise",
        ),
        ("bench", bench, "speed, share of the hardware's limit, ratio to others"),
        ("calibrate", calibrate, "measures the planner's constants on this GPU, in seconds, and writes them for QLA_COSTS"),
        ("plan", planview, "how given sequences are cut into work items; prints, draws"),
        ("demo", demo, "trains a small Qwen3-Next model with our operator and compares with transformers' torch code"),
    ):
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--heads" in words[:-1]:  # 2 8, or 2,8 as the tables write them
        at = words.index("--heads") + 1
        words[at : at + 1] = words[at].split(",")
    if "--log-decay" in words:  # argparse takes -inf and -1e-3 for options, unless a blank comes first
        at = words.index("--log-decay") + 1
        while at < len(words) and is_number(words[at]):
            words[at] = " " + words[at]
            at += 1
    top = parser()
    args = top.parse_args(words)
    if args.command is None:
        top.print_help(sys.stderr)
        return 2
    try:
        if args.command == "info":
            return info()
        from qla import bench, calibrate, demo, planview, selftest

        return {"selftest": selftest, "bench": bench, "calibrate": calibrate, "plan": planview, "demo": demo}[args.command].main(
            args
        )
    except (ImportError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
        print(f"qla {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"qla {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `qla info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(
            f"qla {args.command}: {error.filename or 'a file'}: {error.strerror or error}; choose another path", file=sys.stderr
        )
        return 2


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def info() -> int:
    import qla
    from qla import _ffi

    print(f"qla        {qla.__version__} in {os.path.dirname(qla.__file__ or '?')}")
    path = _ffi.library_path()
    if path is None:
        print(f"library    none: looked for {' and '.join(_ffi.candidates())}")
        print("           install the wheel, or build it (./dev build) and set QLA_LIBRARY to build/release/libqla.so")
        return 1
    print(f"library    {path}")
    print(f"           {_ffi.build_info()}")
    header = os.path.join(os.path.dirname(os.path.dirname(path)), "include", "qla", "qla.h")
    if os.path.exists(header):  # an installed package; out of the source tree it lies in include/
        print(f"header     {header} (docs/c-api.md says how to compile with it)")
    print(
        f"cpu        instruction level {_ffi.cpu_level()}, {len(os.sched_getaffinity(0))} cores for this process; forward and backward"
    )
    print_devices()
    print_flash_qla()
    print_neighbours()
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("QLA_", "OMP_NUM_THREADS"))]
    print(f"settings   {'  '.join(variables) if variables else 'no QLA_* variable is set (docs/env.md lists them)'}")
    return 0


def print_devices() -> None:
    from qla import _ffi

    count = _ffi.device_count()
    if count == 0:
        build = _ffi.build_info()
        print(
            f"cuda       {'this library was built without CUDA' if 'no CUDA' in build else 'no device, or no driver'}: the CPU serves every call"
        )
    for index in range(count):
        device = _ffi.device_info(index)
        name = device.name.decode(errors="replace")
        capability = f"{device.capability_major}.{device.capability_minor}"
        print(f"cuda:{index}     {name}, compute capability {capability}, {device.multiprocessors} multiprocessors")
        if device.served:
            passes = "forward and backward" if device.served_backward else "forward only"
            print(f"           served, {passes}: {device.kernels.decode(errors='replace')}")
        reason = device.reason.decode(errors="replace")
        if reason:
            print(f"           {'note' if device.served else 'not served'}: {reason}")


def print_flash_qla() -> None:
    """Another package may have the same name: say which one `import flash_qla` finds."""
    import qla

    found = importlib.util.find_spec("flash_qla")
    if found is None or not found.origin:
        print("flash_qla  not importable: our package of that name is not installed beside qla")
        return
    ours = os.path.dirname(os.path.dirname(os.path.realpath(found.origin))) in {
        os.path.dirname(os.path.realpath(folder)) for folder in qla.__path__
    }
    print(f"flash_qla  {found.origin} ({'ours' if ours else 'NOT ours: another package of that name comes first on sys.path'})")


def print_neighbours() -> None:
    names = (
        ("torch", "torch"),
        ("numpy", "numpy"),
        ("transformers", "transformers"),
        ("flash-linear-attention", "fla"),
        ("triton", "triton"),
    )
    found = [f"{short} {version}" for name, short in names if (version := installed(name))]
    print(
        f"beside it  {', '.join(found) if found else 'neither torch nor transformers: the C library works, the PyTorch op needs torch'}"
    )
