"""Mending of trivial faults in a policy's code before it runs: a pure stage of the caller, each rule a switch.

The rules are those of Thyme (yfzhang114/Thyme, swift/trainers/sandbox.py), with its faults corrected:

    first_indent   the first line takes the indentation of the second     only where the code does not parse,
    dedent         a margin before all lines is taken off                 and only if it does afterwards
    layout         an indentation that nothing asks for, tabs among blanks, `;;`, blanks behind a backslash
    input_path     `image_path = "..."` of no file there is -> the path of the input picture
    crop           a literal box is sorted, rounded and bound to the picture that it cuts
    widen          and is at least 64 pixels on a side
    cv2            cv., cv3., cv4., CV. -> cv2., unless the code gives that name a meaning
    output_dir     /mnt/data/temp_processed_images -> the folder for output
    number_format  {x:.2f} -> {x:.8f}, so that a result is not rounded before it is used

Edits are made in the text, at the place of the fault: all else stays byte for byte and on its line, so tracebacks tell
the model's own lines. Thyme rewrites the whole program (autopep8, ast.unparse) and clamps to the first picture only.
"""

import ast
import dataclasses
import itertools
import os.path
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping

from . import mend_crops
from .mend_crops import Size

ALL = frozenset(
    ("first_indent", "dedent", "layout", "input_path", "crop", "widen", "cv2", "output_dir", "number_format")
)
OUTPUT_DIR = "/mnt/data/temp_processed_images"  # what Thyme's training data writes to
MAX_CODE = 50_000  # characters; longer code is left as it is, so that the time is bounded
_FILE = "<code to mend>"
_SHOWN = 200  # characters of a report's before and after
_REPAIRS, _TRIES = 8, 3  # lines set right, and indentations tried for each
_ALIASES = frozenset(("cv", "cv3", "cv4", "CV"))
_BREAK = re.compile(r"\r\n|\r|\n")
_PRECISION = re.compile(rb":\.([0-7])f\}")
_NUMBER = re.compile(rb"[-+ \t]*[0-9.][0-9a-zA-Z_.+-]*")
_TRIVIA = re.compile(r";[ \t]*(?:;[ \t]*)+$|(?<=\\)[ \t]+$")  # `;;` at the end, blanks behind a backslash

# The parser tells of `"\d"` and the like; that is for whoever runs the code, not for the log of the caller.
warnings.filterwarnings("ignore", module=re.escape(_FILE))


@dataclasses.dataclass(frozen=True)
class Mend:
    """One change: the rule, the line (from 1), and the text there before and after (cut at 200 characters)."""

    rule: str
    line: int
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Paths:
    """Files as the session sees them.

    inputs: path -> name of the picture in `images`, the first is the default. files: others that exist, such as output
    of earlier cells. output: folder for what the code writes; without it the rule `output_dir` does nothing.
    """

    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Collection[str] = ()
    output: str = ""


@dataclasses.dataclass(frozen=True)
class Mended:
    """code: equal to what was given if `mends` is empty.

    sizes: (height, width) of the pictures that variables hold after it, as far as can be told, `images` of the next
    cell. names: every variable that it binds and those given, `names` of the next cell. folders: below `Paths.output`,
    that it writes to and that have to be there.
    """

    code: str
    mends: tuple[Mend, ...] = ()
    sizes: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    names: frozenset[str] = frozenset()
    folders: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Edit:
    start: int  # in bytes of UTF-8
    end: int
    text: bytes


_Found = tuple[Mend, list[_Edit]]


def mend(
    code: str,
    images: Mapping[str, tuple[int, int]],
    rules: Collection[str] = ALL,
    *,
    current: str | None = None,
    paths: Paths | None = None,
    names: Collection[str] = (),
) -> Mended:
    """`code` without its trivial faults, and a report of each change.

    images: (height, width) of the pictures that variables hold when the cell starts. current: the one that a variable
    is thought to hold of which nothing is known [the only one]. names: variables that earlier cells bound. Never raises
    for any code; ValueError for a rule that does not exist. Mending the result again changes nothing.
    """
    unknown = sorted(set(rules) - ALL)
    if unknown:
        raise ValueError(f"no rule of mending is called {', '.join(unknown)}; there are {', '.join(sorted(ALL))}")
    paths = paths or Paths()
    sizes = {name: Size(*size) for name, size in images.items()}
    before = Mended(code, (), images, frozenset(names))
    if len(code) > MAX_CODE:
        return before
    try:
        code, mends = _lay_out(code, rules)
        source = _Source.read(code)
        return before if source is None else _mend(source, mends, sizes, rules, current, paths, names)
    except RecursionError:  # an expression that the parser can follow and a walk over it cannot
        return before


def _mend(
    source: "_Source",
    mends: list[Mend],
    sizes: dict[str, Size],
    rules: Collection[str],
    current: str | None,
    paths: Paths,
    names: Collection[str],
) -> Mended:
    if "input_path" in rules and paths.inputs:
        source = source.apply(_input_path(source, paths, current), mends)
    if "cv2" in rules:
        source = source.apply(_cv2(source, names), mends)
    if "output_dir" in rules and paths.output:
        source = source.apply(_output_dir(source, paths.output), mends)
    if "number_format" in rules:
        source = source.apply(_number_format(source), mends)
    here = sizes[current] if current in sizes else next(iter(sizes.values())) if len(sizes) == 1 else None
    inputs = {path: sizes[name] for path, name in paths.inputs.items() if name in sizes}
    path = next(iter(paths.inputs), None)
    fixes, after = mend_crops.find(source.tree, sizes, here, names, inputs, path, rules)
    source = source.apply((_crop(source, fix) for fix in fixes), mends)
    bound = mend_crops.stored([source.tree])
    folders = _folders(source, paths.output) if paths.output else ()
    return Mended(
        source.text, tuple(sorted(mends, key=lambda m: m.line)), after, frozenset(bound.union(names)), folders
    )


# ------------------------------------------------------------------------------------------------------------- the text


class _Source:
    """A program that parses: its text, its tree, and where a node of the tree stands in the text."""

    def __init__(self, text: str, tree: ast.Module):
        self.text, self.tree, self.bytes = text, tree, text.encode()
        self._starts = [0, *itertools.accumulate(len(line.encode()) for line in _lines(text))]

    @classmethod
    def read(cls, text: str) -> "_Source | None":
        tree = _parse(text)
        return tree if tree is None else cls(text, tree)

    def span(self, node: ast.expr | ast.alias) -> tuple[int, int]:
        """Half-open, in bytes."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.alias) -> bytes:
        start, end = self.span(node)
        return self.bytes[start:end]

    def apply(self, found: Iterable[_Found], mends: list[Mend]) -> "_Source":
        """The text with these edits, and `mends` with their reports; edits that would break it are left out."""
        found = [item for item in found if item[1]]
        if not found:
            return self
        pieces, at = [], 0
        for edit in sorted((e for _, edits in found for e in edits), key=lambda e: e.start):
            if edit.start < at:
                return self  # two faults in one place
            pieces += [self.bytes[at : edit.start], edit.text]
            at = edit.end
        text = b"".join([*pieces, self.bytes[at:]]).decode()
        made = _Source.read(text)
        if made is None or len(made._starts) != len(self._starts):
            return self
        mends += [report for report, _ in found]
        return made


def _lines(text: str) -> list[str]:
    """With their ends, cut where Python cuts them: not at form feeds or Unicode's separators."""
    ends = [match.end() for match in _BREAK.finditer(text)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text, _FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a NUL, a lone surrogate
        return None


def _report(rule: str, line: int, before: str | bytes, after: str | bytes) -> Mend:
    shown = [t.decode("utf-8", "replace") if isinstance(t, bytes) else t for t in (before, after)]
    return Mend(rule, line, *(textwrap.shorten(t, _SHOWN) if len(t) > _SHOWN else t for t in shown))


def _outermost_strings(tree: ast.Module) -> Iterator[ast.Constant | ast.JoinedStr]:
    """The places of nodes inside an f-string are not to be relied on before Python 3.12, those of the whole are."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node
        else:
            todo.extend(ast.iter_child_nodes(node))


# --------------------------------------------------------------------------------------------------------------- layout


def _lay_out(code: str, rules: Collection[str]) -> tuple[str, list[Mend]]:
    """The first change of layout after which the code parses, or the code as it is.

    Code that parses is never touched: an `if` before an indented line has no wrong indentation.
    """
    if not {"first_indent", "dedent", "layout"} & set(rules) or _parse(code) is not None:
        return code, []
    lines = _lines(code)
    changes = {"dedent": _dedent, "first_indent": _align_first}
    for chain in (["dedent"], ["first_indent"], ["first_indent", "dedent"]):
        made, mends = lines, []
        for rule in chain:
            was, made = made, changes[rule](made)
            mends += _first_difference(rule, was, made)
        if mends and all(mend.rule in rules for mend in mends) and _parse("".join(made)) is not None:
            return "".join(made), mends
    if "layout" in rules:
        made = _dedent(lines) if "dedent" in rules else lines
        repaired = _repair(made)
        if repaired is not None:
            return "".join(repaired[0]), [*_first_difference("dedent", lines, made), *repaired[1]]
    return code, []


def _first_difference(rule: str, before: list[str], after: list[str]) -> list[Mend]:
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            return [_report(rule, n + 1, old.rstrip("\r\n"), new.rstrip("\r\n"))]
    return []


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _is_code(line: str) -> bool:
    return line.strip() != "" and not line.lstrip().startswith("#")


def _dedent(lines: list[str]) -> list[str]:
    margin = os.path.commonprefix([_indent(line) for line in lines if _is_code(line)])  # noqa: RUF071 no paths
    return [line[min(len(margin), len(_indent(line))) :] for line in lines]


def _align_first(lines: list[str]) -> list[str]:
    code = [n for n, line in enumerate(lines) if _is_code(line)]
    if len(code) < 2:
        return lines
    made = list(lines)
    made[code[0]] = _indent(lines[code[1]]) + lines[code[0]].lstrip(" \t")
    return made


def _repair(lines: list[str]) -> tuple[list[str], list[Mend]] | None:
    """Line after line that the parser stumbles over; None where that does not lead to code that parses.

    This is what autopep8 can do for code that does not parse. What else it does restyles code that runs, or changes
    what it means.
    """
    mends: list[Mend] = []
    for _ in range(_REPAIRS + 1):
        error = _error(lines)
        if error is None:
            return lines, mends
        n = (error.lineno or 0) - 1
        if not 0 <= n < len(lines):
            return None
        made = None
        if isinstance(error, TabError):
            made = [_indent(line).expandtabs(4) + line.lstrip(" \t") for line in lines]
        elif isinstance(error, IndentationError):
            made = _outdent(lines, n) if error.msg == "unexpected indent" else None
        else:
            text = lines[n].rstrip("\r\n")
            made = [*lines[:n], _TRIVIA.sub(_trivia, text) + lines[n][len(text) :], *lines[n + 1 :]]
        if made is None or made == lines:
            return None
        mends += _first_difference("layout", lines, made)
        lines = made
    return None


def _trivia(match: re.Match[str]) -> str:
    return ";" if ";" in match[0] else ""


def _error(lines: list[str]) -> SyntaxError | None:
    """What the parser says; None if nothing, or something that has no line."""
    try:
        ast.parse("".join(lines), _FILE)
    except SyntaxError as error:
        return error
    except (ValueError, RecursionError, MemoryError):
        return SyntaxError("")
    return None


def _outdent(lines: list[str], n: int) -> list[str] | None:
    """The run of lines from `n` on that are indented as it is, moved to the indentation of a line before."""
    old = _indent(lines[n])
    end = n + 1
    while end < len(lines) and (not _is_code(lines[end]) or _indent(lines[end]).startswith(old)):
        end += 1
    before = (_indent(line) for line in reversed(lines[:n]) if _is_code(line))
    shorter = dict.fromkeys(indent for indent in before if len(indent) < len(old))
    for new in itertools.islice(shorter, _TRIES):
        moved = [new + line[len(old) :] if line.startswith(old) else line for line in lines[n:end]]
        made = [*lines[:n], *moved, *lines[end:]]
        error = _error(made)
        if error is None or (error.lineno or 0) > n + 1:
            return made
    return None


# ------------------------------------------------------------------------------------------------------ what it names


def _input_path(source: _Source, paths: Paths, current: str | None) -> Iterator[_Found]:
    """The path of the input with the same file name, else of the current picture, else the first."""
    there = {*paths.inputs, *paths.files}
    by_file = {os.path.basename(path): path for path in reversed(list(paths.inputs))}
    default = next((path for path, name in paths.inputs.items() if name == current), next(iter(paths.inputs)))
    own = tuple(folder.rstrip("/") + "/" for folder in (OUTPUT_DIR, paths.output) if folder)
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="image_path")], value=ast.Constant(value=str(path)) as literal)
                | ast.AnnAssign(target=ast.Name(id="image_path"), value=ast.Constant(value=str(path)) as literal)
            ):
                if path not in there and not path.startswith(own):  # what an earlier cell wrote is no wrong input
                    new = by_file.get(os.path.basename(path), default)
                    old = source.of(literal)
                    text = repr(new).encode() + b"\n" * old.count(b"\n")  # the lines below keep their numbers
                    yield _report("input_path", node.lineno, old, repr(new)), [_Edit(*source.span(literal), text)]


def _cv2(source: _Source, names: Collection[str]) -> Iterator[_Found]:
    """`import cv` too; but a name that is bound here or before, as by `import cv2 as cv`, means something."""
    bound = mend_crops.stored([source.tree]).union(names)
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name) as used) if name in _ALIASES and name not in bound:
                if source.of(used) == name.encode():
                    shown = f"{name}.{node.attr}"
                    yield _report("cv2", used.lineno, shown, f"cv2.{node.attr}"), [_Edit(*source.span(used), b"cv2")]
            case ast.Import(names=listed):
                for alias in listed:
                    if alias.name in _ALIASES and source.of(alias).startswith(alias.name.encode()):
                        start, _ = source.span(alias)
                        new = "cv2" if alias.asname else f"cv2 as {alias.name}"
                        report = _report("cv2", alias.lineno, f"import {alias.name}", f"import {new}")
                        yield report, [_Edit(start, start + len(alias.name), new.encode())]


def _output_dir(source: _Source, output: str) -> Iterator[_Found]:
    prefix = re.compile(re.escape(OUTPUT_DIR).encode() + rb"(?![\w.-])")
    # A character that would end the string or escape something cannot be put into a literal that is not known in full.
    if not output.isprintable() or set(output) & set("\"'\\{}"):
        return
    new = output.rstrip("/").encode() or b"/."
    if prefix.search(new):  # it would be replaced again the next time
        return
    for node in _outermost_strings(source.tree):
        start, _ = source.span(node)
        edits = [_Edit(start + m.start(), start + m.end(), new) for m in prefix.finditer(source.of(node))]
        yield _report("output_dir", node.lineno, OUTPUT_DIR, output), edits


def _number_format(source: _Source) -> Iterator[_Found]:
    """In f-strings and in literals whose `format` is called. Where braces are escaped nothing is changed."""
    formats = {
        id(node.func.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format"
    }
    for node in _outermost_strings(source.tree):
        if isinstance(node, ast.Constant) and id(node) not in formats:
            continue
        start, text = source.span(node)[0], source.of(node)
        if b"{{" in text or b"}}" in text:
            continue
        edits = [_Edit(start + m.start(), start + m.end(), b":.8f}") for m in _PRECISION.finditer(text)]
        if edits:
            shown = [source.bytes[e.start : e.end] for e in edits]
            yield _report("number_format", node.lineno, b" ".join(shown), ":.8f}"), edits


def _crop(source: _Source, fix: mend_crops.Fix) -> _Found:
    edits, before = [], []
    for node, old, new in zip(fix.nodes, fix.numbers, fix.after, strict=True):
        before.append("" if node is None else source.of(node).decode())
        if node is not None and (old != new or isinstance(mend_crops.number(node), float)):
            if not _NUMBER.fullmatch(source.of(node)):  # inside an f-string the parser may tell a wrong place
                return _report(fix.rule, fix.node.lineno, "", ""), []
            edits.append(_Edit(*source.span(node), str(new).encode()))
    report = _report(fix.rule, fix.node.lineno, f"({', '.join(before)})", str(fix.after))
    return report, edits


def _folders(source: _Source, output: str) -> tuple[str, ...]:
    """Folders below the one for output that literal paths name."""
    root = output.rstrip("/") + "/"
    found: dict[str, None] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(root):
            folder = os.path.normpath(os.path.dirname(node.value))
            if folder.startswith(root) and "\0" not in folder:
                found[folder] = None
    return tuple(found)
