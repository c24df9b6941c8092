"""Failures are kept and shown in many places: secrets of the run's environment are blanked in them first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.packages.secrets import Blanker, find_secrets
from sgpu_magic.wire.records import Failure


def without_secrets(
    failure: Failure, frames: Sequence[bytes], environ: Mapping[str, str]
) -> tuple[Failure, Sequence[bytes]]:
    """Return a rank's failure and its raw frames as they may be kept.

    A pickled exception that holds a secret is left out: the notebook then raises one that tells its type, its message
    and its traceback.

    Args:
        failure: As the rank told it.
        frames: The pickled exception, if any.
        environ: The ranks' variables.
    """
    blanker = Blanker(environ[name] for name in find_secrets(environ))
    exception = failure.exception
    if any(blanker.is_in(frame) for frame in frames):
        exception, frames = None, ()
    type_name = blanker.clear(failure.type_name)
    if type_name != failure.type_name:
        # the class goes along with its name
        exception, frames = None, ()
    cleared = msgspec.structs.replace(
        failure,
        type_name=type_name,
        message=blanker.clear(failure.message),
        traceback_text=blanker.clear(failure.traceback_text),
        traceback_ansi=blanker.clear(failure.traceback_ansi),
        exception=exception,
    )
    return (failure if cleared == failure else cleared), frames
