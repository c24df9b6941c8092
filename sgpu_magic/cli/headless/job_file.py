"""Job files: `job.yaml`, `job.json` and `job.toml` of one shape, and Databricks' names of what a job runs on."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.devices import canonical_type

EXTRA = "Install what it needs: `pip install 'sgpu-magic[run]'`."
_MOST_BYTES = 1_000_000
_ACCELERATOR = re.compile(r"GPU_([1-9][0-9]{0,3})x([A-Za-z0-9][A-Za-z0-9_-]*)", re.IGNORECASE)
_MOST_ACCELERATORS = 4096


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """A job file's keys; each is also an option of `sgpu run`, which wins.

    Args:
        notebook: The notebook or script; relative to the file's folder.
        hardware_accelerator: `GPU_8xH100`; in place of `gpus` and `type`.
        gpus: Number of ranks.
        type: Device type.
        pool: The pool's name.
        nodes: Number of nodes.
        placement: `pack`, `strict_pack` or `spread`.
        min_memory: Least memory of each device: `40GB`, or bytes.
        parameters: Names and values for the notebook.
        environment: The ranks' packages, as in `--env-version`; a file is relative to the job file's folder.
        env_version: The same.
        env: Variables of the notebook and its ranks.
        timeout: Longest time for the whole notebook: `90s`, `2h`; a number is seconds.
        timeout_s: The same in seconds.
        retries: How often it is run again after a failure of pool, nodes or environment.
        max_cost: The most that each run or session of it may cost.
        output: The executed copy; relative to the file's folder.
        upload: Folders and files that the ranks find; relative to the file's folder.
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
        UsageError: It can't be read, has a key that means nothing, or a value of the wrong kind.
    """
    values = read_mapping(path)
    known = JobFile.__struct_fields__
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"is {near[0]!r} meant?" if near else f"there are: {', '.join(known)}."
            raise UsageError(f"{path} has the key {key!r}, which means nothing in a job file; {meant}")
    try:
        return msgspec.convert(values, JobFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} can't be used: {str(error).replace('$.', '').replace('$', 'the file')}.") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a file of names and values: YAML, JSON or TOML by its suffix.

    Raises:
        UsageError: It can't be read, or is something else.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= _MOST_BYTES else b""
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from None
    if size > _MOST_BYTES:
        raise UsageError(f"{path} has {size:,} bytes: that is no file of names and values.")
    try:
        found: object = _decoded(path, data.decode())
    except ValueError as error:
        raise UsageError(f"{path} can't be read: {' '.join(str(error).split())}.") from None
    if found is None:
        return {}
    try:
        return msgspec.convert(found, dict[str, Any])
    except msgspec.ValidationError:
        raise UsageError(f"{path} has no names and values at its top level.") from None


def read_yaml(text: str) -> Any:
    """Read YAML; safe: plain values only.

    Raises:
        UsageError: PyYAML is not installed.
        ValueError: It is no YAML.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise UsageError(f"PyYAML is not installed, so no YAML can be read. {EXTRA}") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def read_accelerator(name: str, where: str) -> tuple[int, str]:
    """Read `GPU_8xH100`.

    Args:
        name: The text.
        where: What it was given for, for the refusal.

    Returns:
        How many of which type, canonical.

    Raises:
        UsageError: It is none of these names.
    """
    found = _ACCELERATOR.fullmatch(name.strip())
    if found is None or int(found[1]) > _MOST_ACCELERATORS:
        raise UsageError(
            f"{where}: {name!r} is no accelerator; write how many of which type, as in GPU_1xA10 or GPU_8xH100."
        )
    try:
        return int(found[1]), canonical_type(found[2])
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _decoded(path: Path, text: str) -> Any:
    match path.suffix.lower():
        case ".json":
            return json.loads(text)
        case ".toml":
            return tomllib.loads(text)
        case _:
            return read_yaml(text)
