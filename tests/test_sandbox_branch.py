"""Branches: live clones and replays, their files, their origins, and the order in which families are closed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_sandbox_pool import POLICY, ended, open_at, until

from pyvision_sandbox import BranchUnsafe, SandboxError, SandboxPool, Session


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(POLICY, workers=2) as pool:
        yield pool


@pytest.fixture(params=["namespaces", "landlock", "seccomp"], scope="module")
def level_pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    with open_at(request.param) as pool:
        yield pool


def values(session: Session, code: str = "x.tolist(), open('note').read()") -> str | None:
    result = session.run(code)
    assert result.ok, result.error
    return result.repr


def test_a_branch_goes_on_by_itself(level_pool: SandboxPool):
    """Variables and files, at each level: cloned, or rebuilt by replay."""
    with level_pool.session(seed=1, trusted=True) as trunk:
        trunk.run("import random\nx = np.arange(3)\nopen('note', 'w').write('trunk')\ny = random.random()")
        branch = trunk.branch()
        assert branch.replayed == (level_pool.level != "namespaces") and not branch.diverged
        assert values(branch, "y") == values(trunk, "y") and values(branch, "random.random()") == values(
            trunk, "random.random()"
        )
        branch.run("x[0] = 99; open('note', 'w').write('branch')")
        assert values(branch) == "([99, 1, 2], 'branch')" and values(trunk) == "([0, 1, 2], 'trunk')"
        twig = branch.branch()
        trunk.run("x[1] = 50")
        twig.run("x[2] = 77")
        assert values(twig) == "([99, 1, 77], 'branch')" and values(branch) == "([99, 1, 2], 'branch')"
        branch.close()
        assert values(twig) == "([99, 1, 77], 'branch')", "a branch outlives what it came from"
        twig.close()
        assert values(trunk) == "([0, 50, 2], 'trunk')"


def test_a_branch_in_the_same_files(level_pool: SandboxPool):
    with level_pool.session(trusted=True) as trunk:
        trunk.run("x = np.arange(3); open('note', 'w').write('trunk')")
        with trunk.branch(private=False) as branch:
            assert not branch.replayed
            branch.run("x[0] = 99; open('note', 'w').write('branch')")
            assert values(branch) == "([99, 1, 2], 'branch')" and values(trunk) == "([0, 1, 2], 'branch')"
        assert values(trunk) == "([0, 1, 2], 'branch')"


def test_trees_are_closed_in_any_order(level_pool: SandboxPool):
    """A closed origin stays, stopped, until the last of its branches is closed; then every process is gone."""
    private = level_pool.level == "namespaces"
    before = level_pool._places
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)):
        trunk = level_pool.session(trusted=True)
        trunk.run("x = 1")
        left = trunk.branch(private)
        right = trunk.branch(private)
        family = [trunk, left, right, left.branch(private)]
        pids = [member.process.pid for member in family if member.process]
        for k in order:
            assert family[k].run("x").repr == "1"
            family[k].close()
        until(lambda pids=pids: all(map(ended, pids)))
    assert level_pool._places == before


def test_a_closed_origin_of_a_branch_is_stopped(pool: SandboxPool):
    trunk = pool.session()
    spin = "import threading\ndef f():\n    while True: pass\nt = threading.Thread(target=f, daemon=True)"
    trunk.run(spin)
    branch = trunk.branch()
    assert not branch.replayed
    threading.Timer(0.2, trunk.close).start()
    assert trunk.run("while True: pass").status == "cancelled"
    assert branch.run("1").ok
    branch.close()


def test_a_session_with_threads_is_replayed(pool: SandboxPool):
    with pool.session(seed=2, images={"im": np.full((4, 4), 7, np.uint8)}) as trunk:
        trunk.run("import threading, time\nx = np.random.rand(3); open('note', 'w').write('trunk')")
        trunk.run("display(im)", bind=["seen"])
        trunk.run("1/0")
        trunk.run("t = threading.Thread(target=time.sleep, args=(600,), daemon=True); t.start()")
        with trunk.branch() as branch:
            assert branch.replayed and not branch.diverged
            assert values(branch) == values(trunk) and values(branch, "seen.size, im.size") == "((4, 4), (4, 4))"
            with branch.branch() as twig:
                assert values(twig) == values(trunk)
        with pytest.raises(BranchUnsafe, match="threads"):
            trunk.branch(private=False)
        assert values(trunk, "t.is_alive()") == "True"
    assert pool.metrics().replays >= 2


def test_without_a_gate_there_is_only_replay():
    with open_at("none") as pool, pool.session() as trunk:
        trunk.run("import os, time\nx = 3; open('note', 'w').write('trunk'); pid = os.getpid()\nprint(time.time_ns())")
        with trunk.branch() as branch:
            assert branch.replayed and values(branch, "x, open('note').read()") == "(3, 'trunk')"
            assert branch.diverged.startswith("cell 1 of 1"), "it printed another time"
        with pytest.raises(BranchUnsafe):
            trunk.branch(private=False)


def test_replays_have_a_bound_and_may_fail(tmp_path: Path):
    policy = dataclasses.replace(POLICY, max_code=1500)
    with open_at("none", policy) as pool, pool.session() as trunk:
        trunk.run("x = 1" + "  # long" * 100)
        with trunk.branch() as branch:
            assert branch.run("x").repr == "1"
        flag = tmp_path / "flag"
        trunk.run(f"import os\nif os.path.exists({str(flag)!r}): os._exit(3)\nopen({str(flag)!r}, 'w')")
        with pytest.raises(SandboxError, match="ended at cell 2 of 2: crashed"):
            trunk.branch()
        assert trunk.run("x" + "  # long" * 100).repr == "1"
        with pytest.raises(SandboxError, match="more than 1500 bytes"):
            trunk.branch()
        assert pool.metrics().sessions == 1 and trunk.run("x").repr == "1"


def test_branches_after_a_crash(pool: SandboxPool):
    """The branch of a dead session is as dead; a branch whose origin crashes is rebuilt from its own cells."""
    with pool.session() as trunk:
        trunk.run("x = 1")
        branch = trunk.branch()
        branch.run("x = 2")
        assert trunk.run("import os; os._exit(3)").status == "crashed"
        with trunk.branch() as late:
            result = late.run("'x' in globals()")
            assert result.restarted and result.repr == "False"
        with pytest.raises(SandboxError, match="branched from has ended"):
            branch.run("x")
        with pytest.raises(SandboxError):
            branch.branch()
        branch.recover()
        assert branch.replayed and branch.run("x").repr == "2"
        assert trunk.run("'x' in globals()").restarted
        branch.close()


def test_a_branch_outlives_an_origin_that_was_killed(pool: SandboxPool):
    with pool.session() as trunk:
        trunk.run("x = 1")
        with trunk.branch() as branch:
            deaf = "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass"
            assert trunk.run(deaf, timeout=0.2).status == "hard_timeout"
            assert branch.run("x").repr == "1" and not branch.replayed
            assert trunk.run("'x' in globals()").restarted


def test_a_session_that_will_not_fork_is_rebuilt(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch):
    """Code that breaks the runner gains nothing: the branch comes from a replay, and the origin is told to be lost."""
    monkeypatch.setattr("pyvision_sandbox.session._BRANCH_LIMIT", 0.5)
    with pool.session() as trunk:
        trunk.run("x = 1")
        trunk.run("import sys\nsys.modules['pyvision_sandbox.branching'].serve = lambda *_: None")
        with trunk.branch() as branch:
            assert branch.replayed and branch.run("x").repr == "1"
        with pytest.raises(SandboxError, match="is lost: a branch could not be made"):
            trunk.run("x")
        trunk.recover()
        assert trunk.run("x").repr == "1"


def test_the_level_is_on_each_result(level_pool: SandboxPool):
    with level_pool.session(trusted=True) as session:
        assert session.run("1").level == level_pool.report.level == level_pool.level
        assert session.run("1").to_dict()["level"] == level_pool.level
