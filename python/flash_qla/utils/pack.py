"""Between padded batches [N, L, ...] and packed rows [1, T, ...]. These read the boundaries on the host, so they synchronise."""

from __future__ import annotations

import torch
from torch import Tensor


def _boundaries(cu_seqlens: Tensor) -> list[int]:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a torch.Tensor, got {type(cu_seqlens).__name__}; convert it with torch.as_tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(cu_seqlens.shape)}; the boundary 0 comes first")
    return [int(x) for x in cu_seqlens.tolist()]


def unpack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1, T, ...] -> [N, longest, ...], zeros past each sequence's end."""
    if x.shape[0] != 1:
        raise ValueError(f"x: expected batch size 1, got {x.shape[0]}; a packed tensor has one row")
    cu = _boundaries(cu_seqlens)
    if cu[-1] > x.shape[1]:
        raise ValueError(f"cu_seqlens: expected boundaries up to x's {x.shape[1]} tokens, got {cu[-1]}; x is [1, T, ...]")
    longest = max((b - a for a, b in zip(cu, cu[1:])), default=0)
    y = x.new_zeros((len(cu) - 1, longest, *x.shape[2:]))
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        y[n, : b - a] = x[0, a:b]
    return y


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, L, ...] -> [1, cu_seqlens[-1], ...]: the first tokens of each row, one after another."""
    cu = _boundaries(cu_seqlens)
    longest = max((b - a for a, b in zip(cu, cu[1:])), default=0)
    if x.shape[0] < len(cu) - 1 or longest > x.shape[1]:
        raise ValueError(
            f"x: expected [{len(cu) - 1}, {longest} or more, ...] by cu_seqlens, got {list(x.shape)}; a row for each sequence"
        )
    y = x.new_empty((1, cu[-1], *x.shape[2:]))
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        y[0, a:b] = x[n, : b - a]
    return y


def pad_and_reshape(x: Tensor, dim: int, chunk_size: int = 64) -> Tensor:
    """Splits a dimension into [chunks, chunk_size], padding its end with zeros."""
    dim = dim % x.dim()
    missing = -x.shape[dim] % chunk_size
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return padded.reshape(*x.shape[:dim], -1, chunk_size, *x.shape[dim + 1 :])


def fill_last_chunk_of_g(
    g: Tensor, num_tokens: int, cu_seqlens: Tensor | None, chunk_size: int = 64, reverse: bool = False
) -> Tensor:
    """g [N, chunks, chunk_size, ...] in chunks: repeats the last token's value to the end of a part-filled chunk, in place. reverse, its
    adjoint in the original's sense: adds the chunk's last row to the last token's."""
    if cu_seqlens is None:
        ends = [(slice(None), num_tokens)]
    else:
        cu = _boundaries(cu_seqlens)
        ends = [(slice(n, n + 1), b - a) for n, (a, b) in enumerate(zip(cu, cu[1:]))]
    for rows, length in ends:
        chunk = length // chunk_size if cu_seqlens is not None else -1
        filled = length % chunk_size
        if filled == 0:
            continue
        if reverse:
            g[rows, chunk, filled - 1] += g[rows, chunk, -1]
        else:
            g[rows, chunk, filled:] = g[rows, chunk, filled - 1 : filled]
    return g
