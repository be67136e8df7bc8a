"""A needle on a photograph: a small plate with a digit, unreadable in the policy's view, readable after a crop by code.

The photographs are scikit-image's. Everything about a task follows from its split and number, so a record holds neither
the place nor a picture that could leak it: `Media.make` draws the picture from the number alone.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import skimage.data
from PIL import Image, ImageDraw, ImageFont

from pyvision_jax.data.records import Answer, Media, Message, Part, Record

SEEN = ("astronaut", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry", "retina", "brick", "gravel",
        "grass", "coins", "moon")  # fmt: skip
UNSEEN = ("chelsea", "stereo_motorcycle", "camera", "clock")  # never trained on
COLOURS = {"red": (225, 30, 30), "green": (20, 170, 40), "blue": (30, 60, 230), "magenta": (230, 30, 220)}
DIGITS = (0, 1, 2, 4, 6, 7)
CHANCE = 1 / len(DIGITS)

CANVAS = 448  # pixels, square
PLATE, FRAME = 52, 7  # pixels of the coloured plate and of its frame
GLYPH = 38  # font size; the digit is about 28 pixels high
STEP = 32  # the teacher's coordinates are multiples of it
TIGHT, COARSE = 96, 224  # sides of the teacher's crops

# Shares of what a teacher of mixed quality does; the second row in every fourth trace. It leaves RL room to improve.
SCRIPTS = ("tight", "coarse_tight", "coarse", "sloppy", "direct")
MIXTURES = ((0.58, 0.0, 0.12, 0.08, 0.22), (0.24, 0.64, 0.02, 0.04, 0.06))

NUMBER_WEIGHT = 3.0  # of coordinates and answers in the loss of a trace

SPLITS = {"warmup": 1, "sft": 2, "direct": 3, "rl": 4, "eval": 5, "eval_unseen": 6}


@dataclasses.dataclass(frozen=True)
class Needle:
    """What a task's number stands for. Sizes and places in pixels of the canvas."""

    photo: str
    corner: tuple[float, float]  # of the canvas in the photograph, as shares of the room there is
    mirrored: bool
    colour: str
    digit: int
    centre: tuple[int, int]
    shift: tuple[int, int]  # of the digit on its plate

    def canvas(self) -> Image.Image:
        """The task's picture, RGB of CANVAS x CANVAS."""
        photo = _photo(self.photo, self.mirrored)
        x, y = (round(share * (side - CANVAS)) for share, side in zip(self.corner, photo.size, strict=True))
        image = photo.crop((x, y, x + CANVAS, y + CANVAS))
        draw = ImageDraw.Draw(image)
        for half, fill in ((PLATE // 2, COLOURS[self.colour]), (PLATE // 2 - FRAME, (245, 245, 245))):
            (x, y) = self.centre
            draw.rectangle((x - half, y - half, x + half, y + half), fill=fill)
        glyph = _glyph(self.digit)
        at = [c - side // 2 + s for c, side, s in zip(self.centre, glyph.size, self.shift, strict=True)]
        image.paste((15, 15, 15), (at[0], at[1]), glyph)
        return image

    def box(self, side: int, offset: tuple[int, int] = (0, 0)) -> tuple[int, int, int, int]:
        """A square around the plate (moved by `offset`), on the grid of STEP, inside the canvas."""
        corner = [
            int(np.clip(round((c + o - side / 2) / STEP) * STEP, 0, CANVAS - side))
            for c, o in zip(self.centre, offset, strict=True)
        ]
        return (corner[0], corner[1], corner[0] + side, corner[1] + side)


@functools.lru_cache(maxsize=512)
def needle(split: str, number: int) -> Needle:
    """The task of that number; every split draws from a stream of its own."""
    rng = np.random.default_rng((SPLITS[split], number))
    photos = UNSEEN if split == "eval_unseen" else SEEN
    edge = PLATE // 2 + 2
    return Needle(
        photo=photos[rng.integers(len(photos))],
        corner=(float(rng.random()), float(rng.random())),
        mirrored=bool(rng.random() < 0.5),
        colour=list(COLOURS)[rng.integers(len(COLOURS))],
        digit=int(DIGITS[rng.integers(len(DIGITS))]),
        centre=(int(rng.integers(edge, CANVAS - edge)), int(rng.integers(edge, CANVAS - edge))),
        shift=(int(rng.integers(-2, 3)), int(rng.integers(-2, 3))),
    )


def draw(split: str, number: int) -> Image.Image:
    """The generator behind `Media.make` (see GENERATORS)."""
    return _canvas(split, number)


def draw_crop(split: str, number: int, box: Sequence[int]) -> Image.Image:
    """What the teacher's code shows: the crop that the sandbox would give for the same text."""
    return _canvas(split, number).crop((box[0], box[1], box[2], box[3]))


GENERATORS = {"needle": draw, "needle_crop": draw_crop}


def task(split: str, number: int) -> Record:
    """The question, the picture and the reference answer."""
    what = needle(split, number)
    return Record(
        id=f"needle-{split}-{number}",
        messages=(Message("user", (Part("image", index=0), Part("text", question(what.colour)))),),
        media=(Media("image", make=("needle", {"split": split, "number": number})),),
        answer=Answer(str(what.digit)),
        protocol="pyvision_image",
        source="needle",
        meta={"photo": what.photo, "seen": what.photo in SEEN},
    )


def question(colour: str) -> str:
    return f"Which digit is in the {colour} box?"


def call(box: tuple[int, int, int, int]) -> str:
    return f"<code>\n```python\nimage_clue_0.crop(({box[0]}, {box[1]}, {box[2]}, {box[3]}))\n```\n</code>"


def answer(digit: int) -> str:
    return f"<answer>\n\\boxed{{{digit}}}\n</answer>"


def trace(split: str, number: int, script: str | None = None) -> Record:
    """A task with a teacher's turns. `script` is one of SCRIPTS; None draws one from MIXTURES by the number."""
    record, what = task(split, number), needle(split, number)
    rng = np.random.default_rng((SPLITS[split], number, 1))
    if script is None:
        script = SCRIPTS[rng.choice(len(SCRIPTS), p=MIXTURES[number % 4 == 3])]
    offsets = {"coarse": 50, "sloppy": 70}

    def box(kind: str) -> tuple[int, int, int, int]:
        reach = offsets.get(kind, 0)
        offset = (int(rng.integers(-reach, reach + 1)), int(rng.integers(-reach, reach + 1)))
        return what.box(COARSE if kind == "coarse" else TIGHT, offset)

    boxes = [box(kind) for kind in script.split("_") if kind != "direct"]
    messages, media = list(record.messages), list(record.media)
    for crop in boxes:
        place = {"split": split, "number": number, "box": list(crop)}
        media.append(Media("image", make=("needle_crop", place)))
        messages.append(Message("assistant", _weighted(call(crop))))
        messages.append(Message("tool", (Part("image", index=len(media) - 1),)))
    messages.append(Message("assistant", _weighted(answer(what.digit))))
    return dataclasses.replace(record, messages=tuple(messages), media=tuple(media))


def _weighted(text: str) -> tuple[Part, ...]:
    """The text with its numbers heavier: the rest is fixed phrases, soon learned, and looking up a place is not."""
    pieces = re.split(r"(?<=[( {])(\d+)(?=[,)}])", text)
    return tuple(Part("text", piece, weight=NUMBER_WEIGHT if piece.isdigit() else 1.0) for piece in pieces if piece)


@dataclasses.dataclass(frozen=True)
class NeedleTasks:
    """`count` tasks of a split, as a map-style source."""

    split: str
    count: int
    start: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Record:
        return task(self.split, self.start + index)


@dataclasses.dataclass(frozen=True)
class NeedleTraces:
    """`count` traces of a split; `script` as in `trace`."""

    split: str
    count: int
    start: int = 0
    script: str | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Record:
        return trace(self.split, self.start + index, self.script)


def evaluation_tasks(count: int) -> list[Record]:
    """Held-out tasks, half on photographs of training and half on photographs never trained on."""
    return [task("eval", k) for k in range(count - count // 2)] + [task("eval_unseen", k) for k in range(count // 2)]


def corpus() -> list[str]:
    """Everything that traces say and what stands around it in a rollout, for the tiny tokenizer."""
    lines = [question(colour) for colour in COLOURS] + [answer(digit) for digit in DIGITS]
    for side in (TIGHT, COARSE):
        corners = range(0, CANVAS - side + 1, STEP)
        lines += [call((x, y, x + side, y + side)) for x in corners for y in corners]
    around = ["system\nYou are a helpful assistant.", "user\n<image_clue_0>", "</image_clue_0>\n", "assistant\n"]
    for k in (1, 2):
        around.append(f"user\n<tool_response>\n<interpreter>Text Result:\n\nImage Result:\n<image_clue_{k}>")
        around.append(f"</image_clue_{k}></interpreter>\n\n</tool_response>")
    return lines + 4 * around


@functools.lru_cache(maxsize=512)
def _canvas(split: str, number: int) -> Image.Image:
    """Kept for a while, since a trace's crops come from the same canvas."""
    return needle(split, number).canvas()


@functools.cache
def _photo(name: str, mirrored: bool = False) -> Image.Image:
    """RGB, the shorter side 560 pixels."""
    loaded: Any = getattr(skimage.data, name)()
    pixels = np.asarray(loaded[0] if isinstance(loaded, tuple) else loaded)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    image = Image.fromarray(pixels[..., :3])
    scale = 560 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image


@functools.cache
def _glyph(digit: int) -> Image.Image:
    """The digit as a mask, cut to its bounds."""
    size = 2 * GLYPH
    mask = Image.new("L", (size, size), 0)
    ImageDraw.Draw(mask).text((GLYPH // 2, GLYPH // 2), str(digit), 255, font=ImageFont.load_default(size=GLYPH))
    return mask.crop(mask.getbbox())
