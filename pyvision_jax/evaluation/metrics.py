"""Means with intervals: Wilson for counts, bootstrap over tasks for the rest, paired bootstrap for differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

Values = Sequence[float] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its two-sided interval; `n` is the number of tasks it stands on."""

    mean: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float]:
        """`{mean, low, high, n}`, the form of summary.json."""
        return dataclasses.asdict(self)


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a proportion (Wilson 1927, JASA 22, p. 209), without continuity correction.

    Raises ValueError for n < 1 or successes outside 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"wilson: {successes} successes of {n}")
    z = _z(confidence)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n successes the exact bounds are 0 and 1; rounding would miss them by an ulp.
    return Interval(p, 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half, n)


def mean_interval(values: Values, confidence: float = 0.95, samples: int = 10_000, seed: int = 0) -> Interval:
    """Mean over tasks of `values`, [tasks] or [tasks, tries] (tries of one task are averaged first).

    One try of value 0 or 1 a task: Wilson. Otherwise percentile bootstrap over tasks, which keeps the tries of a task
    together: they are not independent. Raises ValueError for no task and for values that are not finite.
    """
    array = _checked(values, "mean_interval")
    per_task = array.reshape(len(array), -1)
    if per_task.shape[1] == 1 and np.isin(per_task, (0.0, 1.0)).all():
        return wilson(int(per_task.sum()), len(per_task), confidence)
    return _bootstrap(per_task.mean(axis=1), confidence, samples, seed)


def paired_difference(
    after: Values, before: Values, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean over tasks of `after - before`, both [tasks] or [tasks, tries] on the same tasks in the same order.

    Percentile bootstrap over tasks (Efron and Tibshirani 1993, ch. 13): a task is drawn with both its results, so what
    makes a task hard cancels. The two may have different numbers of tries. Raises ValueError if the numbers of tasks
    differ.
    """
    a = _checked(after, "paired_difference: after")
    b = _checked(before, "paired_difference: before")
    if len(a) != len(b):
        raise ValueError(f"paired_difference: {len(a)} tasks after, {len(b)} before; both must be on the same tasks")
    difference = a.reshape(len(a), -1).mean(axis=1) - b.reshape(len(b), -1).mean(axis=1)
    return _bootstrap(difference, confidence, samples, seed)


def paired_by_task(
    after: Mapping[str, float | Values], before: Mapping[str, float | Values], confidence: float = 0.95, seed: int = 0
) -> Interval:
    """`paired_difference` of results keyed by task id. Raises ValueError naming a task that only one of them has."""
    lone = sorted(after.keys() ^ before.keys())
    if lone:
        side = "before" if lone[0] in after else "after"
        raise ValueError(f"{len(lone)} task(s) are not on both sides; {lone[0]!r} is missing {side}")
    tasks = sorted(after)
    means_after, means_before = ([float(np.mean(side[task])) for task in tasks] for side in (after, before))
    return paired_difference(means_after, means_before, confidence, seed=seed)


def _bootstrap(values: np.ndarray, confidence: float, samples: int, seed: int) -> Interval:
    rng = np.random.default_rng(seed)
    n = len(values)
    means = np.empty(samples)
    block = max(1, 4_000_000 // n)  # bounds the memory of the index array
    for start in range(0, samples, block):
        count = min(block, samples - start)
        means[start : start + count] = values[rng.integers(0, n, (count, n))].mean(axis=1)
    tail = (1 - _confidence(confidence)) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(values.mean()), float(low), float(high), n)


def _checked(values: Values, what: str) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(
            f"{what}: expected [tasks] or [tasks, tries] with at least one of each, got shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{what}: {int((~np.isfinite(array)).sum())} of {array.size} values are not finite")
    return array


def _confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: must lie between 0 and 1, as 0.95")
    return confidence


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + _confidence(confidence) / 2)
