"""Weights in and out: a directory in HF layout <-> a parameter tree, on any mesh, with bounded host memory.

    cfg, params = import_weights("Qwen2.5-VL-7B-Instruct", mesh=mesh, dtype=jnp.bfloat16)
    export_weights(params, cfg, "out", tokenizer_dir="Qwen2.5-VL-7B-Instruct")

Our own models are kept the same way. Layouts, checks and memory: docs/weights.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from pyvision_jax.models import spec as weights
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.hf_files import read_spec, write_files
from pyvision_jax.models.hf_names import EMBED, FAMILIES, HEAD, Layout, Stored, layout_of, name_in, new_name
from pyvision_jax.models.safetensors_io import (
    PendingTensor,
    TensorDirectory,
    WeightsError,
    first_names,
    write_shards,
)
from pyvision_jax.parallel import DEFAULT_RULES, Rules

__all__ = [
    "ImportReport",
    "WeightsError",
    "check_weights",
    "export_command",
    "export_weights",
    "import_command",
    "import_weights",
    "read_spec",
]

SHARD_BYTES = 5_000_000_000  # as transformers
_ROWS = 4_096  # of two tied matrices that are compared at a time

Progress = Callable[[str, int], None]  # tensor name, bytes of the whole leaf; called after each


def import_weights(
    directory: str | Path,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    dtype: DTypeLike = np.float32,
    progress: Progress | None = None,
) -> tuple[ModelSpec, Any]:
    """Reads config.json and the safetensors of `directory`: (geometry, parameters of `dtype`).

    With a mesh every leaf is born in its sharding, and each host reads only the rows its devices hold; without one
    all goes to the default device. One tensor is on the host at a time.

    Raises:
        WeightsError: the directory cannot be used; the message names every kind of fault and the first ten names of
            each: missing, unexpected, misshaped or twice held tensors, missing shards, a wrong index, an unequal
            copy of a tied head, no head where it is not tied.
        ValueError: the mesh does not fit the model.
    """
    cfg = read_spec(directory)
    family = FAMILIES[cfg.family]
    specs = family.specs(cfg)
    with TensorDirectory(directory) as files:
        names = _match(files, cfg)
        if mesh is None:
            default = jnp.zeros(()).sharding  # wherever new arrays go
            shardings = jax.tree.map(lambda _: default, specs)
        else:
            shardings = weights.shardings(specs, mesh, rules)

        def load(stored: Stored, sharding: Sharding) -> jax.Array:
            leaf = _read_leaf(files, names[stored.name], stored, sharding, jnp.dtype(dtype))
            if progress is not None:
                progress(names[stored.name], leaf.nbytes)
            return leaf

        return cfg, jax.tree.map(load, family.stored(cfg), shardings)


def _read_leaf(files: TensorDirectory, name: str, stored: Stored, sharding: Sharding, dtype: np.dtype) -> jax.Array:
    parts: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        # Asked once per device: replicas share one read. (Slices have no hash before Python 3.12.)
        key = tuple(part.indices(size) for part, size in zip(index, stored.leaf_shape, strict=True))
        if key not in parts:
            piece = stored.from_file(lambda slices: files.read(name, slices), index)
            parts[key] = np.ascontiguousarray(piece, dtype=dtype)
        return parts[key]

    leaf = jax.make_array_from_callback(stored.leaf_shape, sharding, part, dtype=dtype)
    # Copies to the devices run in the background and hold the host's array: without this they would pile up.
    return jax.block_until_ready(leaf)


def _match(files: TensorDirectory, cfg: ModelSpec) -> dict[str, str]:
    """Name in the new layout -> name in the files, for every tensor of the model; all faults in one error."""
    layout = layout_of(files.infos)
    wanted = {stored.name: stored for stored in jax.tree.leaves(FAMILIES[cfg.family].stored(cfg))}
    found: dict[str, str] = {}
    twice = []
    for name in files.infos:
        canonical = new_name(name)
        if canonical in found:
            twice.append(f"{found[canonical]} and {name}")
        found[canonical] = name
    tied_copy = cfg.text.tie_embeddings and HEAD in found
    missing = [name_in(layout, name) for name in wanted.keys() - found.keys()]
    unexpected = [found[name] for name in found.keys() - wanted.keys() if not (tied_copy and name == HEAD)]
    misshaped = [
        f"{found[name]} ({_shape(files.infos[found[name]].shape)}, the config makes it {_shape(stored.shape)})"
        for name, stored in wanted.items()
        if name in found and files.infos[found[name]].shape != stored.shape
    ]
    faults = [
        f"{len(names)} {kind}: {first_names(names)}"
        for kind, names in (
            ("held twice, in the old and the new layout", twice),
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshaped", misshaped),
        )
        if names
    ]
    if HEAD in missing:
        faults.append(f"{HEAD} may be left out only if config.json has tie_word_embeddings true, and it has not")
    if not faults and tied_copy and not _equal(files, found[EMBED], found[HEAD]):
        faults.append(f"config.json ties {found[HEAD]} to {found[EMBED]}, but the two differ")
    if faults:
        raise WeightsError(f"{files.directory}: " + "; ".join(faults))
    return {name: found[name] for name in wanted}


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _equal(files: TensorDirectory, one: str, other: str) -> bool:
    shape = files.infos[one].shape
    if files.infos[other].shape != shape:
        return False
    blocks = [(slice(at, min(at + _ROWS, shape[0])), slice(0, shape[1])) for at in range(0, shape[0], _ROWS)]
    return all(
        np.array_equal(files.read(one, block).astype(np.float32), files.read(other, block).astype(np.float32))
        for block in blocks
    )


def export_weights(
    params: Any,
    cfg: ModelSpec,
    directory: str | Path,
    *,
    tokenizer_dir: str | Path | None = None,
    preprocessor: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    dtype: DTypeLike | None = None,
    layout: Layout = "old",
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes a directory that transformers (and `import_weights`) loads: weights, config, tokenizer, processor,
    generation and chat files. Other files: `models.hf_files.write_files`.

    dtype: of the files; None keeps each leaf's own. A tied head is not written. The directory appears whole or not
    at all: it is made under another name beside its place and renamed. The host holds one shard at a time. With several
    hosts all of them call this, the first one writes, and the others return when it is done.

    Raises:
        WeightsError: parameters and `cfg` disagree (a leaf of another shape, a head where the config ties it or none
            where it does not), the tokenizer has other vision ids, a dtype that is not written, or `directory` is not
            empty and `overwrite` is False.
    """
    directory = Path(directory).absolute()
    tensors = _pending(params, cfg, dtype, layout)
    _check_free(directory, overwrite)
    if shard_bytes < 1:
        raise WeightsError(f"shard_bytes must be positive, not {shard_bytes}")
    names = Counter[str]()
    for tensor in tensors:
        names[tensor.dtype.name] += tensor.nbytes
    if jax.process_index() == 0:
        with _whole_directory(directory) as partial:
            write_shards(partial, tensors, shard_bytes)
            write_files(
                partial, cfg, names.most_common(1)[0][0], tokenizer_dir, preprocessor, generation, chat_template
            )
    else:
        write_shards(directory, tensors, shard_bytes, write=False)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export {directory}")
    return directory


def _pending(params: Any, cfg: ModelSpec, dtype: DTypeLike | None, layout: Layout) -> list[PendingTensor]:
    family = FAMILIES[cfg.family]
    expected, tree = jax.tree.flatten(family.stored(cfg))
    if jax.tree.structure(params) != tree:
        tied = cfg.text.tie_embeddings
        otherwise = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, tie_embeddings=not tied))
        if jax.tree.structure(params) == jax.tree.structure(family.stored(otherwise)):
            raise WeightsError(
                f"the parameters have {'a head of their own' if tied else 'no head'} but the config has "
                f"tie_word_embeddings {str(tied).lower()}"
            )
        raise WeightsError(f"the parameters are not those of the config: {jax.tree.structure(params)} against {tree}")
    leaves = jax.tree.leaves(params)
    wrong = [
        f"{name_in(layout, stored.name)} (leaf {_shape(leaf.shape)}, the config makes it {_shape(stored.leaf_shape)})"
        for leaf, stored in zip(leaves, expected, strict=True)
        if leaf.shape != stored.leaf_shape
    ]
    if wrong:
        raise WeightsError(f"misshaped: {first_names(wrong)}")
    types = [jnp.dtype(leaf.dtype if dtype is None else dtype) for leaf in leaves]
    unknown = {t.name for t in types} - {"float32", "float16", "bfloat16"}
    if unknown:
        raise WeightsError(f"dtype {first_names(unknown)}: weights are written as float32, float16 or bfloat16")

    def pending(leaf: jax.Array, stored: Stored, kind: np.dtype) -> PendingTensor:
        def make() -> np.ndarray:
            whole = leaf
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                whole = multihost_utils.process_allgather(leaf, tiled=True)
            return stored.to_file(np.asarray(whole)).astype(kind)

        return PendingTensor(name_in(layout, stored.name), stored.shape, kind, make)

    return [pending(*args) for args in zip(leaves, expected, types, strict=True)]


def _check_free(directory: Path, overwrite: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise WeightsError(f"{directory}: is a file")
    if directory.is_dir() and any(directory.iterdir()) and overwrite:
        foreign = [path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
        if foreign or not (directory / "config.json").is_file():
            what = f"holds the folder {sorted(foreign)[0]!r}" if foreign else "holds no config.json"
            raise WeightsError(f"{directory}: {what}: it is no exported model, and nothing there is replaced")
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise WeightsError(f"{directory}: is not empty")


@contextlib.contextmanager
def _whole_directory(directory: Path) -> Iterator[Path]:
    """A new directory that takes the name `directory` when the block ends, and vanishes if it fails."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    try:
        partial.chmod(0o755)  # mkdtemp gives 0700
        yield partial
        old = None
        if directory.exists() and any(directory.iterdir()):
            old = partial.with_name(partial.name.replace(".partial-", ".replaced-"))
            directory.rename(old)
        try:
            partial.rename(directory)
        except OSError:
            if old is not None:
                old.rename(directory)
            raise
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What a weights directory holds."""

    directory: Path
    cfg: ModelSpec
    layout: Layout
    shards: int
    tensors: int
    parameters: int
    nbytes: int  # of all tensors in the files
    dtypes: Mapping[str, int]  # tensors of each dtype
    total_size_in_index: int | None

    def lines(self) -> list[str]:
        """For people."""
        text, vision = self.cfg.text, self.cfg.vision
        head = "tied" if text.tie_embeddings else "of its own"
        lines = [
            f"{self.directory}: {self.cfg.family}, {self.parameters:,} parameters",
            f"text: {text.num_layers} layers, width {text.hidden_size}, {text.num_heads} heads over "
            f"{text.num_kv_heads} key heads, vocabulary {text.vocab_size:,}, head {head}",
            f"vision: {vision.depth} layers, width {vision.hidden_size}, {vision.num_heads} heads, "
            f"patch {vision.patch_size}",
            f"files: {self.shards} shard(s), {self.tensors} tensors, {self.nbytes:,} bytes, {self.layout} key layout, "
            + ", ".join(f"{count} {name}" for name, count in self.dtypes.items()),
        ]
        if self.total_size_in_index not in (None, self.nbytes):
            lines.append(
                f"note: the index says total_size {self.total_size_in_index:,}; the tensors hold {self.nbytes:,}"
            )
        return lines


def check_weights(directory: str | Path) -> ImportReport:
    """All checks of `import_weights` from the headers alone (only an extra copy of a tied head is read)."""
    cfg = read_spec(directory)
    with TensorDirectory(directory) as files:
        names = _match(files, cfg)
        infos = files.infos
        return ImportReport(
            directory=files.directory,
            cfg=cfg,
            layout=layout_of(infos),
            shards=len({info.file for info in infos.values()}),
            tensors=len(infos),
            parameters=sum(int(np.prod(infos[name].shape)) for name in names.values()),
            nbytes=files.nbytes,
            dtypes=Counter(info.dtype.name for info in infos.values()),
            total_size_in_index=files.total_size_in_index,
        )


def import_command(
    directory: str | Path,
    out: str | Path | None = None,
    save: Callable[[Path, Any], None] | None = None,
    dtype: DTypeLike = np.float32,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    chat_template: str | None = None,
) -> ImportReport:
    """`pyvision weights import DIR [--out OUT]`: checks the directory and, with `out`, writes the parameters as an
    Orbax checkpoint `out/params` with config, tokenizer and processor files beside it.

    `save(path, params)` writes a checkpoint (`pyvision_jax.checkpoint.save_params`: this module lies below it). Raises
    as `import_weights`, and WeightsError if `out` exists and is not empty.
    """
    report = check_weights(directory)
    if out is None:
        return report
    if save is None:
        raise ValueError("import_command with `out` needs `save`")
    out = Path(out).absolute()
    _check_free(out, overwrite=False)
    cfg, params = import_weights(directory, mesh=mesh, dtype=dtype, progress=progress)
    tokenizer = Path(directory) if (Path(directory) / "tokenizer.json").is_file() else None
    with _whole_directory(out) as partial:
        save(partial / "params", params)
        write_files(partial, cfg, jnp.dtype(dtype).name, tokenizer, chat_template=chat_template)
    return report


def export_command(
    model_dir: str | Path,
    out: str | Path,
    load: Callable[[Any], Any],
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    layout: Layout = "old",
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    chat_template: str | None = None,
) -> ImportReport:
    """`pyvision weights export CHECKPOINT OUT`: parameters of a checkpoint as an HF directory, checked once written.

    model_dir: where config.json and the tokenizer lie (what `import_command` wrote, or the HF directory that a run
    began with). `load(template)` gives the parameters for a tree of jax.ShapeDtypeStruct (float32, on `mesh` if one is
    given). Raises as `export_weights`.
    """
    model_dir = Path(model_dir)
    cfg = read_spec(model_dir)
    template = weights.abstract_params(FAMILIES[cfg.family].specs(cfg), np.float32, mesh)
    tokenizer = model_dir if (model_dir / "tokenizer.json").is_file() else None
    written = export_weights(
        load(template),
        cfg,
        out,
        tokenizer_dir=tokenizer,
        dtype=dtype,
        layout=layout,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        chat_template=chat_template,
    )
    return check_weights(written)
