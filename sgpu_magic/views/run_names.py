"""What a run is called, and its view's button."""

from __future__ import annotations

from typing import Protocol

from sgpu_magic.wire import ids
from sgpu_magic.wire.states import RunKind


class Named(Protocol):
    """What was submitted, or a row of the ledger."""

    @property
    def run_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> RunKind: ...


def run_name(spec: Named) -> str:
    """Return `train_digits` for a cell, `train(...)` for a call, `session work` for a session."""
    match spec.kind:
        case RunKind.SESSION:
            return f"session {spec.name or ids.short(spec.run_id)}"
        case RunKind.CALL if spec.name and "(" not in spec.name:
            return f"{spec.name}(...)"
        case kind:
            return spec.name or f"{kind}"


def stop_words(spec: Named) -> tuple[str, str]:
    """Return the reason why its view's button ends it, and what to say to who has pressed it."""
    if spec.kind is RunKind.SESSION:
        return "Disconnect was pressed", f"{run_name(spec)} is being disconnected"
    return "Cancel was pressed", f"run {ids.short(spec.run_id)} is being stopped"
