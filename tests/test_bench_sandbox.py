"""`pyvision bench sandbox`: fair order, intervals, and a small run whose figures are complete and can be recorded."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pyvision_jax.bench import measure, peers, sandbox
from pyvision_jax.recipes import results
from pyvision_sandbox import Policy, SandboxPool

NAMES = (
    "cold start", "cold start p99", "branch, same files", "branch, private files", "trivial cell",
    "1024x1024 crop to the host", "warm acquire and first cell", "start + cell + end", "CPU per session, all processes",
    "overshoot of a soft timeout, cores taken", "overshoot of a hard timeout, cores taken", "memory of 5 live sessions",
)  # fmt: skip


def test_steps_of_all_tasks_are_spread_over_the_whole_time() -> None:
    seen: list[str] = []
    tasks = [measure.Task(name, n, lambda name=name: seen.append(name) or 1.0) for name, n in (("a", 20), ("b", 4))]
    measure.interleave(tasks)
    assert len(tasks[0].seconds) == 20 and len(tasks[1].seconds) == 4
    for quarter in range(4):
        part = seen[6 * quarter : 6 * quarter + 6]
        assert part.count("a") == 5 and part.count("b") == 1


def test_steps_of_a_block_follow_each_other() -> None:
    seen: list[str] = []
    tasks = [measure.Task(name, 7, lambda name=name: seen.append(name) or 1.0, block=3) for name in "ab"]
    measure.interleave(tasks)
    assert "".join(seen) == "aaabbbaaabbbab"


def test_the_interval_of_the_median_holds_the_median_95_times_of_100() -> None:
    rng = random.Random(0)
    for n in (6, 20, 200):
        held = 0
        for _ in range(400):
            low, high = measure.median_interval([rng.expovariate(1) for _ in range(n)])
            assert low is not None and high is not None
            held += low <= np.log(2) <= high
        assert held >= 0.93 * 400
    assert measure.median_interval([1.0] * 5) == (None, None)


def test_processes_below_this_one_and_their_cpu() -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    before, cpu = measure.below(), measure.cpu_seconds()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in measure.below() and child.pid not in before
        assert measure.below()[child.pid].parent == os.getpid()
        assert measure.cpu_seconds() - cpu >= 0.15
        pss = measure.pss_mb(child.pid)
        assert pss is None or 1 < pss < 100
        child.kill()
    assert measure.read("/proc/0/absent") == "" and measure.available_mb() > 0


def test_a_fresh_python_is_timed_until_its_imports_are_done() -> None:
    with peers.environment() as env:
        peer = peers.FreshPython(["json"], env)
        assert 0.001 < peer.start() < 30
        with pytest.raises(peers.Unavailable, match="No module named"):
            peers.FreshPython(["no_such_module"], env)


@pytest.fixture(scope="module")
def best_level() -> str:
    with SandboxPool(Policy(profile="numpy_pil"), min_level="none", unsafe=True) as pool:
        return pool.report.level


def test_a_small_run(best_level: str, tmp_path: Path) -> None:
    options = sandbox.Options(n=6, profile="numpy_pil", level=best_level, sessions=5, with_peers=False)
    console = Console(file=io.StringIO(), width=250)
    start = time.monotonic()
    outcome = sandbox.run(options, console)
    assert time.monotonic() - start < 60
    figures = {figure.name: figure for figure in outcome.figures}
    assert set(NAMES) <= set(figures)
    assert all(figure.value > 0 for name, figure in figures.items() if not name.startswith(("memory", "overshoot")))
    assert figures["memory of 5 live sessions"].n == 5, "every session answered"
    assert figures["cold start"].bar and figures["cold start"].met is None, "no peer, no verdict"
    assert figures["branch, same files"].met is not None
    sandbox.print_table(outcome, console)
    assert "not measured" in console.file.getvalue()

    path = tmp_path / "docs" / "results" / "sandbox.json"
    sandbox.record(outcome, path)
    rows = results.read(path).rows
    assert {row.name for row in rows} >= {"cold start", "trivial cell"}
    page = tmp_path / "docs" / "performance.md"
    page.write_text("<!-- table:sandbox -->\n<!-- /table -->\n")
    assert results.make_tables(tmp_path) == [page] and "cold start p99" in page.read_text()


def test_ratios_say_how_many_times_less_ours_takes() -> None:
    ours, theirs = measure.Task("a", 3, time.time), measure.Task("b", 3, time.time)
    ours.seconds, theirs.seconds = [0.01] * 3, [1.0] * 3
    against = sandbox._against("peer", theirs, ours, 80)
    assert against == {"peer_name": "peer", "peer": 1000.0, "ratio": 100.0, "bar": "80x less than peer", "met": True}
    assert sandbox._against("peer", theirs, ours, 101)["met"] is False
    assert "met" not in sandbox._against("peer", None, ours, 80)


def test_jupyter_answers_with_a_picture() -> None:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    with peers.environment() as env:
        kernel = peers.Jupyter(["json"], env)
        try:
            assert kernel.start() > 0 and kernel.pid > 0
            assert kernel.run("1 + 1")[0]["text/plain"] == "2"
            kernel.run("from PIL import Image; image = Image.new('RGB', (2048, 2048), 'red')")
            crop = kernel.crop()
            assert crop.shape == (1024, 1024, 3) and (crop == (255, 0, 0)).all()
            with pytest.raises(peers.Unavailable, match="ZeroDivisionError"):
                kernel.run("1 / 0")
        finally:
            kernel.close()
