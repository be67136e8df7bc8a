"""Mending: every rule and what was wrong with its model, code without faults untouched, twice equals once, no crash."""

from __future__ import annotations

import ast
import random
import time

import pytest

from pyvision_sandbox.mend import ALL, MAX_CODE, Mend, Mended, Paths, mend
from pyvision_sandbox.mend_crops import Size, clamp

# Random text makes the parser warn; the filter of the module under test counts outside pytest.
pytestmark = pytest.mark.filterwarnings("ignore")

IMAGES = {"image_clue_0": (480, 640), "image_clue_1": (200, 300)}
PATHS = Paths({"/in/a.jpg": "image_clue_0", "/in/b.jpg": "image_clue_1"}, files=["/out/old.png"], output="/s/tmp/out")


def mended(code: str, *, rules=ALL, current: str | None = None, images=IMAGES, paths=PATHS, names=()) -> Mended:
    result = mend(code, images, rules, current=current, paths=paths, names=names)
    again = mend(result.code, images, rules, current=current, paths=paths, names=names)
    assert again.code == result.code and not again.mends, "mending twice is not mending once"
    assert (result.code == code) == (not result.mends)
    assert result.code.count("\n") == code.count("\n"), "lines moved"
    if parses(code):
        assert parses(result.code)
    return result


def parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def rules_of(result: Mended) -> list[str]:
    return [m.rule for m in result.mends]


# ------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("code", "expected", "rules"),
    [
        ("    x = 1\n    y = 2\n", "x = 1\ny = 2\n", ["dedent"]),
        ("\n\n  x = 1\n\n  # why\n  y = 2", "\n\nx = 1\n\n# why\ny = 2", ["dedent"]),
        ("# a note\n    x = 1\n    y = 2\n", "# a note\nx = 1\ny = 2\n", ["dedent"]),
        ("  x = 1\ny = 2\nz = 3\n", "x = 1\ny = 2\nz = 3\n", ["first_indent"]),
        ("import os\n    x = 1\n    if x:\n        y = 2\n", "import os\nx = 1\nif x:\n    y = 2\n", None),
        ("x = 1\n  y = 2\nz = 3\n", "x = 1\ny = 2\nz = 3\n", ["layout"]),
        (
            "x = [1]\n  for i in x:\n      print(i)\n  y = 2\n",
            "x = [1]\nfor i in x:\n    print(i)\ny = 2\n",
            None,
        ),
        ("if True:\n\tx = 1\n        y = 2\n", "if True:\n    x = 1\n    y = 2\n", None),
        ("if True:\r\n    x = 1\r\n\ty = 2\r\n", "if True:\r\n    x = 1\r\n    y = 2\r\n", ["layout"]),
        ("x = 1;;\n", "x = 1;\n", ["layout"]),
        ("x = 1 + \\ \n  2\n", "x = 1 + \\\n  2\n", ["layout"]),
    ],
)
def test_layout_is_mended_where_the_code_does_not_parse(code: str, expected: str, rules: list[str] | None) -> None:
    result = mended(code)
    assert result.code == expected and parses(expected)
    assert rules is None or rules_of(result) == rules


@pytest.mark.parametrize(
    "code",
    [
        "if x:\n    y = 1\n",  # the model gives `if` the indentation of the line below
        "for i in a: pass\nif b == None: print (1)\nexcept_ = lambda : 0\n",  # autopep8, aggressive, rewrites all of it
        "def f():\n        return {  'a':1 }\n",
        's = """\n    kept\n  as it is\n"""\n',
        "def f():\n    x = 1\n   y = 2\n",  # two meanings: not for us to choose
        "print 'a'\n",
        "I think the answer is 5.\n    Yes.",
    ],
)
def test_layout_is_left_where_the_code_parses_or_cannot_be_helped(code: str) -> None:
    assert mended(code) == Mended(code, (), IMAGES, mended(code).names)


def test_a_layout_rule_that_is_switched_off_changes_nothing() -> None:
    for code, rule in (
        ("  x = 1\n", "dedent"),
        ("x = 1\n  y = 2\nz = 3\n", "layout"),
        ("  x = 1\ny=2\n", "first_indent"),
    ):
        assert mended(code, rules=ALL - {rule, "layout"}).code == code
        assert mended(code, rules={rule}).mends


# ----------------------------------------------------------------------------------------------------- names of things


@pytest.mark.parametrize(
    ("code", "current", "expected"),
    [
        ("image_path = 'my.jpg'", None, "image_path = '/in/a.jpg'"),
        ("image_path = 'my.jpg'", "image_clue_1", "image_path = '/in/b.jpg'"),
        ('image_path = "/data/b.jpg"  # né', None, "image_path = '/in/b.jpg'  # né"),
        ("image_path: str = 'x'", None, "image_path: str = '/in/a.jpg'"),
        ("image_path = ('a'\n  'b')\n1/0", None, "image_path = ('/in/a.jpg'\n)\n1/0"),
    ],
)
def test_the_path_of_no_file_becomes_that_of_the_input(code: str, current: str | None, expected: str) -> None:
    result = mended(code, current=current)
    assert result.code == expected and rules_of(result) == ["input_path"]


def test_paths_of_files_that_exist_stay() -> None:
    for path in ("/in/b.jpg", "/out/old.png", "/s/tmp/out/mine.png"):
        assert mended(f"image_path = {path!r}\nother = 'x.jpg'\n").mends == ()
    assert mended("image_path = 'x.jpg'", paths=Paths()).mends == ()


def test_the_module_alias() -> None:
    result = mended("import cv2\nimg = cv.imread(p)\ny = cv3.dnn.x(CV.Y, f'{cv4.z}')\n")
    assert result.code == "import cv2\nimg = cv2.imread(p)\ny = cv2.dnn.x(cv2.Y, f'{cv2.z}')\n"
    assert result.mends[0] == Mend("cv2", 2, "cv.imread", "cv2.imread")
    assert mended("import cv\ncv.imread(p)").code == "import cv2 as cv\ncv.imread(p)"


@pytest.mark.parametrize(
    "code",
    ["import cv2 as cv\ncv.imread(p)", "def f(cv):\n    return cv.name\n", "for cv in folds: cv.fit()", "x.cv.y"],
)
def test_a_name_that_the_code_gives_a_meaning_is_no_alias(code: str) -> None:
    assert mended(code).mends == ()


def test_nor_is_one_of_an_earlier_cell() -> None:
    first = mended("import cv2 as cv")
    assert mended("cv.imread(p)", names=first.names).mends == ()


def test_the_output_folder() -> None:
    code = "p = '/mnt/data/temp_processed_images/deep/x.png'\nq = f'/mnt/data/temp_processed_images/{n}.png'\n"
    result = mended(code)
    assert result.code == "p = '/s/tmp/out/deep/x.png'\nq = f'/s/tmp/out/{n}.png'\n"
    assert result.folders == ("/s/tmp/out/deep",)
    assert mended("p = '/mnt/data/temp_processed_images'").code == "p = '/s/tmp/out'"
    for code in ("p = '/mnt/data/temp_processed_images_2/x'", "# /mnt/data/temp_processed_images/\n"):
        assert mended(code).mends == ()
    assert mended("p = '/s/tmp/out/../../etc/x'").folders == ()
    assert mended(code, paths=Paths(output='/a"b')).mends == (), "a folder that would end the string"


def test_number_format() -> None:
    result = mended("x = 3\nprint(f'{x:.2f} {x:.9f} {x:8.2f}', '{:.1f}'.format(x), '{:.3f}', f'{{x:.2f}}')\n")
    assert result.code == ("x = 3\nprint(f'{x:.8f} {x:.9f} {x:8.2f}', '{:.8f}'.format(x), '{:.3f}', f'{{x:.2f}}')\n")
    assert {m.line for m in result.mends} == {2}


# --------------------------------------------------------------------------------------------------------------- crops


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        # a literal in the call itself, also with keyword; a minus is a node of its own in the tree
        ("image_clue_0.crop((-20, -5, 5000, 300))", "image_clue_0.crop((0, 0, 640, 300))"),
        ("image_clue_0.crop(box=[+0, 0, 900, 480])", "image_clue_0.crop(box=[+0, 0, 640, 480])"),
        # the picture that is cropped, not the first
        ("image_clue_1.crop((0, 0, 640, 480))", "image_clue_1.crop((0, 0, 300, 200))"),
        ("a = image_clue_1.copy()\na.crop((0, 0, 640, 480))", "a = image_clue_1.copy()\na.crop((0, 0, 300, 200))"),
        (
            "im = Image.open('/in/b.jpg').convert('RGB')\nbox = (0, 0, 301, 200)\nim.crop(box)",
            "im = Image.open('/in/b.jpg').convert('RGB')\nbox = (0, 0, 300, 200)\nim.crop(box)",
        ),
        (
            "with Image.open(image_path) as im:\n    im.crop((0, 0, 900, 480))",
            "with Image.open(image_path) as im:\n    im.crop((0, 0, 640, 480))",
        ),
        # a picture made by an earlier crop or resize has its own size
        (
            "a = image_clue_0.crop((0, 0, 100, 90))\nb = a.crop((0, 0, 200, 200))",
            "a = image_clue_0.crop((0, 0, 100, 90))\nb = a.crop((0, 0, 100, 90))",
        ),
        (
            "a = image_clue_0.resize((1280, 960), 3)\na.crop((0, 0, 1280, 970))",
            "a = image_clue_0.resize((1280, 960), 3)\na.crop((0, 0, 1280, 960))",
        ),
        (
            "a = image_clue_1\na = ImageEnhance.Contrast(a).enhance(2.0)\na.crop((0, 0, 400, 100))",
            "a = image_clue_1\na = ImageEnhance.Contrast(a).enhance(2.0)\na.crop((0, 0, 300, 100))",
        ),
        # order and rounding
        ("image_clue_0.crop((300, 200, 100, 20.6))", "image_clue_0.crop((100, 21, 300, 200))"),
        # a box by name, and unpacked in any order of its sides
        ("bbox = (-1, 2, 100, 100)\nimage_clue_1.crop(bbox)", "bbox = (0, 2, 100, 100)\nimage_clue_1.crop(bbox)"),
        (
            "x1, y1, x2, y2 = -9, 0, 99, 201\nimage_clue_1.crop((x1, y1, x2, y2))",
            "x1, y1, x2, y2 = 0, 0, 99, 200\nimage_clue_1.crop((x1, y1, x2, y2))",
        ),
        (
            "left, right, top, bottom = (0, 301, -4, 99)\nimage_clue_1.crop((left, top, right, bottom))",
            "left, right, top, bottom = (0, 300, 0, 99)\nimage_clue_1.crop((left, top, right, bottom))",
        ),
        (
            "coords = [0, 0, 301, 99]\nx1, y1, x2, y2 = coords\nz = image_clue_1.crop((x1, y1, x2, y2))",
            "coords = [0, 0, 300, 99]\nx1, y1, x2, y2 = coords\nz = image_clue_1.crop((x1, y1, x2, y2))",
        ),
        # slices, on any Python
        (
            "import cv2\na = cv2.imread('/in/b.jpg')\nc = a[-5:150, 0:900]",
            "import cv2\na = cv2.imread('/in/b.jpg')\nc = a[0:150, 0:300]",
        ),
        (
            "a = np.array(image_clue_1)\nc = a[20:300, :, :].copy()",
            "a = np.array(image_clue_1)\nc = a[20:200, :, :].copy()",
        ),
        (
            "x1, y1, x2, y2 = 0, 0, 999, 150\na = np.asarray(image_clue_1)\nshow(a[y1:y2, x1:x2])",
            "x1, y1, x2, y2 = 0, 0, 300, 150\na = np.asarray(image_clue_1)\nshow(a[y1:y2, x1:x2])",
        ),
    ],
)
def test_boxes_are_bound_to_the_picture_that_they_cut(code: str, expected: str) -> None:
    result = mended(code, rules=ALL - {"widen"})
    assert result.code == expected and set(rules_of(result)) == {"crop"}


def test_small_boxes_are_widened_by_their_own_rule() -> None:
    code = "image_clue_0.crop((10, 10, 20, 20))\nimage_clue_0.crop((600, 470, 639, 480))"
    result = mended(code)
    assert result.code == "image_clue_0.crop((10, 10, 74, 74))\nimage_clue_0.crop((576, 416, 640, 480))"
    assert result.mends[0] == Mend("widen", 1, "(10, 10, 20, 20)", "(10, 10, 74, 74)")
    assert mended(code, rules=ALL - {"widen"}).mends == ()
    assert mended("image_clue_0.crop((-10, 10, 20, 20))", rules={"widen"}).mends == ()
    tiny = mended("a.crop((5, 5, 9, 9))", images={"a": (32, 40)})
    assert tiny.code == "a.crop((0, 0, 40, 32))"


@pytest.mark.parametrize(
    "code",
    [
        "image_clue_0.crop((0, 0, 640, 480))",
        "image_clue_0.crop((x, 0, 9000, 480))",  # not all literal
        "a = image_clue_0.rotate(30, expand=True)\na.crop((0, 0, 700, 700))",  # a size that cannot be told
        "a = image_clue_0.transpose(2)\na.crop((0, 0, 640, 640))",
        "for a in pictures:\n    a.crop((0, 0, 9000, 9000))",
        "[a.crop((0, 0, 9000, 9000)) for a in pictures]",
        "def f(a):\n    return a.crop((0, 0, 9000, 9000))\n",
        "a = image_clue_0\nfor _ in range(3):\n    a = a.crop((0, 0, 600, 400)).resize((n, n))\n",
        "a = np.array(image_clue_0)\nc = a[-100:, -200:]\nd = a[10:-10, :-5]",  # counted from the end, as arrays are
        "m = np.zeros((900, 900))\nn = m[0:2, 0:2]",  # no picture
        "bbox = (0, 0, 9000, 9000)\ndraw.rectangle(bbox)",  # not a crop
        "x1, y1, w, h = 600, 400, 100, 100",
        "y2, x1, a, b = 600, 400, 1, 1",
        "bbox = (0, 0, 500, 400)\nimage_clue_0.crop(bbox)\nimage_clue_1.crop(bbox)",  # right for one, not for the other
        "image_clue_0.crop((1e999, 0, 1, 1))\nimage_clue_0.crop((9" + "0" * 400 + ", 0, 1, 1))",
        "F.crop(image_clue_0, -1, -1, 9000, 9000)",
        "image_clue_0.crop()\nimage_clue_0.crop((True, False, 1, 1j))",
    ],
)
def test_boxes_that_are_no_fault_or_of_an_unknown_picture_stay(code: str) -> None:
    assert mended(code).code == code


def test_the_current_picture_stands_in_for_a_name_of_which_nothing_is_known() -> None:
    code = "image.crop((0, 0, 9000, 100))"
    assert mended(code, current="image_clue_1").code == "image.crop((0, 0, 300, 100))"
    assert mended(code).mends == (), "two pictures, and none is said to be current"
    assert mended(code, images={"p": (100, 70)}).code == "image.crop((0, 0, 70, 100))"
    assert mended(code, current="image_clue_1", names=["image"]).mends == (), "an earlier cell bound it to something"
    assert mended("bbox = (0, 0, 301, 90)", current="image_clue_1").code == "bbox = (0, 0, 300, 90)"


def test_sizes_are_handed_from_cell_to_cell() -> None:
    first = mended(
        "img = image_clue_0.crop((100, 100, 350, 300))\nlost = image_clue_0.rotate(k)\nimage_clue_1 = load()"
    )
    assert first.sizes == {"image_clue_0": (480, 640), "img": (200, 250), "lost": (480, 640)}
    second = mended("img.crop((0, 0, 640, 480))", images=first.sizes, names=first.names, current="image_clue_0")
    assert second.code == "img.crop((0, 0, 250, 200))"
    assert mended("image_clue_1.crop((0, 0, 999, 999))", images=first.sizes, names=first.names).mends == ()


def test_branches_keep_what_they_agree_on() -> None:
    code = "if {0}:\n    a = image_clue_0\nelse:\n    a = image_clue_{1}\na.crop((0, 0, 900, 100))"
    assert mended(code.format("q", 0)).code.endswith("(0, 0, 640, 100))")
    assert mended(code.format("q", 1)).mends == ()
    code = "try:\n    a = Image.open(image_path)\nexcept OSError as e:\n    print(e)\na.crop((0, 0, 900, 100))"
    assert mended(code).code.endswith("(0, 0, 640, 100))")


def test_clamping_keeps_its_promises() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        size = Size(rng.randint(1, 300), rng.randint(1, 300))
        box = [rng.choice([rng.randint(-400, 700), rng.uniform(-400, 700)]) for _ in range(4)]
        x1, y1, x2, y2 = clamp(box, size, 64)
        assert 0 <= x1 < x2 <= size.width and 0 <= y1 < y2 <= size.height
        assert x2 - x1 >= min(64, size.width) and y2 - y1 >= min(64, size.height)
        assert clamp((x1, y1, x2, y2), size, 64) == (x1, y1, x2, y2)


# ------------------------------------------------------------------------------------------------------------ the whole


def test_tracebacks_stay_in_the_lines_of_the_model() -> None:
    code = (
        "é = 'ü'; a = image_clue_0.crop((-1, 0, 99, 99)) ; image_path = 'x'\n\n\n"
        "b = cv.imread(  image_path )\n1/0 # é\n"
    )
    result = mended(code)
    assert result.code == (
        "é = 'ü'; a = image_clue_0.crop((0, 0, 99, 99)) ; image_path = '/in/a.jpg'\n\n\n"
        "b = cv2.imread(  image_path )\n1/0 # é\n"
    )
    assert [(m.rule, m.line) for m in result.mends] == [("input_path", 1), ("crop", 1), ("cv2", 4)]


def test_good_code_is_returned_byte_for_byte() -> None:
    code = (
        "import cv2\r\nimg=image_clue_0.crop( (0 , 0,320,  240) )\t\r\nprint( f'{img.size!r:>30}' )\x0c\r\n"
        + "x=1 ;" * 3
    )
    assert mended(code) == Mended(code, (), {**IMAGES, "img": (240, 320)}, frozenset({"cv2", "img", "x"}))
    for rules in ([], ["crop"], ["layout", "cv2"]):
        assert mended(code, rules=rules).code == code


def test_rules_are_switches() -> None:
    code = "image_path = 'x'\ncv.imread(f'{1:.2f}')\nimage_clue_0.crop((-1, 0, 1, 1))\n"
    code += "p = '/mnt/data/temp_processed_images/a'"
    assert sorted({*rules_of(mended(code))}) == ["crop", "cv2", "input_path", "number_format", "output_dir"]
    for rule in ALL:
        assert set(rules_of(mended(code, rules={rule}))) <= {rule}
    assert mended(code, rules=[]).mends == ()
    with pytest.raises(ValueError, match="no rule of mending is called spelling"):
        mend(code, IMAGES, ["spelling"])


PIECES = [
    "image_clue_0", ".crop((", "-5, ", "0, 9000", "))", "[", "10:900", ", ", "]", "bbox = ", "(1, 2, 3, 4)", "\n",
    "\n    ", "\t", "if x:", "else:", "for a in b:", "x1, y1, x2, y2 = ", "image_path = ", "'x.jpg'", "cv.", "cv",
    "f'{x:.2f}'", "é", "'/mnt/data/temp_processed_images/a'", "\\", ";;", "#", '"""', "(", ")", "lambda: ",
    "def f(a):", "import cv", "\r", "with a as b:", "image = ", "np.array(image_clue_1)", "\ud800", "\0", "\ufeff",
    "{", "}", "1e999", "match x:", "case 1:", ".copy()", "try:", "except:", "x := ", "return ", "await ", "\x0c", "=",
    "global x",
]  # fmt: skip


def test_no_input_makes_it_raise() -> None:
    rng = random.Random(1)
    until = time.monotonic() + 4
    tried = 0
    while time.monotonic() < until:
        if rng.random() < 0.2:
            code = bytes(rng.randrange(256) for _ in range(rng.randrange(200))).decode("utf-8", "surrogateescape")
        else:
            code = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 25)))
        mended(code, current=rng.choice([None, "image_clue_1", "absent"]))
        tried += 1
    assert tried > 500


DEEP = {
    "attributes": lambda n: "a" + ".a" * n,
    "calls": lambda n: "a" + ".crop((1,2,3,4))" * n,
    "signs": lambda n: "image_clue_0.crop((" + "-" * n + "5, 0, 1, 1))",
    "sums": lambda n: "1" + "+1" * n,
    "brackets": lambda n: "(" * n + ")" * n,
    "elif": lambda n: "if a: pass\n" + "elif b: image = c\n" * n,
    "indents": lambda n: "".join(" " * i + "if a:\n" for i in range(min(n, 99))) + " " * 99 + "x = 1",
    "wrong indents": lambda n: "".join(" " * (i % 7) + "x = 1\n" for i in range(n)),
    "functions": lambda n: "".join(f"def f{i}(a):\n  return [a.crop(b) for b in c]\n" for i in range(n)),
    "boxes": lambda n: "".join(f"bbox = (-1, 0, {i}, 9)\nimage_clue_0.crop(bbox)\n" for i in range(n)),
    "lambdas": lambda n: "lambda: " * n + "1",
    "strings": lambda n: "f'{x:.2f}' " * n,
    "backslashes": lambda n: "\\ " * n + "\n" + ";" * n,
    "loops": lambda n: "".join(" " * i + "for a in b:\n" for i in range(90)) + "\n".join([" " * 90 + "a = b"] * n),
}


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("n", [300, 3000, 100_000])
def test_deep_and_long_code_takes_bounded_time(kind: str, n: int) -> None:
    code = DEEP[kind](n)
    code = code if n > 3000 else code[:MAX_CODE]
    start = time.process_time()
    result = mend(code, IMAGES, current="image_clue_0", paths=PATHS)
    assert time.process_time() - start < 5
    assert len(code) <= MAX_CODE or result.code == code
