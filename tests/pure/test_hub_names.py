"""Names of models: what a text refers to, which model of a repository or of this machine it means."""

from pathlib import Path

import gguf
import pytest

from tests.support.cases import all_cases
from uma_trio.hub.caches import packaged_models
from uma_trio.hub.errors import HubError, NotInstalled
from uma_trio.hub.folder import InstalledModel
from uma_trio.hub.locate import find
from uma_trio.hub.names import HubReference, PathReference, ShortName, UrlReference, check_alias, parse
from uma_trio.hub.variants import RemoteFile, choose, group_parts, quantization_of, variants_of
from uma_trio.models.gguf_header import read_header


@all_cases(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B-GGUF:Q8_0", HubReference("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("Qwen/Qwen3-0.6B-GGUF", HubReference("Qwen/Qwen3-0.6B-GGUF")),
        ("Qwen/Qwen3-0.6B-GGUF:latest", HubReference("Qwen/Qwen3-0.6B-GGUF")),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", HubReference("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("a/b@v2:Q4_K_M", HubReference("a/b", "Q4_K_M", "v2")),
        ("a/b@refs/pr/1", HubReference("a/b", None, "refs/pr/1")),
        ("a/b:folder/file-00001-of-00002.gguf", HubReference("a/b", "folder/file-00001-of-00002.gguf")),
        ("https://huggingface.co/a/b", HubReference("a/b")),
        ("https://huggingface.co/a/b/tree/main", HubReference("a/b")),
        ("https://huggingface.co/a/b/blob/main/x/y.gguf", HubReference("a/b", "x/y.gguf")),
        ("https://huggingface.co/a/b/resolve/abc/y.gguf?download=true", HubReference("a/b", "y.gguf", "abc")),
        ("http://127.0.0.1:9/hub/a/b", HubReference("a/b")),
        ("https://example.com/m/x.gguf", UrlReference("https://example.com/m/x.gguf")),
        ("http://127.0.0.1:9/other/x.gguf", UrlReference("http://127.0.0.1:9/other/x.gguf")),
        ("model.gguf", PathReference("model.gguf")),
        ("models/model.gguf", PathReference("models/model.gguf")),
        ("./a/b", PathReference("./a/b")),
        ("~/models", PathReference("~/models")),
        ("/m/x", PathReference("/m/x")),
        ("a/b/c", PathReference("a/b/c")),
        ("llama3.2", ShortName("llama3.2")),
        ("llama3.2:1b", ShortName("llama3.2:1b")),
    ],
)
def test_what_a_text_refers_to(text: str, expected: object) -> None:
    assert parse(text, "http://127.0.0.1:9/hub") == expected


@all_cases(
    ("text", "reason"),
    [
        ("", "not a name of a model"),
        ("a b", "not a name of a model"),
        ("http://example.com/x.gguf", "not encrypted"),
        ("ftp://example.com/x.gguf", "not a URL of a web server"),
        ("https://user:hunter2@example.com/x.gguf", "a user name or a password"),
        ("https://", "not a URL"),
        ("https://example.com:x/y", "not a URL"),
        ("https://huggingface.co/models", "not the page or the file of a model"),
        ("https://example.com/\n", "not a URL"),
    ],
)
def test_what_refers_to_nothing(text: str, reason: str) -> None:
    with pytest.raises(HubError, match=reason) as raised:
        parse(text)
    assert "hunter2" not in str(raised.value)
    assert raised.value.remedy


def test_names_that_cannot_be_aliases() -> None:
    check_alias("qwen3")
    for name in ("a/b", "x.gguf", "embedded", "", "a b", "a:b", "-x"):
        with pytest.raises(HubError):
            check_alias(name)


# -- the models of a repository -----------------------------------------------------------------


@all_cases(
    ("path", "quantization"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("llama-2-7b.Q4_K_M.gguf", "Q4_K_M"),
        ("model_q4_k_m.gguf", "Q4_K_M"),
        ("tiny-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("x-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gemma-BF16.gguf", "BF16"),
        ("gemma-fp16.gguf", "F16"),
        ("Q4_K_M/big-00001-of-00003.gguf", "Q4_K_M"),
        ("big-Q6_K-00001-of-00003.gguf", "Q6_K"),
        ("plain.gguf", ""),
        ("Q8chat.gguf", ""),
    ],
)
def test_quantizations_in_names(path: str, quantization: str) -> None:
    assert quantization_of(path) == quantization


def test_parts_of_a_model_belong_together_and_projectors_are_no_models() -> None:
    split = [f"big-Q4_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    torn = ["torn-00001-of-00002.gguf"]
    assert group_parts([*reversed(split), *torn, "x.gguf", "mmproj-x.gguf", "x.imatrix.gguf", "README.md"]) == [
        split,
        ["x.gguf"],
    ]


FILES = [RemoteFile(f"m-{name}.gguf", 1 << 20) for name in ("F16", "Q8_0", "Q5_K_M", "UD-Q4_K_XL", "UD-IQ1_S")]


@all_cases(
    ("choice", "path"),
    [
        (None, "m-UD-Q4_K_XL.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-IQ1_S", "m-UD-IQ1_S.gguf"),
        ("m-F16.gguf", "m-F16.gguf"),
        ("M-f16", "m-F16.gguf"),
    ],
)
def test_which_model_of_a_repository(choice: str | None, path: str) -> None:
    assert choose(variants_of(FILES), choice, "a/b").path == path


def test_a_quantization_that_is_not_there_says_what_is() -> None:
    with pytest.raises(HubError) as raised:
        choose(variants_of(FILES), "Q2_K", "a/b")
    assert "Q8_0 (1.0 MiB)" in raised.value.remedy
    assert "a/b:UD-Q4_K_XL" in raised.value.remedy
    with pytest.raises(HubError, match="no GGUF files"):
        choose(variants_of([RemoteFile("model.safetensors")]), None, "a/b")
    two = variants_of([RemoteFile("x-Q8_0.gguf"), RemoteFile("y-Q8_0.gguf")])
    with pytest.raises(HubError, match="2 models") as raised:
        choose(two, "Q8_0", "a/b")
    assert "x-Q8_0.gguf, y-Q8_0.gguf" in raised.value.remedy


# -- the models of this machine -----------------------------------------------------------------


def installed(name: str, origin: str = "uma-trio", file: str = "") -> InstalledModel:
    quantization = name.partition(":")[2]
    return InstalledModel(
        name=name,
        origin=origin,  # type: ignore[arg-type]
        files=(Path("/m") / (file or f"{name.replace('/', '_')}.gguf"),),
        size_bytes=1,
        quantization=quantization,
    )


MODELS = [
    installed("llama3.2:1b", "Ollama", "sha256-1"),
    installed("mistral:latest", "Ollama", "sha256-2"),
    installed("Qwen/Qwen3-0.6B-GGUF:Q8_0", "Hugging Face"),
    installed("Qwen/Qwen3-0.6B-GGUF:Q4_K_M"),
    installed("bartowski/Qwen3-4B-GGUF:Q4_K_M", "LM Studio"),
    installed("someone/Qwen3-4B-GGUF:Q4_K_M"),
    installed("loose", file="loose.gguf"),
]


@all_cases(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("qwen/qwen3-0.6b-gguf:q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("Qwen/Qwen3-0.6B-GGUF", "Qwen/Qwen3-0.6B-GGUF:Q4_K_M"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B-GGUF:Q4_K_M"),
        ("qwen3-0.6b:q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("llama3.2:1b", "llama3.2:1b"),
        ("llama3.2", "llama3.2:1b"),
        ("mistral", "mistral:latest"),
        ("mistral:latest", "mistral:latest"),
        ("loose", "loose"),
    ],
)
def test_which_model_of_this_machine(text: str, name: str) -> None:
    assert find(parse(text), MODELS, ()).name == name


def test_the_same_model_of_two_programs_is_taken_from_our_own_folder() -> None:
    name = "a/b:Q8_0"
    found = find(parse(name), [installed(name, "Ollama"), installed(name), installed(name, "Hugging Face")], ())
    assert found.origin == "uma-trio"


def test_names_that_mean_several_models_or_none() -> None:
    with pytest.raises(HubError, match="may mean 2 models") as raised:
        find(parse("qwen3-4b"), MODELS, ())
    assert "someone/Qwen3-4B-GGUF:Q4_K_M" in raised.value.remedy
    with pytest.raises(NotInstalled) as missing:
        find(parse("llama3.1:1b"), MODELS, ())
    assert "did you mean llama3.2:1b?" in missing.value.remedy
    with pytest.raises(NotInstalled):
        find(parse("Qwen/Qwen3-0.6B-GGUF:Q2_K"), MODELS, ())


def test_models_of_the_package_are_listed_with_the_quantization_of_their_files() -> None:
    for model in packaged_models():
        file_type = gguf.LlamaFileType(read_header(model.path).values["general.file_type"])
        assert file_type.name == f"MOSTLY_{model.quantization}"
