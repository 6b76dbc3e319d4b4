"""Read pickles as data: the reader imports and calls nothing that they name."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from .._errors import DamagedError

__all__ = ["PERSISTENT", "PickledName", "PickledObject", "read_pickle"]

T = TypeVar("T")
PERSISTENT = "persistent id"
"""The name of an object that a pickle refers to by a persistent id, which is its argument."""


class PickledName:
    """The dotted name of a class or function in a pickle."""

    __slots__ = ("dotted",)

    def __init__(self, dotted: str) -> None:
        self.dotted = dotted


class PickledObject:
    """An object in a pickle: the name and arguments of the function that would make it, and its state or None."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        if type(args) is not tuple:
            raise DamagedError(f"expected a tuple of arguments for {name}, got {type(args).__name__}")
        self.name, self.args, self.state = name, args, None

    def set_state(self, state: Any) -> None:
        """Set the state that the pickle has for the object. Raises DamagedError if it has two."""
        if self.state is not None:
            raise DamagedError(f"{self.name} has two states")
        self.state = state


def read_pickle(raw: bytes, check_name: Callable[[str], None]) -> Any:
    """Return the data of a pickle: lists, tuples, dicts, plain values, `PickledName` and `PickledObject`.

    The reader takes the opcodes that pickle writes for such data from protocol 2 on. Keys are strings, numbers or objects,
    and objects are compared by identity: no hash or comparison recurses. Time and memory are linear in the length.

    Args:
        raw: The pickle.
        check_name: A function that raises DamagedError for a name, such as ``torch.Size``, that the pickle may not have.

    Raises:
        DamagedError: For bytes that are no such pickle.
    """
    try:
        return _read(raw, check_name)
    except DamagedError:
        raise
    except Exception as error:  # only builtin errors: the pickle is too short, or operands have another type
        raise DamagedError(f"no pickle of plain data: {type(error).__name__}: {error}") from error


PROTO, FRAME, STOP, MARK = pickle.PROTO[0], pickle.FRAME[0], pickle.STOP[0], pickle.MARK[0]
MEMOIZE, BINPUT, LONG_BINPUT = pickle.MEMOIZE[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0]
BINGET, LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
BININT1, LONG1, BINFLOAT = pickle.BININT1[0], pickle.LONG1[0], pickle.BINFLOAT[0]
GLOBAL, STACK_GLOBAL, BINPERSID = pickle.GLOBAL[0], pickle.STACK_GLOBAL[0], pickle.BINPERSID[0]
OBJECTS, BUILD = {pickle.REDUCE[0], pickle.NEWOBJ[0]}, pickle.BUILD[0]
APPEND, APPENDS, SETITEM, SETITEMS = pickle.APPEND[0], pickle.APPENDS[0], pickle.SETITEM[0], pickle.SETITEMS[0]
TUPLE, TUPLES = pickle.TUPLE[0], {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
EMPTY_LIST, EMPTY_DICT = pickle.EMPTY_LIST[0], pickle.EMPTY_DICT[0]
INTEGERS = {pickle.BININT[0]: (4, True), pickle.BININT2[0]: (2, False)}
"""For each opcode, the bytes of the integer and whether it is signed."""
STRINGS = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8}
BYTES = {pickle.SHORT_BINBYTES[0]: 1, pickle.BINBYTES[0]: 4, pickle.BINBYTES8[0]: 8}
"""For each opcode, the bytes of the length that precedes the content."""
ORDERED = "collections.OrderedDict"
KEYS = (str, int, PickledObject)


def _read(raw: bytes, check_name: Callable[[str], None]) -> Any:
    """Run the pickle's opcodes, without calling anything, and return what they build."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0

    def read_integer(size: int, signed: bool = False) -> int:
        nonlocal at
        at += size
        return int.from_bytes(raw[at - size : at], "little", signed=signed)

    def read(size: int) -> bytes:
        nonlocal at
        at += size
        return raw[at - size : at]

    def read_line() -> str:
        return read(raw.index(b"\n", at) + 1 - at)[:-1].decode()

    def pop_marked() -> list[Any]:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    push = stack.append
    while True:  # the end of the bytes raises IndexError; frequent opcodes come first
        code = raw[at]
        at += 1
        if code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == BINGET:
            push(memo[raw[at]])
            at += 1
        elif code == BININT1:
            push(raw[at])
            at += 1
        elif code in CONSTANTS:
            push(CONSTANTS[code])
        elif code in TUPLES:
            stack[-TUPLES[code] :] = [tuple(stack[-TUPLES[code] :])]
        elif code in OBJECTS:
            args, maker = stack.pop(), stack.pop()
            push(PickledObject(maker.dotted, args) if maker.dotted != ORDERED or args else {})
        elif code == EMPTY_DICT:
            push({})
        elif code == MARK:
            marks.append(len(stack))
        elif code == SETITEMS:
            items = pop_marked()
            _set_items(stack[-1], items)
        elif code == BUILD:
            state = stack.pop()
            stack[-1].set_state(state)
        elif code == LONG_BINGET:
            push(memo[read_integer(4)])
        elif code in INTEGERS:
            push(read_integer(*INTEGERS[code]))
        elif code in STRINGS:
            push(read(read_integer(STRINGS[code])).decode("utf-8", "surrogatepass"))
        elif code == APPEND:
            item = stack.pop()
            stack[-1].append(item)
        elif code == APPENDS:
            items = pop_marked()
            stack[-1].extend(items)
        elif code == TUPLE:
            push(tuple(pop_marked()))
        elif code == EMPTY_LIST:
            push([])
        elif code == SETITEM:
            items = [stack.pop(-2), stack.pop()]
            _set_items(stack[-1], items)
        elif code == LONG1:
            push(read_integer(read_integer(1), signed=True))
        elif code in (GLOBAL, STACK_GLOBAL):
            names = (read_line(), read_line()) if code == GLOBAL else (stack.pop(-2), stack.pop())
            push(PickledName(".".join(names)))
            check_name(stack[-1].dotted)
        elif code == BINPUT:
            memo[read_integer(1)] = stack[-1]
        elif code == LONG_BINPUT:
            memo[read_integer(4)] = stack[-1]
        elif code == BINFLOAT:
            push(struct.unpack(">d", read(8))[0])
        elif code in BYTES:
            push(read(read_integer(BYTES[code])))
        elif code == BINPERSID:
            push(PickledObject(PERSISTENT, (stack.pop(),)))
        elif code == FRAME:
            at += 8
        elif code == PROTO:
            at += 1
        elif code == STOP:
            (found,) = stack
            return found
        else:
            raise DamagedError(f"it has the opcode {code:#x}, which no plain data needs")


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    """Set keys and values of a dict. Objects as keys are compared by identity."""
    if len(items) % 2 or type(target) is not dict:
        raise DamagedError("expected pairs of keys and values for a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in KEYS:
            raise DamagedError(f"expected a string, a number or an object as a key, got {type(key).__name__}")
        if key in target:
            raise DamagedError("a dict has a key twice")
        target[key] = value
