"""Which of a kernel's environment variables are sent to a node on another machine, and which of them are secrets.

They are set on top of the node's own environment: machine-independent variables of libraries, variables that the user
names (`--env`, the setting `variables`), and variables that the notebook has set since its kernel started (`%env`).
Variables that describe locations on the kernel's machine are not sent.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from sgpu_magic.packages.secrets import Blanker, find_secrets

_TRAVEL = (
    "HF_", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "DIFFUSERS_", "ACCELERATE_",
    "TOKENIZERS_", "SAFETENSORS_", "BITSANDBYTES_", "WANDB_", "MLFLOW_", "NCCL_", "GLOO_", "UCX_", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCHELASTIC_", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_",
    "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "NVTE_", "VLLM_", "DS_", "DEEPSPEED_", "FSDP_", "PL_", "LIGHTNING_",
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "XLA_", "JAX_", "TF_",
)  # fmt: skip
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
# variables of the kernel's machine, shell or front end, or of a rank
_PLACE = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "SHLVL", "PWD", "OLDPWD", "HOSTNAME", "HOST", "MAIL", "_",
    "TMPDIR", "TEMP", "TMP", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "TERMINFO", "LS_COLORS", "COLUMNS", "LINES",
    "EDITOR", "VISUAL", "INVOCATION_ID", "JOURNAL_STREAM", "MANPATH", "INFOPATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "RAY_ADDRESS", "RAY_JOB_ID",
})  # fmt: skip
_PLACE_PREFIXES = (
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
_ABSOLUTE = re.compile(r"(/|~)")
_HAS_PROC = os.path.exists("/proc/self/environ")
# the variables when the extension was loaded, for systems without /proc/self/environ
_AT_LOAD: dict[str, str] = {} if _HAS_PROC else dict(os.environ)


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
    named, beginnings = _read(chosen)
    known = frozenset(given)
    values = {
        name: value
        for name, value in environ.items()
        if name in known
        or name in named
        or name.startswith(beginnings)
        or (not _is_place(name) and (_is_allowed(name, value) or _was_set(name, value, before)))
    }
    return Travelling(values, find_secrets(values))


@functools.cache
def start_variables() -> Mapping[str, str]:
    """Return the variables that this process was started with."""
    if not _HAS_PROC:
        return _AT_LOAD
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    found = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    # a program that sets its process title overwrites this memory
    return found if found.keys() & {"PATH", "HOME", "LANG"} else dict(os.environ)


class SecretsOf:
    """Caches the `Blanker` of an environment's secrets until the environment changes. Not thread-safe."""

    def __init__(self) -> None:
        self._of: Mapping[str, str] = {}
        self._blanker = Blanker()

    def blanker(self, environ: Mapping[str, str]) -> Blanker:
        """Return a `Blanker` for the secrets in `environ`. Takes 10 us if nothing has changed."""
        if environ != self._of:
            self._of = dict(environ)
            self._blanker = Blanker(environ[name] for name in find_secrets(environ))
        return self._blanker


def blanked_settings(body: str, clear: Callable[[str], str]) -> str:
    """Return a cell's text redacted by `clear`, and with the secrets in `%env NAME=value` lines redacted too."""
    if "%env" in body or "%set_env" in body:
        body = _SET_LINE.sub(_without_secret_value, body)
    return clear(body)


# ---------------------------------------------------------------- within

_SET_LINE = re.compile(r"^(\s*%(?:set_)?env\s+)([^\s=]+)(\s*=\s*|\s+)(\S.*?)([ \t]*)$", re.MULTILINE)


def _without_secret_value(match: re.Match[str]) -> str:
    head, name, between, value, rest = match.groups()
    if not find_secrets({name: value.strip("'\"")}):
        return match[0]
    return f"{head}{name}{between}***{rest}"


def _is_place(name: str) -> bool:
    return name in _PLACE or name.startswith(_PLACE_PREFIXES)


def _is_allowed(name: str, value: str) -> bool:
    if name.lower() in _PROXIES:
        return True
    if not name.startswith(_TRAVEL):
        return False
    return not (name.endswith(_DIRECTORY_ENDS) and _ABSOLUTE.match(value))


def _was_set(name: str, value: str, before: Mapping[str, str]) -> bool:
    return before.get(name) != value and _SET_BY_IPYKERNEL.get(name) != value


def _read(chosen: str) -> tuple[frozenset[str], tuple[str, ...]]:
    words = [word for word in re.split(r"[,\s]+", chosen) if word]
    beginnings = tuple(word.rstrip("*") for word in words if word.endswith(("*", "_")))
    return frozenset(words), beginnings
