"""Reinforcement learning with groups of rollouts, from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pyvision_jax.agents.loop import Collected
from pyvision_jax.checkpoint import Checkpoints
from pyvision_jax.config import RLConfig
from pyvision_jax.config_check import groups_drawn
from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.data.loader import Loader, Source, UnusableData
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.packing import Example, Packed, Packer, split, trajectory_example
from pyvision_jax.data.records import Record
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.recipes.sft import Metrics, Progress, Trained, devices_of
from pyvision_jax.recipes.trajectories import TrajectoryWriter
from pyvision_jax.rollout.trajectory import EndReason, Trajectory
from pyvision_jax.training.advantage import ScoredGroup, score_group
from pyvision_jax.training.losses import token_weights
from pyvision_jax.training.selection import select
from pyvision_jax.training.state import Optimizer
from pyvision_jax.training.step import Objective, Scorer, TrainStep, put

log = logging.getLogger(__name__)

PHASE = "rl"
IDLE_STEPS = 3  # without a single rollout, after which the data are at fault and not a record


class Collect(Protocol):
    """Rollouts of the records under `params`: groups in the order of the records, siblings in a fixed order.

    Everything must follow from the arguments alone. `params` are good until the next call: the trainer donates them.
    """

    def __call__(self, params: Any, records: Sequence[Record], *, seed: int, version: int) -> Collected: ...


Reward = Callable[[Trajectory, Record], Mapping[str, float]]  # `total` is what trains; `accuracy` is logged


def run(
    cfg: RLConfig,
    *,
    model_spec: ModelSpec,
    params: Any,
    tokenizer: Tokenizer,
    processor: ImageProcessor,
    source: Source,
    collect: Collect,
    reward: Reward,
    images: ImageStore,
    metrics_writer: Metrics,
    trajectory_writer: TrajectoryWriter | None = None,
    evaluate: Callable[[Any, int], Mapping[str, float]] | None = None,
    progress: Progress | None = None,
    on_skip: Callable[[str, str], object] | None = None,
    on_drop: Callable[[int, Mapping[str, int]], object] | None = None,
    resume: bool = False,
    mesh: Mesh | None = None,
) -> Trained:
    """Trains a copy of `params` for `cfg.steps` steps and returns the result.

    A step draws oversample x prompts records, collects a group of rollouts for each, scores them, keeps the best groups
    (training.selection) and makes `algorithm.minibatches` updates from them. The weights that collected step k carry
    version k - 1; step 0 is what the KL term refers to.

    images: where `collect` has put the pictures that its trajectories name; emptied after every step.
    evaluate: (params, step) -> metrics, called whenever a checkpoint is made; it must not keep the parameters.
    on_skip: (record, reason), called once for every record that cannot be used.
    on_drop: (step, rollouts left out by reason), called after the selection of every step.

    Checkpoints lie in `cfg.run_dir`/checkpoints, always between two steps: rollouts of a step that was cut short are
    made again from the same seeds. With `resume` the rest of the run is bit for bit what it would have been.
    """
    algorithm = cfg.algorithm
    forbidden = tokenizer.forbidden_mask(model_spec.text.vocab_size)
    packer = Packer(model_spec, processor, cfg.packing, forbidden=forbidden, multiple=devices_of(mesh))
    loader: Loader[Record, list[Record]] = Loader(
        source,
        batch_size=groups_drawn(algorithm),
        prepare=lambda record: record,
        finish=list,
        seed=cfg.data.shuffle_seed,
        on_skip=on_skip,
    )
    optimizer = Optimizer(cfg.optimizer, cfg.steps * algorithm.minibatches)
    scorer = Scorer(model_spec, forbidden, cfg.model.dtype, cfg.model.remat)
    train_step = TrainStep(scorer, optimizer, Objective.of(algorithm), mesh)
    reference = _Reference(scorer, params, mesh) if algorithm.kl_coef else None
    state = optimizer.init(jax.tree.map(jnp.copy, params))  # the caller's parameters survive the first donation
    del params

    started = time.perf_counter()
    numbers: dict[str, float] = {}
    run_dir = Path(cfg.run_dir)
    with contextlib.closing(loader), Checkpoints(run_dir / "checkpoints", cfg.checkpoint.keep) as checkpoints:
        done = 0
        if checkpoints.start(resume) is not None:
            done, state, host = checkpoints.restore(state)
            packer.restore(host["sizes"])
            loader.restore(host["data"])
        idle = 0
        for step in range(done + 1, cfg.steps + 1):
            checkpoints.check()
            clock = _Clock()
            records = next(loader)
            collected = collect(state.params, records, seed=_seed(cfg.seed, step, cfg.rollout.seed), version=step - 1)
            for name, reason in collected.skipped:
                log.warning("record %s skipped: %s", name, reason)
                if on_skip is not None:
                    on_skip(name, reason)
            clock.mark("gen")

            groups = [group for group in collected.groups if group]
            idle = 0 if groups else idle + 1
            if idle == IDLE_STEPS:
                reason = collected.skipped[-1][1]
                raise UnusableData(f"no record of {idle} steps could be rolled out; the last one: {reason}")
            by_id = {record.id: record for record in records}
            for trajectory in (trajectory for group in groups for trajectory in group):
                _score(trajectory, by_id[trajectory.record_id], reward)
            clock.mark("reward")

            scored = [score_group(group, normalize_std=algorithm.normalize_std) for group in groups]
            kept, report = select(
                scored,
                cfg.selection,
                algorithm.prompts,
                image_token=model_spec.image_token,
                merge_size=model_spec.vision.merge_size,
            )
            if on_drop is not None:
                on_drop(step, report.dropped)
            clock.mark("adv")

            updates: list[Mapping[str, Any]] = []
            too_long: list[tuple[str, str]] = []
            positions = 0
            for minibatch in split(kept, algorithm.minibatches):
                examples, divisor = _examples(minibatch, cfg, images, model_spec.image_token)
                packed = packer.pack(examples, too_long="skip")
                too_long += packed.skipped
                if not packed.batches:
                    continue
                if reference is not None:
                    packed = reference(packed)
                positions += sum(batch.ids.size for batch in packed.batches)
                state, metrics = train_step(state, packed.batches, divisor)
                updates.append(metrics)
            updates = jax.device_get(updates)  # waits for the device
            clock.mark("update_actor")

            numbers = (
                _rollout_metrics(groups)
                | report.metrics()
                | _update_metrics(updates)
                | (_spread("critic/advantages", np.concatenate([group.advantages for group in kept])) if kept else {})
                | {
                    "training/global_step": float(step),
                    "data/skipped": float(len(loader.skipped) + len(collected.skipped)),
                    "selection/dropped/over_row_length": float(len(too_long)),
                    "perf/fill": sum(len(m.ids) for g in kept for m in g.trajectories) / positions
                    if positions
                    else 0.0,
                }
            )
            if trajectory_writer is not None and cfg.save_trajectories:
                trajectory_writer.write(
                    PHASE,
                    step,
                    [member for group in scored for member in group.trajectories],
                    advantages={
                        m.id: float(a) for g in scored for m, a in zip(g.trajectories, g.advantages, strict=True)
                    },
                    dropped=report.reasons,
                    references={record.id: record.answer for record in records},
                )
            due = step % cfg.checkpoint.every == 0 or step == cfg.steps
            if evaluate is not None and due:
                numbers |= evaluate(state.params, step)
                clock.mark("testing")
            numbers |= clock.metrics() | _throughput(groups, clock.total)
            metrics_writer.write(step, numbers, PHASE)
            if due:  # last, so that no step behind a checkpoint lacks its row
                checkpoints.save(step, state, {"sizes": packer.state(), "data": loader.state()})
            if progress is not None:
                progress(step, cfg.steps, numbers)
            images.keep(set())  # everything of this step is on disk or in the past (U56)
    return Trained(state.params, numbers, loader.skipped.listed(), time.perf_counter() - started)


def _seed(seed: int, step: int, rollout_seed: int = 0) -> int:
    """32 bits that follow from the run's seeds and the step: a resumed step samples what it would have sampled."""
    own = (seed, step, rollout_seed) if rollout_seed else (seed, step)
    return int(np.random.SeedSequence(own).generate_state(1)[0])


def _score(trajectory: Trajectory, record: Record, reward: Reward) -> None:
    """Fills `rewards`. A total that is no number says nothing of the policy: the rollout counts as infrastructure."""
    trajectory.rewards = {name: float(value) for name, value in reward(trajectory, record).items()}
    if not math.isfinite(trajectory.reward):
        trajectory.end_reason = EndReason.INFRASTRUCTURE


def _examples(
    groups: list[ScoredGroup], cfg: RLConfig, images: ImageStore, image_token: int
) -> tuple[list[Example], float | None]:
    """Examples of one minibatch, their weights by `algorithm.loss_aggregation`, and the divisor of the loss."""
    members = [
        (number, trajectory, float(advantage))
        for number, group in enumerate(groups)
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True)
    ]
    counts = np.array([int(trajectory.policy_mask.sum()) for _, trajectory, _ in members])
    numbers = np.array([number for number, _, _ in members])
    weights, divisor = token_weights(counts, numbers, cfg.algorithm.loss_aggregation, cfg.rollout.max_length)
    examples = [
        trajectory_example(
            trajectory,
            advantage=advantage,
            weight=float(weight),
            images=[images.get(name) for name in trajectory.images],
            image_token=image_token,
            filtered=cfg.sampling.filtered,
        )
        for (_, trajectory, advantage), weight in zip(members, weights, strict=True)
    ]
    return examples, divisor


class _Reference:
    """Log-probabilities under the parameters that the run began with, for the KL term."""

    def __init__(self, scorer: Scorer, params: Any, mesh: Mesh | None):
        self._score = jax.jit(lambda params, batch: scorer(params, batch)[0])
        self._params = params
        self._mesh = mesh

    def __call__(self, packed: Packed) -> Packed:
        with jax.set_mesh(self._mesh) if self._mesh is not None else contextlib.nullcontext():
            scored = [self._score(self._params, put(batch, self._mesh)) for batch in packed.batches]
        batches = [
            dataclasses.replace(batch, ref_logprobs=cast(Any, np.asarray(logprobs)))
            for batch, logprobs in zip(packed.batches, scored, strict=True)
        ]
        return Packed(batches, packed.skipped)


class _Clock:
    """Wall seconds of the parts of a step, under verl's names."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[f"timing_s/{part}"] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start

    def metrics(self) -> dict[str, float]:
        return self._parts | {"timing_s/step": self.total}


def _spread(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    array = np.asarray(values, np.float64)
    return {f"{name}/{kind}": float(f(array)) for kind, f in (("mean", np.mean), ("max", np.max), ("min", np.min))}


def _rollout_metrics(groups: list[list[Trajectory]]) -> dict[str, float]:
    """Of all rollouts, before any filter; infrastructure is counted and enters nothing else.

    Lengths count policy ids only: prompts and observations are the tool's and the task's (U28).
    """
    everyone = [member for group in groups for member in group]
    ends = Counter(member.end_reason for member in everyone)
    out = {f"end_reason/{reason.value}": ends[reason] / max(len(everyone), 1) for reason in EndReason}
    out["rollout/trajectories"] = float(len(everyone))
    members = [member for member in everyone if member.end_reason is not EndReason.INFRASTRUCTURE]
    if not members:
        return out
    lengths = [int(member.policy_mask.sum()) for member in members]
    out |= _spread("critic/rewards", [member.reward for member in members])
    out |= _spread("critic/score", [member.rewards.get("accuracy", member.reward) for member in members])
    out |= _spread("response_length", lengths)
    out["response_length/clip_ratio"] = float(
        np.mean([member.end_reason is EndReason.OVER_LENGTH for member in members])
    )
    out |= _spread("prompt_length", [next((s.end for s in m.spans if s.kind == "prompt"), 0) for m in members])
    out |= _spread("num_turns", [sum(span.kind == "policy" for span in member.spans) for member in members])
    out |= _spread("tool_call_counts", [member.tool_calls for member in members])
    out["tool_call_counts/zero_share"] = float(np.mean([not member.calls for member in members]))
    calls = [call for member in members for call in member.calls]
    out["tools/failure_frequency"] = float(np.mean([not call.ok for call in calls])) if calls else 0.0
    out["tools/seconds"] = float(np.mean([call.seconds for call in calls])) if calls else 0.0
    names = {name for member in members for name in member.rewards} - {"total"}
    out |= {f"reward/{name}/mean": float(np.mean([m.rewards.get(name, 0.0) for m in members])) for name in names}
    return out


def _update_metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the updates of a step; the gap to the sampler is the first one's, when both have the same weights."""
    if not updates:
        return {"actor/update_skipped": 1.0}
    out = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    first = {name: float(value) for name, value in updates[0].items() if name.startswith("training/rollout_")}
    return out | first | {"actor/lr": float(updates[-1]["actor/lr"]), "actor/updates": float(len(updates))}


def _throughput(groups: list[list[Trajectory]], seconds: float) -> dict[str, float]:
    tokens = sum(len(member.ids) for group in groups for member in group)
    return {"perf/total_num_tokens": float(tokens), "perf/throughput": tokens / seconds / jax.device_count()}
