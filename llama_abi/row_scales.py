"""A scale for each LoRA adapter and each row of a call, so that rows with different adapters are computed together.

llama.cpp applies adapters to all rows of a call alike. It computes ``W x + 1.0 (B (A x))`` for each weight. If ``A`` and ``B``
are the matrices of several adapters, stacked along their rank, each row needs its own part of ``A x`` only:

    W x + B (m * (A x))        m: [rank, rows], the scales

So three nodes of llama.cpp's graph are changed before it is computed. Their number, their order and what they read stay:

    A x, B (A x), 1.0 (B (A x))        becomes        A x, m * (A x), B (m * (A x))

The second node then writes into memory of this module. The third one writes where llama.cpp planned its result. llama.cpp
reuses a graph for calls alike, and only the contents of ``m`` change with each call.

llama.cpp asks a callback about each node before it computes a graph: that is where the nodes are changed. On a CPU the
questions take 0.2 ms a call with 700 nodes; changing the adapters of a call takes 3 to 20 ms.

Source: llama-graph.cpp, ``build_lora_mm``; ggml-backend.h, ``ggml_backend_sched_eval_callback``; ggml.h, ``ggml_tensor``.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from llama_abi.errors import LlamaError
from llama_abi.handles import Handle
from llama_abi.types import KV_TYPE, OP, ggml_backend_sched_eval_callback, ggml_tensor

Scales = npt.NDArray[np.float32]

MUL, SCALE = OP["GGML_OP_MUL"], OP["GGML_OP_SCALE"]
MUL_MAT, MUL_MAT_ID = OP["GGML_OP_MUL_MAT"], OP["GGML_OP_MUL_MAT_ID"]
"""A product with one matrix, and with those of the experts that a router chose."""

F32 = KV_TYPE["GGML_TYPE_F32"]

ALL_ROWS, OUTPUT_ROWS = 0, 1
"""Places of masks: llama.cpp computes the last layers only for the rows that need an output."""

ALIGNMENT: Final = 256
"""Bytes; enough for every device."""

MAX_KNOWN: Final = 100_000
"""Tensors that are remembered by their name."""

COPY = re.compile(r"[^#]*#(?P<name>[^#]*)(?P<number>#\d*)?")
"""The name of a tensor's copy on another device, which lies at an address where other tensors were before. llama.cpp cuts
long names, so the number may be missing."""

NAME_OFFSET = ggml_tensor.name.offset
OP_OFFSET, SRC_OFFSET, POINTER_BYTES = ggml_tensor.op.offset, ggml_tensor.src.offset, ctypes.sizeof(ctypes.c_void_p)
SECOND_OFFSET = SRC_OFFSET + POINTER_BYTES

_asked_function = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
"""The callback's type with an address in place of a pointer, which takes longer to make.  It is called for every node."""


@attrs.frozen(eq=False)
class Ranks:
    """Which adapters the ranks of a stacked matrix belong to."""

    adapters: npt.NDArray[np.intp]
    """Number of the adapter of each rank."""
    factors: npt.NDArray[np.float32]
    """``alpha / rank`` of the adapter of each rank."""

    def masks(self, scales: Scales) -> npt.NDArray[np.float32]:
        """The scales of each rank, ``[rows, ranks]``, from those of each adapter, ``[rows, adapters]``."""
        return np.ascontiguousarray(scales[:, self.adapters] * self.factors, np.float32)


class RowScales:
    """The scales of stacked adapters in one context. Made for it, and closed after it. Not thread-safe.

    Args:
        c: llama.cpp's functions.
        ranks: of each weight that the adapters change, by its name.
        n_adapters: number of adapters.
        max_rows: most rows of a call.
    """

    def __init__(self, c: Any, ranks: Mapping[str, Ranks], n_adapters: int, max_rows: int) -> None:
        self._c = c
        self._ranks = ranks
        self._n_adapters = n_adapters
        self._max_rows = max_rows
        self._scales: Scales | None = None
        self._places: tuple[Scales, Scales] | None = None
        """Scales of all rows of the running call, and of its output rows."""
        self._known: dict[bytes | None, Ranks | None] = {}
        """The ranks of a matrix B, and ``None`` for other first factors, by name."""
        self._masks: dict[tuple[int, Ranks, int], _Masks] = {}
        """By type of memory, ranks, and experts of a row."""
        self._made: dict[int, _Mask] = {}
        """Tensors of masks by address."""
        self._moved: dict[int, _Product] = {}
        """Products that the node after the one at this address is to compute."""
        self._n_masked = 0
        self._failure: BaseException | None = None
        self._function = _asked_function(self._asked)
        self.callback = ctypes.cast(self._function, ggml_backend_sched_eval_callback)
        """For ``llama_context_params.cb_eval``; valid as long as this object."""

    def set(self, scales: Scales | None) -> None:
        """Use these scales in the calls from now on.

        Args:
            scales: float32 ``[rows, adapters]``, or ``[adapters]`` for calls whose rows are all alike; ``None``: no
                call has adapters.

        Raises:
            LlamaError: another shape, or a scale is not finite.
        """
        if scales is not None:
            if scales.ndim not in (1, 2) or scales.shape[-1] != self._n_adapters or not scales.size:
                raise LlamaError(f"scales of {self._n_adapters} adapters cannot have the shape {scales.shape}")
            if not np.isfinite(scales).all():
                raise LlamaError("the scale of an adapter must be finite")
        self._scales = scales

    def begin(self, n_rows: int, is_output: npt.NDArray[np.bool_]) -> None:
        """Before a call: put the scales where its graph reads them. Blocks while they are copied to the devices.

        Raises:
            LlamaError: there are not as many scales as rows.
        """
        if self._scales is None:
            return
        scales = self._scales
        if scales.ndim == 1:
            scales = np.broadcast_to(scales, (n_rows, len(scales)))
        elif len(scales) != n_rows:
            raise LlamaError(f"there are scales for {len(scales)} rows, and the call has {n_rows}")
        self._places = (scales, scales[is_output])
        self._n_masked, self._failure = 0, None
        self._moved.clear()
        for masks in self._masks.values():
            masks.write(self._places)

    def end(self, *, computed: bool) -> None:
        """After a call.

        Args:
            computed: it was computed to its end.

        Raises:
            LlamaError: llama.cpp's graph was not as expected, so the results are wrong.
        """
        if self._places is None:
            return
        self._places = None
        if not computed:
            return
        failure = self._failure
        if failure is None and self._moved:
            failure = LlamaError("a product is not followed by its scale")
        if failure is None and not self._n_masked:
            failure = LlamaError("no product has a matrix of them")
        if failure is not None:
            raise LlamaError(f"cannot apply the adapters of single rows: {failure}") from failure

    def close(self) -> None:
        """Free the memory of the masks. Closing it twice is a no-op."""
        for masks in self._masks.values():
            masks.memory.close()
        self._masks.clear()
        self._made.clear()

    # ── the graph ───────────────────────────────────────────────────────────────────────────

    def _asked(self, node: int, is_before: bool, _: object) -> bool:
        """Called for each node before it is computed. Answers that nobody wants to see its result."""
        if self._places is None:
            return False
        try:
            op = ctypes.c_int32.from_address(node + OP_OFFSET).value
            if op == MUL:
                mask = self._made.get(ctypes.c_void_p.from_address(node + SECOND_OFFSET).value or 0)
                if mask is not None:
                    self._keep(node, mask)
            elif op in (MUL_MAT, MUL_MAT_ID):
                matrix = ctypes.c_void_p.from_address(node + SRC_OFFSET).value or 0
                name = ctypes.c_char_p(matrix + NAME_OFFSET).value
                ranks = self._known[name] if name in self._known else self._ranks_of(name or b"")
                if ranks is not None:
                    self._mask(node, ranks)
            elif op == SCALE and self._moved:
                product = self._moved.pop(_source(node, 0), None)
                if product is not None:
                    product.move_to(node)
        except BaseException as error:  # noqa: BLE001  it cannot pass through C; ``end`` raises it
            self._failure = error
        return False

    def _ranks_of(self, name: bytes) -> Ranks | None:
        """The ranks of the matrix B with this name; ``None`` if it is another tensor."""
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        original = name.decode(errors="replace")
        if copy := COPY.fullmatch(original):
            original = copy["name"]
            if copy["number"] is None and any(f"{weight}.lora_b".startswith(original) for weight in self._ranks):
                raise LlamaError(f"the name of a copy of a weight is too long: {name.decode(errors='replace')}")
        weight, _, half = original.rpartition(".")
        found = self._known[name] = self._ranks.get(weight) if half == "lora_b" else None
        return found

    def _mask(self, node: int, ranks: Ranks) -> None:
        """Make ``B (A x)`` the product of ``A x`` with its mask."""
        factor = _source(node, 1)
        if ctypes.c_int32.from_address(factor + OP_OFFSET).value == MUL:
            return  # the graph is reused, and this is the third node
        of_rank = ggml_tensor.from_address(factor)
        product = ggml_tensor.from_address(node)
        if of_rank.ne[0] != len(ranks.adapters) or of_rank.type != F32:
            raise LlamaError(f"a factor has {of_rank.ne[0]} ranks instead of {len(ranks.adapters)}")
        with_experts = product.op == MUL_MAT_ID
        masks = self._masks_for(product.buffer, ranks, of_rank.ne[1] if with_experts else 1)
        shape = (of_rank.ne[0], 1, of_rank.ne[2], of_rank.ne[3]) if with_experts else tuple(of_rank.ne)
        mask = masks.mask(self._place_of(math.prod(shape[1:])), shape)
        self._made[mask.address] = mask
        self._moved[node] = _Product(product.op, node, _source(node, 0), _source(node, 2), bytes(product.op_params))
        product.op, product.op_params[:] = MUL, [0] * len(product.op_params)
        _set_source(node, 0, factor)
        _set_source(node, 1, mask.address)
        _set_source(node, 2, 0)
        product.ne[:], product.nb[:] = of_rank.ne, _strides(tuple(of_rank.ne))
        product.data, product.buffer = masks.scratch, masks.memory._pointer
        self._n_masked += 1

    def _keep(self, node: int, mask: _Mask) -> None:
        """The graph is reused. A call of as many rows may have its outputs elsewhere."""
        place = self._place_of(mask.n_rows)
        if place != mask.place:
            other = mask.masks.mask(place, mask.shape)
            self._made[other.address] = other
            _set_source(node, 1, other.address)
        self._n_masked += 1

    def _place_of(self, n_rows: int) -> int:
        """Which rows these are."""
        assert self._places is not None
        assert self._scales is not None
        if n_rows == len(self._places[ALL_ROWS]):
            return ALL_ROWS
        if n_rows == len(self._places[OUTPUT_ROWS]):
            return OUTPUT_ROWS
        if self._scales.ndim == 1:
            return ALL_ROWS
        all_rows, outputs = map(len, self._places)
        raise LlamaError(f"llama.cpp computes {n_rows} rows together, of a call of {all_rows} with {outputs} outputs")

    def _masks_for(self, buffer: Any, ranks: Ranks, n_experts: int) -> _Masks:
        memory_type = self._c.ggml_backend_buffer_get_type(buffer)
        key = (ctypes.cast(memory_type, ctypes.c_void_p).value or 0, ranks, n_experts)
        if key not in self._masks:
            assert self._places is not None
            self._masks[key] = _Masks(self._c, memory_type, ranks, n_experts, self._max_rows)
            self._masks[key].write(self._places)
        return self._masks[key]


@attrs.frozen
class _Product:
    """A product ``B (A x)`` that moves to the next node."""

    op: int
    masked: int
    """Address of its second factor."""
    matrix: int
    """Address of B."""
    experts: int
    """Address of the experts of each row; 0 without."""
    params: bytes

    def move_to(self, node: int) -> None:
        """Compute it in ``node``, whose memory has the right size."""
        tensor = ggml_tensor.from_address(node)
        tensor.op = self.op
        tensor.op_params[:] = np.frombuffer(self.params, np.int32).tolist()
        for at, source in enumerate((self.matrix, self.masked, self.experts)):
            _set_source(node, at, source)


class _Memory(Handle):
    """Memory of a device."""

    def __init__(self, c: Any, memory_type: Any, size: int) -> None:
        try:
            pointer = c.ggml_backend_buft_alloc_buffer(memory_type, size)
        except LlamaError:
            raise LlamaError(f"no memory for the scales of adapters: {size} bytes") from None
        super().__init__(pointer, c.ggml_backend_buffer_free)
        self.address: int = c.ggml_backend_buffer_get_base(pointer)


class _Masks:
    """The masks of all weights with the same ranks on one device, and memory for what they mask."""

    def __init__(self, c: Any, memory_type: Any, ranks: Ranks, n_experts: int, max_rows: int) -> None:
        self._c = c
        self._ranks = ranks
        self._place_bytes = -(-4 * len(ranks.adapters) * max_rows // ALIGNMENT) * ALIGNMENT
        self.memory = _Memory(c, memory_type, self._place_bytes * (2 + n_experts))
        self.scratch = self.memory.address + 2 * self._place_bytes
        """Address of the masked ranks; each product is read by the next node."""
        self._tensors: dict[tuple[int, tuple[int, ...]], _Mask] = {}
        self._written: list[npt.NDArray[np.float32] | None] = [None, None]

    def write(self, places: Sequence[Scales]) -> None:
        """Copy the masks of each place, if they are others than before."""
        for place, scales in enumerate(places):
            masks = self._ranks.masks(scales)
            written = self._written[place]
            if len(masks) and (written is None or not np.array_equal(masks, written)):
                tensor = self.mask(place, (masks.shape[1], masks.shape[0], 1, 1)).tensor
                self._c.ggml_backend_tensor_set(tensor, masks.ctypes.data, 0, masks.nbytes)
                self._written[place] = masks

    def mask(self, place: int, shape: tuple[int, ...]) -> _Mask:
        """A tensor of the masks at ``place``."""
        found = self._tensors.get((place, shape))
        if found is None:
            tensor = ggml_tensor(
                type=F32,
                buffer=self.memory._pointer,
                ne=shape,
                nb=_strides(shape),
                data=self.memory.address + place * self._place_bytes,
                name=b"adapter_scales",
            )
            found = self._tensors[place, shape] = _Mask(self, place, shape, math.prod(shape[1:]), tensor)
        return found


@attrs.frozen(eq=False)
class _Mask:
    """A tensor that the graph reads."""

    masks: _Masks
    place: int
    shape: tuple[int, ...]
    n_rows: int
    tensor: Any

    @property
    def address(self) -> int:
        return ctypes.addressof(self.tensor)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes between elements, of float32 without gaps."""
    return tuple([4 * math.prod(shape[:n]) for n in range(len(shape))])


def _source(node: int, at: int) -> int:
    """Address of an operand; 0 if there is none."""
    return ctypes.c_void_p.from_address(node + SRC_OFFSET + at * POINTER_BYTES).value or 0


def _set_source(node: int, at: int, address: int) -> None:
    ctypes.c_void_p.from_address(node + SRC_OFFSET + at * POINTER_BYTES).value = address
