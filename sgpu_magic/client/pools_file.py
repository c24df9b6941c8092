"""The list of remote pools that a user may use: `pools.toml`, beside the settings file.

    [team]
    address = "tcp://gpu1.example.org:8700"
    key = "…the pool's public key, 40 characters…"
    reserved = true
    types = ["a10", "h100"]
    prices = {a10 = 1.2, h100 = 3.9}

    [box]
    address = "ssh://me@gpubox"
    python = "/opt/conda/bin/python"

`sgpu pool add` and `remove` edit the file and keep comments and formatting.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from sgpu_magic.config import config_path
from sgpu_magic.config.pool_terms import prices_text, read_prices
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import read_trusted, write_whole
from sgpu_magic.files.locks import locked
from sgpu_magic.ssh.address import SshAddress, parse_addresses
from sgpu_magic.wire.costs import Prices
from sgpu_magic.wire.decoding import decode_toml
from sgpu_magic.wire.devices import ANY, canonical_type

LOCAL = "local"
"""Name of the local pool, which is not in the file."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_ADDRESS = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
# Z85, ZeroMQ's encoding of keys
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_KNOWN = ("address", "key", "reserved", "types", "prices", "python", "prologue", "wheels", "same_files")
_OF_SSH = ("python", "prologue", "wheels", "same_files")
# header of a pool's table, or of a table within it
_HEADER = re.compile(r"\s*\[\[?\s*(?P<name>[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*[.\]]")
_BEGINS = "# The pools of `--pool`; `sgpu pool add` and `sgpu pool remove` write this file; you can edit it too.\n"


class PoolEntry(msgspec.Struct, frozen=True):
    """A remote pool that a user may use.

    Args:
        name: The name that `--pool` takes.
        address: `tcp://host:port` of a served pool, or `ssh://[user@]host[:port]` of a machine to log in to; several
            machines are separated by commas, `ssh://a,b,node[1-4]`.
        key: The public CURVE key of a served pool in Z85, 40 characters; "" for ssh.
        reserved: Whether its devices are paid for in any case; otherwise they are on demand.
        types: Canonical device types of the pool, including `cpu` if it accepts such runs; empty if not stated.
        prices: Price of one device per hour by canonical type, in the currency of the settings.
        python: For ssh: path of the Python there that has torch; "" for one that is found.
        prologue: For ssh: shell commands to run there before anything else, such as `module load`.
        wheels: For ssh: a folder here with wheels for a machine without a network; "" for none.
        same_files: For ssh: it has this machine's files and Pythons at the same paths, so runs use the kernel's Python.
    """

    name: str
    address: str
    key: str
    reserved: bool = False
    types: tuple[str, ...] = ()
    prices: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    python: str = ""
    prologue: str = ""
    wheels: str = ""
    same_files: bool = False

    @property
    def ssh(self) -> SshAddress | None:
        """Where to log in, on the first of several machines; None for a served pool."""
        return next(iter(self.machines), None)

    @property
    def machines(self) -> tuple[SshAddress, ...]:
        """Where to log in on each machine; () for a served pool."""
        return parse_addresses(self.address)

    @property
    def kind(self) -> str:
        return "reserved" if self.reserved else "on demand"


def pools_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the file: `SGPU_POOLS_FILE`, else beside `config.toml`."""
    environ = os.environ if environ is None else environ
    own = environ.get("SGPU_POOLS_FILE", "")
    return Path(own) if own else config_path(environ).parent / "pools.toml"


def read_pools(path: Path | None = None) -> tuple[PoolEntry, ...]:
    """Return the pools of the file in order; none if there is no file.

    Args:
        path: The file; None means `pools_path()`.

    Raises:
        UsageError: The file can't be read, other users may write it, or an entry is invalid; names the line or pool.
    """
    path = pools_path() if path is None else path
    return parse(read_text(path), path)


def unknown_pool(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that no pool has."""
    names = [LOCAL, *(each for each in known if each != LOCAL)]
    others = f"You have: {', '.join(names)}. `sgpu pool add` lists another one."
    return UsageError.of_unknown_name(f"there is no pool named `{name[:40]}`.", name, names, otherwise=others, most=2)


def default_pool(setting: str, entries: Sequence[PoolEntry]) -> str:
    """Return the default pool's name, without knowledge of requested types or free devices.

    Args:
        setting: The setting `pool`.
        entries: The pools of the file.
    """
    kinds = {"reserved": (True,), "on-demand": (False,), "": (True, False)}
    if setting not in kinds:
        return setting
    found = [entry.name for reserved in kinds[setting] for entry in entries if entry.reserved == reserved]
    return found[0] if found else LOCAL


def new_entry(
    name: str,
    address: str,
    key: str,
    *,
    reserved: bool = False,
    types: str = "",
    prices: str = "",
    python: str = "",
    prologue: str = "",
    wheels: str = "",
    same_files: bool = False,
) -> PoolEntry:
    """Return a pool entry from the options of a command line.

    Args:
        name: The name for `--pool`.
        address: `tcp://host:port`, or `ssh://[user@]host[:port]`.
        key: A served pool's public key; "" for ssh.
        reserved: Whether it is a reserved pool.
        types: Device types, such as `a10,h100`.
        prices: Prices per hour, such as `a10=1.20,h100=4.50`.
        python: As in `PoolEntry`.
        prologue: As in `PoolEntry`.
        wheels: As in `PoolEntry`.
        same_files: As in `PoolEntry`.

    Raises:
        UsageError: One of them is invalid.
    """
    table: dict[str, object] = {"address": address, "reserved": reserved}
    given = {"key": key, "python": python, "prologue": prologue, "wheels": wheels, "same_files": same_files}
    table |= {name: value for name, value in given.items() if value}
    table["types"] = [kind.strip() for kind in types.split(",") if kind.strip()]
    try:
        table["prices"] = _by_type(read_prices(prices))
        return _entry(name, table)
    except ValueError as error:
        raise UsageError(f"the pool {name[:40]!r} can't be added: {error}.") from None


# ---------------------------------------------------------------- reading


def read_text(path: Path) -> str:
    """Return the file's text, "" if there is no file.

    Raises:
        UsageError: The file can't be read, or other users may write it.
    """
    return read_trusted(
        path,
        "the list of pools",
        f"{path} is writable by other users, who could send your runs to a pool of theirs, so it is not "
        f"read. Make it private: chmod 600 {path} (and check who owns it).",
    )


def parse(text: str, path: Path) -> tuple[PoolEntry, ...]:
    """Parse the text of a pools file; `path` is used in error messages.

    Raises:
        UsageError: The text is not valid; names the line or pool.
    """
    try:
        tables = decode_toml(text)
    except msgspec.DecodeError as error:
        # the error names the line
        raise UsageError(f"the list of pools {path} can't be read: {error}. Fix it or move it away.") from None
    found: list[PoolEntry] = []
    for name, table in tables.items():
        try:
            if not isinstance(table, dict):
                raise ValueError(f"it is {table!r}, but a table [{name}] with address and key is needed")
            found.append(_entry(name, cast("dict[str, object]", table)))
        except ValueError as error:
            raise UsageError(
                f"the pool {name[:40]!r} in {path} ({_location_of(text, name)}) can't be used: {error}. Fix it there, "
                f"or delete its lines and add it again with `sgpu pool add`."
            ) from None
    return tuple(found)


def _entry(name: str, table: Mapping[str, object]) -> PoolEntry:
    """Return a checked pool entry; raises ValueError if a value is invalid."""
    if _NAME.fullmatch(name) is None:
        raise ValueError("a pool's name begins with a letter and has at most 40 letters, digits, - and _")
    if name.lower() in ("reserved", "on-demand"):
        raise ValueError(f"`--pool {name.lower()}` means any pool of that kind; choose another name")
    if name.lower() == LOCAL:
        raise ValueError(f"{LOCAL!r} is the name of this machine's own pool; choose another name")
    if unknown := sorted(table.keys() - set(_KNOWN)):
        raise ValueError(f"{unknown[0]!r} is not a field of a pool; the fields are {', '.join(_KNOWN)}")
    address, key, reserved = table.get("address"), table.get("key"), table.get("reserved", False)
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    is_ssh = isinstance(address, str) and bool(parse_addresses(address))
    if not is_ssh and (match is None or not 0 < int(match["port"]) < 65536):
        raise ValueError(
            f"its address is {address!r}; one such as 'ssh://gpubox' or 'tcp://gpu1.example.org:8700' is needed"
        )
    if is_ssh and key is not None:
        raise ValueError("it has a key, and over ssh there is none: you are who you log in as")
    if not is_ssh and (extra := [name for name in _OF_SSH if name in table]):
        raise ValueError(f"{extra[0]} is only for an address that begins with ssh://")
    if not is_ssh and (not isinstance(key, str) or _KEY.fullmatch(key) is None):
        state = "missing" if key is None else "invalid"
        raise ValueError(f"its key is {state}: 40 characters, which `sgpu pool serve` prints, are needed (quote them)")
    same_files = table.get("same_files", False)
    for field, value in (("reserved", reserved), ("same_files", same_files)):
        if not isinstance(value, bool):
            raise ValueError(f"{field} is {value!r}; true or false is needed")
    python, prologue, wheels = (_text_of(table, field) for field in ("python", "prologue", "wheels"))
    types, prices = _types(table.get("types", [])), _prices(table.get("prices"))
    return PoolEntry(
        name, str(address), str(key or ""), bool(reserved), types, prices, python, prologue, wheels, bool(same_files)
    )


def _text_of(table: Mapping[str, object], name: str) -> str:
    value = table.get(name, "")
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name} is {value!r}; a text is needed")
    return value


def _types(listed: object) -> tuple[str, ...]:
    if not isinstance(listed, list):
        raise ValueError(f"types is {listed!r}; a list such as ['a10', 'h100'] is needed")
    types = tuple(dict.fromkeys(canonical_type(str(each)) for each in cast("list[object]", listed)))
    if ANY in types:
        raise ValueError(f"{ANY!r} is not a device type; list each type, or leave types out")
    return types


def _prices(table: object) -> dict[str, float]:
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ValueError(f"prices is {table!r}; a table such as {{a10 = 1.2}} is needed")
    return _by_type(read_prices(prices_text(cast("dict[str, object]", table))))


def _by_type(prices: Prices) -> dict[str, float]:
    for pool, kind in prices.hourly:
        if pool:
            raise ValueError(
                f"the price '{pool}/{kind}' names a pool, but these prices are of this one: write {kind!r}"
            )
    return {kind: price for (_, kind), price in prices.hourly.items()}


def _location_of(text: str, name: str) -> str:
    """Return the line where the table or value of that name begins, `line 3`, else `the file`."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.partition("#")[0].strip().strip("[]").strip(" \"'") == name or line.split("=")[0].strip() == name:
            return f"line {number}"
    return "the file"


# ---------------------------------------------------------------- adding and removing pools


def add_pool(entry: PoolEntry, path: Path | None = None, *, replace: bool = False) -> None:
    """Add a pool to the file.

    Args:
        entry: The pool.
        path: The file; None means `pools_path()`.
        replace: Replace a pool of the same name.

    Raises:
        UsageError: There is a pool of that name, or the file can't be read or written.
    """
    path = pools_path() if path is None else path

    def change(text: str) -> str:
        if any(each.name == entry.name for each in parse(text, path)):
            if not replace:
                raise UsageError(
                    f"a pool named {entry.name!r} is already in {path}. Remove it with `sgpu pool remove "
                    f"{entry.name}`, or give the new one another name."
                )
            text = _without(text, entry.name)
        text = text.rstrip("\n") + "\n\n" if text.strip() else _BEGINS + "\n"
        return text + _table(entry)

    _changed(path, change)


def remove_pool(name: str, path: Path | None = None) -> PoolEntry:
    """Remove a pool from the file and return its entry.

    Raises:
        UsageError: There is no pool of that name, or the file can't be read or written.
    """
    path = pools_path() if path is None else path
    removed: list[PoolEntry] = []

    def change(text: str) -> str:
        entries = parse(text, path)
        removed.extend(entry for entry in entries if entry.name == name)
        if name == LOCAL:
            raise UsageError("the local pool is this machine's own and can't be removed; `sgpu pool stop` ends it.")
        if not removed:
            raise unknown_pool(name, [entry.name for entry in entries])
        return _without(text, name)

    _changed(path, change)
    return removed[0]


# ---------------------------------------------------------------- internals


def _table(entry: PoolEntry) -> str:
    prices = ", ".join(f"{json.dumps(kind)} = {price!r}" for kind, price in entry.prices.items())
    values = {
        "address": json.dumps(entry.address),
        "key": json.dumps(entry.key) if entry.key else "",
        "reserved": "true" if entry.reserved else "",
        "types": json.dumps(entry.types) if entry.types else "",
        "prices": f"{{{prices}}}" if prices else "",
        "python": json.dumps(entry.python) if entry.python else "",
        "prologue": json.dumps(entry.prologue) if entry.prologue else "",
        "wheels": json.dumps(entry.wheels) if entry.wheels else "",
        "same_files": "true" if entry.same_files else "",
    }
    return f"[{entry.name}]\n" + "".join(f"{name} = {value}\n" for name, value in values.items() if value)


def _without(text: str, name: str) -> str:
    """Return the text without a pool's tables; comments above the next table are kept."""
    kept: list[str] = []
    dropping = False
    for line in text.splitlines(keepends=True):
        if (header := _HEADER.match(line)) is not None:
            dropping = header["name"].strip("\"'") == name
        elif dropping and line.lstrip().startswith("#"):
            # a comment below the values belongs to the next table
            dropping = False
            kept.append("\n")
        if not dropping:
            kept.append(line)
    return "".join(kept)


def _changed(path: Path, change: Callable[[str], str]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # the lock keeps concurrent writers from losing each other's pools
        with locked(path.parent):
            old = read_text(path)
            new = change(old)
            before = {entry.name for entry in parse(old, path)}
            after = {entry.name for entry in parse(new, path)}
            if len(before ^ after) > 1:
                raise UsageError(f"{path} has a layout that can't be changed by a command. Edit it by hand.")
            # a symbolic link is kept and its target replaced
            write_whole(path.resolve(), new.encode())
    except OSError as error:
        raise UsageError(f"the list of pools {path} can't be written: {error}.") from error
