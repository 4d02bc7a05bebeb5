"""C declarations as text, in one spelling for readers, for ctypes and for the C compiler.

A declaration is copied from llama.h, so that the two can be compared line by line. This module turns it into ctypes
types and error checks, and ``check_source`` turns it into C source for the compiler. A comment after a function is its
error rule: which result of a call means failure, and raises LlamaError.

    // !null    NULL
    // !rc      a return code below zero
    // !zero    zero
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import attrs

from llama_abi.errors import LibraryError, LlamaError

CType = Any
"""A ctypes type, or ``None`` for void. ctypes types have no common base class."""

PROTOTYPE = re.compile(r"^\s*(?!//)(\S.*?)(\w+)\(([^)]*)\);(?:\s*//\s*(!\w+))?", re.MULTILINE)
ENUMERATOR = re.compile(r"(\w+)\s*=\s*(-?\d+)")
ARRAY = re.compile(r"(.+?)\s*\[(\d+)\]")
CALLBACK = re.compile(r"(.+?)\(\*\)\s*\((.*)\)")


@attrs.frozen
class Prototype:
    """A function of the table."""

    returns: str
    name: str
    parameters: tuple[str, ...]
    rule: str
    """A key of ``RULES``, or empty: no result is an error."""

    @property
    def c(self) -> str:
        """Its declaration in C."""
        return f"{self.returns} {self.name}({', '.join(self.parameters) or 'void'});"


def split_declarator(text: str) -> tuple[str, str]:
    """Split type and name: ``"float * logits"`` -> ``("float *", "logits")``, ``"int64_t ne[4]"`` -> ``("int64_t [4]", "ne")``."""
    match = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*(\[\d+\])?\s*", text, re.DOTALL)
    if match is None:
        raise LibraryError(f"not a C declaration: {text!r}")
    return f"{match.group(1)} {match.group(3) or ''}".rstrip(), match.group(2)


def prototypes(table: str) -> tuple[Prototype, ...]:
    """Parse a table of functions."""
    functions = []
    for returns, name, parameters, rule in PROTOTYPE.findall(table):
        named = tuple(p.strip() for p in parameters.split(",") if p.strip() not in ("", "void"))
        functions.append(Prototype(" ".join(returns.split()), name, named, rule))
    return tuple(functions)


class Declarations:
    """All declared types of a header. ``llama_abi.types`` and ``llama_abi.mtmd_declarations`` fill one each;
    ``llama_abi.library`` and ``llama_abi.check_source`` read them.

    Args:
        base: the declarations of a header that this one includes.
    """

    def __init__(self, base: Declarations | None = None) -> None:
        self.structs: dict[str, tuple[tuple[str, str], ...]] = {}
        """Struct name -> ((C type, field), ...) in the order of the header."""
        self.enums: dict[str, dict[str, int]] = {}
        """Enum name -> members. The name ``""`` holds macros."""
        self.typedefs: dict[str, str] = {}
        """Typedef name -> its C type."""
        self.known: dict[str, CType] = {
            "void": None,
            "bool": ctypes.c_bool,
            "char": ctypes.c_char,
            "float": ctypes.c_float,
            "int": ctypes.c_int,
            "int8_t": ctypes.c_int8,
            "uint8_t": ctypes.c_uint8,
            "int32_t": ctypes.c_int32,
            "uint32_t": ctypes.c_uint32,
            "int64_t": ctypes.c_int64,
            "uint64_t": ctypes.c_uint64,
            "size_t": ctypes.c_size_t,
        }
        if (
            base is not None
        ):  # ctypes takes two types of one name for different ones; ``ctype`` adds opaque structs, too
            self.known = base.known

    def ctype(self, spelling: str) -> CType:
        """The ctypes type for a C type such as ``const struct llama_model *``.

        A pointer to an undeclared struct gets an opaque type of its own. Passing a model as a context is then an
        ``ArgumentError`` in Python and not a crash.

        Raises:
            LibraryError: the type is neither declared nor a pointer to a struct.
        """
        if array := ARRAY.fullmatch(spelling):
            return self.ctype(array.group(1)) * int(array.group(2))
        words = [word for word in spelling.replace("*", " * ").split() if word != "const"]
        stars = words.count("*")
        names = [word for word in words if word != "*"]
        if names == ["unsigned", "char"]:
            names = ["uint8_t"]
        elif len(names) == 2 and names[0] == "enum":
            names = ["int32_t"]
        elif len(names) == 2 and names[0] == "struct":
            names = names[1:]
            if stars:
                self.known.setdefault(names[0], type(names[0], (ctypes.Structure,), {}))
        if len(names) != 1:
            raise LibraryError(f"no ctypes type for {spelling!r}")
        resolved: CType
        if stars and names[0] in ("char", "void"):  # ctypes has names of its own for these pointers
            resolved, stars = {"char": ctypes.c_char_p, "void": ctypes.c_void_p}[names[0]], stars - 1
        elif names[0] in self.known:
            resolved = self.known[names[0]]
        else:
            raise LibraryError(f"no ctypes type for {spelling!r}")
        for _ in range(stars):
            resolved = ctypes.POINTER(resolved)
        return resolved

    def struct(self, name: str, fields: str) -> type[ctypes.Structure]:
        """Declare ``struct name`` from its C field list."""
        lines = tuple(split_declarator(line) for line in fields.split(";") if line.strip())
        layout = [(field, self.ctype(spelling)) for spelling, field in lines]
        made = type(name, (ctypes.Structure,), {"_fields_": layout})
        self.structs[name] = lines
        self.known[name] = made
        return made

    def enum(self, name: str, members: str) -> dict[str, int]:
        """Declare members of ``enum name``, or integer macros if the name is empty.

        Members that nobody uses may be left out.
        """
        numbers = {member: int(value) for member, value in ENUMERATOR.findall(members)}
        self.enums[name] = numbers
        return numbers

    def typedef(self, name: str, target: str) -> CType:
        """Declare a typedef: a type, or a callback such as ``bool (*)(void * data)``."""
        callback = CALLBACK.fullmatch(target.strip())
        if callback is None:
            made = self.ctype(target)
        else:
            parameters = [split_declarator(p)[0] for p in callback.group(2).split(",")]
            made = ctypes.CFUNCTYPE(self.ctype(callback.group(1)), *map(self.ctype, parameters))
        self.typedefs[name] = target.strip()
        self.known[name] = made
        return made

    def bind(self, library: ctypes.CDLL, table: str) -> list[str]:
        """Set the types and the error check of every function in ``table``.

        Returns:
            The functions that the library lacks.
        """
        missing = []
        for prototype in prototypes(table):
            try:
                function = getattr(library, prototype.name)
            except AttributeError:
                missing.append(prototype.name)
                continue
            function.restype = self.ctype(prototype.returns)
            function.argtypes = [self.ctype(split_declarator(p)[0]) for p in prototype.parameters]
            if prototype.rule:
                function.errcheck = RULES[prototype.rule]
        return missing


def _no_null(result: Any, function: Any, arguments: Any) -> Any:
    if not result:
        raise LlamaError(f"{function.__name__} returned NULL")
    return result


def _no_negative(result: Any, function: Any, arguments: Any) -> Any:
    if result < 0:
        raise LlamaError(f"{function.__name__} returned {result}", code=result)
    return result


def _no_zero(result: Any, function: Any, arguments: Any) -> Any:
    if result == 0:
        raise LlamaError(f"{function.__name__} returned 0", code=0)
    return result


RULES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "!null": _no_null,
    "!rc": _no_negative,
    "!zero": _no_zero,
}
