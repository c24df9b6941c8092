"""Failures are kept and shown in many places: secrets of the run's environment are blanked in them first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.environment.secrets import Blanker, find_secrets
from sgpu_magic.protocol.records import Failure


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
    message = blanker.clear(failure.message)
    text, ansi = blanker.clear(failure.traceback_text), blanker.clear(failure.traceback_ansi)
    if (message, text, ansi, exception) == (
        failure.message,
        failure.traceback_text,
        failure.traceback_ansi,
        failure.exception,
    ):
        return failure, frames
    cleared = msgspec.structs.replace(
        failure, message=message, traceback_text=text, traceback_ansi=ansi, exception=exception
    )
    return cleared, frames
