"""The records of a run's page, as JSON: its code, options, phases, environment and files.

Their TypeScript twins are generated: `labextension/src/run_page/records.ts`.
"""

from __future__ import annotations

from sgpu_magic.views.live.schema import Message


class CodePart(Message, frozen=True):
    """A piece of source code that the run's ranks had.

    Args:
        title: Where it was written: `cell 3`, a file's name.
        text: The code, without secrets.
    """

    title: str
    text: str


class NamedText(Message, frozen=True):
    """A name and its value: an option, a parameter, the last value of a logged metric."""

    name: str
    value: str


class PagePhase(Message, frozen=True):
    """One phase of the run.

    Args:
        name: `queued`, `preparing`, `starting`, `running`, `finishing` or `cancelling`.
        seconds: How long the run was in it.
        current: The run is in it.
    """

    name: str
    seconds: float
    current: bool


class ShippedName(Message, frozen=True):
    """A name that was sent to the ranks.

    Args:
        size: Its size in bytes; None if unknown, and for an object that was sent under another name.
    """

    name: str
    size: int | None


class PageChange(Message, frozen=True):
    """A difference between the environments of two runs; "" for what one of them does not have."""

    name: str
    before: str
    after: str


class EnvironmentChanges(Message, frozen=True):
    """What differs from the environment of the previous run of the same notebook.

    Args:
        run: The short id of that run.
        changes: The differences.
    """

    run: str
    changes: tuple[PageChange, ...]


class PageMlflow(Message, frozen=True):
    """The run's MLflow run.

    Args:
        run_id: Its id in MLflow; "" until it exists.
        experiment: The name of its experiment, "" if unknown.
        url: Its page on a tracking server; "" without a server.
        command: The command line that shows a store of files; "" for other stores.
        install: The command line that installs MLflow's pages; "" where they are installed, or the store is elsewhere.
        can_start: The Jupyter server can start `mlflow ui`.
        pool: The pool on whose machine the store is; "" for this machine.
    """

    run_id: str
    experiment: str
    url: str
    command: str
    install: str
    can_start: bool
    pool: str


class MlflowAddress(Message, frozen=True):
    """Where `mlflow ui` listens on the Jupyter server's machine.

    Args:
        url: The page of the run's MLflow run; "" while the command starts.
        port: Its port on the loopback interface.
        host: The machine's host name.
    """

    url: str
    port: int
    host: str


class RunPage(Message, frozen=True):
    """What a run's page shows beside its live view.

    Args:
        run_id: The run.
        name: Its name.
        kind: The value of its `RunKind`.
        state: The value of its `RunState`.
        magic_line: The magic's line of a cell, without values of `--env`; "" without one.
        code: The cell's code below that line, or the sources of a called function; then the code of other cells whose
            functions were sent.
        options: Options that differ from their defaults.
        parameters: Scalar variables or arguments.
        metrics: The last value of each metric that its code has logged.
        devices: The devices, the pool and the session, as in the live view's header.
        submitted_at: Seconds since the epoch.
        started_at: When its ranks had started, in seconds since the epoch; None before.
        phases: Its phases so far, in order.
        shipped: Names that were sent with it.
        shipped_bytes: Their total size.
        cost: `$0.60 for 0.24 GPU h`; "" without a price.
        mlflow: Its MLflow run; None if it is not tracked.
        environment: The environment's differences; None if there is no previous run, or its records are not on this
            machine.
    """

    run_id: str
    name: str
    kind: str
    state: str
    magic_line: str
    code: tuple[CodePart, ...]
    options: tuple[NamedText, ...]
    parameters: tuple[NamedText, ...]
    metrics: tuple[NamedText, ...]
    devices: tuple[str, ...]
    submitted_at: float
    started_at: float | None
    phases: tuple[PagePhase, ...]
    shipped: tuple[ShippedName, ...]
    shipped_bytes: int
    cost: str
    mlflow: PageMlflow | None
    environment: EnvironmentChanges | None


class PageFile(Message, frozen=True):
    """One file that the run's ranks have written.

    Args:
        name: Its path below the run's directory, with `/` as separator.
        size: Size in bytes.
        changed_at: When it was last written, seconds since the epoch.
    """

    name: str
    size: int
    changed_at: float


class PageFiles(Message, frozen=True):
    """The files of a run: those in its work and checkpoint folders.

    Args:
        files: The files, by name.
        more: There are further files.
        cwd: The ranks' working directory if it is one of the user's own folders on this machine; "" if it is in the
            list, or unknown.
    """

    files: tuple[PageFile, ...]
    more: bool
    cwd: str
