"""Decodes data from outside: what another process sends, and files that something else may have written or damaged.

Malformed data can raise more than `msgspec.DecodeError`: deep nesting raises RecursionError, text that is not UTF-8
UnicodeDecodeError, an array as a map's key TypeError, a huge number ValueError. A reader that forgets one of them fails
at the first hostile message or damaged file. Therefore all data is decoded here, and `msgspec.DecodeError` is all that
malformed data raises. No other module calls a decoder of msgspec, `json` or `tomllib`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import msgspec

T = TypeVar("T")
Data = bytes | bytearray | memoryview


@contextlib.contextmanager
def border() -> Generator[None]:
    """Convert any exception that decoding raises in the block to `msgspec.DecodeError`."""
    try:
        yield
    except msgspec.DecodeError:
        raise
    except Exception as error:  # noqa: BLE001  the data chooses the exception, and no other code runs within
        raise malformed(error) from None


def malformed(error: Exception) -> msgspec.DecodeError:
    """Return the exception for data that made a decoder raise `error`."""
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        # keep the decoder's own message, which gives the position
        return msgspec.DecodeError(str(error))
    return msgspec.DecodeError(f"malformed data ({type(error).__name__}: {str(error)[:200]})")


class MsgpackDecoder(Generic[T]):
    """Decodes msgpack of one type. The underlying decoder is built on first use: a process needs only one or two.

    Args:
        type: The type, for example a record or a union of records.
    """

    @overload
    def __init__(self, type: type[T]) -> None: ...
    @overload
    def __init__(self, type: Any) -> None: ...
    def __init__(self, type: Any) -> None:
        self._type = type

    def prepare(self) -> None:
        """Build the decoder now, which takes some ms. Call it before forking, once for all children."""
        _ = self._decoder

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[T]:
        return msgspec.msgpack.Decoder(self._type)

    def decode(self, data: Data) -> T:
        """Return the value.

        Raises:
            msgspec.DecodeError: The data is malformed, or does not match the type.
        """
        # `border` written out: each message of each process passes here
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError:
            raise
        except Exception as error:  # noqa: BLE001  as in `border`
            raise malformed(error) from None


class JsonDecoder(Generic[T]):
    """Decodes JSON of one type.

    Args:
        type: The type, for example a record or a union of records.
    """

    @overload
    def __init__(self, type: type[T]) -> None: ...
    @overload
    def __init__(self, type: Any) -> None: ...
    def __init__(self, type: Any) -> None:
        self._type = type

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[T]:
        return msgspec.json.Decoder(self._type)

    def decode(self, data: Data | str) -> T:
        """Return the value.

        Raises:
            msgspec.DecodeError: The data is malformed, or does not match the type.
        """
        # `border` written out: each message of each process passes here
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError:
            raise
        except Exception as error:  # noqa: BLE001  as in `border`
            raise malformed(error) from None


@overload
def decode_json(data: Data | str) -> Any: ...
@overload
def decode_json(data: Data | str, type: type[T]) -> T: ...
@overload
def decode_json(data: Data | str, type: Any) -> Any: ...
def decode_json(data: Data | str, type: Any = Any) -> Any:
    """Return the value of a JSON text.

    Raises:
        msgspec.DecodeError: The data is malformed, or does not match the type.
    """
    with border():
        return msgspec.json.decode(data, type=type)


def load_json(data: Data | str) -> Any:
    """Return the value of a JSON text as `json.loads` does, which accepts NaN and infinities: Jupyter writes them.

    Raises:
        msgspec.DecodeError: The data is malformed.
    """
    import json

    with border():
        return json.loads(data if isinstance(data, str | bytes | bytearray) else bytes(data))


@overload
def decode_msgpack(data: Data) -> Any: ...
@overload
def decode_msgpack(data: Data, type: type[T]) -> T: ...
@overload
def decode_msgpack(data: Data, type: Any) -> Any: ...
def decode_msgpack(data: Data, type: Any = Any) -> Any:
    """Return the value of a msgpack text.

    Raises:
        msgspec.DecodeError: The data is malformed, or does not match the type.
    """
    with border():
        return msgspec.msgpack.decode(data, type=type)


def decode_toml(text: str | bytes) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        msgspec.DecodeError: The text is malformed. The message says where.
    """
    import tomllib

    try:
        return tomllib.loads(text if isinstance(text, str) else text.decode())
    except tomllib.TOMLDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except Exception as error:  # noqa: BLE001  as in `border`
        raise malformed(error) from None


@overload
def convert(value: Any, type: type[T], *, strict: bool = ..., from_attributes: bool = ...) -> T: ...
@overload
def convert(value: Any, type: Any, *, strict: bool = ..., from_attributes: bool = ...) -> Any: ...
def convert(value: Any, type: Any, *, strict: bool = True, from_attributes: bool = False) -> Any:
    """Return plain data, such as a decoded text or a comm's message, as a value of a type.

    Raises:
        msgspec.DecodeError: The data is malformed, or does not match the type.
    """
    with border():
        return msgspec.convert(value, type, strict=strict, from_attributes=from_attributes)
