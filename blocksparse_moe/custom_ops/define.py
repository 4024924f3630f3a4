"""How an op is registered with torch.library, and how a `Topology` travels through one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from blocksparse_moe_kernels import Columns, Schedule, Topology
from blocksparse_moe_kernels.config import choose_block_m

from ..products import implementation

_LIBRARY = torch.library.Library("blocksparse_moe", "DEF")

TOPOLOGY = (
    "Tensor tokens, Tensor slots, Tensor rows, Tensor offsets, Tensor? token_slots, Tensor? token_offsets, "
    "Tensor? by_size, Tensor? tiles, Tensor? num_tiles, SymInt num_tokens, int block_m"
)
"""A `Topology` as arguments of an op, which takes tensors and numbers only; see `flatten` and `unflatten`."""

NUM_TOPOLOGY = 11


def define(name: str, arguments: str, returns: str, run: Callable, fake: Callable) -> Any:
    """`define_op` of an op whose last argument is the name of the implementation that computes it."""

    def run_or_replay(*args: Any) -> Any:
        return implementation(args[-1]).replay(run, *args)

    return define_op(name, arguments, returns, run_or_replay, fake)


def define_op(name: str, arguments: str, returns: str, run: Callable, fake: Callable) -> Any:
    """Register `blocksparse_moe::name` for every device, with its fake implementation, and return it.

    Autocast is off inside: operands were cast before, and a backward pass under autocast must not round what it computes.
    """
    _LIBRARY.define(f"{name}({arguments}) -> {returns}")
    _LIBRARY.impl(name, _without_autocast(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"blocksparse_moe::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.blocksparse_moe, name)


def _without_autocast(function: Callable) -> Callable:
    @wraps(function)
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args)

    return run


def differentiate(name: str, backward: Callable, setup_context: Callable) -> None:
    """Register the gradient of an op.

    As `torch.library.register_autograd` does, which walks through the schema once for each of the op's arguments; with the
    arguments of a `Topology` that takes longer than all else about a call.
    """
    op = getattr(torch.ops.blocksparse_moe, name).default

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def forward(ctx: Any, *args: Any) -> Any:
        output = below_autograd(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(_without_autocast(backward))}
    node: Any = type(f"blocksparse_moe.{name}", (torch.autograd.Function,), methods)

    def run(*args: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        return node.apply(*args) if wanted else below_autograd(*args)

    _LIBRARY.impl(name, run, "Autograd")


def no_gradients(count: int) -> tuple[None, ...]:
    """For arguments that have none."""
    return (None,) * count


def flatten(topology: Topology, implementation: str) -> tuple[Any, ...]:
    """The arguments `TOPOLOGY`; the row tiles travel along where the implementation uses them."""
    block_m, tiles, num_tiles = 0, None, None
    if implementation.startswith("triton"):
        block_m = choose_block_m(topology.num_slots, topology.num_experts)
        schedule = topology.schedule(block_m)
        tiles, num_tiles = schedule.tiles, schedule.num_tiles
    return (
        topology.tokens,
        topology.slots,
        topology.rows,
        topology.offsets,
        topology.token_slots,
        topology.token_offsets,
        topology.by_size,
        tiles,
        num_tiles,
        topology.num_tokens,
        block_m,
    )


def unflatten(arguments: Sequence[Any]) -> Topology:
    """The topology of the arguments `TOPOLOGY`."""
    tokens, slots, rows, offsets, token_slots, token_offsets, by_size, tiles, num_tiles, num_tokens, block_m = arguments
    schedules = () if tiles is None else (Schedule(block_m, tiles, num_tiles),)
    return Topology(tokens, slots, rows, offsets, num_tokens, token_slots, token_offsets, schedules, by_size)


def columns_of(widths: Sequence[int] | None, width: int, topology: Topology) -> Columns:
    """Columns of an op's argument `widths`, which is None when every expert has `width`."""
    return Columns.equal(width, topology.num_experts) if widths is None else Columns.of(widths)


def save(ctx: Any, tensors: Sequence[Tensor | None], topology: Sequence[Any]) -> None:
    """Save tensors (optional ones too) and a flattened topology, every tensor through save_for_backward."""
    *topology_tensors, num_tokens, block_m = topology
    ctx.save_for_backward(*tensors, *topology_tensors)
    ctx.num_saved = len(tensors)
    ctx.sizes = (num_tokens, block_m)


def saved(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors and the flattened topology that `save` kept."""
    tensors = ctx.saved_tensors
    return tensors[: ctx.num_saved], (*tensors[ctx.num_saved :], *ctx.sizes)
