"""What is submitted, and the handing over."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sgpu_magic.client.attachments import Attachments, Stand
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Run
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.runs import git_state, job_defaults, packages, tracked, travel
from sgpu_magic.runs.uploads import uploads_of
from sgpu_magic.wire.codec import printable
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.messages import Describe, TrackRun
from sgpu_magic.wire.records import Interpreter, RunSpec


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for about packages, tracking and what goes along.

    Args:
        env_version: `--env-version`: a base environment's, a saved one's or a file's name; `none` is the notebook's own
            packages; "" is the default, the same as `none`.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.
        track: False is `--no-track`; None is what the settings say.
        uploads: `--upload`: folders and files that go along.
    """

    env_version: str = ""
    torch_mine: bool = False
    allow_build: bool = False
    track: bool | None = None
    uploads: tuple[str, ...] = ()


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
    wishes: Wishes = Wishes()
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
        luggage = travel.pack_up(pool, settings, submission)
        spec, tracking = tracked.place_of(settings, job_defaults.limited(printable(luggage.spec)), submission)
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
