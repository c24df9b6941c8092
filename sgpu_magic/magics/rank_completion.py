"""Completion and inspection inside a cell that a session's ranks run: an idle rank is asked, the kernel's own beside.

Both are methods of the ipykernel that its shell channel calls; they are replaced on the one kernel object, which is
the same on every ipykernel from 6.31 to 7.4, and put back when the extension is unloaded.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sgpu_magic.errors import SgpuError
from sgpu_magic.magics.cell_hooks import AutoMode
from sgpu_magic.options import argparse_form
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.wire.rank import RankAnswer, RankQuestion

# a person who types waits for it
TIMEOUT_S = 0.3
_TYPES = "_jupyter_types_experimental"
_MAGIC = re.compile(r"(%%(?:distributed|rank))(?:[ \t]+([^\n]*))?\n")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a cell something is asked for.

    Args:
        session: Whose rank is asked.
        rank: Which.
        begin: Position in the cell at which the rank's code begins.
    """

    session: Session
    rank: int
    begin: int


class RankQuestions:
    """Stands before the kernel's own completion and inspection.

    Args:
        kernel: The ipykernel.
        auto: Whether plain cells go to the ranks.
    """

    def __init__(self, kernel: Any, auto: AutoMode) -> None:
        self._kernel = kernel
        self._auto = auto
        self._complete: Callable[..., Any] = kernel.do_complete
        self._inspect: Callable[..., Any] = kernel.do_inspect
        self._own = {name: kernel.__dict__[name] for name in ("do_complete", "do_inspect") if name in kernel.__dict__}
        # one object each, to be known again
        self._ours = {"do_complete": self.complete, "do_inspect": self.inspect}
        for name, ours in self._ours.items():
            setattr(kernel, name, ours)

    def remove(self) -> None:
        """Give the kernel its own methods back."""
        for name, ours in self._ours.items():
            if self._kernel.__dict__.get(name) is not ours:
                # somebody has replaced it after us, and calls ours: it does nothing more without a session
                continue
            if name in self._own:
                setattr(self._kernel, name, self._own[name])
            else:
                delattr(self._kernel, name)

    def complete(self, code: str, cursor_pos: int | None) -> Any:
        """The kernel's `do_complete`: the rank's names first."""
        cursor = len(code) if cursor_pos is None else cursor_pos
        answer, begin = self._asked("complete", code, cursor)
        found = self._complete(code, cursor_pos)
        return _then(found, lambda reply: _merged(reply, answer, begin, code)) if answer is not None else found

    def inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """The kernel's `do_inspect`: what the rank has under that name, else the kernel's own."""
        answer, _ = self._asked("inspect", code, cursor_pos, detail_level)
        if answer is None or not answer.bundle:
            return self._inspect(code, cursor_pos, detail_level, omit_sections)
        data: dict[str, Any] = json.loads(answer.bundle)
        if not self._kernel.shell.enable_html_pager:
            data.pop("text/html", None)
        reply = {"status": "ok", "found": True, "data": data, "metadata": {}}
        return _later(reply) if inspect.iscoroutinefunction(self._inspect) else reply

    def _asked(self, what: str, code: str, cursor: int, detail: int = 0) -> tuple[RankAnswer | None, int]:
        """Ask a rank; None when it is not its cell, or it does not answer in time."""
        place = self._place(code, cursor)
        if place is None:
            return None, 0
        question = RankQuestion(
            rank=place.rank, what=what, code=code[place.begin :], cursor=cursor - place.begin, detail=detail
        )
        answer = place.session.pool.ask_rank(place.session.run_id, question, TIMEOUT_S)
        return (None if answer.problem else answer), place.begin

    def _place(self, code: str, cursor: int) -> _Place | None:
        session = registry.idle()
        if session is None:
            return None
        found = _MAGIC.match(code)
        if found is None:
            return _Place(session, _lowest_living(session, ()), 0) if self._auto.takes(code) else None
        if cursor < found.end():
            return None
        try:
            options = argparse_form.parse(found[2] or "", found[1])
        except SgpuError:
            return None
        if options is None or options.session == argparse_form.NO_SESSION or options.fresh:
            return None
        if options.session and options.session != session.name:
            named = registry.find(options.session)
            if named is None or not named.is_idle:
                return None
            session = named
        return _Place(session, _lowest_living(session, options.only), found.end())


def _lowest_living(session: Session, only: tuple[int, ...]) -> int:
    ranks = session.ranks_of(only)
    return next((rank for rank in ranks if rank not in session.dead), ranks[0])


def _merged(reply: dict[str, Any], answer: RankAnswer, begin: int, code: str) -> dict[str, Any]:
    """Return the kernel's reply with the rank's matches before its own."""
    if not answer.matches:
        return reply
    start, end = answer.start + begin, answer.end + begin
    own_start, own_end = int(reply["cursor_start"]), int(reply["cursor_end"])
    first = min(start, own_start) if reply["matches"] else start
    typed = {match.text: match.type for match in answer.matches}
    entries = [
        {"start": first, "end": end, "text": code[first:start] + text, "type": kind or "<unknown>", "signature": ""}
        for text, kind in typed.items()
    ]
    there = {entry["text"] for entry in entries}
    if own_end == end:
        own: list[dict[str, Any]] = reply.get("metadata", {}).get(_TYPES) or [
            {"text": text, "type": "<unknown>", "signature": ""} for text in reply["matches"]
        ]
        before = code[first:own_start]
        further = [{**entry, "start": first, "end": end, "text": before + entry["text"]} for entry in own]
        entries += [entry for entry in further if entry["text"] not in there]
    return {
        **reply,
        "matches": [entry["text"] for entry in entries],
        "cursor_start": first,
        "cursor_end": end,
        "metadata": {**reply.get("metadata", {}), _TYPES: entries},
    }


def _then(found: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Change a reply that is there, or is awaited."""
    return _awaited(found, change) if inspect.isawaitable(found) else change(found)


async def _awaited(
    found: Awaitable[dict[str, Any]], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    return change(await found)


async def _later(reply: dict[str, Any]) -> dict[str, Any]:
    return reply
