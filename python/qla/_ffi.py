"""The C ABI (`include/qla/qla.h`) through ctypes. Needs neither torch nor numpy and does nothing at import."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_void_p

OK, INVALID_ARGUMENT, NOT_SUPPORTED, CUDA_ERROR, OUT_OF_MEMORY, INTERNAL_ERROR = range(6)
FLOAT64, FLOAT32, BFLOAT16, FLOAT16, INT32, INT64, BOOL8, UINT8 = range(8)
BACKEND_AUTO, BACKEND_CPU, BACKEND_CUDA = range(3)

FLAG_QK_L2NORM = 1 << 0
FLAG_RAW_GATE = 1 << 1
FLAG_BETA_SIGMOID = 1 << 2
FLAG_NEG_EIGVAL = 1 << 3
FLAG_STATE_V_FIRST = 1 << 4
FLAG_BATCH_INVARIANT = 1 << 5
FLAG_VALIDATE = 1 << 6

CP_AUTO, CP_EXACT, CP_OFF, CP_FIXED, CP_PLAN = range(5)
START_ZERO, START_INITIAL, START_WARMUP, START_MERGED = range(4)


class Tensor(ctypes.Structure):
    """qla_tensor: a view; strides in elements; data NULL means absent."""

    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("ndim", c_int32), ("shape", c_int64 * 4), ("stride", c_int64 * 4)]


def _tensors(*names: str) -> list[tuple[str, type]]:
    return [(name, Tensor) for name in names]


_HEAD: list[tuple[str, type]] = [
    ("struct_size", c_size_t),
    ("backend", c_int32),
    ("device", c_int32),
    ("stream", c_void_p),
    ("workspace", c_void_p),
    ("workspace_bytes", c_size_t),
    ("num_threads", c_int32),
    ("flags", c_uint32),
    ("scale", c_double),
]
_TAIL: list[tuple[str, type]] = [
    ("cp_mode", c_int32),
    ("cp_uncut_chunks", c_int32),
    ("cp_segment_chunks", c_int64),
    ("cp_warmup_threshold", c_double),
]


class ForwardArgs(ctypes.Structure):
    """qla_gdn_forward_args."""

    _fields_ = (
        _HEAD
        + _tensors("q", "k", "v", "g", "beta", "initial_state", "final_state", "o", "cu_seqlens", "A_log", "dt_bias")
        + _tensors("state_indices", "has_initial_state", "state_checkpoints")
        + [("checkpoint_every_n_tokens", c_int64)]
        + _tensors("a_inv", "a_gated", "g_cumsum", "q_rnorm", "k_rnorm", "h", "saved")
        + _TAIL
    )


class BackwardArgs(ctypes.Structure):
    """qla_gdn_backward_args."""

    _fields_ = (
        _HEAD
        + _tensors("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias", "has_initial_state")
        + _tensors("a_inv", "g_cumsum", "q_rnorm", "k_rnorm", "saved", "d_o", "d_final_state")
        + _tensors("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "ddt_bias")
        + _TAIL
    )


class Segment(ctypes.Structure):
    """qla_segment."""

    _fields_ = [
        ("sequence", c_int64),
        ("head", c_int64),
        ("first_chunk", c_int64),
        ("num_chunks", c_int64),
        ("warmup_chunks", c_int64),
        ("start", c_int32),
        ("reserved0", c_int32),
    ]


class Plan(ctypes.Structure):
    """qla_plan."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("num_sequences", c_int64),
        ("total_chunks", c_int64),
        ("segment_chunks", c_int64),
        ("num_segments", c_int64),
        ("num_items", c_int64),
        ("value_splits", c_int64),
        ("workspace_bytes", c_int64),
        ("predicted_us", c_double),
        ("fused", c_int32),
        ("ranges", c_int32),
        ("segments", ctypes.POINTER(Segment)),
        ("segments_capacity", c_int64),
        ("reason", c_char * 256),
        ("uncut_chunks", c_int64),
    ]


class DeviceInfo(ctypes.Structure):
    """qla_device_info_t."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char * 128),
        ("multiprocessors", c_int32),
        ("capability_major", c_int32),
        ("capability_minor", c_int32),
        ("served", c_int32),
        ("served_backward", c_int32),
        ("kernels", c_char * 64),
        ("reason", c_char * 256),
    ]


# c_void_p for the args structs: _call.py passes the address of an array of 64-bit words.
_PROTOTYPES: dict[str, tuple[type, list[type]]] = {
    "qla_version": (c_char_p, []),
    "qla_build_info": (c_char_p, []),
    "qla_last_error": (c_char_p, []),
    "qla_status_name": (c_char_p, [c_int32]),
    "qla_cpu_level": (c_char_p, []),
    "qla_device_count": (c_int32, [c_void_p]),
    "qla_device_info": (c_int32, [c_int32, c_void_p]),
    "qla_prepare": (c_int32, [c_int32]),
    "qla_gdn_forward_check": (c_int32, [c_void_p]),
    "qla_gdn_backward_check": (c_int32, [c_void_p]),
    "qla_gdn_forward_workspace": (c_int32, [c_void_p, c_void_p]),
    "qla_gdn_forward_workspace_range": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "qla_gdn_forward_saved": (c_int32, [c_void_p, c_void_p]),
    "qla_gdn_backward_workspace": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "qla_gdn_forward": (c_int32, [c_void_p]),
    "qla_gdn_backward": (c_int32, [c_void_p]),
    "qla_gdn_plan": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "qla_plan_print": (c_int32, [c_void_p, c_char_p, c_size_t, c_void_p]),
}

_library: ctypes.CDLL | None = None
_load_lock = threading.Lock()


def candidates() -> list[str]:
    """Where libqla.so is looked for, in this order: QLA_LIBRARY alone if set, else lib/ of every folder of the package. Absolute: the
    loader would look for a name without a slash on its own path."""
    named = os.environ.get("QLA_LIBRARY")
    if named:
        return [os.path.abspath(named)]
    import qla  # an editable install has two folders: the sources, and the one with the built library

    return [os.path.join(folder, "lib", "libqla.so") for folder in qla.__path__]


def library_path() -> str | None:
    """The library that lib() loads, None where there is none."""
    return next((path for path in candidates() if os.path.exists(path)), None)


def lib() -> ctypes.CDLL:
    """The loaded library; loads it at the first call. Raises ImportError, which says where it looked."""
    global _library
    if _library is None:
        with _load_lock:
            if _library is None:
                _library = _load()
    return _library


def _load() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        named = "QLA_LIBRARY" if os.environ.get("QLA_LIBRARY") else "the installed package"
        raise ImportError(
            f"libqla.so: expected at {' or '.join(candidates())} (from {named}), found nothing there; install the wheel, "
            "or build the library and set QLA_LIBRARY to its path"
        )
    return open_library(path)


def open_library(path: str) -> ctypes.CDLL:
    """The library at a path, its prototypes set; a copy of the file under another name is another instance."""
    try:
        library = ctypes.CDLL(path)
        for name, (restype, argtypes) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype = restype
            function.argtypes = argtypes
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path}: expected the FlashQLA library of this package, got: {error}; rebuild or reinstall it"
        ) from error
    return library


class QlaError(RuntimeError):
    """A failure of the device or the library itself, not of the arguments."""


class NotSupportedError(NotImplementedError, ValueError):
    """Valid arguments for which this backend or device has no kernel; the message lists what there is."""


def last_error() -> str:
    """The message of this thread's last failing call."""
    return lib().qla_last_error().decode("utf-8", "replace")


def error_for(status: int) -> Exception:
    """The exception for a status that is not OK, with the library's message."""
    message = last_error() or lib().qla_status_name(status).decode()
    if status == INVALID_ARGUMENT:
        return ValueError(message)  # wrong types never get here: _checks.py names them as TypeError
    if status == NOT_SUPPORTED:
        return NotSupportedError(message)
    if status == OUT_OF_MEMORY:
        return MemoryError(message)
    return QlaError(f"{lib().qla_status_name(status).decode()}: {message}")


def check(status: int) -> None:
    """Raises what error_for makes of a status that is not OK."""
    if status != OK:
        raise error_for(status)


def version() -> str:
    return lib().qla_version().decode()


def build_info() -> str:
    """One line: compiler, CUDA targets, CPU instruction level."""
    return lib().qla_build_info().decode()


def cpu_level() -> str:
    """The instruction set in use on the CPU."""
    return lib().qla_cpu_level().decode()


def device_count() -> int:
    """CUDA devices that the library sees; 0 without a driver."""
    count = c_int32(0)
    check(lib().qla_device_count(ctypes.byref(count)))
    return count.value


def device_info(device: int) -> DeviceInfo:
    """Name, capability and which kernels serve a CUDA device (reason says why none does)."""
    info = DeviceInfo(struct_size=ctypes.sizeof(DeviceInfo))
    check(lib().qla_device_info(device, ctypes.byref(info)))
    return info
