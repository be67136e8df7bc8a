"""The numbers of a report: accuracy, curves, drops, end reasons and time, folded out of a run that may be partial."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pyvision_jax.report.reader import Run

STAGES = {"untrained": "Untrained", "sft": "After SFT", "rl": "After RL"}
CONTROLS = {
    "tool_off": "Tool switched off",
    "direct": "Trained to answer directly",
    "wrong_image": "Wrong picture",
}
Points = list[tuple[float, float]]


# ---------------------------------------------------------------- summary


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """One measured proportion with its interval; fields are None where the summary lacks them."""

    name: str
    label: str
    mean: float
    low: float | None
    high: float | None
    n: int | None
    greedy: float | None


def accuracies(summary: dict[str, Any]) -> tuple[list[Accuracy], list[Accuracy], list[Accuracy]]:
    """(stages, controls, everything else in the summary that has a mean with an interval)."""
    held = summary.get("accuracy")
    held = held if isinstance(held, dict) else {}
    stages = [_accuracy(name, label, held[name]) for name, label in STAGES.items() if _has_mean(held.get(name))]
    controls = [_accuracy(name, label, held[name]) for name, label in CONTROLS.items() if _has_mean(held.get(name))]
    others = [
        _accuracy(path, path.replace("_", " ").replace(".", ": "), value)
        for path, value in _leaves(summary)
        if path.removeprefix("accuracy.") not in {**STAGES, **CONTROLS} and 0 <= value["mean"] <= 1 and path != "gain"
    ]
    return stages, controls, others


def _accuracy(name: str, label: str, value: dict[str, Any]) -> Accuracy:
    greedy = value.get("greedy")
    if isinstance(greedy, dict):
        greedy = greedy.get("mean")
    return Accuracy(
        name,
        label,
        float(value["mean"]),
        _float(value.get("low")),
        _float(value.get("high")),
        value.get("n"),
        _float(greedy),
    )


def _has_mean(value: Any) -> bool:
    return isinstance(value, dict) and _float(value.get("mean")) is not None


def _leaves(value: dict[str, Any], path: str = "") -> Iterable[tuple[str, dict[str, Any]]]:
    for key, item in value.items():
        name = f"{path}.{key}" if path else str(key)
        if _has_mean(item) and "low" in item:
            yield name, item
        elif isinstance(item, dict):
            yield from _leaves(item, name)


def _float(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


# ---------------------------------------------------------------- curves


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity over the steps of one phase, from the first metric name found or folded from the trajectories."""

    key: str
    title: str
    unit: str
    names: tuple[str, ...]  # metrics that hold it, best first
    fold: Callable[[dict[str, Any]], float | None] | None = None  # of one trajectory; the curve is the mean


def accuracy_of(row: dict[str, Any]) -> float | None:
    """1 right, 0 wrong, None without a reward; `accuracy` among the rewards, else whether there is any reward."""
    rewards = row["rewards"]
    if "accuracy" in rewards:
        return _float(rewards["accuracy"])
    total = _float(rewards.get("total"))
    return None if total is None else float(total > 0)


CURVES = (
    Curve(
        "reward",
        "Reward",
        "",
        ("critic/rewards/mean", "critic/score/mean", "reward"),
        lambda r: r["rewards"].get("total"),
    ),
    Curve("accuracy", "Training accuracy", "", ("reward/accuracy/mean", "critic/accuracy/mean"), accuracy_of),
    Curve(
        "calls", "Successful tool calls per trajectory", "calls", ("tool_call_counts/mean",), lambda r: r["calls_ok"]
    ),
    Curve("length", "Response length", "tokens", ("response_length/mean",), lambda r: r["tokens"]),
    Curve("entropy", "Entropy", "nats per token", ("actor/entropy",), lambda r: r["entropy"]),
    Curve(
        "gap",
        "Sampler/trainer gap, mean |difference of log-probability|",
        "nats",
        (
            "training/rollout_logprobs_diff_mean",
            "training/rollout_probs_diff_mean",
            "rollout_corr/log_ppl_abs_diff",
            "policy/rollout_train_logprobs_abs_diff_mean",
        ),
    ),
    Curve("loss", "Loss", "", ("actor/loss", "actor/pg_loss", "train/loss", "loss")),
    Curve("grad", "Gradient norm", "", ("actor/grad_norm", "train/grad_norm", "grad_norm")),
)


def training_phases(run: Run) -> list[str]:
    """Phases of training in the order they ran, those with metrics first; evaluations are none."""
    from_metrics = sorted(run.metrics, key=lambda phase: run.metrics[phase][0].get("time", 0.0))
    phases = [*from_metrics, *dict.fromkeys(row["phase"] for row in run.index)]
    return [phase for phase in dict.fromkeys(phases) if not is_evaluation(phase)]


def is_evaluation(phase: str) -> bool:
    """Phases named `eval...` or `...eval` hold evaluations."""
    return phase.startswith("eval") or phase.endswith("eval")


def curve_points(run: Run, phase: str, curve: Curve) -> Points:
    """(step, value) of a curve; empty where the run has nothing of it."""
    rows = run.metrics.get(phase, [])
    for name in curve.names:
        points = [(float(row["step"]), value) for row in rows if (value := _float(row.get(name))) is not None]
        if points:
            return points
    if curve.fold is None:
        return []
    return _fold_mean(run, phase, curve.fold)


def _fold_mean(run: Run, phase: str, fold: Callable[[dict[str, Any]], Any]) -> Points:
    sums: dict[int, list[float]] = {}
    for row in run.index:
        value = _float(fold(row)) if row["phase"] == phase else None
        if value is not None:
            entry = sums.setdefault(row["step"], [0.0, 0.0])
            entry[0] += value
            entry[1] += 1
    return [(float(step), total / count) for step, (total, count) in sorted(sums.items())]


def before_after(points: Points) -> tuple[float, float]:
    """Means over the first and the last tenth of a curve."""
    count = max(1, len(points) // 10)
    first, last = points[:count], points[-count:]
    return sum(value for _, value in first) / count, sum(value for _, value in last) / count


def metric_table(run: Run, phase: str) -> list[tuple[str, float, float, float, float]]:
    """(name, first, last, least, greatest) of every number that the phase logged."""
    held: dict[str, list[float]] = {}
    for row in run.metrics.get(phase, []):
        for name, value in row.items():
            number = _float(value)
            if number is not None and name not in ("step", "time"):
                held.setdefault(name, []).append(number)
    return [(name, values[0], values[-1], min(values), max(values)) for name, values in sorted(held.items())]


# ---------------------------------------------------------------- counts


def end_reasons(run: Run, phase: str) -> dict[str, Points]:
    """Trajectories by end reason over steps, most frequent first."""
    counts: Counter[tuple[str, int]] = Counter()
    totals: Counter[str] = Counter()
    for row in run.index:
        if row["phase"] == phase:
            reason = row["end_reason"] or "unfinished"
            counts[reason, row["step"]] += 1
            totals[reason] += 1
    if totals:
        return {
            reason: [
                (float(step), float(n))
                for (name, step), n in sorted(counts.items(), key=lambda c: c[0][1])
                if name == reason
            ]
            for reason, _ in totals.most_common()
        }
    return _with_prefix(run, phase, ("end_reason/", "end_reasons/"))


def drops(run: Run, phase: str) -> dict[str, Points]:
    """What selection left out, by reason over steps: drops.jsonl, else metrics, else the trajectories' own marks."""
    held: dict[str, Points] = {}
    for row in run.drops:
        if row.get("phase") == phase:
            for reason, count in (row.get("reasons") or {}).items():
                number = _float(count)
                if number is not None:
                    held.setdefault(reason, []).append((float(row.get("step", 0)), number))
    held = held or _with_prefix(run, phase, ("selection/dropped/", "selection/drop/", "dropped/"))
    if not held:
        for row in run.index:
            if row["phase"] == phase and row["dropped"]:
                held.setdefault(row["dropped"], []).append((float(row["step"]), 1.0))
    return _by_total(held)


def _with_prefix(run: Run, phase: str, prefixes: tuple[str, ...]) -> dict[str, Points]:
    held: dict[str, Points] = {}
    for row in run.metrics.get(phase, []):
        for name, value in row.items():
            number = _float(value)
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if prefix and number is not None:
                held.setdefault(name.removeprefix(prefix), []).append((float(row["step"]), number))
    return _by_total(held)


def seconds(run: Run, phase: str) -> dict[str, Points]:
    """Seconds of each part of a step (`timing_s/PART`, the whole `step` left out)."""
    held = _with_prefix(run, phase, ("timing_s/",))
    held.pop("step", None)
    return held


def _by_total(held: dict[str, Points]) -> dict[str, Points]:
    order = sorted(held, key=lambda name: -total(held[name]))
    return {name: held[name] for name in order if total(held[name]) > 0}


def total(points: Points) -> float:
    """Sum of a curve's values."""
    return sum(value for _, value in points)


def phase_table(run: Run) -> list[dict[str, Any]]:
    """One row a phase that stored trajectories: how many, how right, how much tool, how long."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in run.index:
        groups.setdefault(row["phase"], []).append(row)
    table = []
    for phase, rows in groups.items():
        judged = [value for row in rows if (value := accuracy_of(row)) is not None]
        table.append(
            {
                "phase": phase,
                "steps": len({row["step"] for row in rows}),
                "n": len(rows),
                "accuracy": sum(judged) / len(judged) if judged else None,
                "calls_ok": sum(row["calls_ok"] for row in rows) / len(rows),
                "calls_failed": sum(row["calls"] - row["calls_ok"] for row in rows) / len(rows),
                "with_call": sum(row["calls"] > 0 for row in rows) / len(rows),
                "tokens": sum(row["tokens"] for row in rows) / len(rows),
                "images": sum(row["images"] for row in rows) / len(rows),
            }
        )
    return table


def notices(run: Run, phases: list[str]) -> list[str]:
    """Things a reader must not miss: tools given up, workers lost, most groups without a signal."""
    found = []
    for phase in phases:
        calls = curve_points(run, phase, next(curve for curve in CURVES if curve.key == "calls"))
        if len(calls) >= 5:
            first, last = before_after(calls)
            if first >= 0.1 and last < first / 2:
                found.append(f"{phase}: tool calls fell from {first:.2f} to {last:.2f} per trajectory (tool collapse).")
        reasons = {name: total(points) for name, points in end_reasons(run, phase).items()}
        lost = reasons.get("infrastructure", 0.0) / max(sum(reasons.values()), 1.0)
        if lost > 0.02:
            found.append(f"{phase}: {lost:.0%} of trajectories were lost to infrastructure; they enter no statistic.")
    return found
