"""B. Network and communication between processes."""

from __future__ import annotations

from pyvision_sandbox import observation_text

from .case import CONFINED_FILES, Case, Step
from .trial import Trial


def _clear_line(trial: Trial) -> None:
    last = observation_text(trial.result).strip().splitlines()[-1]
    trial.expect("not permitted" in last.lower() or "permission" in last.lower(), f"the model reads {last!r}")
    trial.expect(len(last) < 200, f"a long last line: {last!r}")


CASES = (
    Case(
        "T12",
        "TCP to a listener on loopback, and sockets of any family",
        "blocked",
        (
            """
import socket
attempt('connect', lambda: socket.create_connection(('127.0.0.1', PORT), timeout=0.5).close())
attempt('connect ::1', lambda: socket.create_connection(('::1', PORT), timeout=0.5).close())
for name in ('INET', 'INET6', 'UNIX', 'NETLINK', 'PACKET', 'VSOCK', 'ALG', 'CAN', 'RDS', 'TIPC', 'QIPCRTR'):
    family = getattr(socket, 'AF_' + name, None)
    if family is not None:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            reached = (errno.EPROTONOSUPPORT, errno.EINVAL, 94) if name == 'INET' else ()
            attempt(f'{name} {kind}', lambda: socket.socket(family, kind).close())
attempt('socketpair of INET', lambda: call(53, 2, 1, 0, (ctypes.c_int * 2)()), reached=(errno.EOPNOTSUPP,))
a, b = socket.socketpair()
for number, name in ((49, 'bind'), (50, 'listen'), (42, 'connect'), (43, 'accept')):
    address = (ctypes.c_char * 16)(*(b'\\x02\\0' + PORT.to_bytes(2, 'big') + b'\\x7f\\0\\0\\1' + bytes(8)))
    if name != 'accept':
        attempt(name, call, number, a.fileno(), address, 16,
                reached=(errno.EFAULT, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP, errno.EAFNOSUPPORT))
""",
        ),
        attempts=25,
    ),
    Case(
        "T13",
        "UDP to a listener on loopback",
        "blocked",
        (
            """
import socket
for family, host in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):
    attempt(host, lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b'CALL', (host, PORT)))
""",
        ),
        attempts=2,
    ),
    Case(
        "T14",
        "unix sockets of the host: abstract and by path",
        "blocked",
        (
            """
import socket
def to(address, kind):
    s = socket.socket(socket.AF_UNIX, kind)
    s.settimeout(0.5)
    s.connect(address)
    s.send(b'CALL')
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in (b'\\0' + ABSTRACT.encode(), b'\\0' + ABSTRACT.encode() + b'.dgram', SOCKET, SOCKET + '.dgram'):
        attempt(f'{address} {kind}', to, address, kind)
def through_a_pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return a.sendto(b'CALL', b'\\0' + ABSTRACT.encode() + b'.dgram')
attempt('sendto from a pair', through_a_pair)
def connected_pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.connect(SOCKET + '.dgram')
    return a.send(b'CALL')
attempt('connect of a pair', connected_pair)
""",
        ),
        attempts=10,
    ),
    Case(
        "T15",
        "socket pairs, pipes and asyncio",
        "works",
        (
            """
import asyncio, select, socket
a, b = socket.socketpair()
a.sendall(b'ping')
assert b.recv(10) == b'ping'
r, w = os.pipe()
os.write(w, b'x')
assert select.select([r], [], [], 1)[0]
async def main():
    await asyncio.sleep(0.01)
    return await asyncio.gather(*[asyncio.sleep(0, i) for i in range(3)])
assert asyncio.run(main()) == [0, 1, 2]
""",
        ),
    ),
    Case(
        "T16",
        "urlopen tells the model in one clear line",
        "limited",
        (
            """
import urllib.request
print('before')
urllib.request.urlopen(f'http://127.0.0.1:{PORT}/', timeout=0.5)
""",
        ),
        check=_clear_line,
    ),
    Case(
        "T17",
        "System V and POSIX message queues, semaphores and shared memory",
        "blocked",
        (
            """
attempt('shmget', lambda: call(31, call(29, 0, 4096, 0o1600), 0, 0))  # removed again where it works
attempt('semget', lambda: call(66, call(64, 0, 1, 0o1600), 0, 0))
attempt('msgget', lambda: call(71, call(68, 0, 0o1600), 0, 0))
attempt('mq_open', lambda: (call(240, TAG.encode(), 0o102, 0o600, None), call(241, TAG.encode())))
for number, name in ((30, 'shmat'), (31, 'shmctl'), (65, 'semop'), (69, 'msgsnd'), (70, 'msgrcv')):
    attempt_call(name, number, -1, 0, 0, 0)
""",
        ),
        attempts=9,
    ),
    Case(
        "T18",
        "a file in /dev/shm",
        "isolated",
        (
            "attempt('own /dev/shm', lambda: open('/dev/shm/' + TAG, 'x').close())\n"
            "from multiprocessing import shared_memory\n"
            "attempt('own shared memory', lambda: shared_memory.SharedMemory(TAG + '-m', create=True, size=4096))",
            Step("print(listing('/dev/shm'))", who="sibling"),
            Step("print(listing('/dev/shm'))", who="new"),
        ),
        attempts=2,
        levels=CONFINED_FILES,
        check=lambda trial: (
            [
                trial.expect(trial.tag not in result.stdout, "another session sees the file")
                for result in trial.results[1:]
            ]
            and None
        ),
    ),
)
