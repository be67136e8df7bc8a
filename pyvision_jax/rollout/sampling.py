"""One token per row from logits, and what is recorded about it. Nothing here sorts the vocabulary.

Float32 logits pass, in HF's order: forbidden ids, repetition penalty, temperature, top-k, top-p, min-p.
Ids that tie with the last one kept are kept too, so a set never depends on the order of equal logits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from pyvision_jax.config import SamplingConfig
from pyvision_jax.ops import top_values

_BLOCK = 512  # vocabulary entries summed together in the first level of the inverse CDF
_FEW = 128  # candidates up to which the nucleus is found by comparing all pairs
_WORD = 32  # ids to a word of a `seen` mask


@dataclasses.dataclass(frozen=True)
class Filters:
    """What cuts or bends the distribution besides temperature. Static: what is off leaves nothing in the program.

    `top_k` keeps the k most likely ids (0: off). `top_p` keeps an id if those more likely than it hold less than this
    share of the mass that top-k left (1: off). `min_p` keeps an id that is at least this likely, as a share of the most
    likely one (0: off); vLLM applies it before top-k and top-p, which makes a difference only beside top-p.
    `repetition_penalty` is CTRL's as in HF and vLLM: a positive logit of an id that stands in the context, prompt or
    response, is divided by it, a negative one multiplied (1: off). Raises ValueError for a value out of range.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], found {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, found {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], found {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, found {self.repetition_penalty}")

    @classmethod
    def of(cls, config: SamplingConfig) -> Filters:
        return cls(config.top_p, config.top_k, config.min_p, config.repetition_penalty)


@struct.dataclass
class Sample:
    """What was drawn in each row.

    `logprob` is of the distribution sampled from (penalty, temperature, filters, forbidden ids); `policy_logprob` and
    `entropy` (nats) are of the same logits at temperature 1 without penalty and filters, forbidden ids masked. The
    greedy choice of a row of temperature 0 has no density to speak of: its `logprob` is `policy_logprob`, so that a
    trainer which scores greedy tokens at temperature 1 (Thyme's adaptive temperature) finds a ratio of 1.
    `top_entropy` is the part of `entropy` that the most likely ids hold, their probabilities as they are: what an
    engine that returns 20 log-probs lets CE-GRPO sum up.
    """

    ids: Int[Array, " b"]
    logprob: Float[Array, " b"]
    policy_logprob: Float[Array, " b"]
    entropy: Float[Array, " b"]
    top_entropy: Float[Array, " b"] | None = None


def row_key(seed: UInt32[Array, "... 2"]) -> Array:
    """Threefry keys of rows from their seeds, each in two words; the default PRNG of the process does not matter."""
    return jax.random.wrap_key_data(seed, impl="threefry2x32")


@jax.named_scope("sample")
def sample(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    filters: Filters,
    forbidden: Bool[Array, " v"] | None,
    keys: Array,
    seen: UInt32[Array, "b words"] | None = None,
    top_entropy: int = 0,
) -> Sample:
    """Draw one id per row.

    Args:
      logits: any float dtype; worked on in float32.
      temperature: per row; 0 takes the most likely id (after the penalty).
      forbidden: ids that can never be drawn; their logits are -inf before anything is normalised.
      keys: PRNG key of each row [b] (typed keys).
      seen: the ids of each row's context (`no_ids`), looked at only if there is a repetition penalty.
      top_entropy: static; of so many most likely ids `Sample.top_entropy` is (0: it is None).
    """
    logits = logits.astype(jnp.float32)
    if forbidden is not None:
        logits = jnp.where(forbidden, -jnp.inf, logits)
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp(shifted)
    normaliser = jnp.log(jnp.sum(mass, axis=-1))
    probabilities = mass / jnp.sum(mass, axis=-1, keepdims=True)
    entropy = normaliser - jnp.sum(jnp.where(mass > 0, probabilities * shifted, 0.0), axis=-1)

    drawn_from = shifted
    if filters.repetition_penalty != 1:
        if seen is None:
            raise ValueError("a repetition penalty needs the ids of the context (`seen`)")
        logits = _penalised(logits, seen, filters.repetition_penalty)
        drawn_from = logits - jnp.max(logits, axis=-1, keepdims=True)
    greedy = temperature <= 0
    kept = _filter(drawn_from / jnp.where(greedy, 1.0, temperature)[:, None], filters)
    weights = jnp.exp(kept)  # the largest is always 1
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
    ids = jnp.where(greedy, jnp.argmax(logits, axis=-1), inverse_cdf(weights, uniform)).astype(jnp.int32)

    policy_logprob = _pick(shifted, ids) - normaliser
    logprob = _pick(kept, ids) - jnp.log(jnp.sum(weights, axis=-1))
    return Sample(
        ids,
        jnp.where(greedy, policy_logprob, logprob),
        policy_logprob,
        entropy,
        _top_entropy(shifted, normaliser, top_entropy) if top_entropy else None,
    )


# -- the ids of a row's context, a bit each ---------------------------------------------------------------------------


def no_ids(rows: int, v: int) -> np.ndarray:
    """An empty `seen` mask, uint32 [rows, words]: bit `id % 32` of word `id // 32` stands for an id."""
    return np.zeros((rows, -(-v // _WORD)), np.uint32)


def add_ids(seen: np.ndarray, ids: np.ndarray) -> None:
    """Mark ids in one row of a mask on the host, in place."""
    np.bitwise_or.at(seen, ids // _WORD, np.uint32(1) << (ids % _WORD).astype(np.uint32))


def with_ids(seen: UInt32[Array, "b words"], ids: Int[Array, " b"]) -> UInt32[Array, "b words"]:
    """The mask with one more id in each row."""
    rows = jnp.arange(seen.shape[0])
    word = ids // _WORD
    return seen.at[rows, word].set(seen[rows, word] | jnp.uint32(1) << (ids % _WORD).astype(jnp.uint32))


def _penalised(logits: Float[Array, "b v"], seen: UInt32[Array, "b words"], penalty: float) -> Float[Array, "b v"]:
    bits = seen[:, :, None] >> jnp.arange(_WORD, dtype=jnp.uint32) & 1
    marked = bits.reshape(seen.shape[0], -1)[:, : logits.shape[1]] > 0
    return jnp.where(marked, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


# -- drawing ----------------------------------------------------------------------------------------------------------


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


# -- filters ----------------------------------------------------------------------------------------------------------


def _filter(scaled: Float[Array, "b v"], filters: Filters) -> Float[Array, "b v"]:
    """Scaled logits (the largest of a row is 0) with everything outside the filters at -inf."""
    candidates = scaled
    if 0 < filters.top_k < scaled.shape[-1]:
        candidates = top_values(scaled, filters.top_k)
        scaled = jnp.where(scaled >= jnp.min(candidates, axis=-1, keepdims=True), scaled, -jnp.inf)
    if filters.top_p < 1:
        bound = filters.top_p * jnp.sum(jnp.exp(scaled), axis=-1)  # ids that tie with the k-th are not in `candidates`
        scaled = jnp.where(_rank(scaled) <= _nucleus(candidates, bound)[:, None], scaled, -jnp.inf)
    if filters.min_p > 0:
        scaled = jnp.where(scaled >= np.log(np.float32(filters.min_p)), scaled, -jnp.inf)
    return scaled


def _rank(scaled: Float[Array, "b v"]) -> UInt32[Array, "b v"]:
    """An integer for each of these values, which are never positive: equal for equal ones, higher for less likely."""
    return jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.uint32)


def _nucleus(scaled: Float[Array, "b n"], bound: Float[Array, " b"]) -> UInt32[Array, " b"]:
    """The highest rank for which all ids of a lower one hold less mass than `bound`.

    Few candidates are compared each with each. Of many it is found by bisection on the bits of the rank, which ends at
    the very value and not near it: two bits to a pass, three masked sums that a GPU takes in one reading (an H200 needs
    0.29 ms for 64 rows of 152k; a bit to a pass 0.36, four bits 0.49, a sort 1.24). The sums are rounded, so an id may
    fall on either side where the mass before it equals the bound to seven digits.
    """
    rank, mass = _rank(scaled), jnp.exp(scaled)
    if scaled.shape[-1] <= _FEW:
        lower = rank[:, None, :] < rank[:, :, None]
        inside = jnp.sum(jnp.where(lower, mass[:, None, :], 0.0), axis=-1) < bound[:, None]
        return jnp.max(jnp.where(inside, rank, 0), axis=-1)
    edge = jnp.zeros(scaled.shape[0], jnp.uint32)
    for low in range(30, -1, -2):
        ahead = [
            jnp.sum(jnp.where(rank < (edge + jnp.uint32(digit << low))[:, None], mass, 0.0), axis=-1)
            for digit in (1, 2, 3)
        ]
        edge += sum((held < bound).astype(jnp.uint32) for held in ahead) << low
    return edge


def _top_entropy(shifted: Float[Array, "b v"], normaliser: Float[Array, " b"], count: int) -> Float[Array, " b"]:
    logprobs = top_values(shifted, min(count, shifted.shape[-1])) - normaliser[:, None]
    return -jnp.sum(jnp.where(logprobs > -jnp.inf, jnp.exp(logprobs) * logprobs, 0.0), axis=-1)


def _pick(x: Float[Array, "b v"], ids: Int[Array, " b"]) -> Float[Array, " b"]:
    return jnp.take_along_axis(x, ids[:, None], axis=-1)[:, 0]
