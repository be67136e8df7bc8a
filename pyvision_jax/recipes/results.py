"""Results that are claimed: docs/results/NAME.json, and the tables of docs/ that are made from them."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HEADER = ("command", "commit", "host", "date")
BLOCK = re.compile(
    r"(?P<open><!-- table:(?P<name>[\w-]+)(?P<options>[^>]*?) -->\n)(?P<body>.*?)(?P<close><!-- /table -->)", re.S
)
OPENING = re.compile(r"<!-- table:")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure; `low`, `high`: its 95 % interval; `peer`: another system in the same unit; `ratio`: ours to it.

    `origin` is only set on a row kept from an earlier recording: the header fields that differ from the file's.
    """

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    peer: float | str | None = None
    ratio: float | None = None
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Results:
    command: str
    commit: str
    host: str
    date: str
    rows: tuple[Row, ...]


def record(
    path: Path | str, command: str, rows: Iterable[Row], *, commit: str | None, host: str = "", keep: bool = True
) -> Results:
    """Writes `rows` to a results file and returns all that it now holds.

    Rows of the file with other names stay (three seeds may be recorded one after another) and remember the commit,
    host, date and command they were recorded with; `keep=False` starts anew. Raises ValueError for a value that is not
    finite.
    """
    path = Path(path)
    header = {
        "command": command,
        "commit": commit or "unknown",
        "host": host or describe_host(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    new = {row.name: row for row in rows}
    old = read(path) if keep and path.is_file() else None
    merged: list[Row] = []
    for row in old.rows if old else ():
        if row.name in new:
            merged.append(new.pop(row.name))
        else:
            was = {key: vars(old)[key] for key in HEADER} | dict(row.origin)
            merged.append(dataclasses.replace(row, origin={k: v for k, v in was.items() if v != header[k]}))
    results = Results(**header, rows=(*merged, *new.values()))
    _check(results, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(_as_json(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return results


def _as_json(results: Results) -> dict[str, Any]:
    rows = [dataclasses.asdict(row) for row in results.rows]
    for row in rows:
        if not row["origin"]:
            del row["origin"]
    return {**{key: vars(results)[key] for key in HEADER}, "rows": rows}


def read(path: Path | str) -> Results:
    """A results file, checked. Raises ValueError naming the file and what is wrong in it."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    missing = [key for key in (*HEADER, "rows") if key not in data]
    unknown = sorted(data.keys() - {*HEADER, "rows"})
    if missing or unknown:
        raise ValueError(f"{path}: missing keys {missing}, unknown keys {unknown}")
    names = {field.name for field in dataclasses.fields(Row)}
    rows = []
    for number, row in enumerate(data["rows"]):
        if not {"name", "value"} <= row.keys() <= names:
            raise ValueError(f"{path}: rows[{number}] has keys {sorted(row)}; known are {sorted(names)}")
        rows.append(Row(**row))
    results = Results(**{key: data[key] for key in HEADER}, rows=tuple(rows))
    _check(results, path)
    return results


def _check(results: Results, path: Path) -> None:
    for key in HEADER:
        if not isinstance(vars(results)[key], str) or not vars(results)[key]:
            raise ValueError(f"{path}: {key} must be a text that is not empty")
    seen = set()
    for row in results.rows:
        if row.name in seen:
            raise ValueError(f"{path}: two rows are named {row.name!r}")
        seen.add(row.name)
        for key in ("value", "low", "high", "ratio"):
            value = vars(row)[key]
            if value is None and key != "value":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{path}: {key} of row {row.name!r} is {value!r}, not a finite number")


def describe_host() -> str:
    """Processor, cores and memory; no host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(errors="replace"), re.M)
        model = found.group(1).strip() if found else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


# ---------------------------------------------------------------- tables


def table(results: Results, rows: str = "*") -> str:
    """Markdown table of the rows whose name matches the pattern; columns that would be empty are left out."""
    chosen = [row for row in results.rows if fnmatch.fnmatchcase(row.name, rows)]
    if not chosen:
        raise ValueError(f"no row matches {rows!r}")
    columns = [("", [row.name for row in chosen]), ("value", [_with_unit(row) for row in chosen])]
    if any(row.low is not None for row in chosen):
        columns.append(("95 % interval", [_interval(row) for row in chosen]))
    if any(row.n is not None for row in chosen):
        columns.append(("n", [f"{row.n:,}" if row.n is not None else "" for row in chosen]))
    if any(row.peer is not None for row in chosen):
        columns.append(("peer", [figure(row.peer) if row.peer is not None else "" for row in chosen]))
    if any(row.ratio is not None for row in chosen):
        columns.append(("ratio", [f"{row.ratio:.2f}x" if row.ratio is not None else "" for row in chosen]))
    lines = [_line([title for title, _ in columns]), _line(["---", *["---:"] * (len(columns) - 1)])]
    lines += [_line(list(cells)) for cells in zip(*(cells for _, cells in columns), strict=True)]
    lines += ["", f"`{results.command}`, {_commit(results.commit)}, {results.host}, {results.date}."]
    others = sorted({_origin(row) for row in chosen if row.origin})
    lines += [f"Recorded apart: {'; '.join(others)}."] if others else []
    return "\n".join(lines) + "\n"


def _origin(row: Row) -> str:
    return f"{row.name}: " + ", ".join(
        _commit(text) if key == "commit" else f"`{text}`" if key == "command" else text
        for key, text in row.origin.items()
    )


def _commit(commit: str) -> str:
    head, plus, rest = commit.partition("+")
    return f"commit {head[:12]}{plus}{rest}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _with_unit(row: Row) -> str:
    return f"{figure(row.value)} {row.unit}".strip()


def _interval(row: Row) -> str:
    return f"{figure(row.low)} to {figure(row.high)}" if row.low is not None and row.high is not None else ""


def figure(value: float | str | None) -> str:
    """A number to three or four significant digits, thousands with commas; text as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def rewrite(text: str, folder: Path | str, where: str = "") -> str:
    """`text` with its tables made anew from `folder/NAME.json`.

    A table is a block `<!-- table:NAME -->` or `<!-- table:NAME rows=PATTERN -->` ... `<!-- /table -->`. Raises
    ValueError naming `where` and the line for a block without end, an unknown option or a missing results file.
    """

    def replace(block: re.Match[str]) -> str:
        place = f"{where}:{text.count(chr(10), 0, block.start()) + 1}"
        rows = "*"
        options = block["options"].strip()
        if options:
            key, _, rows = options.partition("=")
            if key != "rows" or not rows:
                raise ValueError(f"{place}: unknown option {options!r} of a table; the only one is rows=PATTERN")
        path = Path(folder) / f"{block['name']}.json"
        if not path.is_file():
            raise ValueError(f"{place}: table {block['name']!r} has no results file {path}")
        try:
            return f"{block['open']}{table(read(path), rows)}{block['close']}"
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    found = len(BLOCK.findall(text))
    wanted = len(OPENING.findall(text))
    if found != wanted:
        raise ValueError(
            f"{where}: {wanted} table blocks are opened, {found} are whole (each ends with <!-- /table -->)"
        )
    return BLOCK.sub(replace, text)


def make_tables(root: Path | str, check: bool = False) -> list[Path]:
    """Rewrites the tables of README.md and docs/**/*.md below `root`; returns the files that differed.

    With `check` nothing is written. Raises ValueError as `rewrite` does.
    """
    root = Path(root)
    changed = []
    for path in [*sorted(root.glob("README.md")), *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        made = rewrite(text, root / "docs" / "results", str(path.relative_to(root)))
        if made != text:
            changed.append(path)
            if not check:
                path.write_text(made, encoding="utf-8")
    return changed
