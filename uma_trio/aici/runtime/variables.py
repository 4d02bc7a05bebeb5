"""What the sequences of one request share: variables, and the memory that counts against the request."""

from __future__ import annotations

import threading
import weakref
from typing import Final, Literal, TypeAlias

import attrs
import msgspec

MAX_VARIABLES: Final = 1024
MAX_BYTES: Final = 1 << 20
"""Names and values of one request together."""


class ReadVar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a variable."""

    name: str


class WriteVar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Writes a variable; with ``when_version_is``, only if that is its version."""

    name: str
    value: str
    """Hexadecimal digits."""
    op: Literal["Set", "Append"]
    when_version_is: int | None = None


class VariablesFull(Exception):
    """There is no room for the value, or for another variable."""


@attrs.frozen
class Value:
    """A variable at one time."""

    version: int
    """1 at first, one more with each write."""
    value: bytes


class Variables:
    """The variables.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Value] = {}
        self._n_bytes = 0

    def read(self, name: str) -> Value | None:
        """The variable; ``None`` if it was never written."""
        with self._lock:
            return self._values.get(name)

    def write(self, name: str, value: bytes, *, append: bool, when_version_is: int | None) -> tuple[bool, Value | None]:
        """Change a variable.

        Returns:
            Whether it was changed, and the variable after that.

        Raises:
            VariablesFull: the request's variables would be too many, or too large together.
        """
        with self._lock:
            old = self._values.get(name)
            if when_version_is is not None and (old is None or old.version != when_version_is):
                return False, old
            if append and old is not None:
                value = old.value + value
            n_before = 0 if old is None else len(name.encode("utf-8", "replace")) + len(old.value)
            n_bytes = self._n_bytes - n_before + len(name.encode("utf-8", "replace")) + len(value)
            if n_bytes > MAX_BYTES or (old is None and len(self._values) >= MAX_VARIABLES):
                raise VariablesFull(
                    f"the variables of a request may be {MAX_VARIABLES} and have {MAX_BYTES >> 20} MiB together"
                )
            new = Value(1 if old is None else old.version + 1, value)
            self._values[name], self._n_bytes = new, n_bytes
            return True, new


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A storage command.  Exactly one field is set."""

    ReadVar: ReadVar | None = None
    WriteVar: WriteVar | None = None


_COMMAND: Final = msgspec.json.Decoder(_Command)


class BadCommand(ValueError):
    """The JSON is no storage command; the message says why."""


Answer: TypeAlias = dict[str, dict[str, object]]


def run_command(variables: Variables, command: bytes) -> tuple[Answer, dict[str, object] | None]:
    """Run a storage command that a controller has sent as JSON.

    Returns:
        The answer, and the command if it is a write, also a refused one.

    Raises:
        BadCommand: the JSON is no storage command.
        VariablesFull: there is no room for what it writes.
    """
    try:
        decoded = _COMMAND.decode(command)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCommand(str(error)) from None
    if (decoded.ReadVar is None) == (decoded.WriteVar is None):
        raise BadCommand("it must be one of ReadVar and WriteVar")
    if decoded.ReadVar is not None:
        return _variable_answer(variables.read(decoded.ReadVar.name)), None
    write = decoded.WriteVar
    assert write is not None
    try:
        value = bytes.fromhex(write.value)
    except ValueError as error:
        raise BadCommand(f"value: {error}") from None
    changed, now = variables.write(
        write.name, value, append=write.op == "Append", when_version_is=write.when_version_is
    )
    sent = {"WriteVar": msgspec.to_builtins(write)}
    if changed:
        assert now is not None
        return {"WriteVar": {"version": now.version}}, sent
    return _variable_answer(now), sent


def _variable_answer(value: Value | None) -> Answer:
    if value is None:
        return {"VariableMissing": {}}
    return {"ReadVar": {"version": value.version, "value": value.value.hex()}}


@attrs.define(eq=False)
class _Request:
    n_bytes: int = 0
    is_evicted: bool = False


class MemoryPool:
    """Counts the memory of instances by request.  A request is named by its ``Variables``.  Thread-safe.

    When the sum of all requests exceeds ``max_bytes``, the request with the most is evicted: its instances must be closed
    instead of called.  So controllers that take all the memory they can get do no harm to modest ones.  Calls that are
    in flight may exceed the bound, each by what one controller may have.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._requests: weakref.WeakKeyDictionary[Variables, _Request] = weakref.WeakKeyDictionary()

    def count(self, variables: Variables, change: int) -> None:
        """The memory of a request has grown by ``change`` bytes."""
        with self._lock:
            self._requests.setdefault(variables, _Request()).n_bytes += change
            self._n_bytes += change
            if self._n_bytes > self.max_bytes and change > 0:
                self._evict()

    def is_evicted(self, variables: Variables) -> bool:
        """Whether the instances of a request must be closed."""
        with self._lock:
            request = self._requests.get(variables)
            return request is not None and request.is_evicted

    def _evict(self) -> None:
        """Evict the largest requests until the others are within the bound."""
        left = sum(request.n_bytes for request in self._requests.values() if not request.is_evicted)
        while left > self.max_bytes:
            largest = max(
                (request for request in self._requests.values() if not request.is_evicted),
                key=lambda request: request.n_bytes,
            )
            largest.is_evicted = True
            left -= largest.n_bytes
