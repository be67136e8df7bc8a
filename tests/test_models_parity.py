"""Logits against transformers: stored ones always, live ones where torch is installed."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from model_rows import CASES, case_spec, rows, to_batch
from tiny import random_params

from pyvision_jax.models import qwen2_5_vl as model

GOLDEN = Path(__file__).parent / "golden" / "logits.npz"


@functools.cache
def our_logits(name: str) -> list[np.ndarray]:
    """[T, v] of each row, all rows in one batch with padding behind them."""
    cfg = case_spec(name)
    members = rows(cfg)
    batch = to_batch([[row] for row in members], cfg, max(len(row.ids) for row in members) + 3)
    params = random_params(cfg)

    @jax.jit
    def run(params, batch):
        return model.logits(params.text, model.hidden_states(params, batch, cfg))

    scores = np.asarray(run(params, batch))
    return [scores[i, : len(row.ids)] for i, row in enumerate(members)]


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Relative to the spread of the logits: single ones may be near 0."""
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_stored_transformers_logits(name):
    with np.load(GOLDEN) as golden:
        for i, ours in enumerate(our_logits(name)):
            assert_close(ours, golden[f"{name}_{i}"])


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name):
    pytest.importorskip("torch")
    from golden.make_logits import reference_logits, reference_model

    cfg = case_spec(name)
    hf = reference_model(random_params(cfg), cfg)
    for row, ours in zip(rows(cfg), our_logits(name), strict=True):
        assert_close(ours, reference_logits(hf, row, cfg))
