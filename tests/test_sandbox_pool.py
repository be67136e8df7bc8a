"""The pool: many threads, back-pressure, levels, a server that dies, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pyvision_sandbox import Policy, SandboxError, SandboxPool, SandboxUnavailable
from pyvision_sandbox.__main__ import main
from pyvision_sandbox.runner import CHANNEL_FD

POLICY = Policy(profile="numpy_pil", cell_timeout=10)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(POLICY, workers=2) as pool:
        yield pool


def _children(pid: int) -> list[int]:
    """All processes whose parent is `pid`, zombies included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(entry.parent.name))
    return found


def test_report_says_loudly_what_it_does_not_do(caplog: pytest.LogCaptureFixture):
    with SandboxPool(POLICY) as pool:
        assert pool.report.level == "none" and pool.report.summary == "isolation: none; rlimits only"
        assert "WARNING" in str(pool.report) and pool.report.to_dict()["summary"] == pool.report.summary
        on = {m.name: m.on for m in pool.report.mechanisms}
        assert on["rlimits"] and not on["seccomp"] and not on["namespaces"]
    assert "rlimits only" in caplog.text


@pytest.mark.parametrize(
    ("level", "missing"), [("seccomp", "seccomp"), ("landlock", "Landlock"), ("namespaces", "namespaces")]
)
def test_a_higher_level_is_refused_naming_what_is_missing(level: str, missing: str):
    with pytest.raises(SandboxUnavailable, match=f"min_level='{level}'.*{missing}"):
        SandboxPool(POLICY, min_level=level)
    with pytest.raises(ValueError, match="level 'fort' does not exist"):
        SandboxPool(POLICY, min_level="fort")


def test_bad_policies_are_refused():
    for bad in ({"profile": "nope"}, {"memory_mb": 0}, {"cell_timeout": -1.0}, {"max_pixels": 0}):
        with pytest.raises(ValueError, match="sandbox"):
            Policy(**bad)  # type: ignore[arg-type]


def test_eight_threads_with_a_session_each(pool: SandboxPool):
    def work(k: int) -> list[str | None]:
        with pool.session(seed=k, images={"im": np.full((40, 30, 3), k, np.uint8)}) as session:
            out = [session.run(f"k = {k}").repr]
            for turn in range(5):
                out.append(session.run(f"k * 100 + {turn}").repr)
            picture = session.run("im.resize((3, 4))").images[0]
            assert picture.shape == (4, 3, 3) and (picture == k).all()
            return out

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(work, range(24)))
    assert answers == [[None, *(str(k * 100 + t) for t in range(5))] for k in range(24)]


def test_waiting_for_a_lane_is_outside_the_cells_limit(pool: SandboxPool):
    sessions = [pool.session() for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda s: s.run("import time; time.sleep(0.4)", timeout=1.0), sessions))
    assert [r.status for r in results] == ["ok"] * 6
    assert max(r.usage.queue_s + r.usage.wall_s for r in results) > 1.0 > max(r.usage.wall_s for r in results)
    for session in sessions:
        session.close()


def test_closing_a_running_session_cancels_its_cell(pool: SandboxPool):
    session = pool.session()
    timer = threading.Timer(0.2, session.close)
    timer.start()
    result = session.run("import time; time.sleep(30)")
    timer.join()
    assert (result.status, result.session_alive) == ("cancelled", False) and result.usage.wall_s < 5
    assert session.run("1").status == "cancelled"
    session.close()


def test_nothing_is_left_after_fifty_sessions(pool: SandboxPool):
    with pool.session() as warm:
        warm.run("1")
    server, scratch = pool._zygote.process.pid, Path(pool._zygote.scratch)
    before = set(os.listdir("/proc/self/fd")), set(os.listdir(scratch)), os.listdir(f"/proc/{server}/fd")
    for k in range(50):
        session = pool.session(images={"im": np.zeros((64, 64, 3), np.uint8)})
        session.run(
            (
                "open('f', 'w').write('x')",
                "import os; os._exit(2)",
                "import subprocess; p = subprocess.Popen(['sleep', '60'])",
            )[k % 3]
        )
        session.close()
        session.close()
    assert _children(server) == []
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir(scratch)), os.listdir(f"/proc/{server}/fd")) == before
    assert pool._sessions == set()


def test_closing_the_pool_leaves_no_process_and_no_file():
    own = set(os.listdir("/proc/self/fd"))
    pool = SandboxPool(POLICY)
    sessions = [pool.session() for _ in range(3)]
    pids = [int(s.run("import os; os.getpid()").repr or 0) for s in sessions]
    server, scratch = pool._zygote.process.pid, pool._zygote.scratch
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(sessions[0].run, "import time; time.sleep(30)")
        time.sleep(0.1)
        pool.close()
        pool.close()
    assert running.result().status == "cancelled"
    assert sessions[1].run("1").status == "cancelled"
    with pytest.raises(SandboxError, match="closed"):
        pool.session()
    assert not os.path.exists(scratch) and not any(os.path.exists(f"/proc/{pid}") for pid in [server, *pids])
    assert set(os.listdir("/proc/self/fd")) == own


def test_a_dead_server_is_an_infrastructure_error_and_is_replaced():
    with SandboxPool(POLICY) as pool:
        session, idle = pool.session(), pool.session()
        old = pool._zygote
        threading.Timer(0.2, old.process.kill).start()
        with pytest.raises(SandboxError, match="server has ended"):
            session.run("import time; time.sleep(30)")
        with pytest.raises(SandboxError):
            idle.run("1")
        with pytest.raises(SandboxError):
            session.run("1")
        old.process.wait()
        with pool.session() as fresh:
            assert fresh.run("1 + 1").repr == "2"
        assert pool._zygote is not old and not os.path.exists(old.scratch)
        session.close()


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyvision_sandbox.process._module_folders", lambda profile: [])
    with SandboxPool(POLICY) as pool, pytest.raises(SandboxError, match="No module named 'pyvision_sandbox'"):
        pool.session()


def test_a_callers_death_takes_the_server_along():
    """SIGKILL to the process that holds a pool: server, sessions and files go without anybody's help."""
    code = (
        "import sys, time\nfrom pyvision_sandbox import *\n"
        "pool = SandboxPool(Policy(profile='numpy_pil')); s = pool.session()\n"
        "print(pool._zygote.process.pid, s.run('import os; os.getpid()').repr, pool._zygote.scratch, flush=True)\n"
        "time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as caller:
        assert caller.stdout is not None
        server, session, scratch = caller.stdout.readline().split()
        caller.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{p}") for p in (server, session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{p}") for p in (server, session)) and not os.path.exists(scratch)


def test_no_session_is_forked_from_the_caller(pool: SandboxPool):
    """The caller's threads, memory and devices are never in a session: it is a child of the exec'd server."""
    with pool.session() as session:
        parent = int(session.run("import os; os.getppid()").repr or 0)
        modules = session.run("import sys; [m for m in ('jax', 'pyvision_jax', 'pytest') if m in sys.modules]").repr
    assert parent == pool._zygote.process.pid != os.getpid() and modules == "[]"


def test_the_host_part_needs_neither_jax_nor_matplotlib():
    code = (
        "import sys, pyvision_sandbox, pyvision_sandbox.__main__\n"
        "print([m for m in ('jax', 'matplotlib', 'scipy', 'pyvision_jax') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "[]\n"


def test_nothing_is_unpickled_on_the_host():
    import pyvision_sandbox

    for path in Path(pyvision_sandbox.__file__).parent.glob("*.py"):
        if path.name not in ("runner.py",):  # the one that runs code, in a session
            source = path.read_text()
            assert not any(word in source for word in ("import pickle", "marshal", "eval(", "allow_pickle")), path


def test_run_as_a_policy_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from PIL import Image

    Image.new("RGB", (20, 10), "blue").save(tmp_path / "x.png")
    (tmp_path / "good.py").write_text("print(image_clue_0.size)\nimage_clue_0.crop((0, 0, 4, 4))")
    arguments = ["run", str(tmp_path / "good.py"), "--image", str(tmp_path / "x.png"), "--profile", "numpy_pil"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "(20, 10)" in capsys.readouterr().out
    assert Image.open(tmp_path / "out" / "good_0.png").size == (4, 4)
    (tmp_path / "bad.py").write_text("x = 1\n1/0")
    assert main(["run", str(tmp_path / "bad.py"), "--profile", "numpy_pil"]) == 1
    assert "line 2" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert main(["check", "--min-level", "namespaces"]) == 2
    assert "missing" in capsys.readouterr().err


def test_check_holds_here(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "--profile", "numpy_pil"]) == 0
    out = capsys.readouterr().out
    assert "isolation: none; rlimits only" in out and "FAILED" not in out


def test_scratch_folders_lie_in_the_temporary_folder(pool: SandboxPool):
    assert Path(pool._zygote.scratch).parent == Path(tempfile.gettempdir())


def test_more_live_sessions_than_the_channels_number():
    """The server's descriptors pass through every number, the one that a session gives its channel included."""
    with SandboxPool(Policy(profile="numpy_pil"), workers=4) as pool:
        sessions = [pool.session() for _ in range(CHANNEL_FD // 2 + 10)]
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(lambda session: session.run("print(1)"), sessions))
        assert [result.stdout for result in results] == ["1\n"] * len(sessions)
        for session in sessions:
            session.close()
