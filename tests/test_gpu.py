"""What only a GPU can show: sampler against trainer there, and the bounds of bfloat16. Run by scripts/test_gpu.sh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine as sampler
from model_rows import case_spec, rows, to_batch
from tiny import random_params

from pyvision_jax.config import SamplingConfig
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.ops.attention import attention, packed_mask
from pyvision_jax.ops.logprobs import token_logprobs
from pyvision_jax.rollout.requests import Request

pytestmark = pytest.mark.gpu

# Bounds of the decode-versus-packed gap, in nats: float32 with full-precision products, and what bfloat16 may lose.
FLOAT32 = 1e-4
BFLOAT16_MEAN, BFLOAT16_P999 = 0.02, 0.2


def played(weights, dtype):
    """Log-probabilities at temperature 1 of what was sampled: the engine's, and the trainer's in float32."""
    eng = sampler.Engine(
        jax.tree.map(lambda leaf: leaf.astype(dtype), weights), sampler.config(), sampler.ROLLOUT,
        SamplingConfig(temperature=0.6, code_temperature=0.0), sampler.tokenizer(), sampler.TAGS, sampler.PROCESSOR,
        prefill_tokens=64,
    )  # fmt: skip
    first, shown = sampler.picture(0), sampler.picture(2, 32, 40)
    eng.submit(Request(sampler.prompt("what?", [first]), [first], group="a", n=4, seed=1))
    eng.submit(Request(sampler.prompt("no picture"), group="b", n=3, seed=2))
    segments, views = sampler.play(eng, sampler.prompt("seen", [shown]), [shown], turns=2)
    got, want = [], []
    for handle, turns in segments.items():
        policy = sampler.reference(views[handle], weights=weights)[1]
        for s in turns:
            got.append(s.policy_logprobs)
            want.append(policy[s.start - 1 : s.start + len(s.ids) - 1])
    return np.concatenate(got), np.concatenate(want)


def test_sampler_and_trainer_agree_in_float32():
    with jax.default_matmul_precision("highest"):
        got, want = played(sampler.params(), jnp.float32)
    assert len(got) > 40
    np.testing.assert_allclose(got, want, atol=FLOAT32)


def test_the_bfloat16_gap_stays_below_its_bounds():
    with jax.default_matmul_precision("highest"):
        got, want = played(sampler.params(), jnp.bfloat16)
    gap = np.abs(got - want)
    print(f"bfloat16 sampler against float32 trainer: mean {gap.mean():.5f}, p99.9 {np.quantile(gap, 0.999):.5f} nats")
    assert gap.mean() < BFLOAT16_MEAN and np.quantile(gap, 0.999) < BFLOAT16_P999


def test_logits_equal_the_cpu():
    cfg = case_spec("untied")
    params = random_params(cfg)
    batch = to_batch([[row] for row in rows(cfg)], cfg, 64)
    values = []
    for device in (jax.devices("gpu")[0], jax.devices("cpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            placed, on = jax.device_put((params, batch), device)
            hidden = jax.jit(lambda p, b: model.hidden_states(p, b, cfg))(placed, on)
            values.append(np.asarray(model.logits(placed.text, hidden))[np.asarray(batch.segments) > 0])
    scale = np.abs(values[1]).max()
    np.testing.assert_allclose(values[0], values[1], atol=1e-4 * scale)


def test_cudnn_attention_equals_xla():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 64, 64)), jnp.bfloat16) for n in (4, 2, 2))
    mask = packed_mask(jnp.asarray(np.repeat([[1, 2]], 32, axis=1).reshape(1, 64).repeat(2, 0)))
    fast, plain = (
        np.asarray(jax.jit(lambda q, k, v, how=how: attention(q, k, v, mask, implementation=how))(q, k, v), np.float32)
        for how in ("cudnn", "xla")
    )
    np.testing.assert_allclose(fast, plain, atol=2e-2)


def test_token_logprobs_in_chunks_equal_the_whole():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 64, 32)), jnp.float32)
    head = jnp.asarray(rng.standard_normal((32, 4_096)), jnp.float32)
    targets, heat = jnp.asarray(rng.integers(0, 4_096, (2, 64))), jnp.ones((2, 64))
    with jax.default_matmul_precision("highest"):
        whole, chunked = (token_logprobs(hidden, head, targets, heat, None, chunk)[0] for chunk in (0, 16))
    np.testing.assert_allclose(whole, chunked, atol=1e-4)
