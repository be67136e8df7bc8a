"""The pool: many threads, lanes, places, warm processes, files, servers that die, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pyvision_sandbox import Policy, SandboxError, SandboxPool, SandboxUnavailable, Session
from pyvision_sandbox.__main__ import main
from pyvision_sandbox.frame import CHANNEL_FD
from pyvision_sandbox.metrics import Recorder, Uncountable, files_size, memory

POLICY = Policy(profile="numpy_pil", cell_timeout=10)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def open_at(level: str, policy: Policy = POLICY) -> SandboxPool:
    """A pool at exactly this level; the test is skipped where the machine does not offer it."""
    try:
        return SandboxPool(policy, level, 2, max_level=level, unsafe=level == "none")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(POLICY, workers=2) as pool:
        yield pool


@pytest.fixture
def session(pool: SandboxPool):
    with pool.session(seed=3) as session:
        yield session


def server_of(pool: SandboxPool):
    return pool._zygotes[0]


def kill_server(zygote) -> None:
    """The server itself; at level `namespaces` that is the child of the process which was started."""
    for pid in children(zygote.process.pid) if zygote.level == "namespaces" else {zygote.process.pid}:
        os.kill(pid, signal.SIGKILL)


def ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children(pid: int) -> set[int]:
    """All processes whose parent is `pid`, zombies included."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.add(int(entry.parent.name))
    return found


def until(condition: Callable[[], object], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -------------------------------------------------------------------------------------------------- threads and lanes
def test_bad_policies_are_refused():
    for bad in ({"profile": "nope"}, {"memory_mb": 0}, {"cell_timeout": -1.0}, {"max_pixels": 0}):
        with pytest.raises(ValueError, match="sandbox"):
            Policy(**bad)  # type: ignore[arg-type]
    for bad in ({"workers": 0}, {"zygotes": 0}, {"max_sessions": 0}, {"warm": -1}, {"max_sessions": 1 << 40}):
        with pytest.raises(ValueError):
            SandboxPool(POLICY, **bad)


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


def test_back_pressure_waits_for_a_place():
    with SandboxPool(POLICY, workers=4, max_sessions=2) as pool:
        first, second = pool.session(), pool.session()
        with ThreadPoolExecutor(2) as threads:
            third, fourth = threads.submit(pool.session), threads.submit(first.branch)
            until(lambda: pool.metrics().waiting == 2)
            assert not third.done() and pool.metrics().sessions == 2
            second.close()
            second.close()  # frees one place, not two
            until(lambda: pool.metrics().waiting == 1)
            time.sleep(0.05)
            assert pool.metrics().waiting == 1
            pool.close()
            ends = [future.exception() for future in (third, fourth)]
        assert any(isinstance(end, SandboxError) and "closed" in str(end) for end in ends)


def test_a_failed_start_gives_its_place_back(monkeypatch: pytest.MonkeyPatch):
    with SandboxPool(POLICY, workers=1, max_sessions=1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_start_cold", lambda: (_ for _ in ()).throw(SandboxError("no process")))
            for _ in range(3):
                with pytest.raises(SandboxError, match="no process"):
                    pool.session()
        with pytest.raises(ValueError, match="neither a PIL image"):
            pool.session(images={"x": 3})
        with pool.session() as session:
            assert session.run("1").ok


def test_map_keeps_the_order_and_bounds_what_is_taken(pool: SandboxPool):
    taken, done = [], []

    def tasks() -> Iterator[int]:
        for k in range(12):
            taken.append(k)
            assert len(taken) - len(done) <= 3
            yield k

    def work(k: int) -> str | None:
        with pool.session() as session:
            value = session.run(f"import time; time.sleep({0.02 * (k % 3)}); {k} ** 2").repr
        done.append(k)
        return value

    assert pool.map(work, tasks(), lanes=3) == [str(k * k) for k in range(12)]
    assert pool.map(work, []) == []


def test_map_cancels_what_runs_when_one_fails(pool: SandboxPool):
    begun, statuses = [], []

    def work(k: int) -> None:
        begun.append(k)
        if k == 1:
            time.sleep(0.3)
            raise KeyError("task 1")
        with pool.session() as session:
            statuses.append(session.run("import time; time.sleep(60)", timeout=30).status)
            statuses.append(session.run("1").status)

    start = time.monotonic()
    with pytest.raises(KeyError, match="task 1"):
        pool.map(work, range(10), lanes=2)
    assert begun == [0, 1] and statuses == ["cancelled"] * 2 and time.monotonic() - start < 5
    with pool.session() as session:
        assert session.run("1").ok, "outside of the map nothing is cancelled"


def test_a_cell_can_be_cancelled_and_keeps_its_variables(session: Session):
    session.run("x = 41")
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    result = session.run("import time; time.sleep(30)", cancel=stop)
    assert (result.status, result.session_alive) == ("cancelled", True) and result.usage.wall_s < 2
    assert session.run("1", cancel=stop).status == "cancelled"
    assert session.run("x + 1").repr == "42"
    stop.clear()
    threading.Timer(0.2, stop.set).start()
    deaf = "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"
    result = session.run(deaf, cancel=stop)
    assert (result.status, result.session_alive) == ("cancelled", False)
    assert session.run("'x' in globals()").restarted


def test_closing_a_running_session_cancels_its_cell(pool: SandboxPool):
    session = pool.session()
    timer = threading.Timer(0.2, session.close)
    timer.start()
    result = session.run("import time; time.sleep(30)")
    timer.join()
    assert (result.status, result.session_alive) == ("cancelled", False) and result.usage.wall_s < 5
    assert session.run("1").status == "cancelled"
    session.close()


# -------------------------------------------------------------------------------------------------- warm processes
def test_warm_processes_are_used_and_replaced():
    with SandboxPool(POLICY, workers=2, warm=2) as pool:
        until(lambda: pool.metrics().warm == 2)
        images = {"im": np.full((4, 4), 7, np.uint8)}
        with pool.session(seed=5, images=images) as warm:
            assert pool.metrics().warm_hits == 1
            drawn = warm.run("import random; random.random(), np.random.rand(), np.asarray(im).sum()").repr
        until(lambda: pool.metrics().warm == 2)
        for process in list(pool._warm):
            os.kill(process.pid, signal.SIGKILL)
        with pool.session(seed=5, images=images) as again:
            code = "import random; random.random(), np.random.rand(), np.asarray(im).sum()"
            assert again.run(code).repr == drawn, "warm or cold, the seed decides"
        until(lambda: pool.metrics().warm == 2 and not any(ended(p.pid) for p in list(pool._warm)))
        assert pool.metrics().sessions == 0


def test_warm_processes_outlive_their_server():
    """A server's death ends its warm processes; others from a new server take their place."""
    with SandboxPool(POLICY, warm=1, zygotes=2) as pool:
        until(lambda: pool.metrics().warm == 1)
        for zygote in pool._zygotes:
            zygote.wait_ready()
            kill_server(zygote)
            zygote.process.wait()
        with pool.session() as session:
            assert session.run("1 + 1").repr == "2"
        until(lambda: pool.metrics().warm == 1)


def test_sessions_spread_over_servers():
    with SandboxPool(POLICY, zygotes=2) as pool:
        sessions = [pool.session() for _ in range(4)]
        servers = [session.process.zygote for session in sessions if session.process]
        assert servers[0] is servers[2] is not servers[1] is servers[3]
        for session in sessions:
            assert session.run("1").ok
            session.close()


def test_metrics(pool: SandboxPool):
    before = pool.metrics()
    with pool.session() as session:
        session.run("1")
        session.run("1/0")
        session.run("import os; os._exit(1)")
        assert session.run("1").restarted
        session.run("import os; os.fork()")
        now = pool.metrics()
    assert now.starts.count - before.starts.count == 2 and now.restarts - before.restarts == 1
    assert {k: now.statuses[k] - before.statuses.get(k, 0) for k in ("ok", "error", "crashed")} == {
        "ok": 2, "error": 2, "crashed": 1,
    }  # fmt: skip
    assert 0 < now.starts.p50 <= now.starts.p99 < 5 and now.run.count - before.run.count == 5
    assert now.sessions == before.sessions + 1 and now.memory_mb > 5 and now.memory_is in ("pss", "rss")
    flat = now.flat()
    assert all(type(value) is float for value in flat.values())
    assert flat["sandbox/status_ok"] >= 2 and flat["sandbox/queue_p50"] >= 0 and "sandbox/memory_is" not in flat


def test_percentiles_and_a_sample_of_memory():
    recorder = Recorder()
    for k in range(101):
        recorder.took("starts", k / 100)
    nothing = {"sessions": 0, "waiting": 0, "warm": 0, "memory_mb": 0.0, "memory_is": "pss"}
    spread = recorder.metrics(**nothing, forks_asked=0, forks_refused=0).starts
    assert (spread.count, spread.p50, spread.p99) == (101, 0.5, 0.99) and spread.total == pytest.approx(50.5)
    one, kind = memory([os.getpid()])
    many, _ = memory([os.getpid()] * 100)
    assert kind == "pss" and one > 5 and many == pytest.approx(100 * one, rel=0.2)
    assert memory([]) == (0.0, "pss")


# -------------------------------------------------------------------------------------------------- files on the host
def test_sizes_are_measured_without_following_links(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "up").symlink_to("/usr")
    (tmp_path / "loop").symlink_to(".")
    size = files_size(str(tmp_path), os.getpid())
    assert 1 << 20 <= size < 2 << 20
    with tempfile.TemporaryFile(dir=tmp_path) as nameless:
        nameless.write(bytes(3 << 20))
        nameless.flush()
        assert files_size(str(tmp_path), os.getpid()) >= size + (3 << 20)
    deep = tmp_path / "/".join(["d"] * 70)
    deep.mkdir(parents=True)
    with pytest.raises(Uncountable, match="deeply"):
        files_size(str(tmp_path), os.getpid())
    assert files_size(str(tmp_path / "none"), os.getpid()) == 0


SMALL = dataclasses.replace(POLICY, tmp_mb=4, grace=0.3)
FILL = "import time\nfor k in range(64):\n    open(f'f{k}', 'wb').write(bytes(1 << 20))\n    time.sleep(0.02)"


@pytest.mark.parametrize("level", ["landlock", "namespaces", "none"])
def test_all_files_together_are_limited(level: str):
    with open_at(level, SMALL) as pool, pool.session() as session:
        session.run("x = 41")
        result = session.run(FILL)
        assert result.status == "error" and result.session_alive and result.error is not None, result
        assert result.error["name"] == "OSError" and "No space left" in result.error["message"]
        size = "sum(e.stat().st_size for e in os.scandir('.')) >> 20"
        assert 3 <= int(session.run(f"import os; {size}").repr or 0) <= 16
        assert session.run("for e in list(os.scandir('.')):\n    os.remove(e)\nx + 1").repr in ("42", None)
        assert session.run("open('f', 'wb').write(bytes(2 << 20)); x").repr == "41"


def test_a_session_that_goes_on_writing_is_killed():
    deaf = (
        "import time\nk = 0\nwhile k < 3000:\n    try:\n        k += 1\n"
        "        open(f'f{k}', 'wb').write(bytes(1 << 16))\n        time.sleep(0.01)\n"
        "    except BaseException:\n        pass"
    )
    with open_at("landlock", SMALL) as pool, pool.session() as session:
        result = session.run(deaf)
        assert (result.status, result.session_alive) == ("memory", False), result
        assert result.error is not None and "No space left: the session's files exceed 4 MiB" in result.error["message"]
        again = session.run("import os; os.listdir('.')")
        assert again.restarted and again.repr == "[]"


def test_a_quick_cell_is_measured_after_its_end():
    with open_at("landlock", SMALL) as pool, pool.session() as session:
        result = session.run("for k in range(3):\n    open(f'f{k}', 'wb').write(bytes(2 << 20))\nprint('done')")
        assert (result.status, result.stdout, result.session_alive) == ("error", "done\n", True)
        assert session.run("'what was there before may stay'").ok
        assert session.run("open('more', 'wb').write(bytes(1 << 20))").status == "error"


# -------------------------------------------------------------------------------------------------- trust and failures
def test_below_landlock_only_trusted_code_runs():
    with open_at("seccomp") as pool:
        with pytest.raises(SandboxUnavailable, match="trusted=True"):
            pool.session()
        with pool.session(trusted=True) as session:
            assert session.run("1").level == "seccomp"
        assert pool.metrics().sessions == 0


def test_a_dead_server_is_an_infrastructure_error_and_is_replaced():
    with SandboxPool(POLICY) as pool:
        session, idle = pool.session(seed=1), pool.session(seed=1)
        idle.run("x = np.random.rand(); open('note', 'w').write('n')")
        x = idle.run("x").repr
        old = server_of(pool)
        threading.Timer(0.2, kill_server, [old]).start()
        with pytest.raises(SandboxError, match="the sandbox server"):
            session.run("import time; time.sleep(30)")
        for lost in (idle, session):
            with pytest.raises(SandboxError):
                lost.run("1")
        old.process.wait()
        idle.recover()
        assert idle.replayed and idle.run("x, open('note').read()").repr == f"({x}, 'n')"
        idle.recover()
        assert idle.run("x").repr == x, "what is not lost stays"
        with pool.session() as fresh:
            assert fresh.run("1 + 1").repr == "2"
        assert server_of(pool) is not old and not os.path.exists(old.scratch)
        assert pool.metrics().infrastructure == 3
        session.close()
        idle.close()


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch):
    with SandboxPool(POLICY) as pool:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        kill_server(server_of(pool))
        server_of(pool).process.wait()
        with pytest.raises(SandboxError, match="did not start"):
            pool.session()
        monkeypatch.undo()
        with pool.session() as session:
            assert session.run("1").ok


# -------------------------------------------------------------------------------------------------- nothing is left
def test_nothing_is_left_after_fifty_sessions(pool: SandboxPool):
    with pool.session() as warm:
        warm.run("1")
    server = server_of(pool).process.pid
    homes = Path(server_of(pool).scratch, "homes")
    before = set(os.listdir("/proc/self/fd")), os.listdir(homes), os.listdir(f"/proc/{server}/fd"), children(server)
    for k in range(50):
        session = pool.session(images={"im": np.zeros((64, 64, 3), np.uint8)})
        branch = session.branch() if k % 5 == 0 else None
        session.run(("open('f', 'w').write('x')", "import os; os._exit(2)")[k % 2])
        session.close()
        session.close()
        if branch is not None:
            branch.close()

    def after():
        return set(os.listdir("/proc/self/fd")), os.listdir(homes), os.listdir(f"/proc/{server}/fd"), children(server)

    until(lambda: after() == before)  # the gate closes its descriptors when it hears of an end
    assert pool._sessions == set() and pool._places == pool.max_sessions


def test_closing_the_pool_leaves_no_process_and_no_file():
    own = set(os.listdir("/proc/self/fd"))
    pool = SandboxPool(POLICY, warm=1)
    sessions = [pool.session() for _ in range(3)]
    sessions.append(sessions[2].branch())
    pids = [session.process.pid for session in sessions if session.process]
    server, scratch = server_of(pool).process.pid, server_of(pool).scratch
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(sessions[0].run, "import time; time.sleep(30)")
        time.sleep(0.1)
        pool.close()
        pool.close()
    assert running.result().status == "cancelled"
    assert sessions[1].run("1").status == "cancelled"
    with pytest.raises(SandboxError, match="closed"):
        pool.session()
    with pytest.raises(SandboxError, match="closed"):
        sessions[1].branch()
    assert not os.path.exists(scratch) and all(map(ended, [server, *pids]))
    assert set(os.listdir("/proc/self/fd")) == own


def test_a_callers_death_takes_the_server_along():
    """SIGKILL to the process that holds a pool: servers, sessions and branches go without anybody's help."""
    code = (
        "import time\nfrom pyvision_sandbox import *\n"
        "pool = SandboxPool(Policy(profile='numpy_pil'), warm=1); s = pool.session(); b = s.branch()\n"
        "print(pool._zygotes[0].process.pid, s.process.pid, b.process.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as caller:
        assert caller.stdout is not None
        pids = [int(word) for word in caller.stdout.readline().split()]
        assert len(pids) == 3
        caller.send_signal(signal.SIGKILL)
    until(lambda: all(map(ended, pids)))


def test_no_session_comes_from_the_caller(pool: SandboxPool, session: Session):
    """The caller's threads, memory and devices are never in a session: it is a child of the exec'd server."""
    assert session.process is not None
    assert session.process.pid in children(server_of(pool).process.pid) | {
        grandchild for child in children(server_of(pool).process.pid) for grandchild in children(child)
    }
    modules = session.run("import sys; [m for m in ('jax', 'pyvision_jax', 'pytest') if m in sys.modules]").repr
    assert modules == "[]"


def test_the_host_part_needs_neither_jax_nor_matplotlib():
    code = (
        "import sys, pyvision_sandbox, pyvision_sandbox.__main__\n"
        "print([m for m in ('jax', 'matplotlib', 'scipy', 'pyvision_jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
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


def test_more_live_sessions_than_the_channels_number():
    """The server's descriptors pass through every number, the one that a session gives its channel included."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(7)[1]))\n"
        "from pyvision_sandbox import *\nfrom concurrent.futures import ThreadPoolExecutor\n"
        f"pool = SandboxPool(Policy(profile='numpy_pil'), workers=4, max_sessions={CHANNEL_FD // 2 + 10})\n"
        f"sessions = [pool.session() for _ in range({CHANNEL_FD // 2 + 10})]\n"
        "results = list(ThreadPoolExecutor(8).map(lambda s: s.run('print(1)'), sessions))\n"
        "print({r.stdout for r in results}); pool.close()"
    )
    assert resource.RLIMIT_NOFILE == 7
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == "{'1\\n'}\n", done.stderr
