"""A small run directory, made by the real writers from numbers drawn with a fixed seed. Shared by the tests of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyvision_jax.data.records import Answer
from pyvision_jax.recipes.run_dir import RunDir
from pyvision_jax.rollout.trajectory import EndReason, Span, ToolCall, Trajectory

WORDS = ("which ", "digit ", "is ", "in ", "the ", "red ", "box ", "crop ", "seven ", "<b>", "& ")
IMAGE_PAD = 99


def decode(ids: list[int]) -> str:
    return "".join(
        "<|image_pad|>" if id == IMAGE_PAD else "<|im_end|>" if id == 98 else WORDS[id % len(WORDS)] for id in ids
    )


def picture(digest: str) -> np.ndarray:
    """A gradient whose colour follows from its name."""
    rng = np.random.default_rng(abs(int(digest, 16)) % 2**32)
    ramp = np.linspace(0, 1, 84)[:, None, None] * np.ones((84, 84, 1))
    return (ramp * rng.integers(80, 255, 3)).astype(np.uint8)


def trajectory(name: str, group: str, *, right: bool, called: bool, rng: np.random.Generator) -> Trajectory:
    """Prompt with one picture, a call with a picture as observation (or none), and an answer."""
    prompt = [*rng.integers(0, 11, 6), *[IMAGE_PAD] * 9, *rng.integers(0, 11, 4)]
    think = [*rng.integers(0, 11, 8), 98]
    observation = [*[IMAGE_PAD] * 9, 98] if called else []
    answer = [*rng.integers(0, 11, 3), 98] if called else []
    parts = [
        ("prompt", prompt, False),
        ("policy", think, True),
        ("observation", observation, False),
        ("policy", answer, True),
    ]
    spans, ids = [], []
    for turn, (kind, piece, learn) in enumerate(parts):
        if piece:
            spans.append(Span(kind, len(ids), len(ids) + len(piece), turn // 2, learn))
            ids += piece
    length = len(ids)
    crop = f"{rng.integers(0, 2**60):016x}"
    result = {"status": "ok", "stdout": "7 < 8\n", "stderr": "", "repr": None, "error": None, "usage": {"cpu": 0.01}}
    if not right:
        error = {"name": "NameError", "message": "x", "traceback": "Traceback: name 'x' is not defined"}
        result |= {"status": "error", "error": error}
    calls = [ToolCall("crop = image_clue_0.crop((0, 0, 32, 32))\nshow(crop)", result, 0.012, [crop])] if called else []
    return Trajectory(
        id=name,
        record_id=f"task-{group}",
        ids=np.array(ids, np.int32),
        spans=spans,
        logprobs=rng.normal(-0.5, 0.2, length).astype(np.float32),
        policy_logprobs=rng.normal(-0.6, 0.2, length).astype(np.float32),
        states=rng.integers(0, 7, length).astype(np.int32),
        temperatures=np.ones(length, np.float32),
        versions=np.full(length, 3, np.int32),
        positions=rng.integers(0, length, (3, length)).astype(np.int32),
        entropies=rng.uniform(0, 1, length).astype(np.float32),
        images=[f"{abs(hash_of(group)):016x}", *([crop] if called else [])],
        image_grids=[(1, 6, 6)] * (1 + called),
        calls=calls,
        events=[{"kind": "code", "at": 20}] if called else [],
        end_reason=EndReason.ANSWERED if right or not called else EndReason.OVER_TURNS,
        rewards={
            "accuracy": float(right),
            "tool_bonus": 0.1 * (right and called),
            "total": right + 0.1 * (right and called),
        },
        answer="7" if right else "1",
        group=group,
        seed=int(rng.integers(0, 1000)),
    )


def hash_of(text: str) -> int:
    return sum(ord(char) * 31**place for place, char in enumerate(text)) % 2**60


def step_of_trajectories(rng: np.random.Generator, step: int, groups: int = 3, size: int = 4) -> list[Trajectory]:
    made = []
    for group in range(groups):
        for member in range(size):
            right, called = bool(rng.random() < 0.3 + 0.02 * step), bool(rng.random() < 0.7)
            name = f"{step}-{group}-{member}"
            made.append(trajectory(name, f"{step}-{group}", right=right, called=called, rng=rng))
    return made


def make_run(path: Path, steps: int = 24, summary: bool = True, tensorboard: bool = False) -> RunDir:
    """A run of `steps` RL steps with metrics, trajectories, drops, skipped records and (unless crashed) a summary."""
    rng = np.random.default_rng(0)
    run = RunDir(path, command="pyvision demo --seed 0")
    run.write_config({"run_dir": "runs/demo", "algorithm": {"group_size": 4}})
    run.write_versions()
    run.write_sandbox({"level": "none", "mechanisms": [{"name": "rlimits", "on": True, "why": "set in the child"}]})
    run.write_manifest("train", kind="needle", photographs=8)
    run.skip("rec-7", "truncated JPEG: <half> a file", file="data/train.jsonl", row=7)
    run.skip("rec-9", "no answer", file="data/train.jsonl", row=9)
    with run.metrics("sft", tensorboard=tensorboard) as metrics:
        for step in range(10):
            metrics.write(step, {"train/loss": 3 * 0.8**step, "actor/grad_norm": 1.0, "timing_s/step": 0.5})
    with run.trajectories(decode, picture) as writer, run.metrics("rl", tensorboard=tensorboard) as metrics:
        for step in range(steps):
            made = step_of_trajectories(rng, step)
            advantages = {item.id: item.reward - 0.5 for item in made}
            dropped = {item.id: "zero_variance" for item in made if item.group.endswith("-2") and step % 2}
            references = {item.record_id: Answer("7") for item in made}
            writer.write("rl", step, made, advantages=advantages, dropped=dropped, references=references)
            run.drop("rl", step, {"zero_variance": step % 3, "image_mismatch": step % 2})
            metrics.write(
                step,
                {
                    "critic/rewards/mean": np.float32(np.mean([item.reward for item in made])),
                    "actor/entropy": 0.3 - 0.005 * step,
                    "training/rollout_logprobs_diff_mean": 2e-5,
                    "timing_s/gen": 1.5,
                    "timing_s/update_actor": 0.7,
                    "timing_s/step": 2.2,
                },
            )
        if summary:
            writer.write("eval_rl", steps, step_of_trajectories(rng, steps), extras={f"{steps}-0-0": {"gap": 1e-5}})
    if summary:
        cell = {"n": 256}
        run.write_summary(
            {
                "accuracy": {
                    "untrained": {"mean": 0.02, "low": 0.01, "high": 0.05, "greedy": 0.0, **cell},
                    "sft": {"mean": 0.30, "low": 0.25, "high": 0.36, "greedy": 0.59, **cell},
                    "rl": {"mean": 0.63, "low": 0.57, "high": 0.69, "greedy": 0.78, **cell},
                    "tool_off": {"mean": 0.20, "low": 0.16, "high": 0.26, "greedy": 0.2, **cell},
                    "direct": {"mean": 0.18, "low": 0.14, "high": 0.23, "greedy": 0.19, **cell},
                    "wrong_image": {"mean": 0.17, "low": 0.13, "high": 0.22, "greedy": 0.16, **cell},
                },
                "photographs": {"unseen": {"mean": 0.6, "low": 0.5, "high": 0.7, "n": 96}},
                "gain": {"mean": 0.33, "low": 0.26, "high": 0.40, "n": 256},
                "chance": 1 / 6,
                "tool_calls": {"sft": 0.86, "rl": 1.24},
                "seconds": {"sft": 119.0, "rl": 224.5},
                "seed": 0,
            }
        )
    return run
