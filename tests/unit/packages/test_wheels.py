"""The cache of wheels, and the key of a project's wheel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from installed_venvs import make_project
from small_index import write_wheel

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.distributions import Distribution, Kind
from sgpu_magic.packages.wheels import build_project, content_key, kept_wheel, remove_old_wheels, repack


def maker(version: str = "1.0") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "build.log").touch()
        return write_wheel(folder, "tiny", version)

    return make


def test_a_wheel_is_made_once(tmp_path: Path):
    made = kept_wheel(tmp_path / "wheels", "tiny-1", maker())
    assert sorted(path.name for path in (tmp_path / "wheels" / "tiny-1").iterdir()) == ["sha256", made.file]
    assert kept_wheel(tmp_path / "wheels", "tiny-1", maker("2.0")) == made


def test_of_two_kernels_that_make_the_same_wheel_the_first_one_counts(tmp_path: Path):
    root = tmp_path / "wheels"
    others: list[object] = []

    def make(folder: Path) -> Path:
        # another kernel finishes first
        others.append(kept_wheel(root, "tiny-1", maker()))
        return maker("2.0")(folder)

    assert [kept_wheel(root, "tiny-1", make)] == others
    assert [path.name for path in root.iterdir()] == ["tiny-1"]
    # something other than a wheel in its place
    (root / "tiny-2").mkdir()
    (root / "tiny-2" / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        kept_wheel(root, "tiny-2", maker())
    assert not list(root.glob(".making-*"))


def test_wheels_that_were_not_used_for_long_are_removed(tmp_path: Path):
    remove_old_wheels(tmp_path / "nothing", 5.0)
    old, used = (kept_wheel(tmp_path, f"tiny-{number}", maker()) for number in (1, 2))
    for wheel in (old, used):
        os.utime(Path(wheel.path).parent, (5.0, 5.0))
    kept_wheel(tmp_path, "tiny-2", maker())
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", (5.0, 5.0))
    remove_old_wheels(tmp_path, 6.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tiny-2"]


def installed(site: Path) -> Distribution:
    """A package as an installer leaves it."""
    info = site / "tiny-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py2-none-any\nTag: py3-none-any\n")
    (info / "RECORD").write_text(
        "tiny/__init__.py,,\ntiny/__pycache__/__init__.cpython-311.pyc,,\n\ntiny-1.0.dist-info/METADATA,,\n"
    )
    (site / "tiny").mkdir()
    (site / "tiny" / "__init__.py").touch()
    return Distribution("tiny", "1.0", Kind.WHEEL, record="00", location=str(info))


def test_a_package_whose_files_are_gone_can_not_be_repacked(tmp_path: Path):
    found = installed(tmp_path / "site")
    assert repack(found, tmp_path / "wheels").file == "tiny-1.0-py2.py3-none-any.whl"
    (tmp_path / "site" / "tiny" / "__init__.py").unlink()
    with pytest.raises(EnvironmentFailed) as raised:
        repack(found, tmp_path / "others")
    assert raised.value.message == (
        "no wheel can be built from the installed package tiny 1.0: No such file or directory "
        f"({tmp_path / 'site' / 'tiny' / '__init__.py'}). Reinstall it, or free some disk space."
    )
    assert list((tmp_path / "others").iterdir()) == []


def test_a_folder_for_wheels_that_can_not_be_made_is_named(tmp_path: Path):
    project = make_project(tmp_path / "project", "growing")
    (tmp_path / "file").touch()
    found = Distribution("growing", "0.1", Kind.EDITABLE, url=project.as_uri())
    with pytest.raises(EnvironmentFailed, match=r"from the editable package growing in \S*project: Not a directory"):
        build_project(found, tmp_path / "file" / "wheels", {})


def test_a_projects_wheel_depends_on_its_commit_and_its_files(tmp_path: Path):
    """A version that is derived from git changes with the commit alone."""
    project = make_project(tmp_path / "project", "growing")
    keys = [content_key(project)]
    git = project / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    keys.append(content_key(project))
    for commit in ("c0ffee", "facade"):
        (git / "refs" / "heads" / "main").write_text(f"{commit}\n")
        keys.append(content_key(project))
    (git / "HEAD").write_text("facade\n")
    # the same commit with a detached HEAD
    assert content_key(project) == keys[-1]
    (project / "growing" / "__init__.py").write_text("WHO = 'other'\n")
    assert content_key(project) not in keys
    assert len(set(keys)) == len(keys)
