"""`sgpu run` executes a notebook, script or job file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast

import msgspec

from sgpu_magic.cli import jobs
from sgpu_magic.cli.headless import formats
from sgpu_magic.cli.headless.cell_end import ExitCode
from sgpu_magic.cli.headless.job import HeadlessJob, job_from, read_pair, typed
from sgpu_magic.cli.headless.outcome import copy_of
from sgpu_magic.cli.main import CommandParser, positive, script_arguments
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.formatting import format_seconds
from sgpu_magic.options.argparse_form import add_option
from sgpu_magic.options.job_form import EXTRA, JobFile, read_mapping, read_yaml
from sgpu_magic.options.values import STRATEGIES, key_values
from sgpu_magic.wire.base import new_id, short

_NEEDS = ("nbclient", "nbformat")
# back-off between retries: 3 s, 6 s, 12 s ...
_RETRY_AFTER_S = 3.0
_RETRY_AFTER_MOST_S = 300.0
_RUN_ABOUT = """Execute a notebook to its end and keep the executed copy.

TARGET is a notebook, a script (.py), or a job file (.yaml, .json, .toml) that names one. A notebook is an .ipynb file,
or a .py file in Databricks' source form or with percent cells (# %%); with jupytext any text form of its (.md, .Rmd).

what runs where:
  The notebook's kernel runs on this machine. Its %%distributed cells, sessions and @distributed functions run on
  the pool; options that they do not give are taken from --pool, --gpus, --type and so on.
  A notebook without any of these, run with --gpus or --type, runs on the pool as a whole: a session of that many
  ranks is connected, and every cell runs on all of them (as after %sgpu_auto on). --cells ranks or here says it
  explicitly. A script runs on all ranks; words after -- are its arguments (a .py file with percent cells that
  is given arguments runs as a script). A script with @distributed functions runs once, and its functions on the ranks.
  A script's output goes to standard output as it comes; it leaves an executed copy only with --output.
"""
_CODES = """exit codes:
  0    every cell ran, or the notebook ended itself with dbutils.notebook.exit
  1    a cell failed: the notebook's own error, or its kernel died
  2    the command, the job file or an option in a cell is invalid
  3    the pool, a node, the room on it or its environment failed: worth a retry
  124  the time limit (--timeout, or a run's own) was exceeded
  130  interrupted;  143  terminated: the notebook's runs were ended first
"""


def run(settings: Settings, values: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Execute the target of the command and return its exit code.

    Args:
        settings: Gives the jobs' directory.
        values: The parsed options; `words` are the arguments of `sgpu`.
        out: Stream for the path of the executed copy, a script's output, and with `--verbose` the cells' output.
        err: Stream for a line per cell, and for errors.

    Raises:
        UsageError: An option is not valid, or an extra is not installed.
    """
    # hide this package: nbformat imports jsonschema, which would take a second to build an IRI parser with it
    sys.modules.setdefault("rfc3987_syntax", cast("ModuleType", None))
    job = job_from(values.target, options_from(values), script_arguments(values.words), as_script=values.as_script)
    if values.as_script:
        job = msgspec.structs.replace(job, cells="ranks", module=values.module, restarts=values.restarts)
    if missing := [name for name in _NEEDS if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{' and '.join(missing)} {verb} not installed, so no notebook can be executed. {EXTRA}")
    if not job.is_script or job.file.kernel:
        formats.check_kernel(job.file.kernel or formats.kernel_name(job.source, job.form))
    continued = bool(values.job_id)
    job_id, source = values.job_id or new_id(), str(job.source)
    copy = values.copy or ("" if continued else str(copy_of(job) or ""))
    record = jobs.JobRecord(job_id=job_id, source=source, copy=copy, started_at=time.time(), detached=continued)
    if values.detach and not continued:
        return _detach(settings, record, values.words, out)
    jobs.prune(settings)
    record = jobs.with_this_process(record)
    jobs.write(settings, record)
    code = ExitCode.FAILED
    try:
        code, record = _attempts(settings, job, record, out if values.verbose or job.is_script else None, err)
    finally:
        jobs.write(settings, msgspec.structs.replace(record, ended_at=time.time(), code=code))
    if record.copy:
        # standard output belongs to the script
        print(record.copy, file=err if job.is_script else out)
    return code


def options_from(values: argparse.Namespace) -> dict[str, Any]:
    """Return the options on the command line, by the keys of a job file.

    Raises:
        UsageError: A value is not valid.
    """
    parameters: dict[str, object] = {}
    for path in values.parameters_file:
        parameters |= read_mapping(Path(path))
    for text in values.parameters_yaml:
        parameters |= _yaml_mapping(text)
    parameters |= {name: typed(value) for name, value in (read_pair("-p", text) for text in values.parameter)}
    parameters |= dict(read_pair("-r", text) for text in values.raw_parameter)
    keys = JobFile.__struct_fields__
    given = {key: value for key, value in vars(values).items() if key in keys and value not in (None, "", [])}
    return given | {"parameters": parameters, "env": key_values(values.env)}


def _yaml_mapping(text: str) -> dict[str, object]:
    try:
        found: Any = read_yaml(text)
    except ValueError as error:
        raise UsageError(f"-y {text!r} can't be read: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"-y {text!r} is not a mapping: write -y '{{lr: 0.1, layers: [64, 32]}}'.")
    return {str(key): value for key, value in found.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _attempts(
    settings: Settings, job: HeadlessJob, record: jobs.JobRecord, out: TextIO | None, err: TextIO
) -> tuple[ExitCode, jobs.JobRecord]:
    """Execute the job, and retry it after failures of the pool."""
    # nbclient takes half a second to import, so check the command first
    from sgpu_magic.cli.headless.execution import NotebookRun

    def show_progress(done: int, cells: int) -> None:
        nonlocal record
        record = msgspec.structs.replace(record, done=done, cells=cells)
        jobs.write(settings, record)

    def say(text: str) -> None:
        colon = "" if job.is_script else ":"
        print(f"{job.source.name}{colon} {text}", file=err, flush=True)

    left, pause_s = job.file.retries, _RETRY_AFTER_S
    until = math.inf if job.timeout_s is None else time.monotonic() + job.timeout_s
    while True:
        began = time.monotonic()
        notebook_run = NotebookRun(job, Path(record.copy) if record.copy else None, out, err, show_progress)
        code = notebook_run.run(until)
        took = format_seconds(time.monotonic() - began)
        is_whole = not job.is_script and notebook_run.exit_value is None
        ran = "every cell ran" if is_whole else "succeeded"
        say(f"{ran if code is ExitCode.OK else f'ended with code {int(code)}'} in {took}")
        if code is not ExitCode.POOL or left == 0:
            return code, record
        left -= 1
        say(f"retrying in {format_seconds(pause_s)} ({left} more after that)")
        stopped = asyncio.run(_pause(min(pause_s, until - time.monotonic())))
        if stopped is None and time.monotonic() >= until:
            stopped = ExitCode.TIMED_OUT
        if stopped is not None:
            say(f"{'its time limit was exceeded' if stopped is ExitCode.TIMED_OUT else 'stopped'} before the retry")
            return stopped, record
        pause_s = min(2 * pause_s, _RETRY_AFTER_MOST_S)


async def _pause(seconds: float) -> ExitCode | None:
    """Wait. Returns the job's code if a signal ends it meanwhile."""
    stopped = asyncio.Queue[ExitCode]()
    for number, code in ((signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)):
        asyncio.get_running_loop().add_signal_handler(number, stopped.put_nowait, code)
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(stopped.get(), seconds)
    return None


def _detach(settings: Settings, record: jobs.JobRecord, words: Sequence[str], out: TextIO) -> int:
    at = words.index("--") if "--" in words else len(words)
    rest = [word for word in words[:at] if word != "--detach"]
    own = ["--job-id", record.job_id, "--copy", record.copy]
    started = jobs.start_detached(settings, record, [*rest, *own, *words[at:]])
    job = short(started.job_id)
    copy = f"executed copy: {started.copy}\n" if started.copy else ""
    print(
        f"job {job} continues without this terminal: process {started.pid}\n"
        f"{copy}log: {jobs.folder_of(settings, record.job_id) / jobs.LOG}\n"
        f"`sgpu jobs` lists it, `sgpu jobs log {job}` shows its output, `sgpu jobs stop {job}` ends it.",
        file=out,
    )
    return ExitCode.OK


def _options(parser: CommandParser) -> None:
    parser.description, parser.epilog = _RUN_ABOUT, _CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("target", metavar="TARGET", help="notebook, script or job file")
    add_option(parser, "pool", metavar=None, help="pool to run on (default: the setting pool)")
    add_option(parser, "gpus", type=positive, help="number of ranks, one per GPU")
    add_option(parser, "type", help="GPU type: a10, h100, ..., cpu or any")
    add_option(parser, "nodes", type=positive, help="number of nodes to spread the ranks evenly over")
    add_option(parser, "placement", metavar=None, choices=STRATEGIES)
    add_option(parser, "min-memory", help="memory that each GPU must have")
    add_option(parser, "env-version", metavar="4|ai-4|FILE|NAME", help="packages of the ranks")
    add_option(parser, "max-cost", help="stop each run before it costs more than this")
    add("-p", "--parameters", dest="parameter", action="append", default=[], metavar="NAME=VALUE",
        help="parameter: a number, True, False, None, or else text; also -p NAME VALUE")  # fmt: skip
    add("-r", "--raw", dest="raw_parameter", action="append", default=[], metavar="NAME=VALUE",
        help="parameter that is always text")  # fmt: skip
    add("-y", dest="parameters_yaml", action="append", default=[], metavar="YAML",
        help="parameters as a YAML or JSON string")  # fmt: skip
    add("-f", "--parameters-file", action="append", default=[], metavar="FILE",
        help="file with parameters in YAML, JSON or TOML")  # fmt: skip
    add_option(parser, "env", help="environment variable of the notebook and its ranks")
    add_option(parser, "upload", help="file or folder to copy to the ranks")
    add("-o", "--output", default="", metavar="COPY",
        help="executed copy, or FOLDER/ for it (default: NAME.DATE-TIME.ipynb beside the notebook, none for "
        "scripts)")  # fmt: skip
    add_option(parser, "timeout", help="time limit for the whole execution (default: none)")
    add_option(parser, "retries", type=int, help="run it again after exit code 3, up to N times (default: 0)")
    add("--kernel", default="", metavar="NAME", help="Jupyter kernel (default: the notebook's)")
    add("--cells", default="", choices=("auto", "ranks", "here"), help="where plain cells run (default: auto)")
    add("-v", "--verbose", action="store_true", help="also print the output of a notebook's cells")
    add_option(parser, "detach", help="return at once; the job continues without this terminal")
    add("--job-id", default="", help=argparse.SUPPRESS)
    add("--copy", default="", help=argparse.SUPPRESS)
    # passed by `sgpu torchrun`
    add("--as-script", action="store_true", help=argparse.SUPPRESS)
    add("--module", default="", help=argparse.SUPPRESS)
    add("--restarts", type=int, default=0, help=argparse.SUPPRESS)
    parser.does(lambda options: run(load_settings(), options, sys.stdout, sys.stderr))


COMMANDS = {"run": _options}
