"""A run is handed over to its pool, with the folders and files of `--upload`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Run
from sgpu_magic.client.submitter import Stand
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.options import defaults
from sgpu_magic.runs import packages
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.runs.submit import mlflow_target, remote_inputs
from sgpu_magic.runs.submit.spec import Submission
from sgpu_magic.wire.attachments import Upload
from sgpu_magic.wire.client import Describe, TrackRun
from sgpu_magic.wire.codec import printable
from sgpu_magic.wire.ids import short


def submit(pool: Pool, submission: Submission) -> Run:
    """Hand a run over to its pool, with the packages, code and variables that it needs there.

    Raises:
        UsageError: This process belongs to a rank of a run.
        RunCancelled: Interrupted before the pool had taken it.
        SgpuError: As `Pool.submit`.
    """
    if parent := os.environ.get("SGPU_RUN_ID", ""):
        # each rank would submit one, and all would wait for devices that the run itself holds
        raise UsageError(
            f"rank {os.environ.get('RANK', '0')} of run {short(parent)} asks for run {submission.spec.name}, and a run "
            "can't start another: it could wait for devices that it holds itself. Submit it from the notebook or from "
            "a program that runs once (`sgpu run` does that with a script that has @distributed functions); on a rank "
            "call the function itself, without `.distributed`."
        )
    try:
        settings = pool.settings
        spec, environ, along = remote_inputs.inputs_of(pool, settings, submission)
        spec, tracking = mlflow_target.place_of(settings, defaults.limited(printable(spec)), submission)
        along = replace(along, tracking=tracking, uploads=uploads_of(submission))
        run = pool.submit(spec, submission.packed, submission.key, environ, along)
    except KeyboardInterrupt:
        raise RunCancelled("interrupted before the pool had taken the run; nothing was started.") from None
    packages.of(pool).taken(spec.environment, along.environment)
    if tracking is not None:
        run.ask_tracked = lambda: pool.tell(TrackRun(run_id=run.run_id, tracking=tracking))
        _describe(pool, run, submission.stand)
    return run


def _describe(pool: Pool, run: Run, stand: Stand | None) -> None:
    """Have the state of the git repository told to the pool, once it is found."""
    try:
        directory = stand.cwd if stand is not None else os.getcwd()
    except OSError:
        return
    mlflow_target.states.tell(directory, lambda tags: pool.tell(Describe(run_id=run.run_id, tags=tags)))


def let_go(pool: Pool, run: Run) -> None:
    """The run is over for this process: its memory may be used for the next one, and nobody follows it any more.

    The ranks of a session keep what was shipped to them mapped, so that memory is never written again.
    """
    if run.spec.in_session:
        pool.run_left(run.run_id)
    else:
        pool.run_over(run.run_id)
    run.close()


def uploads_of(submission: Submission) -> tuple[Upload, ...]:
    """Return what goes along with a run: what it asks for, else what `sgpu run` gives.

    Raises:
        UsageError: One is not there.
    """
    spec, wished = submission.spec, submission.wishes.uploads
    if spec.kind in mlflow_target.MOVE_NAMES:
        return ()
    if not wished and not spec.session:
        wished = defaults.of_process().upload
    cwd = Path(submission.stand.cwd) if submission.stand is not None else Path(working_directory())
    return tuple(_upload(text, cwd) for text in dict.fromkeys(wished))


def _upload(text: str, cwd: Path) -> Upload:
    path = os.path.normpath(cwd / os.path.expanduser(text))
    if not text.strip() or not os.path.exists(path):
        raise UsageError(f"--upload {text!r}: there is no such folder or file. Paths are those of {cwd}.")
    below = os.path.relpath(path, cwd)
    if below.split(os.sep, 1)[0] in (os.curdir, os.pardir):
        # the working directory itself, or outside of it
        below = ""
    return Upload(name=os.path.normpath(os.path.expanduser(text)), path=path, below=below)
