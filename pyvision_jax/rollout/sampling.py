"""One token per row from logits, and what is recorded about it. No sort over the vocabulary unless a filter asks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 512  # vocabulary entries summed together in the first level of the inverse CDF


@struct.dataclass
class Sample:
    """What was drawn in each row.

    `logprob` is of the distribution sampled from (temperature, filters, forbidden ids); `policy_logprob` and `entropy`
    (nats) are of the same logits at temperature 1 without filters, forbidden ids masked. The greedy choice of a row of
    temperature 0 has no density to speak of: its `logprob` is `policy_logprob`, so that a trainer which scores greedy
    tokens at temperature 1 (Thyme's adaptive temperature) finds a ratio of 1.
    """

    ids: Int[Array, " b"]
    logprob: Float[Array, " b"]
    policy_logprob: Float[Array, " b"]
    entropy: Float[Array, " b"]


def row_key(seed: UInt32[Array, "... 2"]) -> Array:
    """Threefry keys of rows from their seeds, each in two words; the default PRNG of the process does not matter."""
    return jax.random.wrap_key_data(seed, impl="threefry2x32")


@jax.named_scope("sample")
def sample(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    top_p: float,
    top_k: int,
    forbidden: Bool[Array, " v"] | None,
    keys: Array,
) -> Sample:
    """Draw one id per row.

    Args:
      logits: any float dtype; worked on in float32.
      temperature: per row; 0 takes the most likely id.
      top_p, top_k: static; 1 and 0 switch the filters off. `top_k` comes first, as in HF's and vLLM's samplers; ids
        that tie with the last one kept are kept too.
      forbidden: ids that can never be drawn; their logits are -inf before anything is normalised.
      keys: PRNG key of each row [b] (typed keys).
    """
    logits = logits.astype(jnp.float32)
    if forbidden is not None:
        logits = jnp.where(forbidden, -jnp.inf, logits)
    top = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - top
    mass = jnp.exp(shifted)
    normaliser = jnp.log(jnp.sum(mass, axis=-1))
    probabilities = mass / jnp.sum(mass, axis=-1, keepdims=True)
    entropy = normaliser - jnp.sum(jnp.where(mass > 0, probabilities * shifted, 0.0), axis=-1)

    greedy = temperature <= 0
    scaled = shifted / jnp.where(greedy, 1.0, temperature)[:, None]
    kept = _filter(scaled, top_p, top_k)
    weights = jnp.exp(kept)  # the largest is always 1
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
    ids = jnp.where(greedy, jnp.argmax(logits, axis=-1), inverse_cdf(weights, uniform)).astype(jnp.int32)

    policy_logprob = _pick(shifted, ids) - normaliser
    logprob = _pick(kept, ids) - jnp.log(jnp.sum(weights, axis=-1))
    return Sample(ids, jnp.where(greedy, policy_logprob, logprob), policy_logprob, entropy)


def inverse_cdf(weights: Float[Array, "b v"], uniform: Float[Array, " b"]) -> Int[Array, " b"]:
    """The id at which the running sum of a row's weights passes `uniform` (in [0, 1)) of their total.

    In two levels, over blocks and inside one block, which keeps sums short (float32 stays exact enough over 152k ids)
    and reads the weights twice instead of scanning them. An id of weight 0 is never chosen, whatever the rounding.
    """
    b, v = weights.shape
    if v <= _BLOCK:
        return _first_above(weights, uniform * jnp.sum(weights, axis=-1))[0]
    blocks = jnp.pad(weights, ((0, 0), (0, -v % _BLOCK))).reshape(b, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    block, before = _first_above(sums, uniform * jnp.sum(sums, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    rest = uniform * jnp.sum(sums, axis=-1) - before
    return block * _BLOCK + _first_above(inside, rest)[0]


def _first_above(weights: Float[Array, "b w"], target: Float[Array, " b"]) -> tuple[Array, Array]:
    """(first index of positive weight at which the running sum exceeds `target`, the running sum before it)."""
    running = jnp.cumsum(weights, axis=-1)
    above = (running > target[:, None]) & (weights > 0)
    # rounding can leave the target at or past the last sum: then the last id of positive weight
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
    return index, _pick(running, index) - _pick(weights, index)


def _filter(scaled: Float[Array, "b v"], top_p: float, top_k: int) -> Float[Array, "b v"]:
    """Scaled logits with everything outside the filters at -inf. Static: no filter, no sort."""
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], found {top_p}")
    v = scaled.shape[-1]
    if 0 < top_k < v:
        best = jax.lax.top_k(scaled, top_k)[0]
        scaled = jnp.where(scaled >= best[:, -1:], scaled, -jnp.inf)
    elif top_p < 1:
        best = jnp.sort(scaled, axis=-1, descending=True)
    if top_p < 1:
        mass = jnp.exp(best)
        before = jnp.cumsum(mass, axis=-1) - mass  # of the ids ahead of this one
        total = jnp.sum(jnp.exp(scaled), axis=-1, keepdims=True)
        inside = before < top_p * total  # the first is always inside
        threshold = jnp.min(jnp.where(inside, best, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled >= threshold, scaled, -jnp.inf)
    return scaled


def _pick(x: Float[Array, "b v"], ids: Int[Array, " b"]) -> Float[Array, " b"]:
    return jnp.take_along_axis(x, ids[:, None], axis=-1)[:, 0]
