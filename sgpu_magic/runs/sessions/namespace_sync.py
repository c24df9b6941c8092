"""Which of the notebook's names go to a session's ranks: those whose value there is new, or newer than the ranks' own.

By rank and name it is known what the notebook's value looked like when the rank got it, or when a cell on the rank
set a value of its own. While the notebook's value looks like that, the rank keeps what it has. When the notebook
changes the value or assigns it anew, that is the newer one, and goes with the next cell that reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType

import msgspec

from sgpu_magic.options.values import format_ranks
from sgpu_magic.payload.digest import Fingerprint
from sgpu_magic.payload.namespace import is_ipythons

# the notebook had no such name
_ABSENT = b""

NamesOf = Callable[[int], frozenset[str] | None]
"""Asks a rank for the names that its cells and the notebook have set; None when it does not answer."""


class _Held(msgspec.Struct, frozen=True):
    """What a rank has under one name.

    Args:
        digest: Of the notebook's value when the rank got it or set its own; None when that could not be pickled.
        own: A cell on the rank has set it, or `Session.push` with a value.
        pushed: It was `Session.push`.
    """

    digest: bytes | None
    own: bool
    pushed: bool = False


Assigned = Mapping[str, dict[int, _Held]]


class Plan(msgspec.Struct, frozen=True):
    """What goes along with one cell.

    Args:
        ranks: Those that take part.
        names: Names that all of them get with the cell.
        before: Names that only some of them lack: they get those first.
        stay: Names that the cell reads and that stay here; the ranks have them.
        notes: Sentences for the user.
        prints: What every name that the cell reads looks like in the notebook.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    before: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    stay: frozenset[str]
    notes: tuple[str, ...]
    prints: Mapping[str, Fingerprint]


class Effects(msgspec.Struct, frozen=True):
    """What a cell may have done to the ranks' names.

    Args:
        stored: Names that it could set, None when that can't be known.
        deleted: Names that it could delete.
    """

    stored: frozenset[str] | None = frozenset()
    deleted: frozenset[str] = frozenset()


class Shipping:
    """What the ranks of one session have of the notebook. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, _Held]] = {}
        self._noted: set[str] = set()
        self._lock = threading.RLock()

    def plan(
        self, names: Iterable[str], namespace: dict[str, object], ranks: tuple[int, ...], exclude: Collection[str] = ()
    ) -> Plan:
        """Decide what goes along with a cell.

        Args:
            names: What it reads of the notebook.
            namespace: The notebook's.
            ranks: Those that take part.
            exclude: Names that stay in the notebook.
        """
        prints = _looked_at(names, namespace, exclude)
        with self._lock:
            lacking = {name: self._lacking(name, print_.digest, ranks) for name, print_ in prints.items()}
            notes = self._with_what_they_share(lacking, prints, ranks)
            notes += self._own_values(lacking, namespace, ranks)
        for print_ in prints.values():
            print_.forget_parts()
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, some in lacking.items():
            groups.setdefault(some, []).append(name)
        whole = tuple(groups.pop(ranks, ()))
        stay = frozenset(name for group in groups.values() for name in group)
        groups.pop((), None)
        before = tuple((some, tuple(group)) for some, group in groups.items())
        return Plan(ranks, whole, before, stay, tuple(notes), prints)

    def sent(self, names: Iterable[str], prints: Mapping[str, Fingerprint], ranks: Iterable[int]) -> None:
        """The ranks get the notebook's values of these names."""
        with self._lock:
            for name in names:
                if name in prints:
                    self._set(name, ranks, _Held(prints[name].digest, own=False))
                if not any(held.own for held in self._held.get(name, {}).values()):
                    self._noted.discard(name)

    def not_arrived(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """What was sent did not get there."""
        with self._lock:
            for name in names:
                self._drop(name, ranks)

    def cell_over(
        self, effects: Effects, plan: Plan, namespace: dict[str, object], *, succeeded: bool, names_of: NamesOf
    ) -> None:
        """A cell has run: what it has set is the ranks' own.

        Args:
            effects: What it could do.
            plan: What went along with it.
            namespace: The notebook's, whose values are older than what the cell has set.
            succeeded: It came to its end; else the ranks are asked how far it came.
            names_of: Asks them.
        """
        stored, deleted = effects.stored, effects.deleted
        called = frozenset[str]().union(*(print_.stores for print_ in plan.prints.values()))
        if stored is None or not succeeded or called:
            there = names_of(plan.ranks[0])
            if stored is None:
                known = self._names()
                stored = frozenset[str]() if there is None else there - known
                deleted = frozenset[str]() if there is None else known - there
            stored |= called
            if there is not None:
                stored, deleted = stored & there, deleted - there
        older = {name: _digest(name, plan.prints, namespace) for name in stored}
        with self._lock:
            for name in deleted:
                self._drop(name, plan.ranks)
            for name, digest in older.items():
                self._set(name, plan.ranks, _Held(digest, own=True))

    def assigned(self, names: Iterable[str]) -> Assigned:
        """The notebook binds these names anew: its values are the newer ones. Return what undoes that."""
        with self._lock:
            self._noted.difference_update(names)
            return {name: self._held.pop(name) for name in names if name in self._held}

    def not_assigned(self, before: Assigned) -> None:
        """The notebook may not have come to it: the values themselves must tell."""
        with self._lock:
            for name, held in before.items():
                self._held.setdefault(name, held)

    def set_on_ranks(
        self, names: Iterable[str], namespace: dict[str, object], ranks: Iterable[int], *, pushed: bool = False
    ) -> None:
        """The ranks have values of their own, or the notebook has got theirs: what it has is no newer."""
        older = {name: _digest(name, {}, namespace) for name in names}
        with self._lock:
            for name, digest in older.items():
                self._set(name, ranks, _Held(digest, own=True, pushed=pushed))
                self._noted.add(name)

    def pushed_names(self, ranks: Collection[int]) -> dict[int, list[str]]:
        """Return which values that were pushed to these ranks another rank has as well, by that rank."""
        found: dict[int, list[str]] = {}
        with self._lock:
            for name, held in self._held.items():
                others = sorted(rank for rank in held if rank not in ranks and held[rank].pushed)
                if others and any(held[rank].pushed for rank in ranks if rank in held):
                    found.setdefault(others[0], []).append(name)
        return found

    def restarted(self, ranks: Collection[int]) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Forget what these ranks had; return what the notebook had shipped to them: names, and the ranks they lack."""
        groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        with self._lock:
            # of a name that was told as the ranks' own, some now have the notebook's value
            self._noted -= self.own_names(ranks)
            for rank in ranks:
                shipped = [name for name, held in self._held.items() if rank in held and not held[rank].own]
                groups[tuple(shipped)] = (*groups.get(tuple(shipped), ()), rank)
                for name in list(self._held):
                    self._drop(name, (rank,))
        groups.pop((), None)
        return groups

    def unknown(self, names: frozenset[str]) -> frozenset[str]:
        """Those of `names` that no rank is known to have."""
        return names - self._names()

    def own_names(self, ranks: Collection[int]) -> frozenset[str]:
        """The names that cells have set on one of these ranks."""
        with self._lock:
            return frozenset(
                name for name, held in self._held.items() if any(held[rank].own for rank in ranks if rank in held)
            )

    # ------------------------------------------------------------ within

    def _lacking(self, name: str, digest: bytes | None, ranks: tuple[int, ...]) -> tuple[int, ...]:
        held = self._held.get(name, {})
        return tuple(rank for rank in ranks if rank not in held or held[rank].digest != digest)

    def _with_what_they_share(
        self, lacking: dict[str, tuple[int, ...]], prints: Mapping[str, Fingerprint], ranks: tuple[int, ...]
    ) -> list[str]:
        """Send what shares objects with something that is sent, such as an optimizer's model: they stay one there."""
        notes: list[str] = []
        waiting = [name for name, some in lacking.items() if some]
        while waiting:
            partner = waiting.pop()
            for name, some in lacking.items():
                if set(lacking[partner]) <= set(some) or any(
                    self._held[name][rank].own for rank in ranks if rank in self._held.get(name, {})
                ):
                    continue
                if prints[name].shares_with(prints[partner]):
                    lacking[name] = tuple(sorted({*some, *lacking[partner]}))
                    waiting.append(name)
                    notes.append(f"`{name}` was shipped again: it shares objects with `{partner}`, which is new")
        return notes

    def _own_values(
        self, lacking: Mapping[str, tuple[int, ...]], namespace: Mapping[str, object], ranks: tuple[int, ...]
    ) -> list[str]:
        """Say once of each name that the ranks, or some of them, have another value than the notebook."""
        notes: list[str] = []
        for name, some in lacking.items():
            held = self._held.get(name, {})
            own = tuple(rank for rank in ranks if rank in held and held[rank].own and rank not in some)
            if not own or name in self._noted or isinstance(namespace.get(name), ModuleType):
                continue
            self._noted.add(name)
            if some:
                new = format_ranks(some)
                notes.append(
                    f"`{name}` differs between ranks: {new} got the notebook's value, {format_ranks(own)} kept what "
                    f"was set there. Run the cell that sets it on {new} too, or send the notebook's value to all with "
                    f"%sgpu_push {name}"
                )
                continue
            notes.append(
                f"`{name}` is the ranks' own, set by a cell there; the notebook has another: assign it anew, or "
                f"%sgpu_push {name}, to ship that"
            )
        return notes

    def _set(self, name: str, ranks: Iterable[int], held: _Held) -> None:
        self._held.setdefault(name, {}).update(dict.fromkeys(ranks, held))

    def _drop(self, name: str, ranks: Iterable[int]) -> None:
        held = self._held.get(name, {})
        for rank in ranks:
            held.pop(rank, None)

    def _names(self) -> frozenset[str]:
        with self._lock:
            return frozenset(name for name, held in self._held.items() if held)


def _looked_at(names: Iterable[str], namespace: dict[str, object], exclude: Collection[str]) -> dict[str, Fingerprint]:
    """Return what the names look like, and those that their functions and classes read."""
    prints: dict[str, Fingerprint] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name in prints or name in exclude or name not in namespace:
            continue
        prints[name] = print_ = Fingerprint(namespace[name], namespace)
        waiting.extend(needed for needed in print_.needs if not is_ipythons(needed, namespace.get(needed)))
    return prints


def _digest(name: str, prints: Mapping[str, Fingerprint], namespace: dict[str, object]) -> bytes | None:
    if name in prints:
        return prints[name].digest
    if name not in namespace:
        return _ABSENT
    print_ = Fingerprint(namespace[name], namespace)
    return print_.digest
