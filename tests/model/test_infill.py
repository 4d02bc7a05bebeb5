"""Texts with a gap: the tokens of the prompt, and what the daemon makes of them, next to llama-server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.gguf_files import U32, pair, with_pairs
from tests.support.llama_server import llama_server
from tests.support.profile import thorough
from tests.support.random_models import random_model, vocabulary_file
from tests.support.real_daemon import Daemon, real_daemon
from uma_trio.daemon.prompts.infill import InfillFormat
from uma_trio.engine_link.messages import PromptPart
from uma_trio.protocol.requests import Infill, InfillFile
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

CTX = 8192
VOCABULARY = "starcoder"
FILENAME = 5
PREFIX = "def add(a, b):\n    "
SUFFIX = "\n\nprint(add(1, 2))\n"
FILES = [{"filename": "one.py", "text": "import os\n"}, {"text": "x = 1\n"}]
REQUEST = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 24, "temperature": 0}


@pytest.fixture(scope="module", params=[False, True], ids=["no token for files", "a token for files"])
def marks_files(request: pytest.FixtureRequest) -> bool:
    """Whether the vocabulary has a token that stands before each file; Starcoder's ``<filename>`` may be one."""
    found: bool = request.param
    return found


def with_token(path: Path, folder: Path, *, marks_files: bool) -> Path:
    """The file with that token, if it shall have one."""
    if not marks_files:
        return path
    made = folder / path.name
    token = pair("tokenizer.ggml.fim_sep_token_id", U32, struct.pack("<I", FILENAME))
    made.write_bytes(with_pairs(path.read_bytes(), token))
    return made


@pytest.fixture(scope="module")
def tokenizer(library: object, marks_files: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    words = vocabulary_file(VOCABULARY)
    if not words.exists():
        pytest.skip(f"{words} is missing: ./build_llama.sh --dev unpacks it")
    with vocabulary(with_token(words, tmp_path_factory.mktemp("words"), marks_files=marks_files)) as found:
        yield found


@pytest.fixture(scope="module")
def model(library: object, marks_files: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = random_model("2x64", "f32", ctx=CTX, vocabulary=VOCABULARY)
    return with_token(made, tmp_path_factory.mktemp("model"), marks_files=marks_files)


@pytest.fixture(scope="module")
def daemon(model: Path) -> Iterator[Daemon]:
    with real_daemon(
        "--model", str(model), "--ctx", str(2 * CTX), "--parallel", "2", "--flash-attn", "off", "--http", "0"
    ) as found:
        yield found


def prompt_of(tokenizer: Tokenizer, infill: Infill, begun: str = "", *, context: int = CTX, n_answer: int = 64):
    return InfillFormat(tokenizer, context).tokens(infill, PromptPart(begun), n_answer)


def test_a_gap_between_two_texts(tokenizer: Tokenizer) -> None:
    tokens, dropped = prompt_of(tokenizer, Infill(prefix="one two", suffix=" three"), " and")
    text = tokenizer.decode(tokens, special=True)
    fim = tokenizer.fim
    pre, suf, mid = (tokenizer.decode([each], special=True) for each in (fim.prefix, fim.suffix, fim.middle))
    assert text.endswith(f"{pre}one two and{suf} three{mid}")
    assert dropped == 0


def test_files_stand_before_the_text(tokenizer: Tokenizer, marks_files: bool) -> None:
    tokens, _ = prompt_of(tokenizer, Infill(prefix="a", files=[InfillFile(text="x = 1", filename="one.py")]))
    text = tokenizer.decode(tokens, special=True)
    before = text[: text.index(tokenizer.decode([tokenizer.fim.prefix], special=True))]
    assert "x = 1" in before
    assert ("one.py\n" in before) is marks_files
    assert ("--- snippet ---" in before) is not marks_files
    assert tokens.tolist().count(FILENAME) == (2 if marks_files else 0), "and the file with the gap"


def test_control_tokens_that_a_text_spells_stay_text(tokenizer: Tokenizer) -> None:
    middle = tokenizer.fim.middle
    spelled = tokenizer.decode([middle], special=True)
    tokens, _ = prompt_of(tokenizer, Infill(prefix=spelled, suffix=spelled, files=[InfillFile(text=spelled)]))
    assert tokens.tolist().count(middle) == 1


def test_of_long_texts_what_is_next_to_the_gap_stays(tokenizer: Tokenizer) -> None:
    infill = Infill(prefix="far " * 4000 + "near", suffix="close" + " off" * 4000, files=[InfillFile(text="f " * 9000)])
    for context in (64, 256, 1024, 4096, CTX):
        tokens, dropped = prompt_of(tokenizer, infill, context=context, n_answer=16)
        text = tokenizer.decode(tokens, special=True)
        assert len(tokens) + 16 <= context
        assert "near" in text
        assert "close" in text
        assert dropped > 0
    assert len(tokens) > CTX - 64, "files fill the rest"


@pytest.fixture(scope="module")
def theirs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_file = tmp_path_factory.mktemp("llama-server") / "log"
    with llama_server(model, "-c", str(CTX), "-np", "1", "-fa", "off", log_file=log_file) as url:
        yield url


LONG = {"input_prefix": PREFIX * 400, "input_suffix": SUFFIX * 400}


@pytest.mark.parametrize(
    ("extra", "begun", "long"),
    [([], "", {}), (FILES, "return", {}), (FILES, "", LONG), thorough([], "return", LONG)],
)
def test_the_answer_is_that_of_llama_server(daemon: Daemon, theirs: str, extra, begun, long) -> None:
    body = {**REQUEST, "input_extra": extra, "prompt": begun, **long}
    expected, found = (httpx.post(f"{url}/infill", json=body, timeout=60).json() for url in (theirs, daemon.http_url()))
    assert found["content"] == expected["content"]
    assert found["tokens_evaluated"] == expected["tokens_evaluated"]
    assert found.keys() - {"model", "index", "prompt"} <= expected.keys()


def test_all_ways_to_ask_give_the_same_text(daemon: Daemon) -> None:
    url = daemon.http_url()
    whole = httpx.post(f"{url}/infill", json=REQUEST, timeout=60).json()["content"]
    infill = {"prefix": PREFIX, "suffix": SUFFIX}
    assert daemon.ask(infill=infill, max_tokens=24, temperature=0).text == whole
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 24, "temperature": 0}
        fields["model"] = client.models.list().data[0].id
        assert client.completions.create(**fields).choices[0].text == whole
        assert "".join(each.choices[0].text for each in client.completions.create(**fields, stream=True)) == whole
        assert client.completions.create(**fields, echo=True).choices[0].text == PREFIX + whole
        options = {"num_predict": 24, "temperature": 0}
        asked = {"model": fields["model"], "prompt": PREFIX, "suffix": SUFFIX, "options": options, "stream": False}
    assert httpx.post(f"{url}/api/generate", json=asked, timeout=60).json()["response"] == whole
    shown = httpx.post(f"{url}/api/show", json={"model": asked["model"]}).json()
    assert "insert" in shown["capabilities"]


def test_what_is_refused(daemon: Daemon) -> None:
    url = daemon.http_url()
    for path, body, field in (
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c"}]}, "input_extra"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": [1]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "session_id": "s"}, "suffix"),
    ):
        answer = httpx.post(f"{url}{path}", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field), answer.text
    answer = daemon.ask(infill={"prefix": "a"}, messages=[{"role": "user", "content": "b"}])
    assert answer.code == "E_PROTO_BAD_REQUEST"


def test_a_vocabulary_without_such_tokens(library: object) -> None:
    with real_daemon("--http", "0") as daemon:
        url = daemon.http_url()
        for path, body, field in (
            ("/infill", REQUEST, "input_prefix"),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ):
            answer = httpx.post(f"{url}{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["uma_code"], error["param"]) == (400, "E_MODEL_NO_INFILL", field)
            assert "Serve a model that was trained for it" in error["message"]
        answer = httpx.post(f"{url}/api/generate", json={"model": "embedded", "prompt": "a", "suffix": "b"})
        assert (answer.status_code, "trained for it" in answer.json()["error"]) == (400, True)
