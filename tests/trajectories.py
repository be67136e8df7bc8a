"""Small trajectories for tests of training code."""

from __future__ import annotations

import numpy as np

from pyvision_jax.rollout.trajectory import EndReason, Span, ToolCall, Trajectory


def toy_trajectory(
    reward: float = 0.0,
    *,
    accuracy: float | None = None,
    group: str = "g",
    name: str = "t",
    prompt: int = 3,
    policy: int = 4,
    end_reason: EndReason = EndReason.ANSWERED,
    tool_images: int = 0,
    images: list[str] | None = None,
    grids: list[tuple[int, int, int]] | None = None,
    ids: np.ndarray | None = None,
    temperature: float = 1.0,
) -> Trajectory:
    """Prompt ids, then policy ids; log-probs are -1 on policy ids."""
    length = prompt + policy if ids is None else len(ids)
    sampled = np.arange(length) >= prompt
    call = ToolCall("pass", {"status": "ok"}, 0.0, [f"tool{i}" for i in range(tool_images)])
    return Trajectory(
        id=name,
        record_id=group,
        ids=np.arange(1, length + 1, dtype=np.int32) if ids is None else ids.astype(np.int32),
        spans=[Span("prompt", 0, prompt, 0, False), Span("policy", prompt, length, 0, True)],
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        policy_logprobs=np.where(sampled, -1.5, 0.0).astype(np.float32),
        states=np.zeros(length, np.int32),
        temperatures=np.where(sampled, temperature, 0.0).astype(np.float32),
        versions=np.zeros(length, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), (3, length)).copy(),
        images=images or [],
        image_grids=grids or [],
        calls=[call] if tool_images else [],
        end_reason=end_reason,
        rewards={"total": reward, "accuracy": reward if accuracy is None else accuracy},
        group=group,
    )
