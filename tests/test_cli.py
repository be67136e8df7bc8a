"""The command line: quick help, exit codes, one line for bad input."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from pyvision_jax.cli import app
from pyvision_sandbox.policy import LEVELS

ROOT = Path(__file__).parents[1]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "sandbox"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def one_line(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("pyvision: error: ")]
    assert len(lines) == 1 and "Traceback" not in stderr, stderr
    return lines[0]


def test_help_is_quick_and_loads_no_jax() -> None:
    code = (
        "import sys; from pyvision_jax.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit as stop: assert not stop.code\n"
        "heavy = {'jax', 'flax', 'numpy', 'transformers', 'matplotlib', 'orbax', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # CPU time, as the wall time of a busy machine says little; 1.5 s is what a person should wait at most.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    for command in ("weights", "report", "doctor", "sandbox"):
        assert command in done.stdout


def test_every_command_has_help() -> None:
    from typer.main import get_command

    def walk(command, path: list[str]) -> None:
        code, _, _ = invoke(*path, "--help")
        assert code == 0 and command.help, path
        for name, below in sorted(vars(command).get("commands", {}).items()):
            walk(below, [*path, name])

    walk(get_command(app), [])


def test_module_entry_reports_usage_errors() -> None:
    done = python("-m", "pyvision_jax.cli", "nothing")
    assert done.returncode == 2 and "nothing" in done.stderr


def test_weights_import_names_what_is_wrong(tmp_path: Path) -> None:
    code, _, err = invoke("weights", "import", str(tmp_path / "gone"))
    assert code == 2 and "gone" in one_line(err)


def test_report_of_no_run(tmp_path: Path) -> None:
    code, _, err = invoke("report", str(tmp_path / "gone"))
    assert code == 2 and "gone" in one_line(err)


def test_sandbox_check() -> None:
    code, out, _ = invoke("sandbox", "check")
    assert code == 0 and "isolation: " in out and "[held]" in out and "FAILED" not in out
    for level in ("vault", "none"):
        code, _, err = invoke("sandbox", "check", "--min-level", level)
        assert code == 2 and level in one_line(err)


def test_sandbox_run_prints_saves_and_fails_like_the_code(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "a.png")
    file = tmp_path / "cell.py"
    file.write_text("print(image_clue_0.size)\nimage_clue_0.crop((0, 0, 5, 7))\n")
    out = tmp_path / "out"
    code, stdout, _ = invoke("sandbox", "run", str(file), "--image", str(tmp_path / "a.png"), "--out", str(out))
    assert code == 0 and "(30, 20)" in stdout
    assert [Image.open(path).size for path in out.iterdir()] == [(5, 7)]

    file.write_text("1 / 0")
    code, stdout, _ = invoke("sandbox", "run", str(file))
    assert code == 1 and "ZeroDivisionError" in stdout

    code, _, err = invoke("sandbox", "run", str(file), "--image", str(file))
    assert code == 2 and str(file) in one_line(err)
    huge = bytearray((tmp_path / "a.png").read_bytes())
    huge[16:24] = 2 * (30_000).to_bytes(4, "big")  # width and height in the header
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    (tmp_path / "huge.png").write_bytes(huge)
    (tmp_path / "latin.py").write_bytes(b"# \xff")
    for wrong in ((str(file), "--image", str(tmp_path / "huge.png")), (str(tmp_path / "latin.py"),)):
        code, _, err = invoke("sandbox", "run", *wrong)
        assert code == 2 and err.count("\n") == 1 and f"error: {wrong[-1]}: " in err, err
    code, _, err = invoke("sandbox", "run", str(tmp_path / "gone.py"))
    assert code == 2 and "gone.py" in one_line(err)
    for option in ("--profile", "--min-level"):
        code, _, err = invoke("sandbox", "run", str(file), option, "none")
        assert code == 2 and "'none'" in one_line(err)


def test_sandbox_run_mends_if_told_to(tmp_path: Path) -> None:
    file = tmp_path / "cell.py"
    file.write_text("    print(6 * 7)\n")
    code, _, _ = invoke("sandbox", "run", str(file), "--profile", "numpy_pil")
    assert code == 1
    code, stdout, _ = invoke("sandbox", "run", str(file), "--profile", "numpy_pil", "--mend")
    assert code == 0 and "42" in stdout and "[mended, line 1, dedent: " in stdout


def test_sandbox_replay_runs_the_code_of_traces_and_stamps_the_level(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "a.png")
    messages = [
        {"role": "user", "content": [{"type": "image", "index": 0}, {"type": "text", "text": "How wide?"}]},
        {"role": "assistant", "content": "<code>\nprint(image_clue_0.width)\n</code>"},
        {"role": "tool", "content": "30"},
        {"role": "assistant", "content": "<code>\n1 / 0\n</code>"},
        {"role": "tool", "content": "something else"},
        {"role": "assistant", "content": "<answer>\n\\boxed{30}\n</answer>"},
    ]
    record = {"id": "t", "messages": messages, "media": ["a.png"], "answer": "30"}
    file, out = tmp_path / "traces.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(record) + "\n")
    keys = ("sandbox.profile=numpy_pil", "sandbox.min_level=seccomp")
    code, stdout, err = invoke("sandbox", "replay", str(file), *keys, "--out", str(out))
    assert code == 0, err
    assert "1 traces, 2 calls" in stdout and "text as recorded: 1 of 2 calls" in stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "error"] and {row["level"] for row in rows} <= set(LEVELS[1:])
    code, _, err = invoke("sandbox", "replay", str(file), "sandbox.min_level=none")
    assert code == 2 and "no configuration can ask for it" in one_line(err)


def test_doctor_finds_this_machine_fit() -> None:
    code, out, _ = invoke("doctor")
    assert "devices: " in out and "isolation: " in out
    assert (code == 0) == ("fit to run" in out) and ("problem: " in out) == (code == 1)
