"""Rotary positions: sectioned mRoPE of the decoder and the 2-D form of the vision tower."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Angles = tuple[Float[Array, "..."], Float[Array, "..."]]  # cos, sin: [b, 1, t, h/2], float32


def mrope_angles(positions: Int[Array, "3 b t"], head_dim: int, theta: float, sections: tuple[int, ...]) -> Angles:
    """cos and sin, [b, 1, t, h/2] float32: frequency block i of width `sections[i]` turns by position axis `i % 3`.

    Source: Qwen2-VL technical report (M-RoPE); block order as in transformers `modeling_qwen2_5_vl.py`.
    Raises ValueError if the sections do not add up to half of the head.
    """
    if sum(sections) != head_dim // 2:
        raise ValueError(f"mrope_section {sections} adds up to {sum(sections)}, half of head_dim is {head_dim // 2}")
    inverse = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    starts = np.concatenate([[0], np.cumsum(sections)])
    axes = positions.astype(jnp.float32)[..., None]
    angles = jnp.concatenate(
        [axes[i % 3] * inverse[starts[i] : starts[i + 1]].astype(np.float32) for i in range(len(sections))], axis=-1
    )[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def grid_angles(rows: Int[Array, "b t"], cols: Int[Array, "b t"], head_dim: int, theta: float = 10_000.0) -> Angles:
    """cos and sin, [b, 1, t, h/2] float32: the first quarter of the head turns by the row, the second by the column."""
    half = head_dim // 2
    inverse = (1.0 / theta ** (np.arange(0, half, 2, dtype=np.float32) / half)).astype(np.float32)
    angles = jnp.concatenate([axis.astype(jnp.float32)[..., None] * inverse for axis in (rows, cols)], axis=-1)
    return jnp.cos(angles[:, None]), jnp.sin(angles[:, None])


def rotate(x: Float[Array, "b n t h"], angles: Angles) -> Float[Array, "b n t h"]:
    """Turn the pairs (x[i], x[i + h/2]) of every head by the angle of their position; float32 inside."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
