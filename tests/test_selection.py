"""Filters, ranking, and the report that accounts for every trajectory."""

from __future__ import annotations

import numpy as np
import pytest

from pyvision_jax.config import SelectionConfig
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.training.advantage import score_group
from pyvision_jax.training.selection import select
from tests.trajectories import toy_trajectory


def scored(name: str, *rewards: float, **options):
    return score_group([toy_trajectory(r, group=name, name=f"{name}{i}", **options) for i, r in enumerate(rewards)])


def balanced(report) -> bool:
    return report.trajectories_in == report.trajectories_kept + sum(
        report.dropped.values()
    ) and report.groups_in == report.groups_kept + sum(report.dropped_groups.values())


def test_ranking_by_group_std_with_ties_by_submission_order():
    groups = [scored("a", 1, 0.9), scored("b", 1, 0), scored("c", 0, 1), scored("d", 1, 0), scored("e", 1, 1)]
    kept, report = select(groups, SelectionConfig(), 2)
    assert [group.id for group in kept] == ["b", "c"]
    assert report.dropped == {"zero_variance": 2, "ranked_out": 4}
    assert report.dropped_groups == {"zero_variance": 1, "ranked_out": 2}
    assert report.reasons == {name: "ranked_out" for name in ("a0", "a1", "d0", "d1")} | dict.fromkeys(
        ("e0", "e1"), "zero_variance"
    )
    assert balanced(report)

    kept, report = select(groups, SelectionConfig(rank_by_std=False), 2)
    assert [group.id for group in kept] == ["a", "b"]
    assert report.dropped["surplus"] == 4
    assert balanced(report)


def test_kept_groups_come_in_submission_order():
    kept, _ = select([scored("a", 1, 0.5), scored("b", 1, 0), scored("c", 0.1, 0.0)], SelectionConfig(), 2)
    assert [group.id for group in kept] == ["a", "b"]


def test_zero_variance_of_accuracy():
    group = score_group([toy_trajectory(1.1, accuracy=1.0), toy_trajectory(1.0, accuracy=1.0)])
    assert len(select([group], SelectionConfig(), 4)[0]) == 1  # bonus differs: total reward keeps it
    kept, report = select([group], SelectionConfig(variance_of="accuracy"), 4)
    assert not kept
    assert report.dropped == {"zero_variance": 2}
    assert len(select([scored("e", 1, 1)], SelectionConfig(zero_variance=False), 4)[0]) == 1


def test_advantages_come_from_the_full_group():
    """P5: one member is dropped, the others keep the advantages of the group of three; the residual is logged."""
    members = [toy_trajectory(1.0), toy_trajectory(0.5), toy_trajectory(0.0, end_reason=EndReason.OVER_LENGTH)]
    kept, report = select([score_group(members)], SelectionConfig(), 1)
    np.testing.assert_allclose(kept[0].advantages, [0.5, 0.0])
    assert report.residual_advantage == pytest.approx(0.25)
    assert report.dropped == {"end_reason.over_length": 1}
    assert balanced(report)


def test_infrastructure_is_dropped_whatever_the_rules():
    members = [toy_trajectory(1.0), toy_trajectory(0.0), toy_trajectory(9.0, end_reason=EndReason.INFRASTRUCTURE)]
    rules = SelectionConfig(end_reasons=(), zero_variance=False)
    kept, report = select([score_group(members)], rules, 1)
    np.testing.assert_allclose(kept[0].advantages, [0.5, -0.5])
    assert report.dropped == {"infrastructure": 1}


def test_each_trajectory_filter_counts_its_own_reason():
    ids = np.array([1, 99, 99, 4, 5, 6, 7])
    right = {"ids": ids, "images": ["h"], "grids": [(1, 2, 4)]}
    members = [
        toy_trajectory(1.0, tool_images=1, **right),
        toy_trajectory(0.0, **right),
        toy_trajectory(0.2, tool_images=1, ids=ids, images=["h"], grids=[(1, 4, 4)]),
        toy_trajectory(0.3, tool_images=1, policy=20),
        toy_trajectory(0.4, end_reason=EndReason.REPETITION),
    ]
    rules = SelectionConfig(require_tool_image=True, max_tokens=10)
    kept, report = select([score_group(members)], rules, 1, image_token=99)
    assert [m.reward for m in kept[0].trajectories] == [1.0]
    assert report.dropped == {
        "end_reason.repetition": 1,
        "no_tool_image": 1,
        "image_mismatch": 1,
        "too_long": 1,
    }
    assert balanced(report)
    assert report.metrics()["selection/dropped/too_long"] == 1.0


def test_emptied_groups_and_no_groups():
    members = [toy_trajectory(r, end_reason=EndReason.OVER_LENGTH) for r in (0.0, 1.0)]
    kept, report = select([score_group(members)], SelectionConfig(), 1)
    assert not kept
    assert report.dropped_groups == {"emptied": 1}
    assert balanced(report)
    assert select([], SelectionConfig(), 1)[0] == []
    single = select([scored("s", 1.0)], SelectionConfig(), 1)[1]
    assert single.dropped == {"single": 1}
