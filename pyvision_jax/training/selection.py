"""Which groups a step trains on: filters in a stated order, then ranking; every drop is counted by its reason."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np

from pyvision_jax.config import SelectionConfig
from pyvision_jax.rollout.trajectory import EndReason, Trajectory
from pyvision_jax.training.advantage import ScoredGroup


@dataclasses.dataclass
class SelectionReport:
    """Counts of trajectories and groups; `dropped` and `dropped_groups` go by reason, `reasons` by trajectory id.

    trajectories_in == trajectories_kept + sum(dropped.values()), and the same for groups. A group whose members were
    all dropped one by one is counted under `emptied`.
    """

    groups_in: int = 0
    groups_kept: int = 0
    trajectories_in: int = 0
    trajectories_kept: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped_groups: dict[str, int] = dataclasses.field(default_factory=dict)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    residual_advantage: float = 0.0  # mean advantage of what is kept: filters after the baseline leave it off 0

    def metrics(self) -> dict[str, float]:
        """Flat metrics under `selection/`."""
        numbers = {
            "selection/groups_in": self.groups_in,
            "selection/groups_kept": self.groups_kept,
            "selection/trajectories_in": self.trajectories_in,
            "selection/trajectories_kept": self.trajectories_kept,
            "selection/residual_advantage": self.residual_advantage,
        }
        numbers |= {f"selection/dropped/{reason}": count for reason, count in sorted(self.dropped.items())}
        numbers |= {f"selection/dropped_groups/{reason}": n for reason, n in sorted(self.dropped_groups.items())}
        return {name: float(value) for name, value in numbers.items()}


def image_tokens_match(trajectory: Trajectory, image_token: int, merge_size: int = 2) -> bool:
    """Whether the picture tokens among the ids are as many as the picture grids (in patches) call for."""
    wanted = sum(t * h * w for t, h, w in trajectory.image_grids) // merge_size**2
    return int(np.count_nonzero(trajectory.ids == image_token)) == wanted


def _flaw(trajectory: Trajectory, rules: SelectionConfig, image_token: int | None, merge_size: int) -> str | None:
    """First rule that the trajectory breaks, in the order of the config's fields."""
    reason = trajectory.end_reason.value if trajectory.end_reason is not None else "unfinished"
    if rules.end_reasons and reason not in rules.end_reasons:
        return f"end_reason.{reason}"
    if rules.require_tool_image and not any(call.images for call in trajectory.calls):
        return "no_tool_image"
    if rules.image_mismatch and image_token is not None:
        if len(trajectory.images) != len(trajectory.image_grids):
            return "image_mismatch"
        if not image_tokens_match(trajectory, image_token, merge_size):
            return "image_mismatch"
    if rules.max_tokens and len(trajectory.ids) > rules.max_tokens:
        return "too_long"
    return None


def select(
    groups: list[ScoredGroup],
    rules: SelectionConfig,
    target: int,
    *,
    image_token: int | None = None,
    merge_size: int = 2,
) -> tuple[list[ScoredGroup], SelectionReport]:
    """At most `target` groups, in submission order, and a report.

    Order: infrastructure (always), groups of zero variance, then each trajectory by `end_reasons`,
    `require_tool_image`, `image_mismatch`, `max_tokens`; then ranking of whole groups by reward std. (PyVision-RL's
    released code, ray_trainer.py and filter_fn_utils.py, ranks samples and may cut a group.) Ties go to the earlier
    group. Without ranking the first `target` groups stay. Advantages were computed before and are not touched.

    `rules.variance_of` names the reward part of the zero-variance test (`total` or `accuracy`). `image_token` is the id
    of the picture placeholder; without it the mismatch test is off.
    """
    report = SelectionReport(groups_in=len(groups), trajectories_in=sum(len(g.trajectories) for g in groups))
    dropped: Counter[str] = Counter()

    def drop(member: Trajectory, reason: str) -> None:
        dropped[reason] += 1
        report.reasons[member.id] = reason

    dropped_groups: Counter[str] = Counter()
    survivors: list[ScoredGroup] = []
    for group in groups:
        healthy = np.array([m.end_reason is not EndReason.INFRASTRUCTURE for m in group.trajectories], bool)
        for member in group.keep(~healthy).trajectories:
            drop(member, "infrastructure")
        group = group.keep(healthy)
        if group.trajectories and rules.zero_variance:
            spread = group.std if rules.variance_of == "total" else group.spread.get(rules.variance_of, 0.0)
            if spread == 0.0:
                reason = "zero_variance" if len(group.trajectories) > 1 else "single"
                for member in group.trajectories:
                    drop(member, reason)
                dropped_groups[reason] += 1
                continue
        flaws = [_flaw(member, rules, image_token, merge_size) for member in group.trajectories]
        for member, flaw in zip(group.trajectories, flaws, strict=True):
            if flaw is not None:
                drop(member, flaw)
        group = group.keep(np.array([flaw is None for flaw in flaws], bool))
        if not group.trajectories:
            dropped_groups["emptied"] += 1
            continue
        survivors.append(group)

    order = list(range(len(survivors)))
    if rules.rank_by_std:
        order.sort(key=lambda index: -survivors[index].std)  # stable: ties keep submission order
    chosen = set(order[:target])
    kept = [group for index, group in enumerate(survivors) if index in chosen]
    reason = "ranked_out" if rules.rank_by_std else "surplus"
    for index, group in enumerate(survivors):
        if index not in chosen:
            dropped_groups[reason] += 1
            for member in group.trajectories:
                drop(member, reason)

    report.groups_kept = len(kept)
    report.trajectories_kept = sum(len(group.trajectories) for group in kept)
    report.dropped, report.dropped_groups = dict(dropped), dict(dropped_groups)
    if kept:
        report.residual_advantage = float(np.concatenate([group.advantages for group in kept]).mean())
    return kept, report
