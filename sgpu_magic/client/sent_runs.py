"""Which runs this machine has given to the pools of others: who has lost sight of one finds its pool by that."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.kept_folders import keep_newest
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.wire.ids import is_valid_id
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunState

SENT = "sent"
"""The folder in the state directory: a file for each run, `sent/<run>.msgpack`."""

_ENDING = ".msgpack"
_MOST = 500


class SentRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of this machine in the pool of another.

    Args:
        pool: The pool's name here.
        spec: What was submitted.
        state: As far as it was heard of, None when it was not.
        ended_at: Seconds since the epoch, None as long as its end was not heard of.
    """

    pool: str
    spec: RunSpec
    state: RunState | None = None
    ended_at: float | None = None


_decoder = msgspec.msgpack.Decoder(SentRun)


def note_sent(settings: Settings, pool: str, spec: RunSpec) -> None:
    """Note that a pool has taken a run; the newest 500 are kept. Without room for the note the run goes on as well."""
    with contextlib.suppress(OSError, UsageError):
        private_dir(settings.state_path)
        private_dir(_folder(settings))
        _write(settings, SentRun(pool=pool, spec=spec))
        keep_newest(_folder(settings), _MOST)


def note_end(settings: Settings, run_id: str, state: RunState, ended_at: float) -> None:
    """Note how a run has ended, if anything is noted of it."""
    sent = sent_run(settings, run_id)
    if sent is not None and sent.ended_at is None:
        with contextlib.suppress(OSError):
            _write(settings, msgspec.structs.replace(sent, state=state, ended_at=ended_at))


def sent_run(settings: Settings, run_id: str) -> SentRun | None:
    """What was noted of a run, None where nothing was."""
    if not is_valid_id(run_id):
        return None
    try:
        return _decoder.decode(_folder(settings).joinpath(f"{run_id}{_ENDING}").read_bytes())
    except (OSError, msgspec.DecodeError):
        # of another version
        return None


def sent_run_ids(settings: Settings) -> list[str]:
    """The runs that something is noted of, in no order."""
    try:
        names = os.listdir(_folder(settings))
    except OSError:
        return []
    return [name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING)]


def _folder(settings: Settings) -> Path:
    return settings.state_path / SENT


def _write(settings: Settings, sent: SentRun) -> None:
    # a kernel and a Jupyter server may hear of an end at the same time
    write_whole(_folder(settings) / f"{sent.spec.run_id}{_ENDING}", msgspec.msgpack.encode(sent))
