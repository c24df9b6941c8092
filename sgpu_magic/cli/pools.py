"""`sgpu pool` and `sgpu types`: the user's list of pools, their devices, and the local pool."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sgpu_magic.cli import status
from sgpu_magic.cli.json_form import address_of, kind_of, omitted_pools, reachability, text_or_none
from sgpu_magic.cli.json_records import (
    Money,
    PoolList,
    PoolReachability,
    PoolRow,
    TypeCountRow,
    TypeList,
    TypeRow,
    encode,
)
from sgpu_magic.cli.main import CommandParser, add_command, add_json, note
from sgpu_magic.client.connector import machine_of
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pool_choosing import PriceBook, counts, describe_devices, money_of
from sgpu_magic.client.pools import PATIENCE_S, Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, add_pool, new_entry, pools_path, read_pools, remove_pool
from sgpu_magic.client.ssh.transport import program_words
from sgpu_magic.client.this_machine import running_pool
from sgpu_magic.config import Settings, host_name, load_settings
from sgpu_magic.errors import PoolError, PoolIdle, SgpuError, UsageError
from sgpu_magic.formatting import format_money
from sgpu_magic.runs import pools_status
from sgpu_magic.ssh.config_hosts import config_hosts
from sgpu_magic.ssh.login import FarProgram, Login
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.devices import CPU, Device, interconnect_of, memory_bytes, memory_of, memory_text
from sgpu_magic.wire.pool_status import PoolStatus

# the first link needs a handshake, and perhaps a diagnosis of why it fails
_CHECK_S = 10.0
_MOST_HOSTS = 10
_REMOVE = "sgpu_magic.client.ssh.remove"
_STATE_TEXTS: Mapping[PoolReachability, str] = {
    "up": "up",
    "not running": "not running",
    "unreachable": "can't be reached",
}


def add(settings: Settings, entry: PoolEntry, *, check: bool, replace: bool = False) -> str:
    """Add a pool to the list and return a message.

    Args:
        settings: The user's settings.
        entry: The pool.
        check: Contact the pool first.
        replace: Replace a pool of the same name.

    Raises:
        PoolError: The pool can't be reached, has another key, or does not know the user's key. Nothing was written.
        UsageError: There is a pool of that name, or the file can't be written.
    """
    answer = "It was not contacted."
    if check:
        found = _checked(settings, entry)
        answer = f"It answers, and has {describe_devices(found)}."
        lacking = [kind for kind in entry.types if kind not in counts(found)]
        if lacking:
            answer += f" It has no {', '.join(lacking)} now, although --types names it."
    add_pool(entry, replace=replace)
    return f"the pool {entry.name} ({entry.kind}) is listed in {pools_path()}. {answer} `--pool {entry.name}` uses it."


def remove(settings: Settings, name: str, *, records: bool = False) -> str:
    """Remove a pool from the list, and what logins have left on a machine over ssh; return a message.

    Args:
        settings: The user's settings.
        name: The pool's name.
        records: Over ssh, also remove the records of its runs.

    Raises:
        UsageError: There is no pool of that name, or the file can't be written.
    """
    entries = {each.name: each for each in read_pools()}
    entry = entries.pop(name, None)
    if entry is None or not entry.machines:
        entry = remove_pool(name)
        return f"the pool {entry.name} ({entry.address}) is no longer listed. Its runs continue."
    others = {address for other in entries.values() for address in other.machines}
    left = [
        _clean_up(settings, entry, at, records=records, is_shared=address in others)
        for at, address in enumerate(entry.machines)
    ]
    remove_pool(name)
    return " ".join([f"the pool {name} ({entry.address}) is no longer listed.", *filter(None, left)])


def _clean_up(settings: Settings, entry: PoolEntry, at: int, *, records: bool, is_shared: bool) -> str:
    """Remove what logins have left on one machine of a pool; return a sentence about that.

    Args:
        settings: The user's settings.
        entry: The pool.
        at: The number of the machine in the list.
        records: Also remove the records of runs.
        is_shared: Whether another pool of the list has the machine too.
    """
    address = entry.machines[at]
    machine = machine_of(settings, entry, address)
    where = "its machine" if len(entry.machines) == 1 else address.name
    words = () if at else program_words(machine, entry.machines[1:])
    if is_shared and not words:
        return ""
    scope = "pool" if is_shared else "machine"
    program = FarProgram(_REMOVE, ("all" if records else "keep", scope, *words), prepares="again")
    try:
        login = Login(machine, program, _show_line)
    except PoolIdle:
        return f"Nothing of sgpu-magic is on {where}."
    except SgpuError as error:
        return f"{where[0].upper()}{where[1:]} stays as it is: {error.message}"
    kept = login.result
    login.close()
    return f"On {where} stay {kept}." if kept else f"Nothing of sgpu-magic is left on {where}."


def _show_line(word: str, text: str) -> None:
    if word == "step":
        note(text)


def pool_rows(settings: Settings) -> list[PoolRow]:
    """Return the pools and their current state. Takes 2 s at most.

    Raises:
        UsageError: The list can't be read.
    """
    return [
        PoolRow(
            name=answer.name,
            kind=kind_of(answer),
            address=address_of(answer),
            state=reachability(answer),
            problem=text_or_none(answer.problem),
            types=() if answer.status is None else _counts(answer.status),
        )
        for answer in _all(settings, "")
    ]


def _counts(status: PoolStatus) -> tuple[TypeCountRow, ...]:
    return tuple(TypeCountRow(type=kind, free=each.free, total=each.total) for kind, each in counts(status).items())


def suggested_hosts(settings: Settings) -> tuple[str, ...]:
    """Return the hosts of the user's ssh configuration that are no pool yet."""
    listed = {address.host for entry in read_pools() for address in entry.machines}
    return tuple(host for host in config_hosts(settings.ssh_command) if host not in listed)


def pools_table(pools: Sequence[PoolRow], hosts: Sequence[str] = ()) -> str:
    """Return pools as a table, below it why some can't be reached, and hosts that could be pools."""
    rows = [("pool", "kind", "address", "now", "free/total")]
    for pool in pools:
        free = ", ".join(f"{each.free}/{each.total} {each.type}" for each in pool.types)
        rows.append((pool.name, _kind_text(pool.kind), pool.address or "", _STATE_TEXTS[pool.state], free))
    lines = aligned(rows)
    lines += [f"{pool.name}: {pool.problem}" for pool in pools if pool.problem]
    if hosts:
        shown = ", ".join(hosts[:_MOST_HOSTS])
        if len(hosts) > _MOST_HOSTS:
            shown += f" and {len(hosts) - _MOST_HOSTS} more"
        lines.append(f"hosts of your ssh configuration: {shown}. `sgpu pool add NAME ssh://HOST` adds one.")
    return "\n".join(lines)


def _kind_text(kind: str) -> str:
    return "this machine" if kind == LOCAL else kind


def type_list(settings: Settings, name: str = "") -> tuple[list[TypeRow], list[PoolStatusReply]]:
    """Return the device types of the pools, and the answers of pools that have none. Takes 2 s at most.

    Args:
        settings: The user's settings.
        name: Only this pool; "" for all.

    Raises:
        SgpuError: The named pool can't be reached, or there is none of that name.
    """
    answers = _all(settings, name)
    money = money_of(settings)
    rows = [row for answer in answers if answer.status is not None for row in _type_rows(answer, answer.status, money)]
    return rows, [answer for answer in answers if answer.status is None]


def types_table(types: Sequence[TypeRow], silent: Sequence[PoolStatusReply]) -> str:
    """Return device types as a table, and below it why pools have none."""
    rows = [("pool", "type", "memory", "interconnect", "free/total", "nodes", "largest node", "an hour", "")]
    for row in types:
        price = row.hourly_price
        cost = "" if price is None else format_money(price.amount, price.currency)
        interconnect = "/".join(sorted(each or "?" for each in row.interconnects))
        free = f"{row.free}/{row.total}"
        spread = (str(row.nodes), str(row.largest_node))
        rows.append(
            (row.pool, row.type, _memory_text(row.memory_bytes), interconnect, free, *spread, cost, _remark(row))
        )
    lines = aligned(rows, right=(2, 4, 5, 6, 7)) if types else []
    return "\n".join([*lines, *(f"{answer.name}: {answer.problem or pools_status.NOT_RUNNING}" for answer in silent)])


def _all(settings: Settings, name: str) -> list[PoolStatusReply]:
    with closing(Pools(settings)) as pools:
        # with `recent` of 1 or more the status includes the active runs, which show which devices are free
        return pools_status.ask(pools, name, start=False, recent=1)


def _checked(settings: Settings, entry: PoolEntry) -> PoolStatus:
    try:
        with closing(Pool(settings, _show_step, entry)) as pool:
            found = pool.status(1, timeout_s=_CHECK_S)
    except SgpuError as error:
        raise PoolError(f"{error.message} Nothing was written; --no-check adds it anyway.") from None
    if found is None:
        raise PoolError(f"the pool {entry.name} did not answer within {PATIENCE_S:g} s. Nothing was written.")
    return found


def _show_step(text: str) -> None:
    """Show a step of a first login."""
    if text:
        note(text)


def _type_rows(answer: PoolStatusReply, status: PoolStatus, money: PriceBook) -> list[TypeRow]:
    rows: list[TypeRow] = []
    for kind, count in counts(status).items():
        price = money.price_of(answer.entry, kind)
        nodes, largest = _spread(status, kind)
        devices = [device for device in status.inventory.devices if device.type == kind]
        rows.append(
            TypeRow(
                pool=answer.name,
                kind=kind_of(answer),
                type=kind,
                memory_bytes=() if kind == CPU else _memory_sizes(devices, kind),
                interconnects=() if kind == CPU else _interconnects(devices, kind),
                free=count.free,
                total=count.total,
                existing=count.total if kind == CPU else len(devices),
                nodes=nodes,
                largest_node=largest,
                hourly_price=None if price is None else Money(amount=price, currency=money.currency),
                simulated=any(device.simulated for device in devices),
            )
        )
    return rows


def _spread(status: PoolStatus, kind: str) -> tuple[int, int]:
    """Return the number of nodes that have a type, and the most devices of it on one node."""
    inventory = status.inventory
    if kind == CPU:
        slots = [node.cpu_slots for node in inventory.nodes if node.cpu_slots] or [inventory.cpu_slots]
        return len(slots), max(slots)
    by_node = Counter(device.node for device in inventory.devices if device.type == kind)
    return len(by_node), max(by_node.values(), default=0)


def _memory_sizes(devices: Sequence[Device], kind: str) -> tuple[int, ...]:
    known = sorted({memory_bytes(device) for device in devices} - {0})
    expected = memory_of(kind)
    return tuple(known or [size for size in (expected,) if size])


def _memory_text(sizes: Sequence[int]) -> str:
    if not sizes:
        return ""
    least, most = memory_text(sizes[0]), memory_text(sizes[-1])
    return least if least == most else f"{least} to {most}"


def _interconnects(devices: Sequence[Device], kind: str) -> tuple[str | None, ...]:
    found = {interconnect_of(kind, device.name) for device in devices} or {interconnect_of(kind)}
    return tuple(each or None for each in sorted(found))


def _remark(row: TypeRow) -> str:
    words = [] if row.kind == LOCAL else [row.kind]
    if row.simulated:
        words.append("simulated on cpu")
    if row.total > row.existing:
        words.append(f"{row.existing} now, up to {row.total - row.existing} more on demand")
    return ", ".join(words)


def stop(settings: Settings, name: str = "", *, force: bool) -> str:
    """Stop the local pool, or one of the list, wait until it has ended, and return a message.

    Raises:
        PoolError: Runs are active and `force` is not set, the pool can't be reached or does not end, or the user may
            not stop it.
        UsageError: There is no pool of that name.
    """
    if name not in ("", LOCAL):
        with closing(Pools(settings)) as pools:
            pools.get(name).stop(force=force)
        return f"the pool {name} is stopped"
    address = running_pool(settings)
    if address is None:
        return f"no local pool is running on {host_name()}"
    Pool(settings).stop(force=force)
    return f"the local pool (process {address.pid}) is stopped"


def _pool_options(parser: CommandParser) -> None:
    # without an action, as `sgpu pool list`
    add_json(parser)
    parser.does(_list)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    status.add_options(
        add_command(actions, "status", "show devices, queue and runs; starts no pool", "sgpu pool status --pool team")
    )
    made = add_command(
        actions,
        "add",
        "add a pool on another machine to the list, for --pool",
        "sgpu pool add box ssh://gpubox",
    )
    made.add_argument("name", metavar="NAME", help="name to use with --pool")
    made.add_argument(
        "address", metavar="ADDRESS", help="ssh://[USER@]HOST[:PORT] to log in to, or tcp://HOST:PORT of a served pool"
    )
    made.add_argument("--key", default="", metavar="KEY", help="a served pool's key, as `sgpu pool serve` prints it")
    made.add_argument("--python", default="", metavar="PATH", help="over ssh: its Python with torch (default: found)")
    made.add_argument("--prologue", default="", metavar="COMMANDS", help="over ssh: shell commands to run there first")
    made.add_argument(
        "--wheels", default="", metavar="FOLDER", help="over ssh: wheels of this machine for one without a network"
    )
    made.add_argument(
        "--same-files", action="store_true", help="over ssh: it has this machine's files and Pythons at the same paths"
    )
    made.add_argument("--reserved", action="store_true", help="its devices are paid for anyway, so prefer it")
    made.add_argument("--types", default="", metavar="a10,h100", help="its GPU types (default: ask the pool each time)")
    made.add_argument("--prices", default="", metavar="a10=1.20", help="price of one GPU per hour")
    made.add_argument("--replace", action="store_true", help="replace the pool of that name")
    made.add_argument("--no-check", action="store_true", help="add it without trying to reach it")
    made.does(_add)
    made = add_command(actions, "list", "list pools for --pool, with their state", "sgpu pool list")
    add_json(made)
    made.does(_list)
    made = add_command(actions, "remove", "remove a pool from the list; its runs continue", "sgpu pool remove team")
    made.add_argument("name", metavar="NAME", help="name of the pool in the list")
    made.add_argument("--records", action="store_true", help="over ssh: also remove the records of its runs there")
    made.does(lambda options: remove(load_settings(), options.name, records=options.records))
    _serving_options(actions)
    made = add_command(actions, "stop", "stop the pool; the next run starts it again", "sgpu pool stop")
    made.add_argument("name", nargs="?", default="", metavar="NAME", help="a pool of the list (default: the local one)")
    made.add_argument("--force", action="store_true", help="even if runs are in progress, which end too")
    made.does(lambda options: stop(load_settings(), options.name, force=options.force))


def _list(options: argparse.Namespace) -> str:
    settings = load_settings()
    pools, hosts = pool_rows(settings), suggested_hosts(settings)
    return encode(PoolList(pools=tuple(pools), hosts=hosts)) if options.json else pools_table(pools, hosts)


def _add(it: argparse.Namespace) -> str:
    if it.wheels and not list(Path(it.wheels).glob("*.whl")):
        raise UsageError(f"there are no wheels in {it.wheels}.")
    entry = new_entry(
        it.name,
        it.address,
        it.key,
        reserved=it.reserved,
        types=it.types,
        prices=it.prices,
        python=it.python,
        prologue=it.prologue,
        wheels=os.path.abspath(it.wheels) if it.wheels else "",
        same_files=it.same_files,
    )
    return add(load_settings(), entry, check=not it.no_check, replace=it.replace)


def _serving_options(actions: Any) -> None:
    serve = add_command(
        actions,
        "serve",
        "serve a pool to other machines, in the foreground",
        "sgpu pool serve --listen tcp://0.0.0.0:8700 --name team",
    )
    serve.add_argument("--engine", choices=("local", "ray"), default="local", help="where ranks run (default: local)")
    serve.add_argument("--listen", required=True, metavar="tcp://0.0.0.0:PORT", help="address to listen on for clients")
    _add_name(serve)
    serve.add_argument(
        "--same-files", action="store_true", help="nodes see the clients' files and Pythons, so build no environments"
    )
    deploy = add_command(
        actions,
        "deploy",
        "start a served pool on a Ray cluster, as a Ray job",
        "sgpu pool deploy --ray http://head:8265 --name team",
    )
    _add_ray(deploy)
    deploy.add_argument(
        "--listen",
        default="tcp://0.0.0.0:8700",
        metavar="tcp://0.0.0.0:PORT",
        help="address to listen on for clients (default: port 8700)",
    )
    _add_name(deploy)
    deploy.add_argument("job", nargs="*", metavar="-- OPTIONS", help="options of `ray job submit`")
    undeploy = add_command(
        actions, "undeploy", "stop a deployed pool", "sgpu pool undeploy --ray http://head:8265 --name team"
    )
    _add_ray(undeploy)
    _add_name(undeploy)
    keygen = add_command(actions, "keygen", "create the key that identifies you to pools", "sgpu pool keygen")
    keygen.add_argument("--force", action="store_true", help="replace the existing key")
    authorize = add_command(actions, "authorize", "let a user use the pool served here", "sgpu pool authorize ann KEY")
    authorize.add_argument("who", metavar="WHO", help="name of the user, shown with their runs")
    authorize.add_argument("key", metavar="KEY", help="the user's public key, as printed by `sgpu pool keygen`")
    authorize.add_argument("--admin", action="store_true", help="may stop everybody's runs and the pool")
    _add_name(authorize)
    revoke = add_command(actions, "revoke", "no longer let a user use the pool", "sgpu pool revoke ann")
    revoke.add_argument("who", metavar="WHO", help="user whose keys are removed")
    _add_name(revoke)
    serve.does(lambda it: _serving().serve(load_settings(), it.engine, it.listen, it.name, same_files=it.same_files))
    for made in (deploy, undeploy):
        made.does(lambda it: _ray_deployment().deploy_pool(load_settings(), it))
    keygen.does(lambda it: _serving().keygen(force=it.force))
    authorize.does(lambda it: _serving().authorize(load_settings(), it.name, it.who, it.key, admin=it.admin))
    revoke.does(lambda it: _serving().revoke(load_settings(), it.name, it.who))


def _serving() -> Any:
    # imports the pool service, which the other commands do not need
    from sgpu_magic.cli import serving

    return serving


def _ray_deployment() -> Any:
    from sgpu_magic.cli import ray_deployment

    return ray_deployment


def _add_ray(parser: CommandParser) -> None:
    parser.add_argument("--ray", required=True, metavar="http://HEAD:8265", help="address of Ray's dashboard")


def _add_name(parser: CommandParser) -> None:
    parser.add_argument("--name", default="team", metavar="NAME", help="name of the served pool (default: team)")


def _types_options(parser: CommandParser) -> None:
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    add_json(parser)
    parser.does(_types)


def _types(options: argparse.Namespace) -> str:
    types, silent = type_list(load_settings(), options.pool)
    if options.json:
        return encode(TypeList(types=tuple(types), omitted=omitted_pools(silent)))
    return types_table(types, silent)


COMMANDS = {"pool": _pool_options, "types": _types_options}
