"""A directory of safetensors shards as one table of tensors: checked when opened, read by slices, written in shards.

Knows nothing of any model: names and shapes are those of the files. File names and the index are the ones
huggingface/transformers reads and writes (`model.safetensors`, or `model-00001-of-00003.safetensors` with
`model.safetensors.index.json`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class WeightsError(ValueError):
    """A weights directory that cannot be read or written as asked; the message names the files or tensors at fault."""


def first_names(names: Iterable[str], limit: int = 10) -> str:
    """The first `limit` of `names` in sorted order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a shard's header says of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: np.dtype


class TensorDirectory(contextlib.AbstractContextManager):
    """The tensors of a directory, with their files held open (memory-mapped) until the context ends.

    `infos` maps each name to its file, shape and dtype; `read` gives one slice of one tensor and touches no other.

    Raises:
        WeightsError: no weights, a shard that is missing or cut short, a tensor in two shards, an index that disagrees
            with the shards, both a single file and an index, or a dtype other than float32, float16 and bfloat16.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.infos: dict[str, TensorInfo] = {}
        self.total_size_in_index: int | None = None
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(info.shape) * info.dtype.itemsize for info in self.infos.values())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """`tensor[index]` as a fresh array of the stored dtype; only that part is read from the file."""
        handle = self._files[self.infos[name].file]
        return handle.get_slice(name)[index] if index else handle.get_tensor(name)

    def _open(self) -> None:
        if not self.directory.is_dir():
            raise WeightsError(f"{self.directory}: no such directory")
        weight_map = self._read_index()
        files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        missing = [file for file in files if not (self.directory / file).is_file()]
        if missing:
            where = f"named in {INDEX}" if weight_map is not None else "wanted"
            raise WeightsError(
                f"{self.directory}: {len(missing)} shard file(s) {where} are missing: {first_names(missing)}"
            )
        for file in files:
            self._read_header(file)
        if weight_map is None:
            return
        absent = weight_map.keys() - self.infos.keys()
        if absent:
            raise WeightsError(f"{self.directory / INDEX}: names tensors that no shard holds: {first_names(absent)}")
        unlisted = self.infos.keys() - weight_map.keys()
        if unlisted:
            raise WeightsError(
                f"{self.directory / INDEX}: shards hold tensors that it does not list: {first_names(unlisted)}"
            )
        moved = [
            f"{name} (listed in {file}, found in {self.infos[name].file})"
            for name, file in weight_map.items()
            if self.infos[name].file != file
        ]
        if moved:
            raise WeightsError(f"{self.directory / INDEX}: wrong shard for: {first_names(moved)}")

    def _read_index(self) -> dict[str, str] | None:
        path = self.directory / INDEX
        if not path.is_file():
            shards = [p.name for p in self.directory.glob("*.safetensors")]
            if not (self.directory / SINGLE).is_file():
                found = f"shards without an index: {first_names(shards)}" if shards else "no .safetensors file"
                raise WeightsError(f"{self.directory}: neither {SINGLE} nor {INDEX} ({found})")
            return None
        if (self.directory / SINGLE).is_file():
            raise WeightsError(f"{self.directory}: both {SINGLE} and {INDEX}; remove the one that is out of date")

        def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            # json keeps the last of two equal keys and says nothing.
            keys = [key for key, _ in pairs]
            repeated = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else set()
            if repeated:
                raise WeightsError(f"{path}: listed twice: {first_names(repeated)}")
            return dict(pairs)

        try:
            index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_repeats)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise WeightsError(f"{path}: not JSON: {error}") from error
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise WeightsError(f"{path}: `weight_map` must map tensor names to file names")
        outside = {file for file in weight_map.values() if Path(file).name != file}
        if outside:
            raise WeightsError(f"{path}: shard files must lie in the directory itself: {first_names(outside)}")
        metadata = index.get("metadata")
        if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int | float):
            self.total_size_in_index = int(metadata["total_size"])
        return weight_map

    def _read_header(self, file: str) -> None:
        path = self.directory / file
        try:
            handle = self._stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: not a whole safetensors file: {error}") from error
        self._files[file] = handle
        names = list(handle.keys())
        twice = [f"{name} (in {self.infos[name].file} and {file})" for name in names if name in self.infos]
        if twice:
            raise WeightsError(f"{self.directory}: tensors held by two shards: {first_names(twice)}")
        other = []
        for name in names:
            view = handle.get_slice(name)
            dtype = DTYPES.get(view.get_dtype())
            if dtype is None:
                other.append(f"{name} ({view.get_dtype()})")
            else:
                self.infos[name] = TensorInfo(file, tuple(view.get_shape()), dtype)
        if other:
            raise WeightsError(f"{path}: dtypes other than {', '.join(DTYPES)} are not read: {first_names(other)}")


@dataclasses.dataclass(frozen=True)
class PendingTensor:
    """A tensor still to be written: `make()` gives its array, of this shape and dtype, when its shard is written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(tensors: Sequence[PendingTensor], shard_bytes: int) -> list[list[PendingTensor]]:
    """Tensors in order, cut into shards of at most `shard_bytes` (a larger tensor gets a shard of its own)."""
    shards: list[list[PendingTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def write_shards(directory: Path, tensors: Sequence[PendingTensor], shard_bytes: int, write: bool = True) -> list[str]:
    """Writes the tensors and, for more than one shard, the index; returns the shard file names.

    At most one shard's arrays are held at a time. With `write=False` every `make()` still runs, in the same order, but
    nothing is written: what the other hosts do while the first one writes (`make` may be a collective).

    Raises:
        WeightsError: a name comes twice.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise WeightsError(f"tensors named twice: {first_names({n for n in names if names.count(n) > 1})}")
    shards = plan_shards(tensors, shard_bytes)
    files = [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        arrays = {}
        for tensor in shard:
            array = tensor.make()
            if write:
                assert array.shape == tensor.shape and array.dtype == tensor.dtype, tensor.name
                arrays[tensor.name] = np.ascontiguousarray(array)
        if write:
            save_file(arrays, directory / file, metadata={"format": "pt"})
    if write and len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return files
