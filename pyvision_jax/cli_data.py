"""Bodies of `pyvision data`: is a file of records usable, and what of a record is learned."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from pyvision_jax.config import ImageConfig, ModelConfig, ProtocolConfig
from pyvision_jax.data.chat import mask_view
from pyvision_jax.data.jsonl import ReadReport, read_records
from pyvision_jax.data.media import MediaError, open_image
from pyvision_jax.data.records import Record
from pyvision_jax.data.sources.stored import store
from pyvision_jax.data.video import probe_video
from pyvision_jax.recipes.build import GENERATORS, build_protocol, read_model

SHOWN_ERRORS = 20


def check_file(path: Path, media_root: Path | None, pictures: bool, console: Console) -> bool:
    """Reads every line and, with `pictures`, opens all media; prints counts and what is bad. True if nothing is.

    Raises `OSError` for a file that cannot be read.
    """
    report = ReadReport()
    records = read_records(path, media_root, report)
    bad = [str(error) for error in report.bad]
    sizes: list[tuple[int, int]] = []
    if pictures:
        for record in track(records, "pictures", console=Console(stderr=True), transient=True):
            for index, media in enumerate(record.media):
                try:
                    if media.kind == "video":
                        probe_video(media)
                    else:
                        sizes.append(open_image(media, ImageConfig(), generators=GENERATORS).size)
                except MediaError as error:
                    bad.append(f"{path}, record {record.id}, media[{index}]: {error}")
    console.print(_counts(path, records, sizes), highlight=False, soft_wrap=True)
    for line in bad[:SHOWN_ERRORS]:
        console.print(f"bad: {line}", highlight=False, markup=False, soft_wrap=True)
    if len(bad) > SHOWN_ERRORS:
        console.print(f"... and {len(bad) - SHOWN_ERRORS} more", highlight=False)
    return not bad


def build_store(path: Path, out: Path, media_root: Path | None, console: Console) -> bool:
    """Stores the usable records of a JSONL file with their media; lists the rest. True if there was none.

    Raises `OSError` (also where `out` holds records already) and `MediaError`.
    """
    report = ReadReport()
    records = read_records(path, media_root, report)
    count = store(records, out)
    console.print(f"{out}: {count:,} records, media included", highlight=False, soft_wrap=True)
    for error in report.bad[:SHOWN_ERRORS]:
        console.print(f"left out: {error}", highlight=False, markup=False, soft_wrap=True)
    return not report.bad


def _counts(path: Path, records: list[Record], sizes: list[tuple[int, int]]) -> str:
    traces = sum(record.messages[-1].role == "assistant" for record in records)
    media = collections.Counter(media.kind for record in records for media in record.media)
    answers = collections.Counter(record.answer.kind for record in records if record.answer.value)
    lines = [
        f"{path}: {len(records):,} records: {len(records) - traces:,} tasks, {traces:,} traces",
        f"media: {media['image']:,} pictures, {media['video']:,} videos",
        "answers: " + (", ".join(f"{count:,} {kind}" for kind, count in sorted(answers.items())) or "none"),
    ]
    if sizes:
        area = np.array([width * height for width, height in sizes]) / 1e6
        lines.append(f"picture sizes: {area.min():.2f} to {area.max():.2f} megapixels, median {np.median(area):.2f}")
    return "\n".join(lines)


def show_record(
    path: Path, which: str, model: Path, media_root: Path | None, config: ProtocolConfig, console: Console
) -> None:
    """Prints a record as the policy sees it: learned ids green, pictures counted. `which` is an index from 0, or an id.

    Raises `OSError`, `RecordError`, `ConfigError`, `MediaError`, and `ValueError` where there is no such record.
    """
    report = ReadReport()  # a bad line elsewhere is no reason not to show this one
    records = read_records(path, media_root, report)
    if which.isdigit() and int(which) < len(records):
        record = records[int(which)]
    else:
        named = [record for record in records if record.id == which]
        if not named:
            bad = f" ({len(report.bad)} bad lines left out; the first: {report.bad[0]})" if report.bad else ""
            raise ValueError(f"{path}: {len(records)} records, none is {which!r}{bad}")
        record = named[0]
    image = ImageConfig()
    spec, tokenizer, processor = read_model(ModelConfig(path=str(model)), image)
    protocol = build_protocol(config, image, spec, tokenizer, processor)
    if record.messages[-1].role == "assistant":
        example = protocol.example(record)
        ids, weights, images = example.ids, example.loss_weights, example.images
    else:
        prompt = protocol.build(record)
        ids, weights, images = np.asarray(prompt.ids), np.zeros(len(prompt.ids)), prompt.images
    console.print(mask_view(ids.tolist(), weights, tokenizer), soft_wrap=True)
    grids = ", ".join(
        f"{grid[2] * processor.patch_size}x{grid[1] * processor.patch_size}" for grid in (i.grid for i in images)
    )
    console.print(
        f"[record {record.id}: {len(ids):,} ids, {int(np.count_nonzero(weights)):,} learned, {len(images)} pictures"
        f"{f' resized to {grids}' if grids else ''}]",
        highlight=False,
        markup=False,
    )
