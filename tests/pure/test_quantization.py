"""The quantization of a model, from llama.cpp's description of it."""

from tests.support.cases import all_cases
from uma_trio.daemon.service import quantization


@all_cases(
    ("description", "expected"),
    [
        ("llama 8B Q4_K - Medium", "Q4_K_M"),
        ("llama 17Bx16E (Scout) Q5_K - Small", "Q5_K_S"),
        ("qwen2 1.5B Q8_0", "Q8_0"),
        ("qwen3moe 30B.A3B IQ2_XXS - 2.0625 bpw", "IQ2_XXS"),
        ("gemma3 1B all F32", "F32"),
        ("bert 33M F16", "F16"),
        ("gpt-oss 20B MXFP4 MoE", "MXFP4"),
        ("bitnet 3B TQ1_0 - 1.69 bpw ternary", "TQ1_0"),
        ("llama 7B unknown, may not work", None),
    ],
)
def test_the_quantization_is_named_as_in_file_names(description: str, expected: str | None) -> None:
    assert quantization(description) == expected
