"""Decorators and tables that callers of the original use around its functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
CACHE_SIZE = 4


def input_guard(fn: F) -> F:
    """Makes every tensor argument contiguous and the first one's CUDA device current."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        plain_args = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
        plain_kwargs = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        guard = torch.cuda.device(first.device) if first is not None and first.is_cuda else contextlib.nullcontext()
        with guard:
            return fn(*plain_args, **plain_kwargs)

    return wrapper  # type: ignore[return-value]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def tensor_cache(fn: F) -> F:
    """Keeps the last four results, found again by the identity of the arguments (a tensor edited in place gives the old result). Results that
    a CUDA graph was captured with are kept for ever; a miss while one is captured is an error."""
    entries: list[tuple[tuple[Any, ...], dict[str, Any], Any, bool]] = []

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        capturing = _capturing()
        for i, (old_args, old_kwargs, result, pinned) in enumerate(entries):
            if len(args) != len(old_args) or kwargs.keys() != old_kwargs.keys():
                continue
            if all(a is b for a, b in zip(args, old_args)) and all(x is old_kwargs[name] for name, x in kwargs.items()):
                entries.append((*entries.pop(i)[:3], pinned or capturing))
                return result
        if capturing:
            raise RuntimeError(
                f"{fn.__name__}: expected a cached result while a CUDA graph is captured, got new arguments; call it once before"
            )
        result = fn(*args, **kwargs)
        loose = [i for i, entry in enumerate(entries) if not entry[3]]
        if len(loose) >= CACHE_SIZE:
            entries.pop(loose[0])
        entries.append((args, kwargs, result, False))
        return result

    return wrapper  # type: ignore[return-value]


@tensor_cache
def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Lengths of the sequences."""
    return torch.diff(cu_seqlens)


@tensor_cache
def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """[chunks, 2]: sequence and index in it of every chunk. Synchronises."""
    counts = [-(-int(n) // chunk_size) for n in prepare_lens(cu_seqlens).tolist()]
    pairs = [(n, c) for n, count in enumerate(counts) for c in range(count)]
    return torch.tensor(pairs, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)


@tensor_cache
def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> tuple[Tensor, int]:
    """([N + 1] first chunk of every sequence, number of chunks). Synchronises."""
    counts = (torch.diff(cu_seqlens) + chunk_size - 1) // chunk_size
    offsets = torch.zeros_like(cu_seqlens)
    offsets[1:] = torch.cumsum(counts, dim=0)
    return offsets, int(offsets[-1].item())
