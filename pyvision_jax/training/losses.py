"""Token losses as (sum, weight) pairs: summed over micro-batches and devices, divided once.

Every loss here is a function of one token's log-probability and of weights that were computed on the host, so packing,
micro-batch count and device count change nothing but the order of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "group_token_mean", "seq_mean_token_sum_norm")
KL_ESTIMATORS = ("k1", "k2", "k3")
_LOG_RATIO_BOUND = 20.0  # exp(20) is far outside any clip range, and its square is still finite in float32


@struct.dataclass
class Mean:
    """A sum and the weight it is to be divided by; pairs add up over micro-batches."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> Float[Array, ""]:
        """total / weight, and 0 where nothing was weighed."""
        return jnp.where(self.weight > 0, self.total / jnp.where(self.weight > 0, self.weight, 1.0), 0.0)


def weighted(values: Float[Array, "b t"], weights: Float[Array, "b t"]) -> Mean:
    """Sum of `values * weights` and of `weights`; a value of weight 0 may be anything, also inf or NaN."""
    active = weights > 0
    return Mean(jnp.sum(jnp.where(active, values, 0.0) * weights), jnp.sum(weights))


def merge(a: Mapping[str, Mean], b: Mapping[str, Mean]) -> dict[str, Mean]:
    return {name: a[name] + b[name] for name in a}


class PolicyLoss(NamedTuple):
    """Per-token terms, all [b, t]."""

    loss: Float[Array, "b t"]
    clipped: Float[Array, "b t"]  # 1 where the upper or lower clip decided
    clipped_dual: Float[Array, "b t"]  # 1 where the dual clip decided
    log_ratio: Float[Array, "b t"]


def policy_loss(
    logprobs: Float[Array, "b t"],
    old_logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Clipped surrogate, per token (PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 8).

    `dual_clip` > 1 bounds the loss of a negative advantage at -dual_clip * A (arXiv 1912.09729, eq. 5); 0 turns it off.
    """
    log_ratio = jnp.clip(logprobs - old_logprobs, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    ratio = jnp.exp(log_ratio)
    free = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(free, bounded)
    clipped = (bounded > free).astype(jnp.float32)
    clipped_dual = jnp.zeros_like(clipped)
    if dual_clip:
        ceiling = -advantages * dual_clip
        negative = advantages < 0
        clipped_dual = (negative & (loss > ceiling)).astype(jnp.float32)
        loss = jnp.where(negative, jnp.minimum(loss, ceiling), loss)
    return PolicyLoss(loss, clipped, clipped_dual, log_ratio)


def kl_penalty(
    logprobs: Float[Array, "b t"], reference: Float[Array, "b t"], estimator: str = "k3"
) -> Float[Array, "b t"]:
    """Estimate of KL(policy || reference) from one sample per token: k1, k2 or k3 of http://joschu.net/blog/kl-approx.html."""
    difference = jnp.clip(logprobs - reference, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    if estimator == "k3":
        return jnp.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; one of {', '.join(KL_ESTIMATORS)}")


def token_weights(
    counts: np.ndarray, groups: np.ndarray, aggregation: str, max_tokens: int = 0
) -> tuple[np.ndarray, float | None]:
    """Weight of each learned token of each sequence, and the divisor of the weighted sum.

    counts: int [n] learned tokens; groups: int [n] group of each sequence. Returns float64 [n] and the divisor; None
    means the sum of all weights of the global batch. Sequences without a learned token count nowhere.

    - token_mean: every token weighs the same (DAPO, arXiv 2503.14476).
    - seq_mean_token_mean: mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3).
    - group_token_mean: mean over the tokens of a group, then over groups (CE-GRPO's Z).
    - seq_mean_token_sum_norm: sum of a sequence over the constant `max_tokens`, then mean over sequences (Dr.GRPO,
      arXiv 2503.20783); its weights do not add up to the number of sequences, hence the divisor.
    """
    counts = np.asarray(counts, np.float64)
    active = counts > 0
    if aggregation == "token_mean":
        return active.astype(np.float64), None
    if aggregation == "seq_mean_token_mean":
        return active / np.maximum(counts, 1), None
    if aggregation == "group_token_mean":
        _, index = np.unique(np.asarray(groups), return_inverse=True)
        return active / np.maximum(np.bincount(index, weights=counts)[index], 1), None
    if aggregation == "seq_mean_token_sum_norm":
        if max_tokens <= 0:
            raise ValueError("seq_mean_token_sum_norm needs max_tokens, the constant length that sums are divided by")
        return active / float(max_tokens), float(active.sum())
    raise ValueError(f"unknown loss aggregation {aggregation!r}; one of {', '.join(AGGREGATIONS)}")
