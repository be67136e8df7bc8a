"""The train step: invariance to micro-batches, packing and mesh; masks, frozen parts, metrics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pyvision_jax.config import AlgorithmConfig, MeshConfig, OptimizerConfig, PackingConfig
from pyvision_jax.data.packing import Packer
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.spec import shardings
from pyvision_jax.parallel import make_mesh
from pyvision_jax.training.state import PARTS, Optimizer, merge, part_of, partition
from pyvision_jax.training.step import Objective, Scorer, TrainStep
from tests.tiny import random_params, tiny_spec
from tests.trajectories import PROCESSOR, random_example, random_image

SPEC = tiny_spec(layers=1, depth=1, fullatt_blocks=(0,))
FORBIDDEN = np.arange(96) >= 90  # the four vision ids among them: they are targets of weight 0
POLICY = Objective("policy", dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)
CONFIG = OptimizerConfig(lr=1e-2, clip_norm=1.0, weight_decay=0.1)


def examples(count=6):
    made = [
        random_example(SPEC, s, [random_image(s), random_image(99)] if s % 2 else [], learned=3 + s)
        for s in range(count)
    ]
    for example in made:  # near the policy, so that some ratios are clipped and some are not
        example.old_logprobs = np.random.default_rng(5).uniform(-5.5, -4, len(example.ids)).astype(np.float32)
    return made


def pack(items, rows=8, row_length=48, images=8):
    return Packer(SPEC, PROCESSOR, PackingConfig(row_length, rows, images), forbidden=FORBIDDEN).pack(items).batches


@functools.cache  # programs are what these tests cost
def train_step(objective, config, shape) -> TrainStep:
    mesh = None if shape is None else make_mesh(MeshConfig(*shape))
    return TrainStep(Scorer(SPEC, FORBIDDEN), Optimizer(config, 10), objective, mesh)


def run(batches, objective=POLICY, config=CONFIG, shape=None, divisor=None, steps=1):
    params = random_params(SPEC)
    step = train_step(objective, config, shape)
    if step.mesh is not None:
        params = jax.device_put(params, shardings(model.specs(SPEC), step.mesh))
    state = Optimizer(config, 10).init(params)
    for _ in range(steps):
        state, metrics = step(state, batches, divisor)
    return jax.device_get(state), {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def whole():
    return run(pack(examples()))


def assert_same(a, b, tolerance=2e-5):
    (state_a, metrics_a), (state_b, metrics_b) = a, b
    assert metrics_a.keys() == metrics_b.keys()
    for name in metrics_a:
        assert metrics_a[name] == pytest.approx(metrics_b[name], rel=2e-4, abs=1e-5), name
    # Moments instead of parameters: Adam's first step moves by the sign of a gradient, however small.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=tolerance), state_a.opt_state, state_b.opt_state
    )


def test_micro_batches_do_not_matter(whole):
    batches = pack(examples(), rows=1, images=4)
    assert len(batches) > 2
    assert_same(whole, run(batches))
    assert whole[1]["actor/update_skipped"] == 0
    assert 0 < whole[1]["actor/pg_clipfrac"] < 1


def test_packing_does_not_matter(whole):
    assert_same(whole, run(pack(examples()[::-1])))


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1)])
def test_mesh_does_not_matter(whole, shape):
    assert_same(whole, run(pack(examples()), shape=shape))


def test_text_and_picture_rows_in_one_batch_are_the_weighted_mean_of_both():
    """U16."""
    items = examples()
    kinds = [[e for e in items if bool(e.images) is with_pictures] for with_pictures in (True, False)]
    objective = Objective()
    both = run(pack(items), objective)[1]["actor/loss"]
    apart = [run(pack(kind), objective)[1]["actor/loss"] for kind in kinds]
    weights = [sum(float(e.loss_weights.sum()) for e in kind) for kind in kinds]
    assert both == pytest.approx(np.average(apart, weights=weights), rel=1e-5)


def test_all_masked_moves_nothing():
    """U26: zero loss, finite zero gradient, no drift by moments or weight decay; the step does not count."""
    items = examples(2)
    for example in items:
        example.loss_weights[:] = 0
    step = train_step(POLICY, CONFIG, None)
    state, _ = step(Optimizer(CONFIG, 10).init(random_params(SPEC)), pack(examples(2)))
    before = jax.device_get(state)
    state, metrics = step(state, pack(items))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert float(metrics["actor/loss"]) == float(metrics["actor/grad_norm"]) == 0.0
    assert float(metrics["actor/update_skipped"]) == 1.0
    assert all(np.isfinite(float(value)) for value in metrics.values())


def test_a_divisor_replaces_the_sum_of_weights(whole):
    total = sum(float(e.loss_weights.sum()) for e in examples())
    halved = run(pack(examples()), divisor=2 * total)[1]
    assert halved["actor/loss"] == pytest.approx(whole[1]["actor/loss"] / 2, rel=1e-5)
    assert halved["actor/grad_norm"] == pytest.approx(whole[1]["actor/grad_norm"] / 2, rel=1e-4)


def test_parts_of_the_tree():
    params = random_params(SPEC)
    sizes = {part: len(jax.tree.leaves(partition(params, [p for p in PARTS if p != part])[0])) for part in PARTS}
    assert sizes["merger"] == 5
    assert sum(sizes.values()) == len(jax.tree.leaves(params))
    for freeze in ((), ("text",), ("vision", "merger")):
        jax.tree.map(np.testing.assert_array_equal, merge(*partition(params, freeze)), params)


def test_frozen_parts_stay_and_have_no_state(freeze=("vision", "text")):
    before = jax.device_get(random_params(SPEC))
    state, _ = run(pack(examples()), config=OptimizerConfig(lr=1e-2, freeze=freeze))
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * len(jax.tree.leaves(partition(before, freeze)[0]))

    def check(path, old, new):
        assert np.array_equal(old, new) == (part_of(path) in freeze), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, before, state.params)


def test_on_policy_ratio_is_one_at_mixed_temperatures():
    """U30: scored at its own temperature, each token's ratio is 1 and the gap to the sampler is 0."""
    items = examples()
    batches = pack(items)
    scorer = Scorer(SPEC, FORBIDDEN)
    logprobs = jax.jit(scorer)(random_params(SPEC), jax.device_put(batches[0]))[0]
    batches = [batches[0].replace(old_logprobs=np.asarray(logprobs))]
    metrics = run(batches)[1]
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert metrics["actor/pg_clipfrac"] == 0
    weights, advantages = batches[0].loss_weights, batches[0].advantages
    assert metrics["actor/pg_loss"] == pytest.approx(-(weights * advantages).sum() / weights.sum(), rel=1e-4)


def test_sft_learns():
    batches = pack(examples())
    first = run(batches, Objective())[1]["actor/loss"]
    assert run(batches, Objective(), steps=8)[1]["actor/loss"] < 0.7 * first


def test_schedules():
    def lrs(**options):
        optimizer = Optimizer(OptimizerConfig(lr=1.0, final_lr_ratio=0.1, **options), 10)
        return [float(optimizer.lr(jnp.int32(step))) for step in (0, 1, 4, 7, 10)]

    np.testing.assert_allclose(lrs(warmup_steps=2), [0.5, 1, 1, 1, 1])
    np.testing.assert_allclose(lrs(schedule="linear", warmup_steps=4), [0.25, 0.5, 1, 0.55, 0.1], rtol=1e-6)
    np.testing.assert_allclose(lrs(schedule="cosine", warmup_steps=4)[2:], [1, 0.55, 0.1], rtol=1e-6)
    with pytest.raises(ValueError, match="constant, cosine, linear"):
        Optimizer(OptimizerConfig(schedule="step"), 10)
    with pytest.raises(ValueError, match="vision, merger, text"):
        Optimizer(OptimizerConfig(freeze=("tower",)), 10)
    with pytest.raises(ValueError, match="nothing is left"):
        Optimizer(OptimizerConfig(freeze=("vision", "merger", "text")), 10)


def test_objectives_are_checked():
    assert Objective.of(AlgorithmConfig(clip_high=0.3, kl_coef=0.1)) == Objective("policy", clip_high=0.3, kl_coef=0.1)
    for options, message in (({"kind": "dpo"}, "dpo"), ({"dual_clip": 0.5}, "above 1"), ({"kl_estimator": "k9"}, "k1")):
        with pytest.raises(ValueError, match=message):
            Objective(**options)
