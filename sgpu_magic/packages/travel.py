"""What travels with a run to a node on another machine: environment variables, packages, modules.

Before a run is submitted, its packages and the modules that its payload names are checked; the notebook's own packages
also in the background.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.errors import EnvironmentFailed, SerializationError
from sgpu_magic.packages.distributions import Snapshot, contents_of, distribution_name, is_from_node, normalised
from sgpu_magic.packages.secrets import find_secrets
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.wire.attachments import Environment

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from sgpu_magic.packages.local_code import LocalCode
    from sgpu_magic.packages.mismatches import Mismatch

# ---------------------------------------------------------------- environment variables

# They are set on top of the node's own environment: machine-independent variables of libraries, variables that the user
# names (`--env`, the setting `variables`), and variables that the notebook has set since its kernel started (`%env`).
# Variables that describe locations on the kernel's machine are not sent.

_TRAVEL = (
    "HF_", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "DIFFUSERS_", "ACCELERATE_",
    "TOKENIZERS_", "SAFETENSORS_", "BITSANDBYTES_", "WANDB_", "MLFLOW_", "NCCL_", "GLOO_", "UCX_", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCHELASTIC_", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "NVTE_", "VLLM_", "DS_", "DEEPSPEED_", "FSDP_", "PL_", "LIGHTNING_",
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "XLA_", "JAX_", "TF_",
)  # fmt: skip
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
# variables of the kernel's machine, shell or front end, or of a rank
_OF_THIS_MACHINE = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "SHLVL", "PWD", "OLDPWD", "HOSTNAME", "HOST", "MAIL", "_",
    "TMPDIR", "TEMP", "TMP", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "TERMINFO", "LS_COLORS", "COLUMNS", "LINES",
    "EDITOR", "VISUAL", "INVOCATION_ID", "JOURNAL_STREAM", "MANPATH", "INFOPATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "RAY_ADDRESS", "RAY_JOB_ID",
})  # fmt: skip
_PREFIXES_OF_THIS_MACHINE = (
    "PYTHON", "PYENV", "PYDEVD_", "VIRTUAL_ENV", "CONDA_", "MAMBA_", "_CE_", "UV_", "PIP_", "PDM_", "POETRY_",
    "JPY_", "JUPYTER", "IPYTHON", "KERNEL_", "VSCODE_", "XDG_", "DBUS_", "SSH_", "GPG_", "LD_", "DYLD_", "SYSTEMD_",
    "SLURM_", "KUBERNETES_", "NVIDIA_", "SGPU_", "TORCHELASTIC_RUN_ID", "TERM_", "COLORTERM", "GNOME_", "DESKTOP_",
)  # fmt: skip
# set by ipykernel itself (`zmqshell.init_environment`, `matplotlib_inline`), not by the notebook
_SET_BY_IPYKERNEL = {
    "TERM": "xterm-color", "CLICOLOR": "1", "CLICOLOR_FORCE": "1", "FORCE_COLOR": "1", "PAGER": "cat",
    "GIT_PAGER": "cat", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}  # fmt: skip
# variables of libraries with these endings hold paths on the kernel's machine
_DIRECTORY_ENDS = ("_HOME", "_DIR", "_CACHE", "_PATH", "_ROOT", "_FOLDER", "_FILE", "_CONFIG", "_LOCATION", "_BUNDLE")
# the variables when the extension was loaded, for processes whose /proc/self/environ can't be used
_AT_LOAD = dict(os.environ)
_NOT_IMPORTED = frozenset({"", "builtins", "__main__", "__mp_main__", "sgpu_magic"})


class Travelling(msgspec.Struct, frozen=True):
    """Variables sent with a run.

    Args:
        values: Values by name.
        secrets: Names of the variables that are secrets.
    """

    values: dict[str, str]
    secrets: frozenset[str]


def travelling(
    environ: Mapping[str, str],
    *,
    given: Iterable[str] = (),
    chosen: str = "",
    started_with: Mapping[str, str] | None = None,
) -> Travelling:
    """Choose the variables that are sent to a node on another machine.

    Args:
        environ: The kernel's variables, updated with the run's own.
        given: Names that the user has set for this run or session (`--env`). They are always sent.
        chosen: The setting `variables`: comma-separated names, or prefixes that end in `*` or `_`.
        started_with: The variables that the kernel was started with: a variable whose value differs now was set in the
            notebook. Default: `start_variables()`.
    """
    before = start_variables() if started_with is None else started_with
    named = set(re.split(r"[,\s]+", chosen))
    beginnings = tuple(name.rstrip("*") for name in named if name.endswith(("*", "_")))
    named.update(given)
    values = {
        name: value
        for name, value in environ.items()
        if name in named or name.startswith(beginnings) or _travels(name, value, before)
    }
    return Travelling(values, find_secrets(values))


@functools.cache
def start_variables() -> Mapping[str, str]:
    """Return the variables that this process was started with."""
    entries = contents_of("/proc/self/environ").split(b"\0")
    found = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    # a program that sets its process title overwrites this memory
    return found if found.keys() & {"PATH", "HOME", "LANG"} else _AT_LOAD


def _travels(name: str, value: str, before: Mapping[str, str]) -> bool:
    """Whether a variable that the user has not named is sent."""
    if name in _OF_THIS_MACHINE or name.startswith(_PREFIXES_OF_THIS_MACHINE):
        return False
    if name.lower() in _PROXIES or value not in (before.get(name), _SET_BY_IPYKERNEL.get(name)):
        return True
    is_path = name.endswith(_DIRECTORY_ENDS) and value.startswith(("/", "~"))
    return name.startswith(_TRAVEL) and not is_path


# ---------------------------------------------------------------- incompatible packages


def check_before_travel(environment: Environment, snapshot: Snapshot | None = None, *, driver: str = "") -> list[str]:
    """Check the packages that a node will install for known mismatches.

    Args:
        environment: The packages.
        snapshot: The notebook's packages, if the environment is a copy of them.
        driver: Version of the NVIDIA driver on the node, "" if unknown.

    Returns:
        Warnings for the user.

    Raises:
        EnvironmentFailed: The packages would certainly break.
    """
    # `packaging` takes 20 ms to import, too long for loading the magics
    from sgpu_magic.packages.mismatches import find_left_behind, find_mismatches, packages_of, packages_of_pins
    from sgpu_magic.packages.requirement_files import key_of, version_of

    if snapshot is not None:
        everything = packages_of(snapshot)
        mine = environment.torch_mine
        sent = {name: package for name, package in everything.items() if not is_from_node(name, torch_mine=mine)}
        found = find_mismatches(sent, driver=driver if mine else "")
        found += () if mine else find_left_behind(everything)
    else:
        pins = {key_of(line): version_of(line) for line in environment.requirements}
        sent = packages_of_pins({name: version for name, version in pins.items() if version})
        found = find_mismatches(sent, driver=driver)
    sure = [mismatch for mismatch in found if mismatch.sure]
    if sure:
        raise EnvironmentFailed(_refusal(environment, sure))
    return [mismatch.sentence for mismatch in found]


def _refusal(environment: Environment, sure: list[Mismatch]) -> str:
    whose = f"the packages of {environment.label}" if environment.label else "the notebook's packages"
    more = f" (There are {len(sure) - 1} more like this: %sgpu_env lists them.)" if len(sure) > 1 else ""
    return f"{whose} would break on the ranks, so nothing was started: {sure[0].sentence}{more}"


# ---------------------------------------------------------------- background check, each mismatch reported once

_lock = threading.Lock()
_looked_at = ""
_reported: set[str] = set()
_found: tuple[str, ...] = ()


def look_for_mismatches(snapshot: Snapshot) -> None:
    """Check a snapshot for mismatches, once for each. Takes about 50 ms for 100 packages: call it in the background."""
    global _looked_at, _found
    if snapshot.digest == _looked_at:
        return
    # not needed by `mismatch_news`
    from sgpu_magic.packages.mismatches import driver_version, find_mismatches, packages_of

    # packages installed twice are only listed by %sgpu_env: many Pythons have dozens
    found = find_mismatches(packages_of(snapshot), driver=driver_version())
    _looked_at, _found = snapshot.digest, tuple(mismatch.sentence for mismatch in found)


def mismatch_news() -> tuple[str, ...]:
    """Return the mismatches that were found and not yet reported. Never blocks."""
    with _lock:
        new = tuple(sentence for sentence in _found if sentence not in _reported)
        _reported.update(new)
    return new


# ---------------------------------------------------------------- modules that a payload names


def check_references(
    modules: Iterable[tuple[str, str]],
    code: Iterable[LocalCode],
    environment: Environment | None,
    *,
    projects: Collection[str] = (),
) -> None:
    """Refuse a payload that needs modules which are neither sent with it nor in the ranks' packages.

    Args:
        modules: Pairs of a module and the object needed from it, as in `Packed.modules`.
        code: The local code sent with the payload.
        environment: The ranks' packages; None in a session, where any package installed here counts.
        projects: Directories of projects that are sent as wheels.

    Raises:
        SerializationError: A module is missing. The message names it, what is needed from it, and the remedy.
    """
    local = {name for each in code for name in each.modules}
    there: frozenset[str] | None = None
    for name, what in modules:
        top = name.partition(".")[0]
        if top in _NOT_IMPORTED or top in local or top in sys.stdlib_module_names:
            continue
        if environment is not None and not environment.resolve:
            there = _names_in(environment) if there is None else there
            # most packages have the name of their module; reading all of their metadata takes half a second
            if normalised(top) in there:
                continue
        packages = _packages_of_modules(take_snapshot().digest).get(top, ())
        # a session's packages, and those whose dependencies a node resolves, are not all known here
        if (packages and (there is None or not there.isdisjoint(packages))) or _lies_in(top, projects):
            continue
        thing = f"`{what}` of the module `{name}`" if what else f"the module `{name}`"
        raise SerializationError(f"{thing} can't travel to the ranks: {_why(top, packages, environment)}")


def check_versions(modules: Iterable[tuple[str, str]], environment: Environment) -> None:
    """Refuse a payload with values that the ranks' older version of their package can't read.

    Args:
        modules: Pairs of a module and the object needed from it, as in `Packed.modules`.
        environment: The ranks' packages.

    Raises:
        SerializationError: They can't be read there. The message has both versions and the remedy.
    """
    from sgpu_magic.packages.mismatches import find_unreadable
    from sgpu_magic.packages.requirement_files import key_of, specifier_of

    def here(package: str) -> str:
        return str(getattr(sys.modules.get(package), "__version__", ""))

    def there(package: str) -> SpecifierSet:
        lines = (*environment.requirements, *environment.needed)
        return next((specifier_of(line) for line in lines if key_of(line) == package), specifier_of(package))

    for package, what, versions in find_unreadable(modules, here, there):
        label = f"environment {environment.label}" if environment.label else "the ranks' environment"
        own, version = f"{package} {here(package)}", str(versions).removeprefix("==")
        raise SerializationError(
            f"a value of this cell can't travel to the ranks: the notebook has {own}, and {label} has {package} "
            f"{version}, which can't read {what} of the newer version. Nothing was started. Install the same "
            f"version on both sides (`%pip install '{package}{versions}'` and a restart of the kernel, or "
            f"{package}=={here(package)} in {label}), leave --env-version out (`--env-version none`), or send the "
            "value in another form, such as a plain array, list or dict."
        )


def _names_in(environment: Environment) -> frozenset[str]:
    """Return the ranks' packages, including those of a node's base layer that this Python has too."""
    # `packaging` takes 20 ms to import
    from sgpu_magic.packages.node.base_layer import base_layer
    from sgpu_magic.packages.requirement_files import key_of

    needed = list(map(key_of, environment.needed))
    wheels = map(distribution_name, environment.wheels)
    return frozenset({*base_layer(further=needed), *needed, *map(key_of, environment.requirements), *wheels})


@functools.lru_cache(maxsize=1)
def _packages_of_modules(digest: str) -> Mapping[str, tuple[str, ...]]:
    """Return packages by top-level module.

    Args:
        digest: Digest of the installed packages, the cache key.
    """
    return {top: tuple(map(normalised, names)) for top, names in metadata.packages_distributions().items()}


def _lies_in(top: str, projects: Collection[str]) -> bool:
    file = getattr(sys.modules.get(top), "__file__", None)
    return isinstance(file, str) and any(
        os.path.realpath(file).startswith(os.path.realpath(project) + os.sep) for project in projects
    )


def _why(top: str, packages: Collection[str], environment: Environment | None) -> str:
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    label = environment.label if environment is not None else ""
    where = f"environment {label}" if label else "the packages that travel"
    if packages:
        return (
            f"the ranks lack the package {' or '.join(sorted(set(packages)))}, which {where} "
            f"{'does' if label else 'do'} not have. "
            + (
                "Add it there, or leave --env-version out (`--env-version none`) to take the notebook's own packages."
                if label
                else "Install it in the notebook from a package index, so that it can travel."
            )
        )
    if isinstance(file, str):
        return (
            f"it is in {file}, which is neither in the notebook's folder, nor below an entry of sys.path, nor in a "
            "package that the ranks have. Import it from such a folder (`sys.path.insert(0, ...)`), install it as a "
            "package, or define what you need of it in a cell."
        )
    return (
        f"`{top}` was created at run time and has no file that the ranks could import. Define what you need of it in a "
        "cell, or write it to a file in the notebook's folder and import that."
    )
