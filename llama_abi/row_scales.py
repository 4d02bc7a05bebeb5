"""Gives each row of a call a scale of its own for each LoRA adapter, so that one call computes rows with different adapters.

llama.cpp applies the same adapters to all rows of a call. For each weight ``W`` it computes ``W x + 1.0 (B (A x))``. Here
``A`` and ``B`` are the matrices of all adapters, stacked along their rank (``StackedAdapters``). A mask keeps of ``A x`` the
ranks of the row's own adapters, times their scales:

    W x + B (m * (A x))        m: the mask, [ranks, rows]; 0 for the ranks of adapters that the row does not have

So this module changes two nodes of llama.cpp's graph before it is computed. The graph keeps as many nodes, in the same order:

    llama.cpp's nodes       A x        B (A x)        1.0 (B (A x))
    become                  A x        m * (A x)      B (m * (A x))

The second node then writes into memory of this module. The third one writes where llama.cpp planned its result. llama.cpp
reuses the graph for the next call of the same shape. Then only the contents of ``m`` change.

Weights that follow each other have places of their own for ``m * (A x)``. Backends of GPUs change the order of nodes that do
not need each other: Vulkan multiplies with the masks of the queries, the keys and the values before it computes the third
node of any of them.

llama.cpp calls a function of ours for each node before it computes the graph: there the nodes are changed. On a CPU these
calls take 0.2 ms for a graph of 700 nodes. Setting other adapters through llama.cpp's API takes 3 to 20 ms.

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

Array = npt.NDArray[np.float32]

MUL, SCALE = OP["GGML_OP_MUL"], OP["GGML_OP_SCALE"]
MUL_MAT, MUL_MAT_ID = OP["GGML_OP_MUL_MAT"], OP["GGML_OP_MUL_MAT_ID"]
"""The product of a matrix and the rows; the same with the matrices of the experts that a router chose for each row."""

F32 = KV_TYPE["GGML_TYPE_F32"]

ALL_ROWS, OUTPUT_ROWS = 0, 1
"""Which rows a mask is for, and the index of its place in memory. llama.cpp computes the last layers only for the rows that
need an output."""

WEIGHTS_IN_FLIGHT: Final = 32
"""Weights after which another one takes the place of the first. Each has four nodes or more, and no backend takes a node that
is 64 ahead or more (Metal; Vulkan 20)."""

ALIGNMENT: Final = 256
"""Addresses of masks are multiples of this many bytes, which suits every device."""

MAX_NAMES: Final = 100_000
"""First factors of products that are remembered, by their name."""

COPY = re.compile(r"[^#]*#(?P<name>[^#]*)(?P<number>#\d*)?")
"""The name of a tensor's copy on another device. It may lie at an address where another tensor was before, so
only the name identifies it. llama.cpp cuts long names, so the number may be missing."""

NAME_OFFSET = ggml_tensor.name.offset
OP_OFFSET, SRC_OFFSET, POINTER_BYTES = ggml_tensor.op.offset, ggml_tensor.src.offset, ctypes.sizeof(ctypes.c_void_p)
SECOND_OFFSET = SRC_OFFSET + POINTER_BYTES

_NodeCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
"""The type of the callback, with an address in place of a pointer object. ctypes takes longer to make a pointer object, and
llama.cpp calls this for every node."""


@attrs.frozen(eq=False)
class RankOwners:
    """Which adapter each rank of a stacked matrix belongs to. Compared by identity."""

    adapters: npt.NDArray[np.intp]
    """``[ranks]``: number of the adapter."""
    factors: Array
    """``[ranks]``: ``alpha / rank`` of the adapter."""

    def mask(self, scales: Array) -> Array:
        """The factor of each rank in each row, ``[rows, ranks]``, from the scales of the adapters, ``[rows, adapters]``."""
        return np.ascontiguousarray(scales[:, self.adapters] * self.factors, np.float32)


class RowScales:
    """Applies stacked adapters row by row in one context. Create it before the context, and close it after the context.

    Not thread-safe. Call ``begin`` before each decode and ``end`` after it.

    Args:
        c: llama.cpp's functions.
        owners: for each weight that the adapters change, by its name.
        n_adapters: number of adapters.
        max_rows: most rows of a call.
    """

    def __init__(self, c: Any, owners: Mapping[str, RankOwners], n_adapters: int, max_rows: int) -> None:
        self._c = c
        self._owners = owners
        self._n_adapters = n_adapters
        self._max_rows = max_rows
        self._scales: Array | None = None
        self._places: tuple[Array, Array] | None = None
        """During a call: the scales of all its rows, and of its output rows."""
        self._weights_by_name: dict[bytes | None, str | None] = {}
        """First factors of products by name: the weight of a matrix B, and ``None`` for another tensor."""
        self._masks: dict[tuple[int, RankOwners, int], _Masks] = {}
        """By type of memory, owners, and number of experts that a row uses."""
        self._masks_by_address: dict[int, _Mask] = {}
        """By the address of their tensor."""
        self._moved_products: dict[int, _Product] = {}
        """Products ``B (A x)`` that move to the next node, by the address of the node that had them."""
        self._n_masked = 0
        """Nodes of the running call that multiply with a mask."""
        self._failure: BaseException | None = None
        self._function = _NodeCallback(self._on_node)
        self.callback = ctypes.cast(self._function, ggml_backend_sched_eval_callback)
        """For ``llama_context_params.cb_eval``; valid while this object exists."""

    def set(self, scales: Array | None) -> None:
        """Use these scales from the next call on.

        Args:
            scales: float32 ``[rows, adapters]`` for calls of as many rows, or ``[adapters]`` for calls of any size whose
                rows all have the same; ``None``: calls without adapters, whose graphs are not changed.

        Raises:
            LlamaError: the scales have another shape or are not finite. Nothing has changed.
        """
        if scales is not None:
            if scales.ndim not in (1, 2) or scales.shape[-1] != self._n_adapters or not scales.size:
                raise LlamaError(f"scales of {self._n_adapters} adapters cannot have the shape {scales.shape}")
            if not np.isfinite(scales).all():
                raise LlamaError("the scale of an adapter must be finite")
        self._scales = scales

    def begin(self, n_rows: int, is_output: npt.NDArray[np.bool_]) -> None:
        """Prepare a call: write the masks where its graph reads them. Blocks while they are copied to the devices.

        Args:
            n_rows: rows of the call.
            is_output: bool ``[n_rows]``: whether the row needs an output.

        Raises:
            LlamaError: the scales are those of another number of rows.
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
        self._moved_products.clear()
        for masks in self._masks.values():
            masks.write(self._places)

    def end(self, *, computed: bool) -> None:
        """Finish a call.

        Args:
            computed: whether the whole call was computed. If not, its graph is not checked.

        Raises:
            LlamaError: llama.cpp's graph was not as expected, so the results are wrong.
        """
        if self._places is None:
            return
        self._places = None
        if not computed:
            return
        failure = self._failure
        if failure is None and self._moved_products:
            failure = LlamaError("a product is not followed by its scale")
        if failure is None and not self._n_masked:
            failure = LlamaError("no product has one of their matrices")
        if failure is not None:
            raise LlamaError(f"cannot apply the adapters of single rows: {failure}") from failure

    def close(self) -> None:
        """Free the memory of the masks. Closing it twice is a no-op."""
        for masks in self._masks.values():
            masks.memory.close()
        self._masks.clear()
        self._masks_by_address.clear()

    # ── the graph ───────────────────────────────────────────────────────────────────────────

    def _on_node(self, node: int, is_before: bool, _: object) -> bool:
        """Change a node before it is computed. Returns ``False``: llama.cpp need not stop after it to show its result."""
        if self._places is None:
            return False
        try:
            op = ctypes.c_int32.from_address(node + OP_OFFSET).value
            if op == MUL:
                mask = self._masks_by_address.get(ctypes.c_void_p.from_address(node + SECOND_OFFSET).value or 0)
                if mask is not None:
                    self._reuse_mask(node, mask)
            elif op in (MUL_MAT, MUL_MAT_ID):
                matrix = ctypes.c_void_p.from_address(node + SRC_OFFSET).value or 0
                name = ctypes.c_char_p(matrix + NAME_OFFSET).value
                weight = self._weights_by_name[name] if name in self._weights_by_name else self._weight_of(name or b"")
                if weight is not None:
                    self._insert_mask(node, weight)
            elif op == SCALE and self._moved_products:
                product = self._moved_products.pop(_source(node, 0), None)
                if product is not None:
                    product.move_to(node)
        except BaseException as error:  # noqa: BLE001  it cannot pass through C; ``end`` raises it
            self._failure = self._failure or error
        return False

    def _weight_of(self, name: bytes) -> str | None:
        """The weight that the matrix B with this name changes; ``None`` if it is another tensor.

        Raises:
            LlamaError: it may be a copy of a matrix B, but its name was cut.
        """
        if len(self._weights_by_name) >= MAX_NAMES:
            self._weights_by_name.clear()
        original = name.decode(errors="replace")
        if copy := COPY.fullmatch(original):
            original = copy["name"]
            if copy["number"] is None and any(f"{weight}.lora_b".startswith(original) for weight in self._owners):
                raise LlamaError(f"the name of a copy of a weight is too long: {name.decode(errors='replace')}")
        weight, _, half = original.rpartition(".")
        changed = self._weights_by_name[name] = weight if half == "lora_b" and weight in self._owners else None
        return changed

    def _insert_mask(self, node: int, weight: str) -> None:
        """Change a node ``B (A x)`` into ``m * (A x)``. ``_Product.move_to`` later changes the node after it.

        Raises:
            LlamaError: the node is not what llama.cpp makes of a stacked adapter, or no memory is left for the mask.
        """
        ax_address = _source(node, 1)
        if ctypes.c_int32.from_address(ax_address + OP_OFFSET).value == MUL:
            return  # an earlier call has changed this graph, and this is its third node
        owners = self._owners[weight]
        ax = ggml_tensor.from_address(ax_address)
        product = ggml_tensor.from_address(node)
        if ax.ne[0] != len(owners.adapters) or ax.type != F32:
            raise LlamaError(f"the product with A has {ax.ne[0]} ranks instead of {len(owners.adapters)}")
        with_experts = product.op == MUL_MAT_ID
        masks = self._masks_for(product.buffer, owners, ax.ne[1] if with_experts else 1)
        shape = (ax.ne[0], 1, ax.ne[2], ax.ne[3]) if with_experts else tuple(ax.ne)
        mask = masks.mask(self._place_of(math.prod(shape[1:])), shape)
        self._masks_by_address[mask.address] = mask
        self._moved_products[node] = _Product(
            product.op, node, _source(node, 0), _source(node, 2), bytes(product.op_params)
        )
        product.op, product.op_params[:] = MUL, [0] * len(product.op_params)
        _set_source(node, 0, ax_address)
        _set_source(node, 1, mask.address)
        _set_source(node, 2, 0)
        product.ne[:], product.nb[:] = ax.ne, _strides(tuple(ax.ne))
        product.data, product.buffer = masks.scratch_of(weight), masks.memory._pointer
        self._n_masked += 1

    def _reuse_mask(self, node: int, mask: _Mask) -> None:
        """Update a node ``m * (A x)`` of an earlier call: with as many rows, other ones may need an output."""
        place = self._place_of(mask.n_rows)
        if place != mask.place:
            other = mask.masks.mask(place, mask.shape)
            self._masks_by_address[other.address] = other
            _set_source(node, 1, other.address)
        self._n_masked += 1

    def _place_of(self, n_rows: int) -> int:
        """Which rows a node with ``n_rows`` rows computes: ``ALL_ROWS`` or ``OUTPUT_ROWS``.

        Raises:
            LlamaError: neither. llama.cpp has split the call, and it is unknown which rows these are.
        """
        assert self._places is not None
        assert self._scales is not None
        if n_rows == len(self._places[ALL_ROWS]):
            return ALL_ROWS
        if n_rows == len(self._places[OUTPUT_ROWS]):
            return OUTPUT_ROWS
        all_rows, outputs = map(len, self._places)
        if self._scales.ndim == 1 and n_rows < all_rows:
            return ALL_ROWS
        raise LlamaError(f"llama.cpp computes {n_rows} rows together, of a call of {all_rows} with {outputs} outputs")

    def _masks_for(self, buffer: Any, owners: RankOwners, n_experts: int) -> _Masks:
        memory_type = self._c.ggml_backend_buffer_get_type(buffer)
        key = (ctypes.cast(memory_type, ctypes.c_void_p).value or 0, owners, n_experts)
        if key not in self._masks:
            assert self._places is not None
            self._masks[key] = _Masks(self._c, memory_type, owners, n_experts, self._max_rows)
            self._masks[key].write(self._places)
        return self._masks[key]


@attrs.frozen
class _Product:
    """A product ``B (m * (A x))`` that moves from its node to the next one."""

    op: int
    masked: int
    """Address of its second factor, ``m * (A x)``."""
    matrix: int
    """Address of B."""
    experts: int
    """Address of the tensor with the experts of each row; 0 for a model without experts."""
    params: bytes
    """The operation's parameters."""

    def move_to(self, node: int) -> None:
        """Compute it in ``node``, which was to scale its result and so has memory of the right size."""
        tensor = ggml_tensor.from_address(node)
        tensor.op = self.op
        tensor.op_params[:] = np.frombuffer(self.params, np.int32).tolist()
        for at, source in enumerate((self.matrix, self.masked, self.experts)):
            _set_source(node, at, source)


class _Memory(Handle):
    """Memory of a device.

    Raises:
        LlamaError: the device has not that much memory left.
    """

    def __init__(self, c: Any, memory_type: Any, size: int) -> None:
        try:
            pointer = c.ggml_backend_buft_alloc_buffer(memory_type, size)
        except LlamaError:
            raise LlamaError(f"no memory for the scales of adapters: {size} bytes") from None
        super().__init__(pointer, c.ggml_backend_buffer_free)
        self.address: int = c.ggml_backend_buffer_get_base(pointer)


class _Masks:
    """The masks of all weights whose ranks have the same owners, on one device.

    One block of memory holds a place for the mask of all rows, a place for the mask of the output rows, and scratch space
    for ``m * (A x)`` of some weights.
    """

    def __init__(self, c: Any, memory_type: Any, owners: RankOwners, n_experts: int, max_rows: int) -> None:
        self._c = c
        self._owners = owners
        self._place_bytes = -(-4 * len(owners.adapters) * max_rows // ALIGNMENT) * ALIGNMENT
        self._scratch_bytes = self._place_bytes * n_experts
        self.memory = _Memory(c, memory_type, self._place_bytes * 2 + self._scratch_bytes * WEIGHTS_IN_FLIGHT)
        self._weights: dict[str, int] = {}
        """Numbers of the weights in the order of the graph, by name."""
        self._tensors: dict[tuple[int, tuple[int, ...]], _Mask] = {}
        self._written: list[Array | None] = [None, None]

    def write(self, places: Sequence[Array]) -> None:
        """Copy the mask of each place to the device, if it is not there already. Blocks."""
        for place, scales in enumerate(places):
            values = self._owners.mask(scales)
            written = self._written[place]
            if len(values) and (written is None or not np.array_equal(values, written)):
                tensor = self.mask(place, (values.shape[1], values.shape[0], 1, 1)).tensor
                self._c.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
                self._written[place] = values

    def scratch_of(self, weight: str) -> int:
        """Address of ``m * (A x)`` for a weight."""
        number = self._weights.setdefault(weight, len(self._weights)) % WEIGHTS_IN_FLIGHT
        return self.memory.address + 2 * self._place_bytes + number * self._scratch_bytes

    def mask(self, place: int, shape: tuple[int, ...]) -> _Mask:
        """The mask at ``place`` as a tensor of ``shape``, in ggml's order: ranks first."""
        mask = self._tensors.get((place, shape))
        if mask is None:
            tensor = ggml_tensor(
                type=F32,
                buffer=self.memory._pointer,
                ne=shape,
                nb=_strides(shape),
                data=self.memory.address + place * self._place_bytes,
                name=b"adapter_scales",
            )
            mask = self._tensors[place, shape] = _Mask(self, place, shape, math.prod(shape[1:]), tensor)
        return mask


@attrs.frozen(eq=False)
class _Mask:
    """A mask as a tensor that the graph reads."""

    masks: _Masks
    place: int
    shape: tuple[int, ...]
    n_rows: int
    tensor: Any

    @property
    def address(self) -> int:
        return ctypes.addressof(self.tensor)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes from one element to the next in each dimension, for contiguous float32."""
    return tuple([4 * math.prod(shape[:n]) for n in range(len(shape))])


def _source(node: int, at: int) -> int:
    """Address of an operand; 0 if there is none."""
    return ctypes.c_void_p.from_address(node + SRC_OFFSET + at * POINTER_BYTES).value or 0


def _set_source(node: int, at: int, address: int) -> None:
    ctypes.c_void_p.from_address(node + SRC_OFFSET + at * POINTER_BYTES).value = address
