"""The options of `sgpu pool add`, `list` and `remove`, and of `sgpu types`."""

from __future__ import annotations

from typing import Any


def add_actions(actions: Any) -> None:
    """Add `sgpu pool add`, `list` and `remove` to the actions of `sgpu pool`."""
    add = actions.add_parser("add", help="list a pool of another machine, for --pool", allow_abbrev=False)
    add.add_argument("name", metavar="NAME", help="as --pool is to take it")
    add.add_argument("address", metavar="tcp://HOST:PORT", help="where it listens")
    add.add_argument("--key", required=True, metavar="KEY", help="its public key, which `sgpu pool serve` prints")
    add.add_argument("--reserved", action="store_true", help="its devices are paid for in any case: it comes first")
    add.add_argument("--types", default="", metavar="a10,h100", help="what it has (default: it is asked each time)")
    add.add_argument("--prices", default="", metavar="a10=1.20", help="of one device for an hour")
    add.add_argument("--replace", action="store_true", help="in place of one of that name")
    add.add_argument("--no-check", action="store_true", help="write it down although it may not be reached")
    actions.add_parser("list", help="the pools that --pool takes, and how they are now", allow_abbrev=False)
    remove = actions.add_parser("remove", help="list a pool no more; its runs go on", allow_abbrev=False)
    remove.add_argument("name", metavar="NAME")


def add_types(commands: Any) -> None:
    """Add `sgpu types`."""
    types = commands.add_parser("types", help="what the pools have: memory, nodes, price", allow_abbrev=False)
    types.add_argument("--pool", default="", metavar="NAME", help="of this pool only (default: all)")
