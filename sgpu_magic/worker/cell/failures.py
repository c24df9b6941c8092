"""How a cell failed: its exception described without trusting the user's code, and then let go of.

Its text, its notes and its drawing are asked for once, by `asking.ask`, and may be 300 MB long. All that draws a
traceback works on the stand-in that `look_at` makes, which has plain texts of bounded length.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.worker.cell import asking
from sgpu_magic.worker.cell.asking import (
    ask,
    cause_of,
    context_of,
    encodable,
    grouped_by,
    is_a,
    module_of,
    name_of,
    qualname_of,
    slot,
    suppresses_context,
    text_of,
    traceback_of,
)

# what a person reads of one exception; a hundred ranks that all fail tell less than 2 MB
MESSAGE_CHARS = 10_000
# 400 lines; the notebook shows all of it
TRACEBACK_CHARS = 40_000
# colours are at most twice as long as the text in them
ANSI_CHARS = 3 * TRACEBACK_CHARS
# IPython takes 5 to 50 ms for each
_MOST_CHAINED = 20
_MOST_NOTES = 20
_MOST_GROUPED = 15
_MOST_LINES = 1_000
_NAME_CHARS = 200
# above the recursion limit that a notebook has
_MOST_FRAMES = 3_200
_FRAMES_KEPT = 100
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ANSI_REST = re.compile(r"\x1b\[[0-9;]*$")
# torch 2.6 to 2.13
_PEER_LOST = re.compile(
    r"connectFullMesh failed|"
    r"Connection (closed|reset) by peer|Broken pipe|gloo/transport|remote process exited|NCCL communicator was aborted"
    r"|process group .*(aborted|shut down)",
    re.IGNORECASE,
)


class WholeTexts:
    """The file of a run's directory that has what was too long to show.

    Args:
        path: The file; None where the run has no directory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.has_cut = False

    def cut(self, text: str, most: int, what: str) -> str:
        """Return the beginning and the end of `text`, together at most `most` characters.

        Args:
            text: Any text.
            most: Characters.
            what: The heading under which the whole is kept; "" for a text that is kept in another form.
        """
        if len(text) <= most:
            return text
        self.has_cut = True
        where = self._keep(text, what)
        left_out = f"\n[... {len(text) - most:,} characters left out; {where} ...]\n"
        head, tail = text[: most * 4 // 5], text[-(most // 5) :]
        return f"{_ANSI_REST.sub('', head)}{left_out}{tail}"

    def _keep(self, text: str, what: str) -> str:
        if self._path is None:
            return "the whole text was not kept"
        try:
            if what:
                self._path.touch(mode=0o600)
                with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"---- {what}\n")
                    for begin in range(0, len(text), 1 << 20):
                        file.write(text[begin : begin + (1 << 20)])
                    file.write("\n")
        except OSError as error:
            self._path = None
            return f"the whole text could not be kept: {error.strerror}"
        return f"the whole text is in {self._path}"


class Shown(msgspec.Struct):
    """An exception as it is described.

    Args:
        error: The user's object.
        stand_in: An exception of the same name and text, with the same traceback, causes and notes; ours.
        type_name: Qualified.
        message: Its text, bounded.
        is_odd: No object to hand over: its own code raised, exited or was interrupted, or it has too much text.
        has_group: It is a group, or one is shown before it.
        drawing: The lines that its `_render_traceback_` draws, None where it has none.
        lines: Its traceback as IPython draws it.
    """

    error: BaseException
    stand_in: BaseException
    type_name: str
    message: str
    is_odd: bool
    has_group: bool
    drawing: list[str] | None
    lines: list[str] = msgspec.field(default_factory=list)


def look_at(error: BaseException, whole: WholeTexts) -> Shown:
    """Ask the exception for all that is shown of it. Never raises on account of the user's code."""
    asking.begin()
    standing = _Standing(whole)
    stand_in = standing.of(error)
    drawn = ask(_draw_itself, error, default=None)
    drawing: list[str] | None = None
    if type(drawn) in (list, tuple):
        lines = [text_of(line) for line in drawn[:_MOST_LINES]]
        drawing = [encodable(whole.cut(line, MESSAGE_CHARS, "a line")) for line in lines if line is not None]
    is_odd = whole.has_cut or asking.refused() > 0
    type_name = ".".join(_names_of(type(error)))
    return Shown(error, stand_in, type_name, str(stand_in), is_odd, standing.has_group, drawing)


def is_peer_lost(error: BaseException, message: str) -> bool:
    """Whether this is how the loss of a peer shows in gloo and NCCL: always a consequence, never the cause."""
    return is_a(error, RuntimeError) and (_PEER_LOST.search(message) is not None or _is_revoked(error, message))


def _is_revoked(error: BaseException, message: str) -> bool:
    """`rendezvous.revoke_store` has freed the rank."""
    return name_of(type(error)) == "DistStoreError" and message == os.strerror(errno.ENXIO)


def message_of(shown: Shown) -> str:
    """The error's own text, where that says something."""
    if _is_revoked(shown.error, shown.message):
        return "released while it waited for a peer that did not come"
    return shown.message


class _Standing:
    """Makes the stand-ins of an exception and of what is shown before it; each object once.

    Args:
        whole: Takes texts that are too long.

    Attributes:
        has_group: There is a group among them.
    """

    def __init__(self, whole: WholeTexts) -> None:
        self._whole = whole
        self._made: dict[int, BaseException] = {}
        self._left = _MOST_CHAINED
        self.has_group = False

    def of(self, error: BaseException) -> BaseException:
        first = stand_in = self._make(error)
        while True:
            cause, context = cause_of(error), context_of(error)
            stand_in.__suppress_context__ = bool(suppresses_context(error))
            before = context if cause is None and not stand_in.__suppress_context__ else cause
            if before is None or id(before) in self._made:
                return first
            if len(self._made) >= _MOST_CHAINED:
                stand_in.add_note("(The exceptions before this one are not shown: there are too many.)")
                return first
            made = self._make(before)
            if cause is None:
                stand_in.__context__ = made
            else:
                stand_in.__cause__ = made
            error, stand_in = before, made

    def _make(self, error: BaseException) -> BaseException:
        cls = type(error)
        module, qualname = _names_of(cls)
        name = _plain_name(name_of(cls))
        text = self._text_of(error, name)

        def __str__(self: BaseException) -> str:
            return text

        members = {"__module__": module, "__qualname__": qualname, "__str__": __str__}
        made: BaseException
        if issubclass(cls, BaseExceptionGroup):
            self.has_group = True
            parts = [self._part(one) for one in list(grouped_by(error))[:_MOST_GROUPED]]
            made = type(name, (BaseExceptionGroup,), members)(text, parts)
        elif issubclass(cls, SyntaxError):
            made = type(name, (SyntaxError,), members)(text)
            self._take_place(error, made)
        else:
            made = type(name, (Exception,), members)(text)
        made.__traceback__ = _bounded(traceback_of(error))
        self._made[id(error)] = made
        for note in self._notes_of(error):
            made.add_note(note)
        return made

    def _part(self, error: BaseException) -> BaseException:
        self._left -= 1
        return self._make(error) if self._left > 0 else Exception("not shown: the group has too many exceptions.")

    def _text_of(self, error: BaseException, name: str) -> str:
        text = text_of(ask(str, error, default=None))
        if text is None:
            return f"<{name}.__str__ failed>"
        return encodable(self._whole.cut(text, MESSAGE_CHARS, f"text of {name}"))

    def _notes_of(self, error: BaseException) -> list[str]:
        found: Any = ask(_get_notes, error, default=None)
        if found is None:
            return []
        # what is no list is shown as Python itself does
        listed: list[object] = list(found[:_MOST_NOTES]) if type(found) in (list, tuple) else [found]
        notes: list[str] = []
        for note in listed:
            text = text_of(note)
            if text is None:
                text = text_of(ask(repr, note, default=None)) or "<note that has no text>"
            notes.append(encodable(self._whole.cut(text, MESSAGE_CHARS, "note")))
        return notes

    def _take_place(self, error: BaseException, made: Any) -> None:
        """Of a SyntaxError: file, line and text, where they are what Python puts there."""
        for name in ("filename", "text", "lineno", "offset", "end_lineno", "end_offset"):
            value = slot(SyntaxError, name)(error)
            if name in ("filename", "text"):
                value = encodable(text_of(value) or "")[:_NAME_CHARS] or None
            setattr(made, name, value if type(value) in (str, int) else None)
        message = text_of(slot(SyntaxError, "msg")(error))
        made.msg = str(made) if message is None else encodable(message[:MESSAGE_CHARS])


def _get_notes(error: Any) -> Any:
    return getattr(error, "__notes__", None)


def _draw_itself(error: Any) -> Any:
    draw = getattr(error, "_render_traceback_", None)
    return None if draw is None else draw()


def _names_of(cls: type) -> tuple[str, str]:
    """The module and the qualified name of an exception's class."""
    return _plain_name(module_of(cls), "?"), _plain_name(qualname_of(cls))


def _plain_name(name: object, default: str = "Exception") -> str:
    text = text_of(name)
    if not text:
        return default
    text = encodable(text.replace("\0", "\\0"))
    return text if len(text) <= _NAME_CHARS else text[:_NAME_CHARS] + "..."


def _bounded(entry: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the middle of a recursion that nobody can read."""
    entries: list[types.TracebackType] = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if len(entries) <= _MOST_FRAMES:
        return entries[0] if entries else None
    made: types.TracebackType | None = None
    for one in reversed(entries[:_FRAMES_KEPT] + entries[-_FRAMES_KEPT:]):
        made = types.TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def leave_own_frames_out(error: BaseException) -> None:
    """End the traceback where the cell called into this package, as `input()` in a rank does.

    A function's call begins with the function's own frame: those before it are no code of the user's.
    """
    last, before, entry = None, None, traceback_of(error)
    while entry is not None:
        module = text_of(entry.tb_frame.f_globals.get("__name__")) or ""
        if module == "sgpu_magic.payload.call" and before is not None and entry.tb_next is not None:
            before.tb_next = entry.tb_next
        before = last
        if module == "sgpu_magic.worker.process.terminal":
            if last is not None:
                last.tb_next = None
            return
        last, entry = entry, entry.tb_next


def drop_tracebacks(error: BaseException) -> None:
    """Let go of what the frames of an exception and of those before it hold: the next cell needs the room."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        _clear_frames(traceback_of(one))
        BaseException.with_traceback(one, None)
        waiting += [further for further in (cause_of(one), context_of(one)) if further is not None]
        if is_a(one, BaseExceptionGroup):
            waiting += grouped_by(one)


def _clear_frames(entry: types.TracebackType | None) -> None:
    """Empty the frames: what drew the traceback still holds them, in cycles that Python collects at some time.

    To clear a generator's frame would end the generator, which the user's code may still hold.
    """
    for frame, _ in traceback.walk_tb(entry):
        if not frame.f_code.co_flags & _GENERATORS:
            # it still runs: one of those that lead to the cell
            with contextlib.suppress(RuntimeError):
                frame.clear()
                if sys.version_info < (3, 13):
                    # asked for again, the copy of the variables that was made for the drawing is emptied too
                    _ = frame.f_locals
