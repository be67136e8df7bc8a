"""Trajectories that somebody listens to: they come and go one by one, while others decode on.

`AgentLoop` takes a list of records and gives their trajectories when all are done. `LiveLoop` is the same loop for
requests that arrive at any time: a trajectory begins when it is asked for, tells its listener what it says and runs
while it does, may be cut off at any moment, and gives its slot and its sandbox session back when it ends.

One thread owns a loop, and with it the engine. Others reach it by `post` alone.
"""

from __future__ import annotations

import collections
import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pyvision_jax.agents.loop import AgentLoop
from pyvision_jax.agents.protocol import AgentProtocol, Code, Malformed, Prompt
from pyvision_jax.agents.pyvision import TOOL_OFF
from pyvision_jax.config import ProtocolConfig
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.records import Record
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.requests import Handle, Request, Segment, Stop, mixed_seed
from pyvision_jax.rollout.trajectory import EndReason, Span, ToolCall
from pyvision_jax.serving.events import CANCELLED, REPLIED, STOPPED, Dialogue, Ended, Listen, Ran, Text, Told, Wish
from pyvision_jax.serving.speech import Speech
from pyvision_sandbox import Result, SandboxPool, SandboxUnavailable, Session, observation_text

if TYPE_CHECKING:
    from pyvision_jax.data.image_processing import ProcessedImage

log = logging.getLogger(__name__)


class _Unkept(ImageStore):
    """Nobody asks for the pictures of a dialogue by their hash."""

    def put(self, image: ProcessedImage) -> str:
        return image.hash


class LiveLoop(AgentLoop):
    """See the module. All methods but `post` are for the thread that owns the loop."""

    def __init__(
        self,
        engine: Engine,
        protocol: AgentProtocol,
        pool: SandboxPool,
        config: ProtocolConfig,
        tokenizer: Tokenizer,
        threads: int = 8,
    ):
        super().__init__(engine, protocol, pool, config, tokenizer, _Unkept(), threads)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._alive: dict[Handle, Dialogue] = {}
        self._requests = 0
        self._moved = False  # something has happened in this round
        # Sessions are counted here, as in AgentLoop: whoever has one must never wait behind one that waits for a place.
        self._asked: collections.deque[tuple[Dialogue, str]] = collections.deque()
        self._holding: set[tuple[int, int]] = set()

    @property
    def alive(self) -> int:
        """Dialogues that have not ended."""
        return len(self._alive)

    @property
    def sessions(self) -> int:
        """Places for sandbox sessions that are taken."""
        return len(self._holding)

    def post(self, job: Callable[[], None]) -> None:
        """`job` is called by the owner's thread. From any thread."""
        self._inbox.put(job)

    def begin(self, record: Record, prompt: Prompt, *, n: int, seed: int, wish: Wish, listen: Listen) -> list[Dialogue]:
        """`n` dialogues from one prompt. Raises ValueError for one that the engine does not take."""
        handles = self.engine.submit(
            Request(
                prompt.ids,
                prompt.images,
                group=record.id,
                n=n,
                seeds=[mixed_seed(seed, sibling) for sibling in range(n)],
                max_turn_length=wish.budget and min(wish.budget, self.engine.rollout.max_turn_length),
                sampling=wish.sampling,
            )
        )
        self._requests += 1
        begun = []
        for handle in handles:
            spans = [Span("prompt", 0, len(prompt.ids), 0, False)]
            one = Dialogue(
                record=record,
                prompt=prompt,
                handle=handle,
                place=(self._requests, handle.index),
                seed=handle.seed,
                spans=spans,
                images=len(prompt.images),
                shown=len(prompt.images),
                listen=listen,
                wish=wish,
                speech=Speech(wish.stops),
            )
            self._alive[handle] = one
            begun.append(one)
        return begun

    def carry(self, one: Dialogue, session: Session | None, shown: int) -> None:
        """A dialogue goes on where an earlier one ended: with its session, and its count of pictures by number."""
        one.session, one.shown = session, shown
        if session is not None:
            self._holding.add(one.place)

    def leave(self, one: Dialogue) -> Session | None:
        """The session of a kept dialogue, which is the caller's from here on."""
        session, one.session = one.session, None
        self._holding.discard(one.place)
        return session

    def cancel(self, one: Dialogue) -> None:
        """Ends a dialogue where it stands: its slot is free at once, its session when the call that runs has ended."""
        if not one.ended:
            self._finish(one, CANCELLED)

    def pump(self) -> None:
        """Does all that can be done; where that is nothing, waits for a job and does it."""
        self._moved = False
        self._drain()
        for segment in self.engine.run(between=self._between):
            self._moved = True
            one = self._alive.get(segment.handle)
            if one is not None:
                self._hear(one, segment)
        if not self._moved:
            self._inbox.get()()

    def abandon(self, reason: str, detail: str) -> None:
        """Ends every dialogue; the engine is not asked any more."""
        for one in list(self._alive.values()):
            self._finish(one, reason, detail, release=False)
        self._drain()

    # -- between the chunks -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while True:
            try:
                job = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._moved = True
            job()

    def _between(self) -> None:
        self._drain()
        for one in list(self._alive.values()):
            if one.watched and not one.calling and not one.ended:
                self._peek(one)

    def _peek(self, one: Dialogue) -> None:
        """Tells what an unfinished turn has said so far, and cuts it where the budget or a stop string ends."""
        ids = self.engine.view(one.handle).ids[one.begin + one.speech.fed :]
        ids = ids[: one.left - one.speech.fed]
        if len(ids) and ids[-1] in (self.tokenizer.im_end, self.tokenizer.endoftext):
            return  # the turn is over, its segment on the way
        if len(ids):
            self._say(one, one.speech.feed(self.tokenizer.bytes_of(int(token)) for token in ids))
        if one.speech.stopped:
            self._cut(one, STOPPED)
        elif one.speech.fed >= one.left:
            self._cut(one, EndReason.OVER_LENGTH)

    def _cut(self, one: Dialogue, reason: str) -> None:
        one.turns += 1
        self._close_turn(one, one.speech.fed)
        self._finish(one, reason)

    # -- turns ------------------------------------------------------------------------------------------------------

    def _hear(self, one: Dialogue, segment: Segment) -> None:
        """A turn is over: the rest of its text, and what follows from it."""
        closed = segment.stop is Stop.END
        ids = segment.ids[: one.left]
        whole = len(ids) == len(segment.ids)
        pieces = [self.tokenizer.bytes_of(int(token)) for token in ids]
        if whole and closed:
            pieces.pop()
        elif whole and segment.trim:
            pieces[-1] = pieces[-1][: len(pieces[-1]) - segment.trim]
        self._say(one, one.speech.feed(pieces[one.speech.fed :]))
        if one.wish.logprobs:
            kept = one.speech.fed if one.speech.stopped else len(ids)
            one.tokens.append((ids[:kept], segment.policy_logprobs[:kept]))
        if one.speech.stopped or not whole:
            self._cut(one, STOPPED if one.speech.stopped else EndReason.OVER_LENGTH)
            return
        turn = one.turns
        outcome = self._turn(one, segment)
        text = self._close_turn(one, len(segment.ids))
        action = self.protocol.parse(text)
        if isinstance(action, Malformed) and closed:
            self._finish(one, REPLIED)
        elif isinstance(outcome, EndReason):
            self._finish(one, outcome)
        elif one.left <= 0:
            self._finish(one, EndReason.OVER_LENGTH)
        elif isinstance(outcome, Code):
            one.calling = True
            self._asked.append((one, outcome.text))
            self._call()
        else:
            one.listen(one, Told(turn, action.hint if isinstance(action, Malformed) else TOOL_OFF))
            if not self._append(one, outcome):
                self._finish(one, EndReason.OVER_LENGTH)

    def _say(self, one: Dialogue, text: str) -> None:
        if text and one.wish.stream:
            one.listen(one, Text(len(one.texts), text))

    def _close_turn(self, one: Dialogue, ids: int) -> str:
        """Books a turn of `ids` sampled ids. Its text."""
        rest = one.speech.finish()
        text = one.speech.text
        if not one.wish.stream:
            rest = text
        if rest:
            one.listen(one, Text(len(one.texts), rest))
        one.texts.append(text)
        one.sampled += ids
        one.speech = Speech(one.wish.stops)
        return text

    # -- tool calls -------------------------------------------------------------------------------------------------

    def _call(self) -> None:
        waiting: list[tuple[Dialogue, str]] = []
        while self._asked:
            one, code = self._asked.popleft()
            if one.place not in self._holding and len(self._holding) >= self.pool.max_sessions:
                waiting.append((one, code))
                continue
            self._holding.add(one.place)
            future = self._threads.submit(self._execute, one, code, one.stop)

            def done(future: Future[tuple[Result, float]], one: Dialogue = one, code: str = code) -> None:
                self.post(lambda: self._ran(one, code, future))

            future.add_done_callback(done)
        self._asked.extend(waiting)

    def _ran(self, one: Dialogue, code: str, future: Future[tuple[Result, float]]) -> None:
        one.calling = False
        if one.ended:
            if not one.wish.keep:
                self._end_session(one)
            return
        detail, first = "", one.shown
        try:
            reason = self._result(one, code, future)
        except SandboxUnavailable as error:  # no code runs at all; whoever talks to the policy is told so
            reason = EndReason.INFRASTRUCTURE
            one.calls.append(ToolCall(code, {"status": "infrastructure", "error": {"message": str(error)}}, 0.0))
        call = one.calls[-1]
        if call.result["status"] == "infrastructure":
            detail = call.result["error"]["message"]
            one.listen(one, Ran(one.turns - 1, call, detail, {}))
        else:
            result = future.result()[0]
            named = {f"image_clue_{number}": pixels for number, pixels in enumerate(result.images, start=first)}
            one.listen(one, Ran(one.turns - 1, call, observation_text(result, self.config.max_text), named))
        if reason is not None:
            self._finish(one, reason, detail)

    def _end_session(self, one: Dialogue) -> None:
        if one.session is not None:
            self._threads.submit(one.session.close)
            one.session = None
        self._holding.discard(one.place)
        self._call()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, one: Dialogue, reason: str, detail: str = "", release: bool = True) -> None:
        one.ended = self._moved = True
        del self._alive[one.handle]
        if release:
            if one.wish.keep:
                one.context = self.engine.view(one.handle)
            self.engine.release(one.handle)
        self._asked = collections.deque((other, code) for other, code in self._asked if other is not one)
        waits = one.calling and one.place in self._holding
        if reason == CANCELLED or not release:
            one.stop.set()
        if not waits and not one.wish.keep:
            self._end_session(one)
        observed = sum(span.end - span.start for span in one.spans if span.kind == "observation")
        one.listen(one, Ended(str(reason), one.answer, one.sampled + one.speech.fed, observed, detail))
