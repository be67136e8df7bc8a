"""Group advantages against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.training.advantage import group_advantages, score_group
from tests.trajectories import toy_trajectory

ALL = np.ones(4, bool)


def test_without_and_with_std():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(group_advantages(rewards, ALL), [0.5, -0.5, -0.5, 0.5])
    # mean 0.5, unbiased variance 4 * 0.25 / 3, std 0.57735
    expected = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards, ALL, normalize_std=True), expected * np.array([1, -1, -1, 1]))
    np.testing.assert_allclose(
        group_advantages(np.array([1.2, 1.1, 0.0, 0.1]), ALL), [0.6, 0.5, -0.6, -0.5], atol=1e-12
    )


def test_low_but_real_variance_is_kept():
    """U25: both groups give the same numbers; no floor. 5e-6 / (7.0711e-6 + 1e-6) = 0.6195."""
    both = np.ones(2, bool)
    for base in (1.0, 2.0):
        advantages = group_advantages(np.array([base, base + 1e-5]), both, normalize_std=True)
        np.testing.assert_allclose(advantages, [-0.6195, 0.6195], atol=1e-4)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_equal_rewards_are_exactly_zero(normalize_std):
    rewards = np.full(7, 0.1 + 0.2)
    assert not group_advantages(rewards, np.ones(7, bool), normalize_std=normalize_std).any()


def test_infrastructure_enters_no_statistic():
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    valid = np.array([True, True, False, False])
    np.testing.assert_allclose(group_advantages(rewards, valid), [0.5, -0.5, 0, 0])
    assert not group_advantages(rewards, np.array([True, False, False, False])).any()

    group = [toy_trajectory(reward) for reward in (1.0, 0.0)]
    group.append(toy_trajectory(5.0, end_reason=EndReason.INFRASTRUCTURE))
    scored = score_group(group)
    np.testing.assert_allclose(scored.advantages, [0.5, -0.5, 0.0])
    assert scored.std == pytest.approx(np.sqrt(0.5))


def test_spread_is_by_reward_part_and_survives_filters():
    group = [toy_trajectory(1.1, accuracy=1.0), toy_trajectory(1.0, accuracy=1.0)]
    scored = score_group(group)
    assert scored.spread["accuracy"] == 0.0
    assert scored.spread["total"] > 0
    kept = scored.keep(np.array([True, False]))
    assert kept.std == scored.std
    assert len(kept.trajectories) == len(kept.advantages) == 1
