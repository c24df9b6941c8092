"""Job files: `job.yaml`, `job.json` and `job.toml`, with Databricks' names of accelerators.

`sgpu run` has the same options on its command line; they override those of the file.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.options.notebook_job import JobDefaults
from sgpu_magic.options.values import (
    MOST_RANKS,
    STRATEGIES,
    check_spread,
    cost_limit,
    device_type,
    duration_s,
    memory_bytes,
)
from sgpu_magic.wire.decoding import border, convert, decode_toml, load_json
from sgpu_magic.wire.devices import canonical_type

EXTRA = "Install the missing packages: `pip install 'sgpu-magic[run]'`."
_MOST_BYTES = 1_000_000
_ACCELERATOR = re.compile(r"GPU_([1-9][0-9]{0,3})x([A-Za-z0-9][A-Za-z0-9_-]*)", re.IGNORECASE)
_PARSERS: Mapping[str, Callable[[str], Any]] = {".json": load_json, ".toml": decode_toml}


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a job file. Most are also options of `sgpu run`, which override them.

    Args:
        notebook: The notebook or script; relative to the file's folder.
        hardware_accelerator: Number and type, such as `GPU_8xH100`, instead of `gpus` and `type`.
        gpus: Number of ranks.
        type: Device type.
        pool: The pool's name.
        nodes: Number of nodes.
        placement: `pack`, `strict_pack` or `spread`.
        min_memory: Least memory of each device: `40GB`, or bytes.
        parameters: Names and values for the notebook.
        environment: The ranks' packages, as in `--env-version`; a file is relative to the job file's folder.
        env_version: Another name of `environment`.
        env: Environment variables of the notebook and its ranks.
        timeout: Longest time for the whole notebook: `90s`, `2h`; a number is in seconds.
        timeout_s: The same in seconds.
        retries: How often to run the notebook again after a failure of the pool, a node or the environment.
        max_cost: Cost limit of each run or session.
        output: Path of the executed copy; relative to the file's folder.
        upload: Folders and files for the ranks; relative to the file's folder.
        kernel: The Jupyter kernel's name.
        cells: `auto`, `ranks` or `here`: where plain cells run.
    """

    notebook: str = ""
    hardware_accelerator: str = ""
    gpus: int | None = None
    type: str | None = None
    pool: str = ""
    nodes: int | None = None
    placement: str = ""
    min_memory: str | int = ""
    parameters: dict[str, Any] = {}
    environment: str | int = ""
    env_version: str | int = ""
    env: dict[str, str | int | float | bool] = {}
    timeout: str | float | None = None
    timeout_s: float | None = None
    retries: int = 0
    max_cost: float | None = None
    output: str = ""
    upload: str | list[str] = ""
    kernel: str = ""
    cells: str = ""


def read_job_file(path: Path) -> JobFile:
    """Read and check a job file.

    Raises:
        UsageError: The file can't be read, or has an unknown key or a value of the wrong type.
    """
    found = read_mapping(path)
    known = JobFile.__struct_fields__
    for key in found:
        if key not in known:
            message = f"{path} has the key `{key}`, which job files do not have."
            raise UsageError.of_unknown_name(message, key, known, otherwise=f"The keys are: {', '.join(known)}.")
    try:
        file = convert(found, JobFile)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} can't be used: {str(error).replace('$.', '').replace('$', 'the file')}.") from None
    return _in_one_way(file, path)


def _in_one_way(file: JobFile, path: Path) -> JobFile:
    """Resolve alternative keys, and paths relative to the file's folder."""
    folder, gpus, kind = path.parent, file.gpus, file.type
    if file.hardware_accelerator:
        if gpus is not None or kind is not None:
            raise UsageError(f"{path}: hardware_accelerator sets both number and type: leave gpus and type out.")
        gpus, kind = read_accelerator(file.hardware_accelerator, f"{path}: hardware_accelerator")
    if file.environment != "" and file.env_version != "":
        raise UsageError(f"{path}: environment and env_version are the same: leave one of them out.")
    env_version = str(file.environment or file.env_version)
    if env_version and (folder / env_version).is_file():
        env_version = str((folder / env_version).absolute())
    uploads = (file.upload,) if isinstance(file.upload, str) else file.upload
    return msgspec.structs.replace(
        file,
        gpus=gpus,
        type=kind,
        env_version=env_version,
        # keeps a slash at the end, which marks a folder
        output=os.path.join(folder, os.path.expanduser(file.output)) if file.output else "",
        upload=[str(folder / os.path.expanduser(path)) for path in uploads if path],
    )


def with_line(file: JobFile, line: Mapping[str, Any]) -> JobFile:
    """Return the job file with the options of a command line, given by the file's keys.

    Parameters and variables are merged; other options replace the file's values.
    """
    added = {key: {**getattr(file, key), **line.get(key, {})} for key in ("parameters", "env")}
    timeout_s = None if "timeout" in line else file.timeout_s
    return msgspec.structs.replace(file, **{**line, **added, "timeout_s": timeout_s})


def defaults_of(file: JobFile, where: str) -> JobDefaults:
    """Return the job's defaults for cells.

    Args:
        file: The job file, with the options of the command line.
        where: Beginning of error messages.

    Raises:
        UsageError: A value is invalid.
    """
    for key, count in (("gpus", file.gpus), ("nodes", file.nodes)):
        if count is not None and not 1 <= count <= MOST_RANKS:
            raise UsageError(f"{where}: {key} is {count}; it must be 1 to {MOST_RANKS}.")
    if file.placement and file.placement not in STRATEGIES:
        raise UsageError(f"{where}: placement is {file.placement!r}; it can be {', '.join(STRATEGIES)}.")
    min_memory = str(file.min_memory)
    memory_bytes(f"{where}: min_memory", min_memory)
    check_spread(file.gpus, file.nodes or 0, file.placement)
    # absolute, because the notebook's kernel has another working directory
    uploads = tuple(os.path.abspath(os.path.expanduser(path)) for path in file.upload)
    for path in uploads:
        if not os.path.exists(path):
            raise UsageError(f"{where}: upload: {path} does not exist.")
    return JobDefaults(
        gpus=file.gpus or 0,
        type=device_type(f"{where}: type", file.type or None) or "",
        env_version=str(file.env_version),
        max_cost=cost_limit(f"{where}: max_cost", file.max_cost),
        nodes=file.nodes or 0,
        placement=file.placement,
        min_memory=min_memory,
        upload=uploads,
    )


def job_timeout_s(file: JobFile, where: str) -> float | None:
    """Return the time limit of the whole notebook in seconds, None for no limit; arguments as in `defaults_of`.

    Raises:
        UsageError: The limit is not above 0, or is given twice.
    """
    if file.timeout is not None and file.timeout_s is not None:
        raise UsageError(f"{where}: timeout and timeout_s are the same: leave one of them out.")
    given = file.timeout_s if file.timeout is None else file.timeout
    if given is None:
        return None
    seconds = duration_s(f"{where}: timeout", given)
    if seconds <= 0:
        raise UsageError(f"{where}: a timeout of {given} leaves no time to run.")
    return seconds


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a mapping from a file: `.json`, `.toml`, else YAML.

    Raises:
        UsageError: The file can't be read, or is not a mapping.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= _MOST_BYTES else b""
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from None
    if size > _MOST_BYTES:
        raise UsageError(f"{path} has {size:,} bytes, which is too large for a file of names and values.")
    try:
        found: object = _PARSERS.get(path.suffix.lower(), read_yaml)(data.decode())
    except ValueError as error:
        raise UsageError(f"{path} can't be read: {' '.join(str(error).split())}.") from None
    if found is None:
        return {}
    try:
        return convert(found, dict[str, Any])
    except msgspec.DecodeError:
        raise UsageError(f"{path} is not a mapping of names to values at its top level.") from None


def read_yaml(text: str) -> Any:
    """Parse YAML with PyYAML's safe loader.

    Raises:
        UsageError: PyYAML is not installed.
        ValueError: The text is not valid YAML.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise UsageError(f"PyYAML is not installed, so YAML can't be read. {EXTRA}") from None
    with border():
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None


def read_accelerator(name: str, where: str) -> tuple[int, str]:
    """Parse the name of an accelerator, such as `GPU_8xH100`.

    Args:
        name: The name.
        where: Beginning of error messages.

    Returns:
        The number of devices and their canonical type.

    Raises:
        UsageError: It is not the name of an accelerator.
    """
    found = _ACCELERATOR.fullmatch(name.strip())
    if found is None or int(found[1]) > MOST_RANKS:
        raise UsageError(
            f"{where}: {name!r} is not an accelerator; write the number and the type, as in GPU_1xA10 or GPU_8xH100."
        )
    try:
        return int(found[1]), canonical_type(found[2])
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
