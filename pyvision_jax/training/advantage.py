"""Group advantages, on the host in float64."""

from __future__ import annotations

import dataclasses

import numpy as np

from pyvision_jax.rollout.trajectory import EndReason, Trajectory


@dataclasses.dataclass(frozen=True)
class ScoredGroup:
    """Siblings of one prompt with their advantages, in submission order.

    `std` is the unbiased standard deviation of total rewards over the whole group (infrastructure left out), `spread`
    the same for each reward part; both stay what they were when a filter takes members away.
    """

    id: str
    trajectories: list[Trajectory]
    advantages: np.ndarray  # float64 [n]
    std: float
    spread: dict[str, float]

    def keep(self, mask: np.ndarray) -> ScoredGroup:
        kept = [trajectory for trajectory, stays in zip(self.trajectories, mask, strict=True) if stays]
        return dataclasses.replace(self, trajectories=kept, advantages=self.advantages[mask])


def group_advantages(
    rewards: np.ndarray, valid: np.ndarray, *, normalize_std: bool = False, epsilon: float = 1e-6
) -> np.ndarray:
    """A = R - mean(R), and over (std(R) + epsilon) if `normalize_std` (GRPO, arXiv 2402.03300; without: Dr.GRPO).

    rewards: float [n]; valid: bool [n]; members that are not valid enter no statistic and get 0. The standard deviation
    is the unbiased one. There is no floor: rewards that differ by 1e-5 give advantages near 0.6 when normalised, and
    0 only if they are equal. A group with fewer than two valid members has no baseline and gets 0.
    """
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    if valid.sum() < 2:
        return advantages
    members = rewards[valid]
    centred = members - members.mean()
    if np.ptp(members) == 0:
        centred[:] = 0.0  # the mean of equal numbers may be off by a rounding error
    elif normalize_std:
        centred /= members.std(ddof=1) + epsilon
    advantages[valid] = centred
    return advantages


def unbiased_std(values: np.ndarray) -> float:
    """0 for fewer than two values and, exactly, for equal ones."""
    return float(np.std(values, ddof=1)) if len(values) > 1 and np.ptp(values) > 0 else 0.0


def score_group(group: list[Trajectory], *, normalize_std: bool = False, epsilon: float = 1e-6) -> ScoredGroup:
    """Advantages over the full group before any filter, as in PyVision-RL's released code; infrastructure excluded."""
    valid = np.array([member.end_reason is not EndReason.INFRASTRUCTURE for member in group], bool)
    rewards = np.array([member.reward for member in group], np.float64)
    parts = {name for member in group for name in member.rewards}
    spread = {
        name: unbiased_std(
            np.array([m.rewards.get(name, 0.0) for m, ok in zip(group, valid, strict=True) if ok], np.float64)
        )
        for name in sorted(parts)
    }
    advantages = group_advantages(rewards, valid, normalize_std=normalize_std, epsilon=epsilon)
    return ScoredGroup(group[0].group if group else "", list(group), advantages, unbiased_std(rewards[valid]), spread)
