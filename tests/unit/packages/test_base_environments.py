"""`--env-version`: published base environments, requirements files, lock files and saved environments."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from sgpu_magic.cli import environments
from sgpu_magic.config import Settings
from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.packages import environment_request, named_environments
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.packages.named_environments import BASE_NAMES, BaseList, base_list
from sgpu_magic.packages.node.store import Built, BuiltEnvironments
from sgpu_magic.packages.requirement_files import environment_requirements, read_file, snapshot_requirements
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.packages.uv_command import index_variables, uv_path
from sgpu_magic.wire.attachments import Environment, Wheel

ROOT = Path(__file__).parents[3]
# the page that the lists come from, if a copy is next to the repository
PAGES = sorted((ROOT.parent / "shared" / "seeds").glob("000_*.txt"))
COUNTS = {"4": 259, "ai-4": 388}
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=str(tmp_path / "state"))


def uv(*arguments: str, timeout_s: float = 100, **further: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **index_variables(""), "UV_PYTHON_DOWNLOADS": "never", "NO_COLOR": "1"}
    environ.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        [uv_path(), *arguments], env=environ, capture_output=True, text=True, timeout=timeout_s, check=False, **further
    )  # type: ignore[call-overload]


def chosen(settings: Settings, name: object, **how: bool) -> environment_request.Ordered:
    found = environment_request.find_named(settings, str(name), **how)
    assert found is not None
    return found


# ---------------------------------------------------------------- the lists


def page_tables() -> dict[str, dict[str, str]]:
    """The two tables of the page: each row has three pairs of name and version, one value per line."""
    words = [line.strip() for line in PAGES[0].read_text().splitlines() if line.strip()]
    tables: dict[str, dict[str, str]] = {}
    for name, heading in (("4", "Default environment"), ("ai-4", "AI environment")):
        at = words.index(heading)
        while words[at : at + 6] != ["Library", "Version"] * 3:
            at += 1
        at += 6
        rows: dict[str, str] = {}
        while at + 1 < len(words) and words[at + 1][0].isdigit():
            assert words[at] not in rows
            rows[words[at]] = words[at + 1]
            at += 2
        tables[name] = rows
    return tables


def listed(base: BaseList) -> dict[str, str]:
    return {**base.public, **base.system, **base.private}


@pytest.mark.parametrize("name", BASE_NAMES)
def test_lists_have_every_library_of_the_page(name: str):
    if not PAGES:
        pytest.skip("no copy of the page lies beside the repository")
    assert listed(base_list(name)) == page_tables()[name]


@pytest.mark.parametrize("name", BASE_NAMES)
def test_each_library_is_in_one_class(name: str):
    base = base_list(name)
    assert len(base.public) + len(base.system) + len(base.private) == len(listed(base)) == COUNTS[name]
    assert base.libraries == COUNTS[name]
    assert set(base.wheels) <= set(base.public)
    assert {"dbus-python", "unattended-upgrades"} <= set(base.system)
    assert {"databricks.serverless_gpu", "parambench-train-comms"} <= set(base.private)
    assert base.python_minor == "3.12"
    assert base.title.startswith(base.page)


def test_the_ai_list_has_all_of_the_default_one():
    assert set(listed(base_list("4"))) < set(listed(base_list("ai-4")))


def test_versions_are_the_documented_ones():
    assert base_list("4").public["torch"] == "2.7.1"
    assert base_list("ai-4").public["transformers"] == "4.56.1"
    assert base_list("ai-4").public["peft"] == "0.17.1"


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE_NAMES)
@pytest.mark.parametrize("allow_build", [True, False])
def test_public_libraries_are_in_the_index(name: str, allow_build: bool):
    base = base_list(name)
    pins = "\n".join(base.pins(allow_build=allow_build))
    without_sources = [] if allow_build else ["--only-binary", ":all:"]
    done = uv(
        *("pip", "compile", "--no-deps", "--python-version", base.python_minor, "--no-header", "--no-annotate"),
        *("--python-platform", "x86_64-manylinux_2_28", *without_sources, "-"),
        input=pins,
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr
    found = {line.split("==")[0] for line in done.stdout.splitlines() if "==" in line}
    assert found == {pin.split("==")[0] for pin in pins.splitlines()}


def test_a_small_subset_can_be_installed(tmp_path: Path):
    wanted = {"six", "idna", "wcwidth", "tomli", "zipp"}
    pins = [pin for pin in base_list("4").pins(allow_build=False) if pin.split("==")[0] in wanted]
    assert len(pins) == len(wanted)
    made = uv("venv", "--python", sys.executable, str(tmp_path / "venv"))
    assert made.returncode == 0, made.stderr
    python = str(tmp_path / "venv" / "bin" / "python")
    done = uv("pip", "install", "--no-deps", "--no-build", "--python", python, *pins)
    assert done.returncode == 0, done.stderr
    code = "import json, importlib.metadata as m\n" + "".join(f"import {name}\n" for name in sorted(wanted))
    code += "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    there = json.loads(subprocess.check_output([python, "-c", code], text=True))
    assert {f"{normalised(name)}=={version}" for name, version in there.items()} >= set(pins)


# ---------------------------------------------------------------- a base as an environment


@pytest.mark.skipif(HERE == "3.12", reason="this Python is the base's own")
def test_a_base_for_another_python_is_refused_with_both_versions_and_the_remedy(settings: Settings):
    with pytest.raises(EnvironmentFailed) as raised:
        environment_request.find_named(settings, "4")
    for words in ("Python 3.12", f"Python {HERE}", "kernel of Python 3.12", "--env-version none"):
        assert words in raised.value.message


def test_a_base_is_pins_and_says_what_it_leaves_out(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    """As in a kernel of its Python; `test_a_base_is_pins_without_what_the_node_brings` uses a real one."""
    monkeypatch.setattr(environment_request, "own_python", lambda: base_list("4").python_minor)
    plain, built = chosen(settings, "4"), chosen(settings, "4", allow_build=True)
    assert (plain.environment.label, plain.environment.own, plain.environment.resolve) == ("4", False, False)
    assert plain.environment.packages == len(plain.environment.requirements)
    assert "torch==2.7.1" in plain.environment.needed
    # older than the minimum for ranks
    assert "cloudpickle==3.0.0" in plain.environment.needed
    assert {"psutil==5.9.4"} <= set(plain.environment.requirements)
    assert {"psutil==5.9.0", "psycopg2==2.9.3"} <= set(built.environment.requirements)
    left_out, other, *old = plain.notes
    assert left_out.startswith("left out of environment 4, as no package index has them for this Python: ")
    assert other.startswith("environment 4 has versions that need no build: ")
    assert "psutil 5.9.4 for 5.9.0" in other
    assert any(note.startswith("cloudpickle 3.0.0 is too old for sgpu-magic, which needs cloudpickle") for note in old)
    # with builds allowed, every version is the page's
    assert not [note for note in built.notes if "need no build" in note]
    assert plain.environment.digest != built.environment.digest


def python_of_the_base(folder: Path) -> str:
    """A Python 3.12 with this package but without torch, which is enough to read its lists."""
    found = [*sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python")), "3.12"]
    made = uv("venv", "--python", str(found[0]), str(folder))
    if made.returncode != 0:
        pytest.skip("no Python 3.12 is on this machine")
    python = str(folder / "bin" / "python")
    done = uv("pip", "install", "--python", python, "msgspec", "packaging>=26", "platformdirs", "pathspec")
    assert done.returncode == 0, done.stderr
    done = uv("pip", "install", "--python", python, "--no-deps", str(ROOT))
    assert done.returncode == 0, done.stderr
    return python


_CHOOSE = """
import msgspec, sys
from sgpu_magic.config import Settings
from sgpu_magic.packages.environment_request import find_named
for name, mine, build in (("4", 0, 0), ("ai-4", 0, 1), ("4", 1, 0)):
    found = find_named(Settings(state_dir=sys.argv[1]), name, torch_mine=bool(mine), allow_build=bool(build))
    print(msgspec.json.encode([msgspec.structs.asdict(found.environment), found.notes]).decode())
"""


@pytest.mark.slow
def test_a_base_is_pins_without_what_the_node_brings(tmp_path: Path):
    python = python_of_the_base(tmp_path / "venv")
    done = subprocess.run(
        [python, "-P", "-c", _CHOOSE, str(tmp_path)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    (plain, notes), (ai, _), (mine, _) = (json.loads(line) for line in done.stdout.splitlines())
    assert (plain["label"], plain["python"], plain["own"], plain["resolve"]) == ("4", "3.12", False, False)
    names = {line.split("==")[0] for line in plain["requirements"]}
    assert not {name for name in names if name.startswith(("torch", "nvidia-", "triton"))}
    assert {"torch==2.7.1", "torchvision==0.22.1", "nvidia-cudnn-cu12==9.5.1.17"} <= set(plain["needed"])
    # older than the minimum for ranks
    assert "cloudpickle==3.0.0" in plain["needed"]
    assert "cloudpickle" not in names
    # without a wheel: the nearest version with one, or none
    assert "psutil==5.9.4" in plain["requirements"]
    assert "psycopg2" not in names
    assert "psutil==5.9.0" in ai["requirements"]
    assert "psycopg2==2.9.3" in ai["requirements"]
    assert "torch==2.7.1" in mine["requirements"]
    reported = " ".join(notes)
    for words in ("databricks.serverless_gpu", "dbus-python", "psutil 5.9.4 for 5.9.0", "cloudpickle 3.0.0 is too old"):
        assert words in reported
    assert len({plain["digest"], ai["digest"], mine["digest"]}) == 3
    assert plain["packages"] == len(plain["requirements"])


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "none"])
def test_the_notebooks_own_packages_are_meant(settings: Settings, name: str):
    assert environment_request.find_named(settings, name) is None


def test_the_setting_is_the_default_and_none_is_stronger(settings: Settings, tmp_path: Path):
    (tmp_path / "r.txt").write_text("six==1.16.0\n")
    by_setting = replace(settings, env_version=str(tmp_path / "r.txt"))
    assert chosen(by_setting, "").environment.label == "r.txt"
    assert environment_request.find_named(by_setting, "none") is None


@pytest.mark.parametrize("name", ["5", "ai-5", "there/is/none.txt", "mine", "~nobody-of-that-name/x", "x" * 150])
def test_an_unknown_name_is_told_what_there_is(settings: Settings, name: str):
    named_environments.save(settings, "kept", Environment(digest="0" * 16, python=HERE, requirements=("six==1.16.0",)))
    with pytest.raises(UsageError) as raised:
        environment_request.find_named(settings, name)
    for words in (name, "4 and ai-4", "none", "kept"):
        assert words in raised.value.message


# ---------------------------------------------------------------- requirements files


def test_open_requirements_are_looked_up(settings: Settings, tmp_path: Path):
    file = tmp_path / "requirements.txt"
    (tmp_path / "more.txt").write_text("idna>=3 # why\n")
    file.write_text("# mine\nsix\n-r more.txt\ntorch==2.7.1\nnumpy < 3 ; python_version\\\n< '4'\n\n")
    environment = chosen(settings, file).environment
    assert environment.requirements == ("six", "idna>=3", "numpy < 3 ; python_version < '4'")
    assert environment.needed == ("torch==2.7.1",)
    assert (environment.resolve, environment.own, environment.label) == (True, False, "requirements.txt")
    mine = chosen(settings, file, torch_mine=True).environment
    assert "torch==2.7.1" in mine.requirements
    assert mine.digest != environment.digest


def test_pins_with_hashes_are_complete(settings: Settings, tmp_path: Path):
    file = tmp_path / "locked.txt"
    file.write_text("six==1.16.0 \\\n    --hash=sha256:" + "a" * 64 + " \\\n    --hash=sha256:" + "b" * 64 + "\n")
    assert not chosen(settings, file).environment.resolve
    file.write_text(file.read_text() + "idna==3.7\n")
    assert chosen(settings, file).environment.resolve


def test_what_sgpu_magic_has_written_is_complete(settings: Settings, tmp_path: Path):
    """A run's own requirements.txt, as a replay reads it."""
    file = tmp_path / "requirements.txt"
    file.write_text(snapshot_requirements(take_snapshot(), None))
    environment = chosen(settings, file).environment
    assert not environment.resolve
    assert "torch" in {pin.partition("==")[0] for pin in environment.needed}
    assert not {line for line in environment.requirements if line.startswith("sgpu-magic")}
    for resolve in (False, True):
        sent = an_environment(tmp_path / "wheels", resolve=resolve, label="mine", platform="")
        file.write_text(environment_requirements(sent, None))
        again = chosen(settings, file).environment
        assert (again.resolve, again.requirements) == (resolve, sent.requirements)
        assert [wheel.file for wheel in again.wheels] == [wheel.file for wheel in sent.wheels]
    file.write_text(file.read_text().replace(f"# Python {HERE}", "# Python 3.9", 1))
    with pytest.raises(EnvironmentFailed, match=r"is for Python 3\.9"):
        environment_request.find_named(settings, str(file))


def test_the_digest_is_the_contents(settings: Settings, tmp_path: Path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("six==1.16.0\nidna==3.7\n")
    two.write_text("# another order\nidna==3.7\nsix==1.16.0\n")
    assert chosen(settings, one).environment.digest == chosen(settings, two).environment.digest
    two.write_text("idna==3.7\nsix==1.15.0\n")
    assert chosen(settings, one).environment.digest != chosen(settings, two).environment.digest
    assert chosen(settings, one).environment.digest != chosen(settings, one, allow_build=True).environment.digest


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--index-url https://user:hunter2@host/simple", "index_url"),
        ("-i https://host/simple", "index_url"),
        ("--extra-index-url https://host/simple", "index_url"),
        ("--find-links /wheels", "index_url"),
        ("-c constraints.txt", "constraints"),
        ("-e .", "this machine"),
        ("./project", "this machine"),
        ("/home/me/project", "this machine"),
        ("--pre", "--pre"),
        ("six @ git+https://user:hunter2@host/six", "password"),
        ("six @ https://${TOKEN}@host/six.whl", "password or a variable"),
        ("six = 1.16", "not a requirement"),
        ("six @ file:///nowhere/six-1.0-py3-none-any.whl", "no longer exists"),
        ("-r nowhere.txt", "can't be read"),
    ],
)
def test_what_another_machine_can_not_have_is_refused(settings: Settings, tmp_path: Path, line: str, words: str):
    file = tmp_path / "requirements.txt"
    file.write_text(f"idna\n{line}\n")
    with pytest.raises(UsageError) as raised:
        environment_request.find_named(settings, str(file))
    assert words in raised.value.message
    assert "hunter2" not in raised.value.message


def test_files_that_include_each_other_end(settings: Settings, tmp_path: Path):
    (tmp_path / "a.txt").write_text("-r a.txt\n")
    with pytest.raises(UsageError, match="nested deeper"):
        environment_request.find_named(settings, str(tmp_path / "a.txt"))


def test_a_wheel_of_this_machine_travels(settings: Settings, tmp_path: Path):
    wheel = tmp_path / "mine-1.0-py3-none-any.whl"
    wheel.write_bytes(b"bytes")
    (tmp_path / "r.txt").write_text(f"idna==3.7\nmine @ {wheel.as_uri()}\n")
    environment = chosen(settings, tmp_path / "r.txt").environment
    assert [(each.file, each.size, each.path) for each in environment.wheels] == [(wheel.name, 5, str(wheel))]
    assert re.fullmatch("[0-9a-f]{64}", environment.wheels[0].sha256)
    before = environment.digest
    wheel.write_bytes(b"other")
    assert chosen(settings, tmp_path / "r.txt").environment.digest != before


# ---------------------------------------------------------------- pylock.toml

LOCK = """
lock-version = "1.0"
created-by = "a test"
requires-python = "{python}"
[[packages]]
name = "six"
version = "1.16.0"
{source}
[[packages]]
name = "only-elsewhere"
version = "1.0"
marker = "sys_platform == 'win32'"
wheels = [{{ url = "https://host/only_elsewhere-1.0-py3-none-any.whl", hashes = {{ sha256 = "00" }} }}]
"""
WHEEL = 'wheels = [{ url = "https://host/six-1.16.0-py3-none-any.whl", hashes = { sha256 = "8a" } }]'


def test_a_lock_file_is_exact(settings: Settings, tmp_path: Path):
    file = tmp_path / "pylock.toml"
    file.write_text(LOCK.format(python=">=3.11", source=WHEEL))
    environment = chosen(settings, file).environment
    assert environment.requirements == ("six==1.16.0 --hash=sha256:8a",)
    assert not environment.resolve


def test_a_lock_file_of_uv_is_read(settings: Settings, tmp_path: Path):
    file = tmp_path / "pylock.small.toml"
    done = uv("pip", "compile", "--format", "pylock.toml", "-o", str(file), "-", input="six==1.16.0")
    assert done.returncode == 0, done.stderr
    (line,) = chosen(settings, file).environment.requirements
    assert line.startswith("six==1.16.0 --hash=sha256:")


def test_a_lock_file_names_commits_and_archives(settings: Settings, tmp_path: Path):
    file = tmp_path / "pylock.toml"
    vcs = 'vcs = { type = "git", url = "https://host/six", commit-id = "abc", subdirectory = "py" }'
    file.write_text(LOCK.format(python=">=3.11", source=vcs))
    assert read_file(file).lines == ("six @ git+https://host/six@abc#subdirectory=py",)
    archive = 'archive = { url = "https://host/six.zip", hashes = { sha256 = "8a" } }'
    file.write_text(LOCK.format(python=">=3.11", source=archive))
    assert read_file(file).lines == ("six @ https://host/six.zip#sha256=8a",)


@pytest.mark.parametrize(
    ("python", "source", "error", "words"),
    [
        ("<3.11", WHEEL, EnvironmentFailed, f"is for Python <3.11, and the notebook runs {HERE}"),
        (">=3.11", 'directory = { path = "." }', UsageError, "directory or file of this machine"),
        (">=3.11", "wheels = 1", UsageError, "not a valid pylock.toml"),
        (">=3.11", "wheels = [", UsageError, "not a valid pylock.toml"),
    ],
)
def test_a_lock_file_that_is_of_no_use_is_refused(
    settings: Settings, tmp_path: Path, python: str, source: str, error: type[Exception], words: str
):
    file = tmp_path / "pylock.toml"
    file.write_text(LOCK.format(python=python, source=source))
    with pytest.raises(error, match=re.escape(words)):
        environment_request.find_named(settings, str(file))


def test_another_toml_file_is_told_how_to_become_a_lock(settings: Settings, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(UsageError, match=re.escape("uv pip compile pyproject.toml -o pylock.toml")):
        environment_request.find_named(settings, str(tmp_path / "pyproject.toml"))


# ---------------------------------------------------------------- saved ones


def an_environment(folder: Path, **fields: object) -> Environment:
    folder.mkdir(exist_ok=True)
    wheel = folder / "mine-1.0-py3-none-any.whl"
    wheel.write_bytes(b"bytes")
    made = Environment(
        digest="0" * 16,
        python=HERE,
        platform="linux_x86_64",
        requirements=("six==1.16.0",),
        needed=("torch==2.13.0", "sgpu-magic==0.1.0"),
        wheels=(Wheel(file=wheel.name, sha256="8a", size=5, path=str(wheel)),),
        packages=2,
    )
    return Environment(**{name: getattr(made, name) for name in made.__struct_fields__} | fields)


def test_a_saved_environment_is_there_again(settings: Settings, tmp_path: Path):
    named_environments.save(settings, "mine", an_environment(tmp_path / "wheels"))
    shutil.rmtree(tmp_path / "wheels")
    found = chosen(settings, "mine").environment
    assert (found.label, found.own, found.requirements, found.packages) == ("mine", False, ("six==1.16.0",), 2)
    assert Path(found.wheels[0].path).read_bytes() == b"bytes"
    assert "torch==2.13.0" in chosen(settings, "mine", torch_mine=True).environment.requirements
    assert "sgpu-magic==0.1.0" not in chosen(settings, "mine", torch_mine=True).environment.requirements
    text = (named_environments.saved_path(settings) / "mine" / "requirements.txt").read_text()
    assert "six==1.16.0" in text


def test_saving_again_takes_the_place_of_the_old_one(settings: Settings, tmp_path: Path):
    named_environments.save(settings, "mine", an_environment(tmp_path / "wheels"))
    named_environments.save(settings, "mine", an_environment(tmp_path / "wheels", requirements=("idna==3.7",)))
    assert chosen(settings, "mine").environment.requirements == ("idna==3.7",)
    assert named_environments.saved_names(settings) == ["mine"]
    assert os.listdir(named_environments.saved_path(settings)) == ["mine"]


@pytest.mark.parametrize("name", ["4", "none", "../up", "a/b", "", "r.txt", ".hidden", "a b", "x" * 65])
def test_a_name_that_means_something_else_is_refused(settings: Settings, tmp_path: Path, name: str):
    with pytest.raises(UsageError):
        named_environments.save(settings, name, an_environment(tmp_path / "wheels"))
    assert (
        not named_environments.saved_path(settings).exists()
        or os.listdir(named_environments.saved_path(settings)) == []
    )


def test_a_saved_one_of_another_python_is_refused(settings: Settings, tmp_path: Path):
    named_environments.save(settings, "mine", an_environment(tmp_path / "wheels", python="3.9"))
    with pytest.raises(EnvironmentFailed, match=r"saved environment mine is for Python 3\.9"):
        environment_request.find_named(settings, "mine")


def test_a_saved_one_that_lost_its_wheel_says_so(settings: Settings, tmp_path: Path):
    kept = named_environments.save(settings, "mine", an_environment(tmp_path / "wheels"))
    shutil.rmtree(kept / "wheels")
    with pytest.raises(EnvironmentFailed, match=r"no longer has its wheel mine-1\.0"):
        environment_request.find_named(settings, "mine")


# ---------------------------------------------------------------- sgpu env


def test_export_writes_the_files_that_the_page_names(tmp_path: Path):
    for name, file in (("4", "requirements-env-gpu-4.txt"), ("ai-4", "requirements-ai-gpu-4.txt")):
        assert file in environments.export(name, str(tmp_path / "out"))
        text = (tmp_path / "out" / file).read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines == list(base_list(name).pins(allow_build=True))
        assert "dbus-python 1.3.2" in text
        assert "databricks.serverless_gpu" in text
        assert read_file(tmp_path / "out" / file).resolve
    with pytest.raises(UsageError, match="There are: 4, ai-4"):
        environments.export("5", str(tmp_path))


def build(settings: Settings, name: str, size: int, used_at: float) -> Path:
    store = BuiltEnvironments(settings.environments_path)
    lock = store.claim(name)
    assert lock is not None
    building = store.begin(name)
    (building / "venv").mkdir()
    (building / "venv" / "file").write_bytes(b"x" * size)
    built = Built(prefix="", executable="", sys_path=(), digest=name.partition("-")[0], packages=3)
    store.finish(name, building, built)
    store.measure(name)
    lock.close()
    os.utime(store.folder(name) / "last-used", (used_at, used_at))
    return store.folder(name)


def test_list_shows_bases_saved_and_built_ones(settings: Settings, tmp_path: Path):
    empty = environments.listing(settings)
    assert "nothing saved" in empty
    assert "none built on this machine in " in empty
    named_environments.save(settings, "mine", an_environment(tmp_path / "wheels"))
    build(settings, "0123456789abcdef-00000000", 5000, 1000.0)
    text = environments.listing(settings, now=1000.0 + 7200)
    (named_environments.saved_path(settings) / "old").mkdir()
    (named_environments.saved_path(settings) / "old" / "environment.json").write_text("{")
    text = environments.listing(settings, now=1000.0 + 7200)
    for words in (
        "unreadable",
        "4 ",
        "ai-4",
        "377 packages",
        "mine",
        "2 packages",
        "0123456789ab",
        "3 packages",
        "used 2 h ago",
    ):
        assert words in text, text


def test_remove_takes_a_saved_name_or_the_first_digits(settings: Settings, tmp_path: Path):
    named_environments.save(settings, "mine", an_environment(tmp_path / "wheels"))
    assert "mine was removed" in environments.remove(settings, "mine")
    assert named_environments.saved_names(settings) == []
    one = build(settings, "0123456789abcdef-00000000", 5000, 1000.0)
    two = build(settings, "0123ffffffffffff-00000000", 5000, 1000.0)
    with pytest.raises(UsageError, match="2 environments"):
        environments.remove(settings, "0123")
    with pytest.raises(UsageError, match="no environment"):
        environments.remove(settings, "01")
    lock = BuiltEnvironments(settings.environments_path).open(one.name)
    assert lock is not None
    with pytest.raises(UsageError, match="in use"):
        environments.remove(settings, "01234")
    lock[1].close()
    assert "freed" in environments.remove(settings, "01234")
    assert not one.exists()
    assert two.exists()


def test_prune_removes_what_nobody_uses(settings: Settings):
    old = build(settings, "0123456789abcdef-00000000", 5000, 1000.0)
    used = build(settings, "1123456789abcdef-00000000", 5000, 1000.0)
    new = build(settings, "2123456789abcdef-00000000", 5000, 1000.0 + 86400 * 3)
    lock = BuiltEnvironments(settings.environments_path).open(used.name)
    assert lock is not None
    os.utime(used / "last-used", (1000.0, 1000.0))
    reported = environments.prune(settings, days=2, now=1000.0 + 86400 * 4)
    assert reported.startswith("1 environment removed")
    assert "1 in use" in reported
    lock[1].close()
    assert [folder.exists() for folder in (old, used, new)] == [False, True, True]
