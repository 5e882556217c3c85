"""How many fp32 FLOP one core does in AVX2 fused multiply-adds: the yardstick beside which `qla bench` prints its own rate.

A loop of ten independent `vfmadd231ps` on registers alone, written as machine code, so that neither a compiler nor a
BLAS library stands between the figure and the core. Where that cannot run (another processor, a system that maps no
executable memory) a single-threaded matrix product of torch takes its place, and the answer says so.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import time
from pathlib import Path

ACCUMULATORS = 10  # latency 4 x 2 issue ports needs at least 8
FLOP_A_TURN = ACCUMULATORS * 8 * 2


def machine_code() -> bytes:
    """void loop(uint64_t turns): rdi counts down; ymm0..9 += ymm10 * ymm10, all zero."""
    vzeroall = bytes([0xC5, 0xFC, 0x77])
    body = b""
    for register in range(ACCUMULATORS):
        # VEX.256.66.0F38.W0 B8 /r: destination in reg, ymm10 in vvvv and in rm (its high bit is B, inverted)
        high = 0x42 if register >= 8 else 0xC2
        body += bytes([0xC4, high, 0x2D, 0xB8, 0xC0 | (register & 7) << 3 | 2])
    body += bytes([0x48, 0xFF, 0xCF])  # dec rdi
    jump = bytes([0x0F, 0x85]) + struct.pack("<i", -(len(body) + 6))  # jnz to the body's start
    return vzeroall + body + jump + vzeroall + bytes([0xC3])


def core_has_avx2_fma() -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        return False
    return "avx2" in flags and "fma" in flags


def measure(seconds: float = 0.4) -> tuple[float, str]:
    """-> (GFLOP/s of one core, how it was measured); the best of many short runs."""
    if core_has_avx2_fma():
        try:
            page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        except OSError:
            return torch_rate(seconds)
        page.write(machine_code())
        anchor = ctypes.c_char.from_buffer(page)
        loop = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(anchor))
        turns, best, end = 2_000_000, 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            loop(turns)
            best = max(best, turns * FLOP_A_TURN / (time.perf_counter() - start))
        del loop, anchor
        page.close()
        return best / 1e9, "AVX2 FMA loop"
    return torch_rate(seconds)


def torch_rate(seconds: float) -> tuple[float, str]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.randn(768, 768)
        best, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            a @ a
            best = max(best, 2 * 768**3 / (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    return best / 1e9, "torch matrix product, one thread"
