"""Configuration: file < environment < flags, bounds, and error messages."""

import re
from pathlib import Path

import attrs
import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from tests.support.profile import amount
from uma_trio import config
from uma_trio.config import (
    Config,
    ConfigError,
    Engine,
    Limits,
    Listen,
    Model,
    Scheduling,
    Setting,
    load,
    settings,
    to_yaml,
)

ALL = list(settings())
BY_NAME = {found.name: found for found in ALL}


def write_config(folder: Path, text: str) -> Path:
    file = folder / "uma.yaml"
    file.write_text(text)
    return file


# -- the settings themselves --------------------------------------------------------------------------


def test_without_sources_all_settings_have_their_defaults() -> None:
    assert load() == Config()


def test_names_are_unique_over_all_sections() -> None:
    assert len(BY_NAME) == len(ALL)
    assert {found.section for found in ALL} == {*config.SECTIONS}
    assert {field.name for field in attrs.fields(Config)} == {*config.SECTIONS, "models"}


UNIT_IN_NAME = re.compile(r"_(s|ms|bytes|mb|tokens|attempts|share)$")
UNIT_IN_HELP = re.compile(
    r"\b(tokens?|sequences|threads|layers|connections|requests|sessions|files|models|devices)\b", re.IGNORECASE
)


@all_cases("found", ALL)
def test_each_setting_has_a_help_text_and_a_unit(found: Setting) -> None:
    assert found.help.endswith(".")
    assert re.fullmatch(r"[a-z][a-z0-9_]*", found.name)
    if found.type in (int, float) and found.section != "sampling":  # those have none
        assert UNIT_IN_NAME.search(found.name) or UNIT_IN_HELP.search(found.help), "the number has no unit"
    if found.type is float and found.section != "sampling":
        assert found.name.endswith(("_s", "_ms", "_share"))


@all_cases("found", ALL)
def test_each_number_has_two_bounds_and_a_default_within(found: Setting) -> None:
    if found.type in (int, float):
        assert set(found.bounds) - {"multiple_of"} in ({"ge", "le"}, {"gt", "le"})
        assert found.convert(found.default, "here") == found.default
    else:
        assert not found.bounds


def test_sections_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Config().limits.max_queue = 1  # type: ignore[misc]


# -- where values come from -----------------------------------------------------------------------------


def test_flags_beat_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = write_config(
        tmp_path, "limits:\n  max_connections: 1\n  max_queue: 1\n  max_tokens: 1\nmodel:\n  ctx: 100\n"
    )
    found = load(file, {"UMA_MAX_QUEUE": "2", "UMA_MAX_TOKENS": "2", "PATH": "/bin"}, {"max_tokens": "3", "ctx": None})
    assert found.limits == Limits(max_connections=1, max_queue=2, max_tokens=3)
    assert found.model == Model(ctx=100)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "limits:\n", "limits: {}\nmodel:\n"])
def test_empty_files(tmp_path: Path, text: str) -> None:
    assert load(write_config(tmp_path, text)) == Config()


def test_variables_of_the_test_suite_are_ignored() -> None:
    assert load(environment={"UMA_TEST_GPU": "1", "UMA_TEST_": "x", "OTHER_CTX": "1"}) == Config()


@all_cases(
    ("text", "message"),
    [
        ("limit:\n  max_queue: 1\n", "unknown section limit; did you mean limits?"),
        ("limits:\n  max_conections: 1\n", "unknown key max_conections; did you mean max_connections?"),
        ("limits:\n  ctx: 1000\n", "limits: ctx is a key of the section model; put it under model:"),
        ("limits:\n  CTX: 1000\n", "limits: CTX is a key of the section model"),
        ("limits:\n  max-queue: 1\n", "unknown key max-queue; did you mean max_queue?"),
        ("limits:\n  UMA_MAX_QUEUE: 1\n", "unknown key UMA_MAX_QUEUE; did you mean max_queue?"),
        ("limits:\n  gpu_layer: 1\n", "unknown key gpu_layer; did you mean gpu_layers, of the section model?"),
        ("limits:\n  zzz: 1\n", "known are default_max_tokens, drain_hand_over_s, drain_notice_s"),
        ("ctx: 5\n", "ctx is a key of the section model; put it under model:"),
        ("max-queue: 5\n", "max-queue is a key of the section limits"),
        ("model:\n  ctx: 1k\n\n  ctx: 2k\n", "ctx is set in line 2 and again in line 4; remove one of them"),
        ("model: {}\nlimits:\n  max_queue: 1\nmodel: {}\n", "model is set in line 1 and again in line 4"),
        ("5: 5\n", "unknown section 5"),
        ("limits:\n  5: 5\n", "unknown key 5"),
        ("- a\n", "expected keys and values, not list"),
        ("limits: 5\n", "limits: expected keys and values, not int"),
        ("model: small\n", "model: expected keys and values; to choose a model write model: {model: small}"),
        ("limits: [\n", "is not YAML: expected the node content, but found"),
        ("limits:\n\tmax_queue: 1\n", "look at line 2, column 1"),
        ("limits:\n  max_queue: 2024-99-99\n", "is not YAML"),
        (f"limits:\n  max_queue: {'9' * 5000}\n", "is not YAML"),
        ("limits: !!python/object:os.system {}\n", "is not YAML"),
        ("limits:\n  max_queue: 9" + ":59" * 2000 + ".5\n", "is not YAML"),
        ("limits: " + "[" * 2_000, "nested too deeply"),
        ("limits:\n  max_queue: " + "[" * 50 + "]" * 50, "from 0 to 1000000, not a list"),
        ("limits:\n  max_queue: {a: 1}\n", "from 0 to 1000000, not a dict"),
        ("a: &a [l]\nb: &b [*a, *a]\n", "the alias in line 2 stands for a list or a mapping"),
        ("a: &a\n  <<: *a\n", "the alias in line 2 stands for a list or a mapping"),
        (f"limits:\n  max_queue: 0x{'f' * 100_000}\n", "line 2 has a value of 100,002 characters"),
        (f"limits:\n  max_queue: 0x{'f' * 8000}\n", "from 0 to 1000000, not a number with many digits"),
        (f"limits:\n  max_queue: {'x' * 8000}\n", "x..."),
        (f"limits:\n  ? 0x{'f' * 8000}\n  : 1\n", "unknown key a number with many digits"),
        (f"{'x' * 900}: 1\n", "unknown section 'xxxxxx"),
        ('listen:\n  socket: "\\uD800"\n', "socket must be a path, not '\\ud800'"),
        ('limits:\n  max_queue: "\\uD800"\n', "from 0 to 1000000, not '\\ud800'"),
        ("limits:\n  max_queue: many\n", "max_queue must be a whole number from 0 to 1000000, not 'many'"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = write_config(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    for file in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read {re.escape(str(file))}"):
            load(file)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "binary.yaml")


def test_a_mapping_may_override_what_it_merges(tmp_path: Path) -> None:
    file = write_config(tmp_path, "limits: &same\n  max_queue: 1\n")
    assert load(file).limits.max_queue == 1
    file = write_config(tmp_path, "model: &m {ctx: 1k}\nscheduling: {}\n")
    assert load(file).model.ctx == 1024


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="UMA_MAX_CONECTIONS; did you mean UMA_MAX_CONNECTIONS"):
        load(environment={"UMA_MAX_CONECTIONS": "1"})
    with pytest.raises(ConfigError, match="unknown variable 'UMA_xxx") as caught:
        load(environment={"UMA_" + "x" * 100_000: "1"})
    assert len(str(caught.value)) < 5000


# -- values ---------------------------------------------------------------------------------------------


@all_cases("found", [found for found in ALL if found.type in (int, float)])
def test_bounds(found: Setting) -> None:
    ge, le, gt = found.bounds.get("ge"), found.bounds["le"], found.bounds.get("gt")
    inside = [le] if ge is None else [ge, le]
    outside = [le * 2, -1e9, *([gt] if gt is not None else [])] + ([ge - 1] if ge is not None else [])
    for value in inside:
        as_type = found.type(value)
        assert found.convert(as_type, "here") == as_type
        assert found.convert(repr(as_type), "here") == as_type
    for value in outside:
        with pytest.raises(ConfigError, match=f"here: {found.name} must be .* {le:.10g}"):
            found.convert(found.type(value), "here")


@all_cases(
    ("name", "value"),
    [
        ("ctx", value)
        for value in (True, None, "", "1.5", 1.5, 4096.0, "0x100", "many", [], {}, b"1", "9" * 5000, 10**400)
    ]
    + [
        ("idle_timeout_s", value)
        for value in (True, None, "", "soon", "nan", "inf", float("nan"), float("inf"), [], 10**400, "1" + "0" * 400)
    ]
    + [("temperature", value) for value in (True, "hot", "nan", -1, 101, "5m", [])]
    + [("mmap", value) for value in (1, 0, None, "maybe", "2", [], 1.0)]
    + [("type_k", value) for value in ("f32", "", None, 1, [], True)]
    + [("llama_dir", value) for value in (1, True, [], {}, b"x", "a\0b", "~no such user/x", "\ud800")]
    + [("model", value) for value in (1, True, [], {}, b"x", "a\0b", "\ud800")]
    + [(name, "\udcff") for name in ("ctx", "temperature", "mmap", "type_k", "idle_timeout_s")]
    + [("chat_template", "\ud800")],
)
def test_refused_values(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"here: {name} must be {re.escape(BY_NAME[name].expected)}"):
        BY_NAME[name].convert(value, "here")


@all_cases(
    ("name", "value", "found"),
    [
        ("ctx", "4096", 4096),
        ("ctx", " 4096 ", 4096),
        ("idle_timeout_s", 5, 5.0),
        ("idle_timeout_s", "1e3", 1000.0),
        ("drain_timeout_s", 0, 0.0),
        *[("mmap", value, True) for value in (True, "1", "true", "True", "YES", "on")],
        *[("mmap", value, False) for value in (False, "0", "false", "no", "OFF", "")],
        ("type_k", "q8_0", "q8_0"),
        *[("temperature", value, None) for value in (None, "")],
        ("temperature", "0.7", 0.7),
        ("temperature", 0, 0.0),
        ("top_k", "40", 40),
        ("model", None, None),
        ("model", "", None),
        ("model", "owner/repository:Q8_0", "owner/repository:Q8_0"),
        ("model", "~/a\udcff.gguf", "~/a\udcff.gguf"),  # bytes that are not UTF-8
        ("llama_dir", "", None),
        ("llama_dir", "a", Path("a")),
        ("llama_dir", "a\udcff", Path("a\udcff")),
        ("llama_dir", "~/a", Path.home() / "a"),
    ],
)
def test_accepted_values(name: str, value: object, found: object) -> None:
    converted = BY_NAME[name].convert(value, "here")
    assert converted == found
    assert type(converted) is type(found) or isinstance(converted, Path)


def test_settings_of_the_engine_have_shorter_names_in_code(tmp_path: Path) -> None:
    expected = Engine(mode="thread", hang_timeout_s=60.0, restart_attempts=0)
    flags = {"engine": "thread", "engine_hang_timeout_s": "60", "engine_restart_attempts": "0"}
    assert load(flags=flags).engine == expected
    assert load(environment={f"UMA_{name.upper()}": value for name, value in flags.items()}).engine == expected
    text = "engine:\n  engine: thread\n  engine_hang_timeout_s: 60\n  engine_restart_attempts: 0\n"
    assert load(write_config(tmp_path, text)).engine == expected
    assert BY_NAME["engine_hang_timeout_s"].flag == "--engine-hang-timeout-s"


def test_an_error_names_the_flag_or_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^--max-queue: max_queue must be"):
        load(flags={"max_queue": "-1"})
    with pytest.raises(ConfigError, match=r"^UMA_MAX_QUEUE: max_queue must be"):
        load(environment={"UMA_MAX_QUEUE": "-1"})


@all_cases(
    ("name", "value", "found"),
    [
        ("ctx", "32k", 32768),
        ("ctx", "32K", 32768),
        ("ctx", "1.5k", 1536),
        ("ctx", "1M", 1 << 20),
        ("max_queue", "2 k", 2048),
        ("max_frame_bytes", "512k", 512 << 10),
        ("max_frame_bytes", "8MiB", 8 << 20),
        ("max_frame_bytes", "8MB", 8_000_000),
        ("max_frame_bytes", "300B", 300),
        ("kv_mem_limit_mb", "8GiB", 8589),
        ("kv_mem_limit_mb", "8GB", 8000),
        ("kv_mem_limit_mb", "1T", 1_099_511),
        ("idle_timeout_s", "5m", 300.0),
        ("idle_timeout_s", "30s", 30.0),
        ("idle_timeout_s", "1h", 3600.0),
        ("idle_timeout_s", "1.5 min", 90.0),
        ("session_ttl_s", "7d", 604_800.0),
        ("target_itl_ms", "50ms", 50.0),
        ("target_itl_ms", "2s", 2000.0),
    ],
)
def test_suffixes_mean_the_same_in_all_places(tmp_path: Path, name: str, value: str, found: float) -> None:
    section = BY_NAME[name].section
    for loaded in (
        load(flags={name: value}),
        load(environment={BY_NAME[name].variable: value}),
        load(write_config(tmp_path, f"{section}:\n  {name}: {value}\n")),
    ):
        converted = getattr(getattr(loaded, section), name)
        assert converted == pytest.approx(found)
        assert type(converted) is type(found)


@all_cases(
    ("name", "value"),
    [
        *[("ctx", value) for value in ("32kk", "32KiB", "5s", "1.0001k", "k", "1 2k", "-1k", "99G", "1e999k", "٣k")],
        *[("max_frame_bytes", value) for value in ("8s", "8 MiBs", "1TiB", "1.5B")],
        *[("idle_timeout_s", value) for value in ("5GiB", "5x", "99999d", "0s", "-5m", "5m30s")],
        *[("mmap", value) for value in ("1k", "1s")],
        *[(name, "9" * 400 + unit) for name, unit in (("offload_max_mb", "gb"), ("ctx", "k"), ("idle_timeout_s", "h"))],
    ],
)
def test_wrong_suffixes_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"here: {name} must be {re.escape(BY_NAME[name].expected)}"):
        BY_NAME[name].convert(value, "here")


# -- settings that must fit each other ----------------------------------------------------------------------


@all_cases(
    ("flags", "needed"),
    [
        ({"batch_tokens": "32", "parallel": "17"}, "batch_tokens is 32"),
        ({"parallel": "256", "batch_tokens": "271"}, "make batch_tokens at least 320"),
        ({"prefill_burst_tokens": "512"}, "make batch_tokens at least 520"),
        ({"ctx": "64", "parallel": "49"}, "make ctx at least 113"),
    ],
)
def test_a_tick_has_room_for_every_stream_and_a_burst(flags: dict[str, str], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed) as caught:
        load(flags=flags)
    for name in ("parallel", "prefill_burst_tokens"):
        assert name in str(caught.value)


def test_just_enough_room_is_accepted() -> None:
    found = load(flags={"batch_tokens": "320", "parallel": "256", "min_chunk_tokens": "64"})
    assert found.model.batch_tokens - found.model.parallel == found.scheduling.min_chunk_tokens


def test_the_smallest_chunk_fits_next_to_the_streams() -> None:
    flags = {"batch_tokens": "512", "parallel": "8"}
    assert load(flags=flags | {"min_chunk_tokens": "504"}).scheduling.min_chunk_tokens == 504
    with pytest.raises(ConfigError, match=r"min_chunk_tokens is 505.*504 tokens of prompts .batch_tokens"):
        load(flags=flags | {"min_chunk_tokens": "505"})


# -- to_yaml ------------------------------------------------------------------------------------------------


def test_to_yaml_shows_every_setting_with_its_help_text() -> None:
    shown = to_yaml(Config())
    found = yaml.safe_load(shown)
    assert [(section, list(fields)) for section, fields in found.items()] == [
        (section, [each.name for each in ALL if each.section == section]) for section in config.SECTIONS
    ]
    flat = " ".join(line.strip().removeprefix("# ") for line in shown.splitlines())
    for each in ALL:
        assert each.help in flat
    assert all(len(line) <= 110 for line in shown.splitlines())


paths = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12).map(
    lambda name: Path("/", name)
)
configs = st.builds(
    Config,
    model=st.builds(
        Model,
        model=st.none() | paths.map(str),
        ctx=st.integers(2000, 2**26),
        mmap=st.booleans(),
        type_v=st.sampled_from(["f16", "q8_0", "q4_0"]),
    ),
    listen=st.builds(Listen, socket=st.none() | paths, protocol=st.sampled_from(["auto", "json", "cbor", "newline"])),
    limits=st.builds(Limits, idle_timeout_s=st.floats(1e-300, 1e6), max_queue=st.integers(0, 10**6)),
    scheduling=st.builds(Scheduling, target_itl_ms=st.floats(0, 60_000, exclude_min=True)),
)


@given(configs)
@hypothesis.settings(max_examples=amount(quick=10, thorough=300))
def test_load_reads_back_what_to_yaml_writes(tmp_path_factory: pytest.TempPathFactory, found: Config) -> None:
    file = tmp_path_factory.mktemp("config") / "uma.yaml"
    file.write_text(to_yaml(found), encoding="utf-8")
    assert load(file) == found


def test_to_yaml_is_ascii() -> None:
    assert to_yaml(Config(model=Model(model='/é/\U0001f600/\x7f\x85\n"\\.gguf'))).isascii()
