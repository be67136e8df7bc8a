"""A run killed at any point and resumed ends bit for bit where an unbroken one does (RL, real engine, tiny policy)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
KILLS = {"rollouts": "collect:3", "reward": "reward:4", "saving": "saved:2"}


def start(programs: Path, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PROGRAMS": str(programs), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "sandbox"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tests.resume_run", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two unbroken runs in one process, three killed ones in theirs, then all three resumed in one."""
    root = tmp_path_factory.mktemp("resume")
    programs = root / "programs"  # compiled once, shared by all processes
    finish(start(programs, "run", f"{root / 'whole'},{root / 'again'}"))
    killed = [start(programs, "run", str(root / name), place) for name, place in KILLS.items()]
    for process in killed:
        finish(process, -signal.SIGKILL)
    finish(start(programs, "resume", ",".join(str(root / name) for name in KILLS)))
    return root


def outcome(directory: Path) -> tuple[dict[str, bytes], dict]:
    with np.load(directory / "final.npz") as leaves:
        state = {name: leaves[name].tobytes() for name in leaves.files}
    return state, json.loads((directory / "host.json").read_text())


@pytest.mark.parametrize("name", ["again", *KILLS])
def test_bit_equal(runs, name):
    """Parameters, moments, update count; data position and packing sizes; metrics of the last step."""
    state, host = outcome(runs / name)
    wanted_state, wanted_host = outcome(runs / "whole")
    assert state == wanted_state
    first, wanted_host["first"] = host["first"], host["first"]
    assert host == wanted_host
    # The saving run dies while its checkpoint of step 2 is written: it goes on from that step, or from the start.
    assert first in {"again": (1,), "rollouts": (3,), "reward": (3,), "saving": (1, 3)}[name]


def test_it_was_a_run_worth_resuming(runs):
    _, host = outcome(runs / "whole")
    assert host["step"] == 4
    assert host["metrics"]["actor/updates"] == 2
    assert host["metrics"]["actor/grad_norm"] > 0
    assert host["metrics"]["training/rollout_logprobs_diff_max"] < 1e-4  # the engine and the trainer agree
