"""The reference documents agree with the code: every field is documented, every example works, every link resolves."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import typing
from pathlib import Path

import attrs
import pytest
import yaml

from tests.support.cases import all_cases
from tests.support.documents import ROOT, blocks, fenced, section, tables
from uma_trio import config
from uma_trio.cli import COMMANDS
from uma_trio.daemon.prompts.context import MIN_PROMPT_BYTES
from uma_trio.errors import BadRequest, all_errors
from uma_trio.protocol.answers import (
    Activity,
    AdapterDescription,
    AnswerInfo,
    AnswerList,
    Health,
    HealthCheck,
    ModelDescription,
    ModelList,
    SequenceInfo,
    SessionInfo,
    SessionList,
    Steered,
    TokenList,
    Transcript,
)
from uma_trio.protocol.chat import ChatMessage, Tool, ToolCall
from uma_trio.protocol.codec import ClientCodec, ServerCodec
from uma_trio.protocol.controllers import (
    MAX_ARG_BYTES,
    MAX_ARG_DEPTH,
    Backtrack,
    ControllerOutput,
    Controllers,
    ControllersQuery,
    ControllerTag,
    Fork,
    StorageWrite,
)
from uma_trio.protocol.events import (
    Embeddings,
    Eos,
    Failure,
    Forecast,
    Inserted,
    LoadProgress,
    Logprob,
    Logprobs,
    PrefillProgress,
    Ranking,
    Reasoning,
    Token,
    ToolCallDelta,
)
from uma_trio.protocol.framing import FrameReader, frame
from uma_trio.protocol.messages import parse, to_fields
from uma_trio.protocol.parameters import BUILT_IN, PARAMETERS, ROWS, Field, in_steps
from uma_trio.protocol.payload import Encoding, decode, encoding_of
from uma_trio.protocol.queries import (
    AnswersQuery,
    AttachQuery,
    ExplainQuery,
    HealthQuery,
    MetricsQuery,
    ModelsQuery,
    SessionQuery,
    SteerQuery,
    TokenizeQuery,
    WatchQuery,
)
from uma_trio.protocol.requests import (
    MAX_BIASES,
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    AdapterChoice,
    Cancel,
    Embed,
    Generate,
    Rerank,
    Slo,
)
from uma_trio.protocol.usage import Explanation, Insertion, Timings, Usage
from uma_trio.telemetry.catalogue import GROUPS, METRICS

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def named(rows: list[list[str]]) -> list[str]:
    return [match[1] for row in rows if (match := re.fullmatch(r"`([^`]+)`", row[0]))]


PROTOCOL = text_of("PROTOCOL.md") + text_of("PROTOCOL-REFERENCE.md")


# -- PROTOCOL.md and PROTOCOL-REFERENCE.md ------------------------------------------------------------


def rows_of(title: str) -> dict[str, list[str]]:
    """The rows of a section's first table of fields, by name."""
    found = tables(section(PROTOCOL, title))
    return {row[0].strip("`"): row for row in (found[0] if found else ()) if re.fullmatch(r"`[^`]+`", row[0])}


def shared_with(title: str) -> dict[str, list[str]]:
    """The rows that a message or an event, which has a small letter, has in common with all others."""
    return rows_of("Fields of every event" if title[0].islower() else "Fields of every message")


def test_the_table_of_errors_has_every_error_and_no_other() -> None:
    [rows] = tables(section(PROTOCOL, "Errors"))
    documented = {re.sub("`", "", row[0]): int(row[1]) for row in rows}
    assert documented == {cls.code: cls.http_status for cls in all_errors()}
    for row in rows:
        assert len(row) == 4
        assert all(row), f"{row[0]} needs a cause and what to do"
    assert set(re.findall(r"\bE_[A-Z_]+[A-Z]", PROTOCOL)) - set(documented) <= {
        "E_PROTO",
        "E_LIMIT",
        "E_RUNTIME",
        "E_MODEL",
        "E_SESSION",
        "E_ANSWER",
        "E_CONSTRAINT",
        "E_CONTROLLER",
    }


@all_cases(
    ("title", "cls"),
    [
        ("A request for text", Generate),
        ("Cancel", Cancel),
        ("Metrics query", MetricsQuery),
        ("A request for embeddings", Embed),
        ("embeddings", Embeddings),
        ("A request to rank", Rerank),
        ("ranking", Ranking),
        ("Session query", SessionQuery),
        ("Answers query", AnswersQuery),
        ("Attach query", AttachQuery),
        ("Steer query", SteerQuery),
        ("steered", Steered),
        ("Explain query", ExplainQuery),
        ("explanation", Explanation),
        ("answers", AnswerList),
        ("Tokenize query", TokenizeQuery),
        ("Models query", ModelsQuery),
        ("Health query", HealthQuery),
        ("Watch query", WatchQuery),
        ("Controllers query", ControllersQuery),
        ("controllers", Controllers),
        ("fork", Fork),
        ("controller", ControllerOutput),
        ("backtrack", Backtrack),
        ("health", Health),
        ("watch", Activity),
        ("tokens", TokenList),
        ("models", ModelList),
        ("sessions", SessionList),
        ("transcript", Transcript),
        ("token", Token),
        ("inserted", Inserted),
        ("tool_call", ToolCallDelta),
        ("progress", PrefillProgress),
        ("loading", LoadProgress),
        ("forecast", Forecast),
        ("eos", Eos),
        ("error", Failure),
    ],
)
def test_every_field_of_a_message_is_in_its_table(title: str, cls: type) -> None:
    fields = {field.name for field in attrs.fields(cls)} - set(BUILT_IN)
    own, shared = set(rows_of(title)), set(shared_with(title))
    assert own | shared & fields == fields | own & {"event"}


@all_cases(
    ("title", "cls"),
    [
        ("A request for text", Generate),
        ("Cancel", Cancel),
        ("Metrics query", MetricsQuery),
        ("A request for embeddings", Embed),
        ("A request to rank", Rerank),
        ("Session query", SessionQuery),
        ("Answers query", AnswersQuery),
        ("Attach query", AttachQuery),
        ("Steer query", SteerQuery),
        ("Explain query", ExplainQuery),
        ("Tokenize query", TokenizeQuery),
        ("Models query", ModelsQuery),
        ("Health query", HealthQuery),
        ("Watch query", WatchQuery),
        ("Controllers query", ControllersQuery),
    ],
)
def test_defaults_are_the_documented_ones(title: str, cls: type) -> None:
    documented = {name: row[2] for name, row in (shared_with(title) | rows_of(title)).items()}
    for field in attrs.fields(cls):
        if field.name in BUILT_IN:
            continue
        if field.default is attrs.NOTHING:
            expected = "required"
        elif field.default is None:
            expected = "*none*"
        elif isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
            expected = f"`{json.dumps(field.default.factory())}`" if field.name != "slo" else "`{}`"
        else:
            expected = f"`{json.dumps(field.default)}`"
        assert documented[field.name] == expected, field.name


def test_bounds_are_the_documented_ones() -> None:
    documented = {row[0].strip("`"): row[1] for row in tables(section(PROTOCOL, "A request for text"))[0]}
    for name, bounds in documented.items():
        if match := re.fullmatch(r"(-?[\d.]+) to ([\d.]+)", bounds):
            low, high = map(json.loads, match.groups())
            for value in (low, high):
                parse({"id": "r", "prompt": "x", name: value})
            for value in (low - 1, high + 1):
                with pytest.raises(BadRequest):
                    parse({"id": "r", "prompt": "x", name: value})
    assert int(documented["logit_bias"].split()[-1]) == MAX_BIASES
    for number in (MAX_METADATA_BYTES, MAX_METADATA_DEPTH, MAX_ARG_BYTES, MAX_ARG_DEPTH):
        assert str(number) in section(PROTOCOL, "A request for text")


@all_cases(
    ("title", "cls"),
    [
        ("A request for text", Slo),
        ("A request for text", ChatMessage),
        ("A request for text", Tool),
        ("A request for text", ToolCall),
        ("inserted", Insertion),
        ("eos", Usage),
        ("eos", Timings),
        ("eos", Logprobs),
        ("token", Logprob),
        ("sessions", SessionInfo),
        ("answers", AnswerInfo),
        ("A request for text", AdapterChoice),
        ("models", ModelDescription),
        ("models", AdapterDescription),
        ("health", HealthCheck),
        ("watch", SequenceInfo),
        ("controllers", ControllerTag),
        ("controller", StorageWrite),
    ],
)
def test_inner_fields_are_documented(title: str, cls: type) -> None:
    text = section(PROTOCOL, title)
    for field in attrs.fields(cls):
        assert f"`{field.name}`" in text


EVENTS = {
    "token": Token,
    "reasoning": Reasoning,
    "inserted": Inserted,
    "tool_call": ToolCallDelta,
    "progress": PrefillProgress,
    "loading": LoadProgress,
    "forecast": Forecast,
    "eos": Eos,
    "error": Failure,
    "transcript": Transcript,
    "answers": AnswerList,
    "steered": Steered,
    "explanation": Explanation,
    "tokens": TokenList,
    "models": ModelList,
    "health": Health,
    "embeddings": Embeddings,
    "ranking": Ranking,
    "watch": Activity,
    "controllers": Controllers,
    "fork": Fork,
    "controller": ControllerOutput,
    "backtrack": Backtrack,
}


def test_the_codec_accepts_every_json_example() -> None:
    examples = blocks(PROTOCOL, "json")
    assert len(examples) >= 8
    kinds = set()
    for example in examples:
        payload = example.strip().encode()
        fields = decode(payload, Encoding.JSON)
        if fields.get("event") in EVENTS:
            client = ClientCodec()
            client.receive_data(frame(payload))
            event = client.next_event()
            assert to_fields(event) == fields
            cls = EVENTS[fields["event"]]
            known = {field.name for field in attrs.fields(cls)} | {"event"}
            assert set(fields) <= known
            assert type(event) is cls
            kinds.add(cls)
        else:
            server = ServerCodec("auto", max_frame_bytes=1 << 20)
            server.receive_data(frame(payload))
            message = server.next_message()
            known = {field.name for field in attrs.fields(type(message))} | {"event", "type"}
            assert set(fields) <= known
            kinds.add(type(message))
    queries = {
        MetricsQuery,
        SessionQuery,
        AnswersQuery,
        AttachQuery,
        SteerQuery,
        ExplainQuery,
        TokenizeQuery,
        ModelsQuery,
        HealthQuery,
        WatchQuery,
        ControllersQuery,
    }
    assert kinds == {Generate, Embed, Rerank, Cancel, *queries, *EVENTS.values()}


def test_the_frames_decode_to_the_examples() -> None:
    text = section(PROTOCOL, "Byte by byte")
    frames = [bytes.fromhex(block) for block in blocks(text, "hex")]
    examples = [json.loads(block) for block in blocks(text, "json")]
    found = []
    for data in frames:
        reader = FrameReader(max_frame_bytes=1 << 20)
        reader.receive_data(data)
        payload = reader.next_payload()
        assert payload is not None
        assert not reader.mid_frame
        found.append(decode(payload, encoding_of(payload)))
    request, in_cbor, event = found
    assert request == in_cbor == examples[0]
    assert event == examples[1]
    assert [str(len(data)) in text for data in frames[:2]] == [True, True]


def test_the_minimal_client_is_short_and_compiles() -> None:
    source, _use = blocks(PROTOCOL, "python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    compile(source, "docs/PROTOCOL.md", "exec")
    imported = {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
    assert imported == {"json", "socket"}


def test_the_minimal_client_talks_to_the_codec(tmp_path: Path) -> None:
    import socket
    import threading

    source, _use = blocks(PROTOCOL, "python")
    space: dict[str, object] = {}
    exec(source, space)
    path = str(tmp_path / "uma.sock")
    seen = []

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as sock:
            codec = ServerCodec("auto", max_frame_bytes=1 << 20)
            while (message := codec.next_message()) is None:
                codec.receive_data(sock.recv(7))
            seen.append(message)
            timings = Timings(queue_ms=0, ttft_ms=1, total_ms=2, tokens_per_s=None)
            usage = Usage(prompt_tokens=1, completion_tokens=2)
            for event in (
                Token(id="1", text="hé", token_id=1),
                Token(id="1", text="llo", token_id=2),
                Eos(id="1", reason="stop", usage=usage, timings=timings),
            ):
                sock.sendall(codec.encode(event))

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    thread = threading.Thread(target=serve, args=(listener,))
    thread.start()
    try:
        assert "".join(space["ask"](path, prompt="x", max_tokens=2)) == "héllo"  # type: ignore[operator]
    finally:
        thread.join(60)
    assert seen == [Generate(id="1", prompt="x", max_tokens=2)]


def test_limits_are_the_defaults_and_settings_exist() -> None:
    names = {found.name: found for found in config.settings()}
    [rows] = tables(section(PROTOCOL, "Limits"))
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[2]):
            assert name in names
    shown = " ".join(row[1] for row in rows)
    for name in ("max_tokens", "max_queue", "max_connections", "max_prompt_tokens"):
        assert str(names[name].default) in shown
    for name in ("frame_timeout_s", "request_timeout_s", "idle_timeout_s", "write_timeout_s"):
        assert f"{names[name].default:g} s" in shown
    assert names["max_frame_bytes"].default == 16 << 20
    assert MIN_PROMPT_BYTES == 256 << 10
    for name in re.findall(r"`((?:max|default)_\w+|\w+_timeout_s)`", PROTOCOL):
        assert name in names, f"{name} is no setting"


def test_the_sampling_order_has_every_sampling_parameter() -> None:
    named = set(re.findall(r"`(\w+)`", section(text_of("PROTOCOL-REFERENCE.md"), "Sampling order")))
    missing = [row.name for row in PARAMETERS if row.name not in named]
    assert not missing, f"{missing}: say in PROTOCOL-REFERENCE.md, Sampling order, when they are applied"


# -- METRICS.md ---------------------------------------------------------------------------------------


METRICS_PAGE = DOCS / "METRICS.md"


def window_of(name: str) -> str:
    """The time that METRICS.md says a metric of this name is about."""
    if re.search(r"_(total|avg|share|rate)$|_avg_|^avg_|^histograms\.", name):
        return "since start"
    return "last 4096" if re.search(r"_p\d\d(_ms)?$", name) else "now"


def metrics_in_markdown(page: str) -> str:
    """METRICS.md with the table of each group made from the catalogue."""
    for title, group in GROUPS.items():
        before = section(page, title)
        lines = ["| field | meaning |", "|---|---|"]
        for metric in group:
            window = "" if metric.window in ("", window_of(metric.path)) else f" {metric.window.capitalize()}."
            meaning = metric.meaning.replace("|", "\\|")
            renamed = f" Prometheus: `{metric.prometheus_name}`." if metric.name else ""
            lines.append(f"| `{metric.path}` | {meaning}{window}{renamed} |")
        table = "\n".join(lines) + "\n"
        page = page.replace(before, re.sub(r"(?:^\|.*\n)+", lambda _, table=table: table, before, flags=re.MULTILINE))
    return page


def test_the_tables_of_metrics_are_made_from_the_catalogue() -> None:
    page = METRICS_PAGE.read_text()
    assert page == metrics_in_markdown(page), "run: python tests/pure/test_docs.py"
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [*GROUPS], "a group is a heading"


def test_every_metric_has_unit_and_window_and_meaning() -> None:
    assert len(METRICS) == sum(map(len, GROUPS.values())), "one is described twice"
    for name, metric in METRICS.items():
        assert metric.meaning.endswith((".", ":")), name
        assert metric.unit or not metric.window, name
        if name.endswith("_ms"):
            assert metric.unit == "ms", name
        if name.endswith("_total"):
            assert metric.window == "since start", name
        if metric.kind == "counter":
            assert name.endswith(("_total", "cpu_s")), name


def test_settings_that_metrics_md_names_exist() -> None:
    names = {found.name for found in config.settings()} | {name.split(".")[-1] for name in METRICS}
    names |= {metric.prometheus_name for metric in METRICS.values()}
    for name in re.findall(r"`([a-z]+_[a-z_]+)`", METRICS_PAGE.read_text()):
        assert name in names or name == "llama_decode", name


# -- CONFIG.md ----------------------------------------------------------------------------------------

BEGIN, END = "<!-- made by: python tests/pure/test_docs.py -->\n", "<!-- end -->\n"


def parameters_in_markdown() -> str:
    """The table of PROTOCOL-REFERENCE.md, from the table of the code."""
    lines = [
        "\n| parameter | bounds | built in | in the GGUF file: `general.sampling.` | |",
        "|---|---|---|---|---|",
    ]
    for row in PARAMETERS:
        kind = "integer, " if row.type is int else ""
        low = f"{row.bounds['ge']:g}" if "ge" in row.bounds else f"above {row.bounds['gt']:g}, up"
        key = f"`{row.gguf.removeprefix('general.sampling.')}`" if row.gguf else ""
        elsewhere = [f"is `{name}`" for name in row.names_in("llama-server") if name != row.name]
        elsewhere += [f"-1 is {row.minus_one:g}"] if row.minus_one != -1 else []
        others = f" In llama-server and Ollama {' and '.join(elsewhere)}." if elsewhere else ""
        values = in_steps(**row.bounds) if "multiple_of" in row.bounds else f"{low} to {row.bounds['le']:.10g}"
        bounds = f"{kind}{values}"
        lines.append(f"| `{row.name}` | {bounds} | {row.default:g} | {key} | {row.help}{others} |")
    return "\n".join(lines) + "\n\n"


def field_in_markdown(row: Field) -> str:
    """The row of PROTOCOL-REFERENCE.md for a field of a request."""
    bounds = row.bounds
    kind = {bool: "bool", str: "text of {min_length} to {max_length} characters"}.get(row.type, "{ge} to {le}")
    if typing.get_origin(row.type) is typing.Literal:
        kind = " or ".join(f"`{each}`" for each in typing.get_args(row.type))
    kind = kind.format(**bounds)
    if row.is_list:
        kind = (
            f"{kind}, or a list of at most {row.most}"
            if row.type in row.kinds
            else f"list of at most {row.most}, each {kind}"
        )
    default = row.default.factory() if isinstance(row.default, attrs.Factory) else row.default  # type: ignore[arg-type]
    shown = "*none*" if default is None else f"`{json.dumps(default)}`"
    unset = "" if row.unset is None else f" *none*: {row.unset}."
    return f"| `{row.name}` | {kind} | {shown} | {row.help}{unset} |\n"


def with_fields(page: str) -> str:
    """PROTOCOL-REFERENCE.md with the fields of the table in the code; a new one is the last."""
    before = table = re.search(r"(?:^\|.*\n)+", section(page, "A request for text"), re.MULTILINE)[0]  # type: ignore[index]
    for row in ROWS:
        if row not in PARAMETERS:
            line = field_in_markdown(row)
            table, found = re.subn(rf"^\| `{row.name}` .*\n", lambda _, line=line: line, table, flags=re.MULTILINE)
            table += "" if found else line
    return page.replace(before, table)


def settings_in_markdown() -> str:
    """The tables of CONFIG.md, from the fields themselves."""
    lines = []
    for name, cls in config.SECTIONS.items():
        lines += [f"\n## {name}\n", f"{cls.__doc__}\n", "| setting | value | default | meaning |", "|---|---|---|---|"]
        for found in config.settings():
            if found.section == name and found.name not in BUILT_IN:
                default = "" if found.default is None else f"`{json.dumps(found.default).strip(chr(34))}`"
                help = found.help.replace("|", "\\|")
                expected = re.sub(r"^a (whole )?number (from )?", "", found.expected)
                short = "" if found.short is None else f", `{found.short}`"
                lines.append(f"| `{found.name}`{short} | {expected} | {default} | {help} |")
        if name == "sampling":
            flags = {row.name: f"`{row.name}`" + (f" (`{row.short}`)" if row.short else "") for row in PARAMETERS}
            lines.append(
                f"| {', '.join(flags.values())} | | | [As in requests](PROTOCOL-REFERENCE.md#sampling-parameters). |"
            )
    return "\n".join(lines) + "\n\n"


MADE = {"CONFIG.md": settings_in_markdown, "PROTOCOL-REFERENCE.md": parameters_in_markdown}


def with_tables(name: str) -> str:
    """A page with its tables as the code says."""
    page = with_fields(text_of(name)) if name == "PROTOCOL-REFERENCE.md" else text_of(name)
    return page[: page.index(BEGIN) + len(BEGIN)] + MADE[name]() + page[page.index(END) :]


@all_cases("name", MADE)
def test_tables_are_made_from_the_code(name: str) -> None:
    assert text_of(name) == with_tables(name), "run: python tests/pure/test_docs.py"


def test_the_yaml_example_is_a_configuration(tmp_path: Path) -> None:
    for i, example in enumerate(blocks(text_of("CONFIG.md"), "yaml")):
        assert yaml.safe_load(example)
        file = tmp_path / f"{i}.yaml"
        file.write_text(example)
        config.load(file)


# -- commands, wherever they are mentioned ----------------------------------------------------------------


def commands_in(page: str) -> list[str]:
    """Command lines in code: each begins with ``uma-trio``."""
    code = re.findall(r"`([^`\n]+)`", page)
    for _, block in fenced(page):
        code += block.replace("\\\n", " ").splitlines()
    return [
        part.strip()
        for line in code
        for part in re.split(r"&&|\|\||\||;", line.split(" #")[0])
        if re.match(r"\s*uma-trio\b", part)
    ]


def flags_of(name: str) -> set[str]:
    command = importlib.import_module(f"uma_trio.cli.{name}").command
    parts = [command, *getattr(command, "commands", {}).values()]
    flags = {flag for part in parts for option in part.params for flag in (*option.opts, *option.secondary_opts)}
    return flags | {"-h", "--help"}


@all_cases("page", PAGES)
def test_commands_and_flags_that_are_mentioned_exist(page: Path) -> None:
    for line in commands_in(page.read_text()):
        words = shlex.split(line)[1:]
        if not words or words[0].startswith("-"):
            assert set(words) <= {"--help", "-h", "--version"}, line
            continue
        assert words[0] in COMMANDS, f"{page.name}: {line}"
        if importlib.util.find_spec(f"uma_trio.cli.{words[0]}") is None:
            continue
        own, _, of_serve = "\0".join(words[1:]).partition("\0--\0")  # uma-trio service install -- FLAGS OF SERVE
        for command, given in ((words[0], own), ("serve", of_serve)):
            flags = {word.split("=")[0] for word in given.split("\0") if re.match(r"--?[a-z]", word)}
            assert flags <= flags_of(command), f"{page.name}: {line}"


def test_flags_in_running_text_exist() -> None:
    """In the reference documents a flag alone is one of ``serve``, unless the line names its command."""
    for name in ("PROTOCOL.md", "PROTOCOL-REFERENCE.md", "METRICS.md", "CONFIG.md"):
        for line in text_of(name).splitlines():
            commands = [word for word in COMMANDS if f"uma-trio {word}" in line] or ["serve"]
            known = set().union(*(flags_of(command) for command in commands))
            for flag in re.findall(r"`(--[a-z-]+)", line):
                assert flag in known, f"{name}: {line}"


@all_cases("page", PAGES)
def test_every_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name}: {target}"


SOURCES = [file for folder in ("uma_trio", "llama_abi", "tests", "benches") for file in (ROOT / folder).rglob("*.py")]


def references(source: str) -> list[tuple[str, str | None]]:
    """The pages in ``docs`` that a source file names, each with the heading in quotes behind it."""
    found = re.findall(r'(?<![\w/])(docs/[\w/-]+\.md)(?! of )(?:,\s+"([^"]+)")?', source)
    return [(page, re.sub(r"\s+", " ", heading) or None) for page, heading in found]


def test_pages_and_headings_that_code_refers_to_exist() -> None:
    for file, text in ((file, file.read_text()) for file in SOURCES):
        for page, heading in references(text) if "docs/" in text else ():
            where = f"{file.relative_to(ROOT)} refers to {page}, {heading}"
            assert (ROOT / page).exists(), where
            if heading is not None:
                assert re.search(rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), re.MULTILINE), where


def test_references_are_found() -> None:
    text = "See docs/CONFIG.md, and docs/design/scheduler.md, 'Nobody\n starves'.".replace("'", '"')
    assert references(text) == [("docs/CONFIG.md", None), ("docs/design/scheduler.md", "Nobody starves")]


DESIGN_PAGES = sorted((DOCS / "design").glob("*.md"))


@all_cases("page", DESIGN_PAGES)
def test_a_design_page_begins_with_a_figure_or_a_table(page: Path) -> None:
    assert re.match(r"# .+\n\n(```|\||!\[)", page.read_text())


@all_cases("picture", sorted(DOCS.glob("*.svg")))
def test_pictures_are_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size < 500_000
    assert any(f"{picture.name})" in page.read_text() for page in PAGES), "no page shows it"


def test_the_architecture_fits_on_three_screens() -> None:
    assert len(text_of("ARCHITECTURE.md").splitlines()) <= 150


@all_cases("page", PAGES)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|md|c|h|sh|js))?)`", page.read_text()):
        assert any((place / name).exists() for place in (ROOT, ROOT / "uma_trio", page.parent)), name


def test_the_headline_table_has_ratios_of_its_figures() -> None:
    for row in tables(text_of("BENCHMARKS.md"))[0]:
        rival, ours, ratio = (float(re.match(r"[\d.,]+", row[n])[0].rstrip(",").replace(",", "")) for n in (2, 3, 4))  # type: ignore[index]
        assert ours / rival == pytest.approx(ratio, rel=0.06), row[0]


if __name__ == "__main__":
    for name in MADE:
        (DOCS / name).write_text(with_tables(name))
    METRICS_PAGE.write_text(metrics_in_markdown(METRICS_PAGE.read_text()))
