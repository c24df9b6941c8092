"""Well-formed messages of a protocol with meaningless content, which servers must tolerate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_TEXTS = ("", "x", "../../etc/passwd", "/etc/passwd", "\0", "ä" * 300, "abcd1234", "-1", "nan", "{}", "%s")
_NUMBERS = (0, 1, -1, 2**31, 2**62, -(2**62), 7)
_REALS = (0.0, -1.0, 1e300, float("inf"), float("-inf"), float("nan"), 0.5)
_BYTES = (b"", b"x", b"\x80\x04.", b"\xff" * 300)
_DEEPEST = 6


def odd_messages(union: Any, count: int, seed: int) -> Iterator[bytes]:
    """Yield encoded messages of a union's types in turn, with meaningless fields.

    Args:
        union: The union of message types, as for a decoder.
        count: The number of messages.
        seed: Seed of the random numbers; equal seeds give equal messages.
    """
    chance = random.Random(seed)
    info = inspect.type_info(union)
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    for number in range(count):
        yield msgspec.msgpack.encode(_odd(kinds[number % len(kinds)], chance, 0))


def _odd(info: Any, chance: random.Random, depth: int) -> Any:
    match info:
        case inspect.StructType():
            fields = {field.encode_name: field for field in info.fields if field.required or chance.random() < 0.7}
            made = {name: _odd(field.type, chance, depth + 1) for name, field in fields.items()}
            tag = {info.tag_field: info.tag} if info.tag_field is not None else {}
            return [info.tag, *made.values()] if info.array_like else tag | made
        case inspect.UnionType():
            return _odd(chance.choice(info.types), chance, depth)
        case inspect.StrType():
            # what could be a run's id gets further
            return f"{chance.getrandbits(32):08x}" if chance.random() < 0.4 else chance.choice(_TEXTS)
        case inspect.IntType():
            return chance.choice(_NUMBERS)
        case inspect.FloatType():
            return chance.choice(_REALS)
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.BytesType():
            return chance.choice(_BYTES)
        case inspect.NoneType():
            return None
        case inspect.EnumType():
            return chance.choice(list(info.cls)).value
        case inspect.LiteralType():
            return chance.choice(info.values)
        case inspect.TupleType():
            return [_odd(each, chance, depth + 1) for each in info.item_types]
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            many = chance.choice((0, 1, 3)) if depth < _DEEPEST else 0
            return [_odd(info.item_type, chance, depth + 1) for _ in range(many)]
        case inspect.DictType():
            many = chance.choice((0, 1, 2)) if depth < _DEEPEST else 0
            return {_key(info.key_type, chance): _odd(info.value_type, chance, depth + 1) for _ in range(many)}
        case _:
            raise NotImplementedError(f"nothing odd is known of {info}")


def _key(info: Any, chance: random.Random) -> Any:
    return _odd(info, chance, _DEEPEST)
