"""The main job from one command: a tiny policy learns to use Python on real photographs, with controls and a report.

Warm-up (from the package's checkpoint, or here) -> SFT -> evaluation -> GRPO -> evaluation -> controls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from pyvision_jax import report
from pyvision_jax.agents.loop import Collected
from pyvision_jax.agents.protocol import Prompt
from pyvision_jax.agents.pyvision import PyVisionImage
from pyvision_jax.config import DemoConfig, ModelConfig, ProtocolConfig, RLConfig, SFTConfig
from pyvision_jax.config_check import arithmetic, check, groups_drawn
from pyvision_jax.data.chat import CHAT_TEMPLATE
from pyvision_jax.data.records import Record
from pyvision_jax.evaluation.metrics import Interval, mean_interval, paired_difference
from pyvision_jax.models.hf import export_weights
from pyvision_jax.recipes import results, rl, sft
from pyvision_jax.recipes.collect import Collector, open_pool
from pyvision_jax.recipes.metrics import MetricsWriter, Progress
from pyvision_jax.recipes.run_dir import RunDir, git_commit
from pyvision_jax.recipes.trajectories import TrajectoryWriter
from pyvision_jax.rewards.pyvision import score
from pyvision_jax.worlds import needle, tiny, warmup

COMMAND = "scripts/demo.sh"
# Rows of the table, in order, with what each says.
ROWS = {
    "untrained": "warmed-up vision, before SFT",
    "sft": "after SFT",
    "rl": "after RL",
    "tool_off": "after RL, tool switched off",
    "direct": "trained to answer directly",
    "wrong_image": "after RL, another task's picture",
}


@dataclasses.dataclass
class Score:
    """An evaluation: correctness per task at temperature 1 and greedy, and successful tool calls per trajectory."""

    sampled: np.ndarray  # float [tasks]
    greedy: np.ndarray  # float [tasks]
    calls: float

    def summary(self) -> dict[str, Any]:
        return {**mean_interval(self.sampled).as_dict(), "greedy": float(self.greedy.mean())}


class Evaluator:
    """The held-out tasks, run through the same loop as training."""

    def __init__(self, config: DemoConfig, collector: Collector, protocol: PyVisionImage, writer: TrajectoryWriter):
        self.config, self.collector, self.protocol, self.writer = config, collector, protocol, writer
        self.tasks = needle.evaluation_tasks(config.eval_tasks)

    def __call__(
        self,
        name: str,
        params: Any,
        *,
        protocol_config: ProtocolConfig | None = None,
        prompts: Sequence[Prompt] | None = None,
    ) -> Score:
        config = protocol_config or self.config.rl.protocol
        protocol = dataclasses.replace(self.protocol, config=config)
        rewards, calls = {}, 0.0
        for temperature in (0.0, 1.0):
            collected = self.collector.evaluate(
                params,
                self.tasks,
                seed=self.config.seed,
                temperature=temperature,
                protocol=protocol,
                protocol_config=config,
                prompts=prompts,
            )
            rewards[temperature] = self._score(collected)
            members = [group[0] for group in collected.groups]
            calls = float(np.mean([member.tool_calls for member in members]))
            references = {task.id: task.answer for task in self.tasks}
            self.writer.write(f"eval_{name}", int(temperature), members, references=references)
            self.collector.images.keep(set())
        return Score(rewards[1.0], rewards[0.0], calls)

    def wrong_prompts(self) -> list[Prompt]:
        """Every question with the picture of another task, in the context and in the sandbox."""
        own = [self.protocol.build(task) for task in self.tasks]
        other = own[1:] + own[:1]
        return [
            dataclasses.replace(prompt, images=wrong.images, session_images=wrong.session_images)
            for prompt, wrong in zip(own, other, strict=True)
        ]

    def _score(self, collected: Collected) -> np.ndarray:
        if collected.skipped:
            raise RuntimeError(f"evaluation tasks could not be built: {collected.skipped[:3]}")
        right = []
        for task, group in zip(self.tasks, collected.groups, strict=True):
            group[0].rewards = score(group[0], task, self.config.rl.reward)
            right.append(group[0].rewards["accuracy"])
        return np.array(right)


def stages(config: DemoConfig) -> tuple[SFTConfig, SFTConfig, RLConfig]:
    """The configurations of SFT, of the direct-answer control and of RL, checked. Raises `ConfigError`."""
    spec = tiny.model_spec(tiny.tokenizer())
    model = ModelConfig(config=spec.to_hf(), tokenizer=str(tiny.ASSETS))
    root = Path(config.run_dir)

    def data(stage: SFTConfig | RLConfig, split: str, count: int, **options: Any) -> Any:
        own = {"split": split, "count": count, "start": config.seed * 10_000_000, **options}
        return dataclasses.replace(stage.data, train="needle", shuffle_seed=config.seed, options=own)

    traces = config.sft.steps * config.sft.batch_size
    learn = dataclasses.replace(
        config.sft, run_dir=str(root / "sft"), seed=config.seed, model=model, protocol=config.rl.protocol,
        image=config.rl.image, data=data(config.sft, "sft", traces),
    )  # fmt: skip
    half = dataclasses.replace(learn.packing, rows=learn.packing.rows // 2, images=learn.packing.images // 2)
    direct = dataclasses.replace(  # its traces are half as long and show one picture
        learn, run_dir=str(root / "direct"), packing=half, data=data(config.sft, "direct", traces, script="direct")
    )
    drawn = groups_drawn(config.rl.algorithm)
    reinforce = dataclasses.replace(
        config.rl, run_dir=str(root / "rl"), seed=config.seed, model=model,
        data=data(config.rl, "rl", config.rl.steps * drawn),
    )  # fmt: skip
    for stage in (learn, direct, reinforce):
        check(stage)
    return learn, direct, reinforce


def run(config: DemoConfig, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs everything into `config.run_dir`, builds the report there, and returns the summary.

    Raises `ConfigError` before any device work.
    """
    learn, direct, reinforce = stages(config)
    for line in (*arithmetic(learn), *arithmetic(reinforce)):
        say(line)
    tokens, processor = tiny.tokenizer(), tiny.processor()
    spec = tiny.model_spec(tokens)
    protocol = PyVisionImage(config.rl.protocol, config.rl.image, tokens, processor, spec, needle.GENERATORS)
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    run_dir = RunDir(config.run_dir, "replace", COMMAND)
    for stage in (learn, direct, reinforce):  # of an earlier demo in the same folder
        shutil.rmtree(stage.run_dir, ignore_errors=True)
    run_dir.write_config(config)
    run_dir.write_versions()
    run_dir.write_manifest("photographs", seen=list(needle.SEEN), unseen=list(needle.UNSEEN), source="scikit-image")

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    parts = {"model_spec": spec, "tokenizer": tokens, "processor": processor}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(open_pool(config.rl.sandbox))
        run_dir.write_sandbox(pool.report.to_dict())
        say(f"sandbox: {pool.report.summary}")
        with timed("warmup"):
            params = _initial(config, spec, tokens, processor)
        collector = Collector(
            **parts,
            protocol=protocol,
            protocol_config=config.rl.protocol,
            rollout=config.rl.rollout,
            sampling=config.rl.sampling,
            pool=pool,
            group_size=config.rl.algorithm.group_size,
        )
        stack.callback(collector.close)
        writer = stack.enter_context(
            run_dir.trajectories(tokens.decode, lambda name: collector.images.get(name).pixels)
        )
        evaluate = Evaluator(config, collector, protocol, writer)
        scores: dict[str, Score] = {}

        def measure(name: str, params: Any, **options: Any) -> None:
            with timed("evaluation"):
                scores[name] = evaluate(name, params, **options)
            means = scores[name].sampled.mean(), scores[name].greedy.mean()
            say(f"{ROWS[name]}: {means[0]:.3f} at temperature 1, {means[1]:.3f} greedy")

        def tune(stage: SFTConfig, title: str) -> Any:
            source = needle.NeedleTraces(**stage.data.options)
            with timed(title), run_dir.metrics(title) as writes, Progress(title, stage.steps) as bar:
                metrics = _Named(writes, title)
                return sft.run(
                    stage, **parts, params=params, source=source, example=protocol.example, metrics_writer=metrics,
                    progress=_shown(bar, loss="actor/loss"),
                ).params  # fmt: skip

        measure("untrained", params)
        tuned = tune(learn, "sft")
        measure("sft", tuned)
        with timed("rl"), run_dir.metrics(rl.PHASE) as metrics, Progress("rl", reinforce.steps) as bar:
            trained = rl.run(
                reinforce, **parts, params=tuned, source=needle.NeedleTasks(**reinforce.data.options),
                collect=collector, images=collector.images, metrics_writer=metrics, trajectory_writer=writer,
                reward=lambda trajectory, record: score(trajectory, record, config.rl.reward),
                progress=_shown(bar, accuracy="critic/score/mean", calls="tool_call_counts/mean"),
                on_skip=run_dir.skip, on_drop=lambda step, reasons: run_dir.drop(rl.PHASE, step, reasons),
            ).params  # fmt: skip
        measure("rl", trained)
        measure("tool_off", trained, protocol_config=dataclasses.replace(config.rl.protocol, force_answer=True))
        measure("wrong_image", trained, prompts=evaluate.wrong_prompts())
        measure("direct", tune(direct, "direct"))

    with timed("export"):
        export_weights(
            trained, spec, run_dir.path / "model", tokenizer_dir=tiny.ASSETS, preprocessor=processor.to_hf(),
            chat_template=CHAT_TEMPLATE, overwrite=True,
        )  # fmt: skip
    seconds["total"] = time.perf_counter() - begun
    summary = _summary(config, scores, evaluate.tasks, seconds)
    run_dir.write_summary(summary)
    say(f"report: {report.build(run_dir.path)}")
    return summary


def _initial(config: DemoConfig, spec: Any, tokens: Any, processor: Any) -> Any:
    if not config.from_scratch:  # the language head is not in the file: it is the one that the file's own seed draws
        return warmup.load(warmup.fresh(spec, jax.random.key(warmup.SEED)))
    params = warmup.fresh(spec, jax.random.key(config.seed))
    with Progress("warm-up", config.warmup_steps) as bar:
        return warmup.run(
            spec, params, tokens, processor, steps=config.warmup_steps, seed=config.seed,
            report=lambda step, numbers: bar.step(step - bar.done, **numbers),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Named:
    """Metrics under the stage's own name: the direct control is SFT, too."""

    writer: MetricsWriter
    phase: str

    def write(self, step: int, values: Mapping[str, Any], phase: str | None = None) -> None:
        self.writer.write(step, values, self.phase)


def _shown(bar: Progress, **names: str) -> Callable[[int, int, Mapping[str, float]], None]:
    def advance(step: int, _: int, numbers: Mapping[str, float]) -> None:
        bar.step(step - bar.done, **{name: numbers[key] for name, key in names.items() if key in numbers})

    return advance


def _summary(
    config: DemoConfig, scores: Mapping[str, Score], tasks: Sequence[Record], seconds: Mapping[str, float]
) -> dict[str, Any]:
    seen = np.array([task.meta["seen"] for task in tasks])

    def part(name: str, mask: np.ndarray) -> dict[str, float]:
        return mean_interval(scores[name].sampled[mask]).as_dict()

    return {
        "seed": config.seed,
        "chance": needle.CHANCE,
        "accuracy": {name: scores[name].summary() for name in ROWS},
        "gain": gain(scores["rl"].sampled, scores["sft"].sampled).as_dict(),
        "photographs": {name: {"seen": part(name, seen), "unseen": part(name, ~seen)} for name in ("sft", "rl")},
        "tool_calls": {name: scores[name].calls for name in ("sft", "rl")},
        "seconds": dict(seconds),
        "devices": [device.device_kind for device in jax.devices()],
    }


def gain(after: np.ndarray, before: np.ndarray) -> Interval:
    """Paired bootstrap over tasks of the difference in accuracy."""
    return paired_difference(after, before)


def print_table(summary: Mapping[str, Any]) -> None:
    """Held-out accuracy as one table."""
    table = Table(title=f"held-out accuracy, {summary['accuracy']['rl']['n']} tasks, seed {summary['seed']}")
    for column in ("policy", "temperature 1", "95% interval", "greedy"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, words in ROWS.items():
        row = summary["accuracy"][name]
        table.add_row(words, f"{row['mean']:.3f}", f"{row['low']:.3f} - {row['high']:.3f}", f"{row['greedy']:.3f}")
    table.add_row("chance", f"{summary['chance']:.3f}", "", "")
    for name, kinds in summary["photographs"].items():
        for kind, row in kinds.items():
            table.add_row(
                f"{name}, {kind} photographs", f"{row['mean']:.3f}", f"{row['low']:.3f} - {row['high']:.3f}", ""
            )
    console = Console()
    console.print(table)
    change, calls = summary["gain"], summary["tool_calls"]
    console.print(
        f"RL minus SFT: {100 * change['mean']:+.1f} points [{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]; "
        f"tool calls per trajectory {calls['sft']:.2f} -> {calls['rl']:.2f}; {summary['seconds']['total']:.0f} s"
    )


def record(summary: Mapping[str, Any], path: Path) -> None:
    """Adds this seed's rows to docs/results/demo.json."""
    seed = summary["seed"]
    change = summary["gain"]
    rows = [
        results.Row(
            f"gain seed {seed}", 100 * change["mean"], "points", 100 * change["low"], 100 * change["high"], change["n"]
        )
    ]
    for name in ROWS:
        value = summary["accuracy"][name]
        rows.append(
            results.Row(
                f"{name} seed {seed}", 100 * value["mean"], "%", 100 * value["low"], 100 * value["high"], value["n"]
            )
        )
    rows += [results.Row(f"tool calls {name} seed {seed}", value, "") for name, value in summary["tool_calls"].items()]
    rows.append(results.Row(f"seconds seed {seed}", summary["seconds"]["total"], "s"))
    results.record(path, COMMAND, rows, commit=git_commit())
