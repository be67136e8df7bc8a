"""One program on any mesh: rules, equal losses and gradients, and lowering for machines that are not here."""

from __future__ import annotations

import re
from functools import partial

import decode_program
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from model_rows import make_row, to_batch
from tiny import random_params, tiny_spec

from pyvision_jax.config import MeshConfig
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.spec import abstract_params, shardings
from pyvision_jax.ops import token_logprobs
from pyvision_jax.parallel import DEFAULT_RULES, Rules, abstract_mesh, make_mesh, mesh_shape, shard
from pyvision_jax.rollout import step
from pyvision_jax.training.step import put

CFG = tiny_spec(vocab_size=64, layers=1, window_size=56)
SPECS = model.specs(CFG)
MESHES = ((1, 1, 1), (2, 2, 2), (1, 8, 1), (4, 1, 2))
ROWS, LENGTH = 8, 32
QUICK = {"xla_backend_optimization_level": 0}  # these programs run once: compiling them is all the time


def loss(params, batch, remat="block", chunk=8):
    hidden = model.hidden_states(params, batch, CFG, remat)
    logp, entropy = token_logprobs(
        hidden, model.head_matrix(params.text), batch.targets, batch.temperatures, None, chunk
    )
    total = jnp.sum((0.01 * entropy - logp) * batch.loss_weights)
    return total / jnp.sum(batch.loss_weights)


def some_batch():
    """Eight rows, two examples each, eight pictures."""
    rows = [[make_row(CFG, [5, ("image", (1, 4, 6)), 6], i), make_row(CFG, [6 + i % 3], 50 + i)] for i in range(ROWS)]
    return to_batch(rows, CFG, LENGTH)


@pytest.fixture(scope="module")
def reference():
    params, batch = random_params(CFG), some_batch()
    return params, batch, jax.jit(jax.value_and_grad(partial(loss, remat="none", chunk=0)))(params, batch)


@pytest.mark.parametrize("shape", MESHES)
def test_loss_and_gradients_are_the_same_on_every_mesh(shape, reference):
    params, batch, (expected, gradients) = reference
    count = int(np.prod(shape))
    if jax.device_count() < count:
        pytest.fail(f"{count} devices are needed: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[:count])
    placement = shardings(SPECS, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, placement), compiler_options=QUICK)
        value, ours = step(jax.device_put(params, placement), put(batch, mesh))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    pairs = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(ours), strict=True)
    for (path, theirs), mine in pairs:
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * np.abs(theirs).max() + 1e-7, err_msg=str(path))


def test_parameters_are_really_split():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    params = jax.device_put(random_params(CFG), shardings(SPECS, mesh))
    gate = params.text.blocks[0].gate
    assert gate.sharding.spec == PartitionSpec(("fsdp",), ("tensor",))
    assert gate.addressable_shards[0].data.shape == (gate.shape[0] // 2, gate.shape[1] // 2)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 16, 2), (4, 8, 1)])
def test_training_and_decoding_lower_for_accelerators(shape):
    """On meshes without devices; the batch is 32 rows, so that any of these splits it."""
    mesh = abstract_mesh(shape)

    def split(x, axis: int = 0):
        names = tuple("batch" if at == axis else None for at in range(x.ndim))
        sharding = NamedSharding(mesh, DEFAULT_RULES.spec(names, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = abstract_params(SPECS, jnp.bfloat16, mesh)
    whole = jax.tree.map(lambda x: np.concatenate([x] * 4), some_batch().replace(positions=None))
    batch = jax.tree.map(split, whole)
    batch = batch.replace(positions=split(np.zeros((3, 4 * ROWS, LENGTH), np.int32), axis=1))

    def slots(name: str, x):
        """Rows of the cache and of the control split over the batch axes, tables of the automaton are whole."""
        return jax.tree.map(split if name != "tables" else lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), x)

    def decode(static):
        made = jax.eval_shape(lambda: decode_program.arguments(CFG, 4 * ROWS, 64, jnp.bfloat16, static))
        names = ("cache", "control", "tables", "watch")
        arguments = [slots(name, x) for name, x in zip(names, made, strict=True)]
        return step.decode.trace(params, *arguments, cfg=CFG, **static), arguments[0]

    with jax.sharding.use_abstract_mesh(mesh):
        plain, cache = decode(decode_program.STATIC)
        everything, _ = decode(decode_program.EVERYTHING)
        programs = {
            "train": jax.jit(jax.value_and_grad(loss)).trace(params, batch),
            "decode": plain,
            "decode with all filters and stops": everything,
        }
        for name, program in programs.items():
            for platform in ("cuda", "tpu"):
                text = program.lower(lowering_platforms=(platform,)).as_text()
                assert "stablehlo.dot_general" in text, (name, platform)
                if name != "train":  # keys and values of every layer, and nothing else of that size
                    held = "x".join(map(str, cache.k[0].shape)) + "xbf16"
                    scattered = re.findall(rf"\}}\) : \(tensor<{held}>, .*-> tensor<{held}>", text)
                    assert len(scattered) == 2 * CFG.text.num_layers


def test_mesh_shapes():
    assert mesh_shape(MeshConfig(2, -1, 2), 8) == (2, 2, 2)
    assert mesh_shape(MeshConfig(), 8) == (1, 8, 1)
    for config in (MeshConfig(3, -1, 1), MeshConfig(2, 2, 1)):
        with pytest.raises(ValueError, match="does not cover 8 devices"):
            mesh_shape(config, 8)
    with pytest.raises(ValueError, match="at most one"):
        mesh_shape(MeshConfig(-1, -1, 1), 8)


def test_rules_refuse_what_cannot_be():
    mesh = abstract_mesh((1, 4, 4))
    with pytest.raises(ValueError, match="both map to mesh axis 'fsdp'"):
        DEFAULT_RULES.spec(("batch", "embed"))
    with pytest.raises(ValueError, match="'layer'"):
        DEFAULT_RULES.spec(("layer",))
    with pytest.raises(ValueError, match="size 30 does not split over 4"):
        DEFAULT_RULES.spec(("embed",), (30,), mesh)
    with pytest.raises(ValueError, match="unknown mesh axes"):
        Rules(table={"embed": ("rows",)})
    # Two key heads over four tensor devices: every device holds both.
    assert DEFAULT_RULES.spec(("kv_heads", "embed"), (2, 8), mesh) == PartitionSpec(None, ("fsdp",))


def test_shard_without_a_mesh_is_nothing():
    x = jnp.ones((3, 2))
    assert shard(x, "batch", None) is x
