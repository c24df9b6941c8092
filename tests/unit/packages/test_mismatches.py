"""Incompatible packages are found before the run, and changes that are not loaded yet are reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sgpu_magic.errors import EnvironmentFailed, SerializationError
from sgpu_magic.packages.distributions import InstalledPackages
from sgpu_magic.packages.mismatches import find_left_behind, find_mismatches
from sgpu_magic.packages.module_references import check_versions
from sgpu_magic.packages.named_environments import base_list
from sgpu_magic.packages.nvidia_driver import driver_in, is_driver_too_old, oldest_driver
from sgpu_magic.packages.package_metadata import packages_of, packages_of_pins
from sgpu_magic.packages.snapshot import changes, process_began_at, read_snapshot, stale_modules, versions
from sgpu_magic.packages.travel import check_before_travel
from sgpu_magic.packages.uv_command import index_variables, uv_path
from sgpu_magic.wire.attachments import Environment

TORCH_NEEDS = (
    "nvidia-cudnn-cu12==9.5.1.17; platform_system == 'Linux'",
    "nvidia-nccl-cu12==2.26.2; platform_system == 'Linux'",
    "nvidia-cuda-runtime-cu12==12.6.77; platform_system == 'Linux'",
    "opt-einsum>=3.3; extra == 'opt-einsum'",
)


class Site:
    """A site directory with distributions that consist of metadata only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site-packages"
        self.folder.mkdir(parents=True)

    def install(self, name: str, version: str, *requires: str, pure: bool = True) -> Site:
        for other in self.folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
            for file in other.iterdir():
                file.unlink()
            other.rmdir()
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text("\n".join([*lines, "", "Requires-Dist: numpy<1 is only said here"]))
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\n")
        (info / "RECORD").write_text(f"{name}.py,sha256={version},1\n")
        return self

    def torch(self, version: str = "2.7.1", cuda: str = "12.6") -> Site:
        self.install("torch", version, *TORCH_NEEDS, pure=False)
        (self.folder / "torch").mkdir(exist_ok=True)
        text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
        (self.folder / "torch" / "version.py").write_text(text)
        return self

    def with_cuda_libraries(self, cudnn: str = "9.5.1.17", nccl: str = "2.26.2") -> Site:
        self.install("nvidia-cudnn-cu12", cudnn, pure=False).install("nvidia-nccl-cu12", nccl, pure=False)
        return self.install("nvidia-cuda-runtime-cu12", "12.6.77", pure=False)

    @property
    def snapshot(self) -> InstalledPackages:
        return read_snapshot([str(self.folder)])

    def sentences(self, driver: str = "") -> list[str]:
        """The reported problems."""
        return [mismatch.sentence for mismatch in find_mismatches(packages_of(self.snapshot), driver=driver)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def only(reported: list[str], *words: str) -> None:
    (sentence,) = reported
    assert [word for word in words if word not in sentence] == [], sentence


# ---------------------------------------------------------------- numpy


def test_packages_that_go_together_are_left_alone(site: Site):
    site.install("numpy", "2.1.3", pure=False).install("pandas", "2.2.3", "numpy>=1.26.0", pure=False)
    site.install("scipy", "1.15.1", "numpy<2.5,>=1.23.5", pure=False).torch().with_cuda_libraries()
    site.install("torchvision", "0.22.1", "torch==2.7.1", "numpy", pure=False)
    assert site.sentences("535.183.01") == []


@pytest.mark.parametrize("name", ["4", "ai-4"])
def test_published_environments_go_together(name: str):
    pins = dict(pin.split("==") for pin in base_list(name).pins(allow_build=True))
    assert find_mismatches(packages_of_pins(pins), driver="560.35.03") == ()


@pytest.mark.parametrize(
    ("name", "version", "requires"),
    [
        ("pandas", "1.5.3", "numpy>=1.21.0"),
        ("pyarrow", "14.0.1", "numpy>=1.16.6"),
        ("scikit-learn", "1.2.2", "numpy>=1.17.3"),
        ("opencv-python", "4.8.1.78", "numpy>=1.21.2"),
    ],
)
def test_what_is_built_for_numpy_1_breaks_with_numpy_2(site: Site, name: str, version: str, requires: str):
    site.install("numpy", "2.1.3", pure=False).install(name, version, requires, pure=False)
    only(site.sentences(), f"{name} {version}", "NumPy 1", "numpy is 2.1.3", "%pip install")


def test_packages_that_only_exclude_this_numpy_are_left_alone(site: Site):
    """A cautious upper bound proves nothing."""
    site.install("numpy", "2.3.0", pure=False).install("numba", "0.61.0", "numpy<2.2,>=1.24", pure=False)
    assert site.sentences() == []


def test_pins_alone_tell_it_too():
    found = find_mismatches(packages_of_pins({"numpy": "2.0.0", "pandas": "2.1.4", "idna": "3"}))
    assert ["pandas 2.1.4" in mismatch.text for mismatch in found] == [True]


def test_what_is_found_really_breaks(tmp_path: Path):
    environ = {**os.environ, **index_variables("")}
    environ.pop("VIRTUAL_ENV", None)
    python = str(tmp_path / "venv" / "bin" / "python")
    packages = ["numpy==2.2.6", "shapely==2.0.3"]
    for command in (
        ["venv", "--python", sys.executable, str(tmp_path / "venv")],
        ["pip", "install", "--no-deps", "--no-build", "--python", python, *packages],
    ):
        done = subprocess.run([uv_path(), *command], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    found = find_mismatches(packages_of(read_snapshot([str(folder)])))
    assert ["shapely 2.0.3" in mismatch.text for mismatch in found] == [True]
    tried = subprocess.run([python, "-c", "import shapely"], capture_output=True, text=True, check=False)
    assert tried.returncode != 0
    assert "numpy.core.multiarray failed to import" in tried.stderr


# ---------------------------------------------------------------- torch


def test_a_cudnn_of_another_major_version_breaks_torch(site: Site):
    site.torch().with_cuda_libraries(cudnn="8.9.7.29")
    only(site.sentences(), "nvidia-cudnn-cu12==9.5.1.17", "is 8.9.7.29", "%pip install")


def test_a_cuda_library_of_the_same_major_version_is_left_alone(site: Site):
    site.torch().with_cuda_libraries(nccl="2.18.1")
    assert site.sentences() == []


@pytest.mark.parametrize(
    ("name", "version", "requires"),
    [
        ("torchvision", "0.20.1", ("torch==2.5.1",)),
        ("torchvision", "0.20.1", ()),
        ("torchaudio", "2.5.1", ("torch==2.5.1",)),
        ("torchaudio", "2.5.1", ()),
    ],
)
def test_partners_of_another_torch_break(site: Site, name: str, version: str, requires: tuple[str, ...]):
    site.torch().with_cuda_libraries().install(name, version, *requires, pure=False)
    only(site.sentences(), f"{name} {version} is built for torch", "torch is 2.7.1")


def test_a_build_of_torch_for_one_cuda_is_that_torch(site: Site):
    site.torch("2.7.1+cu126").with_cuda_libraries().install("torchvision", "0.22.1+cu126", "torch==2.7.1", pure=False)
    assert site.sentences() == []


def test_what_was_built_for_the_notebooks_torch_is_told_of_when_the_nodes_takes_its_place(site: Site):
    site.torch().install("flash-attn", "2.8.3", "torch", pure=False)
    (found,) = find_left_behind(packages_of(site.snapshot))
    assert "flash-attn" in found.text
    assert "--torch mine" in found.remedy


# ---------------------------------------------------------------- the driver


@pytest.mark.parametrize(
    ("cuda", "driver", "too_old"),
    [
        ("11.8", "450.80.02", False), ("11.8", "440.33", True), ("12.6", "525.60.13", False), ("12.0", "470.82", True),
        ("13.0", "575.57.08", True), ("13.0", "580.65.06", False), ("12.8", "", False), ("", "470.82", False),
        ("99.0", "470.82", False),
    ],
)  # fmt: skip
def test_the_oldest_driver_of_a_cuda_version_is_known(cuda: str, driver: str, too_old: bool):
    assert is_driver_too_old(cuda, driver) == too_old


def test_each_known_cuda_version_needs_a_newer_driver_than_the_one_before():
    drivers = [oldest_driver(f"{major}.0") or 0 for major in (11, 12, 13)]
    assert drivers == sorted(set(drivers))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs@x)\n", "570.86.15"),
        ("something else", ""),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str):
    assert driver_in(text) == version


def test_a_driver_older_than_torchs_cuda_is_told(site: Site):
    site.torch().with_cuda_libraries()
    only(site.sentences("470.82.01"), "CUDA 12.6", "525", "470.82.01", "Update the driver")


# ---------------------------------------------------------------- before the run


def environment(*pins: str, torch_mine: bool = False, label: str = "") -> Environment:
    return Environment(digest="0" * 16, requirements=pins, torch_mine=torch_mine, label=label)


def test_what_surely_breaks_does_not_travel(site: Site):
    site.install("numpy", "2.1.3", pure=False).install("pandas", "1.5.3", pure=False)
    with pytest.raises(EnvironmentFailed) as raised:
        check_before_travel(environment(), site.snapshot)
    assert raised.value.message.startswith("the notebook's packages would break on the ranks, so nothing was started:")
    with pytest.raises(EnvironmentFailed, match="the packages of mine would break"):
        check_before_travel(environment("numpy==2.1.3", "pandas==1.5.3", "six", label="mine"))


def test_torch_is_only_looked_at_when_it_travels(site: Site):
    site.torch().with_cuda_libraries(cudnn="8.9.7.29").install("flash-attn", "2.8.3", pure=False)
    (note,) = check_before_travel(environment(), site.snapshot, driver="470.82")
    assert "flash-attn" in note
    with pytest.raises(EnvironmentFailed, match="nvidia-cudnn-cu12 is 8"):
        check_before_travel(environment(torch_mine=True), site.snapshot)
    pins = environment("torch==2.7.1+cu126", torch_mine=True, label="mine")
    with pytest.raises(EnvironmentFailed, match="needs an NVIDIA driver 525"):
        check_before_travel(pins, driver="470.82")


# ---------------------------------------------------------------- not used yet


def test_what_was_found_in_the_background_is_told_once(site: Site):
    site.install("numpy", "2.1.3", pure=False).install("pandas", "1.5.3", pure=False)
    script = (
        "import sys\n"
        "from sgpu_magic.packages import travel as known\n"
        "assert 'packaging' not in sys.modules\n"
        "from sgpu_magic.packages.snapshot import read_snapshot\n"
        "print(known.new_mismatches())\n"
        "known.start_mismatch_check(read_snapshot([sys.argv[1]]))\n"
        "print(known.new_mismatches()); print(known.new_mismatches())\n"
        "known.start_mismatch_check(read_snapshot([sys.argv[1]])); print(known.new_mismatches())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(site.folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, reported, *after = done.stdout.splitlines()
    assert (before, after) == ("()", ["()", "()"])
    assert "pandas 1.5.3 is compiled for NumPy 1" in reported


def test_changes_say_what_was_installed_removed_and_changed():
    found = changes({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"})
    assert [change.words for change in found] == ["b 1 -> 2", "c 1 removed", "d 1 installed"]


def module(version: str) -> ModuleType:
    made = ModuleType("loaded")
    made.__version__ = version  # type: ignore[attr-defined]
    return made


def test_a_loaded_module_of_another_version_asks_for_a_restart(site: Site):
    site.install("numpy", "2.0.0").install("gone", "1.0").install("other", "1.0")
    first = site.snapshot
    modules = {"numpy": module("2.0.0"), "gone": module("1.0"), "other": module("1.0")}
    assert stale_modules(first, site.snapshot, modules, time.time() + 60) == ()
    site.install("numpy", "2.1.0").install("gone", "1.1")
    for file in (site.folder / "gone-1.1.dist-info").iterdir():
        file.unlink()
    (site.folder / "gone-1.1.dist-info").rmdir()
    found = stale_modules(first, site.snapshot, modules, 0.0)
    assert [stale.words for stale in found] == [
        "gone 1.0 was uninstalled but is still imported; restart the kernel to stop using it",
        "restart the kernel to use numpy 2.1.0, 2.0.0 is loaded",
    ]
    # a package installed before this process started may write its version in its own way
    assert versions(site.snapshot)["numpy"] == "2.1.0"
    assert [each.name for each in stale_modules(site.snapshot, site.snapshot, modules, time.time() + 60)] == []


def test_what_is_loaded_may_be_no_module(site: Site):
    """None in `sys.modules` forbids an import, as `sgpu run` does for nbformat; other packages put objects there."""
    site.install("forbidden", "1.0").install("odd", "1.0")
    modules: dict[str, Any] = {"forbidden": None, "odd": object()}
    assert stale_modules(site.snapshot, site.snapshot, modules, 0.0) == ()


def test_the_begin_of_this_process_is_known():
    script = "import time; from sgpu_magic.packages.snapshot import process_began_at; print(process_began_at())"
    before = time.time()
    began = float(subprocess.check_output([sys.executable, "-c", script], text=True))
    assert before - 2 <= began <= time.time()
    assert process_began_at() < before


# ---------------------------------------------------------------- values that an older version can't read

NUMPY_2 = ModuleType("numpy")
NUMPY_2.__version__ = "2.3.1"
PANDAS_3 = ModuleType("pandas")
PANDAS_3.__version__ = "3.0.6"
ARRAYS = (("numpy", "dtype"), ("sgpu_magic.payload.unpack", "array_of"), ("numpy._core.multiarray", "scalar"))
RECORDS = (("numpy._core.multiarray", "_reconstruct"), ("numpy.rec", "recarray"))
TEXTS = (("numpy._core._internal", "_convert_to_stringdtype_kwargs"),)
FRAME = (("pandas", "DataFrame"), ("pandas.arrays", "ArrowStringArray"))


@pytest.mark.parametrize(
    ("references", "requirement", "refused"),
    [
        (ARRAYS, "numpy==1.26.4", ""),
        (RECORDS, "numpy==1.26.4", "numpy 2.3.1, and environment old has numpy 1.26.4"),
        (TEXTS, "numpy==1.26.4 --hash=sha256:00", "numpy 2.3.1, and environment old has numpy 1.26.4"),
        ((("numpy._core.numeric", "_frombuffer"),), "numpy<2", "numpy 2.3.1, and environment old has numpy <2"),
        (RECORDS, "numpy==2.0.0", ""),
        (RECORDS, "numpy>=1.26", ""),
        (RECORDS, "numpy", ""),
        (RECORDS, "pandas==2.2.2", ""),
        (FRAME, "pandas==2.2.2", "pandas 3.0.6, and environment old has pandas 2.2.2"),
        (FRAME, "pandas>=3", ""),
    ],
)
def test_values_that_the_ranks_older_version_cannot_read(
    references: tuple[tuple[str, str], ...], requirement: str, refused: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "numpy", NUMPY_2)
    monkeypatch.setitem(sys.modules, "pandas", PANDAS_3)
    environment = Environment(digest="", label="old", requirements=("idna==3.7", requirement))
    if not refused:
        check_versions(references, environment)
        return
    with pytest.raises(SerializationError, match="Nothing was started") as caught:
        check_versions(references, environment)
    assert refused in str(caught.value)
    assert "--env-version none" in str(caught.value)


def test_an_older_notebook_is_read(monkeypatch: pytest.MonkeyPatch):
    older = ModuleType("numpy")
    older.__version__ = "1.26.4"
    monkeypatch.setitem(sys.modules, "numpy", older)
    check_versions(RECORDS, Environment(digest="", label="new", requirements=("numpy==1.26.4",)))
