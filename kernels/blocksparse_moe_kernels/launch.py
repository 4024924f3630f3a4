"""What every launcher needs: checks with messages that name the cure, weights in one form, and the tables of columns."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .activations import Activation
from .block_sparse import BlockSparse, Columns, block_offsets, column_offsets
from .reference import Order
from .topology import Topology


@dataclass(frozen=True)
class StackedWeight:
    """The weight of a product as the kernels see it.

    Attributes:
        data: [E, halves, N, H], or flat [sum halves * N_e, H] when experts differ.
        columns: N_e, columns of one half.
        halves: 2 for a gate and an up half that lie apart, else 1.
    """

    data: Tensor
    columns: Columns
    halves: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of expert, half, column and H; the kernels find experts of a flat weight through the column table."""
        return self.data.stride() if self.data.ndim == 4 else (0, 0, *self.data.stride())

    @property
    def hidden_size(self) -> int:
        return self.data.shape[-1]

    @property
    def sparse_columns(self) -> Columns:
        """Columns of the sparse operand, all halves together."""
        return self.columns.times(self.halves)


def stack_weight(operation: str, w: Tensor, topology: Topology, columns: Columns | None, halves: int = 1) -> StackedWeight:
    """Bring w ([E, halves, N, H], [E, halves * N, H] or flat [sum halves * N_e, H]) into the form of the kernels: views only.

    `columns` are those of one half; required for a flat w, else they must agree with it.
    """
    num_experts = topology.num_experts
    if w.ndim == 2:
        if columns is None:
            raise ValueError(
                f"{operation}: a flat weight {list(w.shape)} needs columns=Columns.of([...]), the columns of each expert."
            )
        _check_experts(operation, "columns", columns.num_experts, num_experts)
        if w.shape[0] != halves * columns.total:
            raise ValueError(
                f"{operation}: the flat weight has {w.shape[0]} rows; columns {columns} need {halves * columns.total}."
            )
        if not columns.are_equal:
            return StackedWeight(w, columns, halves)
        w = w.unflatten(0, (num_experts, halves, columns.widest))
    elif w.ndim == 3:
        _check_experts(operation, "the weight", w.shape[0], num_experts)
        if w.shape[1] % halves:
            raise ValueError(
                f"{operation}: a gated weight is [E, 2F, H], gate rows then up rows; got {list(w.shape)} with an odd size."
            )
        w = w.unflatten(1, (halves, w.shape[1] // halves))
    elif w.ndim == 4:
        _check_experts(operation, "the weight", w.shape[0], num_experts)
    else:
        raise ValueError(f"{operation}: a weight is [E, N, H], [E, 2, N, H] or flat [sum N_e, H]; got {list(w.shape)}.")
    if columns is not None and columns != Columns.equal(w.shape[2], num_experts):
        raise ValueError(
            f"{operation}: the weight has {w.shape[2]} columns for every expert; columns say {columns}. "
            "Give unequal experts as a flat weight [sum N_e, H]."
        )
    return StackedWeight(w, Columns.equal(w.shape[2], num_experts), w.shape[1])


def stack_activated(
    operation: str, w: Tensor, topology: Topology, columns: Columns | None, activation: Activation
) -> tuple[StackedWeight, Columns]:
    """The weight before an activation, and the columns F_e behind it, which `columns` are where they are given."""
    if w.ndim == 3 and w.shape[1] % activation.halves:
        raise ValueError(
            f"{operation}: a gated weight is [E, 2F, H], gate rows then up rows; got {list(w.shape)} with an odd size."
        )
    halves = activation.weight_halves
    wide = activation.halves // halves
    weight = stack_weight(operation, w, topology, None if columns is None else columns.times(wide), halves)
    return weight, Columns.equal(weight.columns.widest // wide, topology.num_experts) if columns is None else columns


def fold_halves(weight: StackedWeight) -> StackedWeight:
    """One half of twice the columns, where the halves lie one after the other; the products then need one loop."""
    w = weight.data
    if weight.halves == 1 or (w.ndim == 4 and w.stride(1) != w.shape[2] * w.stride(2)):
        return weight
    data = w.flatten(1, 2).unsqueeze(1) if w.ndim == 4 else w
    return StackedWeight(data, weight.sparse_columns, 1)


def stack_bias(operation: str, bias: Tensor | None, weight: StackedWeight) -> tuple[Tensor | None, tuple[int, ...]]:
    """bias ([E, halves, N], [E, halves * N] or flat) as [E, halves, N] or flat, with strides of expert, half and column."""
    if bias is None:
        return None, (0, 0, 0)
    check_same(operation, "bias", bias, "the weight", weight.data)
    E, halves, columns = weight.columns.num_experts, weight.halves, weight.columns
    shapes: tuple[tuple[int, ...], ...] = ((halves * columns.total,),)
    if columns.are_equal:
        shapes = ((E, halves * columns.widest), (E, halves, columns.widest), *shapes)
    check_shape(operation, "the bias", bias, shapes)
    if not columns.are_equal:
        return bias, (0, 0, bias.stride(0))
    if bias.ndim == 1:
        bias = bias.unflatten(0, (E, halves, columns.widest))
    elif bias.ndim == 2:
        bias = bias.unflatten(1, (halves, columns.widest))
    return bias, bias.stride()


def check_type(operation: str, name: str, value: object, kind: type, cure: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{operation}: {name} must be of type {kind.__name__}; got {type(value).__name__}. {cure}")


def check_shape(operation: str, name: str, tensor: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    """The shape of the tensor is one of `shapes`."""
    if tensor.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{operation}: {name} must be {allowed}; got {list(tensor.shape)}.")


def check_operands(operation: str, topology: Topology, **operands: Tensor | None) -> None:
    """Operands are floating-point tensors on the device of the topology; None is one that was not given."""
    check_type(operation, "topology", topology, Topology, "Make one with Topology.from_ids(expert_ids, num_experts).")
    device = topology.device
    for name, tensor in operands.items():
        if tensor is None:
            continue
        check_type(operation, name, tensor, Tensor, "Make one with torch.as_tensor.")
        if not tensor.is_floating_point():
            raise TypeError(f"{operation}: {name} must have a floating dtype; got {tensor.dtype}. Convert it, as by .float().")
        if tensor.device != device:
            raise ValueError(
                f"{operation}: the topology is on {device} and {name} on {tensor.device}; move one: tensors with .to(), the "
                "topology by building it from ids that were moved."
            )


def check_dense(operation: str, x: Tensor, topology: Topology, order: Order, other: Tensor) -> None:
    """x [T, H] (order "tokens") or [M, H] (order "rows"), of the dtype and on the device of `other` [..., H]."""
    if order not in ("tokens", "rows"):
        raise ValueError(f'{operation}: order must be "tokens" or "rows"; got {order!r}.')
    rows = topology.num_tokens if order == "tokens" else topology.num_slots
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(
            f'{operation}: with order="{order}" the dense operand must be [{rows}, H]; got {list(x.shape)}. '
            "Was the topology built for other tokens?"
        )
    if x.shape[1] != other.shape[-1]:
        raise ValueError(
            f"{operation}: the dense operand has {x.shape[1]} columns; the weight {list(other.shape)} needs {other.shape[-1]}."
        )
    check_same(operation, "the dense operand", x, "the weight", other)
    check_device(operation, x, topology)


def check_combine(y: Tensor, topology: Topology, weights: Tensor | None) -> None:
    if y.ndim != 2 or y.shape[0] != topology.num_slots:
        raise ValueError(f"combine: y must be [{topology.num_slots}, H], one row a slot; got {list(y.shape)}.")
    check_operands("combine", topology, y=y, weights=weights)
    check_weights("combine", topology, weights)


def check_weights(operation: str, topology: Topology, weights: Tensor | None) -> None:
    """Routing weights are [T, K], or [M] by slot; of pairs, whose tokens have any number of slots, in any two dimensions."""
    if weights is None:
        return
    M, T, shape = topology.num_slots, topology.num_tokens, weights.shape
    by_token = len(shape) == 2 and shape.numel() == M and (topology.token_offsets is not None or shape[0] == T)
    if not by_token and shape != (M,):
        wanted = f"[{M}]" if topology.token_offsets is not None else f"[{T}, {topology.slots_per_token}] or [{M}]"
        raise ValueError(
            f"{operation}: routing weights must have one entry for each of the {M} slots, as {wanted}; got {list(shape)}."
        )


def check_sparse(operation: str, s: BlockSparse, columns: Columns) -> None:
    """The columns of s are those of the weight."""
    if s.columns != columns:
        raise ValueError(f"{operation}: the sparse operand has columns {s.columns}; the weight has {columns}.")


def check_down_bias(operation: str, bias: Tensor | None, weight: StackedWeight) -> None:
    if bias is None:
        return
    check_same(operation, "bias", bias, "the weight", weight.data)
    expected = (weight.columns.num_experts, weight.hidden_size)
    if bias.shape != expected:
        raise ValueError(f"{operation}: bias must be {list(expected)}; got {list(bias.shape)}.")


def check_same(operation: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Both tensors have one floating dtype and lie on one device."""
    if not tensor.is_floating_point():
        raise TypeError(f"{operation}: {name} must have a floating dtype; got {tensor.dtype}. Convert it, as by .float().")
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{operation}: {name} is {tensor.dtype} and {other_name} is {other.dtype}; convert one, for example "
            f"with .to({other.dtype})."
        )
    if tensor.device != other.device:
        raise ValueError(f"{operation}: {name} is on {tensor.device} and {other_name} on {other.device}; move one with .to().")


def check_device(operation: str, tensor: Tensor, topology: Topology) -> None:
    if tensor.device != topology.device:
        raise ValueError(
            f"{operation}: the operands are on {tensor.device} and the topology on {topology.device}; "
            "build the topology from ids on the device of the operands."
        )


def _check_experts(operation: str, name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(
            f"{operation}: the topology covers {expected} experts; {name} has {found}. Was it built for another layer?"
        )


def value_strides(s: BlockSparse) -> tuple[int, ...]:
    """Strides of row and column; a flat buffer has only the second, rows of an expert being as long as its columns."""
    return s.values.stride() if s.values.ndim == 2 else (0, s.values.stride(0))


@dataclass(frozen=True)
class ColumnTables:
    """Where the columns of unequal experts begin, for the kernels; ignored by them when experts are equal.

    Attributes:
        varied: whether experts differ.
        column_offsets: [E + 1] int64, first column of each expert.
        block_offsets: [E + 1] int64, first element of each expert's block of values.
    """

    varied: bool
    column_offsets: Tensor
    block_offsets: Tensor

    @classmethod
    def of(cls, topology: Topology, columns: Columns) -> ColumnTables:
        if columns.are_equal:
            return cls(False, topology.offsets, topology.offsets)
        return cls(True, column_offsets(columns, topology.device), block_offsets(topology, columns))


class _Thread(threading.local):
    """Of each thread, the devices on which it has called CUDA."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_thread = _Thread()


def on_device(device: torch.device) -> AbstractContextManager:
    """Launch on the device of the tensors, whichever is current."""
    if device.type != "cuda":
        return nullcontext()
    elsewhere = device.index not in (None, torch.cuda.current_device())
    guard = torch.cuda.device(device) if elsewhere else nullcontext()
    if device not in _thread.devices:
        _begin_thread(device, guard)
    return guard


def _begin_thread(device: torch.device, guard: AbstractContextManager) -> None:
    """Have CUDA make its context current in this thread: autograd's may come here before it called CUDA at all, and tensor maps
    cannot be made without (https://github.com/pytorch/pytorch/issues/124565). Recording an event is such a call."""
    with guard:
        torch.cuda.current_stream(device).record_event()
    _thread.devices.add(device)
