"""The HTTP side of `pyvision serve`: routes, streams, and what becomes of a client that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.serving import responses
from pyvision_jax.serving.errors import ApiError
from pyvision_jax.serving.events import CANCELLED, Dialogue, Event
from pyvision_jax.serving.requests import ChatRequest, parse
from pyvision_jax.serving.responses import Choice, delta
from pyvision_jax.serving.service import Order, Service, metrics_text

COUNTERS = (
    *("requests_ok", "requests_refused", "requests_failed", "clients_gone", "prompt_tokens", "sampled_tokens"),
    *("observed_tokens", "tool_calls", "tool_calls_ok"),
)
_LOST = (EndReason.INFRASTRUCTURE, CANCELLED)  # ends that are the server's, or of a client that is gone


@dataclasses.dataclass(frozen=True)
class Gone:
    """The client has closed its connection."""


class Reply:
    """The way from the engine's thread to one HTTP answer: what happens waits in a queue of the event loop."""

    def __init__(self, n: int, prompt_tokens: int):
        self.name = f"chatcmpl-{secrets.token_hex(12)}"
        self.choices = [Choice(index) for index in range(n)]
        self.dialogues: dict[int, Dialogue] = {}
        self.prompt_tokens = prompt_tokens
        self._events: asyncio.Queue[tuple[Dialogue, Event] | Gone | ApiError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def listen(self, one: Dialogue, event: Event) -> None:
        self._put((one, event))

    def refused(self, error: ApiError) -> None:
        self._put(error)

    def _put(self, item: tuple[Dialogue, Event] | ApiError) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)

    async def watch(self, receive: Receive) -> None:
        """Waits until the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(Gone())

    async def deltas(self) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        """(choice, delta) as things happen, None for its end, until all have ended.

        Raises `ClientGone`, and `ApiError` if the dialogues cannot begin or one ends by the server's fault.
        """
        while any(choice.ended is None for choice in self.choices):
            item = await self._events.get()
            if isinstance(item, Gone):
                raise ClientGone
            if isinstance(item, ApiError):
                raise item
            one, event = item
            self.dialogues[one.index] = one
            choice = self.choices[one.index]
            yield one.index, choice.take(event)
            if choice.ended is not None and choice.ended.reason in _LOST:
                raise ApiError(503, None, choice.ended.detail or "the server closes", "infrastructure")


class ClientGone(Exception):
    """Nobody reads the answer."""


class Api:
    """The routes over one service. `name`: what clients call the model. `key`: asked for if not empty."""

    def __init__(self, service: Service, name: str, key: str = ""):
        self.service, self.name, self._key = service, name, key
        self._created = int(time.time())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            exception_handlers={ApiError: self._error, HTTPException: self._error, ClientGone: self._error},
        )

    async def health(self, request: Request) -> Response:
        service = self.service
        if service.failed:
            raise ApiError(503, None, service.failed, "not_running")
        sandbox = service.acting.pool.level
        return _json({"status": "ok", "dialogues": service.open, "slots": service.slots, "sandbox": sandbox})

    async def models(self, request: Request) -> Response:
        self._admit(request)
        length = self.service.acting.config.rollout.max_length
        model = {"id": self.name, "object": "model", "created": self._created, "owned_by": "pyvision"}
        return _json({"object": "list", "data": [{**model, "max_model_len": length}]})

    async def metrics(self, request: Request) -> Response:
        self._admit(request)
        return Response(metrics_text(self.service, COUNTERS), media_type="text/plain; version=0.0.4")

    async def complete(self, request: Request) -> Response:
        self._admit(request)
        service = self.service
        body = await self._body(request)
        protocol = service.acting.config.protocol.name
        asked = await run_in_threadpool(parse, body, self.name, protocol, service.limits)
        service.reserve(asked.n)
        try:
            prompt = await run_in_threadpool(service.prompt, asked)
        except BaseException:
            service.free(asked.n)
            raise
        reply = Reply(asked.n, len(prompt.ids))
        order = service.submit(asked, prompt, reply.listen, reply.refused)
        service.count("prompt_tokens", len(prompt.ids))
        if asked.stream:
            return Stream(self, asked, reply, order)
        async with self.attended(reply, order, request.receive):
            async for _ in reply.deltas():
                pass
            service.count("requests_ok")
            return await run_in_threadpool(self._whole, asked, reply)

    @contextlib.asynccontextmanager
    async def attended(self, reply: Reply, order: Order, receive: Receive) -> AsyncIterator[None]:
        """Watches the client; whatever ends this before the dialogues are through cancels them."""
        watch = asyncio.create_task(reply.watch(receive))
        try:
            yield
        except ClientGone:
            self.service.count("clients_gone")
            raise
        finally:
            watch.cancel()
            if any(choice.ended is None for choice in reply.choices):
                self.service.cancel(order)

    def _whole(self, asked: ChatRequest, reply: Reply) -> Response:
        tokenizer = self.service.acting.host.tokenizer
        choices = []
        for choice in reply.choices:
            one = reply.dialogues[choice.index]
            choices.append(choice.whole(responses.logprobs_of(one, tokenizer) if asked.logprobs else None))
        used = responses.usage(reply.prompt_tokens, reply.choices)
        return _json(responses.completion(reply.name, self.name, choices, used))

    def _admit(self, request: Request) -> None:
        if not self._key:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise ApiError(401, None, "no or a wrong API key: send Authorization: Bearer KEY", "invalid_api_key")

    async def _body(self, request: Request) -> Any:
        # A web page elsewhere can send other types to this machine's loopback without asking first.
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, None, "the body must be sent as content-type: application/json", "invalid_body")
        most, data = self.service.limits.body_bytes, bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                raise ApiError(413, None, f"the body has more than {most:,} bytes, which is the limit", "too_large")
        try:
            return await run_in_threadpool(json.loads, bytes(data))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, None, f"the body is not JSON: {error!s:.200}", "invalid_body") from error

    async def _error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=499)  # that nobody reads
        if isinstance(error, HTTPException):
            error = ApiError(
                error.status_code, None, f"{request.method} {request.url.path}: {error.detail}", "no_route"
            )
        assert isinstance(error, ApiError)
        self.service.count("requests_failed" if error.status >= 500 else "requests_refused")
        return _json(error.body(), error.status)


class Stream(Response):
    """Server-sent events, each sent as soon as it happens."""

    def __init__(self, api: Api, asked: ChatRequest, reply: Reply, order: Order):
        super().__init__(status_code=200, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.api, self.asked, self.reply, self.order = api, asked, reply, order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone, OSError):  # nobody is left to tell
            async with self.api.attended(self.reply, self.order, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._events(send)

    async def _events(self, send: Send) -> None:
        reply, name = self.reply, self.api.name

        async def tell(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        for choice in reply.choices:
            first = delta(choice.index, {"role": "assistant", "content": ""})
            await tell(responses.chunk(reply.name, name, [first]))
        try:
            async for index, content in reply.deltas():
                choice = reply.choices[index]
                if content is not None:
                    await tell(responses.chunk(reply.name, name, [delta(index, content)]))
                else:
                    answer = choice.ended and choice.ended.answer
                    last = delta(index, {"answer": answer}, **choice.end())
                    await tell(responses.chunk(reply.name, name, [last]))
        except ApiError as error:
            self.api.service.count("requests_failed")
            await tell(responses.event(error.body()), more=False)
            return
        if self.asked.include_usage:
            used = responses.usage(reply.prompt_tokens, reply.choices)
            await tell(responses.chunk(reply.name, name, [], usage=used))
        await tell(responses.DONE, more=False)
        self.api.service.count("requests_ok")


def _json(value: Any, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 429 else None
    return Response(responses.dumps(value), status, headers, "application/json")
