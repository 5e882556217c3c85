"""L2 normalisation of the last dimension: y = x / sqrt(sum x^2 + eps), in float32 inside, the input's type outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _last_dim(x: Tensor, dim: int) -> None:
    if dim not in (-1, x.dim() - 1):
        raise ValueError(f"dim: expected the last dimension, -1 or {x.dim() - 1}, got {dim}; transpose the tensor")


def l2norm_fwd(x: Tensor, eps: float = 1e-6, dim: int = -1) -> tuple[Tensor, Tensor]:
    """-> (y, rstd): y in x's type, rstd without the last dimension, float32 (float64)."""
    _last_dim(x, dim)
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().sum(-1) + eps)
    return (wide * rstd.unsqueeze(-1)).to(x.dtype), rstd


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6, dim: int = -1) -> Tensor:
    """The gradient with respect to x, in dy's type, from what l2norm_fwd returned."""
    _last_dim(dy, dim)
    y_wide, dy_wide = _wide(y), _wide(dy)
    dot = (dy_wide * y_wide).sum(-1, keepdim=True)
    return ((dy_wide - dot * y_wide) * rstd.reshape(*dy.shape[:-1], 1)).to(dy.dtype)


class L2NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        y, rstd = l2norm_fwd(x, eps)
        ctx.save_for_backward(y, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        y, rstd = ctx.saved_tensors
        return l2norm_bwd(y, rstd, dy, ctx.eps), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(sum x^2 + eps), differentiable once."""
    return L2NormFunction.apply(x, eps)
