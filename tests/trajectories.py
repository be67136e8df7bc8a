"""Small trajectories for tests of training code."""

from __future__ import annotations

import numpy as np
from PIL import Image

from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.data.packing import Example, image_token_index
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.positions import mrope_positions
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


PROCESSOR = ImageProcessor(min_pixels=28 * 28, max_pixels=9 * 28 * 28)


def random_image(seed: int, size: tuple[int, int] = (56, 56)) -> ProcessedImage:
    """A picture of noise, (height, width) in pixels, multiples of 28."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return PROCESSOR.process(Image.fromarray(pixels))


def random_example(
    spec: ModelSpec, seed: int, images: list[ProcessedImage] | None = None, *, prompt: int = 3, learned: int = 5
) -> Example:
    """Pictures, `prompt` text ids, `learned` learned ids, two ids of an observation, two learned ones."""
    rng = np.random.default_rng(seed)
    images = images or []
    ids: list[int] = [1]
    for image in images:
        tokens = PROCESSOR.grid_tokens(image.grid)
        ids += [spec.vision_start, *[spec.image_token] * tokens, spec.vision_end]
    ids += rng.integers(2, 40, prompt + learned + 4).tolist()
    array = np.array(ids, np.int32)
    weights = np.zeros(len(ids), np.float32)
    weights[-learned - 4 : -4] = 1
    weights[-2:] = 1
    return Example(
        name=f"example{seed}",
        ids=array,
        positions=mrope_positions(array, [image.grid for image in images], [], spec)[0],
        loss_weights=weights,
        image_index=image_token_index(array, spec.image_token),
        images=images,
        temperatures=rng.uniform(0.5, 1.5, len(ids)).astype(np.float32),
        old_logprobs=rng.uniform(-5, -3, len(ids)).astype(np.float32),
        ref_logprobs=rng.uniform(-5, -3, len(ids)).astype(np.float32),
        advantages=np.full(len(ids), rng.normal(), np.float32),
    )
