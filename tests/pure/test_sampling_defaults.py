"""Sampling parameters that a request does not give: whose default counts."""

import attrs
import pytest

from tests.support.cases import all_cases
from uma_trio import config
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.errors import BadRequest
from uma_trio.models.sampling_defaults import recommended, sampling_defaults
from uma_trio.protocol.parameters import BUILT_IN, PARAMETERS, Parameter, given
from uma_trio.protocol.requests import parse_generate

SETTINGS = {found.name: found for found in config.settings() if found.section == "sampling"}


LEAST = {"id": "a", "prompt": "b"}


@all_cases("row", PARAMETERS)
def test_a_request_and_a_setting_have_the_bounds_of_the_table(row: Parameter) -> None:
    low, high = row.bounds.get("ge", row.bounds.get("gt")), row.bounds["le"]
    setting = SETTINGS[row.name]
    assert setting.type is row.type
    for value in (row.default, high, *([low] if "ge" in row.bounds else [])):
        assert getattr(parse_generate(LEAST | {row.name: value}), row.name) == setting.convert(value, "here") == value
    for value in (high + 1, low - 1, *([low] if "gt" in row.bounds else [])):
        with pytest.raises(BadRequest, match=f"^{row.name} must be (a|0 or 2)"):
            parse_generate(LEAST | {row.name: value})
        with pytest.raises(config.ConfigError, match=f"here: {row.name} must be (a|0 or 2)"):
            setting.convert(value, "here")
    assert getattr(parse_generate(LEAST | {row.name: None}), row.name) is None


def test_no_parameter_is_given_by_default() -> None:
    assert given(parse_generate(LEAST)) == given(config.Sampling()) == {}


def test_the_setting_beats_the_model_beats_what_is_built_in() -> None:
    of_model = {"temperature": 0.6, "top_k": 20}
    found = sampling_defaults(config.Sampling(temperature=0.0, min_p=0.1), of_model)
    assert {name: (each.value, each.source) for name, each in found.items()} == {
        **{name: (value, "built in") for name, value in BUILT_IN.items()},
        "temperature": (0.0, "server"),
        "top_k": (20, "model"),
        "min_p": (0.1, "server"),
    }


def test_without_settings_and_recommendations_all_is_built_in() -> None:
    found = sampling_defaults(config.Sampling(), {})
    assert SamplingParams(**{name: each.value for name, each in found.items()}) == SamplingParams()
    assert {each.source for each in found.values()} == {"built in"}
    assert found["temperature"].value == 0  # greedy


def test_a_model_file_recommends_with_the_keys_of_llama_cpp() -> None:
    metadata = {
        "general.sampling.temp": "0.600000",
        "general.sampling.top_k": "20",
        "general.sampling.top_p": "0.950000",
        "general.sampling.min_p": "0.000000",
        "general.sampling.penalty_repeat": "1.100000",
        "general.sampling.penalty_last_n": "256",
        "general.sampling.mirostat": "2",
        "general.sampling.unknown": "2",
    }
    found, problems = recommended(metadata.get)
    assert found == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "repeat_last_n": 256,
        "mirostat": 2,
    }
    assert problems == []
    assert {name: type(value) for name, value in found.items()} == {name: SETTINGS[name].type for name in found}


@all_cases("text", ["-0.5", "nan", "inf", "1e9", "hot", ""])
def test_an_impossible_recommendation_is_left_out_and_named(text: str) -> None:
    found, problems = recommended({"general.sampling.temp": text, "general.sampling.top_k": "5"}.get)
    assert found.get("temperature") is None
    assert found["top_k"] == 5
    assert not text or problems[0].startswith("general.sampling.temp: temperature must be a number from 0 to 100")


def test_a_negative_count_means_all_tokens() -> None:
    found, _ = recommended({"general.sampling.top_k": "-1", "general.sampling.penalty_last_n": "-1"}.get)
    assert found == {"top_k": 0, "repeat_last_n": 4096}


def test_a_new_api_has_all_parameters_and_may_rename_them() -> None:
    [row] = [row for row in PARAMETERS if row.name == "repetition_penalty"]
    assert row.names_in("new") == ("repetition_penalty",)
    assert attrs.evolve(row, api_names={"new": ("penalty",)}).names_in("new") == ("penalty",)
    assert (row.names_in("openai"), row.names_in("ollama")) == (
        ("repetition_penalty", "repeat_penalty"),
        ("repeat_penalty",),
    )
