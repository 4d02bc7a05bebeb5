"""Fitting a model to memory: never more than is free, never worse with more memory, and what is set is kept."""

from __future__ import annotations

import re
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llama_abi
from uma_trio import config
from uma_trio.engine.fit import (
    ANY_GPU,
    GPU_WINDOW,
    LEAST_TOKENS,
    PLAIN,
    Arrangement,
    Companions,
    DoesNotFit,
    Fit,
    Memory,
    Unsupported,
    fit,
    place_layers,
)
from uma_trio.engine.layout import Environment, Layout
from uma_trio.engine.layout_choice import environment_of
from uma_trio.engine.open_fitted import arrangement_of, measure
from uma_trio.engine.placement import ModelDevices, place_on
from uma_trio.engine_link.defaults import DEFAULT_WINDOW, FLOOR_TOKENS, LARGE_BATCH
from uma_trio.models.sizes import ModelSizes

GIB = 1 << 30
MIB = 1 << 20


def a_model(n_layers: int = 32, layer_mib: int = 100, *, heads: int = 8, train: int = 32768) -> ModelSizes:
    """A model like those of 7 billion weights in 4 bits, unless said otherwise."""
    return ModelSizes(
        layers=(layer_mib * MIB,) * n_layers,
        input_bytes=70 * MIB,
        output_bytes=100 * MIB,
        output_cpu_bytes=100 * MIB,
        keys=(heads * 128,) * n_layers,
        values=(heads * 128,) * n_layers,
        head_widths=(128,),
        n_ctx_train=train,
        n_vocab=32_000,
        n_embd=4096,
        n_head=32,
        widest=14336,
    )


MODELS = st.builds(
    a_model,
    st.integers(1, 48),
    st.integers(1, 400),
    heads=st.sampled_from([0, 1, 8, 32]),
    train=st.sampled_from([512, 3000, 8192, 131_072]),
)
SETTINGS = st.builds(
    config.Model,
    ctx=st.sampled_from([0, 0, 0, 4096, 65_536]),
    parallel=st.sampled_from([1, 3, 8]),
    batch_tokens=st.sampled_from([0, 0, 256]),
    gpu_layers=st.sampled_from([-1, -1, 0, 5]),
    kv_unified=st.sampled_from(["auto", "on", "off"]),
    flash_attn=st.sampled_from(["auto", "on", "off"]),
    type_k=st.sampled_from(["auto", "auto", "f16", "q8_0"]),
    type_v=st.sampled_from(["auto", "auto", "f16"]),
    fit_reserve_mb=st.sampled_from([0, 100]),
    memory_limit_mb=st.sampled_from([0, 0, 2000]),
)
FREE = st.integers(0, 64 * GIB)
GPUS = st.lists(st.integers(MIB, 32 * GIB), max_size=3)


def compute(settings: config.Model, layout: Layout) -> tuple[int, ...]:
    """Compute buffers as large as llama.cpp's with flash attention."""
    return (layout.n_ubatch * (400_000 + 4 * layout.n_ctx),) * 4


def memories(ram: int, gpus: list[int]) -> list[Memory]:
    return [Memory("RAM", ram), *(Memory(f"GPU{n}", free) for n, free in enumerate(gpus))]


CUDA = Environment(on_gpu=True, computes_masked_cells=True)
ENVIRONMENTS = st.sampled_from([ANY_GPU, CUDA, attrs.evolve(CUDA, target_itl_ms=18.0)])


def fitted(
    sizes: ModelSizes, settings: config.Model, ram: int, gpus: list[int], where: Environment = ANY_GPU
) -> Fit | None:
    try:
        return fit(sizes, settings, memories(ram, gpus), compute, environment=where)
    except DoesNotFit:
        return None


def rank(found: Fit | None) -> tuple[object, ...]:
    """How good a choice is, in the order of giving up backwards."""
    if found is None:
        return (False,)
    chosen = found.settings
    is_floor = chosen.ctx >= FLOOR_TOKENS * chosen.parallel
    types = ["q8_0", "f16"]
    return (
        True,
        found.layout.n_ctx >= LEAST_TOKENS and is_floor,
        found.on_gpu,
        min(chosen.batch_tokens, config.DEFAULT_BATCH),
        types.index(chosen.type_k),
        types.index(chosen.type_v),
        chosen.ctx,
        chosen.batch_tokens,
    )


@given(MODELS, SETTINGS, FREE, GPUS, ENVIRONMENTS)
def test_never_more_than_is_free_and_what_is_set_is_kept(sizes, settings, ram, gpus, where):
    found = fitted(sizes, settings, ram, gpus, where)
    if found is None:
        return
    for need, each in zip(found.needs, found.memories, strict=True):
        assert need <= each.usable_bytes(settings) <= each.free_bytes
    chosen = found.settings
    for name in ("parallel", "kv_unified", "flash_attn", "mmap"):
        assert getattr(chosen, name) == getattr(settings, name)
    assert settings.ctx in (0, chosen.ctx)
    assert settings.batch_tokens in (0, chosen.batch_tokens)
    assert settings.type_k in ("auto", chosen.type_k)
    assert settings.type_v in ("auto", chosen.type_v)
    if settings.gpu_layers >= 0 and gpus:
        assert found.on_gpu == min(settings.gpu_layers, sizes.n_layers)
    assert "auto" not in (chosen.type_k, chosen.type_v)
    assert chosen.ctx
    assert chosen.batch_tokens
    if chosen.type_v != "f16":
        assert chosen.flash_attn != "off", "llama.cpp quantizes V with flash attention only"


@given(MODELS, SETTINGS, FREE, st.integers(0, 32 * GIB))
def test_more_memory_is_never_worse(sizes, settings, ram, more):
    assert rank(fitted(sizes, settings, ram, [])) <= rank(fitted(sizes, settings, ram + more, []))


@given(MODELS, SETTINGS, st.integers(MIB, 32 * GIB), st.integers(0, 32 * GIB), ENVIRONMENTS)
def test_more_memory_on_a_gpu_is_never_worse(sizes, settings, free, more, where):
    settings = attrs.evolve(settings, memory_limit_mb=0)
    less, enough = (fitted(sizes, settings, 64 * GIB, [n_bytes], where) for n_bytes in (free, free + more))
    assert rank(less) <= rank(enough)


@pytest.mark.parametrize(
    ("gib", "parallel", "unified", "tokens"),
    [
        (140, 8, False, GPU_WINDOW),
        (80, 8, False, 20_480),
        (24, 8, False, DEFAULT_WINDOW),
        (8, 8, True, 0),  # less than 8,192 tokens for each would fit: all of them for the one that needs them
        (140, 64, False, DEFAULT_WINDOW),
        (140, 256, False, 4096),  # many were asked for: what there is, divided
    ],
)
def test_with_per_sequence_kv_a_request_gets_more_where_there_is_room(gib, parallel, unified, tokens):
    """A quarter of the memory: 131,072 bytes a token."""
    settings = config.Model(parallel=parallel)
    found = fitted(a_model(), settings, 64 * GIB, [gib * GIB], CUDA)
    assert found is not None
    assert found.layout.unified == unified
    if not unified:
        assert found.settings.ctx == tokens * parallel
    tight = fitted(a_model(), settings, 64 * GIB, [gib * GIB], attrs.evolve(CUDA, target_itl_ms=18.0))
    assert tight is not None
    assert tight.layout.unified
    assert tight.settings.ctx <= DEFAULT_WINDOW * parallel


@given(MODELS, SETTINGS, FREE, GPUS)
def test_a_large_batch_takes_nothing_from_anything_else(sizes, settings, ram, gpus):
    found = fitted(sizes, settings, ram, gpus, CUDA)
    with_512 = fitted(sizes, attrs.evolve(settings, batch_tokens=config.DEFAULT_BATCH), ram, gpus, CUDA)
    if found is None or settings.batch_tokens or found.settings.batch_tokens <= config.DEFAULT_BATCH:
        return
    assert with_512 is not None
    assert found.on_gpu == found.n_layers
    assert found.settings == attrs.evolve(with_512.settings, batch_tokens=LARGE_BATCH)


@pytest.mark.parametrize(("where", "tokens"), [(ANY_GPU, config.DEFAULT_BATCH), (CUDA, LARGE_BATCH)])
def test_batches_where_there_is_room_for_all(where, tokens):
    found = fitted(a_model(), config.Model(), 64 * GIB, [80 * GIB], where)
    assert found is not None
    assert found.settings.batch_tokens == tokens


def test_the_order_of_giving_up():
    """With less and less memory on the GPU."""
    sizes, seen = a_model(), []
    for free in range(20 * GIB, 0, -128 * MIB):
        found = fitted(sizes, config.Model(), 64 * GIB, [free])
        assert found is not None
        if not seen or seen[-1] != found.gave_up:
            seen.append(found.gave_up)
    ctx, kv, batch, layers = "ctx 8192 for each request", "KV f16", "batches of 512 tokens", "all layers on the GPU"
    assert seen[:5] == [(), (ctx,), (ctx, kv), (ctx, kv, batch), (ctx, kv, batch, layers)]


@given(st.floats(3.9, 11.0), st.sampled_from(["on", "off"]))
def test_most_of_the_memory_is_used_where_it_is_needed(gib, unified):
    """On a GPU with a sixteenth of the memory for a reserve.  A step of the context is at most a sixteenth as well."""
    found = fitted(a_model(), config.Model(kv_unified=unified, parallel=4), 64 * GIB, [int(gib * GIB)])
    assert found is not None
    if found.gave_up:
        assert found.needs[1] >= 0.85 * gib * GIB


def test_without_flash_attention_the_kv_cache_is_not_quantized():
    found = fitted(a_model(), config.Model(flash_attn="off"), 64 * GIB, [4 * GIB])
    assert found is not None
    assert (found.settings.type_k, found.settings.type_v) == ("f16", "f16")


def test_settings_that_llama_cpp_refuses_are_not_chosen():
    def without_flash_attention(settings, layout):
        if settings.type_v != "f16":
            raise Unsupported("no flash attention here")
        return compute(settings, layout)

    found = fit(a_model(), config.Model(), memories(64 * GIB, [4 * GIB]), without_flash_attention)
    assert found.settings.type_v == "f16"
    assert found.on_gpu < a_model().n_layers


def test_a_gpu_without_room_for_a_layer_is_not_used_at_all():
    """llama.cpp would allocate buffers there, which do not fit either."""
    settings = config.Model(devices=("GPU0", "GPU1"), tensor_split=(3.0, 1.0), n_cpu_moe=2)
    found = fit(a_model(), settings, memories(64 * GIB, [GIB // 8, GIB // 8]), compute)
    assert found.on_gpu == 0
    chosen = found.settings
    assert (chosen.devices, chosen.tensor_split, chosen.n_cpu_moe) == (("none",), (), 0)
    kept = fit(a_model(), config.Model(gpu_layers=0), memories(64 * GIB, [8 * GIB]), compute)
    assert kept.settings.devices == (), "with no layers there on request, large products still are"


def test_a_correction_makes_the_choice_smaller():
    plain = fit(a_model(), config.Model(), [Memory("RAM", 12 * GIB)], compute)
    corrected = fit(a_model(), config.Model(), [Memory("RAM", 12 * GIB, correction=1.2)], compute)
    assert corrected.settings.ctx < plain.settings.ctx


def test_an_integrated_gpu_takes_its_memory_from_the_machine():
    shared = [Memory("RAM", 6 * GIB), Memory("GPU", 6 * GIB, shares_ram=True)]
    found = fit(a_model(), config.Model(), shared, compute)
    assert found.needs[0] > found.needs[1]
    assert found.needs[0] <= 6 * GIB


@pytest.mark.parametrize(
    ("n_layers", "gpu_layers", "free", "expected"),
    [
        (5, -1, [8], [0] * 5),
        (5, 2, [8], [-1, -1, -1, 0, 0]),
        (5, 9, [8], [0] * 5),
        (5, 0, [8], [-1] * 5),
        (6, -1, [4, 8], [0, 0, 1, 1, 1, 1]),
        (3, -1, [], [-1] * 3),
        (3, -1, [0], [-1] * 3),
    ],
)
def test_where_layers_go(n_layers, gpu_layers, free, expected):
    assert place_layers(n_layers, gpu_layers, free) == expected


REFUSALS = {
    "ctx": ({"ctx": 262_144}, 6, [], r"^a KV cache of 262144 tokens takes 18\.3 GB in q8_0, and 6\.4 GB of memory are free; lower --ctx to \d+ or less$"),
    "the weights": ({}, 2, [], r"^the weights take 3,370 MiB, and 2,048 MiB are free, 123 MiB of it a reserve; take a smaller model or a stronger quantization, or --fit off, which reads the weights from disk while it computes$"),
    "the weights, without mmap": ({"mmap": False}, 2, [], r"; take a smaller model or a stronger quantization$"),
    "gpu_layers": ({"gpu_layers": 33}, 64, [2], r"^33 of 33 layers take 3,\d+ MiB, and 2,048 MiB are free on GPU0, 123 MiB of it a reserve; lower --gpu-layers to 1\d, or leave it out$"),
    "no GPU": ({"gpu_layers": 0}, 2, [24], r"; leave out --gpu-layers, so that layers go to the GPU$"),
    "parallel": ({"parallel": 256}, 6, [], r"^the model with 512 tokens of context for each of 256 requests takes [\d.,]+ [MG]iB, and 6,144 MiB are free, \d+ MiB of it a reserve; lower --parallel to \d+$"),
    "types": ({"type_k": "f16", "type_v": "f16", "ctx": 16_384}, 5, [], r"lower --ctx to \d+ or less, or set --type-k and --type-v to q8_0$"),
    "batch_tokens": ({"batch_tokens": 8192, "parallel": 1, "gpu_layers": 33}, 64, [5], r"leave out --batch-tokens$"),
    "memory_limit_mb": ({"memory_limit_mb": 3000}, 64, [], r"^the weights take 3,370 MiB, and 2,861 MiB are allowed \(memory_limit_mb\); raise --memory-limit-mb$"),
    "fit_reserve_mb": ({"fit_reserve_mb": 64_000}, 60, [], r"lower --fit-reserve-mb$"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "ram", "gpus", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_with_numbers_and_the_setting_that_helps(settings, ram, gpus, message):
    with pytest.raises(DoesNotFit, match=message):
        fit(
            a_model(),
            config.Model(**settings),
            memories(ram * GIB, [n * GIB for n in gpus]),
            compute,
        )


def test_what_is_loaded_with_a_model_needs_room_as_well():
    alone = fit(a_model(), config.Model(), memories(64 * GIB, [8 * GIB]), compute)
    draft, adapters = a_model(4, 50), 600 * MIB
    together = Companions(draft=draft, draft_compute=compute, adapter_bytes=adapters)
    found = fit(a_model(), config.Model(), memories(64 * GIB, [8 * GIB]), compute, companions=together)
    assert found.settings.ctx < alone.settings.ctx
    search = attrs.evolve(alone.settings, ctx=found.settings.ctx)
    same = fit(a_model(), search, memories(64 * GIB, [8 * GIB]), compute)
    of_draft = sum(draft.layers) + draft.output_bytes + sum(draft.cache_bytes(search, n, search.ctx) for n in range(4))
    assert found.needs[1] - same.needs[1] == pytest.approx(
        of_draft + adapters + compute(search, same.layout)[1], rel=0.01
    )


def test_the_projector_needs_room_where_pictures_are_encoded():
    see = Companions(projector_bytes=900 * MIB)
    for gpus, at, on_gpu in (([8 * GIB], 1, True), ([8 * GIB], 0, False), ([], 0, True)):
        settings = config.Model(ctx=4096, mmproj_offload=on_gpu)
        alone = fit(a_model(), settings, memories(64 * GIB, gpus), compute)
        found = fit(a_model(), settings, memories(64 * GIB, gpus), compute, companions=see)
        assert found.needs[at] - alone.needs[at] == see.projector_bytes


def test_the_encoder_of_pictures_waits_before_the_context_is_of_no_use():
    """With less and less memory; and a model that does not fit alone is refused with its own numbers."""
    see, seen = Companions(projector_bytes=900 * MIB), []
    for free in range(20 * GIB, 0, -256 * MIB):
        try:
            found = fit(a_model(), config.Model(), memories(free, []), compute, companions=see)
        except DoesNotFit as error:
            with pytest.raises(DoesNotFit, match=re.escape(str(error))):
                fit(a_model(), config.Model(), memories(free, []), compute)
            break
        alone = fit(a_model(), config.Model(), memories(free, []), compute)
        if found.encoder_waits:
            assert (found.settings, found.needs) == (alone.settings, alone.needs)
            assert found.gave_up == (*alone.gave_up, "the encoder of pictures, which starts with the first one")
        else:
            assert found.settings.ctx // found.settings.parallel >= FLOOR_TOKENS
        if not seen or seen[-1] != (found.encoder_waits, "ctx" in found.why):
            seen.append((found.encoder_waits, "ctx" in found.why))
    assert seen[:2] == [(False, False), (False, True)]
    assert [waits for waits, _ in seen] == sorted([waits for waits, _ in seen]), "it never comes back"
    assert seen[-1] == (True, True)


def test_a_draft_model_that_does_not_fit_is_refused_with_its_model():
    with pytest.raises(DoesNotFit):
        fit(a_model(), config.Model(), memories(5 * GIB, []), compute, companions=Companions(draft=a_model(32, 100)))


# -- what the settings fix of where weights go ----------------------------------------------------------


EXPERTS_MIB = 80


def with_experts(n_layers: int = 32) -> ModelSizes:
    """``a_model``, most of whose weights are experts."""
    model = a_model(n_layers)
    tensors = {"token_embd.weight": 70 * MIB, "output.weight": 100 * MIB}
    for layer in range(n_layers):
        tensors[f"blk.{layer}.ffn_up_exps.weight"] = EXPERTS_MIB * MIB
        tensors[f"blk.{layer}.attn_q.weight"] = (100 - EXPERTS_MIB) * MIB
    return msgspec.structs.replace(model, tensors=tensors)


def arranged(free_gib: list[float], arrangement: Arrangement = PLAIN, **settings: Any) -> Fit:
    gpus = [int(each * GIB) for each in free_gib]
    return fit(with_experts(), config.Model(**settings), memories(64 * GIB, gpus), compute, arrangement=arrangement)


ARRANGEMENTS = st.builds(
    Arrangement,
    moved=st.lists(
        st.tuples(st.sampled_from(["exps", r"^blk\\.(0|1|2)\\.", "attn", "token_embd", "output"]), st.integers(0, 1)),
        max_size=3,
    ).map(tuple),
)


@given(ARRANGEMENTS, st.integers(1, 40), st.integers(1, 30), st.sampled_from([-1, 0, 5, 33]))
def test_wherever_weights_are_put_they_count_once_and_fit(arrangement, ram, gpu, gpu_layers):
    settings = config.Model(gpu_layers=gpu_layers)
    try:
        found = fit(with_experts(), settings, memories(ram * GIB, [gpu * GIB]), compute, arrangement=arrangement)
    except DoesNotFit:
        return
    for need, each in zip(found.needs, found.memories, strict=True):
        assert 0 <= need <= each.usable_bytes(settings)
    assert sum(found.needs) > sum(with_experts().layers)
    assert gpu_layers < 0 or found.on_gpu == gpu_layers


def test_experts_that_stay_on_the_cpu_leave_room_for_all_layers():
    plain = arranged([3])
    moved = arranged([3], Arrangement(moved=(("_exps", 0),)))
    assert plain.on_gpu < 33
    assert moved.on_gpu == 33
    assert moved.needs[0] > 32 * EXPERTS_MIB * MIB


def test_the_first_pattern_counts():
    both = (("ffn_up_exps", 0), ("ffn", 1))
    assert arranged([2], Arrangement(moved=both)).needs == arranged([2], Arrangement(moved=both[:1])).needs


def test_a_tensor_may_go_to_another_gpu():
    same = {"ctx": 8192, "gpu_layers": 33}
    plain = arranged([16, 16], Arrangement(shares=(1, 0)), **same)
    moved = arranged([16, 16], Arrangement(shares=(1, 0), moved=(("_exps", 2),)), **same)
    assert plain.needs[2] == 0
    assert moved.needs[2] >= 32 * EXPERTS_MIB * MIB
    assert plain.needs[1] - moved.needs[1] == 32 * EXPERTS_MIB * MIB


def test_layers_follow_the_shares_that_are_set():
    found = arranged([16, 16], Arrangement(shares=(3, 1)), ctx=8192)
    assert found.on_gpu == 33
    assert found.needs[1] > 2.5 * found.needs[2] > 0
    turned = arranged([16, 16], Arrangement(shares=(0, 1)), ctx=8192)
    assert turned.needs[1] == 0


def test_shares_that_do_not_fit_are_named():
    with pytest.raises(
        DoesNotFit, match=r"free on GPU0.*; leave out --tensor-split, so that each device gets what fits"
    ):
        arranged([2, 16], Arrangement(shares=(3, 1)), gpu_layers=33)


def place_of(mode: str, shares: tuple[float, ...] = (), moved: tuple[str, ...] = ()) -> ModelDevices:
    found = [
        llama_abi.Device(f"CUDA{n}", "a card", llama_abi.DeviceType.GPU, free * GIB, 80 * GIB, f"CUDA{n}", "CUDA", True)
        for n, free in enumerate((60, 20))
    ]
    settings = config.Model(split_mode=mode, tensor_split=shares, override_tensor=moved)
    return place_on(settings, found, 16)


class AnyLibrary:
    """Only its devices are asked for."""

    def __init__(self, where: ModelDevices) -> None:
        self._found = where.devices

    def devices(self) -> tuple[llama_abi.Device, ...]:
        return self._found


@pytest.mark.parametrize(
    ("mode", "shares", "free_gib"),
    [("layer", (), [60, 20]), ("tensor", (), [40]), ("tensor", (3.0, 1.0), [80]), ("row", (1.0, 0.0), [60])],
)
def test_devices_that_divide_each_layer_have_one_memory(mode, shares, free_gib):
    where = place_of(mode, shares, ("ffn=CPU",))
    _, *gpus = found = measure(AnyLibrary(where), where)
    assert [each.free_bytes / GIB for each in gpus] == pytest.approx(free_gib)
    arrangement = arrangement_of(where, found)
    assert arrangement.moved == (("ffn", 0),)
    assert arrangement.shares == ()


@pytest.mark.parametrize(
    ("name", "settings", "unified"),
    [
        ("CUDA0", {}, False),
        ("CUDA0", {"gpu_layers": 0}, False),
        ("ROCm0", {}, False),
        ("Vulkan0", {}, False),
        ("MTL0", {}, True),
    ],
)
def test_the_device_decides_the_layout_where_nobody_does(name: str, settings: dict[str, Any], unified: bool) -> None:
    device = attrs.evolve(place_of("layer").devices[0], name=name)
    where = place_on(config.Model(**settings), [device], 16)
    usual, tight = environment_of(where, 100.0), environment_of(where, 18.0)
    assert usual.prefers_unified == unified
    assert tight.prefers_unified == where.on_gpu
