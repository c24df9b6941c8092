"""Parts of the builder that need no build: wheels by name, the path of an environment's Python, and who builds."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from builds import environment_of
from small_index import write_wheel

from sgpu_magic.packages.node import builder as module
from sgpu_magic.packages.node.builder import Builder
from sgpu_magic.packages.node.refusals import BuildFailed
from sgpu_magic.packages.node.store import BuildMoved, BuildOrder, Built, BuiltEnvironments
from sgpu_magic.wire.attachments import Environment, Wheel

NAME = "0" * 32 + "-" + "1" * 8


def builder_of(root: Path, environment: Environment) -> tuple[Any, list[BuildMoved]]:
    moved: list[BuildMoved] = []
    order = BuildOrder(environment=environment, root=str(root), name=NAME, limit_bytes=1, budget_bytes=1)
    return Builder(order, moved.append), moved


def test_a_wheel_is_installed_under_its_name_wherever_it_is_kept(tmp_path: Path):
    written = write_wheel(tmp_path, "tiny", "1.0")
    kept = written.rename(tmp_path / "blob-0123")
    digest = hashlib.sha256(kept.read_bytes()).hexdigest()
    builder, _ = builder_of(tmp_path / "environments", environment_of())

    def checked(file: str, path: Path = kept, sha256: str = digest) -> str:
        return builder._checked(Wheel(file=file, sha256=sha256, size=1, path=str(path)), tmp_path)

    assert checked(written.name) == (tmp_path / "wheels" / written.name).as_uri()
    assert (tmp_path / "wheels" / written.name).resolve() == kept
    assert checked("blob-0123.whl", kept.rename(tmp_path / "blob-0123.whl")) == (tmp_path / "blob-0123.whl").as_uri()
    for file, path, sha256, words in (
        ("../tiny.whl", kept, digest, "is not the name of a wheel"),
        ("tiny.txt", kept, digest, "is not the name of a wheel"),
        (written.name, kept, digest, r"is no longer at \S+blob-0123\. Run the cell again"),
        (written.name, tmp_path / "blob-0123.whl", "00", "its SHA-256 differs"),
    ):
        with pytest.raises(BuildFailed, match=words):
            checked(file, path, sha256)


def test_a_python_is_started_for_its_path_only_if_a_package_adds_entries(tmp_path: Path):
    site, python = tmp_path / "site", tmp_path / "bin" / "python"
    site.mkdir()
    python.parent.mkdir()
    (site / "quiet.pth").write_text("# a comment\n\nimport sys\nimport\tos\n")
    found = module._path_of(tmp_path, site)
    assert found[-1] == str(site)
    assert os.path.realpath(os.path.dirname(os.__file__)) in map(os.path.realpath, found)
    (site / "adds.pth").write_text("/elsewhere\n")
    python.write_text('#!/bin/sh\necho \'["/lib", "/elsewhere"]\'\n')
    python.chmod(0o755)
    assert module._path_of(tmp_path, site) == ["/lib", "/elsewhere"]
    python.write_text("#!/bin/sh\necho first >&2\necho 'ImportError: no such thing' >&2\nexit 1\n")
    with pytest.raises(BuildFailed) as raised:
        module._path_of(tmp_path, site)
    assert str(raised.value) == (
        f"the Python that was created for the run's packages on {socket.gethostname()} does not start. It says: "
        "ImportError: no such thing Leave out the package that runs this when Python starts."
    )


def test_a_node_without_torch_can_not_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "base_layer", lambda without, needed: {})
    layer = module._Layer(environment_of(), tmp_path / "base")
    with pytest.raises(BuildFailed) as raised:
        layer.complete(set())
    assert f"was started with ({sys.executable}) has no sgpu-magic and no torch, which the ranks" in str(raised.value)
    layer.complete({"torch", "sgpu-magic"})


def test_an_environment_that_was_finished_meanwhile_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    builder, moved = builder_of(tmp_path, environment_of())
    store: BuiltEnvironments = builder._store
    built = Built(prefix="/p", executable="/p/bin/python", sys_path=(), digest="00", packages=0)
    looked: list[int] = []
    real = store.open

    def open_it(name: str) -> Any:
        looked.append(1)
        if len(looked) > 1:
            return real(name)
        # another builder finishes between this check and the claim
        store.finish(NAME, store.begin(NAME), built)
        return None

    monkeypatch.setattr(store, "open", open_it)
    was_built, lock = builder.build()
    assert (was_built, len(looked), moved) == (False, 2, [])
    # the environment is in use, so it can't be removed
    assert not store.remove(NAME)
    lock.close()
    assert store.remove(NAME)


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    builder, _ = builder_of(tmp_path / "file", environment_of())
    with pytest.raises(BuildFailed, match=r"Make sure that \S+/file is writable, or choose another folder"):
        builder.build()


def test_torch_of_an_environment_that_has_its_own_is_resolved(tmp_path: Path):
    for environment, expected in (
        (environment_of(), ["--no-build", "--no-deps"]),
        (environment_of(allow_build=True), ["--no-deps"]),
        (environment_of(resolve=True, torch_mine=True), ["--no-build"]),
        (environment_of(resolve=True), ["--no-build", "--override", str(tmp_path / "overrides.txt")]),
    ):
        builder, _ = builder_of(tmp_path, environment)
        assert builder._resolution(tmp_path) == expected
    assert 'torch ; python_version < "0"' in (tmp_path / "overrides.txt").read_text()
