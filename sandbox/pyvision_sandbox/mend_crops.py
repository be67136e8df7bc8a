"""Which literal boxes of a program crop which picture, and what they must become to lie inside it. Nothing is run.

`find` follows pictures through a program: their size (height, width), from the inputs over copies, resizes and crops to
the name that is cropped at last. Where it cannot tell, the size is unknown and the box stays as it is.
"""

import ast
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

MIN_SIDE = 64  # pixels; what a vision model needs to see something

_BOX_NAMES = {
    "crop_box", "bbox", "box", "coordinates", "coords", "crop_coords", "left_crop_coords", "right_crop_coords",
    "top_crop_coords", "bottom_crop_coords",
}  # fmt: skip
_SIDES = (
    {"x1", "left", "xmin", "x_min"},
    {"y1", "top", "upper", "ymin", "y_min"},
    {"x2", "right", "xmax", "x_max"},
    {"y2", "bottom", "lower", "ymax", "y_max"},
)
_NO_SIDES = {"w", "h", "width", "height"}  # `x1, y1, w, h`: a corner and a size, no box
# Calls whose picture has the size of what they are called on, or of their first argument.
_SAME_SIZE_METHODS = {"astype", "convert", "copy", "enhance", "filter"}
_SAME_SIZE_FUNCTIONS = {
    "GaussianBlur", "array", "asarray", "autocontrast", "bilateralFilter", "convertScaleAbs", "cvtColor", "equalize",
    "equalizeHist", "flip", "fromarray", "grayscale", "invert", "medianBlur", "mirror", "posterize", "solarize",
}  # fmt: skip
_ENHANCERS = {"Brightness", "Color", "Contrast", "Sharpness"}
_READERS = {"imread", "open"}
_CV2 = {"CV", "cv", "cv2", "cv3", "cv4"}
_MAX_DEPTH = 50  # of an expression that is followed
_MAX_NUMBER = 1e12  # beyond it a literal is no coordinate


class Size(NamedTuple):
    height: int
    width: int


@dataclasses.dataclass(eq=False)
class Box:
    """Four numbers that stand in the source. nodes: where, as x1, y1, x2, y2; None for a bound that is left out."""

    numbers: tuple[float, ...]
    nodes: tuple[ast.expr | None, ...]
    node: ast.expr
    ints: bool = False  # a slice: it takes no float
    crops: set[Size | None] = dataclasses.field(default_factory=set)  # of the pictures that it crops; None: not known
    read: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.node.lineno, self.node.col_offset

    @property
    def rounded(self) -> tuple[int, ...]:
        return tuple(round(v) for v in self.numbers)


@dataclasses.dataclass(frozen=True)
class Fix:
    """`nodes[i]` is to become `after[i]`, for all that are not None."""

    rule: str  # "crop": it lay outside; "widen": it was too small
    node: ast.expr
    nodes: tuple[ast.expr | None, ...]
    numbers: tuple[float, ...]
    after: tuple[int, ...]


class Side(NamedTuple):
    """A variable that holds one number of a box: `x1` after `x1, y1, x2, y2 = 10, 20, 30, 40`."""

    box: Box
    index: int


_Value = Size | Box | Side | str | None  # of a variable; a string is a path, None is anything else


def clamp(numbers: Sequence[float], size: Size, min_side: int) -> tuple[int, ...]:
    """x1, y1, x2, y2: sorted, inside the picture, at least `min_side` long (or as long as the picture), whole."""
    x1, x2 = _clamp_pair(numbers[0], numbers[2], size.width, min_side)
    y1, y2 = _clamp_pair(numbers[1], numbers[3], size.height, min_side)
    return x1, y1, x2, y2


def _clamp_pair(a: float, b: float, length: int, least: int) -> tuple[int, int]:
    low, high = sorted((a, b))
    low, high = round(min(max(low, 0), length - 1)), round(min(max(high, 0), length))
    if length <= least:
        return 0, length
    if high - low < least:
        high = low + least
        if high > length:
            low, high = length - least, length
    return low, high


def number(node: ast.expr | None) -> float | None:
    """The number that a literal is, with its sign: in the tree `-5` is a minus before a 5."""
    sign = 1
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        sign = -sign if isinstance(node.op, ast.USub) else sign
        node = node.operand
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int | float) or isinstance(node.value, bool):
        return None
    return sign * node.value if abs(node.value) <= _MAX_NUMBER else None


def find(
    tree: ast.Module,
    sizes: Mapping[str, Size],
    current: Size | None,
    names: Collection[str],
    inputs: Mapping[str, Size],
    path: str | None,
    rules: Collection[str],
) -> tuple[list[Fix], dict[str, Size]]:
    """The boxes to change, and the sizes of the pictures that the module's variables hold at its end.

    sizes: of pictures by variable. current: of a picture that a name unknown here holds. names: variables of earlier
    cells. inputs: sizes by file path; path: what `image_path` holds at the start.
    """
    conflicts: set[tuple[int, int]] = set()
    for _ in range(4):
        tracker = _Tracker(sizes, current, names, inputs, path, rules, conflicts)
        tracker.lasting = sizes.keys() - stored([tree])
        tracker.run(tree.body)
        fixes, found = tracker.fixes()
        if found <= conflicts:
            return fixes, {name: value for name, value in tracker.env.items() if isinstance(value, Size)}
        conflicts |= found  # a box for two pictures stays as it is, so what it cuts has another size than was thought
    return [], {}


class _Tracker:
    def __init__(
        self,
        sizes: Mapping[str, Size],
        current: Size | None,
        names: Collection[str],
        inputs: Mapping[str, Size],
        path: str | None,
        rules: Collection[str],
        conflicts: Collection[tuple[int, int]],
    ):
        self.inputs, self.current, self.rules, self.conflicts = inputs, current, rules, conflicts
        self.env: dict[str, _Value] = dict.fromkeys(names)
        self.env.update(sizes)
        if path is not None:
            self.env["image_path"] = path
        self.journal: list[tuple[str, _Value, bool]] = []  # what names held before, to take a branch back
        self.boxes: list[Box] = []
        self.guess = True  # whether a name that is not known here may be the current picture
        self.lasting: Collection[str] = ()  # pictures that no line binds anew

    # ------------------------------------------------------------------------------------------------- outcome
    def fixes(self) -> tuple[list[Fix], set[tuple[int, int]]]:
        """The fixes, and the places of the boxes that have none because they cut pictures of several sizes."""
        fixes, conflicts = [], set()
        for box in self.boxes:
            if not box.crops and not box.read and self.current is not None:
                box.crops.add(self.current)  # for a later cell
            wanted = {self.fit(box, size) for size in box.crops}
            if len(wanted) > 1 or box.place in self.conflicts:
                conflicts.add(box.place)
                continue
            after, size = next(iter(wanted), None), next(iter(box.crops), None)
            if after is None or size is None:
                continue
            floats = box.ints and any(isinstance(v, float) for v in box.numbers)
            if after != box.rounded or floats:
                inside = clamp(box.numbers, size, 1) == box.rounded and not floats
                fixes.append(Fix("widen" if inside else "crop", box.node, box.nodes, box.numbers, after))
        return fixes, conflicts

    def fit(self, box: Box, size: Size | None) -> tuple[int, ...] | None:
        """What the box is changed to for a picture of this size: None where that is not known."""
        if size is None or box.place in self.conflicts:
            return None
        inside = clamp(box.numbers, size, 1)
        if "crop" not in self.rules and inside != box.rounded:
            return None
        return clamp(box.numbers, size, MIN_SIDE) if "widen" in self.rules else inside

    # ------------------------------------------------------------------------------------------------- statements
    def run(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, s: ast.stmt) -> None:
        match s:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, value)
            case ast.If():
                self.scan(s.test)
                self.branches([s.body, s.orelse])
            case ast.For() | ast.AsyncFor() | ast.While():
                self.scan(s.test if isinstance(s, ast.While) else s.iter)
                for name in stored([s]):  # what the last round left is what the next one starts with
                    self.bind(name, None)
                mark = len(self.journal)
                self.run(s.body)
                self.run(s.orelse)
                for name in {name for name, _, _ in self.journal[mark:]}:
                    self.forget(name)  # there may have been no round
            case ast.Try() | ast.TryStar():
                self.run(s.body)
                self.run(s.orelse)
                self.branches([[], *(handler.body for handler in s.handlers)])
                self.run(s.finalbody)
            case ast.With() | ast.AsyncWith():
                for item in s.items:
                    if item.optional_vars is None:
                        self.scan(item.context_expr)
                    else:
                        self.assign(item.optional_vars, item.context_expr)
                self.run(s.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.bind(s.name, None)
                self.apart(s.body, stored([s]))
            case _:
                for child in ast.iter_child_nodes(s):
                    if isinstance(child, ast.expr):
                        self.scan(child)
                for name in stored([s]):
                    self.bind(name, None)

    def branches(self, bodies: Sequence[Sequence[ast.stmt]]) -> None:
        """Any one of them may run: a name that they leave with different values is known no more."""
        ends: list[dict[str, _Value]] = []
        for body in bodies:
            mark = len(self.journal)
            self.run(body)
            ends.append({name: self.env.get(name) for name, _, _ in self.journal[mark:]})
            for name, value, was in reversed(self.journal[mark:]):
                if was:
                    self.env[name] = value
                else:
                    self.env.pop(name, None)
            del self.journal[mark:]
        for name in {name for end in ends for name in end}:
            values = [end.get(name, self.env.get(name)) for end in ends]
            if all(v == values[0] for v in values):
                self.bind(name, values[0])
                continue
            for value in values:
                self.bind(name, value)
                self.forget(name)

    def apart(self, body: Sequence[ast.stmt], local: Collection[str]) -> None:
        """A function runs at another time: of what is outside it only what never changes is known."""
        outside, journal, guess = self.env, self.journal, self.guess
        self.env = {name: value for name, value in outside.items() if name in self.lasting}
        self.env.update(dict.fromkeys(local))
        self.journal, self.guess = [], False
        self.run(body)
        self.env, self.journal, self.guess = outside, journal, guess

    def bind(self, name: str, value: _Value) -> None:
        self.journal.append((name, self.env.get(name), name in self.env))
        self.env[name] = value

    def forget(self, name: str) -> None:
        held = self.env.get(name)
        held = held.box if isinstance(held, Side) else held
        if isinstance(held, Box):
            held.read = True  # what it is used for is no longer seen
        self.bind(name, None)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            box = self.literal(value) if target.id in _BOX_NAMES else None
            if box is not None:
                self.boxes.append(box)
                self.bind(target.id, box)
                return
            self.scan(value, assigned=True)
            self.bind(target.id, self.value(value))
            return
        names = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
        if isinstance(target, ast.Tuple) and len(names) == len(target.elts) == 4:
            order = _order(names)
            box = self.literal(value, order) if order else None
            if box is not None:
                self.boxes.append(box)
            else:
                order = [0, 1, 2, 3]
                box = self.box(value)
            if box is not None:
                for place, name in enumerate(names):
                    self.bind(name, Side(box, order.index(place)))
                return
        self.scan(value)
        for name in stored([target]):
            self.bind(name, None)

    # ------------------------------------------------------------------------------------------------- expressions
    def scan(self, node: ast.expr, assigned: bool = False) -> None:
        """Look at every crop in an expression. assigned: it is the whole right side of `name = ...`."""
        if assigned:
            self.literal_slice(node)
        todo: list[ast.AST] = [node]
        while todo:
            n = todo.pop()
            match n:
                case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                    self.hidden(n)
                    continue
                case ast.Call():
                    self.crop(n)
                case ast.Subscript():
                    self.named_slice(n)
                case ast.NamedExpr():
                    self.bind(n.target.id, None)
                case ast.Name() if not (assigned and n is node):
                    held = self.env.get(n.id)
                    held = held.box if isinstance(held, Side) else held
                    if isinstance(held, Box):
                        held.read = True
            todo.extend(ast.iter_child_nodes(n))

    def hidden(self, node: ast.expr) -> None:
        """A comprehension or lambda: its own names hide those outside."""
        arguments = node.args if isinstance(node, ast.Lambda) else None
        names = {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)} if arguments else stored([node])
        outside, journal, guess = self.env, self.journal, self.guess
        self.env, self.journal, self.guess = dict(outside), [], False
        self.env.update(dict.fromkeys(names))
        for child in ast.iter_child_nodes(node):
            parts = [child] if isinstance(child, ast.expr) else ast.iter_child_nodes(child)
            for part in parts:
                if isinstance(part, ast.expr):
                    self.scan(part)
        self.env, self.journal, self.guess = outside, journal, guess

    def crop(self, call: ast.Call) -> None:
        argument = _crop_argument(call)
        if argument is None:
            return
        box = self.literal(argument)
        if box is not None:
            self.boxes.append(box)
        else:
            box = self.box(argument)
        if box is not None:
            assert isinstance(call.func, ast.Attribute)
            box.crops.add(self.size(call.func.value))

    def named_slice(self, node: ast.Subscript) -> None:
        """`picture[y1:y2, x1:x2]` with the variables of a box."""
        part = _slice_bounds(node)
        sides = [self.env.get(b.id) if isinstance(b, ast.Name) else None for b in part[1]] if part else [None]
        if part and isinstance(sides[0], Side) and sides == [Side(sides[0].box, i) for i in range(4)]:
            sides[0].box.crops.add(self.size(part[0]))

    def literal_slice(self, node: ast.expr) -> None:
        """`picture[10:90, 20:80]`; an array that is not known to be a picture may hold anything else."""
        part = _slice_bounds(node)
        if part is None:
            return
        size = self.size(part[0], guess=isinstance(part[0], ast.Name) and part[0].id == "image")
        box = None if size is None else _slice_box(node, part[1], size)
        if box is not None:
            box.crops.add(size)
            self.boxes.append(box)

    def literal(self, node: ast.expr, order: Sequence[int] = (0, 1, 2, 3)) -> Box | None:
        if not isinstance(node, ast.Tuple | ast.List) or len(node.elts) != 4:
            return None
        numbers = [number(e) for e in node.elts]
        found = [n for i in order if (n := numbers[i]) is not None]
        return Box(tuple(found), tuple(node.elts[i] for i in order), node) if len(found) == 4 else None

    def box(self, node: ast.expr | None) -> Box | None:
        """The box that an argument names: `bbox`, `tuple(bbox)`, `(x1, y1, x2, y2)`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("tuple", "list"):
            node = node.args[0] if len(node.args) == 1 else None
        if isinstance(node, ast.Name):
            held = self.env.get(node.id)
            return held if isinstance(held, Box) else None
        if isinstance(node, ast.Tuple | ast.List) and len(node.elts) == 4:
            sides = [self.env.get(e.id) if isinstance(e, ast.Name) else None for e in node.elts]
            first = sides[0]
            if isinstance(first, Side) and sides == [Side(first.box, i) for i in range(4)]:
                return first.box
        return None

    def value(self, node: ast.expr) -> _Value:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.env:
            return self.env[node.id]
        return self.size(node)

    def size(self, node: ast.expr, depth: int = 0, guess: bool = True) -> Size | None:
        """Of the picture that an expression is; None where that is not known."""
        if depth > _MAX_DEPTH:
            return None
        if isinstance(node, ast.Name):
            if node.id in self.env:
                value = self.env[node.id]
                return value if isinstance(value, Size) else None
            return self.current if guess and self.guess else None
        part = _slice_bounds(node)
        if part is not None:
            size = self.size(part[0], depth + 1, guess=False)
            box = None if size is None else _slice_box(node, part[1], size)
            return None if box is None or size is None else _cut(self.fit(box, size) or box.rounded, size)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.called(node, node.func, depth)
        return None

    def called(self, call: ast.Call, func: ast.Attribute, depth: int) -> Size | None:
        name, first = func.attr, call.args[0] if call.args else None
        argument = _crop_argument(call)
        if argument is not None:
            box, size = self.literal(argument) or self.box(argument), self.size(func.value, depth + 1)
            return None if box is None else _cut(self.fit(box, size) or box.rounded, None)
        if name in _READERS and first is not None:
            path = self.value(first) if isinstance(first, ast.Name | ast.Constant) else None
            return self.inputs.get(path) if isinstance(path, str) else None
        if name == "resize":
            place = 1 if isinstance(func.value, ast.Name) and func.value.id in _CV2 else 0
            shape = call.args[place] if len(call.args) > place else None
            sides = [number(e) for e in shape.elts] if isinstance(shape, ast.Tuple) else []
            found = [int(n) for n in sides if n is not None and n >= 1]
            return Size(found[1], found[0]) if len(found) == len(sides) == 2 else None
        if name == "enhance" and isinstance(func.value, ast.Call) and func.value.args:
            made = func.value.func
            kind = made.attr if isinstance(made, ast.Attribute) else made.id if isinstance(made, ast.Name) else ""
            return self.size(func.value.args[0], depth + 1) if kind in _ENHANCERS else None
        if name in _SAME_SIZE_METHODS and not (name == "filter" and first is None):
            return self.size(func.value, depth + 1)
        if name == "rotate" and not any(k.arg in ("expand", None) for k in call.keywords) and len(call.args) == 1:
            return self.size(func.value, depth + 1)
        if name in _SAME_SIZE_FUNCTIONS and first is not None:
            return self.size(first, depth + 1)
        return None


# ----------------------------------------------------------------------------------------------------- reading the tree


def stored(nodes: Sequence[ast.AST]) -> set[str]:
    """Every name that is bound anywhere below."""
    names: set[str] = set()
    for top in nodes:
        for node in ast.walk(top):
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                    names.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.alias():
                    names.add(node.asname or node.name.split(".")[0])
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    names.add(name)
                case ast.Global(names=listed) | ast.Nonlocal(names=listed):
                    names.update(listed)
    return names


def _order(names: Sequence[str]) -> list[int]:
    """Where x1, y1, x2 and y2 stand in an unpacking; [] if it is none of a box.

    One name that tells a side is enough, the others are then taken in the usual order; but not if a name tells
    something else, or a side stands where another belongs and the four do not name all sides.
    """
    lower = [name.lower() for name in names]
    if len(lower) != 4 or _NO_SIDES & set(lower):
        return []
    if lower == ["x0", "y0", "x1", "y1"]:
        return [0, 1, 2, 3]
    told = [next((i for i, side in enumerate(_SIDES) if name in side), None) for name in lower]
    if sorted(i for i in told if i is not None) == [0, 1, 2, 3]:
        return [told.index(i) for i in range(4)]
    usual = any(i is not None for i in told) and all(i in (None, place) for place, i in enumerate(told))
    return [0, 1, 2, 3] if usual else []


def _crop_argument(call: ast.Call) -> ast.expr | None:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "crop":
        return None
    given = [*call.args, *(k.value for k in call.keywords if k.arg == "box")]
    return given[0] if len(given) == 1 == len(call.args) + len(call.keywords) else None


def _slice_bounds(node: ast.expr) -> tuple[ast.expr, tuple[ast.expr | None, ...]] | None:
    """(picture, (x1, y1, x2, y2)) of `picture[y1:y2, x1:x2]`, also with `, :` behind and `.copy()`."""
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr="copy"), args=[], keywords=[]):
            node = inner
    match node:
        case ast.Subscript(
            value=picture,
            slice=ast.Tuple(
                elts=[
                    ast.Slice(lower=y1, upper=y2, step=None),
                    ast.Slice(lower=x1, upper=x2, step=None),
                    *rest,
                ]
            ),
        ):
            for other in rest:
                match other:
                    case ast.Slice(lower=None, upper=None, step=None):
                        pass
                    case _:
                        return None
            return picture, (x1, y1, x2, y2)
    return None


def _slice_box(node: ast.expr, bounds: tuple[ast.expr | None, ...], size: Size) -> Box | None:
    """The box of a literal slice in coordinates of the picture.

    A negative bound counts from the end, as arrays do, wherever something is left that way; else it is a coordinate
    outside the picture.
    """
    ends = (0, 0, size.width, size.height)
    numbers = [end if bound is None else number(bound) for bound, end in zip(bounds, ends, strict=True)]
    box = [n for n in numbers if n is not None]
    if len(box) < 4:
        return None
    for low, high, length in ((0, 2, size.width), (1, 3, size.height)):
        a, b = (max(v + length, 0) if v < 0 else v for v in (box[low], box[high]))
        if a < min(b, length):
            box[low], box[high] = a, b
    return Box(tuple(box), bounds, node, ints=True)


def _cut(box: Sequence[float], size: Size | None) -> Size | None:
    """The size of what a box cuts; of a picture that ends at `size` where there is one (an array)."""
    x1, y1, x2, y2 = box
    if size is not None:
        x2, y2 = min(x2, size.width), min(y2, size.height)
    return Size(int(y2 - y1), int(x2 - x1)) if y2 > y1 and x2 > x1 else None
