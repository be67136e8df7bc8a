"""A client of the HTTP server, over a scripted policy."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from PIL import Image

from pyvision_jax.recipes.acting import Acting
from pyvision_jax.serving.app import Api
from pyvision_jax.serving.errors import Limits
from pyvision_jax.serving.service import Service
from tests.policy_rig import Script

MODEL = "scripted"


def picture_url(width: int = 96, height: int = 64, color: str = "red") -> str:
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def asked(text: str = "Which digit?", *urls: str, **fields: Any) -> dict[str, Any]:
    """The body of a request with one user message."""
    parts = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}], **fields}


class Client:
    def __init__(self, port: int, service: Service, script: Script):
        self.port, self.service, self.script = port, service, script

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def post(self, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(
                "POST", "/v1/chat/completions", data, {"content-type": "application/json", **(headers or {})}
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        connection = self.connect()
        try:
            connection.request("GET", path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def open_stream(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        data = json.dumps({**body, "stream": True}).encode()
        connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
        return connection, connection.getresponse()

    def stream(self, body: dict[str, Any]) -> list[Any]:
        """All events of a stream; the last is the text [DONE], or an error."""
        connection, answer = self.open_stream(body)
        try:
            assert answer.status == 200, answer.read()
            lines = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
            return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]
        finally:
            connection.close()

    def free(self, seconds: float = 20.0) -> None:
        """Waits until nothing is held any more: slots, places in the queue, sessions."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            held = self.held()
            if not any(held):
                return
            time.sleep(0.02)
        raise AssertionError(f"still held (dialogues, rows, sessions, places): {held}")

    def held(self) -> tuple[int, int, int, int]:
        service = self.service
        pool, engine = service.acting.pool, service.acting.engine
        return service.open, len(engine._rows), pool.metrics().sessions, service.loop.sessions


@contextlib.contextmanager
def server(acting: Acting, script: Script, limits: Limits | None = None, key: str = "") -> Iterator[Client]:
    service = Service(acting, limits or Limits(), threads=4).start()
    app = Api(service, MODEL, key).app()
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=uvicorn_server.run, daemon=True)
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.01)
    try:
        yield Client(uvicorn_server.servers[0].sockets[0].getsockname()[1], service, script)
    finally:
        uvicorn_server.should_exit = True
        thread.join(10)
        service.close()
        assert not thread.is_alive()
