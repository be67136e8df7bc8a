"""Puts the page together: reads the run, folds its numbers, draws the figures, fills the template."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from pyvision_jax.report import cards, figures, numbers, reader
from pyvision_jax.report.reader import Run

MAX_REASONS = 7  # parts of a stacked figure; the rest becomes one
MAX_SKIPPED = 200


def write_page(run_dir: Path, out: Path | None, trajectories: int) -> Path:
    """Writes the report of `run_dir`; see `report.build`."""
    run = reader.read_run(run_dir)
    out = out or run_dir / "report.html"
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pyvision_jax.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, share=share, points=points, duration=duration)
    html = environment.get_template("report.html.j2").render(**context(run, trajectories))
    partial = out.with_name(out.name + ".part")
    # A tool may print half a surrogate pair: it is shown as a question mark, the report does not fail on it.
    partial.write_text(html, encoding="utf-8", errors="replace")
    os.replace(partial, out)
    return out


def context(run: Run, trajectories: int) -> dict[str, Any]:
    """All that the template shows, as plain data."""
    phases = numbers.training_phases(run)
    stages, controls, others = numbers.accuracies(run.summary)
    shown = cards.choose(run, trajectories)
    anchors = {(str(row["path"]), row["id"]): f"t{place}" for place, row in enumerate(shown, 1)}
    chance = run.summary.get("chance")
    return {
        "title": run.path.resolve().name,
        "run": run,
        "missing": run.missing,
        "notices": numbers.notices(run, phases),
        "start": _last_start(run),
        "stages": stages,
        "controls": controls,
        "others": others,
        "chance": chance if isinstance(chance, int | float) else None,
        "gain": _gain(run, stages),
        "calls": _plain_mapping(run.summary.get("tool_calls")),
        "seconds": _plain_mapping(run.summary.get("seconds")),
        "seed": run.summary.get("seed"),
        "phase_table": numbers.phase_table(run),
        "phases": [_phase(run, phase, shown, anchors) for phase in phases],
        "skipped": run.skipped[:MAX_SKIPPED],
        "skipped_reasons": Counter(str(row.get("reason", "")) for row in run.skipped).most_common(),
        "cards": [cards.card(run, row, place, anchors) for place, row in enumerate(shown, 1)],
        "versions": _flat(run.versions),
        "sandbox": _flat(run.sandbox),
        "manifest": _flat(run.manifest),
    }


def _phase(run: Run, phase: str, shown: list[dict[str, Any]], anchors: dict[tuple[str, str], str]) -> dict[str, Any]:
    name = "".join(char if char.isalnum() else "-" for char in phase)
    links = {float(row["step"]): anchors[str(row["path"]), row["id"]] for row in shown if row["phase"] == phase}
    drawn, table = [], []
    for curve in numbers.CURVES:
        curve_points = numbers.curve_points(run, phase, curve)
        if not curve_points:
            continue
        first, last = numbers.before_after(curve_points)
        table.append(
            {"title": curve.title, "unit": curve.unit, "first": first, "last": last, "steps": len(curve_points)}
        )
        if len(curve_points) > 1:
            svg = figures.lines(
                {curve.title: curve_points},
                f"{name}-{curve.key}",
                ylabel=curve.unit,
                links=links if curve.key == "reward" else None,
            )
            caption = f"{curve.title}: {number(first)} to {number(last)}"
            marks = " Triangles lead to trajectories shown below." if curve.key == "reward" and links else ""
            drawn.append({"svg": svg, "caption": caption, "note": marks})
    counts = {}
    for key, title, share_of, held in (
        ("ends", "End reasons", True, numbers.end_reasons(run, phase)),
        ("drops", "Dropped by selection", False, numbers.drops(run, phase)),
        ("seconds", "Seconds of a step by part", False, numbers.seconds(run, phase)),
    ):
        counts[key] = _counts(held)
        if held:
            lumped = _lump(held)
            unit = "% of trajectories" if share_of else "seconds" if key == "seconds" else "count"
            svg = figures.stacked(lumped, f"{name}-{key}", ylabel=unit, share=share_of)
            drawn.append({"svg": svg, "caption": title, "note": ""})
    return {
        "name": phase,
        "steps": len(run.metrics.get(phase, [])),
        "table": table,
        "figures": drawn,
        "metrics": numbers.metric_table(run, phase),
        **counts,
    }


def _counts(held: dict[str, numbers.Points]) -> list[dict[str, Any]]:
    whole = sum(numbers.total(values) for values in held.values())
    return [
        {"name": name, "total": numbers.total(values), "share": numbers.total(values) / whole if whole else 0.0}
        for name, values in held.items()
    ]


def _lump(held: dict[str, numbers.Points]) -> dict[str, numbers.Points]:
    if len(held) <= MAX_REASONS + 1:
        return held
    names = list(held)
    rest = [point for name in names[MAX_REASONS:] for point in held[name]]
    return {**{name: held[name] for name in names[:MAX_REASONS]}, "other": sorted(rest)}


def _gain(run: Run, stages: list[numbers.Accuracy]) -> dict[str, Any] | None:
    """RL minus SFT: as the summary states it (with its paired interval), else the plain difference."""
    stated = run.summary.get("gain")
    if isinstance(stated, dict) and isinstance(stated.get("mean"), int | float):
        return {"mean": stated["mean"], "low": stated.get("low"), "high": stated.get("high")}
    held = {stage.name: stage.mean for stage in stages}
    if "rl" in held and "sft" in held:
        return {"mean": held["rl"] - held["sft"], "low": None, "high": None}
    return None


def _last_start(run: Run) -> dict[str, Any]:
    starts = [start for part in run.parts for start in reader.read_json(part / "run.json").get("starts", [])]
    starts.sort(key=lambda start: str(start.get("time", "")))
    return {"count": len(starts), "first": starts[0] if starts else {}, "last": starts[-1] if starts else {}}


def _plain_mapping(value: Any) -> list[tuple[str, float]]:
    if not isinstance(value, Mapping):
        return []
    held = [(str(key), item.get("mean") if isinstance(item, Mapping) else item) for key, item in value.items()]
    return [(key, float(item)) for key, item in held if isinstance(item, int | float) and not isinstance(item, bool)]


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Nested data as rows of dotted name and text."""
    if isinstance(value, Mapping) and value:
        return [row for key, item in value.items() for row in _flat(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [row for place, item in enumerate(value) for row in _flat(item, f"{path}[{place}]")]
    if not path:
        return []
    return [(path, ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value))]


# ---------------------------------------------------------------- how numbers are written


def number(value: Any) -> str:
    """Three or four significant digits, thousands with commas; `–` for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 1000
        else f"{value:.1f}"
        if size >= 100
        else f"{value:.3g}"
        if size >= 0.001
        else f"{value:.2e}"
    )


def share(value: Any) -> str:
    """A fraction as per cent with one decimal."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def points(value: Any) -> str:
    """A difference of fractions as signed percentage points."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:+.1f}"


def duration(value: float) -> str:
    """Seconds, minutes or hours."""
    if not math.isfinite(value):
        return str(value)
    if value < 120:
        return f"{value:.1f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
