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
            # a plausible run id passes more checks
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


# ---------------------------------------------------------------- data that is not a message

# the escape character for lone surrogates: a decoder takes a different path for it
ESCAPE = "\U0010f7ff"
_TOO_DEEP = 20_000


def hostile_msgpack() -> list[bytes]:
    """Return data on which an unguarded msgpack decoder raises an exception other than a decoding error."""
    pack = msgspec.msgpack.encode
    escaped = pack("e") + pack(ESCAPE)
    nested = b"\x91" * _TOO_DEEP + b"\xc0"
    return [
        b"",
        b"\xc1",
        # deeply nested, in a field that no message has
        b"\x82" + pack("type") + pack("ping") + pack("zzz") + nested,
        b"\x82" + pack("type") + pack("ping") + pack("zzz") + b"\x81\xa1x" * _TOO_DEEP + b"\xc0",
        b"\x83" + pack("type") + pack("ping") + escaped + pack("zzz") + nested,
        nested,
        # an array and a map as a map's key
        b"\x83" + pack("type") + pack("ping") + escaped + pack("z") + b"\x81\x91\x01\x01",
        b"\x82" + pack("type") + pack("ping") + pack("z") + b"\x81\x81\x01\x01\x01",
        # half an escape, timestamps and other extensions, lengths without data
        b"\x83" + pack("type") + pack(ESCAPE + "\ue000") + pack("e") + pack(ESCAPE) + pack("z") + b"\xc0",
        b"\x82" + pack("type") + pack("ping") + pack("z") + b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\x82" + pack("type") + pack("ping") + pack("z") + b"\xd6\x05abcd",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x82" + pack("type") + b"\xa4\xff\xfe\xfd\xfc",
    ]


def hostile_json() -> list[bytes]:
    """Return data on which an unguarded JSON parser raises an exception other than a decoding error."""
    return [
        b"",
        b"nothing",
        b"[" * _TOO_DEEP,
        b'{"n": 1, "zzz": ' + b'{"x": ' * _TOO_DEEP,
        b'"\xff\xfe"',
        b'{"\xff": 1}',
        b'{"a": "\\ud800"}',
        b"1" * 5000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"NaN",
        b"null",
        b"[]",
        b"{}",
        b'{"n": {}, "type": []}',
        b'["a", {"b": [null]}]',
    ]


def hostile_toml() -> list[bytes]:
    """Return data on which an unguarded TOML parser raises an exception other than a decoding error."""
    return [
        b"= 1",
        b"a = " + b"[" * _TOO_DEEP,
        b"a = " + b"{x = " * 3000,
        b"a = " + b"1" * 5000,
        b'a = "\xff\xfe"',
        b"a = 2024-13-45",
        b"public = 1\nsecret = []\n[team]\naddress = {}\nkey = [[1]]\nadmin = 'x'\n",
    ]
