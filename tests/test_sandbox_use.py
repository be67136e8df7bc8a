"""What honest code does must work, and stay quick, at every level that this machine offers."""

from __future__ import annotations

import ast
import time

import numpy as np
import pytest
from PIL import Image

from pyvision_sandbox import Policy, Result, SandboxPool, SandboxUnavailable, Session, observation_text

LEVELS = ("namespaces", "landlock", "seccomp", "none")


def cases(text: str) -> dict[str, tuple[str, str]]:
    """`# name`, lines of code and, where it matters, `=> what is expected`; by name."""
    found = {}
    for block in text.strip("\n").removeprefix("# ").split("\n# "):
        name, _, rest = block.partition("\n")
        code, _, expected = rest.partition("\n=> ")
        found[name] = (code, expected.strip())
    return found


@pytest.fixture(scope="module", params=LEVELS)
def pools(request: pytest.FixtureRequest):
    """A pool at each level, skipped where the machine cannot do it."""
    level = request.param
    policy = Policy(profile="full", cell_timeout=20)
    try:
        pool = SandboxPool(policy, min_level=level, max_level=level, unsafe=level == "none")
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    with pool:
        yield pool


def open_session(pool: SandboxPool, **inputs) -> Session:
    return pool.session(trusted=pool.report.level in ("seccomp", "none"), **inputs)


PIXELS = np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8)
INPUTS = {"image_clue_0": Image.fromarray(PIXELS)}


@pytest.fixture
def session(pools: SandboxPool):
    with open_session(pools, seed=1, images=INPUTS) as session:
        yield session


@pytest.fixture(scope="module")
def shared(pools: SandboxPool):
    """One session for all rows that only compute or show something."""
    with open_session(pools, seed=1, images=INPUTS) as session:
        yield session


def run(session: Session, code: str) -> Result:
    result = session.run(code)
    if "No module named" in (result.error or {"message": ""})["message"]:
        pytest.skip(result.error["message"])  # type: ignore[index]
    assert result.ok, (code, result.error)
    return result


# ------------------------------------------------------------------------------------------------ values
VALUES = cases(r"""
# crop
image_clue_0.crop((10, 20, 30, 50)).size
=> (20, 30)
# resize
image_clue_0.resize((40, 30), Image.LANCZOS).size
=> (40, 30)
# rotate
image_clue_0.rotate(90, expand=True).size, image_clue_0.transpose(0).size
=> ((120, 160), (160, 120))
# draw
from PIL import ImageDraw, ImageFont
im = Image.new('RGB', (60, 20), 'white')
d = ImageDraw.Draw(im)
d.rectangle((0, 0, 5, 5), outline='red'); d.text((8, 2), 'Ab', font=ImageFont.load_default(), fill=0)
im.getpixel((0, 0)), im.getextrema()[1]
=> ((255, 0, 0), (0, 255))
# filter
from PIL import ImageFilter, ImageEnhance, ImageOps, ImageChops, ImageStat
a = ImageEnhance.Contrast(image_clue_0.filter(ImageFilter.GaussianBlur(3))).enhance(2)
ImageChops.difference(a, a).getbbox(), ImageOps.invert(a).size, len(ImageStat.Stat(a).mean)
=> (None, (160, 120), 3)
# arrays
a = np.asarray(image_clue_0); a.shape, a.dtype.name, a[::2, ::2].shape
=> ((120, 160, 3), 'uint8', (60, 80, 3))
# fft
float(abs(np.fft.ifft2(np.fft.fft2(np.eye(8)))).sum().round(6))
=> 8.0
# linalg
[round(float(s), 6) for s in np.linalg.svd(np.diag([3.0, 2.0]))[1]], np.linalg.solve([[2]], [4])[0]
=> ([3.0, 2.0], np.float64(2.0))
# ndimage
from scipy import ndimage; ndimage.label(np.eye(3))[1], ndimage.gaussian_filter(np.eye(5), 1).shape
=> (3, (5, 5))
# signal
from scipy.signal import find_peaks; find_peaks([0, 1, 0, 2, 0])[0].tolist()
=> [1, 3]
# spatial
from scipy.spatial import cKDTree; cKDTree([[0, 0], [3, 4]]).query([3, 3])[0]
=> 1.0
# optimize
from scipy.optimize import minimize; round(float(minimize(lambda x: (x[0] - 2) ** 2, [0]).x[0]), 3)
=> 2.0
# cv2
import cv2
a = np.zeros((50, 50, 3), np.uint8); cv2.rectangle(a, (10, 10), (30, 30), (255, 255, 255), -1)
g = cv2.GaussianBlur(cv2.cvtColor(a, cv2.COLOR_BGR2GRAY), (3, 3), 0); e = cv2.Canny(g, 50, 150)
c, _ = cv2.findContours((g > 128).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
cv2.setNumThreads(4); (e > 0).any().item(), len(c), cv2.boundingRect(c[0])
=> (True, 1, (10, 10, 21, 21))
# cv2 files
import cv2; cv2.imwrite('b.png', np.zeros((4, 6, 3), np.uint8)), cv2.imread('b.png').shape
=> (True, (4, 6, 3))
# files
image_clue_0.save('x.png'); import os
Image.open('x.png').size, 'x.png' in os.listdir(), open('x.png', 'rb').read(4)
=> ((160, 120), True, b'\x89PNG')
# tempfile
import tempfile, pathlib
with tempfile.TemporaryDirectory() as d:
    p = pathlib.Path(d, 'a.txt'); p.write_text('hi'); r = p.read_text()
with tempfile.NamedTemporaryFile(suffix='.png') as f:
    image_clue_0.save(f, 'PNG'); f.flush(); s = Image.open(f.name).size
r, s
=> ('hi', (160, 120))
# BytesIO
b = io.BytesIO(); image_clue_0.save(b, 'JPEG'); Image.open(io.BytesIO(b.getvalue())).size
=> (160, 120)
# base64
base64.b64decode(base64.b64encode(b'pixels'))
=> b'pixels'
# stdlib
import re, json, collections, itertools, random, statistics, fractions, math, datetime, decimal, functools
import heapq, string, textwrap, hashlib, uuid, csv, typing, dataclasses, sqlite3, zlib, struct, glob, bisect
a = re.findall(r'\d+', 'a1b22'), json.loads('[1]'), collections.Counter('aab').most_common(1)
(*a, statistics.mean([1, 2]), str(fractions.Fraction(1, 2)), hashlib.sha256(b'').hexdigest()[:4])
=> (['1', '22'], [1], [('a', 2)], 1.5, '1/2', 'e3b0')
# dataclass
from dataclasses import dataclass
@dataclass
class P:
    x: int = 1
P(2), P.__module__
=> (P(x=2), '__main__')
# pickle
import pickle, copy
class A:
    y = 2
def f(): return 1
pickle.loads(pickle.dumps(A())).y, pickle.loads(pickle.dumps(f))(), copy.deepcopy([1])
=> (2, 1, [1])
# exec
ns = {}; exec('a = 1', ns); ns['a'], eval('1 + 1'), (lambda: 3)()
=> (1, 2, 3)
# threads
import threading, time
from concurrent.futures import ThreadPoolExecutor
hit = threading.Event(); threading.Timer(0.01, hit.set).start()
with ThreadPoolExecutor(4) as e: r = list(e.map(abs, [-1, -2]))
r, hit.wait(5)
=> ([1, 2], True)
# asyncio
import asyncio, socket
a, b = socket.socketpair(); a.send(b'x')
asyncio.run(asyncio.sleep(.01, 7)), b.recv(1)
=> (7, b'x')
# await
import asyncio
async def f(x):
    await asyncio.sleep(0.01)
    return x + 1
y = await f(1)
await asyncio.gather(f(y), f(5))
=> [3, 6]
# tracing
import sys, timeit, cProfile, io, contextlib
p = cProfile.Profile(); p.runcall(sum, [1]); timeit.timeit('1', number=10) > 0
=> True
# warnings
import warnings, logging; warnings.simplefilter('ignore'); logging.getLogger().setLevel(30); warnings.warn('x')
1
=> 1
# environment
import os, sys
os.path.samefile(os.environ['HOME'], '.'), os.cpu_count() > 0, sys.version_info >= (3, 11), os.getpid() > 0
=> (True, True, True, True)
# time
import time; t = time.perf_counter(); time.sleep(0.01)
0.005 < time.perf_counter() - t < 5, time.strftime('%Y') > '2000'
=> (True, True)
# big
a = np.ones((1000, 1000)); b = a * 2; float(b.sum())
=> 2000000.0
""")


@pytest.mark.parametrize("name", VALUES)
def test_values(shared: Session, name: str):
    code, expected = VALUES[name]
    assert run(shared, code).repr == expected


def test_files_in_tmp(pools: SandboxPool, session: Session):
    result = session.run("image_clue_0.save('/tmp/x.png'); Image.open('/tmp/x.png').size")
    if pools.report.level == "landlock":  # only the session's own folder can be written there
        assert result.error is not None and result.error["name"] == "PermissionError"
    else:
        assert result.repr == "(160, 120)"


# ------------------------------------------------------------------------------------------------ pictures
PICTURES = cases(r"""
# expression
image_clue_0.crop((0, 0, 40, 30))
=> [(30, 40)]
# display
display(image_clue_0, np.zeros((5, 6), np.uint8), np.zeros((5, 6, 4), np.uint8))
=> [(120, 160), (5, 6), (5, 6)]
# Image.show
image_clue_0.show(title='a')
=> [(120, 160)]
# plt.show
import matplotlib.pyplot as plt
plt.figure(figsize=(2, 1), dpi=100); plt.plot([1, 2], label='a'); plt.title('T'); plt.legend(); plt.show()
=> [(100, 200)]
# imshow
fig, ax = plt.subplots(1, 2, figsize=(2, 1), dpi=100)
ax[0].imshow(image_clue_0); ax[1].axis('off'); fig.tight_layout(); plt.show()
=> [(100, 200)]
# fig.show
f = plt.figure(figsize=(2, 1), dpi=100); f.gca().bar([1], [2]); f.show()
=> [(100, 200)]
# fig
f = plt.figure(figsize=(2, 1), dpi=100); f.gca().hist([1, 2]); f
=> [(100, 200)]
# left open
plt.figure(figsize=(2, 1), dpi=100); plt.scatter([1], [2])
print('done')
=> [(100, 200)]
# saved, then shown
plt.figure(figsize=(2, 1), dpi=100); plt.plot([1]); plt.savefig('f.png'); plt.show()
=> [(100, 200)]
# shown, then saved
plt.figure(figsize=(2, 1), dpi=100); plt.plot([1]); plt.show(); plt.savefig('f.png')
=> [(100, 200)]
# saved, left open
plt.figure(figsize=(2, 1), dpi=100); plt.plot([1]); plt.savefig('f.png')
=> [(100, 200)]
# saved and closed
plt.figure(figsize=(2, 1), dpi=100); plt.plot([1]); plt.savefig('f.png', dpi=50); plt.close(); Image.open('f.png')
=> [(50, 100)]
# pylab
from pylab import *
figure(figsize=(2, 1), dpi=100); plot([1]); show()
=> [(100, 200)]
# mathtext
plt.figure(figsize=(2, 1), dpi=100); plt.title(r'$\alpha^2$'); plt.plot([1]); plt.show()
=> [(100, 200)]
# 3d
f = plt.figure(figsize=(2, 1), dpi=100); f.add_subplot(projection='3d').plot([1, 2], [1, 2], [1, 2]); plt.show()
=> [(100, 200)]
# cv2.imshow
import cv2
cv2.imshow('w', np.zeros((20, 30, 3), np.uint8)); cv2.waitKey(0); cv2.destroyAllWindows()
=> [(20, 30)]
# notebook
from IPython.display import display, Image as Shown
image_clue_0.save('n.png'); display(Shown('n.png'))
=> [(120, 160)]
# before an error is caught
try:
    display(image_clue_0); 1 / 0
except ZeroDivisionError:
    pass
=> [(120, 160)]
""")


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(shared: Session, name: str):
    code, sizes = PICTURES[name]
    result = run(shared, code)
    assert [image.shape[:2] for image in result.images] == ast.literal_eval(sizes) and not result.dropped


def test_a_crop_comes_back_exactly(session: Session):
    result = run(session, "image_clue_0.crop((10, 20, 110, 70))")
    assert np.array_equal(result.images[0], PIXELS[20:70, 10:110])


# ------------------------------------------------------------------------------------------------ over turns
def test_names_live_over_turns(session: Session):
    run(session, "import math as m\nk = 2\ndef outer(a):\n    def inner(b): return a + b + k\n    return inner")
    run(session, "class Box:\n    def __init__(self, v): self.v = v\n    def area(self): return m.pi * self.v")
    run(session, "f = outer(1)")
    run(session, "k += 1; it = iter([7, 8]); zoomed = image_clue_0.crop((0, 0, 9, 9))")
    run(session, "async def later(): return k")
    assert run(session, "f(1), round(Box(2).area(), 2), next(it), zoomed.size").repr == "(5, 6.28, 7, (9, 9))"
    assert run(session, "await later(), next(it), _[0]").repr == "(3, 8, 5)"


def test_a_thread_goes_on_with_the_session(session: Session):
    run(
        session,
        "import threading, time\nseen = []\n"
        "def work():\n    for i in range(3): seen.append(i); time.sleep(0.01)\n"
        "t = threading.Thread(target=work); t.start()",
    )
    assert run(session, "t.join(); seen").repr == "[0, 1, 2]"


def test_errors_name_the_codes_own_lines(session: Session):
    run(session, "def ratio(a, b):\n    c = a\n    return c / b")
    result = session.run("x = 1\n\nratio(x, 0)")
    assert result.error is not None and (result.error["name"], result.error["line"]) == ("ZeroDivisionError", 3)
    for line in ('File "<cell 1>", line 3, in ratio\n    return c / b', 'File "<cell 2>", line 3, in <module>'):
        assert line in result.error["traceback"]
    assert "runner" not in result.error["traceback"]


def test_bound_pictures_and_seed(pools: SandboxPool):
    drawn = []
    for _ in range(2):
        with open_session(pools, seed=5) as session:
            result = session.run("display(Image.new('RGB', (8, 4), 'red'))", bind=["image_clue_1"])
            assert result.bound == ["image_clue_1"] and run(session, "image_clue_1.size").repr == "(8, 4)"
            drawn.append(run(session, "import random; random.random(), float(np.random.rand())").repr)
    assert drawn[0] == drawn[1]
    with open_session(pools) as a, open_session(pools) as b:
        code = "import random; random.random(), float(np.random.rand()), float(np.random.default_rng().random())"
        values = [run(x, code).repr or "" for x in (a, b)]
        assert not {*values[0].strip("()").split(", ")} & {*values[1].strip("()").split(", ")}


def test_sessions_do_not_see_each_other(pools: SandboxPool):
    with open_session(pools) as a, open_session(pools) as b:
        run(a, "open('x.txt', 'w').write('1'); plt.plot([1]); keep = plt.gcf(); plt.rcParams['figure.dpi'] = 10")
        run(a, "import locale, decimal, os; decimal.getcontext().prec = 2; os.umask(0)")
        code = (
            "import os, decimal\nos.listdir(), plt.get_fignums(), plt.rcParams['figure.dpi'], decimal.getcontext().prec"
        )
        assert run(b, code).repr == "([], [], 100.0, 28)"


# ------------------------------------------------------------------------------------------------ a clear word
REFUSED = cases(r"""
# subprocess.run
import subprocess; subprocess.run(['ls'])
=> processes cannot be started in this sandbox
# shell
import subprocess; subprocess.check_output('ls', shell=True)
=> processes cannot be started in this sandbox
# os.system
import os; os.system('id')
=> processes cannot be started in this sandbox
# os.popen
import os; os.popen('id').read()
=> processes cannot be started in this sandbox
# fork
import os; os.fork()
=> processes cannot be started in this sandbox
# exec
import os; os.execvp('ls', ['ls'])
=> processes cannot be started in this sandbox
# pool
import multiprocessing as mp; mp.Pool(2).map(abs, [-1])
=> processes cannot be started in this sandbox
# executor
from concurrent.futures import ProcessPoolExecutor as E
with E(2) as e: list(e.map(abs, [-1]))
=> processes cannot be started in this sandbox
# process
from multiprocessing import Process
p = Process(target=abs, args=(1,))
p.start()
=> processes cannot be started in this sandbox
# urllib
from urllib.request import urlopen
urlopen('http://127.0.0.1:9/')
=> there is no network in this sandbox
# name
from urllib.request import urlopen
urlopen('https://example.org/')
=> there is no network in this sandbox
# socket
import socket; socket.create_connection(('127.0.0.1', 9))
=> there is no network in this sandbox
# udp
import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
=> there is no network in this sandbox
# http
import http.client; http.client.HTTPConnection('127.0.0.1').request('GET', '/')
=> there is no network in this sandbox
# asyncio
import asyncio
await asyncio.open_connection('127.0.0.1', 9)
=> there is no network in this sandbox
""")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_one_line(pools: SandboxPool, session: Session, name: str):
    """T16, T23, T26."""
    code, message = REFUSED[name]
    result = session.run(code)
    if pools.report.level == "none":  # the words follow the facts
        assert result.error is None or result.error["message"] != message
        return
    assert result.status == "error" and result.error is not None and result.session_alive
    assert (result.error["name"], result.error["message"]) == ("PermissionError", message)
    text = observation_text(result)
    assert text.endswith(f"PermissionError: {message}") and len(text) < 400 and text.count("\n") <= 5
    assert run(session, "'goes on'").repr == "'goes on'"


@pytest.mark.parametrize("module", ["jax", "torch", "pyvision_jax", "nonexistent"])
def test_what_is_not_there_is_a_plain_import_error(pools: SandboxPool, session: Session, module: str):
    result = session.run(f"import {module}")
    assert result.error is not None and result.error["message"] == f"No module named '{module}'"


# ------------------------------------------------------------------------------------------------ tricks, then a cell
TRICKS = cases(r"""
# no stdout
import sys; sys.stdout = None
# closed streams
import sys; sys.stdout.close(); sys.stderr.close()
# closed descriptors
import os; os.close(0); os.close(1); os.close(2)
# builtins
import builtins; builtins.print = None; builtins.len = None; builtins.isinstance = None
# no builtins
__builtins__ = None
# trace
import sys
def t(*a): raise RuntimeError('traced')
sys.settrace(t)
# profile
import sys
def t(*a): raise RuntimeError('traced')
sys.setprofile(t)
# thread trace
import threading
def t(*a): raise RuntimeError('traced')
threading.settrace(t); threading.setprofile(t)
# import hook
import sys
class H:
    def find_spec(self, *a): raise ImportError('no')
sys.meta_path.insert(0, H())
# no import
import sys; sys.meta_path = None; sys.path = None
# locale
import locale
try: locale.setlocale(locale.LC_ALL, 'tr_TR.UTF-8')
except locale.Error: locale.setlocale(locale.LC_ALL, 'C')
# decimal
import decimal; decimal.getcontext().prec = 1; import os; os.umask(0)
# folder
import os; os.mkdir('d'); os.chdir('d'); os.rmdir(os.path.abspath('.'))
# signals
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
# alarm
import signal; signal.setitimer(signal.ITIMER_REAL, 0.05)
# recursion
import sys; sys.setrecursionlimit(80)
# modules
import os, time, traceback, msgpack, io, ast, linecache, signal
for n in ('write', 'readv', 'getpid', 'fstat', 'pread'): setattr(os, n, None)
for n in ('packb', 'unpackb'): setattr(msgpack, n, None)
time.process_time = traceback.TracebackException = io.TextIOWrapper = linecache.cache = signal.signal = None
# pyplot
plt.figure = plt.close = plt.get_fignums = None; plt.subplots = None
# main
import sys; del sys.modules['__main__']; __name__ = 'x'
# loop
import asyncio
await asyncio.sleep(0)
asyncio.get_event_loop().stop()
await asyncio.sleep(0)
# exit
raise SystemExit(3)
# reduce
class R:
    def __reduce__(self): return (print, ('unpickled',))
    def __repr__(self): return 'R'
raise Exception(R())
# escapes
print('\x1b[31mred\r\x08\x00')
""")


@pytest.mark.parametrize("name", TRICKS)
def test_the_cell_after_a_trick_is_an_ordinary_one(session: Session, name: str):
    """T53, T55 to T59."""
    result = session.run(TRICKS[name][0])
    assert result.session_alive, result
    time.sleep(0.1 if name == "alarm" else 0)
    code = "import sys, threading, fractions as fr\nt = threading.Thread(target=print, args=('in a thread',))\n"
    code += "t.start(); t.join(); print(len([1, 2]), file=sys.stderr); display(Image.new('RGB', (4, 3)))\n"
    result = session.run(code + "fr.Fraction(1, 2) + 1")
    assert result.ok and not result.restarted, (result.error, result.stderr)
    assert (result.repr, result.stdout, result.stderr) == ("Fraction(3, 2)", "in a thread\n", "2\n")
    assert [i.shape for i in result.images] == [(3, 4, 3)]
    slow = session.run("import time; time.sleep(20)", timeout=0.03)
    assert (slow.status, slow.session_alive) == ("soft_timeout", True)


@pytest.mark.parametrize(
    "code",
    [
        "np.zeros((10**5, 10**5))",
        "bytearray(4 << 30)",
        "x = []\nfor _ in range(64): x.append(np.empty(1 << 23))",
        "'x' * 10**10",
        "Image.new('L', (50000, 50000))",
    ],
)
def test_the_memory_limit_is_told(session: Session, code: str):
    result = session.run(code)
    assert (result.status, result.session_alive) == ("memory", True), result
    assert run(session, "x = None; image_clue_0.size").repr == "(160, 120)"


@pytest.mark.parametrize("code", ["input('? ')", "import pdb; pdb.set_trace()\nx = 1", "breakpoint()\nx = 1"])
def test_nobody_answers_questions(session: Session, code: str):
    """U48."""
    result = session.run(code)
    assert result.error is not None and result.error["name"] == "EOFError" and result.usage.wall_s < 5
    assert "EOFError" in observation_text(result)
    assert run(session, "1 + 1").repr == "2"


def test_an_await_that_is_interrupted_does_not_go_on(session: Session):
    code = "import asyncio\nticks = []\nasync def tick():\n    while True: ticks.append(1); await asyncio.sleep(0.01)\n"
    code += "await tick()"
    run(session, "import asyncio; await asyncio.sleep(0)")  # the first import takes its time
    assert session.run(code, timeout=0.1).status == "soft_timeout"
    n = int(run(session, "await asyncio.sleep(0.03)\nlen(ticks)").repr or 0)
    assert n > 0 and run(session, "await asyncio.sleep(0.03)\nlen(ticks)").repr == str(n)


def test_a_trivial_cell_is_quick(session: Session):
    run(session, "1")
    start = time.perf_counter()
    for _ in range(50):
        run(session, "1 + 1")
    assert time.perf_counter() - start < 50 * 0.02
