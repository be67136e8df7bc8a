"""What the commands share: how they stop on bad input, and how they read their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer

BAD_INPUT = 2  # exit code: the input is at fault, and the one line on stderr says where


@contextlib.contextmanager
def stops_on(*errors: type[Exception]) -> Iterator[None]:
    """These errors are the user's to mend: one line, exit code 2, no traceback. All others are bugs and show theirs."""
    try:
        yield
    except errors as error:
        typer.echo(f"pyvision: error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """A configuration file is an argument without `=`, and the first."""
    if arguments and "=" not in arguments[0]:
        return Path(arguments[0]), arguments[1:]
    return None, arguments
