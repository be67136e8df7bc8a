"""Checkpoints: whole or absent, safe under donation, loud when the disk fails."""

from __future__ import annotations

import functools
import logging
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pyvision_jax.checkpoint import CheckpointError, Checkpoints, load_params, save_params


def state_of(value: float, size: int = 8):
    return {"w": jnp.full((size, size), value), "opt": (jnp.int32(value), None)}


@functools.partial(jax.jit, donate_argnums=0)
def advance(state):
    return jax.tree.map(lambda x: x + 1, state)


def test_save_restore_keep_and_donation(tmp_path):
    state = state_of(0, 600)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.start(resume=True) is None
        for step in range(1, 4):
            state = advance(state)
            checkpoints.save(step, state, {"position": step, "text": ["a", None]})
            for _ in range(3):  # overwrites the buffers that are being saved
                state = advance(state)
            checkpoints.check()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.start(resume=True) == 3
        for asked, value in ((None, 9.0), (2, 5.0)):
            step, restored, host = checkpoints.restore(state, asked)
            assert host == {"position": step, "text": ["a", None]}
            np.testing.assert_array_equal(restored["w"], np.full((600, 600), value))
            assert int(restored["opt"][0]) == value
        with pytest.raises(CheckpointError, match="--resume"):
            checkpoints.start(resume=False)


def test_leftovers_of_a_kill_are_removed_or_ignored(tmp_path, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), {})
        checkpoints.save(2, state_of(2), {})
    shutil.copytree(tmp_path / "1", tmp_path / "3.orbax-checkpoint-tmp-12")
    shutil.rmtree(tmp_path / "2" / "host")  # an interrupted copy of the directory
    with caplog.at_level(logging.INFO), Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.start(resume=True) == 1
        assert checkpoints.restore(state_of(0))[0] == 1
        assert "lacks host" in caplog.text
        assert "from step 1" in caplog.text
        assert not (tmp_path / "3.orbax-checkpoint-tmp-12").exists()
        checkpoints.save(2, state_of(7), {"new": True})  # the step that was broken can be saved again
    with Checkpoints(tmp_path) as checkpoints:
        step, state, host = checkpoints.restore(state_of(0))
        assert (step, float(state["w"][0, 0]), host) == (2, 7.0, {"new": True})


def test_a_full_disk_is_heard(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1), {})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"w": jax.random.normal(jax.random.key(0), (400, 400)), "opt": (jnp.int32(1), None)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            checkpoints.save(2, noise, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Checkpoints(tmp_path) as again:
        assert again.latest() == 1
        again.save(2, noise, {})
    with Checkpoints(tmp_path) as again:
        assert again.latest() == 2


def test_templates_that_do_not_fit_are_named(tmp_path):
    with Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            checkpoints.restore(state_of(0))
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="cannot be restored"):
            checkpoints.restore({"other": jnp.zeros(3)})


def test_params_alone(tmp_path):
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": None}
    save_params(tmp_path / "params", params)
    save_params(tmp_path / "params", jax.tree.map(lambda x: x + 1, params))  # replaces
    loaded = load_params(tmp_path / "params", params)
    np.testing.assert_array_equal(loaded["a"], params["a"] + 1)
    with pytest.raises(CheckpointError, match="nothing"):
        load_params(tmp_path / "nothing", params)
