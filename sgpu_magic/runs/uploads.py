"""`--upload`: folders and files of this machine that go along with a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.errors import UsageError
from sgpu_magic.runs import job_defaults
from sgpu_magic.wire.states import RunKind
from sgpu_magic.wire.uploads import Upload

if TYPE_CHECKING:
    from sgpu_magic.runs.submission import Submission

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
    cwd = Path(submission.stand.cwd) if submission.stand is not None else Path(_directory())
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


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep
