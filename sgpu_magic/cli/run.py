"""`sgpu run`: a notebook, script or job file, to its end."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from sgpu_magic.cli import jobs
from sgpu_magic.cli.headless import formats
from sgpu_magic.cli.headless.executed_copy import copy_of
from sgpu_magic.cli.headless.job import Job, job_from
from sgpu_magic.cli.headless.outcome import ExitCode
from sgpu_magic.cli.headless.parameters import read_pair, typed
from sgpu_magic.cli.parser import script_arguments
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.job_form import EXTRA, JobFile, read_mapping, read_yaml
from sgpu_magic.options.values import key_values
from sgpu_magic.views.units import format_seconds
from sgpu_magic.wire.ids import new_id, short

_NEEDS = ("nbclient", "nbformat")
# what is full or broken now may need a while: 3 s, 6 s, 12 s ...
_RETRY_AFTER_S = 3.0
_RETRY_AFTER_MOST_S = 300.0


def run(settings: Settings, values: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Execute what the command names and return its exit code.

    Args:
        settings: Where jobs lie.
        values: The command's options, from `parser`; `words` is the command line behind `sgpu`.
        out: Takes what cells print, with `--verbose`, and the executed copy's path.
        err: Takes a line per cell and what went wrong.

    Raises:
        UsageError: Something can't be meant, or an extra is missing.
    """
    job = job_from(values.target, options_from(values), script_arguments(values.words))
    _check_extra()
    _check_kernel(job)
    continued = bool(values.job_id)
    record = jobs.JobRecord(
        job_id=values.job_id or new_id(),
        source=str(job.source),
        copy=values.copy or ("" if continued else str(copy_of(job) or "")),
        started_at=time.time(),
        detached=continued,
    )
    if values.detach and not continued:
        return _detach(settings, record, values.words, out)
    jobs.prune(settings)
    record = jobs.begun(record)
    jobs.write(settings, record)
    code = ExitCode.FAILED
    try:
        code, record = _attempts(settings, job, record, out if values.verbose or job.is_script else None, err)
    finally:
        jobs.write(settings, jobs.ended(record, code))
    if record.copy:
        # a script's standard output is its own
        print(record.copy, file=err if job.is_script else out)
    return code


def options_from(values: argparse.Namespace) -> dict[str, Any]:
    """Return what the command's line says, by a job file's keys.

    Raises:
        UsageError: A value means nothing.
    """
    parameters: dict[str, object] = {}
    for path in values.parameters_file:
        parameters |= read_mapping(Path(path))
    for text in values.parameters_yaml:
        parameters |= _yaml_mapping(text)
    for text in values.parameter:
        name, value = read_pair("-p", text)
        parameters[name] = typed(value)
    for text in values.raw_parameter:
        name, value = read_pair("-r", text)
        parameters[name] = value
    given = {key: value for key, value in vars(values).items() if key in JobFile.__struct_fields__}
    said = {key: value for key, value in given.items() if value not in (None, "", [])}
    return said | {"parameters": parameters, "env": key_values(values.env)}


def _yaml_mapping(text: str) -> dict[str, object]:
    try:
        found: Any = read_yaml(text)
    except ValueError as error:
        raise UsageError(f"-y {text!r} can't be read: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"-y {text!r} has no names and values: write -y '{{lr: 0.1, layers: [64, 32]}}'.")
    return {str(key): value for key, value in found.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _check_extra() -> None:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} are not installed, so no notebook can be executed. {EXTRA}")


def _check_kernel(job: Job) -> None:
    """Raise UsageError when there is no such kernel, before anything is written."""
    name = job.kernel
    if job.is_script and not name:
        return
    name = name or formats.kernel_name(job.source, job.form)
    # it comes with nbclient
    specs: Any = importlib.import_module("jupyter_client.kernelspec")
    manager = specs.KernelSpecManager()
    try:
        language = manager.get_kernel_spec(name or "python3").language
    except specs.NoSuchKernel:
        listed = ", ".join(sorted(manager.find_kernel_specs()))
        raise UsageError(
            f"there is no kernel {name!r} on this machine. There are: {listed}. Choose one with --kernel NAME."
        ) from None
    if language.lower() != "python":
        raise UsageError(
            f"the kernel {name!r} speaks {language}, and cells for a pool are Python. Choose another with --kernel."
        )


def _attempts(
    settings: Settings, job: Job, record: jobs.JobRecord, out: TextIO | None, err: TextIO
) -> tuple[ExitCode, jobs.JobRecord]:
    """Execute the job, again after failures of the pool as often as it says."""
    # nbclient takes half a second, and a mistake in the command is told before
    from sgpu_magic.cli.headless.execution import NotebookRun

    def told(done: int, cells: int) -> None:
        nonlocal record
        record = msgspec.structs.replace(record, done=done, cells=cells)
        jobs.write(settings, record)

    left, pause_s = job.retries, _RETRY_AFTER_S
    while True:
        began = time.monotonic()
        code = NotebookRun(job, Path(record.copy) if record.copy else None, out, err, told).run()
        took = format_seconds(time.monotonic() - began)
        ran = "it succeeded" if job.is_script else "every cell ran"
        how = ran if code is ExitCode.OK else f"ended with code {int(code)}"
        print(f"{job.source.name}: {how} in {took}", file=err, flush=True)
        if code is not ExitCode.POOL or left == 0:
            return code, record
        left -= 1
        again = f"{job.source.name}: it is run again in {format_seconds(pause_s)} ({left} more after that)"
        print(again, file=err, flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _RETRY_AFTER_MOST_S)


def _detach(settings: Settings, record: jobs.JobRecord, words: Sequence[str], out: TextIO) -> int:
    own = list(words)
    at = own.index("--") if "--" in own else len(own)
    rest = [word for word in own[:at] if word != "--detach"]
    started = jobs.start_detached(
        settings, record, [*rest, "--job-id", record.job_id, "--copy", record.copy, *own[at:]]
    )
    shown = short(started.job_id)
    copy = f"executed copy: {started.copy}\n" if started.copy else ""
    print(
        f"job {shown} goes on without this terminal: process {started.pid}\n"
        f"{copy}log: {jobs.folder_of(settings, record.job_id) / jobs.LOG}\n"
        f"`sgpu jobs` lists it, `sgpu jobs log {shown}` shows what it said, `sgpu jobs stop {shown}` ends it.",
        file=out,
    )
    return ExitCode.OK
