"""The wire: the shape of each message, encoding and decoding, and framing on a stream read in pieces."""

from __future__ import annotations

import enum
import functools
import itertools
import os
import random
import struct
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpu_magic.wire import (
    attachments,
    client,
    codec,
    devices,
    events,
    files,
    node,
    option_text,
    pool_status,
    rank,
    rank_events,
    run,
    streams,
    tracking,
)
from sgpu_magic.wire.base import (
    TRANSITIONS,
    Numbered,
    OfRun,
    Record,
    RunState,
    can_move,
    check_id,
    is_valid_id,
    new_id,
    short,
)

MODULES = (
    attachments,
    client,
    devices,
    events,
    files,
    node,
    option_text,
    pool_status,
    rank,
    rank_events,
    run,
    tracking,
)
BASES = (Record, Numbered, OfRun, streams.OfStream, rank.OfFork, rank_events.OfRank)
GOLDEN = Path(__file__).parents[2] / "golden" / "protocol_shapes.txt"

UNIONS: dict[str, tuple[Any, codec.Decoder[Any]]] = {
    "client -> pool": (client.ClientMessage, codec.client_messages),
    "pool -> client": (client.PoolMessage, codec.pool_messages),
    "client -> pool, file data": (client.ToBulk, codec.to_bulk),
    "pool -> client, file data": (client.FromBulk, codec.from_bulk),
    "pool -> agent": (node.ToAgent, codec.to_agent),
    "agent -> pool": (node.FromAgent, codec.from_agent),
    "agent -> zygote": (rank.ToZygote, codec.to_zygote),
    "zygote -> agent": (rank.FromZygote, codec.from_zygote),
    "agent -> rank": (rank.ToRank, codec.to_rank),
    "rank -> agent": (rank.FromRank, codec.from_rank),
    "pool -> tracker": (tracking.ToTracker, codec.to_tracker),
    "tracker -> pool": (tracking.FromTracker, codec.from_tracker),
    "event bodies": (events.EventBody, codec.Decoder(events.EventBody)),
}


def members(union: Any) -> tuple[type[Record], ...]:
    return typing.get_args(union) or (union,)


def all_records() -> list[type[Record]]:
    found = {
        thing
        for module in MODULES
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Record) and thing not in BASES
    }
    return sorted(found, key=lambda record: record.__qualname__)


IN_A_UNION = [(link, member) for link, (union, _) in UNIONS.items() for member in members(union)]


# ---------------------------------------------------------------- shapes


def shape(record: type[Record]) -> str:
    """`Hello  hello  protocol_version: int, package_version: str, pid: int`."""
    hints = {name: hint for base in record.__mro__ for name, hint in getattr(base, "__annotations__", {}).items()}
    fields = ", ".join(
        f"{field.encode_name}: {hints[field.name]}" + ("" if field.required else " = ...")
        for field in msgspec.structs.fields(record)
    )
    return f"{record.__name__}  {record.__struct_config__.tag or '-'}  {fields}".rstrip()


def shapes() -> str:
    lines = [f"protocol {pool_status.PROTOCOL_VERSION}"]
    for link, (union, _) in UNIONS.items():
        lines += ["", f"# {link}"]
        lines += [shape(record) for record in members(union)]
    in_a_union = {member for _, member in IN_A_UNION}
    lines += ["", "# records within"]
    lines += [shape(record) for record in all_records() if record not in in_a_union]
    return "\n".join(lines) + "\n"


def test_every_message_has_its_declared_shape():
    """A change of the wire also changes this list, and may need a new protocol version."""
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        GOLDEN.write_text(shapes())
    assert shapes() == GOLDEN.read_text()


def test_messages_are_frozen_and_typed():
    for record in all_records():
        assert record.__struct_config__.frozen, record
        for name, hint in typing.get_type_hints(record).items():
            assert Any not in _leaves(hint), f"{record.__name__}.{name}"
            assert dict not in _leaves(hint), f"{record.__name__}.{name} is a dict without types"
            assert object not in _leaves(hint), f"{record.__name__}.{name}"


def _leaves(hint: Any) -> set[Any]:
    inner = typing.get_args(hint)
    return {hint} if not inner else set().union(*map(_leaves, inner))


@pytest.mark.parametrize("link", UNIONS)
def test_tags_are_unique_on_a_link(link: str):
    tags = [member.__struct_config__.tag for member in members(UNIONS[link][0])]
    assert all(tags)
    assert len(set(tags)) == len(tags)


def test_every_tagged_record_travels_on_some_link():
    within = {attachments.InlinePayload, attachments.SharedPayload, attachments.FilePayload, attachments.StoredPayload}
    tagged = {record for record in all_records() if record.__struct_config__.tag}
    assert tagged - {member for _, member in IN_A_UNION} - within == set()


# ---------------------------------------------------------------- any value survives a round trip


@functools.cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Every value that a field of this type may hold."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, inner))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Record):
        hints = typing.get_type_hints(hint)
        fields = msgspec.structs.fields(hint)
        return st.fixed_dictionaries(
            {field.name: values(hints[field.name]) for field in fields if field.required},
            optional={field.name: values(hints[field.name]) for field in fields if not field.required},
        ).map(lambda given, record=hint: record(**given))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return {
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        types.NoneType: st.none(),
    }[hint]


@pytest.mark.parametrize(("link", "record"), IN_A_UNION, ids=lambda value: getattr(value, "__name__", value))
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(link: str, record: type[Record], data: st.DataObject):
    message = data.draw(values(record))
    back = UNIONS[link][1].decode(codec.encode(message))
    assert back == message
    assert type(back) is record


odd_texts = st.text(st.sampled_from("aé\ud800\udce9\udfff\U0010f7fe\U0010f7ff\U0010f800\U0010ffff"))


@settings(deadline=None)
@given(text=odd_texts, other=odd_texts)
def test_texts_that_are_not_utf_8_arrive_as_they_were(text: str, other: str):
    context = run.RankContext(cwd=text, sys_path=(other, "/tmp"), umask=0o22, environ={text: other}, key=b"k\xff")
    message = rank.Prepare(context=context, device="cpu", rank_variables={"RANK": "0"})
    assert codec.to_rank.decode(codec.encode(message)) == message
    shown = codec.printable(message)
    assert shown.context.cwd == text.encode("utf-8", "backslashreplace").decode()
    shown.context.environ[other] = ""


def test_a_message_of_another_link_is_refused():
    leave = codec.encode(rank.Exit())
    with pytest.raises(msgspec.ValidationError):
        codec.client_messages.decode(leave)


def test_a_field_of_the_wrong_type_is_refused():
    wire = msgspec.msgpack.encode({"type": "cancel", "request": "one", "run": "abcd"})
    with pytest.raises(msgspec.ValidationError, match="request"):
        codec.client_messages.decode(wire)


def test_an_unknown_field_of_a_newer_version_is_passed_over():
    wire = msgspec.msgpack.encode(
        {"type": "hello", "protocol_version": 9, "package_version": "9.9", "pid": 1, "colour": "blue"}
    )
    assert codec.client_messages.decode(wire) == pool_status.Hello(protocol_version=9, package_version="9.9", pid=1)


# ---------------------------------------------------------------- frames on a stream


parts = st.lists(st.binary(max_size=40), max_size=4)
streams = st.lists(st.tuples(values(client.Cancel), parts), min_size=1, max_size=5)


@settings(deadline=None)
@given(sent=streams, cuts=st.lists(st.integers(1, 60), min_size=1, max_size=50))
def test_frames_in_any_pieces(sent: list[tuple[Record, list[bytes]]], cuts: list[int]):
    stream = b"".join(codec.frame(message, blobs) for message, blobs in sent)
    reader = codec.FrameReader(codec.client_messages)
    got: list[tuple[Record, list[bytes]]] = []
    position = 0
    for size in itertools.cycle(cuts):
        got += [(message, list(blobs)) for message, blobs in reader.feed(stream[position : position + size])]
        position += size
        if position >= len(stream):
            break
    assert got == [(message, list(blobs)) for message, blobs in sent]


def test_frames_byte_by_byte_and_all_at_once():
    cancel = client.Cancel(request=1, run="abcd1234")
    stream = codec.frame(cancel, [b"", b"x" * 1000]) * 3
    slow = codec.FrameReader(codec.client_messages)
    by_byte = [item for byte in stream for item in slow.feed(bytes([byte]))]
    at_once = list(codec.FrameReader(codec.client_messages).feed(stream))
    assert by_byte == at_once == [(cancel, [b"", b"x" * 1000])] * 3


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(struct.pack("<I", 0), "0 parts", id="no parts"),
        pytest.param(struct.pack("<I", codec.MAX_PARTS + 1), "parts", id="too many parts"),
        pytest.param(b"\xff" * 8, "parts", id="ones"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "parts", id="another protocol"),
        pytest.param(struct.pack("<IQ", 1, codec.MAX_PART_BYTES + 1), "bytes", id="too large a part"),
        pytest.param(struct.pack("<IQQ", 2, 1, 2**63), "bytes", id="an absurd part"),
        pytest.param(struct.pack("<IQ", 1, 3) + b"\xc1\xc1\xc1", "malformed", id="no msgpack"),
        pytest.param(struct.pack("<IQ", 1, 1) + b"\x80", "type", id="a message without a tag"),
    ],
)
def test_a_damaged_stream_is_an_error(damage: bytes, says: str):
    reader = codec.FrameReader(codec.client_messages)
    with pytest.raises(ValueError, match=says):
        list(reader.feed(damage))


@settings(deadline=None)
@given(junk=st.binary(max_size=200))
def test_junk_is_an_error_or_waits_for_more_but_is_never_a_message(junk: bytes):
    reader = codec.FrameReader(codec.client_messages)
    try:
        assert list(reader.feed(junk)) == []
    except ValueError:
        return


def test_one_flipped_bit_gives_a_message_or_a_value_error():
    choose = random.Random(7)
    clean = codec.frame(client.Refused(request=7, error="PoolError", message="no"), [b"blob"])
    for _ in range(2000):
        dirty = bytearray(clean)
        dirty[choose.randrange(len(dirty))] ^= 1 << choose.randrange(8)
        reader = codec.FrameReader(codec.pool_messages)
        try:
            for message, _blobs in reader.feed(bytes(dirty)):
                assert isinstance(message, members(client.PoolMessage))
        except ValueError:
            continue


# ---------------------------------------------------------------- ids and states


@pytest.mark.parametrize("text", ["", "../../etc", "abcd123", "abcd12345", "ABCD1234", "abcd123/", "abcd1234\n"])
def test_what_is_no_id_is_refused(text: str):
    assert not is_valid_id(text)
    with pytest.raises(ValueError, match="not a run id"):
        check_id(text)


def test_new_ids_are_ids_and_differ():
    made = [new_id() for _ in range(2_000)]
    assert all(map(is_valid_id, made))
    # messages name a run by its short form
    assert len(set(map(short, made))) == len(made)


def test_final_states_are_left_by_no_move():
    final = {state for state in RunState if state.is_final}
    assert final == {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.TIMED_OUT}
    assert not any(can_move(old, new) for old in final for new in RunState)


def test_every_state_is_reached_and_reaches_an_end():
    def after(state: RunState) -> set[RunState]:
        seen: set[RunState] = set()
        waiting = {state}
        while waiting:
            waiting |= TRANSITIONS[(one := waiting.pop())] - seen - {one}
            seen.add(one)
        return seen

    assert after(RunState.QUEUED) == set(RunState)
    for state in RunState:
        assert any(found.is_final for found in after(state))


def test_an_event_that_can_not_be_read_is_a_note_of_its_run():
    reported = {"type": "run-event", "run_id": "aaaa0000", "number": 7, "at": 1.0, "part": 1}
    read = codec.from_agent.decode(msgspec.msgpack.encode({**reported, "body": {"type": "from-tomorrow"}}))
    assert isinstance(read, node.RunEvent)
    assert (read.run_id, read.number, read.at, read.part) == ("aaaa0000", 7, 1.0, 1)
    assert isinstance(read.body, events.Noted)
    assert "Invalid value 'from-tomorrow'" in read.body.text
    with pytest.raises(msgspec.ValidationError):
        codec.from_agent.decode(msgspec.msgpack.encode({**reported, "number": "seven"}))


# ---------------------------------------------------------------- real traffic


def test_reading_events_imports_nothing_heavy():
    code = (
        "import sys; import sgpu_magic.pool.run_log, sgpu_magic.wire.codec; "
        "print([m for m in ('torch', 'numpy', 'IPython', 'cloudpickle', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
