"""The three jitted programs of the engine: encode pictures, put ids into the cache, decode a chunk.

Everything that differs from call to call is an array, so each program is compiled once per bucket. The host holds the
truth about every row and sends `Control` anew with each chunk; only KV cache and picture features stay on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from pyvision_jax.data.batch import VisionBatch
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.rollout.repetition import Repetition, Watch, hear
from pyvision_jax.rollout.sampling import Filters, row_key, sample, with_ids


@struct.dataclass
class Control:
    """One entry a slot. `token` is the newest id of the row: known to the host, not yet in the cache."""

    token: Int[Array, " b"]
    state: Int[Array, " b"]  # of the tag automaton, after `token`
    length: Int[Array, " b"]  # ids in the cache = index of `token`
    delta: Int[Array, " b"]  # mRoPE position of `token` minus its index
    left: Int[Array, " b"]  # ids that may still be sampled; 0: the slot is idle
    seed: UInt32[Array, "b 2"]
    temperature: Float[Array, "b r"]  # of each region of the automaton
    seen: UInt32[Array, "b words"] | None = None  # ids of the row so far (rollout.sampling), for a repetition penalty


@struct.dataclass
class Tables:
    """The automaton on the device, and the ids that are never sampled."""

    next: Int[Array, "states v"]
    stop: Bool[Array, " states"]
    region: Int[Array, " states"]
    forbidden: Bool[Array, " v"]


@struct.dataclass
class Fill:
    """Ids for the cache: row j continues the sequence that slot `source[j]` holds `length[j]` ids of.

    The result is written to the slots `target` (entries past the last slot are dropped), each taking row `origin` of
    the batch: one row serves all siblings of a group, and a row of count 0 is a plain copy of a slot.
    """

    ids: Int[Array, "r t"]
    image_index: Int[Array, "r t"]  # row of the feature pool, -1 for text
    positions: Int[Array, "3 r t"]
    source: Int[Array, " r"]
    length: Int[Array, " r"]
    count: Int[Array, " r"]
    target: Int[Array, " b"]
    origin: Int[Array, " b"]


FIELDS = ("id", "state", "logprob", "policy_logprob", "entropy")  # rows of a chunk's output; the floats as their bits
_INTEGERS = ("id", "state", "repeated")


def fields(top_entropy: int = 0, repetition: Repetition | None = None) -> tuple[str, ...]:
    """Rows of a chunk's output under these switches."""
    return (*FIELDS, *["top_entropy"] * bool(top_entropy), *["repeated"] * (repetition is not None))


@functools.partial(
    jax.jit,
    static_argnames=("cfg", "chunk", "filters", "top_entropy", "repetition", "implementation"),
    donate_argnums=(1, 4),
)
def decode(
    params: Any,
    cache: model.KVCache,
    control: Control,
    tables: Tables,
    watch: Watch | None = None,
    *,
    cfg: ModelSpec,
    chunk: int,
    implementation: str,
    filters: Filters = Filters(),
    top_entropy: int = 0,
    repetition: Repetition | None = None,
) -> tuple[model.KVCache, tuple[Int[Array, "f chunk b"], Watch | None]]:
    """Up to `chunk` steps of every slot with ids left; a slot stops at once where the automaton says so, and where its
    turn meets the rule `repetition`, for which `watch` must know the turn so far.

    Returns (cache, (out, watch)): `fields` of each step in one int32 array, so that the host reads once; ids of idle
    steps are -1. The loop ends early when no slot is alive. The key of a sampled id is its row's seed folded with its
    index: it depends on neither slot nor neighbours.
    """
    text = params.text
    names = fields(top_entropy, repetition)

    def alive(carry: tuple[Array, Any, Control, Any, Array]) -> Array:
        return (carry[0] < chunk) & jnp.any(carry[2].left > 0)

    def step(carry: tuple[Array, Any, Control, Any, Array]) -> tuple[Array, Any, Control, Any, Array]:
        i, cache, now, watch, out = carry
        going = now.left > 0
        x = model.embed(text, now.token[:, None])
        positions = jnp.broadcast_to((now.length + now.delta)[None, :, None], (3, x.shape[0], 1))
        hidden, cache = model.forward_cached(
            text, x, positions, cache, now.length, going.astype(jnp.int32), cfg, implementation
        )
        temperature = jnp.take_along_axis(now.temperature, tables.region[now.state][:, None], axis=1)[:, 0]
        keys = jax.vmap(jax.random.fold_in)(row_key(now.seed), now.length + 1)
        logits = model.logits(text, hidden[:, 0])
        drawn = sample(logits, temperature, filters, tables.forbidden, keys, now.seen, top_entropy)
        state = tables.next[now.state, drawn.ids].astype(jnp.int32)
        ends = tables.stop[state]
        row = {
            "id": jnp.where(going, drawn.ids, -1),
            "state": now.state,
            "logprob": drawn.logprob,
            "policy_logprob": drawn.policy_logprob,
            "entropy": drawn.entropy,
            "top_entropy": drawn.top_entropy,
        }
        if repetition is not None:
            watch, repeated = hear(watch, repetition, drawn.ids, going)
            row["repeated"] = repeated.astype(jnp.int32)
            ends |= repeated
        out = out.at[:, i].set(jnp.stack([_bits(row[name]) for name in names]))
        now = dataclasses.replace(
            now,
            token=jnp.where(going, drawn.ids, now.token),
            state=jnp.where(going, state, now.state),
            length=now.length + going,
            left=jnp.where(going & ~ends, now.left - 1, 0),
            seen=None if now.seen is None else with_ids(now.seen, drawn.ids),
        )
        return i + 1, cache, now, watch, out

    out = jnp.full((len(names), chunk, control.token.shape[0]), -1, jnp.int32)
    _, cache, _, watch, out = jax.lax.while_loop(alive, step, (jnp.int32(0), cache, control, watch, out))
    return cache, (out, watch)


def _bits(x: Array) -> Int[Array, " b"]:
    return x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


@functools.partial(jax.jit, static_argnames=("cfg", "implementation"), donate_argnums=(1,))
def fill(
    params: Any,
    cache: model.KVCache,
    features: Float[Array, "m d"],
    batch: Fill,
    *,
    cfg: ModelSpec,
    implementation: str,
) -> model.KVCache:
    """Prefill, extension, sharing inside a group, and forks: see `Fill`. No logits: the last id of a row is never among
    these ids, the first decode step takes it."""
    rows = jax.tree.map(lambda slots: slots[batch.source], cache)
    x = model.embed(params.text, batch.ids, batch.image_index, features)
    _, rows = model.forward_cached(
        params.text, x, batch.positions, rows, batch.length, batch.count, cfg, implementation
    )
    return jax.tree.map(
        lambda slots, new: slots.at[batch.target].set(new[batch.origin], mode="drop", unique_indices=True), cache, rows
    )


@functools.partial(jax.jit, static_argnames=("cfg", "implementation"), donate_argnums=(1,))
def encode(
    params: Any,
    features: Float[Array, "m d"],
    batch: VisionBatch,
    index: Int[Array, " k"],
    target: Int[Array, " k"],
    *,
    cfg: ModelSpec,
    implementation: str,
) -> Float[Array, "m d"]:
    """Encode pictures; token `index` of the tower's output goes to row `target` of the pool (past its end: dropped)."""
    tokens = model.encode_images(params.vision, batch, cfg, implementation=implementation)
    return features.at[target].set(tokens[index].astype(features.dtype), mode="drop")


def unpack(out: Array, names: Sequence[str] = FIELDS) -> dict[str, np.ndarray]:
    """The one read of a chunk: arrays [chunk, b] by name (`fields`)."""
    host = np.asarray(out)
    return {name: rows if name in _INTEGERS else rows.view(np.float32) for name, rows in zip(names, host, strict=True)}
