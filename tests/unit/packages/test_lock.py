"""Lock files written without the package index, and the reasons why there is none."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sgpu_magic.packages.distributions import Distribution, InstalledPackages, Kind
from sgpu_magic.packages.environment_request import order_of
from sgpu_magic.packages.lock import Lock, lock_order, make_lock
from sgpu_magic.wire.attachments import Environment

NOWHERE = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "0"}


def installed(site: Path, name: str, *, record: bool = True, size: int = 0) -> Distribution:
    """A package that was installed from a local wheel."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
    (site / name).mkdir()
    (site / name / "__init__.py").touch()
    (info / "RECORD").write_text(f"{name}/__init__.py,,{size}\n{name}-1.0.dist-info/METADATA,,50\n")
    return Distribution(name, "1.0", Kind.WHEEL, record="00" if record else "", location=str(info))


def test_each_source_has_its_entry_and_what_is_not_in_the_file_is_said(tmp_path: Path):
    gone = installed(tmp_path / "site", "gone")
    (tmp_path / "site" / "gone" / "__init__.py").unlink()
    found = InstalledPackages(
        (
            installed(tmp_path / "site", "packed"),
            installed(tmp_path / "site", "bare", record=False),
            installed(tmp_path / "site", "large", size=3_000_000_000),
            gone,
            Distribution("archived", "2.0", Kind.ARCHIVE, url="https://host/a.zip", sha256="ab" * 32, subdirectory="x"),
            Distribution("edited", "0.1", Kind.EDITABLE, url=(tmp_path / "project").as_uri()),
        ),
        executable=sys.executable,
    )
    made = make_lock(found, tmp_path / "wheels", NOWHERE)
    assert made.problem == ""
    packages: list[dict[str, Any]] = tomllib.loads(made.pylock)["packages"]
    entries = {package["name"]: package for package in packages}
    assert sorted(entries) == ["archived", "edited", "packed"]
    assert entries["archived"]["archive"] == {
        "url": "https://host/a.zip",
        "hashes": {"sha256": "ab" * 32},
        "subdirectory": "x",
    }
    assert entries["edited"]["directory"] == {"path": str(tmp_path / "project"), "editable": True}
    assert entries["packed"]["archive"]["path"] == made.wheels["packed"].path
    comments = [line for line in made.pylock.splitlines() if line.startswith("# Not in this file: ")]
    assert comments[0] == "# Not in this file: bare: in no package index, and without a list of its files"
    assert comments[1].startswith("# Not in this file: gone: no wheel can be built from the installed package gone 1.0")
    assert comments[2] == (
        "# Not in this file: large: in no package index, and too large to be repacked for the record"
    )
    assert made.left_out.keys() == {"bare", "gone", "large"}


def test_a_folder_on_the_path_without_a_project_travels_as_code(tmp_path: Path):
    odd = Distribution("odd", "1.0", Kind.EDITABLE, url=tmp_path.as_uri())
    ordered = order_of(
        InstalledPackages((odd,)),
        Lock(),
        torch_mine=False,
        allow_build=False,
        build=lambda found: pytest.fail(f"{found.name} is built"),
        repack=lambda found: pytest.fail(f"{found.name} is repacked"),
    )
    assert ordered.notes == (f"odd in {tmp_path} has no project file: it travels as local code only.",)
    assert (ordered.environment.requirements, ordered.environment.wheels) == ((), ())


def test_why_there_is_no_lock_file(tmp_path: Path):
    environment = Environment(digest="00", requirements=("six==1.17.0",))
    looked_up = lock_order(Environment(digest="00", resolve=True), sys.executable, NOWHERE)
    assert looked_up.problem == "the node resolved the dependencies itself"
    assert lock_order(environment, sys.executable, NOWHERE).problem.startswith("uv could not create it: ")
    # uv exceeds its time limit
    for made in (
        lock_order(environment, sys.executable, NOWHERE, timeout_s=0.0),
        make_lock(InstalledPackages((), executable=sys.executable), tmp_path, NOWHERE, timeout_s=0.0),
    ):
        assert made.problem.startswith("`uv pip compile` was stopped after 0 s.")
        assert made.pylock == ""
