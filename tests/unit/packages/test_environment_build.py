"""Environment builds on a node: contents, locking, refusals, and no leftovers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builds import Nodes, environment_of
from small_index import SmallIndex, small_wheel, write_wheel

from sgpu_magic.options.table import as_argument
from sgpu_magic.packages.node.base_layer import base_layer, layer_tag, link_layer
from sgpu_magic.packages.node.refusals import own_python, pin_of, sizes_in
from sgpu_magic.packages.node.store import BuildReady, BuildRefused, Built
from sgpu_magic.packages.snapshot import read_snapshot
from sgpu_magic.packages.uv_command import index_variables, last_error
from sgpu_magic.wire.attachments import Wheel
from sgpu_magic.wire.option_text import TextWithOptions

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def index() -> Iterator[SmallIndex]:
    made = SmallIndex()
    for name in ("tinyone", "tinytwo", "tinythree"):
        made.add(name, "1.0")
        made.add(name, "2.0")
    made.add("tinybig", "1.0", blob=3_000_000)
    yield made
    made.close()


@pytest.fixture
def node(tmp_path: Path, index: SmallIndex) -> Iterator[Nodes]:
    made = Nodes(tmp_path, index.url)
    yield made
    index.open.set()
    assert made.left() == set()


def refusal(output: BuildReady | BuildRefused) -> str:
    assert isinstance(output, BuildRefused), output
    return str(output.message)


# ---------------------------------------------------------------- what is in it


def test_an_environment_has_its_own_packages_and_the_base_layer_and_nothing_else(node: Nodes):
    environment = environment_of("tinyone==1.0", "tinytwo==2.0")
    assert node.build(environment) == BuildReady(built=True)
    code = """
import importlib.metadata as metadata, importlib.util as util, sys
import tinyone, tinytwo, torch, sgpu_magic.worker.process.zygote
print(tinyone.__version__, tinytwo.__version__, torch.__version__, metadata.version('torch'))
print(sgpu_magic.__file__, metadata.version('sgpu-magic'))
print([name for name in ('pytest', 'pandas', 'jupyterlab', 'ruff', 'tests', 'homes') if util.find_spec(name)])
print(torch.ones(2).sum().item(), sys.prefix, sys.base_prefix)
"""
    versions, own, foreign, alive = node.run(environment, code).splitlines()
    import sgpu_magic

    torch = importlib.metadata.version("torch")
    assert versions.split() == ["1.0", "2.0", torch, torch]
    # sgpu-magic is an editable install in this project: only the package itself is linked
    file, version = own.split()
    assert Path(file).resolve() == Path(sgpu_magic.__file__).resolve()
    assert version == sgpu_magic.__version__
    assert foreign == "[]"
    total, prefix, base_prefix = alive.split()
    assert (total, base_prefix) == ("2.0", sys.base_prefix)
    assert Path(prefix) == node.root / node.name(environment) / "venv"


def test_what_the_environment_has_itself_is_not_taken_from_the_base_layer(node: Nodes):
    # a numpy that torch can't even import shows which one is found
    wheel = write_wheel(node.root.parent, "numpy", "99.0")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = Wheel(file=wheel.name, sha256=digest, size=wheel.stat().st_size, path=str(wheel))
    environment = environment_of(wheels=(own,))
    assert node.build(environment) == BuildReady(built=True)
    code = "import numpy, importlib.metadata as m; print(numpy.__version__, m.version('numpy'))"
    assert node.run(environment, code) == "99.0 99.0"


def test_torch_mine_is_the_torch_that_was_shipped(node: Nodes):
    wheel = write_wheel(node.root.parent, "torch", "9.9")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = Wheel(file=wheel.name, sha256=digest, size=wheel.stat().st_size, path=str(wheel))
    environment = environment_of("tinyone==1.0", wheels=(own,), torch_mine=True)
    assert node.build(environment) == BuildReady(built=True)
    assert node.run(environment, "import torch, tinyone; print(torch.__version__)") == "9.9"


@pytest.mark.slow
def test_dependencies_of_what_a_person_wrote_are_looked_up_but_torch_is_the_nodes(node: Nodes, index: SmallIndex):
    index.add("tinyneedy", "1.0", needs=("torch>=2", "tinythree>=1", "triton"))
    environment = environment_of("tinyneedy", resolve=True, platform="")
    assert node.build(environment) == BuildReady(built=True)
    code = "import torch, tinyneedy, tinythree; print(tinythree.__version__, torch.__file__)"
    version, file = node.run(environment, code).split()
    assert version == "2.0"
    assert file == str(node.root / node.name(environment) / "base" / "torch" / "__init__.py")
    assert not [name for name in index.asked if "torch" in name or "triton" in name]


def test_a_namespace_that_distributions_share_is_linked_part_by_part(tmp_path: Path):
    site = tmp_path / "site"
    for name, part in (("nvidia-one", "one"), ("nvidia-two", "two")):
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"nvidia/{part}/__init__.py,,\nnvidia/{part}/lib/x.so,,\n../../bin/tool,,\n")
        (site / "nvidia" / part / "lib").mkdir(parents=True)
        (site / "nvidia" / part / "__init__.py").touch()
        (site / "nvidia" / part / "lib" / "x.so").touch()
    torch = site / "torch-2.0.dist-info"
    torch.mkdir()
    (torch / "METADATA").write_text(
        "Name: torch\nVersion: 2.0\nRequires-Dist: nvidia-one; extra != 'x'\n\nRequires-Dist: no\n"
    )
    (torch / "RECORD").write_text("torch/__init__.py,,\n")
    layer = base_layer(snapshot=read_snapshot([str(site)]))
    assert sorted(layer) == ["nvidia-one", "torch"]
    link_layer(layer, tmp_path / "base")
    assert sorted(entry.name for entry in (tmp_path / "base" / "nvidia").iterdir()) == ["one"]
    assert (tmp_path / "base" / "nvidia" / "one").readlink() == site / "nvidia" / "one"
    assert base_layer({"torch"}, snapshot=read_snapshot([str(site)])) == {}
    # a changed base layer is a different environment
    before = layer_tag(read_snapshot([str(site)]))
    assert layer_tag(read_snapshot([str(site)])) == before
    (torch / "METADATA").write_text("Name: torch\nVersion: 2.1\n")
    (site / "changed").touch()
    assert layer_tag(read_snapshot([str(site)])) != before


# ---------------------------------------------------------------- once, and whole


def test_it_is_built_once_and_then_there_in_less_than_10_ms(node: Nodes, index: SmallIndex):
    environment = environment_of("tinyone==1.0")
    assert node.build(environment) == BuildReady(built=True)
    asked = len(index.asked)
    assert node.build(environment) == BuildReady(built=False)
    assert len(index.asked) == asked
    took: list[float] = []
    for _ in range(5):
        before = time.thread_time()
        found = node.store.open(node.name(environment))
        took.append(time.thread_time() - before)
        assert found is not None
        found[1].close()
    assert min(took) < 0.01, took
    # bytecode is compiled in the background, in the environment and not in the base layer
    folder = node.root / node.name(environment)
    assert list(folder.glob("venv/lib/*/site-packages/tinyone/__pycache__/*.pyc"))
    assert int((folder / "size").read_text()) > 1000


def test_builders_of_the_same_environment_build_it_once(node: Nodes, index: SmallIndex):
    environment = environment_of("tinyone==2.0", "tinytwo==1.0")
    index.hold()
    builds = [node.begin(environment) for _ in range(3)]
    # all are running and blocked: one on the index, the others on that one
    for build in builds:
        assert build.link.recv(1, socket.MSG_PEEK)
    index.open.set()
    output = [build.wait() for build in builds]
    assert sorted(one.built for one in output if isinstance(one, BuildReady)) == [False, False, True]
    assert node.run(environment, "import tinyone; print(tinyone.__version__)") == "2.0"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_build_that_is_interrupted_leaves_nothing_for_the_next_one(node: Nodes, index: SmallIndex, number: int):
    environment = environment_of("tinytwo==1.0")
    index.hold()
    build = node.begin(environment)
    build.uv_pid(index)
    build.kill(number)
    if number == signal.SIGTERM:
        assert node.left() == set()
    else:
        assert node.left() == {f".building-{node.name(environment)}", f"locks/{node.name(environment)}"}
    index.open.set()
    assert node.build(environment) == BuildReady(built=True)
    assert node.run(environment, "import tinytwo; print(tinytwo.__version__)") == "1.0"


@pytest.mark.slow
def test_another_build_removes_what_a_killed_one_has_left(node: Nodes, index: SmallIndex):
    index.hold()
    build = node.begin(environment_of("tinythree==1.0"))
    build.uv_pid(index)
    build.kill()
    index.open.set()
    assert node.left()
    assert node.build(environment_of("tinythree==2.0")) == BuildReady(built=True)
    assert node.left() == set()


def test_a_uv_that_is_killed_fails_the_build(node: Nodes, index: SmallIndex):
    environment = environment_of("tinytwo==2.0")
    index.hold()
    build = node.begin(environment)
    os.kill(build.uv_pid(index), signal.SIGKILL)
    assert "killed" in refusal(build.wait())
    assert node.left() == set()


# ---------------------------------------------------------------- room


@pytest.mark.slow
def test_the_longest_unused_ones_go_and_never_one_in_use(node: Nodes):
    environments = [environment_of(f"{name}==1.0") for name in ("tinyone", "tinytwo", "tinythree")]
    for age, environment in zip((300, 200, 100), environments, strict=True):
        assert node.build(environment) == BuildReady(built=True)
        used_at = time.time() - age
        os.utime(node.root / node.name(environment) / "last-used", (used_at, used_at))
    oldest, middle, newest = (node.name(environment) for environment in environments)
    found = node.store.open(oldest)
    assert found is not None
    built, lock = found
    used_at = time.time() - 300
    os.utime(node.root / oldest / "last-used", (used_at, used_at))
    one = int((node.root / newest / "size").read_text())
    # room for two: the oldest is in use, so the second oldest is removed
    before = set(node.store.names())
    node.store.make_room(int(one * 2.5))
    assert before - set(node.store.names()) == {middle}
    assert sorted(node.store.names()) == sorted([oldest, newest])
    assert isinstance(built, Built)
    lock.close()
    # a build makes room by itself
    assert node.build(environments[1], budget_bytes=int(one * 1.5)) == BuildReady(built=True)
    assert node.store.names() == [middle]


@pytest.mark.slow
def test_what_is_too_large_is_refused_before_anything_is_downloaded(node: Nodes, index: SmallIndex):
    index.asked.clear()
    output = refusal(node.build(environment_of("tinybig==1.0", "tinyone==1.0"), limit_bytes=2_000_000))
    assert "3.0 MB to download, more than the 2.0 MB" in output
    assert f"tinybig==1.0 (3.0 MB), tinyone==1.0 ({len(small_wheel('tinyone', '1.0'))} B)" in output
    assert "environment_limit" in output
    assert index.downloads() == []
    # known sizes are not requested again
    index.asked.clear()
    assert "tinybig" in refusal(node.build(environment_of("tinybig==1.0"), limit_bytes=2_000_000))
    assert index.asked == []


@pytest.mark.needs_root
def test_a_full_disk_is_told_and_nothing_is_left(node: Nodes):
    if os.getuid() or shutil.which("mount") is None:
        pytest.skip("needs root and mount(8)")
    disk = node.root.parent / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "sgpu-test", str(disk)], check=True)
    try:
        output = refusal(node.build(environment_of("tinybig==1.0", "tinyone==1.0"), root=disk / "environments"))
        assert "No space left on device" in output
        assert "environment_dir" in output
        left = [path.name for path in (disk / "environments").rglob("*") if path.name != "locks"]
        assert [name for name in left if name != "sizes.json"] == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# ---------------------------------------------------------------- refused


def test_another_python_platform_or_conda_is_refused_with_the_way_out(node: Nodes):
    output = refusal(node.build(environment_of("tinyone==1.0", python="3.9")))
    assert "Python 3.9" in output
    assert f"Python {own_python()}" in output
    assert "install sgpu-magic on" in output
    output = refusal(node.build(environment_of("tinyone==1.0", platform="linux_riscv64")))
    assert "linux_riscv64" in output
    output = refusal(node.build(environment_of("tinyone==1.0", conda=("mkl 2024.1", "libblas 3.9"))))
    assert "mkl 2024.1, libblas 3.9" in output
    assert "--env-version" in output
    assert not node.root.exists()


def test_what_has_no_wheel_is_not_built_unasked(node: Nodes):
    line = "secretproject @ git+https://user:geheim@127.0.0.1:9/project.git@0123456789012345678901234567890123456789"
    refused = node.build(environment_of(line))
    output = refusal(refused)
    assert "secretproject" in output
    assert "--allow-build" in output
    assert "geheim" not in output
    # a function's caller reads the option as the function takes it
    assert isinstance(refused, BuildRefused)
    assert isinstance(refused.message, TextWithOptions)
    assert "allow_build=True" in refused.message.spelled(as_argument)


def test_what_the_index_lacks_is_told_in_uvs_words(node: Nodes):
    output = refusal(node.build(environment_of("tinyone==7.0")))
    assert "there is no version of tinyone==7.0" in output
    assert "index_url" in output
    assert os.uname().nodename.split(".")[0] in output


def test_an_index_that_can_not_be_reached_is_named_without_its_password(node: Nodes):
    output = refusal(node.build(environment_of("tinyone==1.0"), index_url="http://user:geheim@127.0.0.1:9/simple"))
    assert "127.0.0.1:9" in output
    assert "geheim" not in output


def test_a_wheel_that_is_not_the_one_that_was_meant_is_refused(node: Nodes, tmp_path: Path):
    path = write_wheel(tmp_path, "tinylocal", "1.0")
    wheel = Wheel(file=path.name, sha256="0" * 64, size=path.stat().st_size, path=str(path))
    assert "its SHA-256 differs" in refusal(node.build(environment_of(wheels=(wheel,))))
    gone = Wheel(file=path.name, sha256="0" * 64, size=1, path=str(tmp_path / "gone" / path.name))
    assert "is no longer at" in refusal(node.build(environment_of(wheels=(gone,))))
    outside = Wheel(file="../x.whl", sha256="0" * 64, size=1, path=str(path))
    assert "is not the name of a wheel" in refusal(node.build(environment_of(wheels=(outside,))))


# ---------------------------------------------------------------- small parts


def test_pins_and_sizes():
    assert pin_of("Foo_Bar[x]==1.0  # why") == "foo-bar==1.0"
    assert pin_of("six>=1") == ""
    assert pin_of("six @ https://host/six.whl") == ""
    lock = """
[[packages]]
name = "Foo_Bar"
version = "1.0"
wheels = [{ url = "x", size = 10 }, { url = "y", size = 30 }]
[[packages]]
name = "unknown"
version = "2"
[[packages]]
name = "source"
version = "3"
sdist = { url = "z", size = 5 }
"""
    assert sizes_in(lock) == {"foo-bar==1.0": 30, "source==3": 5}


def test_what_uv_said_last_is_one_paragraph():
    text = "Resolved 3 packages\nerror: Failed to fetch: http://u:geheim@host/simple\n  cause: refused\n\nhint: try\n"
    assert re.fullmatch(r"Failed to fetch: http://\S*@?host/simple cause: refused hint: try", last_error(text))
    assert "geheim" not in last_error(text)


def test_the_index_is_the_settings_or_uvs_or_pips(tmp_path: Path):
    assert index_variables("http://here/simple")["UV_DEFAULT_INDEX"] == "http://here/simple"
    assert index_variables("", {"UV_INDEX_URL": "http://uvs"}) == {}
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://pips/simple\nextra-index-url = http://a\n  http://b\n"
    )
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    found = index_variables("", environ)
    assert found["UV_DEFAULT_INDEX"] == "http://pips/simple"
    assert found["UV_INDEX"] == "http://a http://b"
    assert index_variables("", environ | {"PIP_INDEX_URL": "http://other"})["UV_DEFAULT_INDEX"] == "http://other"
