"""Sampling parameters that a request does not give: whose default counts."""

import types
import typing

import msgspec
import pytest

from uma_trio import config
from uma_trio.protocol.requests import Generate
from uma_trio.sampling import SamplingParams, recommended, sampling_defaults
from uma_trio.sampling.defaults import BUILT_IN, GGUF_KEYS

SETTINGS = {found.name: found for found in config.settings() if found.section == "sampling"}


def test_settings_parameters_and_fields_of_a_request_have_the_same_names() -> None:
    assert set(BUILT_IN) == set(SETTINGS) - {"seed"} == set(SamplingParams.__struct_fields__) - {"seed"}
    assert set(GGUF_KEYS) <= set(BUILT_IN)
    request = Generate(id="a", prompt="b")
    assert all(getattr(request, name) is None for name in BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_setting_has_the_bounds_of_the_request(name: str) -> None:
    hint = typing.get_type_hints(Generate, include_extras=True)[name]
    assert isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    [annotated] = [each for each in typing.get_args(hint) if each is not type(None)]
    kind, meta = typing.get_args(annotated)
    assert SETTINGS[name].type is kind
    assert isinstance(meta, msgspec.Meta)
    assert {key: bound for key in ("ge", "gt", "le") if (bound := getattr(meta, key)) is not None} == SETTINGS[
        name
    ].bounds
    assert SETTINGS[name].convert(BUILT_IN[name], "here") == BUILT_IN[name]


def test_the_setting_beats_the_model_beats_what_is_built_in() -> None:
    of_model = {"temperature": 0.6, "top_k": 20}
    found = sampling_defaults(config.Sampling(temperature=0.0, min_p=0.1), of_model)
    assert {name: (each.value, each.source) for name, each in found.items()} == {
        "temperature": (0.0, "server"),
        "top_k": (20, "model"),
        "top_p": (1.0, "built in"),
        "min_p": (0.1, "server"),
        "repetition_penalty": (1.0, "built in"),
        "repeat_last_n": (64, "built in"),
        "frequency_penalty": (0.0, "built in"),
        "presence_penalty": (0.0, "built in"),
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
    }
    found, problems = recommended(metadata.get)
    assert found == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "repeat_last_n": 256,
    }
    assert problems == []
    assert {name: type(value) for name, value in found.items()} == {name: SETTINGS[name].type for name in found}


@pytest.mark.parametrize("text", ["-0.5", "nan", "inf", "1e9", "hot", ""])
def test_an_impossible_recommendation_is_left_out_and_named(text: str) -> None:
    found, problems = recommended({"general.sampling.temp": text, "general.sampling.top_k": "5"}.get)
    assert found.get("temperature") is None
    assert found["top_k"] == 5
    assert not text or problems[0].startswith("general.sampling.temp: temperature must be a number from 0 to 100")


def test_a_negative_count_means_all_tokens() -> None:
    found, _ = recommended({"general.sampling.top_k": "-1", "general.sampling.penalty_last_n": "-1"}.get)
    assert found == {"top_k": 0, "repeat_last_n": 4096}
