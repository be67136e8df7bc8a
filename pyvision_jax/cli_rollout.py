"""`pyvision rollout`, `chat` and `serve`: a policy that acts and is not trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pyvision_jax.cli_common import split_arguments, stops_on

Arguments = Annotated[
    list[str], typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE]...", help="of rl, sft or demo: docs/configuration.md")
]
Weights = Annotated[
    Path | None, typer.Option(help="model directory in Hugging Face layout, as RUN_DIR/model [model.path]")
]


def rollout(
    data: Annotated[str, typer.Option(help="JSONL of records, a folder of `data build`, or needle")],
    out: Annotated[Path, typer.Option(help="run directory to write")],
    arguments: Arguments = [],  # noqa: B006 typer reads it once
    weights: Weights = None,
    n: Annotated[int, typer.Option("-n", min=1, help="trajectories of each record")] = 4,
    protocol: Annotated[str, typer.Option(help="form of the dialogue [protocol.name]")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="first records of the data only")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="leave out records that OUT has trajectories of")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="remove an earlier run in OUT first")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="check everything, print the arithmetic, start nothing")
    ] = False,
) -> None:
    """Let a policy act on records, and keep its trajectories with their pictures."""
    from pyvision_jax.config_load import ConfigError
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable):
        from pyvision_jax.recipes.acting import acting_config
        from pyvision_jax.recipes.rollout import start_rollout

        overrides = [f"protocol.name={protocol}"] if protocol else []
        config = acting_config(*split_arguments([*arguments, *overrides, f"run_dir={out}"]), weights, data)
        start_rollout(config, n=n, limit=limit, resume=resume, replace=replace, dry=check, say=typer.echo)


def chat(
    arguments: Arguments = [],  # noqa: B006 typer reads it once
    weights: Weights = None,
    image: Annotated[list[Path] | None, typer.Option(help="picture for the first message; repeat for more")] = None,
    out: Annotated[Path, typer.Option(help="folder for pictures and saved conversations")] = Path("runs/chat"),
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy [sampling.temperature]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the samples")] = 0,
) -> None:
    """Talk to a policy about pictures, its tool switched on. /help lists the commands inside."""
    import dataclasses

    from pyvision_jax.config_load import ConfigError
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable):
        from pyvision_jax.recipes.acting import acting_config, open_policy
        from pyvision_jax.serving.chat import Chat

        config = acting_config(*split_arguments(arguments), weights)
        if temperature is not None:
            config = dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, temperature=temperature))
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, slots=1))
        with open_policy(config) as acting:
            typer.echo(f"sandbox: {acting.pool.report.summary}")
            talk = Chat(acting, out, lambda text: typer.echo(text, nl=False), seed=seed)
            for path in image or []:
                talk.attach(path)
            try:
                talk.run(_lines())
            finally:
                talk.close()


def serve(
    arguments: Arguments = [],  # noqa: B006 typer reads it once
    weights: Weights = None,
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    name: Annotated[str, typer.Option(help="what clients call the model [name of the weights' folder]")] = "",
    api_key: Annotated[str, typer.Option(envvar="PYVISION_API_KEY", help="ask clients for this key")] = "",
    allow_local: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="read file: pictures below this folder")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="pixels of a picture as it is sent")] = 50_000_000,
    max_body_mb: Annotated[int, typer.Option(min=1, help="MiB of one request")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="dialogues that wait beyond rollout.slots")] = 64,
) -> None:
    """OpenAI's /v1/chat/completions over the engine, the tool loop inside (docs/serving.md)."""
    import importlib.util

    from pyvision_jax.config_load import ConfigError
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable):
        lacking = [part for part in ("uvicorn", "starlette") if importlib.util.find_spec(part) is None]
        if lacking:
            raise ConfigError(f"{' and '.join(lacking)} missing: pip install 'pyvision-jax[serve]'")
        from pyvision_jax.recipes.acting import acting_config
        from pyvision_jax.serving.errors import Limits
        from pyvision_jax.serving.run import serve as start

        config = acting_config(*split_arguments(arguments), weights)
        limits = Limits(
            body_bytes=max_body_mb << 20,
            picture_pixels=max_pixels,
            pictures=config.protocol.max_images,
            queue=queue,
            local=allow_local,
        )
        model = name or Path(config.model.path or "policy").resolve().name
        start(config, model, host, port, api_key, limits, typer.echo)


def _lines() -> Iterator[str]:
    """Lines of the user: with a prompt and editing where there is a terminal, else as they come."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 gives `input` its editing

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
