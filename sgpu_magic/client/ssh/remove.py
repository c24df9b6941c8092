"""`python -m sgpu_magic.client.ssh.remove MARK keep machine`: removes from this machine what logins have left there.

Ends the machine's pool unless it is in use, then removes its sockets, caches and environments, and the environments
that logins have made. The records of runs stay if there are any; with `all` in place of `keep` they go too. One word
more names the pool of several machines, of which this is the first: it is removed before, and with `pool` in place of
`machine` nothing else is.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from sgpu_magic.client.connector import LocalConnector
from sgpu_magic.client.ssh.relay import machines_settings
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.files.node_cache import cache_root
from sgpu_magic.formatting import count_of
from sgpu_magic.ssh.far_end import FarEnd
from sgpu_magic.ssh.machines import AGENTS_FILE, from_word
from sgpu_magic.wire.base import is_valid_id

_OWN_NAMES = ("ssh", "sgpu", "sgpu-magic", "pools", "nodes")


def main() -> None:
    """Run as the far end of a login."""
    mark, which, scope, *words = sys.argv[1:]
    far = FarEnd(mark)
    try:
        settings = load_settings()
        pools = [machines_settings(settings, from_word(word)) for word in words]
        pools += [settings] if scope == "machine" else []
        for pool in pools:
            connector = LocalConnector(pool, on_lost=lambda: None, on_notice=lambda text: None, warms=False)
            if (pool.state_path / AGENTS_FILE).exists():
                # they may be there without a pool service, which finds them
                connector.get_link(start=True)
            connector.stop(force=False)
        kept = remove_pools(pools, records=which == "all")
        kept += remove_machine(settings, Path(sys.prefix)) if scope == "machine" else []
        far.say("done", " and ".join(kept))
    except SgpuError as error:
        far.say("failed", f"used {error.message}")


def remove_pools(pools: Sequence[Settings], *, records: bool) -> list[str]:
    """Remove what pools have left; none of them may run.

    Args:
        pools: Their settings.
        records: Also remove the records of runs.

    Returns:
        What was kept and why, in words.
    """
    runs = {pool.state_path: sum(is_valid_id(path.name) for path in _entries(pool.runs_path)) for pool in pools}
    kept = {} if records else {path: count for path, count in runs.items() if count}
    for pool in pools:
        _remove(pool.runtime_path)
        if not any(path.is_relative_to(pool.state_path) for path in kept):
            _remove(pool.state_path)
        for path in (pool.runtime_path, pool.state_path):
            _remove_empty(path.parent)
    return [
        f"the records of {count_of(count, 'run')} in {path}, which you can remove there" for path, count in kept.items()
    ]


def remove_machine(settings: Settings, environment: Path) -> list[str]:
    """Remove what all pools of this user share here; none of them may run.

    Args:
        settings: The user's settings.
        environment: The environment that a login has made, below whose folder there may be others.

    Returns:
        What was kept and why, in words.
    """
    used = list(_used(environment.parent, environment))
    gone = [settings.environments_path, cache_root(settings), settings.state_path / "nodes"]
    gone += [each for each in _entries(environment.parent) if each not in used]
    for path in gone:
        _remove(path)
    for path in (environment, *gone):
        _remove_empty(path.parent)
    names = ", ".join(each.name for each in used)
    return [f"{names}, which is in use, in {environment.parent}"] if used else []


def _used(folder: Path, own: Path) -> Iterator[Path]:
    """Yield the environments in a folder, except one, that a process was started from."""
    commands = [process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])]
    for each in _entries(folder):
        if each != own and any(words[0].startswith(f"{each}/") for words in commands):
            yield each


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_empty(folder: Path) -> None:
    """Remove a folder of ours in which nothing is left, and the one around it."""
    for path in (folder, folder.parent):
        if path.name in _OWN_NAMES or path.name.startswith("sgpu-"):
            with contextlib.suppress(OSError):
                path.rmdir()


if __name__ == "__main__":
    main()
