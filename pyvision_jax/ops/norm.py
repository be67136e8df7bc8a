"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "... d"], scale: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """`x / sqrt(mean(x^2) + eps) * scale` in float32, cast to x's dtype before the product (as HF's Qwen2 does)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return scale * y.astype(x.dtype)
