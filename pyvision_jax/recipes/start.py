"""A run from its configuration: what `pyvision sft`, `rl` and `eval` do, as functions.

from pyvision_jax.recipes.start import start_sft
start_sft(load(SFTConfig, "configs/pyvision_image_sft.yaml", ["data.train=traces.jsonl"]))
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from pyvision_jax import report
from pyvision_jax.agents.loop import Collected
from pyvision_jax.checkpoint import CheckpointError, Checkpoints
from pyvision_jax.config import RLConfig, SFTConfig
from pyvision_jax.config_check import arithmetic
from pyvision_jax.config_load import ConfigError
from pyvision_jax.data.chat import CHAT_TEMPLATE
from pyvision_jax.data.loader import UnusableData
from pyvision_jax.data.records import Record
from pyvision_jax.evaluation.metrics import mean_interval
from pyvision_jax.models.hf import export_weights
from pyvision_jax.recipes import rl, sft
from pyvision_jax.recipes.build import (
    Host,
    Records,
    build_evaluation,
    build_host,
    build_mesh,
    build_params,
    build_tasks,
    build_traces,
)
from pyvision_jax.recipes.collect import Collector, open_pool
from pyvision_jax.recipes.metrics import Progress
from pyvision_jax.recipes.run_dir import RunDir
from pyvision_jax.recipes.trajectories import TrajectoryWriter
from pyvision_jax.rewards import pyvision
from pyvision_sandbox import SandboxPool

EVALUATED = 256  # held-out tasks of one evaluation during training
Say = Callable[[str], None]


def start_sft(
    config: SFTConfig, *, resume: bool = False, replace: bool = False, dry: bool = False, say: Say = print
) -> Path:
    """Fine-tunes on traces; the run's folder, with the weights in Hugging Face layout under `model`.

    `resume` goes on from the newest checkpoint of `config.run_dir`, `replace` removes an earlier run there; with
    neither, an earlier run is an error. `dry` checks all that needs no device, says the arithmetic and stops. Raises
    `ConfigError` before any device work.
    """
    host = build_host(config)
    records = build_traces(config.data)
    for line in _facts(config, records):
        say(line)
    if dry:
        return Path(config.run_dir)
    mesh = build_mesh(config.mesh, config.packing.rows)
    run_dir = open_run(config, records, resume, replace)
    done = _done(run_dir, resume, say)
    params = build_params(config.model, config.seed, mesh)
    with (
        _one_line(),
        run_dir.metrics(sft.PHASE, done + 1 if resume else None) as metrics,
        Progress(sft.PHASE, config.steps, done) as bar,
    ):
        trained = sft.run(
            config,
            model_spec=host.spec,
            params=params,
            tokenizer=host.tokenizer,
            processor=host.processor,
            source=records.source,
            example=host.protocol.example,
            metrics_writer=metrics,
            progress=lambda step, _, numbers: _advance(bar, step, numbers),
            on_skip=lambda name, reason: run_dir.skip(name, reason, config.data.train),
            resume=resume,
            mesh=mesh if mesh.size > 1 else None,
            threads=0 if config.data.train == "needle" else 4,
        )
    return _close(config, host, run_dir, trained.params, say)


def start_rl(
    config: RLConfig, *, resume: bool = False, replace: bool = False, dry: bool = False, say: Say = print
) -> Path:
    """Reinforcement learning on tasks; arguments, result and errors as `start_sft`.

    With `data.eval` the policy is evaluated on held-out tasks whenever a checkpoint is made (`val/accuracy`, at the
    sampling of training). Raises `SandboxUnavailable` if the machine falls short of `sandbox.min_level`.
    """
    host = build_host(config)
    records = build_tasks(config.data)
    held_out = build_evaluation(config.data) if config.data.eval else None
    for line in _facts(config, records):
        say(line)
    if dry:
        return Path(config.run_dir)
    with _one_line(), open_pool(config.sandbox) as pool, contextlib.ExitStack() as stack:
        mesh = build_mesh(config.mesh, config.packing.rows)
        run_dir = open_run(config, records, resume, replace)
        run_dir.write_sandbox(pool.report.to_dict())
        done = _done(run_dir, resume, say)
        params = build_params(config.model, config.seed, mesh)
        collector = _collector(config, host, pool)
        stack.callback(collector.close)
        cast = _cast(config)

        def collect(params: Any, records: Sequence[Record], *, seed: int, version: int) -> Collected:
            return collector(cast(params), records, seed=seed, version=version)

        def evaluate(params: Any, step: int) -> Mapping[str, float]:
            assert held_out is not None
            tasks = _first(held_out, EVALUATED)
            temperature = config.sampling.temperature
            collected = collector.evaluate(cast(params), tasks, seed=config.seed, temperature=temperature)
            right = _accuracies(config, tasks, collected)
            return {"val/accuracy": float(np.mean([value for row in right for value in row])), "val/tasks": len(right)}

        metrics = stack.enter_context(run_dir.metrics(rl.PHASE, done + 1 if resume else None))
        trajectories = stack.enter_context(_trajectories(run_dir, host, collector))
        bar = stack.enter_context(Progress(rl.PHASE, config.steps, done))
        if resume:
            run_dir.rewind(rl.PHASE, done + 1)
            trajectories.rewind(rl.PHASE, done + 1)
        trained = rl.run(
            config,
            model_spec=host.spec,
            params=params,
            tokenizer=host.tokenizer,
            processor=host.processor,
            source=records.source,
            collect=collect,
            reward=lambda trajectory, record: pyvision.score(trajectory, record, config.reward),
            images=collector.images,
            metrics_writer=metrics,
            trajectory_writer=trajectories,
            evaluate=evaluate if held_out is not None else None,
            progress=lambda step, _, numbers: _advance(bar, step, numbers),
            on_skip=lambda name, reason: run_dir.skip(name, reason, config.data.train),
            on_drop=lambda step, reasons: run_dir.drop(rl.PHASE, step, reasons),
            resume=resume,
            mesh=mesh if mesh.size > 1 else None,
        )
    return _close(config, host, run_dir, trained.params, say)


def start_eval(
    config: RLConfig,
    *,
    tasks: int = EVALUATED,
    tries: int = 1,
    temperature: float = 0.0,
    replace: bool = False,
    dry: bool = False,
    say: Say = print,
) -> Path:
    """Runs the first `tasks` held-out tasks (`data.eval`, else `data.train`) `tries` times each, as training does.

    Writes trajectories with their pictures, `summary.json` and the report into `config.run_dir`, and returns it. Raises
    as `start_rl`.
    """
    host = build_host(config)
    name = config.data.eval or config.data.train
    records = build_evaluation(dataclasses.replace(config.data, eval=name), tasks)
    chosen = _first(records, tasks)
    say(f"evaluation: {len(chosen):,} tasks of {name} x {tries} = {len(chosen) * tries:,} trajectories")
    if dry:
        return Path(config.run_dir)
    with open_pool(config.sandbox) as pool, contextlib.ExitStack() as stack:
        run_dir = open_run(config, records, False, replace, "eval")
        run_dir.write_sandbox(pool.report.to_dict())
        params = _cast(config)(build_params(config.model, config.seed))
        collector = _collector(config, host, pool)
        stack.callback(collector.close)
        trajectories = stack.enter_context(_trajectories(run_dir, host, collector))
        collected = collector.evaluate(params, chosen, seed=config.seed, temperature=temperature, tries=tries)
        for record, reason in collected.skipped:
            run_dir.skip(record, reason, name)
        right = _accuracies(config, chosen, collected)
        members = [one for group in collected.groups for one in group]
        trajectories.write("eval", 0, members, references={task.id: task.answer for task in chosen})
    if not right:
        raise ConfigError(f"data: none of {len(chosen)} tasks could be run; {run_dir.path / 'skipped.jsonl'} says why")
    accuracy = mean_interval([float(np.mean(row)) for row in right] if tries > 1 else [row[0] for row in right])
    calls = float(np.mean([one.tool_calls for one in members]))
    run_dir.write_summary(
        {"accuracy": {"eval": accuracy.as_dict()}, "tool_calls": {"eval": calls}, "seed": config.seed}
    )
    shown = f"{100 * accuracy.mean:.1f}% [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]"
    say(f"accuracy: {shown} over {accuracy.n} tasks at temperature {temperature:g}; {calls:.2f} calls a trajectory")
    say(f"report: {report.build(run_dir.path)}")
    return run_dir.path


def _first(records: Records, count: int) -> list[Record]:
    return [records.source[index] for index in range(min(len(records.source), count))]


def _collector(config: RLConfig, host: Host, pool: SandboxPool) -> Collector:
    return Collector(
        model_spec=host.spec,
        tokenizer=host.tokenizer,
        processor=host.processor,
        protocol=host.protocol,
        protocol_config=config.protocol,
        rollout=config.rollout,
        sampling=config.sampling,
        pool=pool,
        group_size=config.algorithm.group_size,
    )


def _cast(config: RLConfig) -> Callable[[Any], Any]:
    """Parameters in the type that the trainer computes in, so that the sampler rounds alike."""
    if config.model.dtype == "float32":
        return lambda params: params
    return jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(config.model.dtype), params))


def _trajectories(run_dir: RunDir, host: Host, collector: Collector) -> TrajectoryWriter:
    return run_dir.trajectories(host.tokenizer.decode, lambda name: collector.images.get(name).pixels)


def _accuracies(config: RLConfig, tasks: Sequence[Record], collected: Collected) -> list[list[float]]:
    """Scores every rollout; accuracy by task and try, tasks that could not be run left out."""
    by_id = {task.id: task for task in tasks}
    for group in collected.groups:
        for one in group:
            one.rewards = pyvision.score(one, by_id[one.record_id], config.reward)
    return [[one.rewards["accuracy"] for one in group] for group in collected.groups if group]


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Data of which nothing can be used, and checkpoints that do not fit, are the user's to mend."""
    try:
        yield
    except (UnusableData, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def _facts(config: SFTConfig | RLConfig, records: Records) -> list[str]:
    bad = f", {len(records.bad)} bad lines left out (listed in skipped.jsonl)" if records.bad else ""
    return [f"records: {len(records.source):,} from {config.data.train}{bad}", *arithmetic(config)]


def open_run(
    config: SFTConfig | RLConfig,
    records: Records,
    resume: bool,
    replace: bool,
    part: Literal["train", "eval"] = "train",
) -> RunDir:
    """The run's folder with all that is known at the start. Raises `ConfigError` if another run lies there."""
    if resume and replace:
        raise ConfigError("resume and replace exclude each other")
    held: int | None = None
    try:
        held = _hold(Path(config.run_dir))
        run_dir = RunDir(config.run_dir, "resume" if resume else "replace" if replace else "new")
    except OSError as error:
        if held is not None:
            os.close(held)
        if not isinstance(error, FileExistsError):
            raise ConfigError(f"run_dir: {config.run_dir} cannot be written: {error.strerror}") from error
        if Path(config.run_dir).is_dir():
            raise ConfigError(f"run_dir: {error} (--resume, --replace)") from error
        raise ConfigError(f"run_dir: {config.run_dir} is a file") from error
    if held is not None:
        weakref.finalize(run_dir, os.close, held)
    run_dir.write_config(config)
    run_dir.write_versions()
    name = config.data.train if part == "train" else config.data.eval or config.data.train
    run_dir.write_manifest(part, path=name, records=len(records.source), bad=len(records.bad))
    if not resume:
        for row in records.bad:
            run_dir.skip("", row["reason"], row["file"], row["row"], key=row["key"])
    return run_dir


def _hold(directory: Path) -> int | None:
    """Locks a run's folder as long as the number lives (a killed process lets go), so that no two runs mix in it.

    None where the file system has no locks. Raises `ConfigError` if a run goes on there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    number = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(number)
        raise ConfigError(f"run_dir: another run is going on in {directory}") from error
    except OSError:
        os.close(number)
        return None
    return number


def _done(run_dir: RunDir, resume: bool, say: Say) -> int:
    """Steps behind the checkpoint that the run goes on from."""
    directory = run_dir.path / "checkpoints"
    if not resume:
        return 0
    done = 0
    if directory.is_dir():
        with Checkpoints(directory) as checkpoints:
            done = checkpoints.latest() or 0
    say(f"resume: goes on after step {done:,}" if done else f"resume: no checkpoint in {directory}, starts at step 1")
    return done


def _advance(bar: Progress, step: int, numbers: Mapping[str, float]) -> None:
    shown = {"loss": "actor/loss", "reward": "critic/rewards/mean", "lr": "actor/lr"}
    bar.step(step - bar.done, **{name: numbers[key] for name, key in shown.items() if key in numbers})


def _close(config: SFTConfig | RLConfig, host: Host, run_dir: RunDir, params: Any, say: Say) -> Path:
    """Writes the weights as a model directory, and the report."""
    place = Path(config.model.tokenizer or config.model.path)
    with tempfile.TemporaryDirectory() as folder:
        if not (place / "tokenizer.json").is_file():  # packed, or a file of another name
            place = Path(folder)
            host.tokenizer.save(place)
        model = export_weights(
            params,
            host.spec,
            run_dir.path / "model",
            tokenizer_dir=place,
            preprocessor=host.processor.to_hf(),
            chat_template=CHAT_TEMPLATE,
            overwrite=True,
        )
    say(f"weights: {model}")
    say(f"report: {report.build(run_dir.path)}")
    return run_dir.path
