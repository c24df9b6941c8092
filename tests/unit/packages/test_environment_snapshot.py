"""The snapshot compared with uv and pip on real environments, and its uses: digests, wheels, lock files."""

from __future__ import annotations

import functools
import os
import re
import shutil
import site
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from installed_venvs import (
    by_name,
    call,
    install,
    make_project,
    make_repository,
    make_venv,
    make_wheel,
    served,
    site_packages,
    snapshot_of,
    uv,
)
from packaging.pylock import Pylock
from packaging.utils import canonicalize_name
from waiting import eventually

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages import snapshot as snapshots
from sgpu_magic.packages.distributions import (
    Distribution,
    InstalledPackages,
    Kind,
    is_from_node,
    read_distribution,
    record_hash,
    without_credentials,
)
from sgpu_magic.packages.environment_digest import environment_digest, is_valid_digest
from sgpu_magic.packages.environment_request import order_of
from sgpu_magic.packages.lock import Lock, cache_lock, cached_lock, lock_order, make_lock
from sgpu_magic.packages.requirement_files import environment_requirements, snapshot_requirements
from sgpu_magic.packages.uv_command import index_variables
from sgpu_magic.packages.wheels import build_project, content_key, project_files, repack
from sgpu_magic.runs import packages
from sgpu_magic.wire.attachments import Wheel
from sgpu_magic.wire.client import KeepEnvironment


@dataclass
class Installed:
    """An environment with every kind of installation.

    Args:
        python: Its interpreter.
        folder: Where all that it was made from lies.
        url: Of the server that serves that folder.
        commit: Of the repository.
    """

    python: Path
    folder: Path
    url: str
    commit: str

    @functools.cached_property
    def reported(self) -> dict[str, Any]:
        return snapshot_of(self.python)

    @property
    def snapshot(self) -> InstalledPackages:
        fields = (
            "name",
            "version",
            "url",
            "commit",
            "vcs",
            "subdirectory",
            "sha256",
            "record",
            "location",
        )
        return InstalledPackages(
            distributions=tuple(
                Distribution(kind=Kind(found["kind"]), **{name: found[name] for name in fields})
                for found in self.reported["distributions"]
            ),
            python=self.reported["python"],
            tag=self.reported["tag"],
            platform=self.reported["platform"],
            executable=str(self.python),
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    commit = make_repository(folder / "fromgit.git", make_project(folder / "fromgit", "From.Git", "0.3"))
    make_project(folder / "editable", "an-editable", "0.2")
    make_project(folder / "copied", "a-copied", "0.4")
    make_wheel(folder, "from-archive", "2.0")
    programs = {"unpublished_wheel-1.5.data/scripts/sgpu-test-program": "#!python\nprint('it runs')\n"}
    data = {"unpublished_wheel-1.5.data/data/share/unpublished/data.txt": "data\n"}
    entry_points = {
        "unpublished_wheel-1.5.dist-info/entry_points.txt": "[console_scripts]\nsgpu-test-entry = os:getcwd\n"
    }
    make_wheel(folder / "wheels", "unpublished-wheel", "1.5", programs | data | entry_points)
    make_wheel(folder / "index", "sgpu-test-nowhere", "0.9+local.1")
    python = make_venv(folder / "venv")
    with served(folder) as url:
        install(
            python,
            "six==1.17.0",
            "iniconfig==2.0.0",
            folder / "copied",
            folder / "wheels/unpublished_wheel-1.5-py3-none-any.whl",
            f"from-archive @ {url}/from_archive-2.0-py3-none-any.whl",
            f"from-git @ git+{url}/fromgit.git@{commit}",
        )
        install(python, "--editable", folder / "editable")
        install(python, "--no-index", "--find-links", folder / "index", "sgpu-test-nowhere")
        yield Installed(python, folder, url, commit)


def frozen(text: str) -> dict[str, str]:
    """The output of a `freeze`, by normalised name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.match(r"-e (?P<path>.*/(?P<editable>[\w-]+))$|(?P<name>[\w.-]+)(==| @ )", line)
        assert match, line
        name = {"editable": "an-editable"}.get(match["editable"] or "", match["name"] or "")
        found[re.sub(r"[-_.]+", "-", name).lower()] = line
    return found


def as_frozen(found: dict[str, Any]) -> str:
    """A distribution as `uv pip freeze` prints it."""
    match found["kind"]:
        case "registry":
            return f"{found['key']}=={found['version']}"
        case "vcs":
            return f"{found['key']} @ git+{found['url']}@{found['commit']}"
        case "editable":
            return f"-e {found['url']}"
        case _:
            return f"{found['key']} @ {found['url']}"


# ------------------------------------------------------------ against uv and pip


def test_every_distribution_is_there_once_as_uv_freezes_it(installed: Installed):
    theirs = frozen(uv("pip", "freeze", "--python", installed.python))
    ours = by_name(installed.reported)
    assert {name: as_frozen(found) for name, found in ours.items()} == theirs
    assert len(theirs) == 8


@pytest.mark.slow
def test_pip_freezes_the_same(installed: Installed):
    theirs = frozen(call(sys.executable, "-m", "pip", "--python", installed.python, "freeze", "--all"))
    assert {
        name: as_frozen(found).lower() for name, found in by_name(installed.reported).items()
    }.keys() == theirs.keys()
    assert theirs["six"] == "six==1.17.0"


def test_each_is_classed_by_where_it_came_from(installed: Installed):
    found = by_name(installed.reported)
    assert {name: item["kind"] for name, item in found.items()} == {
        "six": "registry",
        "iniconfig": "registry",
        "sgpu-test-nowhere": "registry",
        "an-editable": "editable",
        "a-copied": "project",
        "unpublished-wheel": "wheel",
        "from-archive": "archive",
        "from-git": "vcs",
    }
    assert found["from-git"]["commit"] == installed.commit
    assert found["from-git"]["name"] == "From.Git"
    assert found["from-archive"]["url"] == f"{installed.url}/from_archive-2.0-py3-none-any.whl"
    assert found["an-editable"]["url"] == (installed.folder / "editable").as_uri()
    assert all(item["record"] for item in found.values())
    assert (installed.reported["python"], installed.reported["tag"]) == (
        f"{sys.version_info.major}.{sys.version_info.minor}",
        f"cp{sys.version_info.major}{sys.version_info.minor}",
    )


def test_this_interpreters_own_is_what_uv_lists():
    ours = {found.key: found.version for found in snapshots.take_snapshot().distributions}
    listed = uv("pip", "list", "--python", sys.executable, "--format", "freeze")
    # uv ignores what this environment's path files add, such as another environment's torch
    others = [entry for entry in sys.path if entry.endswith("-packages") and entry not in site.getsitepackages()]
    added = {canonicalize_name(each.name): each.version for each in distributions(path=others)}
    assert ours == added | dict(line.split("==") for line in listed.splitlines())


def test_what_a_package_brings_within_itself_is_not_installed(installed: Installed, tmp_path: Path):
    """As Ray does: importing it adds one of its folders to the path."""
    vendored = tmp_path / "bundler" / "thirdparty"
    vendored.mkdir(parents=True)
    uv("pip", "install", "--quiet", "--python", installed.python, "--target", vendored, "six==1.16.0")
    (tmp_path / "bundler" / "__init__.py").touch()
    reported = snapshot_of(installed.python, path=(vendored,))
    assert by_name(reported)["six"]["version"] == "1.17.0"
    assert reported["digest"] == installed.reported["digest"]


def test_of_two_on_the_path_the_first_is_the_one(installed: Installed, tmp_path: Path):
    install_into = tmp_path / "before"
    uv("pip", "install", "--quiet", "--python", installed.python, "--target", install_into, "six==1.16.0")
    reported = snapshot_of(installed.python, path=(install_into,))
    assert by_name(reported)["six"]["version"] == "1.16.0"
    assert reported["digest"] != installed.reported["digest"]


def test_an_editable_with_metadata_beside_its_source_is_there_once(installed: Installed):
    egg_info = installed.folder / "editable" / "an_editable.egg-info"
    egg_info.mkdir()
    try:
        (egg_info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: an-editable\nVersion: 0.1.dev0\n")
        before, behind = (snapshot_of(installed.python, path=path) for path in ((egg_info.parent,), ()))
    finally:
        shutil.rmtree(egg_info)
    # the project's folder comes after the site directory, through its .pth file
    assert by_name(behind)["an-editable"] == by_name(installed.reported)["an-editable"]
    # a notebook in the project's folder finds it there first: it is the same project
    found = by_name(before)["an-editable"]
    assert (found["kind"], found["url"]) == ("editable", (installed.folder / "editable").as_uri())


@pytest.mark.skipif(not Path("/usr/lib/python3/dist-packages/pip").is_dir(), reason="no Debian system with pip")
def test_debians_own_packages_are_the_systems():
    reported = snapshot_of("/usr/bin/python3")
    # uv does not search there
    listed = call("/usr/bin/python3", "-m", "pip", "list", "--format", "freeze")
    ours = {item["name"]: item for item in reported["distributions"]}
    assert {name: item["version"] for name, item in ours.items()} == dict(
        line.split("==") for line in listed.splitlines()
    )
    system = [item for item in ours.values() if item["location"].startswith("/usr/lib/python3/dist-packages")]
    assert system
    assert {item["kind"] for item in system} == {"system"}


def test_condas_are_known_by_their_installer_or_its_own_list(tmp_path: Path):
    info = tmp_path / "numpy-1.26.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
    (info / "direct_url.json").write_text('{"dir_info": {}, "url": "file:///home/conda/feedstock_root/work"}')
    listed = read_distribution(str(info), str(tmp_path), {"numpy": "1.26.4"})
    (info / "INSTALLER").write_text("conda\n")
    reported = read_distribution(str(info), str(tmp_path), {})
    assert listed is not None
    assert reported is not None
    assert listed.kind is reported.kind is Kind.CONDA
    (info / "INSTALLER").write_text("pip\n")
    by_pip = read_distribution(str(info), str(tmp_path), {"numpy": "1.26.4"})
    assert by_pip is not None
    assert by_pip.kind is Kind.PROJECT


def test_what_is_left_of_a_removed_one_is_none_and_damaged_metadata_do_not_matter(tmp_path: Path):
    (tmp_path / "gone-1.0.dist-info").mkdir()
    assert read_distribution(str(tmp_path / "gone-1.0.dist-info"), str(tmp_path), {}) is None
    odd = tmp_path / "odd-1.0.dist-info"
    odd.mkdir()
    (odd / "METADATA").write_text(f"Summary: {'x' * 5000}\nVersion: 1.0\nName: Odd_One\n\nName: body\n")
    for text in ("{", "[]", '{"url": 3, "archive_info": 4}', '{"url": "file:///x", "dir_info": null}'):
        (odd / "direct_url.json").write_text(text)
        found = read_distribution(str(odd), str(tmp_path), {})
        assert found is not None
        assert (found.key, found.version, found.kind) == ("odd-one", "1.0", Kind.REGISTRY)


def test_no_credentials_are_kept(tmp_path: Path):
    assert without_credentials("https://user:secret@host/x.git") == "https://host/x.git"
    assert without_credentials("ssh://git@host/x.git") == "ssh://git@host/x.git"
    info = tmp_path / "private-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: private\nVersion: 1.0\n")
    (info / "direct_url.json").write_text('{"url": "https://me:hunter2@host/private-1.0.zip", "archive_info": {}}')
    assert "hunter2" not in repr(read_distribution(str(info), str(tmp_path), {}))


# ------------------------------------------------------------ digest and time


@pytest.mark.slow
def test_the_digest_is_the_same_whoever_installed_and_wherever(installed: Installed, tmp_path: Path):
    wheel = "six==1.17.0"
    by_uv, by_pip = make_venv(tmp_path / "uv"), make_venv(tmp_path / "pip")
    install(by_uv, wheel)
    call(sys.executable, "-m", "pip", "--python", by_pip, "install", "--quiet", wheel, cwd=tmp_path)
    assert (site_packages(by_pip) / "__pycache__").exists()
    first, second = snapshot_of(by_uv), snapshot_of(by_pip)
    found = (*first["distributions"], *second["distributions"])
    assert {Path(item["location"], "INSTALLER").read_text().strip() for item in found} == {"uv", "pip"}
    assert first["digest"] == second["digest"]
    assert is_valid_digest(first["digest"])


def test_the_digest_changes_with_contents_and_with_nothing_else():
    record = b"a/__init__.py,sha256=abc,10\na-1.dist-info/METADATA,sha256=def,20\n"
    noise = (
        b"a/__pycache__/__init__.cpython-311.pyc,,\r\na-1.dist-info/INSTALLER,sha256=x,3\n../../../bin/a,sha256=y,9\n"
    )
    assert record_hash(record, "a-1.dist-info") == record_hash(noise + record, "a-1.dist-info")
    assert record_hash(record, "a-1.dist-info") != record_hash(record.replace(b"abc", b"abd"), "a-1.dist-info")
    pins = ("a==1", "b==2")
    same = environment_digest(pins, "cp311", "linux_x86_64")
    assert same == environment_digest(reversed(pins), "cp311", "linux_x86_64")
    others = {
        environment_digest(("a==1", "b==3"), "cp311", "linux_x86_64"),
        environment_digest(pins, "cp312", "linux_x86_64"),
        environment_digest(pins, "cp311", "linux_aarch64"),
        environment_digest(pins, "cp311", "linux_x86_64", torch_mine=True),
        environment_digest(pins, "cp311", "linux_x86_64", allow_build=True),
    }
    assert len(others | {same}) == 6


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "abc", "0" * 65, "ABCDEF0123456789", "0" * 15 + "\n"])
def test_what_is_no_digest_is_known(text: str):
    assert not is_valid_digest(text)


def test_a_cold_look_takes_less_than_half_a_millisecond_for_each_and_a_warm_one_nothing():
    # the least of five, in this thread's CPU time: other work on the machine is not measured
    cold: list[float] = []
    for _ in range(5):
        began = time.thread_time()
        snapshot = snapshots.read_snapshot(sys.path)
        cold.append(time.thread_time() - began)
    assert len(snapshot.distributions) > 50
    assert min(cold) * 100 / len(snapshot.distributions) < 0.05
    held = snapshots.take_snapshot()
    began = time.thread_time()
    for _ in range(100):
        assert snapshots.take_snapshot() is held
    assert (time.thread_time() - began) / 100 < 0.001


def test_the_snapshot_is_taken_anew_when_a_site_directory_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site-packages"
    site.mkdir()
    long_ago = time.time_ns() - 60_000_000_000
    os.utime(site, ns=(long_ago, long_ago))
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    before = snapshots.take_snapshot()
    assert snapshots.kept_snapshot() is before
    info = site / "newcomer-1.0.dist-info"
    info.mkdir()
    assert snapshots.kept_snapshot() is None
    (info / "METADATA").write_text("Name: newcomer\nVersion: 1.0\n")
    during = snapshots.take_snapshot()
    # the directory has just changed: a further change might not alter its mtime
    assert snapshots.kept_snapshot() is None
    (info / "RECORD").write_text("newcomer.py,sha256=abc,3\n")
    os.utime(site, ns=(long_ago + 1, long_ago + 1))
    after = snapshots.take_snapshot()
    assert snapshots.kept_snapshot() is after
    assert before.get("newcomer") is None
    found = [each.get("newcomer") for each in (during, after)]
    assert all(one is not None and one.version == "1.0" for one in found)
    assert len({one.record for one in found if one is not None}) == 2


def test_a_folder_that_pip_installs_into_counts_and_the_notebooks_own_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target, notebook = tmp_path / "libraries", tmp_path / "notebook"
    make_wheel(tmp_path, "sgpu-test-first")
    uv("pip", "install", "--quiet", "--target", target, tmp_path / "sgpu_test_first-1.0-py3-none-any.whl")
    os.utime(target, ns=(time.time_ns() - 60_000_000_000,) * 2)
    notebook.mkdir()
    monkeypatch.chdir(notebook)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(target)])
    before = snapshots.take_snapshot()
    assert before.get("sgpu-test-first") is not None
    (notebook / "Untitled.ipynb").write_text("{}")
    assert snapshots.take_snapshot() is before
    make_wheel(tmp_path, "sgpu-test-second")
    uv("pip", "install", "--quiet", "--target", target, tmp_path / "sgpu_test_second-1.0-py3-none-any.whl")
    assert snapshots.kept_snapshot() is None
    assert snapshots.take_snapshot().get("sgpu-test-second") is not None


# ------------------------------------------------------------ wheels


def distribution(installed: Installed, name: str) -> Distribution:
    found = installed.snapshot.get(name)
    assert found is not None
    return found


def test_a_repacked_wheel_has_everything_and_always_the_same_bytes(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "prefix", str(installed.folder / "venv"))
    packed = distribution(installed, "unpublished-wheel")
    first, second = repack(packed, tmp_path / "one"), repack(packed, tmp_path / "two")
    assert Path(first.path).read_bytes() == Path(second.path).read_bytes()
    assert (first.file, first.size) == ("unpublished_wheel-1.5-py3-none-any.whl", Path(first.path).stat().st_size)
    before = Path(first.path).stat().st_mtime_ns
    assert repack(packed, tmp_path / "one") == first
    assert Path(first.path).stat().st_mtime_ns == before
    python = make_venv(tmp_path / "venv")
    install(python, first.path)
    assert call(python, "-c", "import unpublished_wheel; print(unpublished_wheel.VERSION)") == "1.5\n"
    assert call(python.parent / "sgpu-test-program") == "it runs\n"
    assert (python.parent / "sgpu-test-entry").exists()
    assert (tmp_path / "venv/share/unpublished/data.txt").read_text() == "data\n"
    again = by_name(snapshot_of(python))["unpublished-wheel"]
    assert again["record"] == by_name(installed.reported)["unpublished-wheel"]["record"]


def test_what_has_no_list_of_its_files_can_not_be_repacked(tmp_path: Path):
    bare = Distribution("bare", "1.0", Kind.SYSTEM, location=str(tmp_path / "bare-1.0.egg-info"))
    with pytest.raises(EnvironmentFailed, match=r"bare 1\.0 is in no package index.* has no RECORD"):
        repack(bare, tmp_path)


@pytest.mark.slow
def test_an_editable_becomes_a_wheel_that_is_built_again_when_a_file_changes(tmp_path: Path):
    project = make_project(tmp_path / "project", "growing", source="STEP = 1\n")
    (project / ".gitignore").write_text("*.log\ncache/\n")
    found = Distribution("growing", "0.1", Kind.EDITABLE, url=project.as_uri())
    variables = index_variables("")
    first = build_project(found, tmp_path / "wheels", variables)
    (project / "noise.log").write_text("nothing\n")
    (project / "cache").mkdir()
    (project / "cache/file").write_text("nothing\n")
    assert build_project(found, tmp_path / "wheels", variables) == first
    (project / "growing/__init__.py").write_text("STEP = 22\n")
    second = build_project(found, tmp_path / "wheels", variables)
    assert second.sha256 != first.sha256
    python = make_venv(tmp_path / "venv")
    install(python, second.path)
    assert call(python, "-c", "import growing; print(growing.STEP)") == "22\n"


def test_a_project_that_can_not_be_built_is_an_error_that_says_why(tmp_path: Path):
    project = make_project(tmp_path / "project", "broken")
    (project / "pyproject.toml").write_text("[project]\nname = 3\n")
    found = Distribution("broken", "0.1", Kind.EDITABLE, url=project.as_uri())
    with pytest.raises(
        EnvironmentFailed, match=r"the editable package broken in .*project can't be built.*uv build --wheel"
    ):
        build_project(found, tmp_path / "wheels", index_variables(""))
    assert [entry.name for entry in (tmp_path / "wheels").iterdir()] == []
    shutil.rmtree(project)
    with pytest.raises(EnvironmentFailed, match=r"no longer has a pyproject\.toml or a setup\.py"):
        build_project(found, tmp_path / "wheels", index_variables(""))


def test_a_projects_files_are_those_that_git_would_have(tmp_path: Path):
    for name in (
        "a.py",
        "build/x.py",
        "pkg/build/kept.py",
        "pkg/skip.txt",
        "pkg/keep.txt",
        "env/pyvenv.cfg",
        "env/x.py",
        "n.egg-info/PKG-INFO",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("*.txt\n")
    (tmp_path / "pkg/.gitignore").write_text("!keep.txt\n")
    names = [name for name, _ in project_files(tmp_path)]
    assert names == [".gitignore", "a.py", "pkg/.gitignore", "pkg/build/kept.py", "pkg/keep.txt"]
    key = content_key(tmp_path)
    (tmp_path / "pkg/skip.txt").write_text("other")
    assert content_key(tmp_path) == key
    (tmp_path / "pkg/keep.txt").rename(tmp_path / "pkg/moved.py")
    assert content_key(tmp_path) != key


# ------------------------------------------------------------ lock files


@pytest.fixture(scope="module")
def lock(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Lock:
    return make_lock(installed.snapshot, tmp_path_factory.mktemp("wheels"), index_variables(""), gently=True)


def test_the_lock_file_is_valid_and_has_each_with_its_source(installed: Installed, lock: Lock):
    assert lock.problem == ""
    parsed = Pylock.from_dict(tomllib.loads(lock.pylock))
    parsed.validate()
    packages = {package.name: package for package in parsed.packages}
    assert packages.keys() == by_name(installed.reported).keys()
    assert packages["six"].wheels
    assert packages["six"].wheels[0].hashes["sha256"]
    vcs = packages["from-git"].vcs
    assert vcs is not None
    assert (vcs.type, vcs.commit_id) == ("git", installed.commit)
    editable = packages["an-editable"].directory
    assert editable is not None
    assert editable.editable
    for name in ("unpublished-wheel", "a-copied", "sgpu-test-nowhere"):
        archive = packages[name].archive
        assert archive is not None
        assert (archive.path, archive.hashes["sha256"]) == (lock.wheels[name].path, lock.wheels[name].sha256)
    assert lock.unpublished == {"sgpu-test-nowhere"}
    assert packages["from-archive"].archive is not None


def test_uv_installs_from_the_lock_file(installed: Installed, lock: Lock, tmp_path: Path):
    (tmp_path / "pylock.toml").write_text(lock.pylock)
    python = make_venv(tmp_path / "venv")
    uv("pip", "sync", "--quiet", "--preview", "--python", python, tmp_path / "pylock.toml")
    names = "six, iniconfig, an_editable, a_copied, unpublished_wheel, from_archive, from_git, sgpu_test_nowhere"
    call(python, "-c", f"import {names}")


def test_uv_installs_from_the_requirements(installed: Installed, lock: Lock, tmp_path: Path):
    text = snapshot_requirements(installed.snapshot, lock)
    (tmp_path / "requirements.txt").write_text(text)
    python = make_venv(tmp_path / "venv")
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, "-r", tmp_path / "requirements.txt")
    theirs = {name: item["version"] for name, item in by_name(snapshot_of(python)).items()}
    assert theirs == {name: item["version"] for name, item in by_name(installed.reported).items()}
    first = text.splitlines()[0]
    digest = installed.reported["digest"]
    assert first == f"# Python {sys.version.split()[0]} on {installed.reported['platform']}, digest {digest}"
    assert "editable" in next(line for line in text.splitlines() if line.startswith("an-editable"))
    assert "repacked: in no package index" in next(
        line for line in text.splitlines() if line.startswith("sgpu-test-nowhere")
    )


def test_where_no_index_is_reached_there_is_no_lock_file_and_the_requirements_say_so(
    installed: Installed, tmp_path: Path
):
    nowhere = {"UV_DEFAULT_INDEX": "http://user:hunter2@127.0.0.1:9/simple", "UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "0"}
    lock = make_lock(installed.snapshot, tmp_path, nowhere)
    assert lock.pylock == ""
    text = snapshot_requirements(installed.snapshot, lock)
    assert "# There is no pylock.toml: uv could not query the package index" in text
    assert "six==1.17.0" in text
    assert "hunter2" not in text


def test_what_makes_no_valid_lock_file_costs_the_file_and_nothing_else(tmp_path: Path):
    odd = Distribution("odd", "not a version", Kind.VCS, url="https://host/x.git", commit="c0ffee", vcs="git")
    lock = make_lock(InstalledPackages((odd,), executable=sys.executable), tmp_path, index_variables(""))
    assert lock.pylock == ""
    assert "not a valid pylock.toml" in lock.problem


def test_a_lock_is_kept_until_its_wheels_are_gone(lock: Lock, tmp_path: Path):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    wheel.write_bytes(b"x")
    kept = Lock(pylock=lock.pylock, wheels={"x": Wheel(file=wheel.name, sha256="0", size=1, path=str(wheel))})
    cache_lock(tmp_path / "locks", "d" * 32, kept)
    assert cached_lock(tmp_path / "locks", "d" * 32) == kept
    assert cached_lock(tmp_path / "locks", "e" * 32) is None
    wheel.unlink()
    assert cached_lock(tmp_path / "locks", "d" * 32) is None


@pytest.mark.slow
def test_torch_of_an_own_index_is_locked_as_the_one_that_the_index_has():
    """Without a download: only the wheels' names and hashes are requested."""
    found = InstalledPackages(
        (Distribution("torch", "2.13.0+sgpu.test", Kind.REGISTRY, record="r"),),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        executable=sys.executable,
    )
    began = time.monotonic()
    lock = make_lock(found, Path("/nonexistent"), index_variables(""))
    assert lock.problem == ""
    assert lock.other_builds == {"torch": "torch==2.13.0"}
    assert Pylock.from_dict(tomllib.loads(lock.pylock)).packages[0].name == "torch"
    assert "torch==2.13.0+sgpu.test  # the package index has torch==2.13.0" in snapshot_requirements(found, lock)
    assert time.monotonic() - began < 30


# ------------------------------------------------------------ what is sent to a node


def test_a_node_is_told_pins_and_wheels_and_what_it_has_itself(installed: Installed, lock: Lock):
    asked: list[str] = []

    def wheel(found: Distribution) -> Wheel:
        asked.append(found.key)
        return Wheel(file=f"{found.key}.whl", sha256=found.record, size=1, path="/nowhere")

    torch = Distribution("torch", "2.13.0+cpu", Kind.REGISTRY, record="t")
    cuda = Distribution("nvidia-cudnn-cu12", "9.1", Kind.REGISTRY, record="n")
    own = Distribution("sgpu_magic", "0.1.0", Kind.EDITABLE, url="file:///x", record="s")
    debian = Distribution("python-apt", "2.6.0", Kind.SYSTEM)
    conda = Distribution("mkl-service", "2.4", Kind.CONDA)
    pip = Distribution("pip", "24.0", Kind.CONDA, record="p")
    found = InstalledPackages((*installed.snapshot.distributions, torch, cuda, own, debian, conda, pip), tag="cp311")
    known = Lock(unpublished=lock.unpublished | {"python-apt"})
    ordered = order_of(found, known, torch_mine=False, allow_build=False, build=wheel, repack=wheel)
    environment = ordered.environment
    assert set(environment.requirements) == {
        "six==1.17.0",
        "iniconfig==2.0.0",
        "pip==24.0",
        f"from-git @ git+{installed.url}/fromgit.git@{installed.commit}",
        f"from-archive @ {installed.url}/from_archive-2.0-py3-none-any.whl",
    }
    assert set(asked) == {"an-editable", "a-copied", "unpublished-wheel", "sgpu-test-nowhere"}
    assert environment.needed == ("torch==2.13.0+cpu", "nvidia-cudnn-cu12==9.1", "sgpu-magic==0.1.0")
    assert environment.conda == ("mkl-service==2.4",)
    assert environment.packages == 9
    assert [note.split()[0] for note in ordered.notes] == ["python-apt"]
    assert environment.own
    text = environment_requirements(environment, None)
    assert "# torch==2.13.0+cpu  (the node's own is used instead)" in text
    mine = order_of(found, known, torch_mine=True, allow_build=False, build=wheel, repack=wheel).environment
    assert {"torch==2.13.0+cpu", "nvidia-cudnn-cu12==9.1"} <= set(mine.requirements)
    assert mine.needed == ("sgpu-magic==0.1.0",)
    assert mine.digest != environment.digest


def test_what_a_node_is_told_has_a_lock_file_too(installed: Installed, lock: Lock, tmp_path: Path):
    ordered = order_of(
        installed.snapshot,
        lock,
        torch_mine=False,
        allow_build=False,
        build=functools.partial(build_project, root=tmp_path / "wheels", variables=index_variables("")),
        repack=functools.partial(repack, root=tmp_path / "wheels"),
    )
    made = lock_order(ordered.environment, str(installed.python), index_variables(""))
    assert made.problem == ""
    (tmp_path / "pylock.toml").write_text(made.pylock)
    by_lock, by_requirements = make_venv(tmp_path / "one"), make_venv(tmp_path / "two")
    uv("pip", "sync", "--quiet", "--preview", "--python", by_lock, tmp_path / "pylock.toml")
    (tmp_path / "requirements.txt").write_text(environment_requirements(ordered.environment, made))
    uv("pip", "sync", "--quiet", "--python", by_requirements, tmp_path / "requirements.txt")
    reported = (snapshot_of(by_lock), snapshot_of(by_requirements))
    versions = [{found["key"]: found["version"] for found in each["distributions"]} for each in reported]
    assert versions[0] == versions[1] == {found.key: found.version for found in installed.snapshot.distributions}


@pytest.mark.parametrize(
    ("name", "torch_mine", "expected"),
    [
        ("torch", False, True),
        ("Torch", True, False),
        ("nvidia_cublas-cu12", False, True),
        ("nvidia-ml-py", False, False),
        ("pytorch-triton-rocm", False, True),
        ("torchmetrics", False, False),
        ("pytorch-lightning", False, False),
        ("sgpu.magic", True, True),
    ],
)
def test_what_a_node_brings_itself(name: str, torch_mine: bool, expected: bool):
    assert is_from_node(name, torch_mine=torch_mine) is expected


# ---------------------------------------------------------------- what is sent to a pool


def test_a_fault_costs_one_runs_files_and_the_next_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    reported: list[KeepEnvironment] = []
    pool: Any = SimpleNamespace(connected=object(), notify=reported.append)
    found, faults = InstalledPackages(()), ["the disk", "the disk", ""]

    def take() -> InstalledPackages:
        if fault := faults.pop(0):
            raise OSError(fault)
        return found

    monkeypatch.setattr(snapshots, "take_snapshot", take)
    monkeypatch.setattr(snapshots, "kept_snapshot", lambda: None if faults else found)
    monkeypatch.setattr(packages, "lock_of", lambda described, **_: Lock())
    monkeypatch.setattr("sgpu_magic.runs.packages.start_mismatch_check", lambda snapshot: None)
    telling = packages.Packages(pool, quiet_s=0.0)
    for left in (2, 1):
        assert telling.digest_for(f"{left}234abcd") == ""
        eventually(lambda left=left: len(faults) == left and telling._thread is None)
    assert reported == []
    assert telling.digest_for("0234abcd") == ""
    eventually(lambda: reported)
    telling.close()
    assert [(message.digest, message.runs) for message in reported] == [(found.digest, ("0234abcd",))]
    assert capfd.readouterr().err.count("OSError: the disk") == 1
