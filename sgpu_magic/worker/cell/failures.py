"""Describes a cell's exception without trusting the user's code, and frees what it holds afterwards.

The exception's text, notes and `_render_traceback_` are requested once, by `user_code.ask`; they may be 300 MB long.
Tracebacks are drawn from the stand-in that `inspect_error` makes, which has plain texts of bounded length.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.worker.process import user_code
from sgpu_magic.worker.process.user_code import (
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

# enough to read; a hundred ranks that all fail send less than 2 MB
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
# above a notebook's recursion limit
_MOST_FRAMES = 3_200
_FRAMES_KEPT = 100
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ANSI_REST = re.compile(r"\x1b\[[0-9;]*$")
# modules whose frames are above those of a cell
_RUNNERS = ("IPython.core.", "sgpu_magic.")
# modules that raise errors in functions which cells call
_CALLED_BY_CELLS = frozenset({"sgpu_magic.worker.process.terminal", "sgpu_magic.worker.group.lost_groups"})


class WholeTexts:
    """The file in the run's directory for texts that are too long to show.

    Args:
        path: The file, None if the run has no directory.

    Attributes:
        has_cut: Whether a text was cut.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.has_cut = False

    def cut(self, text: str, most: int, what: str) -> str:
        """Return the beginning and the end of `text`, together at most `most` characters.

        Args:
            text: Any text.
            most: Limit in characters.
            what: The heading of the whole text in the file; "" for a text that is there in another form.
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


class DescribedError(msgspec.Struct):
    """A described exception.

    Args:
        error: The user's object.
        stand_in: Our exception of the same name and text, with the same traceback, causes and notes.
        type_name: The qualified name of its type.
        message: Its text, cut to `MESSAGE_CHARS`.
        is_odd: The object is not to be sent: its own code raised, exited or was interrupted, or its text was cut.
        has_group: It is an exception group, or is shown after one.
        drawing: The lines that its `_render_traceback_` returns, None if it has no such method.
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


def inspect_error(error: BaseException, whole: WholeTexts) -> DescribedError:
    """Describe an exception. Never raises because of the user's code."""
    user_code.asking.refused = 0
    stand_ins = _StandIns(whole)
    stand_in = stand_ins.stand_in_for(error)
    rendered = ask(_draw_itself, error, default=None)
    drawing: list[str] | None = None
    if type(rendered) in (list, tuple):
        lines = [text_of(line) for line in rendered[:_MOST_LINES]]
        drawing = [encodable(whole.cut(line, MESSAGE_CHARS, "a line")) for line in lines if line is not None]
    is_odd = whole.has_cut or user_code.asking.refused > 0
    type_name = ".".join(_names_of(type(error)))
    return DescribedError(error, stand_in, type_name, str(stand_in), is_odd, stand_ins.has_group, drawing)


class _StandIns:
    """Makes the stand-ins of an exception and of those shown before it, one for each object.

    Args:
        whole: The file for texts that are too long.

    Attributes:
        has_group: Whether one of them is an exception group.
    """

    def __init__(self, whole: WholeTexts) -> None:
        self._whole = whole
        self._made: dict[int, BaseException] = {}
        self._left = _MOST_CHAINED
        self.has_group = False

    def stand_in_for(self, error: BaseException) -> BaseException:
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
            self._copy_position(error, made)
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
        found: Any = ask(getattr, error, "__notes__", None, default=None)
        if found is None:
            return []
        # anything but a list is shown as Python does
        listed: list[object] = list(found[:_MOST_NOTES]) if type(found) in (list, tuple) else [found]
        notes: list[str] = []
        for note in listed:
            text = text_of(note)
            if text is None:
                text = text_of(ask(repr, note, default=None)) or "<note that has no text>"
            notes.append(encodable(self._whole.cut(text, MESSAGE_CHARS, "note")))
        return notes

    def _copy_position(self, error: BaseException, made: Any) -> None:
        """Copy a SyntaxError's file, line and text, where they have the types that Python gives them."""
        for name in ("filename", "text", "lineno", "offset", "end_lineno", "end_offset"):
            value = slot(SyntaxError, name)(error)
            if name in ("filename", "text"):
                value = encodable(text_of(value) or "")[:_NAME_CHARS] or None
            setattr(made, name, value if type(value) in (str, int) else None)
        message = text_of(slot(SyntaxError, "msg")(error))
        made.msg = str(made) if message is None else encodable(message[:MESSAGE_CHARS])


def _draw_itself(error: Any) -> Any:
    draw = getattr(error, "_render_traceback_", None)
    return None if draw is None else draw()


def _names_of(cls: type) -> tuple[str, str]:
    """Return the module and the qualified name of an exception's class."""
    return _plain_name(module_of(cls), "?"), _plain_name(qualname_of(cls))


def _plain_name(name: object, default: str = "Exception") -> str:
    text = text_of(name)
    if not text:
        return default
    text = encodable(text.replace("\0", "\\0"))
    return text if len(text) <= _NAME_CHARS else text[:_NAME_CHARS] + "..."


def _bounded(entry: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without the middle of a very deep recursion."""
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


def without_runner(entry: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the cell's or the called function's first frame on."""
    first = entry
    while first is not None and (text_of(first.tb_frame.f_globals.get("__name__")) or "").startswith(_RUNNERS):
        first = first.tb_next
    # an error of the runner itself keeps its frames
    return entry if first is None else first


def drop_own_frames(error: BaseException) -> None:
    """Remove this package's frames from the traceback, and from those of the exceptions before it.

    It ends where the cell called into this package, as `input()` on a rank and a use of a lost group do. For a called
    function it begins with the function's own frame.
    """
    for each in with_earlier(error):
        _drop_own_frames(each)


def _drop_own_frames(error: BaseException) -> None:
    last, before, entry = None, None, traceback_of(error)
    while entry is not None:
        module = text_of(entry.tb_frame.f_globals.get("__name__")) or ""
        if module == "sgpu_magic.payload.call" and before is not None and entry.tb_next is not None:
            before.tb_next = entry.tb_next
        before = last
        if module in _CALLED_BY_CELLS:
            if last is not None:
                last.tb_next = None
            return
        last, entry = entry, entry.tb_next


def drop_tracebacks(error: BaseException) -> None:
    """Free what the frames of an exception and of those before it hold: the next cell needs the memory."""
    for each in with_earlier(error):
        _clear_frames(traceback_of(each))
        BaseException.with_traceback(each, None)


def with_earlier(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, those of its group, and those that it was raised from or during; each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [further for further in (cause_of(one), context_of(one)) if further is not None]
        if is_a(one, BaseExceptionGroup):
            waiting += grouped_by(one)


def _clear_frames(entry: types.TracebackType | None) -> None:
    """Clear the frames: the objects that drew the traceback still hold them, in cycles that are collected later.

    A generator's frame is left alone: clearing it would end the generator, which the user's code may still hold.
    """
    for frame, _ in traceback.walk_tb(entry):
        if not frame.f_code.co_flags & _GENERATORS:
            # a RuntimeError means that the frame still runs: it is one of those outside the cell
            with contextlib.suppress(RuntimeError):
                frame.clear()
                if sys.version_info < (3, 13):
                    # drawing the traceback made a copy of the variables, which another read empties
                    _ = frame.f_locals
