"""What `%load_ext` registers before the rest is imported."""

from __future__ import annotations

from sgpu_magic import magics
from sgpu_magic.magics.run_magics import DistributedMagics
from sgpu_magic.magics.session_magics import SessionMagics


def test_all_magics_are_named():
    for kind, names in magics.NAMES.items():
        owners = (DistributedMagics, SessionMagics)
        assert sorted(names) == sorted(name for owner in owners for name in owner.magics[kind])
