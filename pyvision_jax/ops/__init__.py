"""Operations shared by all models; each has one entry point."""

from pyvision_jax.ops._compat import top_values
from pyvision_jax.ops.attention import Mask, attention, cache_mask, group_mask, key_mask, packed_mask
from pyvision_jax.ops.linear import linear
from pyvision_jax.ops.logprobs import token_logprobs
from pyvision_jax.ops.norm import rms_norm
from pyvision_jax.ops.rope import grid_angles, mrope_angles, rotate

__all__ = [
    "Mask",
    "attention",
    "cache_mask",
    "grid_angles",
    "group_mask",
    "key_mask",
    "linear",
    "mrope_angles",
    "packed_mask",
    "rms_norm",
    "rotate",
    "token_logprobs",
    "top_values",
]
