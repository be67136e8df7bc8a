"""The asyncio twin: many coroutines on few threads, cancelled tasks, places, and the loop that never waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from pyvision_sandbox import AsyncSandboxPool, Policy, SandboxError

POLICY = Policy(profile="numpy_pil", cell_timeout=10)
SLEEP = "import time; time.sleep(30)"


def with_pool(body: Callable[[AsyncSandboxPool], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        async with AsyncSandboxPool(POLICY, **options) as pool:
            await body(pool)

    asyncio.run(asyncio.wait_for(run(), 60))


class Heart:
    """Beats in the loop; the longest pause between two beats tells whether anything has blocked it."""

    async def __aenter__(self) -> Heart:
        self.longest, self._task = 0.0, asyncio.create_task(self._beat())
        return self

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()


async def until(condition: Callable[[], object], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_the_same_names_awaited():
    async def body(pool: AsyncSandboxPool) -> None:
        images = {"im": np.full((6, 5, 3), 9, np.uint8)}
        async with await pool.session(seed=1, images=images) as session:
            result = await session.run("x = 3\nim.size, x")
            assert result.repr == "((5, 6), 3)"
            assert result.level == pool.report.level and session.alive and session.process is not None
            assert (await session.run("display(im)", bind=["seen"])).bound == ["seen"]
            async with await session.branch() as branch:
                assert branch.replayed == (pool.report.level != "namespaces") and not branch.diverged
                await branch.run("x = 4")
                assert (await session.run("x")).repr == "3" and (await branch.run("x, seen.size")).repr == "(4, (5, 6))"
            await session.recover()
            assert (await session.run("x")).repr == "3"
            with pytest.raises(ValueError):
                await session.run("1", bind=["no name"])
            assert (await session.run("x")).repr == "3", "an error gives the lane and the turn back"
        assert (await session.run("1")).status == "cancelled"
        metrics = await pool.metrics()
        assert metrics.sessions == 0 and metrics.branches + metrics.replays == 1
        with pytest.raises(ValueError, match="neither a PIL image"):
            await pool.session(images={"x": 3})

    with_pool(body, workers=2, warm=1)


def test_a_hundred_coroutines_hold_few_threads():
    async def body(pool: AsyncSandboxPool) -> None:
        before = threading.active_count()

        async def one(k: int) -> tuple[str | None, float]:
            async with await pool.session() as session:
                result = await session.run(f"import time; time.sleep(0.03); {k} * 2")
                return result.repr, result.usage.queue_s

        async with Heart() as heart:
            answers = await asyncio.gather(*(one(k) for k in range(100)))
            assert threading.active_count() <= before + 2 + 4 + 2
        assert [a for a, _ in answers] == [str(2 * k) for k in range(100)]
        assert max(queued for _, queued in answers) > 0.02, "the wait for a lane is told"
        assert heart.longest < 2
        assert (await pool.metrics()).sessions == 0

    with_pool(body, workers=2, max_sessions=20)


def test_cells_of_one_session_wait_for_each_other():
    async def body(pool: AsyncSandboxPool) -> None:
        async with await pool.session() as session, await pool.session() as other:
            await session.run("seen = []")
            cells = [asyncio.create_task(session.run(f"seen.append({k})")) for k in range(20)]
            assert (await other.run("1")).ok
            await asyncio.gather(*cells)
            assert (await session.run("seen")).repr == str(list(range(20)))

    with_pool(body, workers=2)


def test_cancelling_a_task_cancels_its_cell_and_keeps_the_variables():
    async def body(pool: AsyncSandboxPool) -> None:
        async with await pool.session() as session, Heart() as heart:
            await session.run("x = 41")
            start = time.monotonic()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.run(SLEEP), 0.3)
            assert time.monotonic() - start < 1
            assert (await session.run("x + 1")).repr == "42"
            assert (await pool.metrics()).statuses["cancelled"] == 1
            waiting = asyncio.create_task(session.run(SLEEP))
            await asyncio.sleep(0.2)
            behind = asyncio.create_task(session.run("x = 0"))
            await asyncio.sleep(0)
            behind.cancel()  # has not begun: nothing is left of it
            waiting.cancel()
            assert (await session.run("x")).repr == "41"
            assert pool._lanes._value == 1 and not session._turn.locked()
            running = asyncio.create_task(session.run(SLEEP))
            await asyncio.sleep(0.2)
            await session.close()
            assert (await running).status == "cancelled"
        assert heart.longest < 2

    with_pool(body, workers=1)


def test_places_are_waited_for_without_a_thread_and_given_back():
    async def body(pool: AsyncSandboxPool) -> None:
        first = await pool.session()
        second = await pool.session()
        late = [asyncio.create_task(pool.session()) for _ in range(12)]
        await asyncio.sleep(0.2)
        assert pool.pool.metrics().waiting == 0, "they wait in the loop, not in threads"
        for task in late[2:]:
            task.cancel()
        await first.close()
        await first.close()
        third = await late[0]
        assert (await third.run("1")).ok and not late[1].done()
        starting = late[1]
        await second.close()
        await asyncio.sleep(0)
        starting.cancel()  # on its way: the session that comes is closed
        await third.close()
        await until(lambda: pool._places._value == 2)
        assert (await pool.metrics()).sessions == 0
        for _ in range(3):
            with pytest.raises(ValueError):
                await pool.session(seed=1 << 70)
        await until(lambda: pool._places._value == 2)

    with_pool(body, workers=1, max_sessions=2)


def test_map_keeps_the_order_and_cancels():
    async def body(pool: AsyncSandboxPool) -> None:
        running = 0

        async def work(k: int) -> str | None:
            nonlocal running
            running += 1
            assert running <= 3
            async with await pool.session() as session:
                value = (await session.run(f"{k} ** 2")).repr
            running -= 1
            return value

        assert await pool.map(work, range(10), lanes=3) == [str(k * k) for k in range(10)]
        begun = []

        async def failing(k: int) -> None:
            begun.append(k)
            if k == 1:
                await asyncio.sleep(0.2)
                raise KeyError("task 1")
            async with await pool.session() as session:
                await session.run(SLEEP)

        start = time.monotonic()
        with pytest.raises(KeyError, match="task 1"):
            await pool.map(failing, range(10), lanes=2)
        assert begun == [0, 1] and time.monotonic() - start < 5
        await until(lambda: pool.pool.metrics().sessions == 0)

    with_pool(body, workers=2)


def test_closing_ends_what_runs_and_an_unopened_pool_says_so():
    async def body() -> None:
        pool = AsyncSandboxPool(POLICY, workers=2)
        with pytest.raises(SandboxError, match="not open"):
            _ = pool.report
        await pool.close()
        await pool.open()
        session = await pool.session()
        running = asyncio.create_task(session.run(SLEEP))
        await asyncio.sleep(0.2)
        await pool.close()
        assert (await running).status == "cancelled"
        opening = asyncio.create_task(AsyncSandboxPool(POLICY).open())
        await asyncio.sleep(0.05)
        opening.cancel()  # the pool that comes is closed
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until(lambda: not any(t.name == "sandbox-gate" for t in threading.enumerate()))

    asyncio.run(asyncio.wait_for(body(), 60))
