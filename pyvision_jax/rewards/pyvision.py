"""PyVision-RL's reward: accuracy, and a bonus for each successful tool call of a trajectory whose answer is right."""

from __future__ import annotations

from pyvision_jax.config import RewardConfig
from pyvision_jax.data.records import Record
from pyvision_jax.rewards.answers import matches
from pyvision_jax.rollout.trajectory import EndReason, Trajectory


def score(trajectory: Trajectory, record: Record, config: RewardConfig) -> dict[str, float]:
    """Reward parts of a finished trajectory; `total` is what training reads.

    R = R_acc + bonus * n_tc * 1{R_acc = 1} (PyVision-RL, arXiv 2602.20739, section on the accumulative tool reward).
    n_tc counts calls that ran without an error: the released code pays for every call sent, also one that raised.
    """
    answered = trajectory.end_reason is EndReason.ANSWERED and trajectory.answer is not None
    accuracy = float(answered and matches(trajectory.answer or "", record.answer))
    calls = trajectory.tool_calls
    bonus = {"per_call": calls, "once": min(calls, 1), "off": 0}[config.bonus_form] * config.tool_bonus * accuracy
    return {"accuracy": accuracy, "tool_bonus": bonus, "total": accuracy + bonus}
