"""Checks every requirement of this project in the running Python, by version and by import, and names what is missing.

python scripts/check_requirements.py [EXTRA ...]    extras of pyproject.toml to check beside the plain requirements
Versions pinned in an extra are reported but not enforced: a GPU host brings its own build of such a package.
Exit code 3 if anything is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

MODULES = {
    "pillow": "PIL",
    "scikit-image": "skimage",
    "orbax-checkpoint": "orbax.checkpoint",
    "pyright": None,  # tools of a developer, not of a test run
    "ruff": None,
    "pre-commit": None,
}


def main(extras: list[str]) -> int:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [(Requirement(line), True) for line in project["dependencies"]]
    for extra in extras:
        wanted += [(Requirement(line), False) for line in project["optional-dependencies"][extra]]
    missing = []
    if not Requirement(f"python{project['requires-python']}").specifier.contains(sys.version.split()[0]):
        missing.append(f"Python {project['requires-python']} (this is {sys.version.split()[0]})")
    for requirement, strict in wanted:
        module = MODULES.get(requirement.name, requirement.name.replace("-", "_"))
        if module is None:
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{requirement} (not installed)")
            continue
        fits = requirement.specifier.contains(re.sub(r"\+.*", "", found), prereleases=True)
        print(f"  {requirement.name:20} {found:16} {requirement.specifier}{'' if fits else '  <- another version'}")
        if strict and not fits:
            missing.append(f"{requirement} (found {found})")
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{requirement} (import failed: {error})")
    for line in missing:
        print(f"missing: {line}", file=sys.stderr)
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
