"""C source for the check: every declaration of this package, repeated after the header that it is from."""

from __future__ import annotations

import ctypes

from llama_abi.declarations import Declarations, prototypes
from llama_abi.functions import FUNCTIONS
from llama_abi.mtmd_declarations import MTMD, MTMD_FUNCTIONS
from llama_abi.types import C


def check_source(table: str = FUNCTIONS, types: Declarations = C, header: str = "llama.h") -> str:
    """Generate C source that compiles only if the declarations agree with the header."""
    lines = ["#include <stddef.h>", f'#include "{header}"']
    for name, target in types.typedefs.items():
        returns, star, parameters = target.partition("(*)")
        lines.append(f"typedef {returns}(*{name}){parameters};" if star else f"typedef {target} {name};")
    for prototype in prototypes(table):
        lines += [f'#line 1 "{prototype.name}"', prototype.c]
    lines.append('#line 1 "types"')
    for enum, members in types.enums.items():
        for member, value in members.items():
            lines.append(_assert(f"{member} == {value}", f"{enum or 'macro'}: {member} is not {value}"))
    for name, fields in types.structs.items():
        size = ctypes.sizeof(types.known[name])
        lines.append(_assert(f"sizeof(struct {name}) == {size}", f"struct {name} has not {size} bytes"))
        for spelling, field in fields:
            offset = getattr(types.known[name], field).offset
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


def mtmd_check_source() -> str:
    """The same for libmtmd."""
    return check_source(MTMD_FUNCTIONS, MTMD, "mtmd-helper.h")


def _assert(condition: str, message: str) -> str:
    return f'_Static_assert({condition}, "{" ".join(message.split())}");'
