"""Running uv: finding it, its error messages, its package index, and running it from a kernel."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from platformdirs import site_config_path, user_config_path

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.system import processes

# keep messages to a paragraph: the beginning of a resolver's error states the cause
_MOST_CHARACTERS = 1200
_KEPT_LINES = 200
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# any of these configures uv's index, or all of uv
_UV_CONFIGURED = (
    "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_CONFIG_FILE",
)  # fmt: skip

# uv must work neither on this kernel's environment nor on the notebook's own project
_NOT_INHERITED = ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT")


class UvFailed(Exception):
    """uv failed.

    Args:
        words: Its error message as one paragraph, without credentials.
        text: Its whole stderr.
    """

    def __init__(self, words: str, text: str) -> None:
        super().__init__(words)
        self.words = words
        self.text = text


def uv_path() -> str:
    """Return uv's executable: the one installed with sgpu-magic, else the one on the path.

    Raises:
        FileNotFoundError: uv is not installed.
    """
    beside = Path(sys.prefix, "bin", "uv")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")
    if found is None:
        try:
            from uv import find_uv_bin
        except ImportError:
            raise FileNotFoundError("uv is not installed") from None
        found = find_uv_bin()
    return found


def run_uv(
    arguments: Sequence[str],
    *,
    stdin: str = "",
    variables: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> str:
    """Run uv and wait for it. It is killed if this process dies.

    Args:
        arguments: Command line arguments. Every user of the machine can read them, so pass no secrets.
        stdin: Text for its standard input.
        variables: Environment variables on top of this process's own.
        on_line: Called with each line of its stderr.
        meanwhile: Called once it has started. Only used with `on_line`.

    Returns:
        Its standard output.

    Raises:
        UvFailed: uv failed.
        OSError: uv can't be started.
    """
    parent = os.getpid()
    environ = {**os.environ, **(variables or {}), "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    # uv must not use the node's own environment
    environ.pop("VIRTUAL_ENV", None)
    with subprocess.Popen(
        [uv_path(), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd="/",
        text=True,
        errors="replace",
        # safe: this process is single-threaded
        preexec_fn=lambda: processes.die_with_parent(parent),
    ) as uv:
        try:
            messages, output = _talk(uv, stdin, on_line, meanwhile)
        except BaseException:
            # also on an interrupt: leaving the block waits for uv, which may take minutes
            uv.kill()
            raise
    if code := uv.returncode:
        text = "\n".join(messages)
        how = f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"
        raise UvFailed(last_error(text) or how, text)
    return output


def last_error(text: str) -> str:
    """Return uv's error message as one paragraph, without credentials."""
    lines = [_ANSI.sub("", line).strip() for line in text.splitlines()]
    first = next((at for at, line in enumerate(lines) if line.startswith("error:")), None)
    kept = lines[first:] if first is not None else [line for line in lines if line][-3:]
    words = " ".join(line.removeprefix("error:").strip() for line in kept if line)
    words = without_url_credentials(" ".join(words.split()))
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]} ..."


def _talk(
    uv: subprocess.Popen[str], stdin: str, on_line: Callable[[str], None] | None, meanwhile: Callable[[], None] | None
) -> tuple[list[str], str]:
    """Write uv's input and read both of its outputs to the end. Returns the lines of stderr, and stdout."""
    if on_line is None:
        output, errors = uv.communicate(stdin)
        return errors.splitlines(), output
    if uv.stdin is None or uv.stderr is None or uv.stdout is None:
        raise OSError("uv was started without pipes")
    with contextlib.suppress(BrokenPipeError):
        uv.stdin.write(stdin)
        uv.stdin.close()
    if meanwhile is not None:
        meanwhile()
    lines: list[str] = []
    # with `on_line`, the standard output is a line or two and fits into its pipe
    for line in uv.stderr:
        lines.append(line.rstrip("\n"))
        del lines[:-_KEPT_LINES]
        on_line(lines[-1])
    return lines, uv.stdout.read()


# ---------------------------------------------------------------- package index


def index_variables(index_url: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that configure uv's package index. They may contain credentials.

    uv does not read pip's configuration, so pip's indexes are passed on where uv has no configuration of its own. With
    several indexes uv then picks the best version, as pip does.

    Args:
        index_url: The setting `index_url`.
        environ: The other variables of the uv process. Default: this process's.
    """
    if index_url:
        return {"UV_DEFAULT_INDEX": index_url, "UV_INDEX_URL": index_url}
    folders = (user_config_path("uv", appauthor=False), site_config_path("uv", appauthor=False), Path("/etc/uv"))
    if any(map(environ.get, _UV_CONFIGURED)) or any((folder / "uv.toml").is_file() for folder in folders):
        return {}
    pip = _pip_configuration(environ)
    found: dict[str, str] = {}
    if pip.get("index-url"):
        found["UV_DEFAULT_INDEX"] = pip["index-url"]
    if pip.get("extra-index-url"):
        found["UV_INDEX"] = " ".join(pip["extra-index-url"].split())
        found["UV_INDEX_STRATEGY"] = environ.get("UV_INDEX_STRATEGY", "unsafe-best-match")
    if pip.get("find-links"):
        found["UV_FIND_LINKS"] = ",".join(pip["find-links"].split())
    return found


def _pip_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's index options from the machine's, user's and environment's files, then variables. The last wins."""
    home = Path(environ.get("HOME") or Path.home())
    files = [
        site_config_path("pip", appauthor=False) / "pip.conf",
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        user_config_path("pip", appauthor=False) / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    if environ.get("PIP_CONFIG_FILE"):
        files.append(Path(environ["PIP_CONFIG_FILE"]))
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        # pip itself reports a broken file
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read(file)
            for section in ("global", "install"):
                if parser.has_section(section):
                    found.update(parser[section])
    for name in ("index-url", "extra-index-url", "find-links"):
        value = environ.get(f"PIP_{name.replace('-', '_').upper()}")
        if value:
            found[name] = value
    return found


# ---------------------------------------------------------------- running uv from a kernel


class Done(msgspec.Struct, frozen=True):
    """The result of a command.

    Args:
        status: Exit status; negative after a signal.
        output: Its stdout.
        words: Its stderr, without credentials.
    """

    status: int
    output: str
    words: str


def call_uv(
    arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float, *, stdin: str = "", gently: bool = False
) -> Done:
    """Run uv and wait for it. It and its children are killed on an interrupt or a timeout.

    Args:
        arguments: Command line arguments. Every user of the machine can read them, so pass no secrets.
        variables: Environment variables on top of this process's own.
        timeout_s: Timeout in seconds.
        stdin: Text for its standard input.
        gently: Run it at the lowest priority.

    Raises:
        EnvironmentFailed: uv is not installed, or timed out.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    environ |= {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never", **variables}
    try:
        command = [*(("nice", "-n", "19") if gently and shutil.which("nice") else ()), uv_path(), *arguments]
        return _called(command, environ, timeout_s, stdin)
    except OSError as error:
        raise EnvironmentFailed(
            f"uv, which makes lock files and wheels, can't be started: {error.strerror or error}. "
            "`pip install uv` in the notebook's environment installs it."
        ) from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(
            f"`uv {' '.join(arguments[:2])}` was stopped after {timeout_s:g} s. Check that this machine reaches the "
            "package index: `uv pip install --dry-run six`."
        ) from None


def call_pip(arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> Done:
    """Run this Python's pip and wait for it, as `call_uv` does.

    Raises:
        EnvironmentFailed: pip can't be started, or timed out.
    """
    environ = {**os.environ, "NO_COLOR": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    try:
        return _called([sys.executable, "-m", "pip", *arguments], environ, timeout_s)
    except OSError as error:
        raise EnvironmentFailed(f"pip can't be started: {error.strerror or error}.") from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(
            f"`pip {' '.join(arguments[:1])}` was stopped after {timeout_s:g} s. Check that this machine reaches the "
            "package index: `pip download six`."
        ) from None


def _called(command: Sequence[str], environ: Mapping[str, str], timeout_s: float, stdin: str = "") -> Done:
    """Run a command and wait for it. It and its children are killed on an interrupt or a timeout."""
    with subprocess.Popen(
        command,
        env=environ,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C in a terminal reaches only this process, which then kills the whole group
        start_new_session=True,
    ) as process:
        try:
            output, words = process.communicate(stdin, timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return Done(process.returncode, output, without_url_credentials(words).strip())
