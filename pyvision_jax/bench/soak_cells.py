"""What the soak runs: ordinary cells as a policy writes them, and hostile ones, harmless even if nothing confines them.

Bounds of the hostile: at most 20 children, which end at once; 4 GiB asked for and not touched; 96 MB of files; signals
only of number 0. Every cell prints its token first.
"""

from __future__ import annotations

import dataclasses

# Under load an ordinary cell may meet the short limits of the soak.
_FINE = frozenset({"ok", "soft_timeout"})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A cell: its code, below a line that prints the token, and the statuses that it may end with."""

    name: str
    code: str
    statuses: frozenset[str]
    weight: int = 1


ORDINARY = (
    Kind("arithmetic", "x = sum(range(1000))\nx", _FINE, 8),
    Kind("state", "n = globals().get('n', 0) + 1\nprint(n)", _FINE, 8),
    Kind("crop", "image.crop((8, 8, 72, 72))", _FINE, 6),
    Kind("statistics", "import numpy as np\na = np.asarray(image)\nprint(a.mean(), a.std())", _FINE, 6),
    Kind("resize", "image.resize((128, 96)).rotate(30)", _FINE, 4),
    Kind("files", "image.save('a.png')\nfrom PIL import Image\nImage.open('a.png').size", _FINE, 4),
    Kind("error", "1 / 0", frozenset({"error", "soft_timeout"}), 4),
    Kind("syntax", "def f(:", frozenset({"error", "soft_timeout"}), 2),
    Kind("exit", "import sys\nsys.exit(3)", frozenset({"error", "soft_timeout"}), 2),
    Kind("threads", "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", _FINE, 2),
    Kind("figure", "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.show()", _FINE, 1),
    Kind("text", "print('line\\n' * 5000)", _FINE, 2),
)

# Any of them may cost the session its life, as long as the result says so.
_ANY = frozenset({"ok", "error", "soft_timeout", "hard_timeout", "memory", "crashed", "protocol_error"})
_ENDED = frozenset({"hard_timeout", "crashed", "protocol_error"})
AFTER_HARM = _ANY  # what an ordinary cell may come to in a session that a hostile one has left behind
HOSTILE = (
    Kind("hangs", "while True: pass", frozenset({"soft_timeout"}), 3),
    Kind("sleeps", "import time\ntime.sleep(10**6)", frozenset({"soft_timeout"}), 2),
    Kind(
        "answers late",
        "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(0.1)\nprint('{token}')",
        _FINE | {"hard_timeout"},
        3,
    ),
    Kind(
        "deaf",
        "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass",
        frozenset({"hard_timeout"}),
        2,
    ),
    Kind("leaves", "import os\nos._exit(0)", _ENDED, 3),
    Kind("crashes", "import ctypes\nctypes.string_at(0)", _ENDED | {"error"}, 2),
    Kind("aborts", "import os\nos.abort()", _ENDED, 1),
    Kind("memory", "a = bytearray(4 << 30)", _ANY, 2),
    Kind("recursion", "def f(): return f()\nf()", _ANY, 1),
    Kind("flood", "while True: print('flood' * 100)", frozenset({"soft_timeout", "hard_timeout"}), 2),
    Kind(
        "noise on every descriptor",
        "import os\nfor fd in range(3, 300):\n    try:\n        os.write(fd, b'\\xff' * 4096)\n"
        "    except OSError:\n        pass",
        _ANY,
        2,
    ),
    Kind("closes every descriptor", "import os\nos.closerange(0, 300)", _ANY, 2),
    Kind("files", "for i in range(96):\n    open(f'f{i}', 'wb').write(b'x' * (1 << 20))", _ANY, 1),
    Kind(
        "children",
        "import os\nfor i in range(20):\n    try:\n        if os.fork() == 0:\n            os._exit(0)\n"
        "    except OSError:\n        pass",
        _ANY,
        2,
    ),
    Kind("signals", "import os\nfor pid in (-1, os.getppid(), 1):\n    os.kill(pid, 0)", _ANY, 1),
    Kind(
        "threads that stay",
        "import threading\ndef spin():\n    while True: pass\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()",
        _ANY,
        2,
    ),
    Kind("streams", "import sys\nsys.stdout.close()\nsys.stderr = None", _ANY, 1),
    Kind("exception that lies", "class E(Exception):\n    def __str__(self): 1 / 0\nraise E", frozenset({"error"}), 1),
)


def source(kind: Kind, token: str) -> str:
    return f"print('{token}')\n" + kind.code.replace("{token}", token)
