"""What a session can import, what of it is imported before it starts, and what is changed in it.

The pool reads `PROFILES` and imports nothing else; `preload` runs once in the server, whose sessions share the outcome.
"""

import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Profile:
    distributions: tuple[str, ...]  # must be installed
    optional: tuple[str, ...]  # reported where they are missing
    preload: tuple[str, ...]  # modules


_BASE = (
    "base64", "bisect", "collections", "copy", "csv", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "pathlib", "random", "re", "shutil", "statistics",
    "string", "tempfile", "textwrap", "typing", "numpy", "numpy.fft", "numpy.linalg", "numpy.random", "PIL.Image",
    "PIL.ImageChops", "PIL.ImageDraw", "PIL.ImageEnhance", "PIL.ImageFilter", "PIL.ImageFont", "PIL.ImageOps",
    "PIL.ImageStat", "PIL.JpegImagePlugin", "PIL.PngImagePlugin",
)  # fmt: skip
_VISION = (*_BASE, "matplotlib", "matplotlib.pyplot", "matplotlib.patches", "cv2", "decord")
_FULL = (*_VISION, "scipy.ndimage", "scipy.signal", "scipy.spatial", "scipy.optimize")
_REQUIRED, _PLOTS = ("numpy", "pillow"), ("numpy", "pillow", "matplotlib")
_OPTIONAL = ("opencv-python-headless", "decord")
PROFILES: dict[str, Profile] = {
    "numpy_pil": Profile(_REQUIRED, (), _BASE),
    "vision": Profile(_PLOTS, _OPTIONAL, _VISION),
    "full": Profile(_PLOTS, (*_OPTIONAL, "scipy"), _FULL),
}
_MAY_BE_MISSING = ("cv2", "decord", "scipy")
_NO_PROCESS = "processes cannot be started in this sandbox"
_NO_NETWORK = "there is no network in this sandbox"
# How often decord, at the end of a file, asks its thread for a frame that never comes. Its own 10,240 may take longer
# than a cell has. From about 64 down a thread that is starved of CPU fails a file that is whole.
_DECORD_RETRIES = "2048"


def preload(profile: str) -> list[str]:
    """In the server: import all of it, warm what sessions share. Returns the optional modules that are not there.

    Leaves one thread, and no open file: sessions would share its position. Raises ImportError for a required module.
    """
    from . import show, syscalls, video

    with contextlib.suppress(OSError):  # large arrays from a heap that is not given back: far fewer page faults
        syscalls.mallopt(syscalls.M_MMAP_THRESHOLD, 1 << 30)
        syscalls.mallopt(syscalls.M_TRIM_THRESHOLD, 512 << 20)
        syscalls.mallopt(syscalls.M_TOP_PAD, 1 << 20)
    os.environ["DECORD_EOF_RETRY_MAX"] = _DECORD_RETRIES
    show.install()
    changes = {
        "matplotlib.pyplot": show.change_pyplot, "cv2": show.change_cv2, "decord": video.change_decord,
        "subprocess": _change_subprocess, "socket": _change_socket,
        "multiprocessing.synchronize": _change_locks, "_posixsubprocess": _change_fork_exec,
    }  # fmt: skip
    _change_os()
    for name in changes.keys() & sys.modules.keys():
        changes[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder(changes, show.IPYTHON))
    missing = []
    for name in PROFILES[profile].preload:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:
            if name.split(".")[0] not in _MAY_BE_MISSING or e.name != name.split(".")[0]:
                raise
            missing.append(name)
    _warm()
    gc.collect()
    gc.freeze()  # the collector must not write into pages shared with the sessions
    return missing


def _warm() -> None:
    """Fill the caches that all sessions share, and leave no file open."""
    sys.modules["PIL.Image"].preinit()
    exec(compile("1 + 1", "<warm>", "exec"), {})
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        figure, axes = pyplot.subplots()
        axes.plot([1, 2], label="x")
        axes.set_title("x")
        axes.legend()
        figure.canvas.draw()
        pyplot.close("all")
        sys.modules["matplotlib.font_manager"]._get_font.cache_clear()
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


class _Loader(importlib.abc.Loader):
    """Of a module that is changed once it is there, or (without `loader`) filled from nothing."""

    def __init__(self, loader: Any, change: Callable[[Any], None]):
        self.loader, self.change = loader, change

    def create_module(self, spec: Any) -> Any:
        return None if self.loader is None else self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if self.loader is not None:
            self.loader.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Changes modules whenever they are imported, so nothing is paid for what is not used; makes `stubs`."""

    def __init__(self, changes: dict[str, Callable[[Any], None]], stubs: dict[str, Callable[[Any], None]]):
        self.changes, self.stubs = changes, stubs

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in self.stubs:
            return importlib.machinery.ModuleSpec(name, _Loader(None, self.stubs[name]), is_package=True)
        if name not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self.changes[name])
        return spec


# ------------------------------------------------------------------------------------------------ one clear line
class Refused(PermissionError):
    """What the confinement refused, in words. The runner shortens the traceback of one that reaches the top."""

    def __str__(self) -> str:
        return str(self.strerror)


Refused.__name__ = Refused.__qualname__ = "PermissionError"
Refused.__module__ = "builtins"


def _clear(function: Callable[..., Any], why: str, errors: type[OSError] = PermissionError) -> Callable[..., Any]:
    """Asks the kernel all the same: where it is allowed it works, and the words follow the facts."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except errors as e:
            if e.errno != errno.EPERM and errors is PermissionError:
                raise
            raise Refused(errno.EPERM, why) from None

    return call


def _change_os() -> None:
    system, spawn, waitpid = os.system, os.posix_spawn, os.waitpid

    @functools.wraps(system)
    def checked_system(command: Any) -> int:
        status = system(command)
        if status in (-1, 127 << 8):  # also how a shell tells that it found no such command
            try:
                waitpid(spawn("/bin/sh", ["sh", "-c", ":"], {}), 0)
            except OSError:
                raise Refused(errno.EPERM, _NO_PROCESS) from None
        return status

    os.system = checked_system
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve"):
        setattr(os, name, _clear(getattr(os, name), _NO_PROCESS))


def _change_subprocess(module: Any) -> None:
    module.Popen._execute_child = _clear(module.Popen._execute_child, _NO_PROCESS)


def _change_fork_exec(module: Any) -> None:
    module.fork_exec = _clear(module.fork_exec, _NO_PROCESS)


def _change_locks(module: Any) -> None:
    # They are files in /dev/shm; where that is closed multiprocessing ends here, before it comes to fork.
    module.SemLock.__init__ = _clear(module.SemLock.__init__, _NO_PROCESS, OSError)


def _change_socket(module: Any) -> None:
    def look_up(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except module.gaierror:
                module.socket(module.AF_INET, module.SOCK_DGRAM).close()  # tells whether there is a network at all
                raise

        return call

    module.socket.__init__ = _clear(module.socket.__init__, _NO_NETWORK)
    for name in ("getaddrinfo", "gethostbyname"):
        setattr(module, name, look_up(getattr(module, name)))
