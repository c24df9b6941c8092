"""Where ranks start on a node: the kernel's working context translated to the node's paths and variables."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from launches import KERNELS
from launches import placed_launch as launch

from sgpu_magic.agent.node_context import localize
from sgpu_magic.packages.node.store import Built

BUILT = Built(
    prefix="/node/env/venv",
    executable="/node/env/venv/bin/python",
    sys_path=("/node/lib/python3.11", "/node/env/venv/lib/python3.11/site-packages"),
    digest="d",
    packages=1,
)


def test_a_node_that_sees_the_kernel_changes_nothing(tmp_path: Path):
    order = launch(tmp_path, is_remote=False, A="1")
    assert localize(order, None, {}) is order


def test_with_built_packages_the_users_own_folders_stay(tmp_path: Path):
    order = launch(tmp_path, is_remote=False, PATH="/venv/bin:/usr/bin", VIRTUAL_ENV="/venv", PYTHONPATH="/x", A="1")
    placed = localize(order, BUILT, {}).context
    assert placed.sys_path == ("/nb", *BUILT.sys_path, "/shelf")
    assert placed.cwd == "/nb"
    assert placed.environ == {"PATH": "/node/env/venv/bin:/usr/bin", "VIRTUAL_ENV": "/node/env/venv", "A": "1"}


def test_elsewhere_code_stands_in_place_of_its_entry_and_nothing_else_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OF_THE_NODE", "yes")
    monkeypatch.setenv("SGPU_STATE_DIR", "/agents/own")
    monkeypatch.setenv("A", "the node's")
    folder = tmp_path / "unpacked"
    folder.mkdir()
    order = launch(tmp_path, is_remote=True, A="1")
    placed = localize(order, BUILT, {"/nb": str(folder)})
    link, *rest = placed.context.sys_path
    assert os.readlink(link) == str(folder)
    assert Path(link).is_relative_to(tmp_path / "r1" / "code")
    assert rest == list(BUILT.sys_path)
    assert placed.context.cwd == str(tmp_path / "r1" / "work")
    assert Path(placed.context.cwd).is_dir()
    environ = placed.context.environ
    assert (environ["OF_THE_NODE"], environ["A"]) == ("yes", "1")
    assert "SGPU_STATE_DIR" not in environ
    # the launch of an adopted run, which is already translated
    assert localize(placed, BUILT, {"/nb": str(folder)}) == placed


def test_the_notebooks_folder_stays_between_the_standard_library_and_the_packages(tmp_path: Path):
    order = launch(tmp_path, is_remote=False)
    library, further, packages = KERNELS
    context = msgspec.structs.replace(order.context, sys_path=(library, further, "/nb", packages))
    placed = localize(msgspec.structs.replace(order, context=context), BUILT, {})
    assert placed.context.sys_path == (BUILT.sys_path[0], "/nb", BUILT.sys_path[1])
    assert localize(placed, BUILT, {}) == placed


def test_given_variables_go_whatever_they_are(tmp_path: Path):
    order = launch(tmp_path, is_remote=False, env_names=("PATH", "PYTHONPATH"), PATH="/mine", PYTHONPATH="/x")
    environ = localize(order, BUILT, {}).context.environ
    assert (environ["PATH"], environ["PYTHONPATH"]) == ("/mine", "/x")


def test_a_sessions_cells_find_its_code_under_one_path(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    cell = launch(tmp_path, is_remote=True, session="s1")
    one = localize(cell, BUILT, {"/nb": str(first)}).context
    two = localize(cell, BUILT, {"/nb": str(second)}).context
    later = localize(cell, BUILT, {}).context
    assert one.sys_path == two.sys_path == later.sys_path
    assert one.cwd == str(tmp_path / "s1" / "work")
    assert os.readlink(one.sys_path[0]) == str(second)
    fresh = msgspec.structs.replace(cell, spec=msgspec.structs.replace(cell.spec, fresh=True))
    assert localize(fresh, BUILT, {}).context.cwd == str(tmp_path / "r1" / "work")
