"""Packages that are known to break together, found from what they say of themselves: nothing is imported.

Which packages they need is in their metadata, and whether they are compiled, and for which CUDA.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from sgpu_magic.packages.distributions import Distribution, Snapshot, normalised
from sgpu_magic.packages.requirement_files import needed_by

# ---------------------------------------------------------------- what packages say of themselves

_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_LOCAL_CUDA = re.compile(r"\+cu(\d{2})(\d)")
# torch says which CUDA it was built with by what it needs, too: the runtime of that version
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


class Package(msgspec.Struct, frozen=True):
    """One package.

    Args:
        version: Its version.
        requires: What it needs here, by normalised name.
        compiled: It has binary modules; None when that is not known.
        cuda: The CUDA version that it was built with, "" for none. Only known of torch.
    """

    version: str
    requires: Mapping[str, Requirement]
    compiled: bool | None = None
    cuda: str = ""


Packages = Mapping[str, Package]
"""Packages by normalised name."""


@functools.lru_cache(maxsize=1)
def packages_of(snapshot: Snapshot) -> Packages:
    """What the packages of a snapshot say of themselves, read once for each snapshot: under 0.5 ms a package."""
    return {found.key: _read(found) for found in snapshot.distributions}


def packages_of_pins(pins: Mapping[str, str]) -> dict[str, Package]:
    """Packages of which only the versions are known.

    Args:
        pins: Versions by normalised name.
    """
    packages = {name: Package(version, {}) for name, version in pins.items()}
    if "torch" in packages:
        runtime = next((pins[name] for name in _RUNTIMES if name in pins), "")
        cuda = _local_cuda(pins["torch"]) or ".".join(runtime.split(".")[:2])
        packages["torch"] = Package(pins["torch"], {}, compiled=True, cuda=cuda)
    return packages


def _read(found: Distribution) -> Package:
    info = Path(found.location)
    requires = {normalised(requirement.name): requirement for requirement in needed_by(info)}
    pure = re.search(r"^Root-Is-Purelib:\s*(\w+)", _text(info / "WHEEL"), re.MULTILINE)
    compiled = None if pure is None else pure[1].lower() == "false"
    cuda = ""
    if found.key == "torch":
        built_with = _CUDA.search(_text(info.parent / "torch" / "version.py"))
        cuda = built_with[1] if built_with is not None else _local_cuda(found.version)
    return Package(found.version, requires, compiled, cuda)


def _local_cuda(version: str) -> str:
    found = _LOCAL_CUDA.search(version)
    return f"{found[1]}.{found[2]}" if found is not None else ""


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- what does not go together

# The first versions whose wheels are built for NumPy 2 as well, of packages that do not all say so in their metadata:
# NumPy's issue 26191, "Ecosystem compatibility with numpy 2.0". Of each but torch the version before it was seen to
# break, and this one to work
_FIRST_FOR_NUMPY_2 = {
    "h5py": "3.11",
    "matplotlib": "3.8.4",
    "ml-dtypes": "0.4",
    "numba": "0.60",
    "numexpr": "2.10",
    "opencv-python": "4.10.0.84",
    "opencv-python-headless": "4.10.0.84",
    "pandas": "2.2.2",
    "pyarrow": "16.0",
    "scikit-learn": "1.4.2",
    "scipy": "1.13",
    "shapely": "2.0.4",
    "torch": "2.3",
}
# torchvision's minor version is torch's and 15: 0.15 came with 2.0, 0.22 with 2.7
_VISION_AHEAD = 15
# more of them are one sentence
_MOST_TWICE = 3
_CUDNN = ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn")
_BUILT_FOR_TORCH = {
    "flash-attn", "xformers", "torch-scatter", "torch-sparse", "torch-cluster", "torchtext", "torchao", "detectron2",
    "causal-conv1d", "mamba-ssm", "transformer-engine-torch", "vllm", "deepspeed-kernels", "fbgemm-gpu",
}  # fmt: skip


class Mismatch(msgspec.Struct, frozen=True):
    """What does not go together.

    Args:
        text: What was found, the beginning of a sentence.
        remedy: What to do about it, a sentence.
        sure: It breaks; else it may.
    """

    text: str
    remedy: str
    sure: bool

    @property
    def sentence(self) -> str:
        return f"{self.text}. {self.remedy}"


def find_mismatches(
    packages: Packages, shadowed: Iterable[Distribution] = (), *, driver: str = ""
) -> tuple[Mismatch, ...]:
    """Find what is known to break, the sure ones first.

    Args:
        packages: All that are imported together.
        shadowed: Those of the same names further back on `sys.path`.
        driver: The NVIDIA driver's version where they run, "" when there is none or nobody knows.
    """
    found = [*_numpy(packages), *_cuda_libraries(packages), *_torch_pairs(packages), *_driver(packages, driver)]
    found += _twice(packages, shadowed)
    return tuple(sorted(found, key=lambda mismatch: not mismatch.sure))


def find_left_behind(packages: Packages) -> tuple[Mismatch, ...]:
    """Find what was built for the notebook's torch, where the node's own takes that one's place.

    Args:
        packages: Those that travel, and torch as the notebook has it.
    """
    torch = packages.get("torch")
    bound = sorted(name for name in packages if name in _BUILT_FOR_TORCH)
    if torch is None or not bound:
        return ()
    text = (
        f"{', '.join(bound)} {'is' if len(bound) == 1 else 'are'} built for one torch ({torch.version} here), and the "
        "ranks get the node's"
    )
    return (Mismatch(text, "--torch mine takes this one along.", sure=False),)


def _numpy(packages: Packages) -> Iterator[Mismatch]:
    numpy = packages.get("numpy")
    version = _version(numpy)
    if version is None:
        return
    for name, package in packages.items():
        wants = package.requires.get("numpy")
        first = _FIRST_FOR_NUMPY_2.get(name)
        if version.major >= 2 and first is not None and _older(package, first):
            yield Mismatch(
                f"{name} {package.version} is compiled for NumPy 1, and numpy is {version}: its import fails, or "
                "crashes (`numpy.core.multiarray failed to import`)",
                f"`%pip install -U '{name}>={first}'`, or `%pip install 'numpy<2'`.",
                sure=True,
            )
        elif package.compiled and wants is not None and not wants.specifier.contains(version, prereleases=True):
            # some are only careful: a bound alone is no proof
            yield Mismatch(
                f"{name} {package.version} needs numpy{wants.specifier}, and numpy is {version}: it may be compiled "
                "for another one",
                f"`%pip install 'numpy{wants.specifier}'`, or another version of {name}.",
                sure=False,
            )


def _cuda_libraries(packages: Packages) -> Iterator[Mismatch]:
    torch = packages.get("torch")
    if torch is None:
        return
    for name, wants in torch.requires.items():
        there = packages.get(name)
        if not name.startswith("nvidia-") and name not in ("triton", "pytorch-triton"):
            continue
        if there is not None and wants.specifier.contains(there.version, prereleases=True):
            continue
        has = f"{name} is {there.version}" if there is not None else f"{name} is not installed"
        text = f"torch {torch.version} needs {name}{wants.specifier}, and {has}"
        pin, version = _pinned(wants), _version(there)
        wrong_major = there is not None and pin is not None and (version is None or version.major != pin.major)
        if name in _CUDNN:
            soname = f"libcudnn.so.{pin.major}" if pin is not None else "libcudnn.so"
            text += f": `import torch` then misses {soname}, or finds another one than it was built with"
        yield Mismatch(text, f"`%pip install '{name}{wants.specifier}'`, or install torch anew.", sure=wrong_major)


def _torch_pairs(packages: Packages) -> Iterator[Mismatch]:
    torch = packages.get("torch")
    version = _version(torch)
    for name in ("torchvision", "torchaudio"):
        partner = packages.get(name)
        own = _version(partner)
        if torch is None or version is None or partner is None or own is None:
            continue
        wants = partner.requires.get("torch")
        if wants is not None:
            # a build of it for a CUDA version pins torch without that
            fits = wants.specifier.contains(version.public, prereleases=True)
            wanted = str(wants.specifier)
        else:
            minor = own.minor - _VISION_AHEAD if name == "torchvision" else own.minor
            major = 2 if name == "torchvision" and own.minor >= _VISION_AHEAD else own.major
            if major < 2:
                # before 2.0 the numbers went other ways
                continue
            fits, wanted = (version.major, version.minor) == (major, minor), f"=={major}.{minor}"
        if not fits:
            missing = ": its operators are missing (`operator torchvision::nms does not exist`)"
            yield Mismatch(
                f"{name} {partner.version} is built for torch{wanted}, and torch is {torch.version}"
                + (missing if name == "torchvision" else ""),
                f"`%pip install -U {name} 'torch=={version.public}'` chooses the version that belongs to it.",
                sure=True,
            )


def _driver(packages: Packages, driver: str) -> Iterator[Mismatch]:
    torch = packages.get("torch")
    if torch is not None and is_driver_too_old(torch.cuda, driver):
        yield Mismatch(
            f"torch {torch.version} is built with CUDA {torch.cuda}, which needs an NVIDIA driver "
            f"{oldest_driver(torch.cuda)} or newer, and the driver is {driver}: torch finds no GPU",
            "Update the driver, or install a torch that is built with an older CUDA.",
            sure=True,
        )


def _twice(packages: Packages, shadowed: Iterable[Distribution]) -> Iterator[Mismatch]:
    others = {
        each.key: each for each in shadowed if each.key in packages and packages[each.key].version != each.version
    }
    if len(others) > _MOST_TWICE:
        named = ", ".join(f"{name} {packages[name].version}" for name in sorted(others)[:_MOST_TWICE])
        yield Mismatch(
            f"{len(others)} packages are installed twice in different versions; imported are {named} ...",
            "A Python that sees only one site directory has each package once.",
            sure=False,
        )
        return
    for name, other in others.items():
        yield Mismatch(
            f"{name} is installed twice: {packages[name].version} is imported, {other.version} is in "
            f"{other.location.rpartition('/')[0]}",
            f"`%pip uninstall {name}` removes the first, which leaves the other.",
            sure=False,
        )


def _version(package: Package | None) -> Version | None:
    try:
        return Version(package.version) if package is not None else None
    except InvalidVersion:
        return None


def _older(package: Package, first: str) -> bool:
    version = _version(package)
    # None: not known, as of pins; those in the table are all compiled
    return version is not None and version < Version(first) and package.compiled is not False


def _pinned(wants: Requirement) -> Version | None:
    pins = [clause.version for clause in wants.specifier if clause.operator == "=="]
    try:
        return Version(pins[0].removesuffix(".*")) if pins else None
    except InvalidVersion:
        return None


# ---------------------------------------------------------------- which NVIDIA driver a CUDA version needs

# NVIDIA, "CUDA Compatibility", chapter "Minor Version Compatibility", table 1: the oldest driver by CUDA major version
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_DRIVER_FILE = "/proc/driver/nvidia/version"
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d{3,}(?:\.\d+)+)\s")


def driver_version() -> str:
    """The version of this machine's NVIDIA driver, "" without one. Costs the reading of a small file."""
    try:
        with open(_DRIVER_FILE, encoding="utf-8", errors="replace") as file:
            return driver_in(file.read())
    except OSError:
        return ""


def driver_in(text: str) -> str:
    """Find the version in the words of the driver's kernel module, "" where there is none."""
    found = _KERNEL_MODULE.search(text)
    return found[1] if found is not None else ""


def oldest_driver(cuda: str) -> int | None:
    """The oldest major version of a driver that programs of a CUDA version run on; None when that is not known.

    Args:
        cuda: `12.6`.
    """
    major = cuda.partition(".")[0]
    return _OLDEST_DRIVERS.get(int(major)) if major.isdigit() else None


def is_driver_too_old(cuda: str, driver: str) -> bool:
    """Whether a driver is known to be too old for a CUDA version; False when one of them is not known.

    Args:
        cuda: `12.6`, "" for none.
        driver: `535.183.01`, "" for none.
    """
    oldest, major = oldest_driver(cuda), driver.partition(".")[0]
    return oldest is not None and major.isdigit() and int(major) < oldest
