"""Supervised fine-tuning on traces, from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pyvision_jax.checkpoint import Checkpoints
from pyvision_jax.config import SFTConfig
from pyvision_jax.data.batch import TokenBatch
from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.data.loader import Loader, Source
from pyvision_jax.data.packing import Example, Packer
from pyvision_jax.data.records import Record
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.training.state import Optimizer
from pyvision_jax.training.step import Objective, Scorer, TrainStep

PHASE = "sft"


class Metrics(Protocol):
    """`recipes.metrics.MetricsWriter`, or anything with its `write`."""

    def write(self, step: int, values: Mapping[str, Any], phase: str | None = None) -> None: ...


Progress = Callable[[int, int, Mapping[str, float]], None]  # (steps done, steps in all, metrics of the last)


@dataclasses.dataclass
class Trained:
    """What a run leaves: parameters, the last metrics, records that were skipped (index, reason), and wall seconds."""

    params: Any
    metrics: dict[str, float]
    skipped: list[tuple[int, str]]
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Made in the loader's thread, with the packing sizes that a checkpoint behind this batch has to hold."""

    batches: list[TokenBatch]
    sizes: dict[str, int]
    numbers: dict[str, float]


def devices_of(mesh: Mesh | None) -> int:
    """Devices that split the rows of a batch."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def run(
    cfg: SFTConfig,
    *,
    model_spec: ModelSpec,
    params: Any,
    tokenizer: Tokenizer,
    processor: ImageProcessor,
    source: Source,
    example: Callable[[Record], Example],
    metrics_writer: Metrics,
    evaluate: Callable[[Any, int], Mapping[str, float]] | None = None,
    progress: Progress | None = None,
    on_skip: Callable[[str, str], object] | None = None,
    resume: bool = False,
    mesh: Mesh | None = None,
    threads: int = 0,
) -> Trained:
    """Trains a copy of `params` for `cfg.steps` steps of `cfg.batch_size` traces and returns the result.

    source: traces, map-style; a generated world will do.
    example: `AgentProtocol.example`: trace -> ids, weights, pictures.
    evaluate: (params, step) -> metrics, called whenever a checkpoint is made. It must not keep the parameters.
    on_skip: (record, reason), called once for every record that cannot be used; from any thread.
    threads: readers beside the one thread that works ahead; for pictures on disk.

    Checkpoints lie in `cfg.run_dir`/checkpoints. With `resume` the latest whole one is gone on from, and the rest of
    the run is bit for bit what it would have been.
    """
    forbidden = tokenizer.forbidden_mask(model_spec.text.vocab_size)
    packer = Packer(model_spec, processor, cfg.packing, forbidden=forbidden, multiple=devices_of(mesh))

    def prepare(record: Record) -> Example:
        made = example(record)
        if not np.any(made.loss_weights):
            raise ValueError(f"{record.id}: nothing to learn: a task, or all its assistant text has weight 0")
        packer.check(made)
        return made

    def finish(examples: list[Example]) -> _Batch:
        packed = packer.pack(examples)
        numbers = {
            "perf/total_num_tokens": float(sum(len(one.ids) for one in examples)),
            "perf/fill": packed.fill,
            "perf/micro_batches": float(len(packed.batches)),
            "data/learned_tokens": float(sum(np.count_nonzero(one.loss_weights) for one in examples)),
        }
        return _Batch(packed.batches, packer.state(), numbers)

    loader = Loader(
        source,
        batch_size=cfg.batch_size,
        prepare=prepare,
        finish=finish,
        seed=cfg.data.shuffle_seed,
        threads=threads,
        on_skip=on_skip,
    )
    optimizer = Optimizer(cfg.optimizer, cfg.steps)
    scorer = Scorer(model_spec, forbidden, cfg.model.dtype, cfg.model.remat)
    train_step = TrainStep(scorer, optimizer, Objective("sft"), mesh)
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
        for step in range(done + 1, cfg.steps + 1):
            checkpoints.check()
            clock = time.perf_counter()
            batch = next(loader)
            waited = time.perf_counter() - clock
            state, metrics = train_step(state, batch.batches)

            # Reading metrics waits for the device; between two logged steps the host runs ahead of it.
            if step % cfg.log_every == 0 or step == cfg.steps:
                numbers = {name: float(value) for name, value in jax.device_get(metrics).items()} | batch.numbers
                numbers["data/skipped"] = float(len(loader.skipped))
                numbers["timing_s/data"] = waited
                numbers["timing_s/step"] = time.perf_counter() - clock
                numbers["training/global_step"] = float(step)
                metrics_writer.write(step, numbers, PHASE)
                if progress is not None:
                    progress(step, cfg.steps, numbers)
            if step % cfg.checkpoint.every == 0 or step == cfg.steps:
                checkpoints.save(step, state, {"sizes": batch.sizes, "data": loader.state()})
                if evaluate is not None:
                    metrics_writer.write(step, evaluate(state.params, step), PHASE)
    return Trained(state.params, numbers, loader.skipped.listed(), time.perf_counter() - started)
