"""Which files a session may see: the interpreter, system libraries and exactly the packages of its profile.

The packages are gathered in a *farm*: one folder with a link to each top-level name of each distribution needed. It is
the only package folder on the path of the server, so nothing else that is installed (JAX, the trainer) can be imported,
and at the levels that confine files nothing else can be read.
"""

import dataclasses
import glob
import importlib.metadata
import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator

from .policy import SandboxError
from .profiles import PROFILES

_OPENCV = ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python")
_SYSTEM = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/nix/store",
    "/usr/share/fonts", "/usr/share/fontconfig", "/usr/local/share/fonts", "/usr/share/zoneinfo", "/usr/share/locale",
    "/etc/fonts", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types",
)  # fmt: skip
_PROGRAMS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin")
_OWN = os.path.dirname(os.path.abspath(__file__))


@dataclasses.dataclass(frozen=True)
class Farm:
    packages: dict[str, str]  # name in the farm -> where it lies
    roots: tuple[str, ...]  # readable besides, without what lies below `holes`
    holes: tuple[str, ...]  # package folders of the host: not readable
    missing: tuple[str, ...]  # optional distributions of the profile that are not installed

    def plant(self, folder: str) -> None:
        os.mkdir(folder, 0o755)
        for name, place in self.packages.items():
            os.symlink(place, os.path.join(folder, name))


def survey(profile: str, programs: bool = False) -> Farm:
    """What a session of this profile sees on this host. `programs`: executables too.

    Raises SandboxError naming a required distribution that is not installed.
    """
    wanted = PROFILES[profile]
    packages: dict[str, str] = {"pyvision_sandbox": _OWN}
    missing = []
    seen: set[str] = set()
    for name in (*wanted.distributions, "msgpack"):
        if not _gather(name, packages, seen):
            raise SandboxError(f"the sandbox profile {profile!r} needs the package {name!r}, which is not installed")
    for name in wanted.optional:
        alternatives = _OPENCV if name in _OPENCV else (name,)
        if not any(_gather(a, packages, seen) for a in alternatives):
            missing.append(name)
    stdlib = [
        sysconfig.get_path("stdlib"),
        *(os.path.join(sys.base_exec_prefix, lib) for lib in ("lib", sys.platlibdir)),
    ]
    candidates = [*_SYSTEM, *(_PROGRAMS if programs else ()), *map(os.path.realpath, stdlib)]
    roots = [p for p in dict.fromkeys(candidates) if os.path.lexists(p)]
    roots = [p for p in roots if not any(p.startswith(q + "/") for q in roots if not os.path.islink(q))]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    holes = {os.path.join(sys.base_prefix, "lib", version, "site-packages"), *site.getsitepackages()}
    holes |= {p for p in sys.path if p.endswith("-packages")}
    for pattern in ("/usr/lib/python3*", "/usr/local/lib/python3*"):
        holes |= set(glob.glob(pattern + "/*-packages"))
    real = sorted({os.path.realpath(h) for h in holes if os.path.isdir(h)})
    return Farm(packages, tuple(roots), tuple(real), tuple(missing))


def _gather(name: str, packages: dict[str, str], seen: set[str]) -> bool:
    """Add a distribution and what it requires. False if it is not installed."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return True
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    seen.add(key)
    for top in {file.parts[0] for file in distribution.files or ()}:
        place = os.path.realpath(str(distribution.locate_file(top)))
        if top not in ("..", "__pycache__") and not top.endswith(".pth") and os.path.exists(place):
            packages[top] = place
    for module in _modules_without_record(distribution, key):
        packages.setdefault(os.path.basename(module), module)
    for line in distribution.requires or ():
        requirement, _, marker = line.partition(";")
        match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
        if match and "extra" not in marker:
            _gather(match[1], packages, seen)  # one that is not installed belongs to another platform
    return True


def _modules_without_record(distribution: importlib.metadata.Distribution, name: str) -> Iterator[str]:
    """Distribution packages of an operating system have no list of files, or an editable install points elsewhere."""
    if any(f.suffix in (".py", ".so") for f in distribution.files or ()):
        return
    text = distribution.read_text("top_level.txt")
    for module in (text or name.replace("-", "_")).split():
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            package = spec.submodule_search_locations is not None
            yield os.path.realpath(os.path.dirname(spec.origin) if package else spec.origin)


def cover(roots: Iterable[str], holes: Iterable[str]) -> tuple[list[str], list[str]]:
    """(to be readable whole, folders to be listed only), so that all of `roots` but `holes` can be read."""
    whole: list[str] = []
    listed: list[str] = []
    holes = list(holes)

    def walk(place: str) -> None:
        if place in holes:
            return
        if not any(hole.startswith(place + "/") for hole in holes):
            whole.append(place)
            return
        listed.append(place)
        with os.scandir(place) as entries:
            for entry in entries:
                if not entry.is_symlink():
                    walk(entry.path)

    for root in roots:
        if os.path.exists(root):
            walk(os.path.realpath(root))
    return whole, listed
