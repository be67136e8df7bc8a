"""Starts the worker process of a mode: as root, as an ordinary user made for the test, under a Docker-like filter."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# What a session of the profile `vision` imports; optional ones where they are installed.
DISTRIBUTIONS = ("numpy", "pillow", "matplotlib", "msgpack", "opencv-python-headless", "decord")
_ANSWER_LIMIT = 120


class CannotRun(RuntimeError):
    """This test run cannot start such a worker; the message says why."""


def may_read(path: Path) -> bool:
    """Whether any user reaches this file."""
    real = Path(os.path.realpath(path))
    return all(p.stat().st_mode & stat.S_IXOTH for p in real.parents) and bool(real.stat().st_mode & stat.S_IROTH)


def _closure(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of these names and of what they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            if "extra ==" not in line:
                waiting.append(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0])
    return found


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _copy_packages(target: Path) -> None:
    for distribution in _closure(DISTRIBUTIONS).values():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                _put(source, target / file)


def _copy_own(target: Path) -> None:
    for source in (ROOT / "sandbox" / "pyvision_sandbox", ROOT / "tests" / "sandbox_corpus"):
        for file in source.rglob("*.py"):
            place = target / source.name / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def _interpreter(base: Path) -> str:
    """A Python of this version that any user may run: the system's, or a copy of this one."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        if Path(candidate).exists() and may_read(Path(candidate)):
            return candidate
    real, library = Path(os.path.realpath(sys.executable)), Path(os.__file__).parent
    ignored = shutil.ignore_patterns(
        "site-packages", "test", "idlelib", "tkinter", "ensurepip", "config-*", "__pycache__"
    )
    shutil.copytree(library, base / "python" / "lib" / library.name, ignore=ignored)
    _put(real, base / "python" / "bin" / version)
    return str(base / "python" / "bin" / version)


def _runs(python: str, path: list[str], user: int) -> str:
    """Empty, or why this interpreter does not import what the sandbox needs."""
    done = subprocess.run(
        [python, "-c", "import ctypes, importlib.metadata, msgpack, numpy, PIL.Image, pyvision_sandbox"],
        user=user, group=user, extra_groups=[], env={"PYTHONPATH": ":".join(path)}, cwd="/",
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stderr.strip()[-300:] or f"it exits with {done.returncode}" if done.returncode else ""


def unused_uid() -> int:
    """A uid that no account has and under which nothing runs."""
    running = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            running.add(os.stat(f"/proc/{name}").st_uid)
    while True:
        uid = 40_000 + secrets.randbelow(20_000)
        try:
            pwd.getpwuid(uid)
        except KeyError:
            if uid not in running:
                return uid


class Worker:
    """A running worker. `hello` is its first answer."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process, self.log = process, log
        self.hello = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker has ended: {self.log.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()


def _places(base: Path, user: int) -> dict[str, str]:
    folders = {name: base / name for name in ("home", "public", "scratch")}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, user, user)
    folders["public"].chmod(0o777)
    paths = {name: str(folder) for name, folder in folders.items()}
    return {**paths, "base": str(base), "repo": str(ROOT), "canary": f"CANARY-{secrets.token_hex(16)}"}


@contextlib.contextmanager
def worker(level: str, ordinary_user: bool = False, docker: str = "") -> Iterator[Worker]:
    """A worker whose pools run at exactly this level. Raises CannotRun where this test run cannot start it.

    docker: "" for none, "with landlock", or "without landlock" for an older one.
    """
    if os.geteuid() and not ordinary_user:
        raise CannotRun("this mode needs root")
    base = Path(tempfile.mkdtemp(prefix="pyvision-corpus-"))
    base.chmod(0o755)
    try:
        user = unused_uid() if ordinary_user and os.geteuid() == 0 else os.geteuid()
        python, path = sys.executable, [str(ROOT / "sandbox"), str(ROOT / "tests")]
        if user != os.geteuid() and (
            why := _runs(python, path, user) if may_read(Path(python)) else "it is not readable"
        ):
            _copy_packages(base / "site-packages")
            _copy_own(base / "own")
            python, path = _interpreter(base), [str(base / "own"), str(base / "site-packages")]
            if missing := _runs(python, path, user):
                raise CannotRun(f"an ordinary user can run neither this Python ({why}) nor a copy of it: {missing}")
        places = _places(base, user)
        # Under the filter the pool has to find out by itself what it cannot have.
        config = {"level": level, "max_level": "namespaces" if docker else level, "docker": docker, "places": places}
        environment = {
            "PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": places["home"], "TMPDIR": places["scratch"],
            "LANG": "C.UTF-8",
            "PYTHONPATH": ":".join(path), "PYVISION_SECRET": places["canary"], "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        demote: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if user != os.geteuid() else {}
        with open(base / "log", "w") as log:
            process = subprocess.Popen(
                [python, "-m", "sandbox_corpus.worker", json.dumps(config)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd="/",
                start_new_session=True, **demote,
            )  # fmt: skip
        try:
            yield Worker(process, base / "log")
        finally:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(_ANSWER_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
    finally:
        shutil.rmtree(base)
