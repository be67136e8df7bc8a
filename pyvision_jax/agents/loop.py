"""The agent loop: trajectories between the engine, a protocol and the sandbox.

Rows go on decoding while tool calls of other rows run. Results are handed over in the order of submission once nothing
can decode, so that what a trajectory becomes never depends on how long a tool took.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from pyvision_jax.agents.protocol import AgentProtocol, Code, Final, Malformed, Observation, Prompt
from pyvision_jax.agents.pyvision import TOOL_OFF
from pyvision_jax.config import ProtocolConfig, SamplingConfig
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.records import Record
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.requests import Handle, Request, Segment, Stop, mixed_seed
from pyvision_jax.rollout.trajectory import EndReason, Span, ToolCall, Trajectory
from pyvision_sandbox import Result, SandboxError, SandboxPool, SandboxUnavailable, Session

log = logging.getLogger(__name__)


def tool_threads() -> int:
    """Tool calls side by side on this host: their threads wait for the sandbox, whose pool has a limit of its own."""
    return min(32, 4 * (os.cpu_count() or 1))


_TIMEOUTS = ("soft_timeout", "hard_timeout")


@dataclasses.dataclass
class Collected:
    """`groups[i]` are the rollouts of record i in sibling order, empty where the record was skipped."""

    groups: list[list[Trajectory]]
    skipped: list[tuple[str, str]]  # (record id, reason)


@dataclasses.dataclass
class Live:
    """A trajectory on its way."""

    record: Record
    prompt: Prompt
    handle: Handle
    place: tuple[int, int]  # group, sibling
    seed: int
    spans: list[Span]
    segments: list[Segment] = dataclasses.field(default_factory=list)
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    images: int = 0  # in context
    shown: int = 0  # pictures by number: those in context, and those left out of it
    turns: int = 0
    session: Session | None = None
    answer: str | None = None


_Call = tuple[Live, str, Future[tuple[Result, float]]]  # whose, its code, what comes of it


class _Calls:
    """The tool calls of one `collect`, in threads. At most `places` trajectories have a session at a time.

    That is counted here, and not left to the pool, which would hold up whoever asks: trajectories that have a session
    go on, and which ones wait is the same in every run. On leaving, calls that still run are cancelled and sessions
    closed; there are none but after an error.
    """

    def __init__(self, threads: ThreadPoolExecutor, places: int, execute: Callable[..., tuple[Result, float]]):
        self._threads, self._places, self._execute = threads, places, execute
        self._stop = threading.Event()
        self._asked: list[tuple[Live, str]] = []
        self._holding: dict[tuple[int, int], Live] = {}
        self._running: list[_Call] = []
        self._taken: list[_Call] = []
        self._closing: list[Future[None]] = []

    def ask(self, one: Live, code: str) -> None:
        self._asked.append((one, code))
        self._start()

    def _start(self) -> None:
        rest = []
        for one, code in self._asked:
            if one.place in self._holding or len(self._holding) < self._places:
                self._holding[one.place] = one
                self._running.append((one, code, self._threads.submit(self._execute, one, code, self._stop)))
            else:
                rest.append((one, code))
        self._asked = rest

    def take(self) -> list[_Call]:
        """What has been started since the last time, in that order."""
        self._taken, self._running = self._running, []
        return self._taken

    def finish(self, one: Live) -> None:
        """A trajectory has ended: its place is free."""
        if self._holding.pop(one.place, None) is not None and one.session is not None:
            self._closing.append(self._threads.submit(one.session.close))  # before what waits for its place
        self._start()

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        wait([future for _, _, future in (*self._taken, *self._running) if not future.cancel()])
        for one in self._holding.values():
            if one.session is not None:
                one.session.close()
        for future in self._closing:
            future.result()


class AgentLoop:
    """Runs records through an engine. One loop serves training and evaluation, so both see the same policy.

    `store` keeps every picture that a trajectory names by its hash, until the caller drops it. `threads` tool calls run
    side by side (the pool has a limit of its own).
    """

    def __init__(
        self,
        engine: Engine,
        protocol: AgentProtocol,
        pool: SandboxPool,
        config: ProtocolConfig,
        tokenizer: Tokenizer,
        store: ImageStore,
        threads: int = 8,
    ):
        self.engine, self.protocol, self.pool, self.config = engine, protocol, pool, config
        self.tokenizer, self.store = tokenizer, store
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tool")
        self.seconds = {"build": 0.0, "generate": 0.0, "tools": 0.0}  # of the last collect; tools: waiting for results

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def collect(
        self,
        records: Sequence[Record],
        *,
        group_size: int,
        seed: int,
        prefix: str = "",
        sampling: SamplingConfig | None = None,
        prompts: Sequence[Prompt] | None = None,
        keys: Sequence[int] | None = None,
    ) -> Collected:
        """`group_size` rollouts of each record. One whose prompt cannot be built or is too long is skipped and listed.

        `seed` with a record's place, or its number in `keys`, decides its samples. `prompts` replaces what the protocol
        would build (a control). Ids of trajectories are `prefix`place.record/sibling: a record may stand in the list
        twice.
        """
        start = time.perf_counter()
        self.seconds = {"build": 0.0, "generate": 0.0, "tools": 0.0}
        live: dict[Handle, Live] = {}
        skipped: list[tuple[str, str]] = []
        finished: dict[tuple[int, int], Trajectory] = {}
        for index, record in enumerate(records):
            try:
                prompt = prompts[index] if prompts is not None else self.protocol.build(record)
                handles = self.engine.submit(
                    Request(
                        prompt.ids,
                        prompt.images,
                        group=record.id,
                        n=group_size,
                        seeds=[
                            mixed_seed(seed, index if keys is None else keys[index], sibling)
                            for sibling in range(group_size)
                        ],
                        sampling=sampling,
                    )
                )
            except ValueError as error:  # MediaError is one
                skipped.append((record.id, str(error)))
                continue
            for image in prompt.images:
                self.store.put(image)
            end = len(prompt.ids)
            spans = [Span("prompt", 0, end - prompt.prefix, 0, False)]
            if prompt.prefix:
                spans.append(Span("prefix", end - prompt.prefix, end, 0, False))
            for handle in handles:
                place = (index, handle.index)
                live[handle] = Live(record, prompt, handle, place, handle.seed, list(spans))
                live[handle].images = live[handle].shown = len(prompt.images)
        self.seconds["build"] = time.perf_counter() - start

        def finish(one: Live, reason: EndReason) -> None:
            finished[one.place] = self._trajectory(one, reason, prefix)
            self.engine.release(one.handle)
            del live[one.handle]
            calls.finish(one)

        with _Calls(self._threads, self.pool.max_sessions, self._execute) as calls:
            while live:
                start = time.perf_counter()
                ended = 0
                for segment in self.engine.run():
                    ended += 1
                    one = live[segment.handle]
                    outcome = self._turn(one, segment)
                    if isinstance(outcome, EndReason):
                        finish(one, outcome)
                    elif isinstance(outcome, Code):
                        calls.ask(one, outcome.text)
                    elif not self._append(one, outcome):
                        finish(one, EndReason.OVER_LENGTH)
                self.seconds["generate"] += time.perf_counter() - start
                start = time.perf_counter()
                ready = calls.take()
                if live and not ended and not ready:
                    raise RuntimeError(
                        f"{len(live)} trajectories wait and none can run: the engine has no slot for them"
                    )
                for one, code, future in ready:
                    reason = self._result(one, code, future)
                    if reason is not None:
                        finish(one, reason)
                self.seconds["tools"] += time.perf_counter() - start
        groups = [
            [finished[index, sibling] for sibling in range(group_size) if (index, sibling) in finished]
            for index in range(len(records))
        ]
        return Collected(groups, skipped)

    def _turn(self, one: Live, segment: Segment) -> EndReason | Code | Observation:
        """Books a turn and says what follows: an end, code to run, or an observation to append."""
        one.segments.append(segment)
        one.turns += 1
        one.spans.append(Span("policy", segment.start, segment.start + len(segment.ids), one.turns - 1, True))
        if segment.stop in (Stop.LENGTH, Stop.TURN_LENGTH):
            return EndReason.OVER_LENGTH
        if segment.stop is Stop.REPETITION:
            return EndReason.REPETITION
        closed = segment.stop is Stop.END
        data = self.tokenizer.decode_bytes(segment.ids[:-1] if closed else segment.ids)
        text = data[: len(data) - segment.trim].decode("utf-8", "replace")
        action = self.protocol.parse(text)
        if isinstance(action, Final):
            one.answer = action.value
            return EndReason.ANSWERED
        last = one.turns > self.config.max_calls
        if isinstance(action, Malformed):
            if self.config.error_policy == "stop" or last:
                return EndReason.MALFORMED
            return self.protocol.notice(action.hint, closed)
        if last:
            return EndReason.OVER_TURNS
        if self.config.tool == "off":
            return self.protocol.notice(TOOL_OFF, closed)
        return action

    def _execute(self, one: Live, code: str, stop: threading.Event) -> tuple[Result, float]:
        """Run code in the trajectory's session; where the sandbox fails, once more in a rebuilt one."""
        start = time.perf_counter()
        names = [f"image_clue_{one.shown + k}" for k in range(self.config.max_images)]
        for last in (False, True):
            try:
                if one.session is None:
                    one.session = self.pool.session(seed=one.seed % 2**32, images=one.prompt.session_images)
                one.session.recover()
                result = one.session.run(code, bind=names if self.config.bind_figures else (), cancel=stop)
                return result, time.perf_counter() - start
            except SandboxUnavailable:
                raise
            except SandboxError as error:
                if last:
                    raise
                log.warning("a tool call of %s is tried again in a rebuilt session: %s", one.record.id, error)
        raise AssertionError("unreachable")

    def _result(self, one: Live, code: str, future: Future[tuple[Result, float]]) -> EndReason | None:
        """Hands a tool result to its trajectory; the reason if that ends it."""
        try:
            result, seconds = future.result()
        except SandboxUnavailable:  # no code of a policy runs at all
            raise
        except SandboxError as error:
            one.calls.append(ToolCall(code, {"status": "infrastructure", "error": {"message": str(error)}}, 0.0))
            return EndReason.INFRASTRUCTURE
        call = ToolCall(code, result.to_dict(), seconds)
        one.calls.append(call)
        if self.config.error_policy == "stop" and not call.ok:
            return EndReason.TOOL_TIMEOUT if result.status in _TIMEOUTS else EndReason.TOOL_ERROR
        observation = self.protocol.observe(result, one.segments[-1].stop is Stop.END, one.shown)
        if one.images + len(observation.images) > self.config.max_images:
            return EndReason.OVER_IMAGES
        if not self._append(one, observation):
            return EndReason.OVER_LENGTH
        call.images = [self.store.put(image) for image in observation.images]
        one.images += len(observation.images)
        one.shown += len(result.images)
        return None

    def _append(self, one: Live, observation: Observation) -> bool:
        """Text, placeholders and pixels together, or nothing where there is no room."""
        if len(observation.ids) > self.engine.room(one.handle):
            return False
        start = one.segments[-1].start + len(one.segments[-1].ids)
        try:
            self.engine.extend(one.handle, observation.ids, observation.images)
        except ValueError as error:  # a picture that no vision program holds
            log.warning("an observation of %s was refused: %s", one.record.id, error)
            return False
        one.spans.append(Span("observation", start, start + len(observation.ids), one.turns - 1, False))
        return True

    def _trajectory(self, one: Live, reason: EndReason, prefix: str) -> Trajectory:
        view = self.engine.view(one.handle)
        size = len(view.ids)

        def spread(field: Callable[[Segment], np.ndarray], dtype: type) -> np.ndarray:
            out = np.zeros(size, dtype)
            for segment in one.segments:
                out[segment.start : segment.start + len(segment.ids)] = field(segment)
            return out

        return Trajectory(
            id=f"{prefix}{one.place[0]}.{one.record.id}/{one.place[1]}",
            record_id=one.record.id,
            ids=view.ids,
            spans=one.spans,
            logprobs=spread(lambda s: s.logprobs, np.float32),
            policy_logprobs=spread(lambda s: s.policy_logprobs, np.float32),
            entropies=spread(lambda s: s.entropies, np.float32),
            top_entropies=spread(lambda s: np.asarray(s.top_entropies), np.float32)
            if self.engine.sampling.top_entropy
            else None,
            states=spread(lambda s: s.states, np.int32),
            temperatures=spread(lambda s: s.temperatures, np.float32),
            versions=spread(lambda s: s.versions, np.int32),
            positions=view.positions,
            images=[image.hash for image in view.images],
            image_grids=[image.grid for image in view.images],
            calls=one.calls,
            end_reason=reason,
            answer=one.answer,
            group=one.record.id,
            seed=one.seed,
        )
