"""The state of a run as a word with its tone and shape: a run's own states, and a session's."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sgpu_magic.views.failure import limit_of
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.states import RunState

Tone = Literal["plain", "busy", "good", "bad", "warn"]


class StateWord(NamedTuple):
    """What stands first in a run's header."""

    text: str
    tone: Tone
    shape: str = "●"


_WORDS: dict[RunState, StateWord] = {
    RunState.QUEUED: StateWord("queued", "plain", "○"),
    RunState.PREPARING: StateWord("preparing", "busy"),
    RunState.STARTING: StateWord("starting", "busy"),
    RunState.RUNNING: StateWord("running", "busy"),
    RunState.CANCELLING: StateWord("cancelling", "warn", "■"),
    RunState.SUCCEEDED: StateWord("succeeded", "good", "✓"),
    RunState.FAILED: StateWord("failed", "bad", "✕"),
    RunState.CANCELLED: StateWord("cancelled", "warn", "■"),
}
_OF_SESSIONS: dict[RunState, StateWord] = {
    RunState.QUEUED: StateWord("waits for devices", "plain", "○"),
    RunState.PREPARING: StateWord("starting", "busy"),
    RunState.CANCELLING: StateWord("disconnecting", "warn", "■"),
    RunState.SUCCEEDED: StateWord("ended", "plain", "■"),
    RunState.CANCELLED: StateWord("ended", "plain", "■"),
}
_LEFT = StateWord("goes on", "plain", "→")
_MAX_NAME = 40


def state_word(view: RunView) -> StateWord:
    """Return the word for where a run is."""
    if view.left:
        return _LEFT
    if view.state is RunState.TIMED_OUT:
        return StateWord(limit_of(view.failure).word, "bad", "✕")
    if view.session is None:
        return _WORDS[view.state]
    if view.state is RunState.RUNNING:
        if view.session.running:
            return StateWord(f"runs {_names(view.session.running)}", "busy")
        return StateWord("connected", "warn" if view.session.dead else "good")
    return _OF_SESSIONS.get(view.state) or _WORDS[view.state]


def _names(running: tuple[str, ...]) -> str:
    name = running[0] or "a cell"
    name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]} ..."
    return name if len(running) == 1 else f"{name} and {len(running) - 1} more"
