"""Body of `pyvision sandbox replay`: the code of traces, run again in fresh sessions.

The one command that runs below level `landlock`, if `sandbox.min_level=seccomp` names it: the traces are their owner's.
Code that a policy samples never comes here.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from pyvision_jax.agents.protocol import Code
from pyvision_jax.agents.pyvision import read_code
from pyvision_jax.config import RLConfig
from pyvision_jax.data.jsonl import ReadReport, read_records
from pyvision_jax.data.media import MediaError, open_image
from pyvision_jax.data.records import Message, Record
from pyvision_jax.recipes.build import GENERATORS
from pyvision_jax.recipes.collect import open_pool
from pyvision_sandbox import SandboxPool, observation_text

_BLOCK = re.compile(r"<code>(.*?)</code>", re.S)
_LOST = ("hard_timeout", "crashed", "protocol_error", "cancelled")


def replay_file(path: Path, media_root: Path | None, config: RLConfig, out: Path | None, console: Console) -> bool:
    """Runs every call of every trace; prints the counts. With `out` a JSON line for each call, its level included.

    True if there was something to run and no session was lost. Raises `OSError`, and `SandboxUnavailable` below
    `config.sandbox.min_level`.
    """
    report = ReadReport()
    traces = [record for record in read_records(path, media_root, report) if record.messages[-1].role == "assistant"]
    rows: list[dict[str, Any]] = []
    with open_pool(config.sandbox, trusted=True) as pool:
        console.print(f"sandbox: {pool.report.summary}", highlight=False, soft_wrap=True)
        for found in pool.map(lambda record: list(_calls(record, media_root, config, pool)), traces):
            rows += found
    if out is not None:
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    for line in _summary(path, len(traces), len(report.bad), rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return bool(rows) and not any(row["status"] in _LOST or "skipped" in row for row in rows)


def _calls(record: Record, media_root: Path | None, config: RLConfig, pool: SandboxPool) -> Iterator[dict[str, Any]]:
    try:
        pictures = [
            open_image(record.media[part.index], config.image, generators=GENERATORS, root=media_root)
            for message in record.messages if message.role == "user" for part in message.parts if part.kind == "image"
        ]  # fmt: skip
    except MediaError as error:
        yield {"record": record.id, "status": "skipped", "skipped": str(error)}
        return
    shown = len(pictures)
    with pool.session(seed=0, images={f"image_clue_{k}": p for k, p in enumerate(pictures)}, trusted=True) as session:
        for index, message in enumerate(record.messages):
            blocks = _BLOCK.findall(_text(message)) if message.role == "assistant" else []
            code = read_code(blocks[-1]) if blocks else None
            if not isinstance(code, Code):
                continue
            names = [f"image_clue_{shown + k}" for k in range(config.protocol.max_images)]
            result = session.run(code.text, bind=names if config.protocol.bind_figures else ())
            shown += len(result.images)
            row = {"record": record.id, "message": index, **result.to_dict()}
            follows = record.messages[index + 1 : index + 2]
            if follows and follows[0].role == "tool":
                told = observation_text(result, config.protocol.max_text)
                row["same_text"] = told.strip() == _text(follows[0]).strip()
            yield row


def _text(message: Message) -> str:
    return "".join(part.text for part in message.parts if part.kind == "text")


def _summary(path: Path, traces: int, bad: int, rows: list[dict[str, Any]]) -> Iterator[str]:
    left_out = f", {bad} bad lines left out" if bad else ""
    yield f"{path}: {traces:,} traces{left_out}, {sum('message' in row for row in rows):,} calls"
    statuses = collections.Counter(row["status"] for row in rows)
    yield "statuses: " + (", ".join(f"{count:,} {status}" for status, count in statuses.most_common()) or "none")
    levels = sorted({row["level"] for row in rows if "level" in row})
    yield f"level: {', '.join(levels) or 'nothing was run'}"
    compared = [row["same_text"] for row in rows if "same_text" in row]
    if compared:
        yield f"text as recorded: {sum(compared):,} of {len(compared):,} calls"
    for row in rows:
        if "skipped" in row:
            yield f"left out: {row['skipped']}"
