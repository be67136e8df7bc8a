"""Logits against transformers: stored ones always, live ones where torch is installed."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from model_rows import CASES, case_spec, rows, to_batch
from tiny import random_params

from pyvision_jax.models import qwen2_5_vl as model

GOLDEN = Path(__file__).parent / "golden" / "logits.npz"


def our_logits(cfg, packed, length) -> np.ndarray:
    batch = to_batch(packed, cfg, length)
    params = random_params(cfg)

    @jax.jit
    def run(params, batch):
        return model.logits(params.text, model.hidden_states(params, batch, cfg))

    return np.asarray(run(params, batch))


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Relative to the spread of the logits: single ones may be near 0."""
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_stored_transformers_logits(name):
    cfg = case_spec(name)
    members = rows(cfg)
    length = max(len(row.ids) for row in members) + 3
    ours = our_logits(cfg, [[row] for row in members], length)
    with np.load(GOLDEN) as golden:
        for i, row in enumerate(members):
            assert_close(ours[i, : len(row.ids)], golden[f"{name}_{i}"])


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name):
    pytest.importorskip("torch")
    from golden.make_logits import reference_logits, reference_model

    cfg = case_spec(name)
    members = rows(cfg)
    hf = reference_model(random_params(cfg), cfg)
    ours = our_logits(cfg, [[row] for row in members], max(len(row.ids) for row in members) + 3)
    for i, row in enumerate(members):
        assert_close(ours[i, : len(row.ids)], reference_logits(hf, row, cfg))
