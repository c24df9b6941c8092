"""What goes to the pool with a run beside its payload."""

from __future__ import annotations

from dataclasses import dataclass

from sgpu_magic.wire.environment import CodeBundle, Environment
from sgpu_magic.wire.records import CellSource, Interpreter
from sgpu_magic.wire.tracking import Tracking
from sgpu_magic.wire.uploads import Upload


@dataclass(frozen=True, slots=True)
class Stand:
    """Where ranks stand that are not to stand where this process does: working directory and `sys.path`."""

    cwd: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Along:
    """Packages, code, uploads and the place in MLflow, as `wire.messages.Submit` has them.

    Args:
        interpreter: The ranks' Python; None is this process's.
        stand: Where they stand; None is where this process does.
        elsewhere: The pool's nodes do not see this machine's files.
        cell: As `RankContext.cell`.
        uploads: Folders and files of this machine.
    """

    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    interpreter: Interpreter | None = None
    stand: Stand | None = None
    elsewhere: bool = False
    cell: CellSource | None = None
    uploads: tuple[Upload, ...] = ()
