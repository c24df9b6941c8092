"""Pickled values that an older version of their package can't read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


class _NewPickles(msgspec.Struct, frozen=True):
    """Pickled values of a package that its versions before `since` can't read.

    Args:
        package: The package, by normalised name; also the name of its module.
        since: The first version that pickles them like this.
        references: Matches a pickled reference to such a value, `module:name`, from its beginning.
        what: The values, for the user.
    """

    package: str
    since: str
    references: re.Pattern[str]
    what: str


# Found by pickling with the newer version and unpickling with the older one: NumPy 2.4 and 1.26, pandas 3.0 and 2.2.
# NumPy 1.26 has a few modules of `numpy._core` for this purpose. Arrays and generators of random numbers are pickled by
# this package, for all versions
_NEW_PICKLES = (
    _NewPickles(
        "numpy",
        "2",
        re.compile(
            r"numpy\.(rec|char|strings|_core\.(?!(multiarray|_multiarray_umath|_internal|_dtype|_dtype_ctypes):)\w+)\b"
            r"|numpy\._core\._internal:_convert_to_stringdtype_kwargs"
        ),
        "record arrays, arrays of StringDType, and what lies in NumPy's private modules",
    ),
    _NewPickles("pandas", "3", re.compile(r"pandas\.arrays:"), "columns and column names of text"),
)


def find_unreadable(
    references: Iterable[tuple[str, str]], here: Callable[[str], str], there: Callable[[str], SpecifierSet]
) -> Iterator[tuple[str, str, SpecifierSet]]:
    """Yield the packages whose pickled values an older version on the ranks can't read.

    Args:
        references: Pairs of a module and a name in it that the values refer to.
        here: Returns the version that pickles, by package; "" if unknown.
        there: Returns the versions that the ranks may have, by package; all if that is unknown.

    Yields:
        The package, what can't be read, and the versions that the ranks may have.
    """
    named = [f"{module}:{name}" for module, name in references]
    for each in _NEW_PICKLES:
        if not any(map(each.references.match, named)):
            continue
        own, allowed = _parsed(here(each.package)), there(each.package)
        if own is None or own < Version(each.since):
            continue
        newer = (str(own), each.since, f"{each.since}.9999")
        if not any(allowed.contains(version, prereleases=True) for version in newer):
            yield each.package, each.what, allowed


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None
