"""Test session set-up: eight fake CPU devices, the GPU left alone unless asked for, published data by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FAKE_CPU_DEVICES = 8

# Read by XLA when the first backend starts, so it must stand before any test module imports jax.
_flag = "--xla_force_host_platform_device_count"
if _flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={FAKE_CPU_DEVICES}".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")


def _asks_for_gpu(config: pytest.Config) -> bool:
    expression = config.option.markexpr
    return "gpu" in expression.split() and "not gpu" not in expression


def pytest_configure(config: pytest.Config) -> None:
    if not _asks_for_gpu(config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import jax

    backend = jax.default_backend()
    if backend != "gpu":
        reason = f"needs a GPU; jax runs on {backend!r} (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r})"
        if os.environ.get("PYVISION_REQUIRE_GPU") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def test_data() -> Callable[[str], Path]:
    """`test_data("tokenizers")` is the folder of that set below $PYVISION_TEST_DATA; without it the test is skipped."""

    def find(name: str) -> Path:
        root = os.environ.get("PYVISION_TEST_DATA", "")
        if not root:
            pytest.skip(f"test data {name!r} is missing: PYVISION_TEST_DATA is not set")
        path = Path(root) / name
        if not path.is_dir():
            pytest.skip(f"test data {name!r} is missing: {path} is no folder")
        return path

    return find
