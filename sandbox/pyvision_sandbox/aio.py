"""The pool for asyncio: the same names, awaitable.

    async with AsyncSandboxPool(Policy(), warm=8) as pool:
        async with await pool.session(images={"image_clue_0": image}) as session:
            result = await session.run("image_clue_0.size")

Coroutines that wait for a lane, a place or their session hold no thread. Cancelling a task that awaits a cell cancels
the cell (status `cancelled`, variables kept if it heeds the interrupt) and returns at once; the cell's lane is free
when it has ended.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .metrics import Metrics
from .policy import Report, SandboxError
from .pool import SandboxPool
from .process import Process
from .result import Result
from .session import Session

Task = TypeVar("Task")
Done = TypeVar("Done")
_STARTERS, _CLOSERS = 4, 2  # threads that start and branch sessions, and that close them


class AsyncSandboxPool:
    """Takes what `SandboxPool` takes; the servers start in `async with` or `open`. Belongs to one event loop."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._arguments = args, kwargs
        self._pool: SandboxPool | None = None

    async def open(self) -> "AsyncSandboxPool":
        """Raises what SandboxPool raises."""
        args, kwargs = self._arguments
        self._starters = ThreadPoolExecutor(_STARTERS, "sandbox-start")
        self._closers = ThreadPoolExecutor(_CLOSERS, "sandbox-close")
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._starters, lambda: SandboxPool(*args, **kwargs))
        self._pool = pool = await _shielded(future, lambda pool: loop.run_in_executor(self._closers, pool.close))
        self._cells = ThreadPoolExecutor(pool.workers, "sandbox-cell")
        self._lanes, self._places = asyncio.Semaphore(pool.workers), asyncio.Semaphore(pool.max_sessions)
        return self

    @property
    def pool(self) -> SandboxPool:
        """The pool below. Raises SandboxError before `open`."""
        if self._pool is None:
            raise SandboxError("the pool is not open: use `async with`, or await open()")
        return self._pool

    @property
    def report(self) -> Report:
        return self.pool.report

    async def metrics(self) -> Metrics:
        return await asyncio.get_running_loop().run_in_executor(self._closers, self.pool.metrics)

    async def session(
        self,
        seed: int | None = None,
        images: Mapping[str, Any] | None = None,
        videos: Mapping[str, bytes | str | os.PathLike[str]] | None = None,
        trusted: bool = False,
    ) -> "AsyncSession":
        """As `SandboxPool.session`."""
        return await self._admit(lambda: self.pool.session(seed, images, videos, trusted))

    async def map(
        self, fn: Callable[[Task], Awaitable[Done]], tasks: Iterable[Task], lanes: int | None = None
    ) -> list[Done]:
        """`[await fn(task) for task in tasks]` in that order, `lanes` at a time.

        A task is taken from `tasks` only when a lane is free for it. The first exception cancels the others.
        """
        free = asyncio.Semaphore(self.pool.workers if lanes is None else lanes)

        async def one(task: Task) -> Done:
            try:
                return await fn(task)
            finally:
                free.release()

        running: list[asyncio.Task[Done]] = []
        try:
            for task in tasks:
                await free.acquire()
                if any(each.done() and each.exception() for each in running):
                    break
                running.append(asyncio.ensure_future(one(task)))
            return list(await asyncio.gather(*running))
        except BaseException:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    async def close(self) -> None:
        """As `SandboxPool.close`."""
        if self._pool is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._closers, self._pool.close))
            for threads in (self._cells, self._starters, self._closers):
                threads.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncSandboxPool":
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _admit(self, start: Callable[[], Session]) -> "AsyncSession":
        """A session in a place of its own. One that comes too late for its caller is closed."""
        await self._places.acquire()
        future = None
        try:
            future = asyncio.get_running_loop().run_in_executor(self._starters, start)
            return AsyncSession(self, await _shielded(future, self._close))
        finally:
            if future is None:
                self._places.release()
            else:
                future.add_done_callback(self._release_if_failed)

    def _release_if_failed(self, future: asyncio.Future[Session]) -> None:
        if future.cancelled() or future.exception() is not None:
            self._places.release()

    def _close(self, session: Session) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(self._closers, session.close)
        future.add_done_callback(lambda _: self._places.release())
        return future


class AsyncSession:
    """As `Session`. Made by `AsyncSandboxPool.session` and `branch`; cells of one session wait for each other."""

    def __init__(self, pool: AsyncSandboxPool, session: Session):
        self._pool, self._session = pool, session
        self._turn = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None

    @property
    def alive(self) -> bool:
        return self._session.alive

    @property
    def replayed(self) -> bool:
        return self._session.replayed

    @property
    def diverged(self) -> str:
        return self._session.diverged

    @property
    def process(self) -> Process | None:
        return self._session.process

    async def run(self, code: str, timeout: float | None = None, bind: Sequence[str] = ()) -> Result:
        """As `Session.run`."""
        cancel, since = threading.Event(), time.monotonic()
        return await self._in_lane(lambda: self._session.run(code, timeout, bind, cancel, since), cancel.set)

    async def recover(self) -> None:
        """As `Session.recover`."""
        await self._in_lane(self._session.recover, lambda: None)

    async def branch(self, private: bool = True) -> "AsyncSession":
        """As `Session.branch`."""
        async with self._turn:
            return await self._pool._admit(lambda: self._session.branch(private))

    async def close(self) -> None:
        """As `Session.close`."""
        if self._closing is None:
            self._closing = self._pool._close(self._session)
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _in_lane(self, fn: Callable[[], Done], cancel: Callable[[], None]) -> Done:
        """Run `fn` in a thread with a lane, when it is this session's turn. Both are kept until it has ended."""
        await self._turn.acquire()
        try:
            await self._pool._lanes.acquire()
        except BaseException:
            self._turn.release()
            raise

        def ended(_: object) -> None:
            self._pool._lanes.release()
            self._turn.release()

        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool._cells, fn)
        except BaseException:  # the pool is closed
            ended(None)
            raise
        future.add_done_callback(ended)
        try:
            return await _shielded(future)
        except asyncio.CancelledError:
            cancel()
            raise


async def _shielded(future: asyncio.Future[Done], abandon: Callable[[Done], object] = lambda _: None) -> Done:
    """What comes of a call in a thread. A cancelled caller goes at once; `abandon` then gets what comes."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else abandon(f.result()))
        raise
