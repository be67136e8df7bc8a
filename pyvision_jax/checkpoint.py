"""Checkpoints of a run (Orbax, asynchronous, whole or absent) and of parameters alone."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar("State")

log = logging.getLogger(__name__)

_UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of saves that have not ended
_ITEMS = ("state", "host")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message names the directory."""


class Checkpoints:
    """Steps below one directory, of which the newest `keep` stay.

    A step holds `state` (a pytree of arrays) and `host` (JSON data: data position, packing buckets, pending work). It
    is written under a temporary name and renamed when it is whole, so a killed process leaves either the step or
    nothing; leftovers are removed when the directory is opened next. A step that lacks a part all the same (an
    interrupted copy of the directory) is then renamed to `STEP.incomplete`. Use as a context manager: leaving waits
    for the last save.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._set_incomplete_aside()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts a save and returns once `state` has been copied: its buffers may then be donated.

        Raises `CheckpointError` if this save cannot start or the one before it failed.
        """
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        try:
            self._manager.save(step, args=arguments, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises `CheckpointError` if a save in the background has failed. Call once a step."""
        try:
            self._manager.check_for_errors()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Blocks until no save is running. Raises `CheckpointError` if one failed."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error

    def steps(self) -> list[int]:
        """Whole steps, ascending."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(self, template: State, step: int | None = None) -> tuple[int, State, dict[str, Any]]:
        """(step, state, host) of a step, the latest by default.

        `template` gives structure, shapes, dtypes and shardings: arrays or ShapeDtypeStructs. Raises
        `CheckpointError` if there is no such step, or it does not fit the template.
        """
        found = self.latest() if step is None else step
        if found is None or found not in self.steps():
            raise CheckpointError(f"{self.directory} holds no whole checkpoint{'' if step is None else f' {step}'}")
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, template)),
            host=ocp.args.JsonRestore(),
        )
        try:
            restored = self._manager.restore(found, args=arguments)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.directory / str(found)} cannot be restored: {error}") from error
        return found, restored["state"], restored["host"]

    def start(self, resume: bool) -> int | None:
        """The step to resume from, said in the log; None starts afresh.

        Raises `CheckpointError` if the directory holds steps and `resume` is False: a second run must not mix with the
        first.
        """
        step = self.latest()
        if step is not None and not resume:
            raise CheckpointError(
                f"{self.directory} already holds step {step}: pass --resume to go on from it, or choose another run_dir"
            )
        if resume:
            log.info(
                "no whole checkpoint in %s: starting from step 0" if step is None else "resuming %s from step %d",
                *((self.directory,) if step is None else (self.directory, step)),
            )
        return step

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError:  # the error on its way out says more
            log.exception("the last save of %s failed too", self.directory)

    def _set_incomplete_aside(self) -> None:
        for directory in sorted(self.directory.iterdir()):
            if _UNFINISHED in directory.name:  # Orbax would remove them in the background: too late for a reader
                shutil.rmtree(directory, ignore_errors=True)
                continue
            missing = [item for item in _ITEMS if not (directory / item).is_dir()]
            if directory.name.isdecimal() and missing:
                aside = directory.with_name(f"{directory.name}.incomplete")
                log.warning("checkpoint %s lacks %s: renamed to %s", directory, " and ".join(missing), aside.name)
                shutil.rmtree(aside, ignore_errors=True)
                directory.rename(aside)

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"saving to {self.directory} failed: {error}")


def save_params(path: str | Path, params: Any) -> None:
    """Writes parameters alone, replacing what lies at `path`; returns when they are on disk."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), params, force=True)
        checkpointer.wait_until_finished()


def load_params(path: str | Path, template: State) -> State:
    """Parameters written by `save_params`, in the structure, dtypes and shardings of `template`."""
    path = Path(path).absolute()
    if not path.is_dir():
        raise CheckpointError(f"{path} holds no parameters")
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, template))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be restored: {error}") from error
