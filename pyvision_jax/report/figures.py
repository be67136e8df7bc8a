"""Figures as SVG that takes its colours from the page, so that they follow the light or the dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that occur nowhere else: each is replaced by the CSS variable of the page. Series colours are --s1 .. --s8.
INK, GRID = "#010203", "#040506"
SERIES = tuple(f"#0708{index:02x}" for index in range(1, 9))
_VARIABLES = {INK: "--ink-soft", GRID: "--line", **{color: f"--s{i}" for i, color in enumerate(SERIES, 1)}}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

Points = Sequence[tuple[float, float]]


def lines(
    series: Mapping[str, Points],
    name: str,
    *,
    ylabel: str = "",
    zero: bool = True,
    links: Mapping[float, str] | None = None,
) -> str:
    """Curves over steps. `links`: step -> anchor on the page; each becomes a mark on the axis that leads there."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(ylabel)
        for color, (label, points) in zip(SERIES, series.items(), strict=False):
            steps, values = _split(points)
            smooth = _smooth(values)
            single = len(values) == 1
            if smooth is not None:
                axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
            axes.plot(
                steps,
                values if smooth is None else smooth,
                color=color,
                linewidth=1.8,
                label=label,
                marker="o" if single else "",
            )
        if zero:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        if links:
            marks = axes.scatter(
                list(links),
                [0.0] * len(links),
                color=INK,
                s=26,
                marker="^",
                clip_on=False,
                zorder=5,
                transform=axes.get_xaxis_transform(),
            )
            marks.set_urls([f"#{anchor}" for anchor in links.values()])
        _legend(axes, len(series))
        return _svg(figure, name)


def stacked(series: Mapping[str, Points], name: str, *, ylabel: str = "", share: bool = False) -> str:
    """Stacked areas over steps, or bars where there are only a few. `share`: each step's parts sum to 100 %."""
    steps = sorted({step for points in series.values() for step, _ in points})
    at = {step: column for column, step in enumerate(steps)}
    values = np.zeros((len(series), len(steps)))
    for row, points in enumerate(series.values()):
        for step, value in points:
            values[row, at[step]] += value
    if share:
        values = 100 * values / np.maximum(values.sum(axis=0), 1e-12)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(ylabel)
        colors = [SERIES[row % len(SERIES)] for row in range(len(series))]
        if len(steps) > 3:
            axes.stackplot(steps, values, labels=list(series), colors=colors, linewidth=0)
            axes.set_xlim(steps[0], steps[-1])
        else:
            bottom = np.zeros(len(steps))
            for color, label, row in zip(colors, series, values, strict=True):
                axes.bar([str(step) for step in steps], row, bottom=bottom, color=color, label=label, width=0.5)
                bottom += row
        if share:
            axes.set_ylim(0, 100)
        _legend(axes, max(len(series), 2))
        return _svg(figure, name)


def _axes(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 2.7))
    # Fixed margins: a layout engine would draw everything twice.
    figure.subplots_adjust(left=0.12, right=0.98, bottom=0.17, top=0.87)
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    return figure, axes


def _legend(axes: Axes, count: int) -> None:
    if count > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(count, 4), fontsize=8, borderaxespad=0.2)


def _split(points: Points) -> tuple[np.ndarray, np.ndarray]:
    array = np.asarray(points, np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _smooth(values: np.ndarray) -> np.ndarray | None:
    """Centred running mean over a tenth of the curve, from 20 points on."""
    if len(values) < 20:
        return None
    half = max(1, len(values) // 20)
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"([^>]*?) width=\"[^\"]*\"", r"\1\2", text, count=1)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--sans)", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    # Several figures share one page: their ids must not meet.
    for found in sorted(set(re.findall(r'\bid="([^"]+)"', text))):
        text = text.replace(f'id="{found}"', f'id="{name}-{found}"')
        text = text.replace(f'"#{found}"', f'"#{name}-{found}"').replace(f"url(#{found})", f"url(#{name}-{found})")
    return text.strip()
