"""`sgpu pool` and `sgpu types`: the user's list of pools, their devices, and the local pool."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

from sgpu_magic.cli.main import CommandParser
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pool_choosing import PriceBook, counts, describe_devices, money_of
from sgpu_magic.client.pools import PATIENCE_S, Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, add_pool, new_entry, pools_path, read_pools, remove_pool
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings, host_name, load_settings
from sgpu_magic.errors import PoolError, SgpuError
from sgpu_magic.formatting import format_money
from sgpu_magic.runs import pools_status
from sgpu_magic.views.pool_tables import status_text
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.devices import CPU, interconnect_of, memory_bytes, memory_of, memory_text
from sgpu_magic.wire.pool_status import PoolStatus

# the first link needs a handshake, and perhaps a diagnosis of why it fails
_CHECK_S = 10.0
_NOT_RUNNING = "not running"


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
        status = _checked(settings, entry)
        answer = f"It answers, and has {describe_devices(status)}."
        lacking = [kind for kind in entry.types if kind not in counts(status)]
        if lacking:
            answer += f" It has no {', '.join(lacking)} now, although --types names it."
    add_pool(entry, replace=replace)
    return f"the pool {entry.name} ({entry.kind}) is listed in {pools_path()}. {answer} `--pool {entry.name}` uses it."


def remove(name: str) -> str:
    """Remove a pool from the list and return a message.

    Raises:
        UsageError: There is no pool of that name, or the file can't be written.
    """
    entry = remove_pool(name)
    return f"the pool {entry.name} ({entry.address}) is no longer listed. Its runs continue."


def listing(settings: Settings) -> str:
    """Return the pools and their current state as a table. Takes 2 s at most.

    Raises:
        UsageError: The list can't be read.
    """
    answers = _all(settings, "")
    rows = [("pool", "kind", "address", "now", "free/total")]
    for answer in answers:
        kind, address = ("this machine", "") if answer.entry is None else (answer.entry.kind, answer.entry.address)
        state = _NOT_RUNNING if answer.status is None else "up"
        if answer.problem:
            state = "can't be reached"
        there = {} if answer.status is None else counts(answer.status)
        free = ", ".join(f"{count.free}/{count.total} {kind}" for kind, count in there.items())
        rows.append((answer.name, kind, address, state, free))
    lines = aligned(rows)
    lines += [f"{answer.name}: {answer.problem}" for answer in answers if answer.problem]
    return "\n".join(lines)


def types(settings: Settings, name: str = "") -> str:
    """Return the device types of the pools as a table. Takes 2 s at most.

    Args:
        settings: The user's settings.
        name: Only this pool; "" for all.

    Raises:
        SgpuError: The named pool can't be reached, or there is none of that name.
    """
    answers = _all(settings, name)
    money = money_of(settings)
    rows = [("pool", "type", "memory", "interconnect", "free/total", "nodes", "largest node", "an hour", "")]
    silent: list[str] = []
    for answer in answers:
        if answer.status is None:
            silent.append(f"{answer.name}: {answer.problem or pools_status.NOT_RUNNING}")
        else:
            rows += _type_rows(answer, answer.status, money)
    return "\n".join([*(aligned(rows, right=(2, 4, 5, 6, 7)) if len(rows) > 1 else []), *silent])


def _all(settings: Settings, name: str) -> list[PoolStatusReply]:
    with closing(Pools(settings)) as pools:
        # with `recent` of 1 or more the status includes the active runs, which show which devices are free
        return pools_status.ask(pools, name, start=False, recent=1)


def _checked(settings: Settings, entry: PoolEntry) -> PoolStatus:
    try:
        with closing(Pool(settings, None, entry)) as pool:
            found = pool.status(1, timeout_s=_CHECK_S)
    except SgpuError as error:
        raise PoolError(f"{error.message} Nothing was written; --no-check adds it anyway.") from None
    if found is None:
        raise PoolError(f"the pool {entry.name} did not answer within {PATIENCE_S:g} s. Nothing was written.")
    return found


def _type_rows(answer: PoolStatusReply, status: PoolStatus, money: PriceBook) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind, count in counts(status).items():
        price = money.of(answer.entry, kind)
        nodes, largest = _spread(status, kind)
        memory, interconnect = ("", "") if kind == CPU else (_memory(status, kind), _interconnect(status, kind))
        cost = "" if price is None else format_money(price, money.currency)
        free, remark = f"{count.free}/{count.total}", _remark(answer, status, kind)
        rows.append((answer.name, kind, memory, interconnect, free, str(nodes), str(largest), cost, remark))
    return rows


def _spread(status: PoolStatus, kind: str) -> tuple[int, int]:
    """Return the number of nodes that have a type, and the most devices of it on one node."""
    inventory = status.inventory
    if kind == CPU:
        slots = [node.cpu_slots for node in inventory.nodes if node.cpu_slots] or [inventory.cpu_slots]
        return len(slots), max(slots)
    by_node = Counter(device.node for device in inventory.devices if device.type == kind)
    return len(by_node), max(by_node.values(), default=0)


def _memory(status: PoolStatus, kind: str) -> str:
    sizes = sorted({memory_bytes(device) for device in status.inventory.devices if device.type == kind})
    known = [size for size in sizes if size] or [memory_of(kind)]
    texts = [memory_text(size) for size in (known[0], known[-1])]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _interconnect(status: PoolStatus, kind: str) -> str:
    found = {interconnect_of(kind, device.name) for device in status.inventory.devices if device.type == kind}
    found = found or {interconnect_of(kind)}
    return "/".join(sorted(each or "?" for each in found))


def _remark(answer: PoolStatusReply, status: PoolStatus, kind: str) -> str:
    words = [] if answer.entry is None else [answer.entry.kind]
    if any(device.simulated for device in status.inventory.devices if device.type == kind):
        words.append("simulated on cpu")
    there = sum(device.type == kind for device in status.inventory.devices)
    more = dict(status.inventory.elastic).get(kind, 0) - there
    if kind != CPU and more > 0:
        words.append(f"{there} now, up to {more} more on demand")
    return ", ".join(words)


def status(settings: Settings, name: str = "") -> str:
    """Return the text of `%sgpu_status` for one pool or for all. Never starts a pool.

    Raises:
        PoolError: The pool does not answer, or has an incompatible version.
    """
    if name != LOCAL and (name or read_pools()):
        with closing(Pools(settings)) as pools:
            return pools_status.drawn(pools_status.ask(pools, name, start=False), {})["text/plain"]
    with closing(Pool(settings)) as pool:
        answer = pool.status(start=False)
    if answer is None:
        return f"no local pool is running on {host_name()}; the first %%distributed cell starts one"
    return status_text(answer)


def stop(settings: Settings, *, force: bool) -> str:
    """Stop the local pool, wait until it has ended, and return a message.

    Raises:
        PoolError: Runs are active and `force` is not set, or the pool does not end.
    """
    address = find_pool(settings)
    if address is None:
        return f"no local pool is running on {host_name()}"
    Pool(settings).stop(force=force)
    return f"the local pool (process {address.pid}) is stopped"


def _pool_options(parser: CommandParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = actions.add_parser("status", help="show devices, queue and runs; starts no pool")
    made.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all in the list)")
    made.does(lambda options: status(load_settings(), options.pool))
    made = actions.add_parser("add", help="add a pool on another machine to the list, for --pool")
    made.add_argument("name", metavar="NAME", help="name to use with --pool")
    made.add_argument("address", metavar="tcp://HOST:PORT", help="address that it listens on")
    made.add_argument("--key", required=True, metavar="KEY", help="its public key, as printed by `sgpu pool serve`")
    made.add_argument("--reserved", action="store_true", help="its devices are paid for anyway, so prefer it")
    made.add_argument("--types", default="", metavar="a10,h100", help="its GPU types (default: ask the pool each time)")
    made.add_argument("--prices", default="", metavar="a10=1.20", help="price of one GPU per hour")
    made.add_argument("--replace", action="store_true", help="replace the pool of that name")
    made.add_argument("--no-check", action="store_true", help="add it without trying to reach it")
    made.does(_add)
    made = actions.add_parser("list", help="list pools for --pool, with their state")
    made.does(lambda _: listing(load_settings()))
    made = actions.add_parser("remove", help="remove a pool from the list; its runs continue")
    made.add_argument("name", metavar="NAME", help="name of the pool in the list")
    made.does(lambda options: remove(options.name))
    _serving_options(actions.add_parser)
    made = actions.add_parser("stop", help="stop the pool; the next run starts it again")
    made.add_argument("--force", action="store_true", help="even if runs are in progress, which end too")
    made.does(lambda options: stop(load_settings(), force=options.force))


def _add(it: argparse.Namespace) -> str:
    entry = new_entry(it.name, it.address, it.key, reserved=it.reserved, types=it.types, prices=it.prices)
    return add(load_settings(), entry, check=not it.no_check, replace=it.replace)


def _serving_options(add: Callable[..., CommandParser]) -> None:
    serve = add("serve", help="serve a pool to other machines, in the foreground")
    serve.add_argument("--engine", choices=("local", "ray"), default="local", help="where ranks run (default: local)")
    serve.add_argument("--listen", required=True, metavar="tcp://0.0.0.0:PORT", help="address to listen on for clients")
    _add_name(serve)
    serve.add_argument(
        "--same-files", action="store_true", help="nodes see the clients' files and Pythons, so build no environments"
    )
    deploy = add("deploy", help="start a served pool on a Ray cluster, as a Ray job")
    _add_ray(deploy)
    deploy.add_argument(
        "--listen",
        default="tcp://0.0.0.0:8700",
        metavar="tcp://0.0.0.0:PORT",
        help="address to listen on for clients (default: port 8700)",
    )
    _add_name(deploy)
    deploy.add_argument("job", nargs="*", metavar="-- OPTIONS", help="options of `ray job submit`")
    undeploy = add("undeploy", help="stop a deployed pool")
    _add_ray(undeploy)
    _add_name(undeploy)
    keygen = add("keygen", help="create the key that identifies you to pools")
    keygen.add_argument("--force", action="store_true", help="replace the existing key")
    authorize = add("authorize", help="let a user use the pool served here")
    authorize.add_argument("who", metavar="WHO", help="name of the user, shown with their runs")
    authorize.add_argument("key", metavar="KEY", help="the user's public key, as printed by `sgpu pool keygen`")
    authorize.add_argument("--admin", action="store_true", help="may stop everybody's runs and the pool")
    _add_name(authorize)
    revoke = add("revoke", help="no longer let a user use the pool")
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
    parser.does(lambda options: types(load_settings(), options.pool))


COMMANDS = {"pool": _pool_options, "types": _types_options}
