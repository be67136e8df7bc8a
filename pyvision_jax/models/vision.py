"""The vision tower of Qwen2.5-VL: patch embedding, windowed and full-attention blocks with 2-D RoPE, merger.

It works on the slot order of VisionBatch: a window is a row of s slots, so windowed attention is plain attention over
[n * w, s] and full attention is attention over [n, w * s] inside one frame.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from pyvision_jax.data.batch import VisionBatch
from pyvision_jax.models.config import VISION_NORM_EPS, VISION_ROPE_THETA, VisionConfig
from pyvision_jax.models.spec import Spec
from pyvision_jax.ops import Mask, attention, grid_angles, group_mask, key_mask, linear, rms_norm, rotate
from pyvision_jax.parallel import shard


@struct.dataclass
class VisionBlock:
    """One layer of the tower."""

    norm1: Any  # [d]
    qkv: Any  # [d, 3, n, h]
    qkv_bias: Any  # [3, n, h]
    proj: Any  # [n, h, d]
    proj_bias: Any  # [d]
    norm2: Any  # [d]
    gate: Any  # [d, f]
    gate_bias: Any  # [f]
    up: Any  # [d, f]
    up_bias: Any  # [f]
    down: Any  # [f, d]
    down_bias: Any  # [d]


@struct.dataclass
class Merger:
    """Four neighbouring patches -> one token of the decoder."""

    norm: Any  # [d]
    fc1: Any  # [4 d, 4 d]
    fc1_bias: Any  # [4 d]
    fc2: Any  # [4 d, out]
    fc2_bias: Any  # [out]


@struct.dataclass
class Vision:
    patch_embed: Any  # [c, d]; c in the order channel, frame, row, column
    blocks: tuple[VisionBlock, ...]
    merger: Merger


def vision_specs(cfg: VisionConfig) -> Vision:
    d, f, n = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads
    h, m = d // n, cfg.merge_size**2 * d
    block = VisionBlock(
        norm1=Spec((d,), (None,), "ones"),
        qkv=Spec((d, 3, n, h), ("embed", None, "heads", None)),
        qkv_bias=Spec((3, n, h), (None, "heads", None), "zeros"),
        proj=Spec((n, h, d), ("heads", None, "embed")),
        proj_bias=Spec((d,), (None,), "zeros"),
        norm2=Spec((d,), (None,), "ones"),
        gate=Spec((d, f), ("embed", "mlp")),
        gate_bias=Spec((f,), ("mlp",), "zeros"),
        up=Spec((d, f), ("embed", "mlp")),
        up_bias=Spec((f,), ("mlp",), "zeros"),
        down=Spec((f, d), ("mlp", "embed")),
        down_bias=Spec((d,), (None,), "zeros"),
    )
    return Vision(
        patch_embed=Spec((cfg.patch_features, d), (None, "embed")),
        blocks=(block,) * cfg.depth,
        merger=Merger(
            norm=Spec((d,), (None,), "ones"),
            fc1=Spec((m, m), ("embed", "mlp")),
            fc1_bias=Spec((m,), ("mlp",), "zeros"),
            fc2=Spec((m, cfg.out_hidden_size), ("mlp", "embed")),
            fc2_bias=Spec((cfg.out_hidden_size,), (None,), "zeros"),
        ),
    )


def _block(
    x: Array, p: VisionBlock, angles: tuple[Array, Array], mask: Mask, cfg: VisionConfig, implementation: str
) -> Array:
    """x [r, p, d]: r rows of patches that attend among themselves."""
    y = rms_norm(x, p.norm1, VISION_NORM_EPS)
    qkv = jnp.split(linear(y, p.qkv) + p.qkv_bias, 3, axis=2)  # its gradient is one concatenation
    q, k, v = (jnp.swapaxes(jnp.squeeze(part, 2), 1, 2) for part in qkv)  # [r, n, p, h]
    a = attention(rotate(q, angles), rotate(k, angles), v, mask, implementation=implementation)
    x = x + linear(jnp.swapaxes(a, 1, 2).reshape(x.shape), p.proj.reshape(-1, x.shape[-1])) + p.proj_bias
    y = rms_norm(x, p.norm2, VISION_NORM_EPS)
    gate = linear(y, p.gate) + p.gate_bias
    up = linear(y, p.up) + p.up_bias
    return x + linear(jax.nn.silu(gate) * up, p.down) + p.down_bias


@jax.named_scope("vision")
def encode_images(
    params: Vision, batch: VisionBatch, cfg: VisionConfig, remat: str = "none", implementation: str = "xla"
) -> Float[Array, "m out"]:
    """Merged tokens of all pictures in slot order, m = n * w * s // 4; those of padding slots mean nothing.

    Where they stand in reading order: `token_index` of `models.vision_layout`. remat as in `text.forward`.
    """
    n, w, s, _ = batch.patches.shape
    d = cfg.hidden_size
    dtype = params.patch_embed.dtype
    head = d // cfg.num_heads
    full_only = w == 1  # one window each: both kinds of layer see the same rows (a window never spans two frames)

    def by_window(x: Array) -> Array:
        return x.reshape(n * w, s, *x.shape[3:])

    def by_picture(x: Array) -> Array:
        return x.reshape(n, w * s, *x.shape[3:])

    windowed = (
        grid_angles(by_window(batch.rows), by_window(batch.cols), head, VISION_ROPE_THETA),
        key_mask(by_window(batch.valid)),
    )
    full = windowed
    if not full_only:
        full = (
            grid_angles(by_picture(batch.rows), by_picture(batch.cols), head, VISION_ROPE_THETA),
            group_mask(by_picture(batch.frames), by_picture(batch.valid)),
        )

    def layer(x: Array, p: VisionBlock, angles: tuple[Array, Array], mask: Mask) -> Array:
        return _block(x, p, angles, mask, cfg, implementation)

    if remat == "block":
        layer = jax.checkpoint(layer)

    x = linear(batch.patches.astype(dtype), params.patch_embed)
    x = shard(x, "batch", None, None, None)
    for i, p in enumerate(params.blocks):
        with jax.named_scope(f"layer_{i}"):
            if i in cfg.fullatt_blocks:
                x = layer(x.reshape(n, w * s, d), p, *full)
            else:
                x = layer(x.reshape(n * w, s, d), p, *windowed)
            x = shard(x.reshape(n, w, s, d), "batch", None, None, None)
    x = rms_norm(x, params.merger.norm, VISION_NORM_EPS).reshape(n * w * s // 4, 4 * d)
    x = jax.nn.gelu(x @ params.merger.fc1 + params.merger.fc1_bias, approximate=False)
    return x @ params.merger.fc2 + params.merger.fc2_bias
