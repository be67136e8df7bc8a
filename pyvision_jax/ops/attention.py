"""The one front door to attention: heads before time everywhere, so that queries and caches meet without transposes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

IMPLEMENTATIONS = ("xla", "cudnn")
_MASKED = -1e30  # finite: a row that sees nothing (padding) gives a mean of values, never NaN


@struct.dataclass
class Mask:
    """Which keys a query may see; made once a program and shared by all layers."""

    allowed: Bool[Array, "b t s"]
    lengths: Int[Array, " b"] | None = None  # set where a row sees its first lengths[b] keys: cuDNN needs no mask then


def packed_mask(segments: Int[Array, "b t"]) -> Mask:
    """Causal inside one segment; segment 0 is padding, which sees only padding."""
    t = segments.shape[1]
    causal = jnp.tril(jnp.ones((t, t), jnp.bool_))
    return Mask(allowed=causal & (segments[:, :, None] == segments[:, None, :]))


def cache_mask(lengths: Int[Array, " b"], queries: int, size: int) -> Mask:
    """Query j of row b sees the cache positions 0 .. lengths[b] + j, of `size`."""
    last = lengths[:, None] + jnp.arange(queries, dtype=lengths.dtype)
    allowed = jnp.arange(size, dtype=lengths.dtype) <= last[:, :, None]
    return Mask(allowed=allowed, lengths=lengths + 1 if queries == 1 else None)


def key_mask(valid: Bool[Array, "b s"]) -> Mask:
    """Every query sees every valid key."""
    return Mask(allowed=valid[:, None, :])


def group_mask(groups: Int[Array, "b t"], valid: Bool[Array, "b t"]) -> Mask:
    """Every query sees the valid keys of its own group (the patches of one video frame)."""
    return Mask(allowed=(groups[:, :, None] == groups[:, None, :]) & valid[:, None, :])


def attention(
    q: Float[Array, "b n t h"],
    k: Float[Array, "b k s h"],
    v: Float[Array, "b k s h"],
    mask: Mask,
    *,
    implementation: str = "xla",
) -> Float[Array, "b n t h"]:
    """Grouped-query attention, scale h**-0.5, softmax in float32, output in q's dtype.

    Query head i uses key head i // (n // k). "xla" runs everywhere; "cudnn" needs an NVIDIA GPU and 16-bit floats.
    Raises ValueError for an unknown implementation, or a dtype that cuDNN does not take.
    """
    if implementation == "xla":
        return _xla(q, k, v, mask)
    if implementation == "cudnn":
        return _cudnn(q, k, v, mask)
    raise ValueError(f"attention implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")


@jax.named_scope("attention")
def _xla(q: Array, k: Array, v: Array, mask: Mask) -> Array:
    b, n, t, h = q.shape
    heads, s = k.shape[1], k.shape[2]
    group = n // heads
    # The g query heads of a key head become g * t rows of one matrix product per (row, key head).
    scores = jnp.einsum("bkqh,bksh->bkqs", q.reshape(b, heads, group * t, h), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, heads, group, t, s) * (1.0 / math.sqrt(h))
    probabilities = jax.nn.softmax(jnp.where(mask.allowed[:, None, None], scores, _MASKED), axis=-1)
    probabilities = probabilities.astype(v.dtype).reshape(b, heads, group * t, s)
    return jnp.einsum("bkqs,bksh->bkqh", probabilities, v).reshape(b, n, t, h)


def _cudnn(q: Array, k: Array, v: Array, mask: Mask) -> Array:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"cuDNN attention takes bfloat16 or float16, not {q.dtype}: use implementation='xla'")
    b, t = q.shape[0], q.shape[2]
    qkv = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]  # the public call is time-major
    if mask.lengths is not None:
        out = jax.nn.dot_product_attention(
            *qkv,
            query_seq_lengths=jnp.full((b,), t, jnp.int32),
            key_value_seq_lengths=mask.lengths.astype(jnp.int32),
            implementation="cudnn",
        )
    else:
        allowed = jnp.broadcast_to(mask.allowed, (b, t, k.shape[2]))[:, None]
        out = jax.nn.dot_product_attention(*qkv, mask=allowed, implementation="cudnn")
    return jnp.swapaxes(out, 1, 2)
