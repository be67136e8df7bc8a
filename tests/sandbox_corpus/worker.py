"""The process that owns the pools: `python -m sandbox_corpus.worker CONFIG`. One line of JSON in, one out.

{"case": ID} -> {"complaints": [...], "unavailable": reason or None, "seconds": s}; {"close": true} -> what was left at
the end. The first line out tells the report of the pool, or why there is none.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

from pyvision_sandbox import Policy, SandboxPool, SandboxUnavailable

from . import BY_ID, docker_filter
from .case import Case
from .trial import GONE_WITHIN, Places, Trial, descendants, files_below, wait_until

LIMITS: dict[str, Any] = {
    "profile": "vision", "memory_mb": 256, "tmp_mb": 16, "cell_timeout": 10.0, "grace": 0.4, "session_cpu": 60,
}  # fmt: skip
_SET_CHILD_SUBREAPER, _NEW_MOUNTS, _PRIVATE = 36, 0x20000, 0x4000 | 0x40000  # the last: MS_REC | MS_PRIVATE


class Worker:
    def __init__(self, level: str, max_level: str, places: Places):
        self.level, self.max_level, self.places = level, max_level, places
        self.pools: dict[str, SandboxPool | str] = {}  # by the policy's own lines; a string says why there is none
        self.policy({})

    def open_pool(self, **overrides: Any) -> SandboxPool:
        policy = Policy(**{**LIMITS, **overrides})
        return SandboxPool(
            policy, min_level=self.level, max_level=self.max_level, workers=4, unsafe=self.level == "none"
        )

    def policy(self, overrides: Any) -> SandboxPool | str:
        key = json.dumps(dict(overrides), sort_keys=True)
        if key not in self.pools:
            try:
                pool = self.pools[key] = self.open_pool(**overrides)
                # What a pool makes for its first session is there before a case begins.
                pool.session(trusted=self.level in ("seccomp", "none")).close()
            except SandboxUnavailable as e:
                self.pools[key] = str(e)
        return self.pools[key]

    def hello(self) -> dict[str, Any]:
        pool = self.policy({})
        if isinstance(pool, str):
            return {"unavailable": pool}
        return {"unavailable": None, "report": pool.report.to_dict(), "text": str(pool.report)}

    def run(self, case: Case) -> dict[str, Any]:
        start = time.monotonic()
        pool = self.policy(case.policy)
        if isinstance(pool, str):
            return {"complaints": [], "unavailable": pool, "seconds": 0.0}
        trial = Trial(case, self.level, pool, Policy(**{**LIMITS, **case.policy}), self.places, self.open_pool)
        try:
            trial.go()
        except Exception:
            trial.complaints.append(traceback.format_exc()[-1500:])
        return {"complaints": trial.complaints, "unavailable": None, "seconds": round(time.monotonic() - start, 3),
                "statuses": [result.status for result in trial.results]}  # fmt: skip

    def close(self) -> dict[str, Any]:
        for pool in self.pools.values():
            if not isinstance(pool, str):
                pool.close()
        wait_until(lambda: not descendants(os.getpid()), GONE_WITHIN)
        processes, files = descendants(os.getpid()), files_below(self.places.scratch)
        complaints = [f"processes are left: {processes}"] if processes else []
        return {"complaints": complaints + ([f"files are left: {sorted(files)[:5]}"] if files else [])}


def main(config: dict[str, Any], answers: TextIO) -> None:
    if os.geteuid() == 0:
        # A mount namespace of its own: mounts made by a sandbox that is broken end with this process.
        libc = ctypes.CDLL(None)
        if libc.unshare(_NEW_MOUNTS) == 0:
            libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None)
    if config["docker"]:
        docker_filter.confine(landlock=config["docker"] != "without landlock")
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    worker = Worker(config["level"], config["max_level"], Places(**config["places"]))
    print(json.dumps(worker.hello()), file=answers, flush=True)
    for line in sys.stdin:  # until the test closes it
        request = json.loads(line)
        answer = worker.close() if "close" in request else worker.run(BY_ID[request["case"]])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # What anything else prints goes to the log.
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(json.loads(sys.argv[1]), private)
