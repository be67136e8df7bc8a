"""The text decoder of the Qwen-VL family: grouped-query attention with biased q, k, v, mRoPE, RMSNorm and SwiGLU.

Arrays hold heads before time ([b, n, t, h]), in activations and in the cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pyvision_jax.models.config import TextConfig
from pyvision_jax.models.spec import Spec
from pyvision_jax.ops import Mask, attention, cache_mask, linear, mrope_angles, packed_mask, rms_norm, rotate
from pyvision_jax.parallel import shard

REMAT = ("none", "block")


@struct.dataclass
class Block:
    """One decoder layer."""

    attn_norm: Any  # [d]
    q: Any  # [d, n, h]
    q_bias: Any  # [n, h]
    k: Any  # [d, k, h]
    k_bias: Any  # [k, h]
    v: Any  # [d, k, h]
    v_bias: Any  # [k, h]
    o: Any  # [n, h, d]
    mlp_norm: Any  # [d]
    gate: Any  # [d, f]
    up: Any  # [d, f]
    down: Any  # [f, d]


@struct.dataclass
class Text:
    """The decoder with its embedding; `head` is None where it is tied to `embed`."""

    embed: Any  # [v, d]
    blocks: tuple[Block, ...]
    norm: Any  # [d]
    head: Any  # [d, v] | None


@struct.dataclass
class KVCache:
    """Keys (after RoPE) and values of every slot, one pair of arrays per layer; axis 0 is the slot."""

    k: tuple[Float[Array, "b k s h"], ...]
    v: tuple[Float[Array, "b k s h"], ...]

    @property
    def length(self) -> int:
        """Positions that one slot holds."""
        return self.k[0].shape[2]


def text_specs(cfg: TextConfig) -> Text:
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    n, k = cfg.num_heads, cfg.num_kv_heads
    block = Block(
        attn_norm=Spec((d,), (None,), "ones"),
        q=Spec((d, n, h), ("embed", "heads", None)),
        q_bias=Spec((n, h), ("heads", None), "zeros"),
        k=Spec((d, k, h), ("embed", "kv_heads", None)),
        k_bias=Spec((k, h), ("kv_heads", None), "zeros"),
        v=Spec((d, k, h), ("embed", "kv_heads", None)),
        v_bias=Spec((k, h), ("kv_heads", None), "zeros"),
        o=Spec((n, h, d), ("heads", None, "embed")),
        mlp_norm=Spec((d,), (None,), "ones"),
        gate=Spec((d, f), ("embed", "mlp")),
        up=Spec((d, f), ("embed", "mlp")),
        down=Spec((f, d), ("mlp", "embed")),
    )
    return Text(
        embed=Spec((cfg.vocab_size, d), ("vocab", "embed")),
        blocks=(block,) * cfg.num_layers,
        norm=Spec((d,), (None,), "ones"),
        head=None if cfg.tie_embeddings else Spec((d, cfg.vocab_size), ("embed", "vocab")),
    )


def init_cache(cfg: TextConfig, slots: int, length: int, dtype: DTypeLike = jnp.float32) -> KVCache:
    """An empty cache of `slots` rows with room for `length` ids each."""

    def zeros() -> tuple[Array, ...]:
        shape = (slots, cfg.num_kv_heads, length, cfg.head_dim)
        return tuple(jnp.zeros(shape, dtype) for _ in range(cfg.num_layers))

    return KVCache(k=zeros(), v=zeros())


def embed(
    params: Text,
    ids: Int[Array, "b t"],
    image_index: Int[Array, "b t"] | None = None,
    features: Float[Array, "m d"] | None = None,
) -> Float[Array, "b t d"]:
    """Embeddings of the ids, with row `image_index` of `features` in place of every id whose index is not -1."""
    # The table is gathered over its model axis first (as any FSDP weight), and pictures go wherever their rows are:
    # left to itself the partitioner looks up slices of the model axis and then re-partitions the result by replicating.
    x = shard(params.embed, "vocab", None)[ids]
    if features is not None and image_index is not None:
        picture = shard(features.astype(x.dtype), None, None)[jnp.maximum(image_index, 0)]
        x = jnp.where((image_index >= 0)[..., None], picture, x)
    return shard(x, "batch", None, None)


def _qkv(x: Array, p: Block, angles: tuple[Array, Array], eps: float) -> tuple[Array, Array, Array]:
    y = rms_norm(x, p.attn_norm, eps)
    q, k, v = (
        jnp.swapaxes(linear(y, weight) + bias, 1, 2)
        for weight, bias in ((p.q, p.q_bias), (p.k, p.k_bias), (p.v, p.v_bias))
    )
    return rotate(q, angles), rotate(k, angles), v


def _finish(x: Array, attended: Array, p: Block, eps: float) -> Array:
    """Output projection and MLP, each with its residual."""
    b, n, t, h = attended.shape
    x = x + linear(jnp.swapaxes(attended, 1, 2).reshape(b, t, n * h), p.o.reshape(n * h, -1))
    y = rms_norm(x, p.mlp_norm, eps)
    with jax.named_scope("mlp"):
        x = x + linear(jax.nn.silu(linear(y, p.gate)) * linear(y, p.up), p.down)
    return shard(x, "batch", None, None)


def forward(
    params: Text,
    x: Float[Array, "b t d"],
    positions: Int[Array, "3 b t"],
    segments: Int[Array, "b t"],
    cfg: TextConfig,
    remat: str = "none",
    implementation: str = "xla",
) -> Float[Array, "b t d"]:
    """Hidden states after the final norm, of packed rows: causal inside one segment, 0 is padding.

    remat "block" keeps only the input of every layer for the backward pass. Raises ValueError for another name.
    """
    if remat not in REMAT:
        raise ValueError(f"remat {remat!r} is not one of {', '.join(REMAT)}")
    angles = mrope_angles(positions, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
    mask = packed_mask(segments)

    def layer(x: Array, p: Block, angles: tuple[Array, Array], mask: Mask) -> Array:
        q, k, v = _qkv(x, p, angles, cfg.norm_eps)
        return _finish(x, attention(q, k, v, mask, implementation=implementation), p, cfg.norm_eps)

    if remat == "block":
        layer = jax.checkpoint(layer)
    for i, p in enumerate(params.blocks):
        with jax.named_scope(f"layer_{i}"):
            x = layer(x, p, angles, mask)
    return rms_norm(x, params.norm, cfg.norm_eps)


def forward_cached(
    params: Text,
    x: Float[Array, "b t d"],
    positions: Int[Array, "3 b t"],
    cache: KVCache,
    lengths: Int[Array, " b"],
    counts: Int[Array, " b"],
    cfg: TextConfig,
    implementation: str = "xla",
) -> tuple[Float[Array, "b t d"], KVCache]:
    """Prefill, extension and decoding in one: row b brings `counts[b]` new ids (its first columns) to a slot that
    already holds `lengths[b]`; query j sees the cache positions 0 .. lengths[b] + j.

    New keys and values are scattered to lengths[b] .. lengths[b] + counts[b]; a row with count 0 leaves its slot as it
    is, and what lies past the end of a slot is dropped (the caller keeps lengths + counts <= cache.length). Outputs of
    columns from counts[b] on mean nothing. Donate the cache: it is then updated in place.
    """
    b, t = x.shape[:2]
    angles = mrope_angles(positions, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
    mask = cache_mask(lengths, t, cache.length)
    column = jnp.arange(t, dtype=lengths.dtype)
    # Columns without an id aim past the end of the slot, where the scatter drops them.
    place = jnp.where(column < counts[:, None], lengths[:, None] + column, cache.length)
    row = jnp.arange(b, dtype=lengths.dtype)[:, None]

    def write(slots: Array, new: Array) -> Array:
        return slots.at[row, :, place].set(jnp.swapaxes(new, 1, 2).astype(slots.dtype), mode="drop")

    keys, values = [], []
    for i, p in enumerate(params.blocks):
        with jax.named_scope(f"layer_{i}"):
            q, k, v = _qkv(x, p, angles, cfg.norm_eps)
            keys.append(write(cache.k[i], k))
            values.append(write(cache.v[i], v))
            x = _finish(x, attention(q, keys[i], values[i], mask, implementation=implementation), p, cfg.norm_eps)
    return rms_norm(x, params.norm, cfg.norm_eps), KVCache(k=tuple(keys), v=tuple(values))


def head_matrix(params: Text) -> Float[Array, "d v"]:
    """The output projection, tied or not."""
    return params.embed.T if params.head is None else params.head


def logits(params: Text, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
    """float32 logits."""
    return linear(hidden, head_matrix(params), jnp.float32)
