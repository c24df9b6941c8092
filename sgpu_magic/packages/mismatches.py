"""Packages that break together, found from their metadata. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sgpu_magic.packages.nvidia_driver import is_driver_too_old, oldest_driver
from sgpu_magic.packages.package_metadata import Package, Packages

# The first versions whose wheels also support NumPy 2, for packages that do not all declare it in their metadata: see
# NumPy's issue 26191, "Ecosystem compatibility with numpy 2.0". For each except torch, the version before was observed
# to break and this one to work
_FIRST_FOR_NUMPY_2 = {
    "h5py": "3.11", "matplotlib": "3.8.4", "ml-dtypes": "0.4", "numba": "0.60", "numexpr": "2.10",
    "opencv-python": "4.10.0.84", "opencv-python-headless": "4.10.0.84", "pandas": "2.2.2", "pyarrow": "16.0",
    "scikit-learn": "1.4.2", "scipy": "1.13", "shapely": "2.0.4", "torch": "2.3",
}  # fmt: skip
# torchvision's minor version is torch's plus 15: 0.15 belongs to 2.0, 0.22 to 2.7
_VISION_AHEAD = 15
# their compiled code loads with one version of torch only
_BUILT_FOR_TORCH = {
    "causal-conv1d", "deepspeed-kernels", "detectron2", "fbgemm-gpu", "flash-attn", "mamba-ssm", "torch-cluster",
    "torch-scatter", "torch-sparse", "transformer-engine-torch", "vllm", "xformers",
}  # fmt: skip


class Mismatch(msgspec.Struct, frozen=True):
    """Packages that do not work together.

    Args:
        text: What was found, a sentence without its period.
        remedy: What to do about it, a sentence.
    """

    text: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.text}. {self.remedy}"


def find_mismatches(packages: Packages, *, driver: str = "") -> tuple[Mismatch, ...]:
    """Find packages that certainly break together.

    Args:
        packages: The packages that are used together.
        driver: Version of the NVIDIA driver where they run, "" if there is none or it is unknown.
    """
    return (*_numpy(packages), *_cuda_libraries(packages), *_torch_pairs(packages), *_driver(packages, driver))


def find_left_behind(packages: Packages) -> tuple[Mismatch, ...]:
    """Find packages built for the notebook's torch, which break if the node's torch has another version.

    Args:
        packages: The notebook's packages.
    """
    torch = packages.get("torch")
    bound = sorted(name for name in packages if name in _BUILT_FOR_TORCH)
    if torch is None or not bound:
        return ()
    text = (
        f"{', '.join(bound)} {'is' if len(bound) == 1 else 'are'} built for one torch version ({torch.version} here), "
        "and the ranks use the node's torch"
    )
    return (Mismatch(text, "--torch mine sends this one with the run."),)


def _numpy(packages: Packages) -> Iterator[Mismatch]:
    numpy = _version(packages.get("numpy"))
    if numpy is None or numpy.major < 2:
        return
    for name, first in _FIRST_FOR_NUMPY_2.items():
        version = _version(packages.get(name))
        if version is not None and version < Version(first):
            yield Mismatch(
                f"{name} {version} is compiled for NumPy 1, and numpy is {numpy}: its import fails, or crashes "
                "(`numpy.core.multiarray failed to import`)",
                f"`%pip install -U '{name}>={first}'`, or `%pip install 'numpy<2'`.",
            )


def _cuda_libraries(packages: Packages) -> Iterator[Mismatch]:
    """Yield CUDA libraries of another major version than torch loads: the version is part of the file's name."""
    torch = packages.get("torch")
    if torch is None:
        return
    for name, requirement in torch.requires.items():
        version, pinned = _version(packages.get(name)), _pinned(requirement)
        if not name.startswith("nvidia-") or version is None or pinned is None or version.major == pinned.major:
            continue
        yield Mismatch(
            f"torch {torch.version} needs {name}{requirement.specifier}, and {name} is {version}: `import torch` does "
            "not find the library",
            f"`%pip install '{name}{requirement.specifier}'`, or reinstall torch.",
        )


def _torch_pairs(packages: Packages) -> Iterator[Mismatch]:
    torch = _version(packages.get("torch"))
    if torch is None:
        return
    for name in ("torchvision", "torchaudio"):
        partner = packages.get(name)
        built_for = None if partner is None else _torch_of(name, partner)
        # builds for a CUDA version require torch without the `+cu...` suffix
        if partner is None or built_for is None or built_for.contains(torch.public, prereleases=True):
            continue
        yield Mismatch(
            f"{name} {partner.version} is built for torch{built_for}, and torch is {torch}: its operators are missing, "
            "as in `operator torchvision::nms does not exist`",
            f"`%pip install -U {name} 'torch=={torch.public}'` chooses the matching version.",
        )


def _torch_of(name: str, partner: Package) -> SpecifierSet | None:
    """Return the versions of torch that a torchvision or torchaudio is built for, None if unknown."""
    if "torch" in partner.requires:
        return partner.requires["torch"].specifier
    # of a mere pin, only the version is known
    own = _version(partner)
    if own is None:
        return None
    if name == "torchaudio" and own.major >= 2:
        return SpecifierSet(f"=={own.major}.{own.minor}.*")
    if name == "torchvision" and own.minor >= _VISION_AHEAD:
        return SpecifierSet(f"==2.{own.minor - _VISION_AHEAD}.*")
    return None


def _driver(packages: Packages, driver: str) -> Iterator[Mismatch]:
    torch = packages.get("torch")
    if torch is not None and is_driver_too_old(torch.cuda, driver):
        yield Mismatch(
            f"torch {torch.version} is built with CUDA {torch.cuda}, which needs an NVIDIA driver "
            f"{oldest_driver(torch.cuda)} or newer, and the driver is {driver}: torch finds no GPU",
            "Update the driver, or install a torch that is built with an older CUDA.",
        )


def _version(package: Package | None) -> Version | None:
    return _parsed(package.version) if package is not None else None


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def _pinned(wants: Requirement) -> Version | None:
    pins = [clause.version for clause in wants.specifier if clause.operator == "=="]
    return _parsed(pins[0].removesuffix(".*")) if pins else None
