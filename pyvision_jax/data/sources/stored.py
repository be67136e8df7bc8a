"""Records stored as ArrayRecord files by tensorflow-datasets: pictures inside, any record read without the others.

For large sets of traces, where a JSONL file with its folder of pictures is slow to open and easy to tear apart.
TensorFlow itself is not needed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from pyvision_jax.data.jsonl import parse_line, to_dict
from pyvision_jax.data.media import MediaError
from pyvision_jax.data.records import Media, Record

NAME, VERSION, SPLIT = "records", "1.0.0", "train"


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes what it is given, in order."""

    VERSION = tfds.core.Version(VERSION)
    name = NAME
    pkg_dir_path = None
    code_path = None  # nothing lies beside this module that the library should read (checksums, citations)

    def __init__(self, records: Iterable[Record], directory: Path):
        self._records = records
        super().__init__(data_dir=directory, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"record": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        return {SPLIT: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        for index, record in enumerate(self._records):
            yield index, {"record": json.dumps(to_dict(_with_media(record)))}


def store(records: Iterable[Record], directory: str | Path) -> int:
    """Writes records below `directory`; returns their number. Files that media name by path are read in.

    Raises `MediaError` for a file that cannot be read, `FileExistsError` where records are stored already.
    """
    directory = Path(directory)
    if (directory / NAME).exists():
        raise FileExistsError(f"{directory / NAME} exists already")
    tfds.disable_progress_bar()
    builder = _Builder(records, directory)
    builder.download_and_prepare()
    return builder.info.splits[SPLIT].num_examples


class StoredRecords:
    """A map-style source over what `store` wrote. Raises `FileNotFoundError` where nothing is stored."""

    def __init__(self, directory: str | Path):
        self._place = Path(directory) / NAME / VERSION
        if not (self._place / "dataset_info.json").is_file():
            raise FileNotFoundError(f"{directory} holds no stored records ({self._place} has no dataset_info.json)")
        builder = tfds.builder_from_directory(self._place)
        self._rows = builder.as_data_source(split=SPLIT)  # pyright: ignore[reportCallIssue] hidden by a decorator

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Record:
        return parse_line(self._rows[index]["record"], self._place, index + 1)


def is_stored(directory: str | Path) -> bool:
    return (Path(directory) / NAME).is_dir()


def _with_media(record: Record) -> Record:
    return dataclasses.replace(record, media=tuple(_read_in(media) for media in record.media))


def _read_in(media: Media) -> Media:
    if media.path is None:
        return media
    try:
        return dataclasses.replace(media, path=None, data=Path(media.path).read_bytes())
    except OSError as error:
        raise MediaError(media.path, error.strerror or str(error)) from error
