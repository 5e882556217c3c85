"""The original's helpers, in plain torch; they work on every device."""

from qla import _need_torch  # noqa: F401  # isort: skip

from flash_qla.utils.norm import l2norm, l2norm_bwd, l2norm_fwd
from flash_qla.utils.pack import fill_last_chunk_of_g, pack, pad_and_reshape, unpack
from flash_qla.utils.tensors import input_guard, prepare_chunk_indices, prepare_chunk_offsets, prepare_lens, tensor_cache

__all__ = [
    "fill_last_chunk_of_g",
    "input_guard",
    "l2norm",
    "l2norm_bwd",
    "l2norm_fwd",
    "pack",
    "pad_and_reshape",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_lens",
    "tensor_cache",
    "unpack",
]
