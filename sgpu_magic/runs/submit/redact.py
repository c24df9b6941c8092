"""What of a run may be written down: its spec without secrets, and the scalars among its arguments as text."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

from sgpu_magic.packages.secrets import is_secret
from sgpu_magic.packages.variables import SecretsOf, blanked_settings
from sgpu_magic.wire.run import CellSource, RunSpec

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


_MOST_SCALARS = 100
_LONGEST_TEXT = 250

Parameters = tuple[tuple[str, str], ...]


def scalars(values: Mapping[str, object]) -> Parameters:
    """Return the numbers, truth values and short texts among `values`, as text; what looks like a secret is left out.

    Args:
        values: By name.
    """
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        # their subclasses may print themselves in any way
        if type(value) not in (int, float, bool, str) or name.startswith("_"):
            continue
        text = value if isinstance(value, str) else _number(value)
        if text is not None and 0 < len(text) <= _LONGEST_TEXT and not is_secret(name, text):
            found.append((name, text))
            if len(found) == _MOST_SCALARS:
                break
    return tuple(found)


def _number(value: object) -> str | None:
    try:
        return repr(value)
    except ValueError:
        # an int of more digits than Python writes
        return None
