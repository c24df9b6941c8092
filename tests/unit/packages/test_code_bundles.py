"""Local code that is sent to nodes: which code, how it is packed, and how a node unpacks it."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from waiting import eventually

from sgpu_magic.agent.node_context import CodeBundles, CodeUnusable
from sgpu_magic.config import Settings
from sgpu_magic.errors import SerializationError
from sgpu_magic.files.file_state import FileState
from sgpu_magic.packages.code_files import Bundles
from sgpu_magic.packages.local_code import LocalCode, check_size, find_local_code, imports_of
from sgpu_magic.packages.module_references import check_references
from sgpu_magic.packages.wheels import content_key
from sgpu_magic.wire.attachments import CodeBundle, Environment


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(code: list[LocalCode]) -> dict[str, list[str]]:
    """Files by entry, without the tests' own modules, which are imported too."""
    own = str(Path(__file__).parents[3])
    return {each.entry: sorted(file.name for file in each.files) for each in code if not each.entry.startswith(own)}


def found(folder: Path, source: str, *further: str) -> list[str]:
    """Files under `folder` that code needs."""
    path = [str(folder), *further, *sys.path]
    return names(find_local_code(path, [source], cwd=str(folder))).get(str(folder), [])


@pytest.fixture
def forget_modules() -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


# ---------------------------------------------------------------- which modules


def test_named_modules_travel_and_what_they_import(tmp_path: Path):
    write(
        tmp_path,
        {
            "direct.py": "import indirect\n",
            "indirect.py": "def f():\n    from pkg.deep import x\n",
            "pkg/__init__.py": "from . import sibling\n",
            "pkg/deep.py": "x = 1\n",
            "pkg/sibling.py": "import importlib\nimportlib.import_module('dynamic')\n",
            "pkg/data/words.txt": "a b c\n",
            "pkg/__pycache__/deep.cpython-311.pyc": "",
            "dynamic.py": "",
            "unused.py": "",
            "notebook.ipynb": "{}",
        },
    )
    assert found(tmp_path, "import direct, json, torch\n") == [
        "direct.py",
        "dynamic.py",
        "indirect.py",
        "pkg/__init__.py",
        "pkg/data/words.txt",
        "pkg/deep.py",
        "pkg/sibling.py",
    ]


def test_imported_modules_travel_although_nothing_names_them(tmp_path: Path, forget_modules: None):
    write(tmp_path, {"seen_before.py": "", ".gitignore": "seen_*\n", "other.py": ""})
    sys.path.insert(0, str(tmp_path))
    import seen_before  # pyright: ignore  # noqa: F401

    assert found(tmp_path, "") == ["seen_before.py"]


def test_cells_with_magics_are_read_too():
    source = "%time import fast\nimport a, b.c as d\n!ls\nfrom e.f import g\n    import h\nx = 'import no'\n"
    assert imports_of(source) == {"a", "b", "e", "h"}
    assert imports_of("from . import x\nfrom .y import z\nimport w.v") == {"w"}


def test_what_is_installed_or_the_standard_librarys_stays(tmp_path: Path):
    write(tmp_path, {"mine.py": ""})
    code = find_local_code([str(tmp_path), *sys.path], ["import os, msgspec, mine, sgpu_magic"], cwd=str(tmp_path))
    assert names(code)[str(tmp_path)] == ["mine.py"]
    assert not any("sgpu_magic" in name for each in code for name in each.names)


def test_entries_are_looked_at_in_the_order_of_the_path(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, {"twice.py": "import below\n"})
    write(two, {"twice.py": "", "below/part.py": ""})
    code = find_local_code([str(one), str(two), *sys.path], ["import twice"], cwd=str(tmp_path))
    assert names(code) == {str(one): ["twice.py"], str(two): ["below/part.py"]}


def test_projects_of_which_wheels_are_made_stay(tmp_path: Path):
    write(tmp_path, {"project/src/thing/__init__.py": "", "mine.py": "import thing"})
    path = [str(tmp_path), str(tmp_path / "project" / "src"), *sys.path]
    code = find_local_code(path, ["import mine"], projects=[str(tmp_path / "project")], cwd=str(tmp_path))
    assert names(code) == {str(tmp_path): ["mine.py"]}


def test_what_git_ignores_stays(tmp_path: Path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=20)
    write(
        tmp_path,
        {
            ".gitignore": "*.bin\n/nb/pkg/out/\n",
            "nb/pkg/__init__.py": "",
            "nb/pkg/model.bin": "x",
            "nb/pkg/out/result.txt": "x",
            "nb/pkg/sub/.gitignore": "*.txt\n!keep.txt\n",
            "nb/pkg/sub/a.txt": "",
            "nb/pkg/sub/keep.txt": "",
            "nb/pkg/other/a.txt": "",
            ".git/info/exclude": "excluded*\n",
            "nb/pkg/excluded.md": "",
        },
    )
    assert found(tmp_path / "nb", "import pkg") == [
        "pkg/__init__.py",
        "pkg/other/a.txt",
        "pkg/sub/.gitignore",
        "pkg/sub/keep.txt",
    ]


def test_caches_environments_and_circles_stay(tmp_path: Path):
    write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/.ipynb_checkpoints/a.py": "",
            "pkg/.venv/lib/b.py": "",
            "pkg/myenv/pyvenv.cfg": "",
            "pkg/myenv/lib/c.py": "",
            "shared/d.py": "",
        },
    )
    (tmp_path / "pkg" / "round").symlink_to(tmp_path / "pkg")
    (tmp_path / "pkg" / "shared").symlink_to(tmp_path / "shared")
    (tmp_path / "pkg" / "one.py").symlink_to(tmp_path / "shared" / "d.py")
    (tmp_path / "pkg" / "nowhere.py").symlink_to(tmp_path / "absent.py")
    os.mkfifo(tmp_path / "pkg" / "pipe")
    code = find_local_code([str(tmp_path), *sys.path], ["import pkg"], cwd=str(tmp_path))
    (mine,) = [each for each in code if each.entry == str(tmp_path)]
    assert names(code)[str(tmp_path)] == ["pkg/__init__.py", "pkg/one.py", "pkg/shared/d.py"]
    assert mine.walked.unreadable == [str(tmp_path / "pkg" / "nowhere.py")]
    (note,) = check_size([mine], warn_bytes=1000, limit_bytes=1000)
    assert "can't be read" in note
    assert "nowhere.py" in note


# ---------------------------------------------------------------- archives


@pytest.fixture
def bundles(tmp_path: Path) -> Bundles:
    return Bundles(tmp_path / "kept")


def code_in(folder: Path, source: str = "import pkg") -> LocalCode:
    (code,) = [
        each
        for each in find_local_code([str(folder), *sys.path], [source], cwd=str(folder))
        if each.entry == str(folder)
    ]
    return code


@pytest.mark.slow
def test_alike_contents_have_one_digest_and_edits_another(tmp_path: Path, bundles: Bundles):
    files = {"pkg/__init__.py": "a = 1\n", "pkg/b.py": "b = 2\n"}
    one, two = write(tmp_path / "one", files), write(tmp_path / "two", dict(reversed(files.items())))
    os.utime(one / "pkg" / "b.py", (1, 1))
    first, second = bundles.bundle(code_in(one)), bundles.bundle(code_in(two))
    assert first.sha256 == second.sha256
    assert hashlib.sha256(Path(first.path).read_bytes()).hexdigest() == first.sha256
    assert Path(first.path).stat().st_size == first.size
    (one / "pkg" / "b.py").write_text("b = 3\n")
    assert bundles.bundle(code_in(one)).sha256 != first.sha256


def settled(folder: Path) -> None:
    """Wait until a later change of the files would show in their stat results."""
    files = list(folder.rglob("*.py"))
    eventually(lambda: all(FileState.from_stat(path.stat()).is_settled(time.time_ns()) for path in files), 20)


@pytest.mark.slow
def test_an_unchanged_tree_is_not_read_again(tmp_path: Path, bundles: Bundles):
    write(tmp_path, {f"pkg/m{number}.py": f"x = {number}\n" for number in range(300)} | {"pkg/__init__.py": ""})
    settled(tmp_path)
    first = bundles.bundle(code_in(tmp_path))
    assert bundles.bundle(code_in(tmp_path)) is first
    Path(first.path).unlink()
    assert bundles.bundle(code_in(tmp_path)) == first
    assert Path(first.path).exists()


@pytest.mark.slow
def test_large_code_is_told_and_too_large_code_refused(tmp_path: Path):
    write(tmp_path, {"pkg/__init__.py": "", "pkg/weights.bin": "x" * 2_000_000, "pkg/small.bin": "x" * 1500})
    code = code_in(tmp_path)
    assert check_size([code], warn_bytes=3_000_000, limit_bytes=4_000_000) == ()
    (note,) = check_size([code], warn_bytes=1_000_000, limit_bytes=4_000_000)
    assert "2.0 MB of local code" in note
    assert note.index("weights.bin (2.0 MB)") < note.index("small.bin")
    with pytest.raises(SerializationError) as caught:
        check_size([code], warn_bytes=10, limit_bytes=1_000_000)
    assert "weights.bin (2.0 MB)" in caught.value.message
    assert "code_limit_bytes" in caught.value.message


def test_a_tree_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sgpu_magic.packages.local_code.MOST_FILES", 50)
    write(tmp_path, {f"pkg/frames/{number}.txt": "" for number in range(80)} | {"pkg/__init__.py": ""})
    with pytest.raises(SerializationError, match="frames"):
        check_size([code_in(tmp_path)], warn_bytes=1000, limit_bytes=1000)


def in_place(file: Path, text: str) -> None:
    file.write_text(text)


def replaced(file: Path, text: str) -> None:
    """Save as many editors do."""
    other = file.with_suffix(".new")
    other.write_text(text)
    os.replace(other, file)


@pytest.mark.parametrize(
    ("edit", "wait"),
    [
        pytest.param(in_place, False, id="in place, just written"),
        pytest.param(in_place, True, id="in place, settled", marks=pytest.mark.slow),
        pytest.param(replaced, False, id="replaced, just written", marks=pytest.mark.slow),
        pytest.param(replaced, True, id="replaced, settled", marks=pytest.mark.slow),
    ],
)
def test_an_edit_that_keeps_size_and_time_counts(
    tmp_path: Path, bundles: Bundles, edit: Callable[[Path, str], None], wait: bool
):
    """Local code, import paths, and the wheel key of an editable project."""
    texts = {"pkg/__init__.py": "import aaa\n", "aaa.py": "", "bbb.py": "", "pyproject.toml": ""}
    write(tmp_path, texts)
    changed = tmp_path / "pkg/__init__.py"
    status = changed.stat()
    if wait:
        settled(tmp_path)

    def seen() -> tuple[str, frozenset[str], str]:
        code = code_in(tmp_path)
        return bundles.bundle(code).sha256, frozenset(code.modules), content_key(tmp_path)

    before = seen()
    assert seen() == before
    edit(changed, "import bbb\n")
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = seen()
    assert before[1] == {"pkg", "aaa"}
    assert after[1] == {"pkg", "bbb"}
    assert all(one != other for one, other in zip(before, after, strict=True))


# ---------------------------------------------------------------- on the node


@pytest.fixture
def node(tmp_path: Path) -> Settings:
    return Settings(environment_dir=str(tmp_path / "node"), state_dir=str(tmp_path / "state"))


def archive(path: Path, members: Mapping[str, bytes | int]) -> CodeBundle:
    """An archive made by hand; a number is the mode of a member."""
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (data if isinstance(data, int) else 0o100644) << 16
            target.writestr(info, b"/etc/passwd" if isinstance(data, int) else data)
    data = path.read_bytes()
    return CodeBundle(entry="/nb", sha256=hashlib.sha256(data).hexdigest(), size=len(data), path=str(path))


def test_code_arrives_as_it_was(tmp_path: Path, bundles: Bundles, node: Settings):
    home = write(tmp_path / "nb", {"pkg/__init__.py": "x = 1\n", "pkg/run.sh": "true\n", "pkg/deep/data.txt": "é"})
    (home / "pkg" / "run.sh").chmod(0o755)
    bundle = bundles.bundle(code_in(home))
    code = CodeBundles(node)
    folder = Path(code.unpack("run", [bundle])[str(home)])
    assert folder.parent.parent == node.environments_path
    assert (folder / "pkg" / "deep" / "data.txt").read_text() == "é"
    assert (folder / "pkg" / "run.sh").stat().st_mode & stat.S_IXUSR
    assert not (folder / "pkg" / "__init__.py").stat().st_mode & stat.S_IXUSR
    first = (folder / "pkg" / "__init__.py").stat().st_mtime_ns
    (home / "pkg" / "__init__.py").write_text("x = 2\n")
    edited = Path(code.unpack("run", [bundles.bundle(code_in(home))])[str(home)])
    assert edited != folder
    # the same size as before: only the mtime tells Python that the file has changed
    assert (edited / "pkg" / "__init__.py").stat().st_mtime_ns != first
    code.close()


def test_agents_that_unpack_one_archive_at_once_share_it(tmp_path: Path, node: Settings):
    bundle = archive(tmp_path / "a.zip", {f"pkg/{number}.py": b"x" * 1000 for number in range(200)})
    agents = [CodeBundles(node) for _ in range(6)]

    def unpacked(agent: CodeBundles) -> str:
        return agent.unpack("run", [bundle])["/nb"]

    with ThreadPoolExecutor(6) as pool:
        (folder,) = set(pool.map(unpacked, agents))
    assert len(list(Path(folder).rglob("*.py"))) == 200
    assert [path.name for path in (node.environments_path / "code").iterdir()] == [bundle.sha256]
    for agent in agents:
        agent.close()


@pytest.mark.parametrize(
    "members",
    [
        {"../outside.py": b"x"},
        {"a/../../outside.py": b"x"},
        {"/tmp/outside.py": b"x"},
        {"a\\..\\outside.py": b"x"},
        {"link.py": stat.S_IFLNK | 0o777},
        {"./a.py": b"x"},
        {"a//b.py": b"x"},
    ],
    ids=str,
)
def test_no_path_leaves_the_folder(tmp_path: Path, node: Settings, members: Mapping[str, bytes | int]):
    code = CodeBundles(node)
    with pytest.raises(CodeUnusable, match="not allowed in its folder"):
        code.unpack("run", [archive(tmp_path / "bad.zip", members)])
    assert not (tmp_path / "outside.py").exists()
    assert [path.name for path in (node.environments_path / "code").iterdir()] == []
    code.close()


def test_a_damaged_or_missing_archive_is_told(tmp_path: Path, node: Settings):
    code = CodeBundles(node)
    bundle = archive(tmp_path / "a.zip", {"a.py": b"x"})
    with open(bundle.path, "ab") as file:
        file.write(b"more")
    with pytest.raises(CodeUnusable, match="arrived damaged"):
        code.unpack("run", [bundle])
    Path(bundle.path).unlink()
    with pytest.raises(CodeUnusable, match="did not arrive"):
        code.unpack("run", [bundle])
    with pytest.raises(CodeUnusable, match="digest"):
        code.unpack("run", [CodeBundle(entry="/nb", sha256="../../x", size=1, path=bundle.path)])
    code.close()


def test_unused_code_goes_when_there_is_no_room_and_used_code_stays(tmp_path: Path, node: Settings):
    small = replace(node, environments_bytes=25_000)
    code, other = CodeBundles(small), CodeBundles(small)
    used = archive(tmp_path / "used.zip", {"a.py": b"a" * 1000})
    folder = Path(code.unpack("run", [used])["/nb"])
    unused = archive(tmp_path / "unused.zip", {"a.py": b"b" * 1000})
    gone = Path(other.unpack("else", [unused])["/nb"])
    other.release("else")
    later = Path(other.unpack("third", [archive(tmp_path / "later.zip", {"a.py": b"c" * 1000})])["/nb"])
    assert folder.is_dir()
    assert later.is_dir()
    assert not gone.exists()
    code.release("run")
    other.unpack("third", [archive(tmp_path / "last.zip", {"a.py": b"d" * 1000})])
    assert not folder.exists()
    # it is unpacked again on request
    assert Path(code.unpack("run", [used])["/nb"]).is_dir()
    code.close()
    other.close()


# ---------------------------------------------------------------- references


def test_modules_of_the_ranks_packages_are_no_problem(tmp_path: Path):
    environment = Environment(digest="d", requirements=("msgspec==0.19",), needed=("torch==2.13.0",))
    modules = [("msgspec.json", "decode"), ("torch.nn", "Linear"), ("os", ""), ("sympy", ""), ("pkg.deep", "f")]
    write(tmp_path, {"pkg/__init__.py": ""})
    check_references(modules, [code_in(tmp_path)], environment)
    check_references([("msgspec", "")], [], None)


def test_a_module_that_nobody_has_is_named_with_the_remedy(tmp_path: Path, forget_modules: None):
    environment = Environment(digest="d", label="4", requirements=("numpy==2.0",))
    sys.modules["made_up"] = types.ModuleType("made_up")
    with pytest.raises(SerializationError, match=r"`Thing` of the module `made_up`.*has no file"):
        check_references([("made_up", "Thing")], [], environment)
    with pytest.raises(SerializationError, match=r"lack the package pytest, which environment 4 does not have"):
        check_references([("pytest", "fixture")], [], environment)
    write(tmp_path, {"hidden.py": "x = 1\n"})
    sys.path.insert(0, str(tmp_path))
    import hidden  # pyright: ignore  # noqa: F401

    sys.path.remove(str(tmp_path))
    with pytest.raises(SerializationError, match=r"the module `hidden` .*hidden.py, which is neither"):
        check_references([("hidden", "")], [], environment)
    check_references([("hidden", "")], [], environment, projects=[str(tmp_path)])
