"""Records in, trajectories out: what `pyvision rollout` does, as a function.

A batch of records is one step file of the run directory, written whole or not at all. A run that was killed goes on
behind its last batch; seeds follow from the ids of records, so what it writes is what it would have written.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyvision_jax import report
from pyvision_jax.agents.loop import AgentLoop, Collected, tool_threads
from pyvision_jax.config import RLConfig
from pyvision_jax.config_load import ConfigError, as_tree, load
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.records import Record
from pyvision_jax.evaluation.metrics import mean_interval
from pyvision_jax.recipes.acting import open_policy
from pyvision_jax.recipes.build import Records, build_host, build_tasks
from pyvision_jax.recipes.metrics import Progress
from pyvision_jax.recipes.run_dir import RunDir
from pyvision_jax.recipes.start import Say, open_run
from pyvision_jax.report import reader
from pyvision_jax.rewards import pyvision
from pyvision_jax.rollout.trajectory import Trajectory

PHASE = "rollout"
BATCH = 4  # trajectories of one batch, as a multiple of the engine's slots
_FIXED = ("model", "image", "protocol", "sampling", "seed")  # what a resumed run must not change


def start_rollout(
    config: RLConfig,
    *,
    n: int = 4,
    limit: int | None = None,
    resume: bool = False,
    replace: bool = False,
    dry: bool = False,
    say: Say = print,
) -> Path:
    """`n` trajectories of each record of `config.data.train`, at most `limit` records, into `config.run_dir`.

    `config` comes from `recipes.acting.acting_config`. `resume` leaves out records that have their trajectories there
    already; `replace` removes an earlier run first. Trajectories of records with an answer are scored. Raises
    `ConfigError`, and `SandboxUnavailable` if the machine falls short of `sandbox.min_level`.
    """
    host = build_host(config)
    records = build_tasks(config.data)
    count = len(records.source) if limit is None else min(limit, len(records.source))
    size = max(1, BATCH * config.rollout.slots // n)
    bad = f", {len(records.bad)} bad lines left out (listed in skipped.jsonl)" if records.bad else ""
    say(f"records: {count:,} of {len(records.source):,} from {config.data.train}{bad}")
    say(f"rollouts: {count:,} records x {n} = {count * n:,} trajectories, {config.rollout.slots} at a time")
    if dry:
        return Path(config.run_dir)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, group_size=n))
    folder = Path(config.run_dir)
    if resume:
        _check_same(folder / "config.yaml", config)
    with open_policy(config, host) as acting, contextlib.ExitStack() as stack:
        run_dir = open_run(config, records, resume, replace)
        run_dir.write_sandbox(acting.pool.report.to_dict())
        tally = _Tally(folder)
        done = tally.records
        if resume:
            say(f"resume: {len(done):,} records have their trajectories")
        store = ImageStore()
        loop = AgentLoop(
            acting.engine, host.protocol, acting.pool, config.protocol, host.tokenizer, store, threads=tool_threads()
        )
        stack.callback(loop.close)
        writer = stack.enter_context(run_dir.trajectories(host.tokenizer.decode, lambda name: store.get(name).pixels))
        bar = stack.enter_context(Progress(PHASE, count, min(len(done), count)))
        step = _next_step(folder)
        for batch in _batches(records, count, done, size):
            start = time.perf_counter()
            collected = loop.collect(batch, group_size=n, seed=config.seed, keys=[_key(record) for record in batch])
            for record, reason in collected.skipped:
                tally.skip(run_dir, record, reason, config.data.train)
            members = _scored(batch, collected, config)
            writer.write(PHASE, step, members, references={record.id: record.answer for record in batch})
            writer.flush()  # a record counts as done when it is on disk
            store.keep(set())
            tally.add(members)
            tally.seconds += time.perf_counter() - start
            run_dir.write_summary(tally.summary(config))
            step += 1
            bar.step(len(batch), skipped=len(collected.skipped), seconds=time.perf_counter() - start)
    summary = tally.summary(config) | tally.accuracy()
    if not summary["trajectories"]:
        raise ConfigError(f"data: none of {count} records could be run; {folder / 'skipped.jsonl'} says why")
    run_dir.write_summary(summary)
    for line in _lines(summary):
        say(line)
    say(f"report: {report.build(folder)}")
    return folder


class _Tally:
    """What is summed up over all trajectories of a folder, those of earlier starts included."""

    def __init__(self, folder: Path):
        stored = reader.read_json(folder / "summary.json").get("seconds", {})
        self.seconds = float(stored.get(PHASE, 0.0)) if isinstance(stored, dict) else 0.0
        rows = reader.read_jsonl(folder / "skipped.jsonl").rows
        self.skipped = {(str(row.get("id")), str(row.get("reason")), row.get("row")) for row in rows}
        self.ends: collections.Counter[str] = collections.Counter()
        self.tokens = self.calls = self.calls_ok = 0
        self.right: dict[str, list[float]] = {}  # by record
        for row in reader.read_index(folder / "trajectories" / PHASE)[0]:
            ok = row["calls_ok"]
            self._add(row["record_id"], row["end_reason"], row["tokens"], row["calls"], ok, row["rewards"])

    @property
    def records(self) -> set[str]:
        """Ids of records whose trajectories are on disk."""
        return set(self.right)

    def add(self, members: Sequence[Trajectory]) -> None:
        for one in members:
            tokens = sum(span.end - span.start for span in one.spans if span.kind == "policy")
            self._add(one.record_id, str(one.end_reason), tokens, len(one.calls), one.tool_calls, one.rewards)

    def _add(self, record: str, end: str, tokens: int, calls: int, calls_ok: int, rewards: dict[str, float]) -> None:
        self.ends[end] += 1
        self.tokens, self.calls, self.calls_ok = self.tokens + tokens, self.calls + calls, self.calls_ok + calls_ok
        right = self.right.setdefault(record, [])
        if "accuracy" in rewards:
            right.append(rewards["accuracy"])

    def skip(self, run_dir: RunDir, record: str, reason: str, file: str) -> None:
        if (record, reason, None) not in self.skipped:  # once, however often the run is resumed
            self.skipped.add((record, reason, None))
            run_dir.skip(record, reason, file)

    def summary(self, config: RLConfig) -> dict[str, Any]:
        trajectories = self.ends.total()
        return {
            "records": len(self.right),
            "trajectories": trajectories,
            "skipped": len(self.skipped),
            "end_reasons": dict(self.ends.most_common()),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "calls": {"all": self.calls, "ok": self.calls_ok},
            "tool_calls": {PHASE: self.calls / trajectories if trajectories else 0.0},
            "seconds": {PHASE: round(self.seconds, 3)},
            "seed": config.seed,
        }

    def accuracy(self) -> dict[str, Any]:
        """Mean over the records that have an answer, with its interval; empty if none has."""
        means = [float(np.mean(values)) for values in self.right.values() if values]
        return {"accuracy": {PHASE: mean_interval(means).as_dict()}} if means else {}


def _check_same(path: Path, config: RLConfig) -> None:
    """Raises `ConfigError` where a resumed run would mix trajectories of two policies or forms."""
    if not path.is_file():
        return
    before, now = as_tree(load(RLConfig, path)), as_tree(config)
    for key in (*_FIXED, "algorithm.group_size"):
        old, new = before, now
        for name in key.split("."):
            old, new = old[name], new[name]
        if old != new:
            told = f"{old!r}, not {new!r}" if not isinstance(old, dict) else _first_difference(old, new)
            raise ConfigError(f"resume: {key} was {told}: name another --out, or --replace")


def _first_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    name = next(name for name in old if old[name] != new[name])
    return f"{name}={old[name]!r}, not {new[name]!r}"


def _next_step(folder: Path) -> int:
    files = reader.step_files(folder / "trajectories" / PHASE)
    return reader.step_of(files[-1]) + 1 if files else 0


def _batches(records: Records, count: int, done: set[str], size: int) -> Iterable[list[Record]]:
    batch: list[Record] = []
    for index in range(count):
        record = records.source[index]
        if record.id not in done:
            batch.append(record)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _key(record: Record) -> int:
    """What stands for a record in the seeds: its samples do not depend on the records around it."""
    return int.from_bytes(hashlib.blake2b(record.id.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _scored(batch: Sequence[Record], collected: Collected, config: RLConfig) -> list[Trajectory]:
    """All trajectories of a batch, named record/sibling; those of records with an answer have their rewards."""
    by_id = {record.id: record for record in batch}
    members = [one for group in collected.groups for one in group]
    for one in members:
        one.id = f"{one.record_id}/{one.id.rpartition('/')[2]}"
        if by_id[one.record_id].answer.value:
            one.rewards = pyvision.score(one, by_id[one.record_id], config.reward)
    return members


def _lines(summary: dict[str, Any]) -> Iterable[str]:
    yield (
        f"trajectories: {summary['trajectories']:,} of {summary['records']:,} records, {summary['skipped']:,} records "
        f"or lines skipped"
    )
    yield "end reasons: " + ", ".join(f"{count:,} {reason}" for reason, count in summary["end_reasons"].items())
    yield (
        f"sampled: {summary['tokens']:,} tokens, {summary['tokens_per_second']:,} a second of "
        f"{summary['seconds'][PHASE]:,.1f} s, tools included"
    )
    yield f"tool calls: {summary['calls']['all']:,}, of which {summary['calls']['ok']:,} ran without an error"
    if "accuracy" in summary:
        found = summary["accuracy"][PHASE]
        yield f"accuracy: {100 * found['mean']:.1f}% over {found['n']:,} records with an answer"
