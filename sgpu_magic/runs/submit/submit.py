"""What is submitted, and the handing over, with the folders and files of `--upload`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Run
from sgpu_magic.client.submitter import Attachments, Stand
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.runs import git_state, job_defaults, packages
from sgpu_magic.runs.package_options import Wishes
from sgpu_magic.runs.submit import mlflow_target, remote_inputs
from sgpu_magic.runs.submit.remote_inputs import working_directory
from sgpu_magic.wire.attachments import Upload
from sgpu_magic.wire.client import Describe, TrackRun
from sgpu_magic.wire.codec import printable
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.run import Interpreter, RunSpec
from sgpu_magic.wire.states import RunKind


@dataclass(frozen=True, slots=True)
class Submission:
    """A run ready to be submitted.

    Args:
        spec: All of it that may be written down.
        packed: What is shipped.
        key: The run's HMAC key.
        environ: The ranks' environment.
        wishes: About packages and tracking.
        given: Names of the variables that the user set for this run or session (`--env`): they travel anywhere.
        interpreter: The ranks' Python; None is this process's.
        stand: Where the ranks stand; None is where this process does.
        pool: The name of the pool that it goes to.
    """

    spec: RunSpec
    packed: Packed
    key: bytes
    environ: dict[str, str]
    wishes: Wishes = field(default_factory=Wishes)
    given: frozenset[str] = frozenset()
    interpreter: Interpreter | None = None
    stand: Stand | None = None
    pool: str = "local"


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
        luggage = remote_inputs.pack_up(pool, settings, submission)
        spec, tracking = mlflow_target.place_of(settings, job_defaults.limited(printable(luggage.spec)), submission)
        along = Attachments(
            luggage.environment,
            luggage.code,
            tracking,
            submission.interpreter,
            submission.stand,
            luggage.elsewhere,
            luggage.cell,
            uploads_of(submission),
        )
        run = pool.submit(spec, submission.packed, submission.key, luggage.environ, along)
    except KeyboardInterrupt:
        raise RunCancelled("interrupted before the pool had taken the run; nothing was started.") from None
    packages.of(pool).taken(spec.environment, luggage.environment)
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
    git_state.states.tell(directory, lambda tags: pool.tell(Describe(run_id=run.run_id, tags=tags)))


def let_go(pool: Pool, run: Run) -> None:
    """The run is over for this process: its memory may be used for the next one, and nobody follows it any more.

    The ranks of a session keep what was shipped to them mapped, so that memory is never written again.
    """
    if run.spec.in_session:
        pool.run_left(run.run_id)
    else:
        pool.run_over(run.run_id)
    run.close()


if TYPE_CHECKING:
    pass

_MOVE_NAMES = (RunKind.PUSH, RunKind.PULL)


def uploads_of(submission: Submission) -> tuple[Upload, ...]:
    """Return what goes along with a run: what it asks for, else what `sgpu run` gives.

    Raises:
        UsageError: One is not there.
    """
    spec, wished = submission.spec, submission.wishes.uploads
    if spec.kind in _MOVE_NAMES:
        return ()
    if not wished and not spec.session:
        wished = job_defaults.of_process().upload
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
