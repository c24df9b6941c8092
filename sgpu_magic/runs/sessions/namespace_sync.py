"""Decides which of the notebook's names are sent to a session's ranks: those that are new or newer than the ranks'.

For each rank and name, it records the digest of the notebook's value when the rank received it, or when a cell on the
rank set its own value. While the notebook's value has that digest, the rank keeps its value. Once the notebook changes
or rebinds the value, the notebook's is newer and is sent with the next cell that reads it.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType

import msgspec

from sgpu_magic.formatting import format_ranks
from sgpu_magic.payload.call import RANK_NAMES
from sgpu_magic.payload.digest import Fingerprint
from sgpu_magic.payload.memory_digests import MemoryDigests, shared_digests
from sgpu_magic.payload.names import CellNames
from sgpu_magic.payload.namespace import is_ipythons
from sgpu_magic.runs.sessions.comparison import Comparison
from sgpu_magic.wire.events import as_warning

# digest of a name that the notebook did not have
_ABSENT = b""

NamesOf = Callable[[int], frozenset[str] | None]
"""Asks a rank for the names that cells and the notebook have set on it; None if it does not answer."""


class _Held(msgspec.Struct, frozen=True):
    """The record of one name on a rank.

    Args:
        digest: Digest of the notebook's value when the rank received it or set its own; None if it can't be pickled.
        own: Whether the rank has its own value, set by a cell on it or by `Session.push` with a value.
        pushed: Whether `Session.push` set the value.
    """

    digest: bytes | None
    own: bool
    pushed: bool = False


Assigned = Mapping[str, dict[int, _Held]]


class ShippingPlan(msgspec.Struct, frozen=True):
    """The names to send for one cell.

    Args:
        ranks: The ranks that run the cell.
        names: Names that are sent to all of these ranks with the cell.
        before: Names that only some ranks lack, by ranks; sent before the cell.
        stay: Names that the cell reads and that are not sent with it, because the ranks have them.
        notes: Sentences for the run's view.
        prints: Fingerprints of the notebook's values for all names that the cell reads, but those that
            `NamespaceTracker.keep` names and the ranks have.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    before: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    stay: frozenset[str]
    notes: tuple[str, ...]
    prints: Mapping[str, Fingerprint]


class Effects(msgspec.Struct, frozen=True):
    """How a cell may change the ranks' names.

    Args:
        stored: Names that it may set; None if that can't be determined.
        deleted: Names that it may delete.
        later: Names that the functions which it defines read when a later cell calls them.
        mentioned: Names that it reads or sets, whose values may contain such functions afterwards.
    """

    stored: frozenset[str] | None = frozenset()
    deleted: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()


def effects_of(names: CellNames, namespace: Mapping[str, object]) -> Effects:
    """Return what a cell with these names may change."""
    stored = names.stored or frozenset[str]()
    read = frozenset(name for name in names.read if not _is_without_functions(name, namespace))
    return Effects(names.stored, names.deleted, names.later, read.union(stored) - names.imported)


def _is_without_functions(name: str, namespace: Mapping[str, object]) -> bool:
    """Whether a name's value can't come to contain a function of a cell: modules, numbers, texts, builtins."""
    if name not in namespace:
        return name in RANK_NAMES or hasattr(builtins, name)
    return isinstance(namespace[name], ModuleType | int | float | complex | str | bytes | None)


class NamespaceTracker:
    """Records which names the ranks of one session have, and with which values. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, _Held]] = {}
        self._noted: set[str] = set()
        self._slow: set[str] = set()
        self._kept: set[str] = set()
        # by name on the ranks: the names that functions in its value read
        self._read_later: dict[str, frozenset[str]] = {}
        self._memory: MemoryDigests | None = None
        self._ended = False
        self._lock = threading.RLock()

    def plan(
        self,
        names: Collection[str],
        namespace: dict[str, object],
        ranks: tuple[int, ...],
        exclude: Collection[str] = (),
        *,
        absent: Iterable[str] = (),
        comparison: Comparison | None = None,
    ) -> ShippingPlan:
        """Decide which names to send for a cell.

        Args:
            names: Names of the notebook that the cell reads.
            namespace: The notebook's namespace.
            ranks: The ranks that run the cell.
            exclude: Names that are not sent.
            absent: Further names that the cell reads; the ranks may have them.
            comparison: Reports progress if it takes long.
        """
        comparison = comparison or Comparison("", None)
        prints, kept = self._inspect(names, absent, namespace, ranks, exclude, comparison)
        slow, about_time = comparison.end(self._slow)
        with self._lock:
            self._slow.update(slow)
            lacking = {name: self._lacking(name, print_.digest, ranks) for name, print_ in prints.items()}
            notes = self._with_what_they_share(lacking, prints, ranks)
            notes += self._own_values(lacking, namespace, ranks)
            notes += [about_time] if about_time else []
        for print_ in prints.values():
            print_.forget_parts()
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, some in lacking.items():
            groups.setdefault(some, []).append(name)
        whole = tuple(groups.pop(ranks, ()))
        stay = kept.union(name for group in groups.values() for name in group)
        groups.pop((), None)
        before = tuple((some, tuple(group)) for some, group in groups.items())
        return ShippingPlan(ranks, whole, before, stay, tuple(notes), prints)

    def record_sent(self, names: Iterable[str], prints: Mapping[str, Fingerprint], ranks: Iterable[int]) -> None:
        """Record that the ranks receive the notebook's values of these names."""
        with self._lock:
            for name in names:
                if name in prints:
                    self._set(name, ranks, _Held(prints[name].digest, own=False))
                if not any(held.own for held in self._held.get(name, {}).values()):
                    self._noted.discard(name)

    def record_not_arrived(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """Record that sent names did not arrive."""
        with self._lock:
            for name in names:
                self._drop(name, ranks)

    def record_started(self, effects: Effects, plan: ShippingPlan, namespace: dict[str, object]) -> Assigned:
        """Record the start of a cell that no caller waits for: later cells find the names that it sets on the ranks.

        Returns:
            A record to undo that.
        """
        older = {name: self._digest(name, plan.prints, namespace) for name in effects.stored or ()}
        with self._lock:
            self._note_reads(effects, effects.stored or ())
            before = {name: dict(self._held.get(name, {})) for name in older}
            for name, digest in older.items():
                self._set(name, plan.ranks, _Held(digest, own=True))
        return before

    def undo_started(self, before: Assigned) -> None:
        """Undo `record_started` for a cell that never started."""
        with self._lock:
            self._held.update({name: dict(held) for name, held in before.items()})

    def record_ended(
        self, effects: Effects, plan: ShippingPlan, namespace: dict[str, object], *, succeeded: bool, names_of: NamesOf
    ) -> None:
        """Record that a cell has run: the names that it set have the ranks' own values.

        Args:
            effects: How the cell may have changed names.
            plan: The plan of the cell.
            namespace: The notebook's namespace, whose values are older than those that the cell set.
            succeeded: Whether the cell succeeded; if not, a rank is asked which names it has.
            names_of: Asks a rank for its names.
        """
        stored, deleted = effects.stored, effects.deleted
        called = frozenset[str]().union(*(print_.stores for print_ in plan.prints.values()))
        if stored is None or not succeeded or called:
            there, known = names_of(plan.ranks[0]), self._names()
            if stored is None:
                stored, deleted = (
                    (frozenset[str](), frozenset[str]()) if there is None else (there - known, known - there)
                )
            stored |= called
            if there is not None:
                stored, deleted = stored & there, (deleted | stored) - there
        older = {name: self._digest(name, plan.prints, namespace) for name in stored}
        with self._lock:
            self._note_reads(effects, stored)
            for name in deleted:
                self._drop(name, plan.ranks)
            for name, digest in older.items():
                self._set(name, plan.ranks, _Held(digest, own=True))

    def assigned(self, names: Iterable[str]) -> Assigned:
        """Record that the notebook rebinds these names, so its values are newer. Return a record to undo that."""
        with self._lock:
            self._noted.difference_update(names)
            return {name: self._held.pop(name) for name in names if name in self._held and name not in self._kept}

    def not_assigned(self, before: Assigned) -> None:
        """Undo `assigned` for a cell that failed and may not have rebound the names: their digests decide then."""
        with self._lock:
            self._held = {**before, **self._held}

    def set_on_ranks(
        self, names: Iterable[str], namespace: dict[str, object], ranks: Iterable[int], *, pushed: bool = False
    ) -> None:
        """Record that the ranks have their own values, or that the notebook has received theirs: its are not newer."""
        older = {name: self._digest(name, {}, namespace) for name in names}
        with self._lock:
            for name, digest in older.items():
                self._set(name, ranks, _Held(digest, own=True, pushed=pushed))
                self._noted.add(name)

    def pushed_names(self, ranks: Collection[int]) -> dict[int, list[str]]:
        """Return the names pushed to these ranks that another rank also has, by that rank."""
        found: dict[int, list[str]] = {}
        with self._lock:
            for name, held in self._held.items():
                others = sorted(rank for rank in held if rank not in ranks and held[rank].pushed)
                if others and any(held[rank].pushed for rank in ranks if rank in held):
                    found.setdefault(others[0], []).append(name)
        return found

    def restarted(self, ranks: Collection[int]) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Forget the names of these ranks; return those that the notebook had sent, with the ranks to send them to."""
        groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        with self._lock:
            # names that were noted as the ranks' own may be noted again: some ranks now get the notebook's value
            self._noted -= self.own_names(ranks)
            for rank in ranks:
                shipped = [name for name, held in self._held.items() if rank in held and not held[rank].own]
                groups[tuple(shipped)] = (*groups.get(tuple(shipped), ()), rank)
                for name in list(self._held):
                    self._drop(name, (rank,))
        groups.pop((), None)
        return groups

    def keep(self, names: Iterable[str]) -> None:
        """Stop comparing these names, and stop sending them to ranks that have them."""
        with self._lock:
            self._kept.update(names)

    def unkeep(self, names: Collection[str] = ()) -> None:
        """Undo `keep` for these names, or for all: the notebook's value is sent with the next cell that reads one."""
        with self._lock:
            for name in self._kept.intersection(names or self._kept):
                self._kept.discard(name)
                self._held.pop(name, None)

    def ended(self) -> None:
        """Record that the session has ended: the notebook's memory is no longer tracked for it."""
        self._ended, self._memory = True, None

    def unknown(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of `names` that no rank is known to have."""
        return names - self._names()

    def own_names(self, ranks: Collection[int]) -> frozenset[str]:
        """Return the names for which at least one of these ranks has its own value."""
        with self._lock:
            return frozenset(
                name for name, held in self._held.items() if any(held[rank].own for rank in ranks if rank in held)
            )

    # ------------------------------------------------------------ internals

    def _inspect(
        self,
        names: Collection[str],
        absent: Iterable[str],
        namespace: dict[str, object],
        ranks: tuple[int, ...],
        exclude: Collection[str],
        comparison: Comparison,
    ) -> tuple[dict[str, Fingerprint], frozenset[str]]:
        """Examine names and those that their functions read, here and on the ranks; arguments as for `plan`.

        Returns:
            Their fingerprints, and the names that are not compared because the ranks keep their values.
        """
        prints: dict[str, Fingerprint] = {}
        kept: set[str] = set()
        seen: set[str] = set()
        asked = frozenset(names)
        waiting = [*names, *absent]
        while waiting:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            # functions that cells have defined on the ranks read the notebook's names too
            waiting += sorted(self._read_later.get(name, ()))
            if name in exclude or name not in namespace or (name not in asked and is_ipythons(name, namespace[name])):
                continue
            is_kept = name in self._kept
            if is_kept and all(rank in self._held.get(name, {}) for rank in ranks):
                kept.add(name)
                continue
            comparison.name(name)
            memory = self._memory_digests()
            print_ = Fingerprint(namespace[name], namespace, memory, comparison.hashed, content=not is_kept)
            prints[name] = print_
            waiting += [*print_.needs, *sorted(print_.absent)]
        return prints, frozenset(kept)

    def _memory_digests(self) -> MemoryDigests | None:
        if self._memory is None and not self._ended:
            self._memory = shared_digests()
        return self._memory

    def _note_reads(self, effects: Effects, stored: Iterable[str]) -> None:
        """Record what functions in the cell's values read: those that it defines, and those that it has found there."""
        reached = effects.later.union(name for name in effects.mentioned if name in self._read_later)
        for name in effects.mentioned.union(stored) if reached else ():
            self._read_later[name] = self._read_later.get(name, frozenset()) | reached

    def _digest(self, name: str, prints: Mapping[str, Fingerprint], namespace: dict[str, object]) -> bytes | None:
        if name in prints:
            return prints[name].digest
        if name in self._kept or self._ended:
            return None
        if name not in namespace:
            return _ABSENT
        return Fingerprint(namespace[name], namespace, self._memory_digests()).digest

    def _lacking(self, name: str, digest: bytes | None, ranks: tuple[int, ...]) -> tuple[int, ...]:
        held = self._held.get(name, {})
        if name in self._kept:
            return tuple(rank for rank in ranks if rank not in held)
        return tuple(rank for rank in ranks if rank not in held or held[rank].digest != digest)

    def _with_what_they_share(
        self, lacking: dict[str, tuple[int, ...]], prints: Mapping[str, Fingerprint], ranks: tuple[int, ...]
    ) -> list[str]:
        """Also send names that share objects with sent ones, such as an optimizer's model, to keep them shared."""
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
        """Return a warning, once per name, if the ranks or some of them have another value than the notebook."""
        notes: list[str] = []
        for name, some in lacking.items():
            held = self._held.get(name, {})
            own = tuple(rank for rank in ranks if rank in held and held[rank].own and rank not in some)
            if not own or name in self._noted or isinstance(namespace.get(name), ModuleType):
                continue
            self._noted.add(name)
            new = format_ranks(some)
            notes.append(
                f"`{name}` differs between ranks: {new} got the notebook's value, {format_ranks(own)} kept what "
                f"was set there. Run the cell that sets it on {new} too, or send the notebook's value to all with "
                f"%sgpu_push {name}"
                if some
                else f"`{name}` keeps the ranks' value, which a cell set there; the notebook has another: assign it "
                f"again, or %sgpu_push {name}, to ship that"
            )
        return list(map(as_warning, notes))

    def _set(self, name: str, ranks: Iterable[int], held: _Held) -> None:
        self._held.setdefault(name, {}).update(dict.fromkeys(ranks, held))

    def _drop(self, name: str, ranks: Iterable[int]) -> None:
        held = self._held.get(name, {})
        for rank in ranks:
            held.pop(rank, None)

    def _names(self) -> frozenset[str]:
        with self._lock:
            return frozenset(name for name, held in self._held.items() if held)
