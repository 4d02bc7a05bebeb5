"""C source for the check: every declaration of this package, repeated after llama.h."""

from __future__ import annotations

import ctypes

from llama_abi.declarations import prototypes
from llama_abi.functions import FUNCTIONS
from llama_abi.types import C


def check_source(table: str = FUNCTIONS) -> str:
    """Generate C source that compiles only if the declarations agree with the header."""
    lines = ["#include <stddef.h>", '#include "llama.h"']
    for name, target in C.typedefs.items():
        returns, star, parameters = target.partition("(*)")
        lines.append(f"typedef {returns}(*{name}){parameters};" if star else f"typedef {target} {name};")
    for prototype in prototypes(table):
        lines += [f'#line 1 "{prototype.name}"', prototype.c]
    lines.append('#line 1 "types"')
    for enum, members in C.enums.items():
        for member, value in members.items():
            lines.append(_assert(f"{member} == {value}", f"{enum or 'macro'}: {member} is not {value}"))
    for name, fields in C.structs.items():
        size = ctypes.sizeof(C.known[name])
        lines.append(_assert(f"sizeof(struct {name}) == {size}", f"struct {name} has not {size} bytes"))
        for spelling, field in fields:
            offset = getattr(C.known[name], field).offset
            what = f"struct {name}: {field}"
            member = f"((struct {name} *)0)->{field}"
            lines += [
                _assert(f"offsetof(struct {name}, {field}) == {offset}", f"{what} is not at byte {offset}"),
                _assert(
                    f"__builtin_types_compatible_p(__typeof__({member}), {spelling})",
                    f"{what} is no {spelling}",
                ),
            ]
    names = ", ".join(f"(void (*)(void)){prototype.name}" for prototype in prototypes(table))
    lines += ['#line 1 "deprecated"', f"void (*const in_use[])(void) = {{ {names} }};"]
    return "\n".join(lines) + "\n"


def _assert(condition: str, message: str) -> str:
    return f'_Static_assert({condition}, "{" ".join(message.split())}");'
