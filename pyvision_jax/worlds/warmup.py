"""Teaching a tiny policy to see before it speaks: dense labels on picture tokens of the needle world.

A policy of a million parameters stays at chance on traces alone. Told for every picture token whether the plate lies
in it, where in the picture and what it shows, the tower learns to read and the first decoder layers learn to turn mRoPE
into a place; asked the same of random text behind the picture, the later layers learn to look it up. The linear heads
are thrown away; what they taught is what `pyvision_jax/worlds/assets` holds, made by

    python -m pyvision_jax.worlds.warmup
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from PIL import Image

from pyvision_jax.data.batch import VisionBatch
from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.data.packing import vision_batch
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models import qwen2_5_vl
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.positions import mrope_positions
from pyvision_jax.models.spec import Spec, init_params
from pyvision_jax.models.vision_layout import window_shape
from pyvision_jax.worlds import needle, tiny

ASSET = tiny.ASSETS / "needle_warmup.safetensors"
STEPS, SEED = 1_800, 0  # of the asset
DEPTHS = (1, 2)  # decoder blocks after which picture tokens are asked; the later ones look up what those have found
FILLER = 12  # random text tokens behind the picture that are asked, too
CELLS = 12  # of the canvas along one side
# Head outputs: class (none, plate too small to read, digit 0..9), column, row, colour; 0 always means "nothing here".
HEADS = {"digit": 12, "column": CELLS + 1, "row": CELLS + 1, "colour": len(needle.COLOURS) + 1}
WEIGHTS = {"digit": 1.0, "column": 0.5, "row": 0.5, "colour": 0.5}


def labelled(rng: np.random.Generator, count: int, processor: ImageProcessor) -> tuple[list[Image.Image], np.ndarray]:
    """Three pictures of each of `count` canvases (whole, tight, tight or coarse); labels [3 * count, tokens, 4]."""
    pictures, labels = [], []
    for number in rng.integers(1 << 40, size=count):
        what = needle.needle("warmup", int(number))
        canvas = what.canvas()
        last = (needle.TIGHT, 24) if rng.random() < 0.8 else (needle.COARSE, 80)
        boxes = [(0, 0, needle.CANVAS, needle.CANVAS)]
        for side, reach in ((needle.TIGHT, 24), last):
            offset = (int(rng.integers(-reach, reach + 1)), int(rng.integers(-reach, reach + 1)))
            boxes.append(what.box(side, offset))
        for box in boxes:
            side = box[2] - box[0]
            across = round(processor.num_tokens(side, side) ** 0.5)
            label = np.zeros((across, across, len(HEADS)), np.int32)
            u, v = ((c - corner) / side for c, corner in zip(what.centre, box[:2], strict=True))
            if 0 <= u < 1 and 0 <= v < 1:
                kind = 1 if side == needle.CANVAS else 2 + what.digit
                cell = [1 + int(np.clip(round(x * (CELLS + 2) - 1.5), 0, CELLS - 1)) for x in (u, v)]
                label[int(v * across), int(u * across)] = (kind, *cell, 1 + list(needle.COLOURS).index(what.colour))
            pictures.append(canvas if side == needle.CANVAS else canvas.crop(box))
            labels.append(label.reshape(-1, len(HEADS)))
    return pictures, np.stack(labels)


def fresh(spec: ModelSpec, key: jax.Array) -> qwen2_5_vl.Params:
    """Random weights scaled by fan-in: HF's fixed 0.02 is made for widths of thousands and learns slowly here."""

    def scaled(path: Any, leaf: Spec) -> Spec:
        if leaf.init != "normal":
            return leaf
        name = path[-1].name
        if name == "embed":
            return dataclasses.replace(leaf, std=0.5)
        fan_in = leaf.shape[0] * (leaf.shape[1] if leaf.axes[0] == "heads" else 1)
        depth = spec.vision.depth if path[0].name == "vision" else spec.text.num_layers
        gain = {"head": 0.5, "o": (2 * depth) ** -0.5, "proj": (2 * depth) ** -0.5, "down": (2 * depth) ** -0.5}
        return dataclasses.replace(leaf, std=gain.get(name, 1.0) * fan_in**-0.5)

    specs = jax.tree_util.tree_map_with_path(scaled, qwen2_5_vl.specs(spec))
    return jax.jit(functools.partial(init_params, specs))(key)  # one program, not one for every shape


def _loss(
    trained: tuple[qwen2_5_vl.Params, list[jax.Array]],
    rows: dict[str, jax.Array],
    vision: VisionBatch,
    labels: jax.Array,
    *,
    spec: ModelSpec,
    first: int,
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of all heads, and the shares of text tokens that know digit, column and row.

    Picture tokens, which stand at `first` and on, are asked after the blocks of DEPTHS for what lies in them (plate and
    background balanced); text tokens behind the picture are asked after the last block for what the picture shows.
    """
    params, heads = trained
    features = qwen2_5_vl.encode_images(params.vision, vision, spec)
    x = qwen2_5_vl.embed(params.text, rows["ids"], rows["image_index"], features)
    end = first + labels.shape[1]
    loss = jnp.float32(0)
    for depth, head in zip(DEPTHS, heads, strict=False):
        below = dataclasses.replace(params.text, blocks=params.text.blocks[:depth])
        hidden = qwen2_5_vl.forward(below, x, rows["positions"], rows["segments"], spec)
        nll, _ = _scores(hidden[:, first:end] @ head, labels)
        on = labels[..., 0] > 0
        loss += (nll * on).sum() / on.sum() + (nll * ~on).sum() / (~on).sum()
    hidden = qwen2_5_vl.forward(params.text, x, rows["positions"], rows["segments"], spec)[:, end:]
    shown = jnp.broadcast_to(labels.max(axis=1, keepdims=True), (*hidden.shape[:2], len(HEADS)))
    nll, right = _scores(hidden @ heads[-1], shown)
    readable, whole = shown[..., 0] > 1, shown[..., 0] == 1
    asked = jnp.stack([readable, whole, whole], axis=-1)
    return loss + 2 * nll.mean(), (right[..., :3] * asked).sum((0, 1)) / asked.sum((0, 1))


def _scores(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weighted negative log-likelihood [n, t] of labels [n, t, heads]; bool [n, t, heads]: whether each was right."""
    nll, right, at = jnp.zeros(outputs.shape[:2]), [], 0
    for index, (name, size) in enumerate(HEADS.items()):
        part, want = outputs[..., at : at + size], labels[..., index]
        nll -= WEIGHTS[name] * jnp.take_along_axis(jax.nn.log_softmax(part, -1), want[..., None], -1)[..., 0]
        right.append(part.argmax(-1) == want)
        at += size
    return nll, jnp.stack(right, axis=-1)


def run(
    spec: ModelSpec,
    params: qwen2_5_vl.Params,
    tokenizer: Tokenizer,
    processor: ImageProcessor,
    *,
    steps: int,
    canvases: int = 40,
    lr: float = 2e-3,
    seed: int = 0,
    readers: int = 1,
    report: Callable[[int, dict[str, float]], None] | None = None,
) -> qwen2_5_vl.Params:
    """Trains the tower and the decoder, all but the language head; returns the whole tree of parameters."""
    head = jnp.zeros((spec.text.hidden_size, sum(HEADS.values())))
    trained: Any = (params, [head for _ in range(len(DEPTHS) + 1)])
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, min(40, steps // 2), steps, lr * 0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    state = optimizer.init(trained)

    opening = [tokenizer.im_start, *tokenizer.encode("user\n<image_clue_0>"), tokenizer.vision_start]
    tokens = processor.num_tokens(needle.CANVAS, needle.CANVAS)
    seen = np.array([*opening, *[tokenizer.image_pad] * tokens, tokenizer.vision_end], np.int32)
    n, first = 3 * canvases, len(opening)
    special = min(tokenizer.special_ids)  # the ordinary ids come before

    def make(step: int) -> tuple[dict[str, np.ndarray], VisionBatch, np.ndarray]:
        rng = np.random.default_rng((seed, step))
        pictures, labels = labelled(rng, canvases, processor)
        filler = rng.integers(0, special, (n, FILLER), np.int32)  # any text may follow: what it is must not matter
        ids = np.concatenate([np.tile(seen, (n, 1)), filler], axis=1)
        images = [processor.process(picture) for picture in pictures]
        vision, index = vision_batch(images, processor, spec.vision, pictures=n, **_window(images, spec))
        positions, _ = mrope_positions(ids[0], [images[0].grid], [], spec)
        image_index = np.full(ids.shape, -1, np.int32)
        image_index[:, first : first + tokens] = np.stack(index)
        rows = {
            "ids": ids,
            "image_index": image_index,
            "positions": np.tile(positions[:, None], (1, n, 1)),
            "segments": np.ones(ids.shape, np.int32),
        }
        return rows, vision, labels

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(trained: Any, state: Any, rows: Any, vision: VisionBatch, labels: jax.Array) -> Any:
        score = functools.partial(_loss, spec=spec, first=first)
        (loss, right), gradient = jax.value_and_grad(score, has_aux=True)(trained, rows, vision, labels)
        change, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, change), state, loss, right

    trained = jax.tree.map(jnp.array, trained)  # donated below; the caller keeps its own
    with ThreadPoolExecutor(readers) as pool:
        ahead = collections.deque(pool.submit(make, step) for step in range(min(2 * readers, steps)))
        for step in range(steps):
            rows, vision, labels = ahead.popleft().result()
            if step + len(ahead) + 1 < steps:
                ahead.append(pool.submit(make, step + len(ahead) + 1))
            trained, state, loss, right = update(trained, state, rows, vision, labels)
            if report is not None and ((step + 1) % 25 == 0 or step + 1 == steps):
                names = ("digit", "column", "row")
                report(step + 1, {"loss": float(loss), **dict(zip(names, np.asarray(right).tolist(), strict=True))})
    return trained[0]


def save(params: qwen2_5_vl.Params, path: Path = ASSET, **facts: str) -> None:
    """What the warm-up trains, in float16 (at most 3 MiB); `facts` go into the file's metadata."""
    tensors = {name: np.asarray(leaf, np.float16) for name, leaf in _named(params).items() if _kept(name)}
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, path, metadata=facts)


def load(params: qwen2_5_vl.Params, path: Path = ASSET) -> qwen2_5_vl.Params:
    """`params` with the stored leaves in place. Raises ValueError naming what is missing, unknown or misshaped."""
    stored = safetensors.numpy.load_file(path)
    leaves = _named(params)
    wanted = {name for name in leaves if _kept(name)}
    if stored.keys() != wanted:
        raise ValueError(f"{path}: missing {sorted(wanted - stored.keys())}, unknown {sorted(stored.keys() - wanted)}")
    for name in wanted:
        if stored[name].shape != leaves[name].shape:
            raise ValueError(f"{path}: {name} is {stored[name].shape}, the model has {leaves[name].shape}")
    return jax.tree_util.tree_map_with_path(
        lambda place, leaf: jnp.asarray(stored[_name(place)], leaf.dtype) if _name(place) in wanted else leaf, params
    )


def _window(images: list[ProcessedImage], spec: ModelSpec) -> dict[str, int]:
    windows, slots = window_shape([image.grid for image in images], spec.vision)
    return {"windows": windows, "slots": slots}


def _kept(name: str) -> bool:
    """All but the language head."""
    return name != "text.head"


def _name(place: Any) -> str:
    return jax.tree_util.keystr(place, simple=True, separator=".")


def _named(params: qwen2_5_vl.Params) -> dict[str, jax.Array]:
    return {_name(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(params)}


def main() -> None:
    """Makes the tokenizer and the weights of ASSETS anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--readers", type=int, default=1, help="threads that draw pictures")
    parser.add_argument("--out", type=Path, default=tiny.ASSETS)
    args = parser.parse_args()
    tokens = tiny.make_tokenizer()
    tokens.save(args.out)
    spec = tiny.model_spec(tokens)
    start = time.perf_counter()

    def report(step: int, numbers: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
        print(f"step {step}/{args.steps}  {time.perf_counter() - start:.0f} s  {shown}", flush=True)

    params = fresh(spec, jax.random.key(args.seed))
    params = run(
        spec, params, tokens, tiny.processor(), steps=args.steps, seed=args.seed, readers=args.readers, report=report
    )
    facts = {"steps": str(args.steps), "seed": str(args.seed), "device": jax.devices()[0].device_kind}
    save(params, args.out / ASSET.name, **facts)


if __name__ == "__main__":
    main()
