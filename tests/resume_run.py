"""An RL run with a real engine on a tiny policy, for test_resume: `python -m tests.resume_run ACTION RUN_DIR [KILL]`.

ACTION is `run`, or `resume`. KILL names the place at which the process sends itself SIGKILL: `collect:3` (half of the
rollouts of step 3 done), `reward:4`, `saved:2` (the save of step 2 has just begun). Behind step 2 it waits for that
save to be whole, so that a middle of the run is resumed from.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from pyvision_jax.agents.loop import Collected
from pyvision_jax.checkpoint import Checkpoints
from pyvision_jax.config import (
    AlgorithmConfig,
    CheckpointConfig,
    OptimizerConfig,
    PackingConfig,
    RLConfig,
    RolloutConfig,
    SamplingConfig,
    SelectionConfig,
)
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.records import Answer, Message, Part, Record
from pyvision_jax.data.tokenizer import train_tiny
from pyvision_jax.recipes import rl
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.requests import Request
from pyvision_jax.rollout.trajectory import EndReason, Span, Trajectory
from pyvision_jax.training.state import Optimizer
from tests.tiny import random_params, tiny_spec
from tests.trajectories import PROCESSOR, random_image

STEPS, GROUP = 4, 4
TOKENIZER = train_tiny(["one two three"], 280)
SPEC = tiny_spec(
    TOKENIZER.vocab_size,
    layers=1,
    depth=1,
    fullatt_blocks=(0,),
    ids=(TOKENIZER.image_pad, TOKENIZER.video_pad, TOKENIZER.vision_start, TOKENIZER.vision_end),
)
PARAMS = random_params(SPEC, scale=0.1)


def config(run_dir: Path) -> RLConfig:
    return RLConfig(
        run_dir=str(run_dir),
        seed=5,
        steps=STEPS,
        optimizer=OptimizerConfig(lr=1e-2),
        packing=PackingConfig(row_length=64, rows=4),
        sampling=SamplingConfig(temperature=1.2),
        rollout=RolloutConfig(slots=8, max_length=64, max_turn_length=6, prefill_buckets=(32,), patch_buckets=(16,)),
        selection=SelectionConfig(end_reasons=("over_length",)),
        algorithm=AlgorithmConfig(group_size=GROUP, prompts=2, oversample=1.5, minibatches=2),
        checkpoint=CheckpointConfig(every=2, keep=3),
    )


class Source:
    """Five tasks; the picture and the question follow from the number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Record:
        question = Message("user", (Part("text", "one two three"[index:]),))
        return Record(f"task{index}", (question,), (), Answer(""), "none", "test", {"picture": index})


class Rollouts:
    """Two turns with a picture between them."""

    def __init__(self, cfg: RLConfig, store: ImageStore, kill: str):
        self.engine = Engine(PARAMS, SPEC, cfg.rollout, cfg.sampling, TOKENIZER, (), PROCESSOR)
        self.store, self.kill = store, kill
        self.saved = Path(cfg.run_dir) / "checkpoints" / "2"

    def __call__(self, params, records, *, seed, version) -> Collected:
        self.engine.update(params, version)
        made: dict[tuple[int, int], Trajectory] = {}
        begun = {}
        for index, record in enumerate(records):
            image = random_image(record.meta["picture"])
            self.store.put(image)
            ids = [*TOKENIZER.encode(record.messages[0].parts[0].text), *shown(image)]
            request = Request(ids, [image], group=record.id, n=GROUP, seed=seed + index)
            begun |= {handle: (index, [], len(ids)) for handle in self.engine.submit(request)}
        while begun:
            for segment in self.engine.run():
                index, segments, start = begun[segment.handle]
                segments.append(segment)
                if len(segments) == 1:
                    image = random_image(100 + index)
                    self.store.put(image)
                    self.engine.extend(segment.handle, shown(image), [image])
                    continue
                made[index, segment.handle.index] = self.trajectory(segment.handle, segments, start)
                del begun[segment.handle]
                self.engine.release(segment.handle)
                if len(made) == GROUP:
                    die(self.kill, f"collect:{version + 1}", self.saved if version >= 2 else None)
        return Collected([[made[index, k] for k in range(GROUP)] for index in range(len(records))], [])

    def trajectory(self, handle, segments, start) -> Trajectory:
        view = self.engine.view(handle)
        arrays = {
            name: np.zeros(len(view.ids), np.float32)
            for name in ("logprobs", "policy_logprobs", "states", "temperatures", "versions")
        }
        spans = [Span("prompt", 0, start, 0, False)]
        for turn, segment in enumerate(segments):
            end = segment.start + len(segment.ids)
            spans.append(Span("policy", segment.start, end, turn, True))
            for name, array in arrays.items():
                array[segment.start : end] = vars(segment)[name]
        return Trajectory(
            id=f"{handle.group}/{handle.index}",
            record_id=handle.group,
            ids=view.ids,
            spans=spans,
            positions=view.positions,
            images=[image.hash for image in view.images],
            image_grids=[image.grid for image in view.images],
            end_reason=EndReason.OVER_LENGTH,
            group=handle.group,
            seed=handle.seed,
            **arrays,
        )


def shown(image) -> list[int]:
    pads = [TOKENIZER.image_pad] * PROCESSOR.grid_tokens(image.grid)
    return [TOKENIZER.vision_start, *pads, TOKENIZER.vision_end]


def die(kill: str, here: str, saved: Path | None = None) -> None:
    if kill == here:
        while saved is not None and not saved.is_dir():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)


class Rows(list):
    """A metrics writer."""

    def write(self, step, values, phase=None) -> None:
        self.append((step, dict(values)))


def run(run_dir: Path, resume: bool, kill: str = "") -> None:
    """Runs, and leaves `final.npz` (every leaf of the state, and the metrics of the last step) and `host.json`."""
    cfg, store, rows, scored = config(run_dir), ImageStore(), Rows(), [0]

    def reward(trajectory, record):
        scored[0] += 1
        die(kill, f"reward:{1 + scored[0] // (3 * GROUP)}", run_dir / "checkpoints" / "2")
        return {"total": float((trajectory.ids[trajectory.policy_mask] % 2).mean())}

    def saved(step, steps, numbers):  # the save of this step has begun
        die(kill, f"saved:{step}")

    rl.run(
        cfg,
        model_spec=SPEC,
        params=PARAMS,
        tokenizer=TOKENIZER,
        processor=PROCESSOR,
        source=Source(),
        collect=Rollouts(cfg, store, kill),
        reward=reward,
        images=store,
        metrics_writer=rows,
        progress=saved,
        resume=resume,
    )
    template = Optimizer(cfg.optimizer, STEPS * 2).init(PARAMS)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        step, state, host = checkpoints.restore(template)
    numbers = {k: v for k, v in rows[-1][1].items() if not k.startswith(("timing_s", "perf/throughput"))}
    leaves = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
    np.savez(run_dir / "final.npz", **leaves)
    text = {"step": step, "host": host, "metrics": numbers, "first": rows[0][0]}
    (run_dir / "host.json").write_text(json.dumps(text, sort_keys=True))


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", os.environ["PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    action, names, *kills = sys.argv[1:]
    for name in names.split(","):
        run(Path(name), action == "resume", *kills)
