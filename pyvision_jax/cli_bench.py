"""`pyvision bench`: one command per benchmark. Each loads its body when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyvision_jax.cli_common import stops_on

app = typer.Typer(help="Measure parts of this system beside what would be used instead.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure parts of this system beside what would be used instead."""


@app.command()
def sandbox(
    record: Annotated[bool, typer.Option("--record", help="write docs/results/sandbox.json")] = False,
    n: Annotated[int, typer.Option("--n", min=1, help="measurements of each kind")] = 200,
    sessions: Annotated[int, typer.Option(min=0, help="sessions alive at once at the end; 0 leaves that out")] = 1000,
    profile: Annotated[str, typer.Option(help="what the sessions have imported: numpy_pil, vision or full")] = "vision",
    level: Annotated[str, typer.Option(help="isolation to measure at")] = "namespaces",
    with_peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="also a fresh Python, bubblewrap and a Jupyter kernel")
    ] = True,
) -> None:
    """Starts, cells, branches, time limits and memory of sandbox sessions; minutes, best on a quiet machine."""
    from rich.console import Console

    from pyvision_jax.bench import sandbox as body
    from pyvision_sandbox import SandboxError

    options = body.Options(n, profile, level, sessions, with_peers)
    with stops_on(SandboxError, ValueError):
        outcome = body.run(options, Console(stderr=True))
    body.print_table(outcome, Console())
    if record:
        body.record(outcome, Path("docs/results/sandbox.json"))
