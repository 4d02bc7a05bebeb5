"""Which LoRA adapters may reach llama.cpp: their headers, and their shapes against those of the model."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.cases import all_cases
from tests.support.gguf_files import ARRAY, F32, STRING, U32, array, gguf, pair, tensor, text
from uma_trio import config
from uma_trio.daemon.engines.adapter_check import check_adapters
from uma_trio.engine_link.load_errors import ModelError
from uma_trio.models.gguf_check import check_gguf
from uma_trio.models.gguf_header import GgufError

KIND_F32, KIND_F16, KIND_Q4_0, KIND_Q8_0, KIND_I32 = 0, 1, 2, 8, 26
BYTES = {KIND_F32: 4, KIND_F16: 2, KIND_I32: 4}
F64 = 12

WIDTH, HIDDEN, VOCABULARY, EXPERTS = 64, 96, 128, 4
MODEL = {
    "token_embd.weight": (WIDTH, VOCABULARY),
    "output.weight": (WIDTH, VOCABULARY),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.ffn_up.weight": (WIDTH, HIDDEN),
    "blk.0.ffn_down_exps.weight": (HIDDEN, WIDTH, EXPERTS),
}


def file_of(tensors, pairs, kind=KIND_F32):
    """A GGUF with tensors of zeros: name -> shape, or (shape, kind)."""
    entries, at = [], 0
    for name, given in tensors.items():
        shape, of = given if isinstance(given[0], tuple) else (given, kind)
        size = struct.calcsize("b")
        for dimension in shape:
            size *= dimension
        size = size * BYTES[of] if of in BYTES else size // 32 * (34 if of == KIND_Q8_0 else 18)
        entries.append(tensor(name, shape, of, at))
        at += -(-size // 32) * 32
    return gguf(pairs, entries, bytes(at))


def metadata(**changed):
    """Pairs of an adapter; ``None`` leaves one out."""
    values = {
        "general.type": pair("general.type", STRING, text("adapter")),
        "general.architecture": pair("general.architecture", STRING, text("llama")),
        "adapter.type": pair("adapter.type", STRING, text("lora")),
        "adapter.lora.alpha": pair("adapter.lora.alpha", F32, struct.pack("<f", 16.0)),
    } | {name.replace("__", "."): value for name, value in changed.items()}
    return [value for value in values.values() if value is not None]


def lora(name="blk.0.attn_q.weight", a=(WIDTH, 8), b=(8, WIDTH)):
    return {f"{name}.lora_a": a, f"{name}.lora_b": b}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of(MODEL, [pair("general.architecture", STRING, text("llama"))]))
    return path


def check(model, data, **settings):
    path = model.parent / "adapter.gguf"
    path.write_bytes(data)
    [found] = check_adapters([config.Adapter(name="a", path=str(path), **settings)], model)
    return found


GOOD = [
    (lora(), 8),
    (lora() | lora("blk.0.ffn_up.weight", (WIDTH, 4), (4, HIDDEN)), 8),
    (lora("blk.0.ffn_down_exps.weight", (HIDDEN, 2, EXPERTS), (2, WIDTH, EXPERTS)), 2),
    (lora("token_embd.weight", (4, VOCABULARY), (4, WIDTH)), 4),
    (lora("output.weight", (WIDTH, 4), (4, VOCABULARY)), 4),
    (lora() | {"output_norm.weight": (WIDTH,)}, 8),
    (lora(a=((WIDTH, 32), KIND_Q8_0), b=((32, WIDTH), KIND_F16)), 32),
]


@pytest.mark.parametrize(("tensors", "rank"), GOOD, ids=range(len(GOOD)))
def test_an_adapter_that_fits(model, tensors, rank):
    found = check(model, file_of(tensors, metadata()), scale=0.5)
    assert (found.name, found.rank, found.scale) == ("a", rank, 0.5)
    assert len(found.fingerprint) == 64
    assert found.size_bytes == found.path.stat().st_size


BAD_TENSORS = [
    ({"blk.0.attn_q.weight.lora_a": (WIDTH, 8)}, "has no blk.0.attn_q.weight.lora_b"),
    (lora(a=(WIDTH + 32, 8)), "do not fit the model's blk.0.attn_q.weight, which is 64 x 64"),
    (lora(b=(8, WIDTH + 1)), "do not fit"),
    (lora(a=(WIDTH, 4)), "do not fit"),
    (lora(a=(8, WIDTH), b=(8, WIDTH)), "do not fit"),
    (lora(a=(WIDTH, 8, 2)), "do not fit"),
    (lora(b=(8, WIDTH, 2)), "do not fit"),
    (lora(a=(WIDTH,)), "do not fit"),
    (lora("blk.1.attn_q.weight"), "changes blk.1.attn_q.weight, which the model does not have"),
    (lora("output_norm.weight", (WIDTH, 8), (8, 1)), "to which llama.cpp cannot apply"),
    (lora("blk.0.ffn_down_exps.weight", (HIDDEN, 2), (2, WIDTH)), "do not fit"),
    (lora("blk.0.ffn_down_exps.weight", (HIDDEN, 2, 3), (2, WIDTH, 3)), "do not fit"),
    (lora("token_embd.weight", (WIDTH, 4), (4, VOCABULARY)), "do not fit"),
    (lora("token_embd.weight", (4, VOCABULARY), (8, WIDTH)), "do not fit"),
    (lora() | {"blk.0.attn_q.weight": (WIDTH, WIDTH)}, "neither a .lora_a nor a .lora_b"),
    (lora() | {"blk.0.x.lora_a.lora_a": (WIDTH, 8)}, "neither a .lora_a nor a .lora_b"),
    ({"output_norm.weight": (WIDTH,)}, "has no matrices"),
    (lora(a=((WIDTH, 8), KIND_I32)), "has the type I32"),
    (lora(a=((WIDTH, 32), KIND_Q4_0), b=(32, WIDTH)), "has the type Q4_0"),
    (lora(a=(WIDTH, 5000), b=(5000, WIDTH)), "the rank 5000, more than 4096"),
]


@all_cases(("tensors", "reason"), BAD_TENSORS)
def test_matrices_that_would_end_the_process_or_have_no_effect_are_refused(model, tensors, reason):
    with pytest.raises(ModelError) as caught:
        check(model, file_of(tensors, metadata()))
    assert reason in str(caught.value)
    assert "cannot load the adapter a, " in str(caught.value)
    assert caught.value.remedy


BAD_METADATA = [
    ({"general__type": None}, "it is a model, and not an adapter"),
    ({"general__type": pair("general.type", STRING, text("model"))}, "it is a 'model', and not an adapter"),
    ({"general__type": pair("general.type", U32, struct.pack("<I", 1))}, "not an adapter"),
    ({"adapter__type": None}, "of the type '', and not lora"),
    ({"adapter__type": pair("adapter.type", STRING, text("control_vector"))}, "and not lora"),
    ({"general__architecture": pair("general.architecture", STRING, text("qwen3"))}, "is for the architecture 'qwen3'"),
    ({"general__architecture": None}, "is for the architecture ''"),
    ({"adapter__lora__alpha": pair("adapter.lora.alpha", F32, struct.pack("<f", float("nan")))}, "not a finite"),
    ({"adapter__lora__alpha": pair("adapter.lora.alpha", F32, struct.pack("<f", float("inf")))}, "not a finite"),
    ({"adapter__lora__alpha": pair("adapter.lora.alpha", U32, struct.pack("<I", 16))}, "not a finite 32-bit"),
    ({"adapter__lora__alpha": pair("adapter.lora.alpha", F64, struct.pack("<d", 16))}, "not a finite 32-bit"),
    ({"adapter__lora__alpha": pair("adapter.lora.alpha", STRING, text("16"))}, "not a finite 32-bit"),
    ({"adapter__lora__alpha": pair("adapter.lora.alpha", ARRAY, array(F32, 1, bytes(4)))}, "not a finite 32-bit"),
    ({"x": pair("adapter.alora.invocation_tokens", ARRAY, array(U32, 2, bytes(8)))}, "aLoRA"),
    ({"x": pair("split.count", U32, struct.pack("<I", 2))}, "part of a split file"),
]


@all_cases(("changed", "reason"), BAD_METADATA)
def test_files_that_are_no_lora_adapter_of_this_model_are_refused(model, changed, reason):
    with pytest.raises(ModelError) as caught:
        check(model, file_of(lora(), metadata(**changed)))
    assert reason in str(caught.value)
    assert caught.value.remedy


def test_an_adapter_without_alpha(model):
    assert check(model, file_of(lora(), metadata(adapter__lora__alpha=None))).rank == 8


def test_embeddings_that_are_also_the_output_cannot_be_adapted(model):
    """llama.cpp would multiply the matrices in the wrong order, and end the process."""
    tied = {name: shape for name, shape in MODEL.items() if name != "output.weight"}
    model.write_bytes(file_of(tied, [pair("general.architecture", STRING, text("llama"))]))
    with pytest.raises(ModelError, match="also the model's output"):
        check(model, file_of(lora("token_embd.weight", (4, VOCABULARY), (4, WIDTH)), metadata()))


@pytest.mark.parametrize("end", [0, 3, 30, 100, 300, -1])
def test_a_file_that_was_cut_is_refused(model, end):
    with pytest.raises(ModelError, match="cannot load the adapter"):
        check(model, file_of(lora(), metadata())[:end])


def test_a_file_that_is_not_there_or_is_a_folder(model):
    for path in ("nowhere.gguf", str(model.parent)):
        with pytest.raises(ModelError, match=r"cannot read the adapter a, .*give --adapter NAME=FILE"):
            check_adapters([config.Adapter(name="a", path=path)], model)


def test_an_adapter_is_no_model(model):
    path = model.parent / "adapter.gguf"
    path.write_bytes(file_of(lora(), metadata()))
    with pytest.raises(GgufError, match="it is an adapter, and not a model; give its model, and the adapter as"):
        check_gguf(path)


# -- the setting --------------------------------------------------------------------------------------


def test_adapters_in_flags_variables_and_files(tmp_path):
    flags = config.load(flags={"adapters": ("one=a.gguf", "two=~/b=c.gguf")}).model.adapters
    assert [(each.name, each.path, each.scale) for each in flags] == [("one", "a.gguf", 1), ("two", "~/b=c.gguf", 1)]
    assert config.load(environment={"UMA_ADAPTERS": "one=a.gguf,two=~/b=c.gguf"}).model.adapters == flags
    file = tmp_path / "uma.yaml"
    file.write_text("model:\n  adapters:\n  - {name: one, path: a.gguf}\n  - {name: two, path: ~/b, scale: 0.5}\n")
    loaded = config.load(file)
    assert [(each.name, each.scale) for each in loaded.model.adapters] == [("one", 1.0), ("two", 0.5)]
    assert config.load(file, flags={"adapters": ()}).model.adapters == loaded.model.adapters, "no flag is given"
    assert config.load(file, flags={"adapters": ("x=y",)}).model.adapters[0].name == "x"
    file.write_text(config.to_yaml(loaded))
    assert config.load(file) == loaded


@all_cases(
    ("value", "reason"),
    [
        (["a"], "each of adapters must be NAME=FILE"),
        ([1], "each of adapters must be NAME=FILE"),
        (["=x.gguf"], "an adapter's name must be"),
        (["a:b=x.gguf"], "an adapter's name must be"),
        (["a b=x.gguf"], "an adapter's name must be"),
        ([f"{'x' * 65}=x.gguf"], "an adapter's name must be"),
        (["a="], "the adapter a needs a file: a=FILE"),
        (["a=x\0"], "needs a file"),
        (["a=x", "a=y"], "the name a twice"),
        ([{"name": "a", "path": "x", "scale": 17}], "a number from -16 to 16"),
        ([{"name": "a", "path": "x", "scale": float("nan")}], "a number from -16 to 16"),
        ([{"name": "a", "path": "x", "scale": "1"}], "must be NAME=FILE"),
        ([{"name": "a", "path": "x", "rank": 4}], "unknown key 'rank'; known are name, path, scale"),
        ([{"name": "a"}], "must be NAME=FILE"),
        (7, "must be a list of at most 64"),
        ({"a": "x"}, "must be a list of at most 64"),
        ([f"a{n}=x" for n in range(65)], "must be a list of at most 64"),
    ],
)
def test_impossible_adapters_are_refused(value, reason):
    with pytest.raises(config.ConfigError, match="adapter") as caught:
        config.load(flags={"adapters": value})
    assert reason in str(caught.value)
