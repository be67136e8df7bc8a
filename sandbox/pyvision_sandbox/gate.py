"""The pool's answer to a session that asks for a new process (seccomp user notification). Default: refused.

A session's filter turns the two exact clone calls of a branch into a question that waits here, and refuses all others.
One is let through while the pool branches that session: from this process, with exactly these flags, which lie in a
register and so cannot change between the look and the call. A session that asks in a loop is answered ever more
slowly; others do not wait for it.
"""

import contextlib
import dataclasses
import errno
import fcntl
import heapq
import os
import select
import struct
import threading
import time

_RECV, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, _SEND
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_NOTE = struct.Struct("<QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags, then seccomp_data: nr, arch, ip, args
_ANSWER = struct.Struct("<QqiI")  # struct seccomp_notif_resp: id, val, error, flags
_CLONE = 56
_FREE = 64  # refusals of one family that are answered at once
_PAUSE = 0.02  # seconds before each further one


@dataclasses.dataclass
class _Family:
    """A session and its branches share one filter, so one descriptor."""

    refused: int = 0
    grant: tuple[int, int] | None = None  # (host pid, flags) of the one call to let through


class Gate:
    """One thread for all sessions of a server. It owns the notification descriptors and closes them."""

    def __init__(self) -> None:
        self.asked = self.allowed = 0
        self._families: dict[int, _Family] = {}
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._paused: list[tuple[float, int]] = []  # heap of (time to listen again, descriptor)
        self._thread = threading.Thread(target=self._run, name="sandbox-gate", daemon=True)
        self._thread.start()

    def watch(self, fd: int) -> None:
        """Take over a notification descriptor; it is closed when the last process under its filter has ended."""
        with self._lock:
            self._families[fd] = _Family()
        self._epoll.register(fd, select.EPOLLIN)

    @contextlib.contextmanager
    def grant(self, fd: int, pid: int, flags: int):
        """Let one clone with these flags through, if process `pid` asks for it inside the `with`."""
        with self._lock:
            family = self._families.get(fd)
            if family is not None:
                family.grant = (pid, flags)
        try:
            yield
        finally:
            with self._lock:
                if family is not None:
                    family.grant = None

    def close(self) -> None:
        """To be called when every session has ended."""
        os.write(self._wake_w, b"x")
        self._thread.join()
        for fd in (*self._families, self._wake_r, self._wake_w):
            os.close(fd)
        self._families.clear()
        self._epoll.close()

    def _run(self) -> None:
        while True:
            timeout = max(self._paused[0][0] - time.monotonic(), 0) if self._paused else None
            for fd, event in self._epoll.poll(timeout):
                if fd == self._wake_r:
                    return
                if event & select.EPOLLIN:
                    self._answer(fd)
                elif event & (select.EPOLLHUP | select.EPOLLERR):
                    self._forget(fd)
            while self._paused and self._paused[0][0] <= time.monotonic():
                fd = heapq.heappop(self._paused)[1]
                if fd in self._families:
                    self._epoll.modify(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._paused = [p for p in self._paused if p[1] != fd]  # the number may be another session's soon
        heapq.heapify(self._paused)
        with self._lock:
            del self._families[fd]
        os.close(fd)

    def _answer(self, fd: int) -> None:
        note = bytearray(_NOTE.size)
        try:
            fcntl.ioctl(fd, _RECV, note)
        except OSError:  # the process that asked has died meanwhile
            return
        ident, pid, _, nr, _, _, flags, *_ = _NOTE.unpack(note)
        family = self._families[fd]
        with self._lock:
            self.asked += 1
            allow = nr == _CLONE and family.grant == (pid, flags)
            if allow:
                family.grant = None
                self.allowed += 1
        answer = _ANSWER.pack(ident, 0, 0 if allow else -errno.EPERM, _CONTINUE if allow else 0)
        with contextlib.suppress(OSError):  # it has died meanwhile
            fcntl.ioctl(fd, _SEND, bytearray(answer))
        if not allow:
            family.refused += 1
            if family.refused > _FREE:
                self._epoll.modify(fd, 0)  # HUP is still told
                heapq.heappush(self._paused, (time.monotonic() + _PAUSE, fd))
