"""Intervals against numbers worked by hand; recorded results; and the tables of docs/ against their files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pyvision_jax.evaluation.metrics import mean_interval, paired_by_task, paired_difference, wilson
from pyvision_jax.recipes.results import Row, figure, make_tables, read, record, rewrite, table

ROOT = Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------- statistics


def test_wilson_by_hand():
    # 8 of 10, z = 1.959964: centre (0.8 + 3.841459/20) / 1.3841459 = 0.716738,
    # half width 1.959964/1.3841459 * sqrt(0.016 + 3.841459/400) = 1.416010 * 0.160011 = 0.226577.
    interval = wilson(8, 10)
    assert interval.mean == 0.8 and interval.n == 10
    assert interval.low == pytest.approx(0.490162, abs=2e-6) and interval.high == pytest.approx(0.943318, abs=2e-6)
    # 0 of 20: the upper bound is z^2 / (n + z^2) = 3.841459 / 23.841459.
    assert (wilson(0, 20).low, wilson(0, 20).high) == (0.0, pytest.approx(0.161125, abs=1e-6))
    assert (wilson(20, 20).low, wilson(20, 20).high) == (pytest.approx(0.838875, abs=1e-6), 1.0)
    # 90 %: z = 1.644854; 5 of 10 is symmetric, half width z/(1 + z^2/10) * sqrt(0.025 + z^2/400) = 0.230728.
    assert wilson(5, 10, 0.9).high == pytest.approx(0.730728, abs=2e-6)
    for bad in ((-1, 3), (4, 3), (0, 0)):
        with pytest.raises(ValueError, match="successes"):
            wilson(*bad)


def test_mean_interval_chooses_by_the_values():
    assert mean_interval([1, 1, 1, 1, 1, 1, 1, 1, 0, 0]) == wilson(8, 10)
    assert mean_interval(np.ones((3, 1))) == wilson(3, 3)
    # Two tasks of means 0 and 1: a resample's mean is 0, 1/2, 1 with odds 1:2:1, so 2.5 % and 97.5 % are 0 and 1.
    interval = mean_interval([[0, 0], [1, 1]])
    assert interval.as_dict() == {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 2}
    # Tries of one task go together: 100 tries each do not make two tasks into 200.
    assert mean_interval(np.repeat([[0.0], [1.0]], 100, axis=1)).high == 1.0
    # Large n: the bootstrap agrees with mean +- 1.96 * sd / sqrt(n).
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    interval = mean_interval(values)
    half = 1.96 * values.std() / 20
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)
    assert interval == mean_interval(values) and interval != mean_interval(values, seed=1)
    for bad in ([], [[]], [1.0, float("nan")], np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match="mean_interval"):
            mean_interval(bad)
    with pytest.raises(ValueError, match="confidence"):
        mean_interval([0.5, 0.2], confidence=95)


def test_paired_difference_uses_the_pairs():
    rng = np.random.default_rng(1)
    hard = rng.uniform(0, 1, 200)
    # Every task gains exactly 0.1: paired, the interval has no width, however much the tasks differ.
    interval = paired_difference(hard + 0.1, hard)
    assert (
        interval.mean == pytest.approx(0.1)
        and interval.low == pytest.approx(0.1)
        and interval.high == pytest.approx(0.1)
    )
    shuffled = paired_difference(hard + 0.1, rng.permutation(hard))
    assert shuffled.low < 0.06 and shuffled.high > 0.14
    # Differences 1 and 0 of two tasks, as above.
    interval = paired_difference([1, 0], [0, 0])
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.0, 1.0)
    # Four tries after, one before.
    assert paired_difference([[1, 1, 0, 0], [1, 1, 1, 1]], [0, 1]).mean == 0.25
    with pytest.raises(ValueError, match="3 tasks after, 2 before"):
        paired_difference([1, 2, 3], [1, 2])


def test_paired_by_task_names_the_lone_one():
    interval = paired_by_task({"a": 1, "b": [1, 0]}, {"b": 0, "a": 0})
    assert interval.mean == 0.75 and interval.n == 2
    with pytest.raises(ValueError, match=r"1 task.*'c' is missing before"):
        paired_by_task({"a": 1, "c": 1}, {"a": 1})


# ---------------------------------------------------------------- results files


def test_record_and_read(tmp_path: Path):
    path = tmp_path / "demo.json"
    record(
        path, "pyvision demo --seed 0", [Row("gain seed 0", 33.0, "points", 26.0, 40.0, 256)], commit="a" * 40, host="h"
    )
    data = json.loads(path.read_text())
    assert list(data) == ["command", "commit", "host", "date", "rows"]
    assert list(data["rows"][0]) == ["name", "value", "unit", "low", "high", "n", "peer", "ratio"]
    record(path, "pyvision demo --seed 1", [Row("gain seed 1", 30.5, "points")], commit="b" * 40, host="h")
    held = record(path, "pyvision demo --seed 1", [Row("gain seed 1", 31.5, "points")], commit="b" * 40, host="h")
    assert held == read(path)
    assert [(row.name, row.value) for row in held.rows] == [("gain seed 0", 33.0), ("gain seed 1", 31.5)]
    assert held.rows[0].origin == {"command": "pyvision demo --seed 0", "commit": "a" * 40} and not held.rows[1].origin
    anew = record(path, "c", [Row("x", 1)], commit=None, keep=False)
    assert [row.name for row in anew.rows] == ["x"] and anew.commit == "unknown" and "cores" in anew.host


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": [{"name": "a", "value": "fast"}]}, "value of row 'a' is 'fast'"),
        ({"rows": [{"name": "a", "value": float("nan")}]}, "not a finite number"),
        ({"rows": [{"name": "a", "value": 1}, {"name": "a", "value": 2}]}, "two rows are named 'a'"),
        ({"rows": [{"name": "a", "value": 1, "speed": 2}]}, r"rows\[0\] has keys"),
        ({"command": ""}, "command must be a text"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, change: dict, said: str):
    good = {"command": "c", "commit": "d", "host": "h", "date": "2025-01-01", "rows": [{"name": "a", "value": 1}]}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(ValueError, match=said) as error:
        read(path)
    assert "bad.json" in str(error.value)


def test_tables(tmp_path: Path):
    docs = tmp_path / "docs"
    rows = [
        Row("gain seed 0", 33.25, "points", 26.0, 40.125, 256),
        Row("decode | bf16", 12_345.6, "tokens/s", peer=8_000.0, ratio=1.543),
    ]
    record(docs / "results" / "demo.json", "pyvision demo", rows, commit="a" * 40 + "+changes", host="2 cores")
    page = docs / "demo.md"
    page.write_text(
        "# Demo\n<!-- table:demo -->\nold\n<!-- /table -->\ntext\n<!-- table:demo rows=gain* -->\n<!-- /table -->\n"
    )
    assert make_tables(tmp_path, check=True) == [page] and "old" in page.read_text()
    assert make_tables(tmp_path) == [page] and make_tables(tmp_path, check=True) == []
    text = page.read_text()
    assert "| gain seed 0 | 33.25 points | 26 to 40.12 | 256 |  |  |" in text
    assert "| decode \\| bf16 | 12,346 tokens/s |  |  | 8,000 | 1.54x |" in text
    assert "`pyvision demo`, commit aaaaaaaaaaaa+changes, 2 cores" in text
    assert text.count("12,346") == 1 and text.startswith("# Demo\n") and "\ntext\n" in text
    assert table(read(docs / "results" / "demo.json"), "gain*").splitlines()[0] == "|  | value | 95 % interval | n |"
    assert [figure(value) for value in (0.01234, 0.5, 150.26, 3, 2500.5)] == ["0.0123", "0.50", "150.3", "3", "2,500"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n<!-- table:none -->\n<!-- /table -->\n", "a.md:2: table 'none' has no results file"),
        ("<!-- table:x -->\nno end\n", "a.md: 1 table blocks are opened, 0 are whole"),
        ("<!-- table:x cols=a -->\n<!-- /table -->\n", "unknown option 'cols=a'"),
    ],
)
def test_bad_blocks_are_named(tmp_path: Path, text: str, said: str):
    with pytest.raises(ValueError, match=said):
        rewrite(text, tmp_path, "a.md")


def test_tables_of_this_repository_match_their_files():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
