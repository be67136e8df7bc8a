"""Metrics of a run: metrics.csv, metrics.jsonl and TensorBoard; progress on the terminal. Names: docs/metrics.md."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from pyvision_jax.recipes.plain import plain
from pyvision_jax.report.reader import read_jsonl

KEYS = ("phase", "step", "time")  # first columns of every row


class MetricsWriter:
    """Appends one row a call, keyed by phase and step; every row is on disk when `write` returns.

    Args:
        run_dir: metrics.csv and metrics.jsonl lie in it, TensorBoard event files under tensorboard/PHASE.
        tensorboard: also write event files.
        phase: name used when `write` is given none.
        resume_step: the first step that will be written again; rows of `phase` at or after it are dropped.
        resume: continue the files of an earlier run; without it they are replaced.

    Values that are no number (U54: text, pictures, sets) are kept as text or marked, never an error.
    """

    def __init__(
        self,
        run_dir: Path | str,
        tensorboard: bool = True,
        phase: str = "train",
        resume_step: int | None = None,
        resume: bool = True,
    ):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.phase = phase
        self._tensorboard = tensorboard
        self._boards: dict[str, Any] = {}
        self._resume_step = resume_step
        self._csv_path = self.run_dir / "metrics.csv"
        self._jsonl_path = self.run_dir / "metrics.jsonl"
        rows = read_jsonl(self._jsonl_path).rows if resume else []
        if resume_step is not None:
            rows = [row for row in rows if not (row.get("phase") == phase and row.get("step", 0) >= resume_step)]
        # JSONL is the source of truth. Both files are written anew at the start: this drops rows of steps to come and
        # a line cut short by a crash.
        self._columns = list(dict.fromkeys([*KEYS, *(key for row in rows for key in row)]))
        _replace(self._jsonl_path, "".join(json.dumps(row) + "\n" for row in rows))
        self._write_csv(rows)
        self._jsonl = self._jsonl_path.open("a", encoding="ascii")
        self._csv = self._csv_path.open("a", encoding="utf-8", newline="")

    def write(self, step: int, values: Mapping[str, Any], phase: str | None = None) -> None:
        """Adds one row. `values`: metric name -> number (Python, numpy or a JAX scalar, which is waited for)."""
        phase = phase or self.phase
        held: dict[str, Any] = {str(name): _scalar(value) for name, value in values.items()}
        row = {"phase": phase, "step": int(step), "time": round(time.time(), 3), **held}
        self._jsonl.write(json.dumps(row, allow_nan=False) + "\n")
        self._jsonl.flush()
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._csv.close()
            self._write_csv(read_jsonl(self._jsonl_path).rows)
            self._csv = self._csv_path.open("a", encoding="utf-8", newline="")
        else:
            csv.writer(self._csv).writerow([_cell(row.get(key)) for key in self._columns])
            self._csv.flush()
        if self._tensorboard:
            board = self._board(phase)
            for name, value in held.items():
                number = _number(value)
                if number is not None:
                    board.add_scalar(name, number, int(step))

    def close(self) -> None:
        """Flushes event files; a second call does nothing."""
        self._jsonl.close()
        self._csv.close()
        for board in self._boards.values():
            board.close()
        self._boards.clear()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_csv(self, rows: list[dict[str, Any]]) -> None:
        partial = self._csv_path.with_suffix(".csv.part")
        with partial.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(self._columns)
            out.writerows([[_cell(row.get(key)) for key in self._columns] for row in rows])
        os.replace(partial, self._csv_path)

    def _board(self, phase: str) -> Any:
        if phase not in self._boards:
            from tensorboardX import SummaryWriter  # a second of import time: only where it is used

            purge = self._resume_step if phase == self.phase else None
            self._boards[phase] = SummaryWriter(str(self.run_dir / "tensorboard" / phase), purge_step=purge)
        return self._boards[phase]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="ascii")
    os.replace(partial, path)


def _scalar(value: Any) -> Any:
    held = plain(value)
    if isinstance(held, dict) and "__array__" in held and math.prod(held["__array__"][1]) == 1:
        return plain(value.reshape(())[()])  # [1] and [1, 1] arrays are numbers to everybody but JSON
    return held


def _number(held: Any) -> float | None:
    if isinstance(held, bool | int | float):
        return float(held)
    if isinstance(held, dict) and "__float__" in held:
        return float(held["__float__"])
    return None


def _cell(held: Any) -> Any:
    if held is None:
        return ""
    if isinstance(held, dict) and "__float__" in held:
        return held["__float__"]
    return json.dumps(held) if isinstance(held, dict | list) else held


# ---------------------------------------------------------------- progress


class Progress:
    """A bar with the time left on a terminal, one line a step elsewhere.

        with Progress("rl", total=60) as progress:
            progress.step(reward=0.4, calls=1.1)

    `start` is the number of steps already done (a resumed run): they do not enter the estimate.
    """

    def __init__(self, title: str, total: int, start: int = 0, stream: TextIO | None = None):
        self.title, self.total, self.done = title, total, start
        self._start = start
        self._stream = stream or sys.stdout
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[shown]}"),
                console=Console(file=self._stream),
                transient=False,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, shown="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds_left(self) -> float:
        """Estimate from the mean time of the steps done here; nan before the first."""
        count = self.done - self._start
        spent = time.monotonic() - self._began
        return (self.total - self.done) * spent / count if count else math.nan

    def step(self, count: int = 1, **shown: float | int | str) -> None:
        """`count` steps are done; `shown` appears beside the bar."""
        self.done += count
        text = "  ".join(f"{name} {_short(value)}" for name, value in shown.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, shown=text)
            return
        count = self.done - self._start
        each = (time.monotonic() - self._began) / max(count, 1)
        done = f"{self.done:>{len(str(self.total))}}/{self.total}"
        parts = [f"[{self.title}] {done}", text, f"{each:.2f} s/step, {clock(self.seconds_left)} left"]
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def clock(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 07 min; `?` where unknown."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
