"""Token losses against numbers worked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pyvision_jax.training.losses import Mean, kl_penalty, merge, policy_loss, token_weights, weighted

# Two sequences: one learned token of advantage +1, three of advantage -1. Ratios 1.5 | 1.5, 1.0, 0.5.
RATIOS = jnp.array([[1.5, 1.0, 1.0], [1.5, 1.0, 0.5]])
ADVANTAGES = jnp.array([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
COUNTS = np.array([1, 3])
MASK = np.array([[1, 0, 0], [1, 1, 1]], np.float32)
OLD = jnp.full((2, 3), -2.0)


def aggregate(aggregation: str, *, groups=(0, 0), max_tokens=0, clip_high=0.2, dual_clip=0.0) -> float:
    token = policy_loss(
        OLD + jnp.log(RATIOS), OLD, ADVANTAGES, clip_low=0.2, clip_high=clip_high, dual_clip=dual_clip
    ).loss
    per_sequence, divisor = token_weights(COUNTS, np.array(groups), aggregation, max_tokens)
    pair = weighted(token, jnp.asarray(MASK * per_sequence[:, None], jnp.float32))
    return float(pair.total / (pair.weight if divisor is None else divisor))


@pytest.mark.parametrize(
    "expected, options",
    [
        # GRPO: -1.2 is clipped; (1.5 + 1.0 + 0.8) / 3 = 1.1 (0.5 is clipped to 0.8); mean of the two.
        (-0.05, {"aggregation": "seq_mean_token_mean"}),
        # DAPO: upper clip 1.28, all four tokens alike: (-1.28 + 3.3) / 4.
        (0.505, {"aggregation": "token_mean", "clip_high": 0.28}),
        # Dr.GRPO: sums over a constant length of 4, mean over two sequences: (-1.2 + 3.3) / 8.
        (0.2625, {"aggregation": "seq_mean_token_sum_norm", "max_tokens": 4}),
        # CE-GRPO: one group of four tokens, or two groups.
        (0.525, {"aggregation": "group_token_mean"}),
        (-0.05, {"aggregation": "group_token_mean", "groups": (0, 1)}),
    ],
)
def test_aggregations_by_hand(expected, options):
    assert aggregate(**options) == pytest.approx(expected, abs=1e-6)


def test_clip_flags_and_dual_clip():
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0, -1.0])
    ratios = jnp.array([1.5, 0.5, 0.5, 1.5, 5.0])
    out = policy_loss(jnp.log(ratios), jnp.zeros(5), advantages, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    np.testing.assert_allclose(out.loss, [-1.3, -0.5, 0.8, 1.5, 3.0], rtol=1e-6)
    np.testing.assert_array_equal(out.clipped, [1, 0, 1, 0, 0])
    np.testing.assert_array_equal(out.clipped_dual, [0, 0, 0, 0, 1])


def test_gradient_stops_where_the_clip_decides():
    grad = jax.grad(lambda x: policy_loss(x, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2).loss.sum())
    # d/dlogp = -A * ratio where the free term decides, 0 where the bound does.
    np.testing.assert_allclose(grad(OLD + jnp.log(RATIOS)), [[0.0, -1.0, -1.0], [1.5, 1.0, 0.0]], atol=1e-6)


def test_kl_estimators_by_hand():
    logprobs, reference = jnp.array([-1.0]), jnp.array([-1.0 - np.log(2.0)])  # ratio policy/reference is 2
    assert float(kl_penalty(logprobs, reference, "k1")[0]) == pytest.approx(np.log(2), rel=1e-6)
    assert float(kl_penalty(logprobs, reference, "k2")[0]) == pytest.approx(0.5 * np.log(2) ** 2, rel=1e-6)
    assert float(kl_penalty(logprobs, reference, "k3")[0]) == pytest.approx(0.5 - 1 + np.log(2), rel=1e-5)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(logprobs, reference, "k4")


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "group_token_mean"])
def test_any_split_gives_the_same_mean(aggregation):
    """U27: lengths 1 and 3, advantages +1 and -1; whole batch against one sequence at a time."""
    token = -ADVANTAGES
    weights = jnp.asarray(MASK * token_weights(COUNTS, np.array([0, 1]), aggregation)[0][:, None], jnp.float32)
    whole = weighted(token, weights)
    parts = [{"loss": weighted(token[i : i + 1], weights[i : i + 1])} for i in range(2)]
    split = merge(*parts)["loss"]
    assert float(split.value) == pytest.approx(float(whole.value), abs=1e-7)
    assert float(whole.value) == pytest.approx(0.5 if aggregation == "token_mean" else 0.0, abs=1e-7)


def test_all_masked_is_zero_with_zero_gradient():
    """U26, and values of masked tokens may be anything."""

    def loss(logprobs):
        token = policy_loss(logprobs, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.2).loss
        return weighted(token, jnp.zeros((2, 3))).value

    value, grad = jax.value_and_grad(loss)(jnp.array([[-jnp.inf, -1.0, -2.0], [-1.0, -jnp.inf, -3.0]]))
    assert float(value) == 0.0
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))
    assert float(Mean(jnp.float32(0), jnp.float32(0)).value) == 0.0


def test_half_masked_uses_one_mask():
    """A fully masked sequence counts neither above nor below."""
    weights, divisor = token_weights(np.array([2, 0]), np.array([0, 0]), "seq_mean_token_mean")
    np.testing.assert_allclose(weights, [0.5, 0.0])
    assert divisor is None
    assert token_weights(np.array([2, 0]), np.array([0, 0]), "seq_mean_token_sum_norm", 4)[1] == 1.0


def test_bad_names_and_values():
    with pytest.raises(ValueError, match="token_mean"):
        token_weights(COUNTS, np.array([0, 0]), "mean")
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(COUNTS, np.array([0, 0]), "seq_mean_token_sum_norm")
