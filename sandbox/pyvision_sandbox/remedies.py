"""Why a level of isolation cannot be had on this machine, and what its administrator can do about it."""

import os
import platform

from .policy import LevelUnavailable, SandboxError

_PROC = "/proc"


def reason(level: str, error: SandboxError) -> str:
    """Why a level cannot be had, and what would help, in one line."""
    if not isinstance(error, LevelUnavailable):  # the server died: where from, and the end of what it said
        lines = str(error).splitlines()
        return " ".join(lines[0].split() + (["..."] if lines[2:] else []) + (lines[-1].split() if lines[1:] else []))
    said = " ".join(error.why.split()).removeprefix(f"{error.mechanism}: ")
    why = f"{error.mechanism}: {said}"
    if error.mechanism == "probes":
        return f"{why}. Remedy: none known; this is worth a bug report"
    return f"{why}. Remedy: {'; '.join(remedies(level, error.mechanism))}"


def remedies(level: str, mechanism: str) -> list[str]:
    """What the administrator of this machine, or whoever starts the container, can do; the likeliest first."""
    if _is_gvisor():
        return ["this kernel is gVisor, which has neither Landlock nor all that namespaces need: use a runc host"]
    filtered = _status_field("Seccomp") == "2"
    if level == "namespaces":
        return _for_namespaces(filtered)
    if level == "landlock" and "landlock" in mechanism.lower():
        found = [
            "Linux >= 5.13 with CONFIG_SECURITY_LANDLOCK, and `landlock` in the boot parameter lsm= "
            "(/sys/kernel/security/lsm lists what is on)"
        ]
        if filtered:
            found.insert(0, "a container whose seccomp profile allows landlock_create_ruleset, landlock_add_rule and "
                            "landlock_restrict_self (default profiles do since 2022)")  # fmt: skip
        return found
    if platform.machine() != "x86_64":
        return [f"the system-call filter is written for x86-64, and this is {platform.machine()}"]
    return ["a kernel with CONFIG_SECCOMP_FILTER, and a container profile that allows seccomp and prctl"]


def _for_namespaces(filtered: bool) -> list[str]:
    found = []
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        found.append("sysctl -w kernel.unprivileged_userns_clone=1")
    if _sysctl("user/max_user_namespaces") == "0":
        found.append("sysctl -w user.max_user_namespaces=15000")
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        found.append(
            "an AppArmor profile with `userns,` for this Python, or "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24)"
        )
    profile = _read("self/attr/current")
    if filtered:
        found.append(
            "this process runs under a seccomp filter, as in a container: docker run --security-opt seccomp=unconfined "
            "(or a profile that allows clone, unshare, mount, umount2, pivot_root and sethostname); in Kubernetes "
            "securityContext.seccompProfile.type: Unconfined or Localhost"
        )
    if profile and not profile.startswith("unconfined"):
        found.append(
            f"this process runs under the AppArmor profile {profile.split()[0]}, and container profiles refuse mounts: "
            "--security-opt apparmor=unconfined"
        )
    return found or ["allow unprivileged user namespaces, or run as root with CAP_SYS_ADMIN (docs/sandbox.md)"]


def _is_gvisor() -> bool:
    version = _read("version")
    return "gvisor" in version.lower() or "Sun Jan 10 15:06:54 PST 2016" in version


def _sysctl(name: str) -> str:
    return _read(f"sys/{name}")


def _status_field(name: str) -> str:
    fields = dict(line.split(":", 1) for line in _read("self/status").splitlines() if ":" in line)
    return fields.get(name, "").strip()


def _read(name: str) -> str:
    """A file of /proc; empty where this kernel does not have it or does not show it."""
    try:
        with open(os.path.join(_PROC, name), encoding="utf-8", errors="replace") as f:
            return f.read().strip().rstrip("\0")
    except OSError:
        return ""
