"""The engine behind a server: one thread owns it, requests come and go from any other."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence

from pyvision_jax.agents.protocol import Prompt
from pyvision_jax.recipes.acting import Acting
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.serving.dialogue import conversation
from pyvision_jax.serving.errors import ApiError, Limits
from pyvision_jax.serving.events import CANCELLED, Dialogue, Ended, Event, Listen, Ran, Wish
from pyvision_jax.serving.live import LiveLoop
from pyvision_jax.serving.requests import ChatRequest


@dataclasses.dataclass
class Order:
    """A request on its way. `dialogues` is filled by the engine's thread."""

    n: int
    dialogues: list[Dialogue] = dataclasses.field(default_factory=list)


class Service:
    """`submit` and `cancel` may be called from any thread; events arrive on the engine's."""

    def __init__(self, acting: Acting, limits: Limits, threads: int = 8):
        self.acting, self.limits = acting, limits
        host, config = acting.host, acting.config
        self.loop = LiveLoop(acting.engine, host.protocol, acting.pool, config.protocol, host.tokenizer, threads)
        self.counts: collections.Counter[str] = collections.Counter()  # for /metrics
        self.open = 0  # dialogues taken and not ended
        self.failed = ""
        self._closing = False
        self._lock = threading.Lock()  # guards the four above
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> Service:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends every dialogue. May be repeated."""
        with self._lock:
            self._closing = True
        self.loop.post(lambda: None)
        if self._thread.is_alive():
            self._thread.join()
        self.loop.close()

    @property
    def slots(self) -> int:
        return self.acting.config.rollout.slots

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counts[name] += by

    # -- requests ---------------------------------------------------------------------------------------------------

    def reserve(self, n: int) -> None:
        """Takes `n` places in the queue; `free` or the ends of the dialogues give them back. Raises `ApiError`."""
        most = self.slots + self.limits.queue
        with self._lock:
            self._check_running()
            if n > most:
                raise ApiError(400, "n", f"n: {n} exceeds the {most} dialogues that this server holds")
            if self.open + n > most:
                message = f"the queue is full: {self.open} of {most} dialogues are open; try again later"
                raise ApiError(429, None, message, "queue_full")
            self.open += n

    def free(self, n: int) -> None:
        with self._lock:
            self.open -= n

    def prompt(self, asked: ChatRequest) -> Prompt:
        """The ids and pictures of a request, worked out on the caller's thread. Raises `ApiError`."""
        host, config = self.acting.host, self.acting.config
        try:
            prompt = conversation(host.protocol, asked.record, config.image, host.tokenizer)
        except ValueError as error:  # MediaError is one
            raise ApiError(400, "messages", f"messages: {error}") from error
        room = config.rollout.max_length - len(prompt.ids) - 1
        if room < 0:
            most = config.rollout.max_length - 1
            message = f"messages: the prompt has {len(prompt.ids):,} tokens, pictures included; at most {most:,} fit"
            raise ApiError(400, "messages", message, "context_length_exceeded")
        if asked.max_tokens is not None and asked.max_tokens > room + 1:
            message = (
                f"max_tokens: {asked.max_tokens:,} after a prompt of {len(prompt.ids):,}; at most {room + 1:,} fit"
            )
            raise ApiError(400, "max_tokens", message, "context_length_exceeded")
        return prompt

    def submit(self, asked: ChatRequest, prompt: Prompt, listen: Listen, refused: Callable[[ApiError], None]) -> Order:
        """Begins the dialogues, whose places were reserved. `refused` is called if they cannot begin."""
        order = Order(asked.n)
        sampling = self.acting.config.sampling
        if asked.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=asked.temperature)
        wish = Wish(sampling, asked.max_tokens, asked.stops, asked.stream, asked.logprobs)

        def heard(one: Dialogue, event: Event) -> None:
            self._book(one, event)
            listen(one, event)

        def begin() -> None:
            try:
                self._check_running()
                order.dialogues += self.loop.begin(
                    asked.record, prompt, n=asked.n, seed=asked.seed, wish=wish, listen=heard
                )
            except ValueError as error:  # a picture that no vision program holds
                self.free(order.n)
                refused(ApiError(400, "messages", f"messages: {error}"))
            except ApiError as error:
                self.free(order.n)
                refused(error)

        with self._lock:  # what is posted before the thread ends is still done by it
            closed = self._closing
            if not closed:
                self.loop.post(begin)
        if closed:
            begin()
        return order

    def cancel(self, order: Order) -> None:
        """The client is gone: what is left of the order ends now."""

        def stop() -> None:  # behind the order's `begin` in the engine's inbox
            for one in order.dialogues:
                self.loop.cancel(one)

        self.loop.post(stop)

    # -- the engine's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._closing:
                self.loop.pump()
        finally:
            with self._lock:
                failed = not self._closing
                self._closing = True
                self.failed = "the engine has stopped by an error: see the server's log" if failed else ""
            self.loop.abandon(EndReason.INFRASTRUCTURE if failed else CANCELLED, self.failed or "the server closes")

    def _check_running(self) -> None:
        if self._closing:
            raise ApiError(503, None, self.failed or "the server closes", "not_running")

    def _book(self, one: Dialogue, event: Event) -> None:
        if isinstance(event, Ran):
            self.count("tool_calls")
            self.count("tool_calls_ok", int(event.call.ok))
        elif isinstance(event, Ended):
            self.free(1)
            self.count(f"ended_{event.reason}")
            self.count("sampled_tokens", event.sampled)
            self.count("observed_tokens", event.observed)


def metrics_text(service: Service, names: Sequence[str]) -> str:
    """Plain counters in Prometheus' text form; `names` are shown from the start, at 0."""
    with service._lock:
        counts = {name: 0 for name in names} | dict(service.counts)
        gauges = {"dialogues": service.open, "slots": service.slots}
    gauges["sandbox_sessions"] = service.loop.sessions
    gauges["decode_steps"] = service.acting.engine.decode_steps
    lines = []
    for kind, values in (("counter", counts), ("gauge", gauges)):
        for name, value in sorted(values.items()):
            full = f"pyvision_{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
