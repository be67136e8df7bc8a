"""`pyvision`: one command per task. Each loads its body when it is called, so help is quick and needs no device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyvision_jax.cli_bench import app as bench
from pyvision_jax.cli_common import split_arguments, stops_on
from pyvision_jax.cli_rollout import chat, rollout, serve

app = typer.Typer(
    name="pyvision",
    help="Train vision-language policies that think by writing Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
weights = typer.Typer(help="Weights from and to Hugging Face directories.", no_args_is_help=True)
sandbox = typer.Typer(help="The process that runs the policy's code.", no_args_is_help=True)
data = typer.Typer(help="Files of records.", no_args_is_help=True)
app.add_typer(weights, name="weights")
app.add_typer(data, name="data")
app.add_typer(sandbox, name="sandbox")
app.add_typer(bench, name="bench")

# --------------------------------------------------------------------------------------------------------- training

Arguments = Annotated[list[str], typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE]...", help="docs/configuration.md")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint of run_dir")]
Replace = Annotated[bool, typer.Option("--replace", help="remove an earlier run in run_dir first")]
Check = Annotated[bool, typer.Option("--check", help="check everything, print the arithmetic, start nothing")]


@app.command()
def sft(arguments: Arguments, resume: Resume = False, replace: Replace = False, check: Check = False) -> None:
    """Fine-tune on traces."""
    from pyvision_jax.config import SFTConfig
    from pyvision_jax.config_load import ConfigError, load

    with stops_on(ConfigError):
        config = load(SFTConfig, *split_arguments(arguments))
        from pyvision_jax.recipes.start import start_sft

        start_sft(config, resume=resume, replace=replace, dry=check, say=typer.echo)


@app.command()
def rl(arguments: Arguments, resume: Resume = False, replace: Replace = False, check: Check = False) -> None:
    """Reinforcement learning on tasks, with the tool."""
    from pyvision_jax.config import RLConfig
    from pyvision_jax.config_load import ConfigError, load
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable):
        config = load(RLConfig, *split_arguments(arguments))
        from pyvision_jax.recipes.start import start_rl

        start_rl(config, resume=resume, replace=replace, dry=check, say=typer.echo)


@app.command("eval")
def evaluate(
    arguments: Arguments,
    tasks: Annotated[int, typer.Option(min=1, help="first tasks of data.eval (data.train if that is empty)")] = 256,
    tries: Annotated[int, typer.Option(min=1, help="trajectories of each task")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    replace: Replace = False,
    check: Check = False,
) -> None:
    """Measure a policy on held-out tasks, through the loop that training uses."""
    from pyvision_jax.config import RLConfig
    from pyvision_jax.config_load import ConfigError, load
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable):
        config = load(RLConfig, *split_arguments(arguments))
        from pyvision_jax.recipes.start import start_eval

        start_eval(
            config, tasks=tasks, tries=tries, temperature=temperature, replace=replace, dry=check, say=typer.echo
        )


@app.command()
def demo(
    arguments: Arguments = [],  # noqa: B006 typer reads it once
    seed: Annotated[int | None, typer.Option(help="of everything random")] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="warm vision up here, not from the package")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="add this seed's rows to docs/results/demo.json")] = False,
) -> None:
    """The main job: SFT and RL of a small policy on real photographs, with controls and a report."""
    from pyvision_jax.config import DemoConfig
    from pyvision_jax.config_load import ConfigError, load
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable):
        path, overrides = split_arguments(arguments)
        overrides += [] if seed is None else [f"seed={seed}"]
        overrides += ["from_scratch=true"] if from_scratch else []
        config = load(DemoConfig, path or _preset("demo.yaml"), overrides)
        from pyvision_jax.recipes import demo as recipe

        with stops_on(FileExistsError):  # a run_dir that holds something else than a run
            summary = recipe.run(config, say=typer.echo)
    recipe.print_table(summary)
    if record:
        recipe.record(summary, Path("docs/results/demo.json"))


app.command()(rollout)
app.command()(chat)
app.command()(serve)


def _preset(name: str) -> Path:
    """A file of configs/: inside an installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "configs" / name
    return inside if inside.is_file() else Path(__file__).parents[1] / "configs" / name


# ---------------------------------------------------------------------------------------------------------- weights


@weights.command("import")
def weights_import(
    directory: Annotated[
        Path, typer.Argument(help="directory with config.json and *.safetensors, old or new key layout")
    ],
    out: Annotated[Path | None, typer.Option(help="write the parameters there as an Orbax checkpoint")] = None,
) -> None:
    """Check a Hugging Face directory tensor by tensor, and with --out convert it."""
    from pyvision_jax.models.safetensors_io import WeightsError

    with stops_on(WeightsError):
        from pyvision_jax.checkpoint import save_params
        from pyvision_jax.models.hf import import_command

        report = import_command(directory, out, save_params)
    for line in report.lines():
        typer.echo(line)
    if out is not None:
        typer.echo(f"written: {out}")


@weights.command("export")
def weights_export(
    checkpoint: Annotated[Path, typer.Argument(help="a parameter checkpoint (the folder `params` of an import)")],
    out: Annotated[Path, typer.Argument(help="directory to write, readable by transformers")],
    model_dir: Annotated[
        Path | None, typer.Option(help="where config.json and the tokenizer lie [beside CHECKPOINT]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    layout: Annotated[str, typer.Option(help="key names: old (transformers 4) or new (5)")] = "old",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory: weights, index, configuration, tokenizer and processor files."""
    from pyvision_jax.models.safetensors_io import WeightsError

    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype!r} is not float32, bfloat16 or float16", param_hint="--dtype")
    if layout not in ("old", "new"):
        raise typer.BadParameter(f"{layout!r} is not old or new", param_hint="--layout")
    from pyvision_jax.checkpoint import CheckpointError, load_params
    from pyvision_jax.models.hf import export_command

    with stops_on(WeightsError, CheckpointError):
        report = export_command(
            model_dir or checkpoint.parent,
            out,
            lambda template: load_params(checkpoint, template),
            dtype=dtype,
            layout="old" if layout == "old" else "new",
            overwrite=overwrite,
        )
    for line in report.lines():
        typer.echo(line)


# ----------------------------------------------------------------------------------------------- reports and machine


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="folder of a run, finished or not")],
    out: Annotated[Path | None, typer.Option(help="file to write [RUN_DIR/report.html]")] = None,
    trajectories: Annotated[int, typer.Option(min=0, help="trajectories shown in full")] = 12,
) -> None:
    """Write the static HTML report of a run."""
    from pyvision_jax.report import build

    with stops_on(FileNotFoundError):
        typer.echo(str(build(run_dir, out, trajectories)))


@app.command()
def doctor() -> None:
    """Say what this machine offers: versions, devices, memory, and what confines the sandbox. Exit code 1 if unfit."""
    from pyvision_jax.cli_machine import examine

    raise typer.Exit(0 if examine() else 1)


@sandbox.command("check")
def sandbox_check(
    min_level: Annotated[
        str, typer.Option(help="weakest isolation to accept: seccomp, landlock or namespaces")
    ] = "landlock",
    max_level: Annotated[str, typer.Option(help="try this level first")] = "namespaces",
    profile: Annotated[str, typer.Option(help="packages of a session: numpy_pil, vision or full")] = "vision",
) -> None:
    """Print what confines the code on this machine, tried in a session. Exit code 1 if it is less than promised."""
    from pyvision_sandbox import SandboxError
    from pyvision_sandbox.__main__ import check

    with stops_on(SandboxError, ValueError):
        held = check(profile, min_level, max_level)
    raise typer.Exit(0 if held else 1)


@sandbox.command("run")
def sandbox_run(
    file: Annotated[Path, typer.Argument(help="Python file to run as one cell")],
    image: Annotated[list[Path] | None, typer.Option(help="picture, bound as image_clue_0, image_clue_1, ...")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="video, bound as video_clue_0, ...")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the pictures that the code shows")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds of wall time")] = 10.0,
    profile: Annotated[str, typer.Option(help="packages of the session: numpy_pil, vision or full")] = "vision",
    min_level: Annotated[str, typer.Option(help="weakest isolation to accept")] = "landlock",
    mend: Annotated[bool, typer.Option("--mend", help="mend trivial faults first, and say which")] = False,
) -> None:
    """Run a file as the policy's code is run. Exit code 1 if it fails."""
    from pyvision_sandbox import SandboxError
    from pyvision_sandbox.__main__ import run_file

    with stops_on(SandboxError, OSError, ValueError):
        ok = run_file(file, image or [], out, timeout, profile, videos=video or [], min_level=min_level, mended=mend)
    raise typer.Exit(0 if ok else 1)


@sandbox.command("replay")
def sandbox_replay(
    file: Annotated[Path, typer.Argument(help="JSONL file of traces that you trust")],
    arguments: Arguments = [],  # noqa: B006 typer reads it once
    media_root: Annotated[Path | None, typer.Option(help="where relative picture paths start [folder of FILE]")] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file to write: each call's result and level")] = None,
) -> None:
    """Run the code of traces again, as `sandbox.*` and `protocol.*` say. Exit code 1 if a session was lost."""
    from rich.console import Console

    from pyvision_jax.config import RLConfig
    from pyvision_jax.config_load import ConfigError, load
    from pyvision_sandbox import SandboxUnavailable

    with stops_on(ConfigError, SandboxUnavailable, OSError):
        config = load(RLConfig, *split_arguments(arguments))
        from pyvision_jax.cli_replay import replay_file

        good = replay_file(file, media_root, config, out, Console())
    raise typer.Exit(0 if good else 1)


# ------------------------------------------------------------------------------------------------------------- data


@data.command("check")
def data_check(
    file: Annotated[Path, typer.Argument(help="JSONL file of records (docs/data.md)")],
    media_root: Annotated[Path | None, typer.Option(help="where relative picture paths start [folder of FILE]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="do not open the pictures")] = False,
) -> None:
    """Read every record and open every picture; name file, line and key of what is bad. Exit code 1 if anything is."""
    from rich.console import Console

    from pyvision_jax.cli_data import check_file

    with stops_on(OSError):
        good = check_file(file, media_root, not quick, Console())
    raise typer.Exit(0 if good else 1)


@data.command("build")
def data_build(
    file: Annotated[Path, typer.Argument(help="JSONL file of records (docs/data.md)")],
    out: Annotated[Path, typer.Argument(help="folder to write; data.train takes it")],
    media_root: Annotated[Path | None, typer.Option(help="where relative picture paths start [folder of FILE]")] = None,
) -> None:
    """Store records with their pictures as ArrayRecord files, for sets too large for one file of lines."""
    from rich.console import Console

    with stops_on(OSError, ValueError):
        from pyvision_jax.cli_data import build_store

        good = build_store(file, out, media_root, Console())
    raise typer.Exit(0 if good else 1)


@data.command("show")
def data_show(
    file: Annotated[Path, typer.Argument(help="JSONL file of records (docs/data.md)")],
    model: Annotated[Path, typer.Option(help="directory with config.json and the tokenizer")],
    record: Annotated[str, typer.Option(help="number of the record from 0, or its id")] = "0",
    media_root: Annotated[Path | None, typer.Option(help="where relative picture paths start [folder of FILE]")] = None,
    template: Annotated[str, typer.Option(help="wording of the first turn: image or brief")] = "image",
) -> None:
    """Print a record as the policy sees it; what the loss learns from is green."""
    from rich.console import Console

    from pyvision_jax.cli_data import show_record
    from pyvision_jax.config import ProtocolConfig
    from pyvision_jax.config_load import load

    with stops_on(OSError, ValueError):  # RecordError, ConfigError and MediaError are ValueErrors
        config = load(ProtocolConfig, None, [f"template={template}"])
        show_record(file, record, model, media_root, config, Console())


def main() -> None:
    app()


if __name__ == "__main__":
    main()
