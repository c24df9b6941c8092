"""What a run's spec must not say: it is written down in many places, and shown in more."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

from sgpu_magic.packages.variables import SecretsOf, blanked_settings
from sgpu_magic.wire.records import CellSource, RunSpec

_secrets = SecretsOf()
_lock = threading.Lock()


def without_secrets(spec: RunSpec, environ: Mapping[str, str]) -> tuple[RunSpec, CellSource | None]:
    """Return the spec with secrets in its cell's source blanked, and the source as it is to be run.

    Args:
        spec: The run's.
        environ: The ranks' variables; those among them that are secrets are looked for, and known kinds of tokens.

    Returns:
        The spec, and None where nothing had to be blanked.
    """
    with _lock:
        blanker = _secrets.blanker(environ)
    cell = spec.cell
    shown = msgspec.structs.replace(
        cell,
        body=blanked_settings(cell.body, blanker.clear),
        magic_line=blanker.clear(cell.magic_line),
        linecache=tuple(
            (file, blanked_settings(source, blanker.clear), number) for file, source, number in cell.linecache
        ),
    )
    parameters = tuple((name, blanker.clear(value)) for name, value in spec.parameters)
    name = blanker.clear(spec.name)
    if shown == cell and parameters == spec.parameters and name == spec.name:
        return spec, None
    return msgspec.structs.replace(spec, cell=shown, parameters=parameters, name=name), cell
