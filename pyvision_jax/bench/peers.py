"""What a user would run instead of the sandbox: a fresh Python, the same below bubblewrap, a Jupyter kernel."""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import io
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

_LIMIT = 120.0  # seconds for a peer to answer
PICTURE = (
    "import numpy as np; from PIL import Image; "
    "image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), np.uint8))"
)
CROP = "image.crop((500, 500, 1524, 1524))"


def picture() -> np.ndarray:
    """Noise, uint8 [2048, 2048, 3]; what `PICTURE` makes in a peer."""
    return np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), np.uint8)


class Unavailable(RuntimeError):
    """This peer cannot be run here; the message says why, in a few words."""


class Starter(Protocol):
    def start(self) -> float:
        """Seconds from nothing to a Python that has imported the modules."""
        ...


def importable(modules: Sequence[str]) -> list[str]:
    """Those of them that are installed."""
    return [name for name in modules if importlib.util.find_spec(name.split(".")[0]) is not None]


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Variables for a peer: one thread for numerical libraries as in the sandbox, a folder for matplotlib's cache."""
    with tempfile.TemporaryDirectory(prefix="pyvision-bench-") as folder:
        yield {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": folder, "TMPDIR": folder, "MPLCONFIGDIR": folder,
            "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip


class FreshPython:
    """`python -c "import ..."`, with a prefix of words before it."""

    def __init__(self, modules: Sequence[str], env: dict[str, str], prefix: Sequence[str] = ()):
        code = f"import {', '.join(modules)}\nprint('ready', flush=True)\ninput()"
        self._command, self._env = [*prefix, sys.executable, "-c", code], env
        self.start()  # reads the files into the disk cache, and lets matplotlib write its font cache

    def start(self) -> float:
        pipe = subprocess.PIPE
        start = time.perf_counter()
        with subprocess.Popen(self._command, env=self._env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            answer = process.stdout.readline()
            seconds = time.perf_counter() - start
            process.kill()
            if answer != "ready\n":
                words = process.stderr.read().strip().splitlines() or ["it does not start"]
                raise Unavailable(words[-1][:100])
        return seconds


def bubblewrap(modules: Sequence[str], env: dict[str, str]) -> FreshPython:
    """The same Python in fresh namespaces over a read-only root."""
    program = shutil.which("bwrap")
    if program is None:
        raise Unavailable("not installed")
    folder = env["MPLCONFIGDIR"]
    jail = ["--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev", "/dev"]
    return FreshPython(modules, env, [program, *jail, "--proc", "/proc", "--bind", folder, folder])


class Jupyter:
    """A kernel of ipykernel in this Python, spoken to by jupyter_client; `start` replaces it by a new one."""

    def __init__(self, modules: Sequence[str], env: dict[str, str]):
        for name in ("jupyter_client", "ipykernel"):
            if importlib.util.find_spec(name) is None:
                raise Unavailable(f"{name} is not installed (extra `bench`)")
        self._manager_module = importlib.import_module("jupyter_client.manager")
        self._import, self._env = f"import {', '.join(modules)}", env
        self._manager: Any = None
        self._client: Any = None
        self.pid = 0

    def start(self) -> float:
        self.close()
        start = time.perf_counter()
        # The kernel runs under this interpreter; whatever kernels the user has registered do not matter.
        manager = self._manager_module.KernelManager(kernel_name="python3")
        manager.kernel_spec.argv[0] = sys.executable
        manager.start_kernel(env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=_LIMIT)
        self._manager, self._client = manager, client
        self.run(self._import)
        seconds = time.perf_counter() - start
        self.pid = manager.provisioner.pid
        return seconds

    def run(self, code: str) -> list[dict[str, Any]]:
        """One cell to its end: the data of what it displayed, by MIME type. Raises Unavailable for an error in it."""
        sent = self._client.execute(code, store_history=False)
        shown = []
        try:
            while True:
                message = self._client.get_iopub_msg(timeout=_LIMIT)
                if message["parent_header"].get("msg_id") != sent:
                    continue
                kind, content = message["msg_type"], message["content"]
                if kind in ("execute_result", "display_data"):
                    shown.append(content["data"])
                elif kind == "error":
                    raise Unavailable(f"the kernel says {content['ename']}: {content['evalue']}"[:100])
                elif kind == "status" and content["execution_state"] == "idle":
                    break
            while self._client.get_shell_msg(timeout=_LIMIT)["parent_header"].get("msg_id") != sent:
                pass
        except queue.Empty:
            raise Unavailable(f"the kernel does not answer within {_LIMIT:.0f} s") from None
        return shown

    def crop(self) -> np.ndarray:
        """The crop as uint8 [1024, 1024, 3] on this side: it travels as a PNG in base64."""
        data = self.run(CROP)[-1]["image/png"]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))

    def close(self) -> None:
        if self._manager is not None:
            self._client.stop_channels()
            self._manager.shutdown_kernel(now=True)
            self._manager = self._client = None
