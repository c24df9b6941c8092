"""Packages that are known to break together, found from their metadata. Imports none of them.

The metadata says what a package requires, whether it is compiled, and for which CUDA version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sgpu_magic.packages.distributions import Distribution
from sgpu_magic.packages.nvidia_driver import is_driver_too_old, oldest_driver
from sgpu_magic.packages.package_metadata import Package, Packages

# ---------------------------------------------------------------- metadata of the packages

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
# more packages installed twice than this are summed up in one sentence
_MOST_TWICE = 3
_CUDNN = ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn")
_BUILT_FOR_TORCH = {
    "flash-attn", "xformers", "torch-scatter", "torch-sparse", "torch-cluster", "torchtext", "torchao", "detectron2",
    "causal-conv1d", "mamba-ssm", "transformer-engine-torch", "vllm", "deepspeed-kernels", "fbgemm-gpu",
}  # fmt: skip


# ---------------------------------------------------------------- mismatches


class Mismatch(msgspec.Struct, frozen=True):
    """Packages that do not work together.

    Args:
        text: What was found, a sentence without its period.
        remedy: What to do about it, a sentence.
        sure: Whether it certainly breaks; otherwise it may.
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
    """Find mismatches, certain ones first.

    Args:
        packages: The packages that are used together.
        shadowed: Distributions of the same names later on `sys.path`.
        driver: Version of the NVIDIA driver where they run, "" if there is none or it is unknown.
    """
    found = [*_numpy(packages), *_cuda_libraries(packages), *_torch_pairs(packages), *_driver(packages, driver)]
    found += _twice(packages, shadowed)
    return tuple(sorted(found, key=lambda mismatch: not mismatch.sure))


def find_left_behind(packages: Packages) -> tuple[Mismatch, ...]:
    """Find packages built for the notebook's torch, which the ranks replace with the node's torch.

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
    return (Mismatch(text, "--torch mine sends this one with the run.", sure=False),)


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
            # some packages only set a cautious upper bound, so this alone proves nothing
            yield Mismatch(
                f"{name} {package.version} needs numpy{wants.specifier}, and numpy is {version}: it may be compiled "
                "for another version",
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
            text += f": `import torch` then misses {soname}, or finds a version other than the one it was built with"
        yield Mismatch(text, f"`%pip install '{name}{wants.specifier}'`, or reinstall torch.", sure=wrong_major)


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
            # its builds for a CUDA version require torch without the `+cu...` suffix
            fits = wants.specifier.contains(version.public, prereleases=True)
            wanted = str(wants.specifier)
        else:
            minor = own.minor - _VISION_AHEAD if name == "torchvision" else own.minor
            major = 2 if name == "torchvision" and own.minor >= _VISION_AHEAD else own.major
            if major < 2:
                # before 2.0 the version numbers were not related like this
                continue
            fits, wanted = (version.major, version.minor) == (major, minor), f"=={major}.{minor}"
        if not fits:
            missing = ": its operators are missing (`operator torchvision::nms does not exist`)"
            yield Mismatch(
                f"{name} {partner.version} is built for torch{wanted}, and torch is {torch.version}"
                + (missing if name == "torchvision" else ""),
                f"`%pip install -U {name} 'torch=={version.public}'` chooses the matching version.",
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
            f"{len(others)} packages are installed twice in different versions; the imported ones are {named} ...",
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
    return _parsed(package.version) if package is not None else None


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def _older(package: Package, first: str) -> bool:
    version = _version(package)
    # `compiled` is None for mere pins; all packages in the table are compiled
    return version is not None and version < Version(first) and package.compiled is not False


def _pinned(wants: Requirement) -> Version | None:
    pins = [clause.version for clause in wants.specifier if clause.operator == "=="]
    return _parsed(pins[0].removesuffix(".*")) if pins else None


# ---------------------------------------------------------------- values that an older version can't read


class _NewPickles(msgspec.Struct, frozen=True):
    """Pickled values of a package that its versions before `since` can't read.

    Args:
        package: The package, by normalised name; also the name of its module.
        since: The first version that pickles them like this.
        references: Matches a pickled reference to such a value, `module:name`, from its beginning.
        what: The values, for the user.
    """

    package: str
    since: str
    references: re.Pattern[str]
    what: str


# Found by pickling with the newer version and unpickling with the older one: NumPy 2.4 and 1.26, pandas 3.0 and 2.2.
# NumPy 1.26 has a few modules of `numpy._core` for this purpose. Arrays and generators of random numbers are pickled by
# this package, for all versions
_NEW_PICKLES = (
    _NewPickles(
        "numpy",
        "2",
        re.compile(
            r"numpy\.(rec|char|strings|_core\.(?!(multiarray|_multiarray_umath|_internal|_dtype|_dtype_ctypes):)\w+)\b"
            r"|numpy\._core\._internal:_convert_to_stringdtype_kwargs"
        ),
        "record arrays, arrays of StringDType, and what lies in NumPy's private modules",
    ),
    _NewPickles("pandas", "3", re.compile(r"pandas\.arrays:"), "columns and column names of text"),
)


def find_unreadable(
    references: Iterable[tuple[str, str]], here: Callable[[str], str], there: Callable[[str], SpecifierSet]
) -> Iterator[tuple[str, str, SpecifierSet]]:
    """Yield the packages whose pickled values an older version on the ranks can't read.

    Args:
        references: Pairs of a module and a name in it that the values refer to.
        here: Returns the version that pickles, by package; "" if unknown.
        there: Returns the versions that the ranks may have, by package; all if that is unknown.

    Yields:
        The package, what can't be read, and the versions that the ranks may have.
    """
    named = [f"{module}:{name}" for module, name in references]
    for each in _NEW_PICKLES:
        if not any(map(each.references.match, named)):
            continue
        own, allowed = _parsed(here(each.package)), there(each.package)
        if own is None or own < Version(each.since):
            continue
        newer = (str(own), each.since, f"{each.since}.9999")
        if not any(allowed.contains(version, prereleases=True) for version in newer):
            yield each.package, each.what, allowed
