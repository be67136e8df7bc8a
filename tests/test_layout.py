"""The shape of the code: which package may import which, file sizes, and habits that are not allowed."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Dependencies point one way: a unit may import units of its own line and of earlier ones. The first line holds what all
# parts speak of: configuration, and the plain types of records, batches and trajectories.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("config", "config_load", "config_check", "data.records", "data.batch", "rollout.trajectory", "pyvision_sandbox"),
    ("ops", "parallel"),
    ("models",),
    ("data", "rollout", "training"),
    ("rewards", "worlds", "checkpoint"),
    ("agents",),
    ("evaluation", "recipes"),
    ("bench", "serving", "cli"),
)
# `report` reads run directories, and needs nothing else of the package than this.
REPORT_MAY_IMPORT = ("data.records",)
# Imports inside a function: a command loads its body when it is called, so that `--help` is quick; a recipe loads what
# only one of its branches needs.
LOCAL_IMPORTS_IN = ("cli", "recipes", "evaluation", "bench", "report", "models.hf")
MAX_LINES, MAX_MEDIAN = 600, 150
# Imported by tests and benchmarks, never by the packages.
TEST_ONLY = {"torch", "torchvision", "tensorflow", "pytest"}

SOURCES = sorted([*(ROOT / "pyvision_jax").rglob("*.py"), *(ROOT / "sandbox" / "pyvision_sandbox").rglob("*.py")])
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


def module_of(path: Path) -> str:
    base = ROOT if path.is_relative_to(ROOT / "pyvision_jax") else ROOT / "sandbox"
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The name in `LAYERS` that a module belongs to: its own, else its package's, `cli_*` with `cli`."""
    if module.split(".")[0] == "pyvision_sandbox":
        return "pyvision_sandbox"
    short = module.removeprefix("pyvision_jax").lstrip(".")
    named = {name for layer in LAYERS for name in layer}
    if short in named:
        return short
    first = short.split(".")[0]
    return "cli" if first.startswith("cli_") else first


def level_of(unit: str) -> int:
    for level, layer in enumerate(LAYERS):
        if unit in layer:
            return level
    raise AssertionError(f"{unit!r} stands in no layer of tests/test_layout.py")


def imports(tree: ast.Module, module: str, package: bool) -> Iterator[tuple[str, ast.stmt, bool]]:
    """(absolute module, statement, whether it stands inside a function); `from p import m` yields both p and p.m."""

    def walk(node: ast.AST, local: bool) -> Iterator[tuple[str, ast.stmt, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue  # for the type checker only
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child, local
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = module.split(".") if package else module.split(".")[:-1]
                    parents = parents[: len(parents) - child.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield base, child, local
                for alias in child.names:
                    yield f"{base}.{alias.name}", child, local
            yield from walk(child, local or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(tree, False)


def known_modules() -> set[str]:
    return {module_of(path) for path in SOURCES}


def own_imports(path: Path) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Imports of this project's modules, names inside a module reduced to the module."""
    known = known_modules()
    found = [item for item in imports(ast.parse(path.read_text()), module_of(path), path.name == "__init__.py")]
    found = [item for item in found if item[0] in known]
    for name, node, local in found:
        # `from package import module` asks for the module, not for what the package's __init__ offers.
        if not any(other is node and longer.startswith(f"{name}.") for longer, other, _ in found):
            yield name, node, local


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    unit = unit_of(module)
    if not unit:  # pyvision_jax/__init__.py
        assert not list(own_imports(path))
        return
    for name, node, _ in own_imports(path):
        target = unit_of(name)
        where = f"{path.relative_to(ROOT)}:{node.lineno}: {module} imports {name}"
        if not target or target == unit:
            continue
        if unit == "report":
            assert target in REPORT_MAY_IMPORT, where
            continue
        if target == "report":
            assert unit in ("cli", "recipes", "evaluation"), where
            continue
        if target in ("data", "rollout") and name == f"pyvision_jax.{target}":  # the empty packages above leaf modules
            continue
        assert level_of(target) <= level_of(unit), f"{where}, which comes after it"
        if level_of(target) == level_of(unit) == 0:
            assert "pyvision_sandbox" not in (unit, target), f"{where}: the sandbox stands alone"


def test_modules_form_no_cycle() -> None:
    known = known_modules()
    edges: dict[str, set[str]] = {module: set() for module in known}
    for path in SOURCES:
        for name, _, local in own_imports(path):
            if not local and name != module_of(path):
                edges[module_of(path)].add(name)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for target in sorted(edges[module]):
            visit(target, (*trail, module))
        done.add(module)

    for module in sorted(known):
        visit(module, ())


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_local_imports_only_where_listed(path: Path) -> None:
    module = module_of(path).removeprefix("pyvision_jax").lstrip(".")
    if unit_of(module_of(path)) == "pyvision_sandbox":
        return  # the children of the zygote choose what they load
    allowed = any(module == name or module.startswith((f"{name}.", f"{name}_")) for name in LOCAL_IMPORTS_IN)
    tree = ast.parse(path.read_text())
    local = [node.lineno for _, node, inside in imports(tree, module_of(path), path.name == "__init__.py") if inside]
    assert allowed or not local, f"{path.relative_to(ROOT)}: imports inside functions, lines {sorted(set(local))}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_what_the_packages_do_not_import(path: Path) -> None:
    sandbox = unit_of(module_of(path)) == "pyvision_sandbox"
    banned = TEST_ONLY | ({"jax", "flax", "pyvision_jax", "transformers"} if sandbox else set())
    for name, node, _ in imports(ast.parse(path.read_text()), module_of(path), path.name == "__init__.py"):
        assert name.split(".")[0] not in banned, f"{path.relative_to(ROOT)}:{node.lineno}: imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_swallowed_errors_and_no_probing(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        # A handler that only raises another error swallows none: some libraries raise no class of their own.
        if isinstance(node, ast.ExceptHandler) and not (len(node.body) == 1 and isinstance(node.body[0], ast.Raise)):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in kinds:
                if kind is None or (isinstance(kind, ast.Name) and kind.id == "Exception"):
                    found.append((node.lineno, "catches everything"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            # getattr of two arguments reads a field by name and raises; the other forms ask what an object might be.
            asks = {"hasattr": True, "getattr": len(node.args) > 2}
            if asks.get(node.func.id):
                found.append((node.lineno, node.func.id))
    assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_file_sizes() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in [*SOURCES, *tests]}
    long = {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MAX_LINES}
    assert not long
    median = statistics.median([lines[path] for path in SOURCES])
    assert median <= MAX_MEDIAN, f"median of {len(SOURCES)} files is {median} lines"


def test_the_packages_import_only_declared_requirements() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip() for line in project["dependencies"]}
    renamed = {"pillow": "PIL", "orbax-checkpoint": "orbax", "scikit-image": "skimage"}
    allowed = {renamed.get(name, name.replace("-", "_")) for name in names}
    # Come with a declared requirement as part of its interface: typer's click, omegaconf's yaml, jax's ml_dtypes.
    allowed |= {"click", "yaml", "ml_dtypes", "pyvision_jax", "pyvision_sandbox"} | set(sys.stdlib_module_names)
    # Of the extra `serve`; only the server's own modules import them, and only its command loads those.
    extra = {"uvicorn", "starlette"}
    unknown = {}
    for path in SOURCES:
        for name, node, _ in imports(ast.parse(path.read_text()), module_of(path), path.name == "__init__.py"):
            top = name.split(".")[0]
            if top and top not in (allowed | extra if "serving" in path.parts else allowed):
                unknown[f"{path.relative_to(ROOT)}:{node.lineno}"] = name
    assert not unknown, unknown
