"""The needle world: nothing leaks, splits are apart, the teacher's crops are the sandbox's."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from pyvision_jax.data.jsonl import to_dict
from pyvision_jax.worlds import needle, tiny, warmup
from pyvision_sandbox import Policy, SandboxPool


@pytest.mark.parametrize("split", ["rl", "eval", "eval_unseen"])
def test_no_text_id_or_name_carries_the_place_or_the_answer(split):
    told: dict[str, set[str]] = {}
    for number in range(200):
        record, what = needle.task(split, number), needle.needle(split, number)
        seen_by_policy = " ".join([record.id, *(part.text for message in record.messages for part in message.parts)])
        media = json.dumps([media.make for media in record.media])
        for text in (seen_by_policy.replace(str(number), ""), media.replace(str(number), "")):
            assert not re.search(r"\d", text), text
        told.setdefault(re.sub(r"\d+", "", seen_by_policy), set()).add(str(what.digit))
        assert record.answer.value == str(what.digit)
        assert "centre" not in json.dumps(to_dict(record)) and str(what.centre) not in json.dumps(to_dict(record))
    assert all(len(digits) == len(needle.DIGITS) for digits in told.values()), "the question says nothing"


def test_numbers_say_nothing_of_the_answer():
    digits = [needle.needle("eval", number).digit for number in range(600)]
    for modulus in (2, 3, 6):
        table = np.zeros((modulus, 10))
        for number, digit in enumerate(digits):
            table[number % modulus, digit] += 1
        used = table[:, list(needle.DIGITS)] / table.sum(1, keepdims=True)
        assert np.abs(used - needle.CHANCE).max() < 0.12


def test_photographs_of_evaluation_are_never_trained_on():
    assert len(needle.UNSEEN) >= 3 and not set(needle.SEEN) & set(needle.UNSEEN)
    for split in ("warmup", "sft", "direct", "rl", "eval"):
        assert {needle.needle(split, number).photo for number in range(200)} <= set(needle.SEEN)
    tasks = needle.evaluation_tasks(40)
    assert sum(not task.meta["seen"] for task in tasks) == 20
    assert len({task.id for task in tasks}) == 40


def test_splits_are_different_tasks():
    drawn = {split: [needle.needle(split, number) for number in range(50)] for split in ("sft", "direct", "rl", "eval")}
    flat = [what for whats in drawn.values() for what in whats]
    assert len(set(flat)) == len(flat)


def test_a_task_is_always_the_same_picture():
    first = np.asarray(needle.draw("eval", 7))
    needle._canvas.cache_clear()
    assert np.array_equal(first, np.asarray(needle.draw("eval", 7)))
    x, y = needle.needle("eval", 7).centre
    plate = first[y - 18 : y + 18, x - 18 : x + 18]
    assert plate.max() > 230 and plate.min() < 40, "a dark digit on a white plate"


@pytest.mark.parametrize("script", needle.SCRIPTS)
def test_the_teachers_crops_are_what_the_sandbox_shows(script):
    record = needle.trace("sft", 11, script)
    tools = [message for message in record.messages if message.role == "tool"]
    assert len(tools) == {"direct": 0, "coarse_tight": 2}.get(script, 1)
    if not tools:
        return
    said = ["".join(part.text for part in m.parts) for m in record.messages if m.role == "assistant"]
    with (
        SandboxPool(Policy(profile="numpy_pil")) as pool,
        pool.session(images={"image_clue_0": needle.draw("sft", 11)}) as s,
    ):
        for text, tool in zip(said, tools, strict=False):
            code = re.search(r"```python\n(.*)\n```", text, re.S)
            result = s.run(code.group(1))
            name, arguments = record.media[tool.parts[0].index].make
            assert np.array_equal(result.images[0], np.asarray(needle.GENERATORS[name](**arguments)))


@pytest.fixture(scope="module")
def params():
    """By numpy, which compiles nothing."""
    spec = tiny.model_spec(tiny.tokenizer())
    shapes = jax.eval_shape(lambda key: warmup.fresh(spec, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: np.asarray(rng.normal(0, 0.05, leaf.shape), np.float32), shapes)


def test_labels_lie_where_the_plate_is():
    pictures, labels = warmup.labelled(np.random.default_rng(0), 30, tiny.processor())
    assert len(pictures) == 90 and labels.shape == (90, 9, 4)
    assert ((labels[..., 0] > 0).sum(axis=1) <= 1).all()
    whole = labels[::3]
    assert (whole[..., 0].max(axis=1) == 1).all(), "too small to read in the whole picture"
    assert (labels[1::3][..., 0].max(axis=1) > 1).mean() > 0.9, "read in a tight crop"


def test_warm_up_runs_and_its_file_comes_back_whole(params, tmp_path):
    tokens = tiny.tokenizer()
    assert tokens.token_bytes == tiny.make_tokenizer().token_bytes, "the kept tokenizer is what the command makes"
    spec, losses = tiny.model_spec(tokens), []
    trained = warmup.run(
        spec,
        params,
        tokens,
        tiny.processor(),
        steps=3,
        canvases=2,
        report=lambda _, shown: losses.append(shown["loss"]),
    )
    assert np.isfinite(losses).all()
    assert not np.array_equal(trained.text.blocks[3].gate, params.text.blocks[3].gate)
    warmup.save(trained, tmp_path / "w.safetensors", steps="3")
    back = warmup.load(params, tmp_path / "w.safetensors")
    assert np.allclose(back.vision.patch_embed, trained.vision.patch_embed, atol=2e-3)
    assert np.array_equal(back.text.head, params.text.head), "the language head stays the seed's"


def test_the_packages_file_fits_the_model(params):
    assert warmup.ASSET.stat().st_size <= 3 * 2**20
    warmup.load(params)


def test_a_wrong_warm_up_file_names_the_tensor(params, tmp_path):
    stored = safetensors.numpy.load_file(warmup.ASSET)
    missing = dict(stored)
    missing.pop("vision.patch_embed")
    safetensors.numpy.save_file(missing, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"missing \['vision.patch_embed'\]"):
        warmup.load(params, tmp_path / "a.safetensors")
    stored["text.embed"] = stored["text.embed"][:-1]
    safetensors.numpy.save_file(stored, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"text.embed is \(449, 128\), the model has \(450, 128\)"):
        warmup.load(params, tmp_path / "b.safetensors")
