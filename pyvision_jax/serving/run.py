"""`pyvision serve`: from a configuration to a server that runs until it is interrupted."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from pyvision_jax.agents.loop import tool_threads
from pyvision_jax.config import RLConfig
from pyvision_jax.config_load import ConfigError
from pyvision_jax.recipes.acting import open_policy
from pyvision_jax.recipes.build import build_host
from pyvision_jax.serving.app import Api
from pyvision_jax.serving.errors import Limits
from pyvision_jax.serving.service import Service

_GRACE = 5  # seconds that open answers have at the end


def serve(
    config: RLConfig, name: str, host: str, port: int, key: str, limits: Limits, say: Callable[[str], None]
) -> None:
    """Serves until SIGINT or SIGTERM. Raises `ConfigError` for an address that cannot be had, before any weights are
    read, and what `recipes.acting.open_policy` raises."""
    pieces = build_host(config)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from error
    with listener, open_policy(config, pieces) as acting:
        service = Service(acting, limits, tool_threads()).start()
        try:
            if not is_loopback(host):
                open_to = "whoever has the key" if key else "anyone (no --api-key is set)"
                say(f"warning: {host} is not loopback: {open_to} can use this policy and its sandbox")
            shown = f"[{host}]" if ":" in host else host
            say(f"sandbox: {acting.pool.report.summary}")
            say(f"serving {name} at http://{shown}:{listener.getsockname()[1]}/v1 (docs/serving.md)")
            options = uvicorn.Config(
                Api(service, name, key).app(), log_level="warning", timeout_graceful_shutdown=_GRACE, lifespan="off"
            )
            uvicorn.Server(options).run(sockets=[listener])
        finally:
            service.close()


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
