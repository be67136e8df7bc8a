"""Weights in HF layout: import, export, every way in which a directory can be wrong, host memory, meshes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tracemalloc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_rows import case_spec, rows, to_batch
from safetensors.numpy import load_file, save_file
from tiny import random_params, tiny_spec

from pyvision_jax.checkpoint import load_params, save_params
from pyvision_jax.config import MeshConfig
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec, TextConfig, VisionConfig
from pyvision_jax.models.hf import (
    WeightsError,
    check_weights,
    export_command,
    export_weights,
    import_command,
    import_weights,
)
from pyvision_jax.models.hf_names import FAMILIES, Stored
from pyvision_jax.models.safetensors_io import INDEX, SINGLE, TensorDirectory
from pyvision_jax.parallel import make_mesh

GOLDEN = Path(__file__).parent / "golden"
SMALL = 30_000  # bytes of a shard
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def cfg():
    return case_spec("untied")


@pytest.fixture(scope="module")
def params(cfg):
    return random_params(cfg)


@pytest.fixture(scope="module")
def exported(cfg, params, tmp_path_factory) -> Path:
    """A good directory of several shards in the old layout; copied before it is spoilt."""
    return export_weights(params, cfg, tmp_path_factory.mktemp("weights") / "good", shard_bytes=SMALL)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> Path:
    from pyvision_jax.data.tokenizer import train_tiny

    directory = tmp_path_factory.mktemp("tokenizer")
    train_tiny(["what is in the picture?"], 280).save(directory)
    return directory


@pytest.fixture
def spoilt(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "spoilt"))


def assert_equal_trees(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def edit(directory: Path, change, single: bool = False) -> None:
    """Applies `change(tensors)` to all tensors of a directory and writes them as one file, or as two with an index."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (directory / INDEX).unlink(missing_ok=True)
    change(tensors)
    names = sorted(tensors)
    halves = [names] if single else [names[::2], names[1::2]]
    files = [SINGLE] if single else ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, half in zip(files, halves, strict=True):
        save_file({name: np.ascontiguousarray(tensors[name]) for name in half}, directory / file)
    if not single:
        index = {name: file for file, half in zip(files, halves, strict=True) for name in half}
        write_index(directory, index)


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def set_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.update(changes)
    (directory / "config.json").write_text(json.dumps(config))


def to_new_layout(tensors: dict) -> None:
    for name in list(tensors):
        new = "model." + name if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
        tensors[new] = tensors.pop(name)


# ------------------------------------------------------------------------------------------------ the good cases


def test_round_trip_of_shards(exported, cfg, params) -> None:
    read_cfg, read = import_weights(exported)
    assert read_cfg == cfg
    assert_equal_trees(read, params)
    index = json.loads((exported / INDEX).read_text())
    held = [name for file in exported.glob("*.safetensors") for name in load_file(file)]
    assert sorted(held) == sorted(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert len(set(index["weight_map"].values())) > 3
    assert {"config.json", "generation_config.json", "preprocessor_config.json"} <= {p.name for p in exported.iterdir()}


def test_names_shapes_and_values_are_those_of_transformers(cfg, params, tmp_path) -> None:
    from golden.make_weights import checksum

    export_weights(params, cfg, tmp_path / "new", layout="new")
    golden = np.load(GOLDEN / "weights.npz")
    with TensorDirectory(tmp_path / "new") as files:
        assert sorted(files.infos) == golden["names"].tolist()
        for name, shape, value in zip(golden["names"], golden["shapes"], golden["checksums"], strict=True):
            array = files.read(str(name))
            assert "x".join(map(str, array.shape)) == shape, name
            np.testing.assert_allclose(checksum(array), value, rtol=1e-6, atol=1e-6, err_msg=str(name))


@pytest.mark.parametrize("single", [True, False])
def test_both_layouts_are_read(spoilt, params, single) -> None:
    edit(spoilt, to_new_layout, single)
    assert check_weights(spoilt).layout == "new"
    assert_equal_trees(import_weights(spoilt)[1], params)


def test_bfloat16_round_trip(cfg, params, tmp_path) -> None:
    export_weights(params, cfg, tmp_path / "bf16", dtype=jnp.bfloat16, shard_bytes=SMALL)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_equal_trees(import_weights(tmp_path / "bf16", dtype=jnp.bfloat16)[1], rounded)
    wide = import_weights(tmp_path / "bf16", dtype=jnp.float32)[1]
    assert_equal_trees(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded))
    index = json.loads((tmp_path / "bf16" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(rounded))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert check_weights(tmp_path / "bf16").dtypes == {"bfloat16": len(jax.tree.leaves(params))}


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 2), (1, 1, 8)])
def test_import_into_shardings(sizes, tmp_path, monkeypatch) -> None:
    cfg = tiny_spec(vocab_size=64, hidden=64, heads=8, kv_heads=2, depth=1, layers=1, fullatt_blocks=(0,))
    cfg = dataclasses.replace(cfg, vision=dataclasses.replace(cfg.vision, num_heads=8))
    params = random_params(cfg)
    export_weights(params, cfg, tmp_path / "w")
    reads: dict[str, list[int]] = {}
    read = TensorDirectory.read

    def counted(self, name, index=()):
        array = read(self, name, index)
        reads.setdefault(name, []).append(array.nbytes)
        return array

    monkeypatch.setattr(TensorDirectory, "read", counted)
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    _, sharded = import_weights(tmp_path / "w", mesh=mesh)
    assert_equal_trees(sharded, params)
    embed = sharded.text.embed
    assert embed.sharding.shard_shape(embed.shape) == (64 // sizes[2], 64 // sizes[1])
    # Each device's part is read by itself, and replicas share one read.
    assert len(reads[EMBED]) == sizes[1] * sizes[2] and sum(reads[EMBED]) == embed.nbytes
    q = "model.layers.0.self_attn.q_proj.weight"
    assert len(reads[q]) == sizes[1] * sizes[2] and sum(reads[q]) == sharded.text.blocks[0].q.nbytes

    export_weights(sharded, cfg, tmp_path / "again")
    assert_equal_trees(import_weights(tmp_path / "again")[1], params)


def test_a_part_of_a_leaf_equals_the_part_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for stored in (
        Stored("q", (12, 5), (3, 4, 5), (2, 0, 1)),
        Stored("qkv", (24, 5), (3, 2, 4, 5), (3, 0, 1, 2)),
        Stored("patches", (6, 3, 2, 4), (6, 24), (1, 0)),
        Stored("bias", (24,), (3, 2, 4), (0, 1, 2)),
        Stored("plain", (7, 3), (7, 3), (0, 1)),
    ):
        whole = rng.standard_normal(stored.leaf_shape)
        file = stored.to_file(whole)
        assert file.shape == stored.shape
        for _ in range(20):
            ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in stored.leaf_shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            np.testing.assert_array_equal(stored.from_file(lambda part, file=file: file[part], index), whole[index])


def test_host_memory_is_one_tensor(tmp_path, monkeypatch) -> None:
    cfg = tiny_spec(vocab_size=512, hidden=128, layers=12, depth=1, fullatt_blocks=(0,))
    params = random_params(cfg)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    export_weights(params, cfg, tmp_path / "w", shard_bytes=total // 5)
    alive, peak = 0, 0
    read = TensorDirectory.read

    def watched(self, name, index=()):
        nonlocal alive, peak
        array = read(self, name, index)
        size = array.nbytes
        alive, peak = alive + size, max(peak, alive + size)

        def gone() -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(array, gone)
        return array

    monkeypatch.setattr(TensorDirectory, "read", watched)
    mesh = make_mesh(MeshConfig(1, 4, 1), jax.devices()[:4])
    import_weights(tmp_path / "w", mesh=mesh, dtype=jnp.bfloat16)  # warm
    tracemalloc.start()
    _, loaded = import_weights(tmp_path / "w", mesh=mesh, dtype=jnp.bfloat16)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < peak <= largest
    assert traced < total / 4, (traced, total)
    assert len(jax.tree.leaves(loaded)) == len(jax.tree.leaves(params))


def test_progress_names_every_tensor(exported, params) -> None:
    seen: dict[str, int] = {}
    import_weights(exported, progress=seen.__setitem__)
    assert seen.keys() == read_index(exported).keys()
    assert sum(seen.values()) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


# --------------------------------------------------------------------------------------------------- tied heads


@pytest.fixture
def tied(tmp_path) -> Path:
    cfg = case_spec("tied")
    return export_weights(random_params(cfg), cfg, tmp_path / "tied")


def test_tied_head_is_not_written_and_not_needed(tied) -> None:
    assert HEAD not in load_file(tied / SINGLE)
    _, params = import_weights(tied)
    assert params.text.head is None


def test_tied_head_may_be_an_equal_copy_only(tied) -> None:
    edit(tied, lambda tensors: tensors.update({HEAD: tensors[EMBED].copy()}), single=True)
    _, params = import_weights(tied)
    assert params.text.head is None
    edit(tied, lambda tensors: tensors[HEAD].__setitem__((3, 2), 9.0), single=True)
    with pytest.raises(WeightsError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but the two differ"):
        import_weights(tied)


def test_untied_head_is_required(tied, exported, spoilt) -> None:
    set_config(tied, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight.*tie_word_embeddings"):
        import_weights(tied)
    set_config(spoilt, tie_word_embeddings=True)
    with pytest.raises(WeightsError, match="differ"):
        import_weights(spoilt)


def test_export_refuses_a_flag_that_says_the_opposite(cfg, params, tmp_path) -> None:
    tied = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, tie_embeddings=True))
    with pytest.raises(WeightsError, match="head of their own but the config has tie_word_embeddings true"):
        export_weights(params, tied, tmp_path / "w")
    headless = params.replace(text=params.text.replace(head=None))
    with pytest.raises(WeightsError, match="no head but the config has tie_word_embeddings false"):
        export_weights(headless, cfg, tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------- wrong directories


def test_missing_unexpected_and_misshaped_tensors_are_all_named(spoilt) -> None:
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors[EMBED] = tensors[EMBED][:-1]

    edit(spoilt, change)
    with pytest.raises(WeightsError) as error:
        import_weights(spoilt)
    message = str(error.value)
    assert str(spoilt) in message
    assert "1 missing: model.norm.weight" in message
    assert "1 unexpected: model.layers.9.mlp.up_proj.weight" in message
    assert f"1 misshaped: {EMBED} (63x32, the config makes it 64x32)" in message


def test_names_follow_the_layout_and_stop_at_ten(spoilt) -> None:
    def change(tensors):
        for name in [name for name in tensors if ".blocks.1." in name]:
            del tensors[name]
        to_new_layout(tensors)

    edit(spoilt, change)
    with pytest.raises(WeightsError, match=r"12 missing: model\.visual\.blocks\.1\.[^;]* and 2 more$"):
        import_weights(spoilt)


def test_a_tensor_in_both_layouts(spoilt) -> None:
    edit(spoilt, lambda t: t.update({"model.language_model.norm.weight": t["model.norm.weight"].copy()}))
    with pytest.raises(WeightsError, match=r"held twice.*model\.norm\.weight"):
        import_weights(spoilt)


def test_a_tensor_in_two_shards(spoilt) -> None:
    index = read_index(spoilt)
    file = next(f for f in sorted(set(index.values())) if f != index["model.norm.weight"])
    save_file(load_file(spoilt / file) | {"model.norm.weight": np.ones(32, np.float32)}, spoilt / file)
    with pytest.raises(WeightsError, match=r"two shards: model\.norm\.weight \(in .* and .*\)"):
        import_weights(spoilt)


def test_a_missing_shard(spoilt) -> None:
    file = read_index(spoilt)["model.norm.weight"]
    (spoilt / file).unlink()
    with pytest.raises(WeightsError, match=f"missing: {file}"):
        import_weights(spoilt)


def test_a_shard_cut_short(spoilt) -> None:
    file = spoilt / read_index(spoilt)["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(WeightsError, match=f"{file.name}: not a whole safetensors file"):
        import_weights(spoilt)


def test_wrong_indices(spoilt) -> None:
    good = read_index(spoilt)
    write_index(spoilt, good | {"model.extra": good["model.norm.weight"]})
    with pytest.raises(WeightsError, match=r"no shard holds: model\.extra"):
        import_weights(spoilt)
    write_index(spoilt, {name: file for name, file in good.items() if name != "model.norm.weight"})
    with pytest.raises(WeightsError, match=r"does not list: model\.norm\.weight"):
        import_weights(spoilt)
    other = next(file for file in good.values() if file != good["model.norm.weight"])
    write_index(spoilt, good | {"model.norm.weight": other})
    with pytest.raises(WeightsError, match=rf"wrong shard for: model\.norm\.weight \(listed in {other}, found in"):
        import_weights(spoilt)
    write_index(spoilt, good | {"model.norm.weight": "../elsewhere.safetensors"})
    with pytest.raises(WeightsError, match="in the directory itself"):
        import_weights(spoilt)
    (spoilt / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(WeightsError, match="listed twice: a"):
        import_weights(spoilt)
    (spoilt / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(WeightsError, match="must map tensor names"):
        import_weights(spoilt)
    (spoilt / INDEX).write_text("{")
    with pytest.raises(WeightsError, match="not JSON"):
        import_weights(spoilt)
    (spoilt / INDEX).unlink()
    with pytest.raises(WeightsError, match="shards without an index"):
        import_weights(spoilt)
    save_file({"a": np.zeros(1, np.float32)}, spoilt / SINGLE)
    write_index(spoilt, good)
    with pytest.raises(WeightsError, match="out of date"):
        import_weights(spoilt)


def test_directories_that_hold_no_model(spoilt, tmp_path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json: no such file"):
        import_weights(tmp_path / "nowhere")
    for file in spoilt.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        import_weights(spoilt)
    set_config(spoilt, hidden_size=None)
    with pytest.raises(WeightsError, match=r"config\.json: .*hidden_size"):
        import_weights(spoilt)
    (spoilt / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"config\.json: holds list"):
        import_weights(spoilt)


def test_a_dtype_that_is_not_read(spoilt) -> None:
    edit(spoilt, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(np.int8)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight \(I8\)"):
        import_weights(spoilt)


def test_total_size_of_the_index_is_reported_when_wrong(spoilt) -> None:
    index = json.loads((spoilt / INDEX).read_text())
    index["metadata"]["total_size"] = 1
    (spoilt / INDEX).write_text(json.dumps(index))
    assert any("total_size 1" in line for line in check_weights(spoilt).lines())


# ------------------------------------------------------------------------------------------------------- export


def test_export_appears_whole_or_not_at_all(cfg, params, tmp_path) -> None:
    class DiskFull(Exception):
        pass

    class Unwritable:
        shape, dtype = params.text.norm.shape, params.text.norm.dtype

        def __array__(self, *args, **kwargs):
            raise DiskFull

    broken = params.replace(text=params.text.replace(norm=Unwritable()))
    with pytest.raises(DiskFull):
        export_weights(broken, cfg, tmp_path / "w", shard_bytes=SMALL)
    assert list(tmp_path.iterdir()) == []

    export_weights(params, cfg, tmp_path / "w")
    with pytest.raises(WeightsError, match="not empty"):
        export_weights(params, cfg, tmp_path / "w")
    with pytest.raises(DiskFull):
        export_weights(broken, cfg, tmp_path / "w", overwrite=True)
    assert_equal_trees(import_weights(tmp_path / "w")[1], params)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    export_weights(doubled, cfg, tmp_path / "w", overwrite=True)
    assert_equal_trees(import_weights(tmp_path / "w")[1], doubled)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_export_refuses_what_it_cannot_write(cfg, params, tokenizer_dir, tmp_path) -> None:
    wrong = params.replace(text=params.text.replace(norm=jnp.ones(7)))
    with pytest.raises(WeightsError, match=r"misshaped: model\.norm\.weight \(leaf 7, the config makes it 32\)"):
        export_weights(wrong, cfg, tmp_path / "w")
    with pytest.raises(WeightsError, match="dtype float64"):
        export_weights(params, cfg, tmp_path / "w", dtype=np.float64)
    with pytest.raises(WeightsError, match=r"not the model's tokenizer: <\|image_pad\|> is \d+, the model has 60"):
        export_weights(params, cfg, tmp_path / "w", tokenizer_dir=tokenizer_dir)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="is a file"):
        export_weights(params, cfg, tmp_path / "file", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    export_weights(params, cfg, tmp_path / "kept")
    (tmp_path / "kept" / "checkpoints").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    for name, words in [("kept", "holds the folder 'checkpoints'"), ("notes", r"holds no config\.json")]:
        before = sorted((tmp_path / name).iterdir())
        with pytest.raises(WeightsError, match=words):
            export_weights(params, cfg, tmp_path / name, overwrite=True)
        assert sorted((tmp_path / name).iterdir()) == before


def test_commands_round_trip(exported, params, tmp_path) -> None:
    report = import_command(exported)
    assert "untied" not in "\n".join(report.lines()) and "head of its own" in "\n".join(report.lines())
    import_command(exported, tmp_path / "in", save=save_params)
    with pytest.raises(WeightsError, match="not empty"):
        import_command(exported, tmp_path / "in", save=save_params)

    def load(template):
        return load_params(tmp_path / "in" / "params", template)

    report = export_command(tmp_path / "in", tmp_path / "out", load, dtype="bfloat16", chat_template="{{ messages }}")
    assert report.dtypes == {"bfloat16": len(jax.tree.leaves(params))}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_equal_trees(import_weights(tmp_path / "out", dtype=jnp.bfloat16)[1], rounded)


@pytest.mark.parametrize(
    ("width", "ffn", "layers", "heads", "kv_heads", "vocab", "tie", "tensors", "total_size"),
    [
        (2048, 11008, 36, 16, 2, 151936, True, 824, 7_509_245_952),
        (3584, 18944, 28, 28, 4, 152064, False, 729, 16_584_333_312),
    ],
    ids=["3B", "7B"],
)
def test_the_table_adds_up_to_the_released_models(
    width, ffn, layers, heads, kv_heads, vocab, tie, tensors, total_size
) -> None:
    """Number of tensors and `total_size` (bfloat16) of the indices of Qwen2.5-VL-3B/7B-Instruct."""
    cfg = ModelSpec(
        family="qwen2_5_vl",
        text=TextConfig(vocab, width, ffn, layers, heads, kv_heads, 128, tie_embeddings=tie),
        vision=VisionConfig(32, 1280, 3420, 16, 3, 14, 2, 2, 112, (7, 15, 23, 31), width, 2),
        image_token=151655,
        video_token=151656,
        vision_start=151652,
        vision_end=151653,
    )
    stored = jax.tree.leaves(FAMILIES[cfg.family].stored(cfg))
    assert len({leaf.name for leaf in stored}) == len(stored) == tensors
    assert 2 * sum(math.prod(leaf.shape) for leaf in stored) == total_size


def test_every_family_maps_every_leaf(cfg) -> None:
    for family in FAMILIES.values():
        specs, stored = family.specs(cfg), family.stored(cfg)
        shapes = jax.tree.map(lambda leaf: leaf.leaf_shape, stored)
        jax.tree.map(lambda spec, shape: None, specs, stored)  # one structure
        assert [s.shape for s in jax.tree.leaves(specs)] == [s.leaf_shape for s in jax.tree.leaves(stored)], shapes


# ------------------------------------------------------------------------------------------- against transformers


@pytest.mark.torch
@pytest.mark.parametrize(("name", "layout"), [("untied", "old"), ("tied", "new")])
def test_transformers_loads_the_export_with_equal_logits(name, layout, tokenizer_dir, tmp_path) -> None:
    pytest.importorskip("torch")
    from golden.make_logits import reference_logits
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from pyvision_jax.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(tokenizer_dir)
    ids = (tokenizer.image_pad, tokenizer.video_pad, tokenizer.vision_start, tokenizer.vision_end)
    names = ("image_token", "video_token", "vision_start", "vision_end")
    spec = tiny_spec(tie=name == "tied", depth=2, window_size=56)
    cfg = dataclasses.replace(spec, **dict(zip(names, ids, strict=True)))
    cfg = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, vocab_size=tokenizer.vocab_size))
    params = random_params(cfg)
    where = export_weights(params, cfg, tmp_path / "w", tokenizer_dir=tokenizer_dir, layout=layout, shard_bytes=SMALL)

    hf, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        where, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    members = rows(cfg)[:3]
    batch = to_batch([[row] for row in members], cfg, max(len(row.ids) for row in members))
    ours = np.asarray(jax.jit(lambda p, b: model.logits(p.text, model.hidden_states(p, b, cfg)))(params, batch))
    for i, row in enumerate(members):
        theirs = reference_logits(hf.eval(), row, cfg)
        np.testing.assert_allclose(ours[i, : len(row.ids)], theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())

    assert hf.generation_config.eos_token_id == [tokenizer.im_end, tokenizer.endoftext]
    theirs = AutoTokenizer.from_pretrained(where)
    assert theirs("what is it?").input_ids == tokenizer.encode("what is it?")
    text = theirs.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
    assert text.count("<|image_pad|>") == 1
    processor = Qwen2VLImageProcessorPil.from_pretrained(where)
    assert processor.patch_size == cfg.vision.patch_size and processor.merge_size == cfg.vision.merge_size


@pytest.mark.torch
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_what_transformers_saves_is_read(name, tmp_path) -> None:
    pytest.importorskip("torch")
    from golden.make_logits import reference_model

    cfg = case_spec(name)
    params = random_params(cfg)
    reference_model(params, cfg).save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    read_cfg, read = import_weights(tmp_path / "hf")
    assert read_cfg == cfg
    assert_equal_trees(read, params)
    edit(tmp_path / "hf", to_new_layout)
    assert_equal_trees(import_weights(tmp_path / "hf")[1], params)
