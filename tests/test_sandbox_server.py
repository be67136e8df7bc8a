"""The server's own parts: which files a session may see, and the copy of a branch's files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pyvision_sandbox import jail
from pyvision_sandbox.branching import copy_tree
from pyvision_sandbox.farm import cover, survey
from pyvision_sandbox.policy import SandboxError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("lib/python3/json/a.py", "lib/python3/site-packages/secret/b.py", "lib/other/c.so", "share/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_cover_leaves_out_the_holes(tree: Path) -> None:
    hole = str(tree / "lib/python3/site-packages")
    whole, listed = cover([str(tree)], [hole])
    assert sorted(whole) == sorted(str(tree / p) for p in ("lib/python3/json", "lib/other", "share"))
    assert sorted(listed) == sorted(str(tree / p) for p in (".", "lib", "lib/python3"))


def test_cover_of_a_root_without_holes_is_the_root(tree: Path) -> None:
    assert cover([str(tree)], ["/elsewhere"]) == ([str(tree)], [])
    assert cover([str(tree / "lib")], [str(tree / "lib")]) == ([], [])


def test_a_link_leads_no_further_than_its_own_place(tree: Path) -> None:
    (tree / "share/link").symlink_to(tree / "lib/python3/site-packages")
    whole, _ = cover([str(tree / "share"), str(tree / "lib")], [str(tree / "lib/python3/site-packages")])
    assert not any("secret" in p or p.endswith("link") for p in whole)


@pytest.mark.parametrize("profile", ["numpy_pil", "vision", "full"])
def test_the_farm_holds_the_profile_and_nothing_else(profile: str, tmp_path: Path) -> None:
    farm = survey(profile)
    assert {"numpy", "PIL", "msgpack", "pyvision_sandbox"} <= farm.packages.keys()
    assert not {"jax", "jaxlib", "torch", "transformers", "pyvision_jax", "pip"} & farm.packages.keys()
    assert ("matplotlib" in farm.packages) == (profile != "numpy_pil")
    assert all(os.path.exists(place) for place in farm.packages.values())
    for place in farm.packages.values():  # what is linked lies in a hole, or nowhere that is readable anyway
        assert any(place.startswith(hole + "/") for hole in farm.holes) or "sandbox" in place
    farm.plant(str(tmp_path / "farm"))
    assert (tmp_path / "farm/numpy/__init__.py").is_file()


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("-packages")])
    with pytest.raises(SandboxError, match=r"'numpy_pil' needs the package '(numpy|pillow|msgpack)"):
        survey("numpy_pil")


def test_paths_that_the_jail_has_of_its_own_are_moved() -> None:
    assert jail.inside("/usr/lib") == "/usr/lib"
    assert jail.inside("/tmp/venv/lib") == "/opt/host/tmp/venv/lib"
    assert jail.inside("/tmpfs") == "/tmpfs"


def test_a_branch_gets_files_folders_and_links_and_nothing_odd(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "sub").mkdir(parents=True)
    target.mkdir()
    (source / "sub/x").write_bytes(b"12345")
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    with (source / "sparse").open("wb") as f:
        f.truncate(1 << 20)
    copied = copy_tree(os.open(source, os.O_RDONLY), os.open(target, os.O_RDONLY))
    assert (target / "sub/x").read_bytes() == b"12345" and copied == 5 + (1 << 20)
    assert os.readlink(target / "link") == "/etc/passwd"  # a link stays a link: it leads nowhere in the jail
    assert not (target / "pipe").exists()
