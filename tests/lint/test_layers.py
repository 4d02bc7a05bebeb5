"""Imports go one way: a package imports only the packages above it in docs/ARCHITECTURE.md."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import uma_trio
from tests.support.cases import all_cases

ROOT = Path(uma_trio.__file__).parent.parent

PACKAGES = (
    *("files", "errors", "principal", "protocol", "config", "telemetry"),
    *("processes", "models", "engine_link", "grammar", "tokenizer", "encoder", "hub", "aici_link", "engine", "aici"),
    *(
        "daemon.policy",
        "daemon.kv",
        "daemon.kv_events",
        "daemon.store",
        "daemon.text",
        "daemon.prompts",
        "daemon.engines",
    ),
    *("daemon.aici", "daemon.serving", "daemon.sessions", "daemon.service", "daemon.registry", "daemon.requests"),
    *("daemon.detached", "daemon.doors", "daemon", "connect", "client", "gateway", "demo", "cli", "training"),
    "__main__",
)
"""Each may import those before it.  A new package gets its place here and in docs/ARCHITECTURE.md."""

PURE = (
    *("errors", "principal", "protocol", "config", "telemetry", "engine.sampling"),
    *("daemon.policy", "daemon.kv", "daemon.text"),
)

STANDARD_AND_PURE = frozenset(
    {
        *("__future__", "array", "bisect", "codecs", "collections", "difflib", "enum", "functools", "heapq", "io"),
        *("itertools", "json", "math", "operator", "re", "struct", "textwrap", "types", "typing"),
    }
)
PURE_MAY_IMPORT = STANDARD_AND_PURE | {"attrs", "base64", "cbor2", "msgspec", "numpy"}
"""Modules without a clock, a socket, a file or a task."""

EXCEPTIONS = {
    "config/fields.py": {"pathlib"},  # paths are values of the configuration
    "config/values.py": {"pathlib"},
    "config/sources.py": {"pathlib", "yaml"},  # it reads its own file
    "protocol/address.py": {"os", "pathlib"},  # one rule for the socket's path, for the daemon and its clients
    "protocol/peer.py": {"os", "socket", "sys"},  # likewise for the user at the other end
    # likewise for what files are passed in
    "protocol/sealed_memory.py": {"contextlib", "fcntl", "os", "socket", "sys"},
    "telemetry/perf_records.py": {"gzip", "zlib"},  # used on bytes in memory
}

NO_NUMPY = ("errors", "principal", "protocol", "config", "daemon.policy")
"""Imported by clients and by the command line, which must not wait a tenth of a second for numpy."""

DOORS_MAY_IMPORT = (
    *("config", "errors", "principal", "processes", "protocol", "telemetry"),
    *("daemon.detached", "daemon.doors", "daemon.registry", "daemon.requests", "daemon.service"),
)
"""A door calls ``ModelService``, runs requests, and knows nothing behind them."""


FOLDERS = {".".join(file.relative_to(ROOT).parent.parts) for file in (ROOT / "uma_trio").rglob("__init__.py")}


class Import:
    """One imported module, and the line that imports it."""

    def __init__(self, file: Path, line: int, module: str, *, is_star: bool = False) -> None:
        self.file, self.line, self.module, self.is_star = file, line, module, is_star

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def package(self) -> str | None:
        """The imported package; None if it is not one of ours."""
        parts = self.module.split(".")
        return package_in(parts[1:]) if parts[0] == "uma_trio" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below ``node``, without their expressions, which are most of a tree."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, part, ()):
            yield each
            yield from statements(each)


def imports_of(file: Path, source: str | None = None) -> list[Import]:
    """All imports of a file, also those inside functions and under TYPE_CHECKING."""
    if source is None:
        source = file.read_text()
    found = []
    for node in statements(ast.parse(source, str(file))):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = file.relative_to(ROOT).parent.parts
                module = ".".join([*package[: len(package) - node.level + 1], *([module] if module else [])])
            if module in FOLDERS or (node.level and not node.module):  # from uma_trio import config
                found += [Import(file, node.lineno, f"{module}.{alias.name}") for alias in node.names]
            else:
                found.append(Import(file, node.lineno, module, is_star=node.names[0].name == "*"))
    return found


def package_in(parts: Sequence[str]) -> str:
    """The package of a module.  The daemon has packages inside its folder; the modules next to them are ``daemon``."""
    inner = ".".join(parts[:2])
    return inner if parts[0] == "daemon" and inner in PACKAGES else parts[0]


@functools.cache
def parts_of(file: Path) -> tuple[str, ...]:
    return file.relative_to(ROOT / "uma_trio").with_suffix("").parts


def package_of(file: Path) -> str:
    return package_in(parts_of(file))


def is_in(file: Path, package: str) -> bool:
    """Whether a file is the package or a part of it."""
    return parts_of(file)[: package.count(".") + 1] == tuple(package.split("."))


FILES = sorted(file for file in (ROOT / "uma_trio").rglob("*.py") if "__pycache__" not in file.parts)
ABI_FILES = sorted((ROOT / "llama_abi").rglob("*.py"))


@functools.cache
def imports() -> dict[Path, list[Import]]:
    return {file: imports_of(file) for file in (*FILES, *ABI_FILES)}


def all_imports() -> Iterator[Import]:
    for file in FILES:
        yield from imports()[file]


def complain(wrong: list[Import], rule: str) -> None:
    assert not wrong, rule + "\n" + "\n".join(f"  {found}" for found in wrong)


def test_every_package_has_its_place() -> None:
    packages = {package_of(file) for file in FILES} - {"__init__"}
    assert packages <= set(PACKAGES), f"packages without a place in PACKAGES: {sorted(packages - set(PACKAGES))}"


@all_cases("package", PACKAGES)
def test_a_package_imports_only_packages_before_it(package: str) -> None:
    allowed = {*PACKAGES[: PACKAGES.index(package) + 1]}
    wrong = [
        found
        for found in all_imports()
        if package_of(found.file) == package and found.package is not None and found.package not in allowed
    ]
    complain(wrong, f"{package} stands before these in PACKAGES, so it may not import them:")


def test_the_order_is_the_one_that_is_documented() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    packages = text.split("## Packages")[1].split("```")[1].split("uma_trio/\n")[1]
    lines = re.findall(r"^(  |    )([a-z_]+)(?:\.py|/)\s", packages, re.MULTILINE)
    named = [f"daemon.{name}" if len(indent) > 2 else name for indent, name in lines]
    assert [name for name in (*named, "__main__") if name != "daemon"] == [
        name for name in PACKAGES if name != "daemon"
    ]


def modules_of(package: str) -> dict[str, set[str]]:
    """The modules of a package, each with the modules of the same package that it imports; ``inner.module`` in a package of it."""
    prefix = f"uma_trio.{package}."

    def name_of(file: Path) -> str:
        return ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix(prefix)

    return {
        name_of(file): {
            found.module.removeprefix(prefix) for found in imports()[file] if found.module.startswith(prefix)
        }
        for file in FILES
        if package_of(file) == package and file.stem != "__init__"
    }


@all_cases("package", PACKAGES)
def test_the_modules_of_a_package_have_no_import_cycle(package: str) -> None:
    graphlib.TopologicalSorter(modules_of(package)).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize(
    ("package", "page", "heading"),
    [
        ("daemon.serving", "design/scheduler.md", "## Modules"),
        ("daemon.kv", "design/kv-cache.md", "## Modules"),
    ],
)
def test_the_modules_of_a_package_import_each_other_in_the_documented_order(
    package: str, page: str, heading: str
) -> None:
    uses = modules_of(package)
    rest = (ROOT / "docs" / page).read_text().split(heading)[1]
    order = [name.replace("/", ".") for name in re.findall(r"^([\w/]+)  ", rest.split("```")[1], re.MULTILINE)]
    mentioned = set(re.findall(r"`(\w+)`", rest.split("```")[2].split("All of it")[0]))
    assert set(order) | (mentioned & set(uses)) == set(uses)
    for n, name in enumerate(order):
        below = uses[name] & set(order[n:])
        assert not below, f"docs/{page} lists {sorted(below)} below {name}, so {name} may not import them"


def test_nothing_imports_the_training_scripts_which_the_wheel_leaves_out() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "uma_trio/training" in wheel["exclude"]
    wrong = [found for found in all_imports() if found.package == "training" and package_of(found.file) != "training"]
    complain(wrong, "training is not in the wheel:")


def test_the_package_itself_imports_the_client_only_when_it_is_used() -> None:
    assert {found.module for found in imports()[ROOT / "uma_trio" / "__init__.py"]} <= {
        *("__future__", "typing", "uma_trio.client"),
    }
    code = "import sys, uma_trio\nprint([name for name in sys.modules if name.startswith('uma_trio.')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_import_nothing_with_side_effects(package: str) -> None:
    wrong = []
    for found in all_imports():
        if is_in(found.file, package):
            path = found.file.relative_to(ROOT / "uma_trio").as_posix()
            if found.top not in PURE_MAY_IMPORT | EXCEPTIONS.get(path, set()) | {"uma_trio"}:
                wrong.append(found)
    complain(wrong, f"{package} is pure: no tasks, no clock, no sockets, no files, no C:")


@pytest.mark.parametrize("package", NO_NUMPY)
def test_packages_that_a_client_needs_are_light(package: str) -> None:
    complain(
        [found for found in all_imports() if is_in(found.file, package) and found.top == "numpy"],
        f"{package} is imported by every command; numpy would slow all of them down:",
    )


def test_only_engine_encoder_and_tokenizer_import_llama_abi() -> None:
    installed = ROOT / "uma_trio/engine_link/installed.py"  # reads what was built, and loads nothing
    wrong = [
        found
        for found in all_imports()
        if found.top == "llama_abi"
        and package_of(found.file) not in ("encoder", "engine", "tokenizer")
        and found.file != installed
    ]
    complain(wrong, "only encoder, engine and tokenizer import llama_abi:")


TOUCH_C = ("aici_link/futex.py", "aici/runtime/functions.py", "aici/runtime/guest.py")
"""A system call, functions for Wasm, and its memory."""


def test_nobody_above_llama_abi_touches_ctypes() -> None:
    wrong = [
        found
        for found in all_imports()
        if found.top in ("ctypes", "cffi") and found.file.relative_to(ROOT / "uma_trio").as_posix() not in TOUCH_C
    ]
    complain(wrong, "only llama_abi touches C:")


def test_llama_abi_does_not_import_uma_trio() -> None:
    found = [found for file in ABI_FILES for found in imports()[file]]
    complain([each for each in found if each.top in ("uma_trio", "trio")], "llama_abi is C and nothing else:")


def test_click_stays_in_the_command_line() -> None:
    wrong = [found for found in all_imports() if found.top == "click" and package_of(found.file) not in ("cli",)]
    complain(wrong, "only cli imports click:")


def test_nothing_is_imported_by_star() -> None:
    complain([found for each in imports().values() for found in each if found.is_star], "name what you import:")


def test_trio_is_the_only_event_loop_of_the_daemon() -> None:
    wrong = [
        found
        for found in all_imports()
        if found.top == "asyncio"
        and found.file.parts[-2:] not in (("gateway", "transport.py"), ("gateway", "process.py"))
    ]
    complain(wrong, "tasks are trio's:")
    wrong = [
        found for found in all_imports() if found.top == "anyio" and package_of(found.file) not in ("client", "gateway")
    ]
    complain(wrong, "anyio is for the client, which runs in other people's event loops, and for the gateway:")


def test_the_client_knows_the_protocol_only() -> None:
    wrong = [
        found
        for found in all_imports()
        if package_of(found.file) in ("client", "connect")
        and found.package not in (None, "client", "connect", "errors", "protocol")
    ]
    complain(wrong, "the client imports connect, protocol and errors:")


GATEWAY_MAY_IMPORT = (
    *("client", "config", "errors", "files", "gateway", "principal", "processes", "protocol", "telemetry"),
)


URL_RULES = ("uma_trio.hub.errors", "uma_trio.hub.urls")
"""Which URLs this machine may open. The hub and the gateway follow the same rules."""


def test_the_gateway_is_a_client_of_the_socket() -> None:
    wrong = [
        found
        for found in all_imports()
        if package_of(found.file) == "gateway"
        and found.package not in (*GATEWAY_MAY_IMPORT, None)
        and found.module not in URL_RULES
    ]
    complain(wrong, "the gateway knows the daemon by its socket:")


def dialect_in(parts: Sequence[str]) -> str | None:
    """The folder of ``gateway/dialects`` that a module is in."""
    return parts[2] if len(parts) > 3 and tuple(parts[:2]) == ("gateway", "dialects") else None


def imported_dialects() -> Iterator[tuple[Import, str]]:
    """All imports of something in a dialect, with its folder; not those of what dialects share."""
    for found in all_imports():
        if (dialect := dialect_in(found.module.split(".")[1:])) not in (None, "common"):
            yield found, dialect


def test_dialects_do_not_import_each_other() -> None:
    wrong = [
        found
        for found, dialect in imported_dialects()
        if dialect_in(parts_of(found.file)) not in (None, dialect) or "common" in parts_of(found.file)
    ]
    complain(wrong, "what dialects share belongs into gateway/dialects/common:")


def test_the_gateway_knows_its_dialects_by_their_tables() -> None:
    """So a new API is a new folder, and a line of the application."""
    wrong = [
        found
        for found, _ in imported_dialects()
        if dialect_in(parts_of(found.file)) is None
        and not found.module.endswith(".dialect")
        and not (found.file.name == "application.py" and found.module.endswith(".endpoints"))
    ]
    complain(wrong, "outside of a dialect, only its Dialect is known, and to the application its endpoints:")


def test_doors_see_the_service_only() -> None:
    wrong = [
        found
        for found in all_imports()
        if is_in(found.file, "daemon.doors") and found.package not in (*DOORS_MAY_IMPORT, None)
    ]
    complain(wrong, "a door calls ModelService, runs requests, and knows nothing behind them:")


def test_the_engine_process_has_no_event_loop() -> None:
    wrong = [found for found in all_imports() if package_of(found.file) == "engine" and found.top == "trio"]
    complain(wrong, "these modules run in the engine's process:")


def test_the_reader_sees_every_kind_of_import() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from uma_trio import kv\n    from . import x\n    from ..e import y\n"
    found = imports_of(ROOT / "uma_trio" / "cli" / "ask.py", source)
    assert [each.module for each in found] == ["a.b", "c", "uma_trio.kv", "uma_trio.cli.x", "uma_trio.e"]
    assert [each.package for each in found] == [None, None, "kv", "cli", "e"]


@pytest.mark.parametrize(
    "statement", ["import uma_trio.cli", "import uma_trio.cli.serve, uma_trio.cli.ask, uma_trio.cli.metrics"]
)
def test_the_command_line_starts_without_the_heavy_modules(statement: str) -> None:
    """``--help``, a wrong flag and shell completion answer at once."""
    heavy = ["trio", "anyio", "numpy", "llama_abi", "yaml", "jinja2", "structlog", "rich", "msgspec", "psutil"]
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}} & set({heavy})))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == []
