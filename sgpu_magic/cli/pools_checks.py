"""Pools of other machines: their list, this user's key, and whether each answers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from sgpu_magic import __version__
from sgpu_magic.cli.finding import Finding, ok, problem, warning
from sgpu_magic.client.keys import own_key_path
from sgpu_magic.client.pool_choosing import has_words
from sgpu_magic.client.pools import Asked, Pools
from sgpu_magic.client.pools_file import pools_path, read_pools
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.system.secure_sockets import read_key_pair

# label selectors of placement groups
_OLDEST_RAY = Version("2.50")


def listed_pools(settings: Settings) -> Iterator[Finding]:
    """The list and the key where there is a list, and what each pool of it says; takes 2 s at most."""
    try:
        entries = read_pools()
    except UsageError as error:
        what, _, remedy = error.message.rpartition(". ")
        yield problem("pools", what or error.message, remedy if what else f"Mend {pools_path()}.")
        return
    if not entries:
        return
    yield from _key()
    pools = Pools(settings)
    try:
        for answer in pools.asked(entries, local=False, again=True):
            yield _said(answer)
    finally:
        pools.close()


def ray_version() -> Iterator[Finding]:
    """Whether the Ray that is installed is one that pools can be on; nothing where there is none."""
    try:
        found = Version(importlib.metadata.version("ray"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return
    if found < _OLDEST_RAY:
        remedy = 'Only `sgpu pool serve --engine ray` and `@ray_launch` need it: pip install -U "sgpu-magic[ray]"'
        yield warning("ray", f"{found} is older than {_OLDEST_RAY}, which pools on Ray need", remedy)
    else:
        yield ok("ray", str(found))


def _key() -> Iterator[Finding]:
    path = own_key_path()
    try:
        read_key_pair(path)
    except FileNotFoundError:
        remedy = "`sgpu pool keygen` makes one; send its public half to who runs the pools."
        yield problem("key", f"there is none ({path}), and pools of other machines admit listed keys only", remedy)
    except UsageError as error:
        what, _, remedy = error.message.rpartition(". ")
        yield problem("key", what or error.message, remedy if what else "`sgpu pool keygen` makes another one.")
    else:
        yield ok("key", str(path))


def _said(answer: Asked) -> Finding:
    name = f"pool {answer.name}"[:20]
    status = answer.status
    if status is None:
        what, _, remedy = answer.problem.partition(". ")
        return problem(name, what.rstrip("."), remedy or "See whether it runs, and whether its address is right.")
    text = f"{answer.entry.address if answer.entry else ''} has {has_words(status)}"
    if status.package_version != __version__:
        remedy = "They understand each other as long as nothing is refused; the same version on both sides is best."
        return warning(name, f"{text}, but is sgpu-magic {status.package_version} and here is {__version__}", remedy)
    return ok(name, text)
