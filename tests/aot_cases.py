"""What is compiled ahead of time: the calls of an MoE layer and of its backward pass, on tensors without memory.

`aot.py` compiles what these calls launch. Configurations come from the tables of `blocksparse_moe_kernels.config`, so that a
new entry is covered as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from blocksparse_moe_kernels import BlockSparse, Columns, Topology
from blocksparse_moe_kernels.activations import ACTIVATIONS, get_activation
from blocksparse_moe_kernels.block_sparse import values_shape
from blocksparse_moe_kernels.config import (
    SHARED_MEMORY_KB,
    GemmConfig,
    choose_block_k,
    choose_block_m,
    column_product_tile,
    row_product_tile,
)
from blocksparse_moe_kernels.triton import dsd_transposed
from blocksparse_moe_kernels.triton.activation_backward import activation_backward
from blocksparse_moe_kernels.triton.bias import bias_dot, expert_sum, expert_sum_tokens
from blocksparse_moe_kernels.triton.combine import combine
from blocksparse_moe_kernels.triton.dsd import dsd
from blocksparse_moe_kernels.triton.dsd_transposed_gluon import TILE as GLUON_COLUMN_TILE
from blocksparse_moe_kernels.triton.gluon_rings import TILE as GLUON_TILE
from blocksparse_moe_kernels.triton.padding import gather_rows
from blocksparse_moe_kernels.triton.route import route, route_backward
from blocksparse_moe_kernels.triton.scaled_activation import scaled_activation
from blocksparse_moe_kernels.triton.sdd import sdd, sdd_activation
from blocksparse_moe_kernels.triton.topology import sort_ids
from blocksparse_moe_kernels.triton.zero_tail import zero_tail

ARCHITECTURES = tuple(SHARED_MEMORY_KB)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

GPT_OSS = "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)"
"""The activation of most parameters."""

HEIGHTS = tuple(sorted({choose_block_m(rows, 1) for rows in range(1, 1025)}))
DEPTHS = tuple(sorted({choose_block_k(rows, 1) for rows in range(1, 1025)}))
"""Every height of row tiles that can be chosen."""


@dataclass(frozen=True)
class Layer:
    """The operands of an MoE layer, on the meta device.

    Attributes:
        dtype: key of DTYPES.
        layout: how the weights lie. "rows": [E, 2F, H] and [E, H, F], as Hugging Face stores them. "columns": the other
            axis is contiguous. "apart": gate and up interleaved, so that their halves do not follow each other. "varied":
            flat, experts of unequal size. "varied_odd": of sizes that nothing divides. "odd": "rows" with T, H and F that
            nothing divides. "strided": so too, no axis is contiguous, and strides need 64 bits.
        activation: name of one.
    """

    dtype: str = "bf16"
    layout: str = "rows"
    activation: str = "swiglu"

    def tensor(self, *shape: int, dtype: str | None = None) -> Tensor:
        """Contiguous, unless the layout is "strided"."""
        element = DTYPES[dtype or self.dtype]
        if self.layout != "strided":
            return torch.empty(shape, dtype=element, device="meta")
        strides = [3]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size + 2**31 + 1)
        return torch.empty_strided(shape, strides, dtype=element, device="meta")

    @property
    def halves(self) -> int:
        return get_activation(self.activation).halves

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, H, F, E."""
        return (33, 77, 45, 5) if self.layout in ("odd", "strided") else (4096, 2048, 768, 16)

    @property
    def top_k(self) -> int:
        return 3

    @property
    def columns(self) -> Columns:
        _, _, F, E = self.sizes
        if self.layout == "varied":
            return Columns.of([F + 128 * (expert % 3) for expert in range(E)])
        if self.layout == "varied_odd":
            return Columns.of([F + expert for expert in range(E)])
        return Columns.equal(F, E)

    @cached_property
    def topology(self) -> Topology:
        T, _, _, E = self.sizes
        return Topology.from_ids(torch.empty(T, self.top_k, dtype=torch.int64, device="meta"), E)

    @cached_property
    def pairs(self) -> Topology:
        T, _, _, E = self.sizes
        ids = torch.empty(2 * T, dtype=torch.int64, device="meta")
        return Topology.from_pairs(ids, ids, num_tokens=T, num_experts=E)

    @property
    def tokens(self) -> Tensor:
        """[T, H]"""
        return self.tensor(*self.sizes[:2])

    @property
    def rows(self) -> Tensor:
        """[M, H]"""
        return self.tensor(self.topology.num_slots, self.sizes[1])

    def sparse(self, halves: int = 1) -> BlockSparse:
        columns = self.columns.times(halves)
        shape = values_shape(self.topology.num_slots, columns)
        return BlockSparse(self.tensor(*shape), self.topology, columns)

    def weight(self, halves: int = 1) -> Tensor:
        """[E, halves * F, H], [E, halves, F, H] or flat."""
        _, H, F, E = self.sizes
        if self.layout.startswith("varied"):
            return self.tensor(halves * self.columns.total, H)
        if self.layout == "columns":
            return self.tensor(E, H, halves * F).transpose(1, 2)
        if self.layout == "apart":
            return self.tensor(E, F, halves, H).transpose(1, 2)
        return self.tensor(E, halves * F, H)

    def down(self) -> Tensor:
        """The down-projection as the sparse products see it, [E, F, H] or flat: its columns lie as those of `weight` do not."""
        _, H, F, E = self.sizes
        if self.layout.startswith("varied"):
            return self.tensor(self.columns.total, H)
        return self.tensor(E, F, H) if self.layout == "columns" else self.tensor(E, H, F).transpose(1, 2)

    def bias(self, halves: int = 1) -> Tensor:
        if not self.columns.are_equal:
            return self.tensor(halves * self.columns.total)
        return self.tensor(self.sizes[3], halves * self.columns.widest)

    def down_bias(self) -> Tensor:
        return self.tensor(self.sizes[3], self.sizes[1])


# The products of a layer and of its backward pass. The second parameter is the tile, what follows are the factors of the
# full product; the defaults are the costliest choice.


def up(layer: Layer, config: GemmConfig, bias: bool = True, save_pre: bool = True) -> None:
    activation = get_activation(layer.activation)
    columns = None if layer.columns.are_equal else layer.columns
    added = layer.bias(layer.halves) if bias else None
    weight = layer.weight(layer.halves)
    sdd_activation(
        layer.tokens, weight, layer.topology, activation, columns=columns, bias=added, save_pre=save_pre, config=config
    )


def grad_hidden(layer: Layer, config: GemmConfig, order: str = "tokens", bias: bool = False) -> None:
    x = layer.tokens if order == "tokens" else layer.rows
    columns = None if layer.columns.are_equal else layer.columns
    added = layer.bias() if bias else None
    sdd(x, layer.down(), layer.topology, order=order, columns=columns, bias=added, config=config)


def down(layer: Layer, config: GemmConfig, bias: bool = True) -> None:
    dsd(layer.sparse(), layer.down(), bias=layer.down_bias() if bias else None, config=config)


def grad_rows(layer: Layer, config: GemmConfig, bias: bool = False) -> None:
    halves = layer.halves
    dsd(layer.sparse(halves), layer.weight(halves), bias=layer.down_bias() if bias else None, config=config)


def grad_up(layer: Layer, config: GemmConfig, order: str = "tokens", gluon: bool = True) -> None:
    weight_gradient(layer, layer.sparse(layer.halves), layer.weight(layer.halves), config, order, gluon)


def grad_down(layer: Layer, config: GemmConfig, order: str = "tokens", gluon: bool = True) -> None:
    weight_gradient(layer, layer.sparse(), layer.down(), config, order, gluon)


def weight_gradient(layer: Layer, s: BlockSparse, like: Tensor, config: GemmConfig, order: str, gluon: bool) -> None:
    """`gluon`: by the kernel in Gluon where it can be; else by the one in whose place it runs."""
    x = layer.tokens if order == "tokens" else layer.rows
    with nullcontext() if gluon else patch.object(dsd_transposed, "_gluon", None):
        dsd_transposed.dsd_transposed(s, x, order=order, like=like, config=config)


def helpers(layer: Layer) -> None:
    """Every kernel that is not a product, in each of its forms."""
    (T, H, _, _), topology, pairs = layer.sizes, layer.topology, layer.pairs
    activation, weights = get_activation(layer.activation), layer.tensor(T, layer.top_k, dtype="fp32")
    combine(layer.rows, topology, weights)
    combine(layer.rows, topology)
    combine(layer.tensor(pairs.num_slots, H), pairs, layer.tensor(pairs.num_slots))
    grad, pre, bias_part = layer.sparse(), layer.sparse(layer.halves), layer.tensor(topology.num_slots, dtype="fp32")
    activation_backward(grad, pre, activation, weights, bias_part)
    activation_backward(grad, pre, activation, layer.tensor(T, layer.top_k))
    activation_backward(grad, pre, activation)
    gather_rows(layer.tokens, topology.tokens)
    scaled_activation(layer.tensor(topology.num_slots, layer.halves * layer.sizes[2]), activation, bias_part)
    expert_sum(layer.sparse())
    expert_sum_tokens(layer.tokens, topology, weights)
    expert_sum_tokens(layer.tokens, topology)
    bias_dot(layer.tokens, layer.down_bias(), topology)
    for tokens in (T, 64):
        sort_ids(torch.empty(tokens, layer.top_k, dtype=torch.int64, device="meta"), topology.num_experts, 128)
    logits, chosen = layer.tensor(T, topology.num_experts, dtype="fp32"), layer.tensor(T, layer.top_k, dtype="fp32")
    for normalize, score, groups in ((True, "softmax", 1), (False, "softmax", 1), (True, "sigmoid", 4)):
        weighed = (normalize, score, 2.5)
        bias = layer.tensor(topology.num_experts, dtype="fp32")
        picked, ids = route(logits, bias, layer.top_k, *weighed, groups, max(1, groups // 2), "best_two")
        route_backward(chosen, logits, picked, ids, topology.num_experts, *weighed)
    zero_tail(layer.rows, topology.offsets)
    zero_tail(layer.rows, topology.offsets, H)


PRODUCTS: dict[str, tuple[Callable, ...]] = {
    "sdd_activation": (up,),
    "sdd": (grad_hidden,),
    "dsd": (down, grad_rows),
    "dsd_transposed": (grad_up, grad_down),
}


@dataclass(frozen=True)
class Build:
    """One call, compiled for one architecture; `helpers` launches many kernels, a product one."""

    call: Callable
    layer: Layer
    architecture: int
    config: GemmConfig | None = None
    factors: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [str(value) if isinstance(value, str) else f"{name}={value}" for name, value in self.factors.items()]
        words = [self.layer.dtype, self.layer.layout, self.layer.activation, *given]
        if self.config is not None:
            words.append("{block_m}x{block_n}x{block_k} w{num_warps} s{num_stages}".format(**asdict(self.config)))
        return f"sm_{self.architecture} {self.call.__name__}: {', '.join(words)}"


def row_configs(dtype: str, architecture: int, tma: bool = True) -> list[GemmConfig]:
    """Tiles of sdd and dsd, the tallest first, wide ones before narrow ones."""
    choices = product((False, True), reversed(HEIGHTS))
    return distinct(row_product_tile(height, DTYPES[dtype], architecture, tma, narrow) for narrow, height in choices)


def column_configs(dtype: str, architecture: int, tma: bool = True) -> list[GemmConfig]:
    """Tiles of the transposed dsd, the deepest first."""
    return distinct(column_product_tile(depth, DTYPES[dtype], architecture, tma) for depth in reversed(DEPTHS))


def distinct(configs: Iterable[GemmConfig]) -> list[GemmConfig]:
    return list(dict.fromkeys(configs))


PLAIN = {"gluon": False}
"""Of a weight gradient: by Triton's kernel, also in the tile that the one in Gluon has."""


def gluon(call: Callable, layer: Layer, **factors: object) -> Build:
    """What a kernel in Gluon computes."""
    return Build(call, layer, 90, GLUON_COLUMN_TILE if call in (grad_up, grad_down) else GLUON_TILE, factors)


def configurations(architecture: int) -> Iterator[Build]:
    """Each configuration with its costliest epilogues, with a bias and both stores: a gated activation in bf16, and in fp16 one
    of all columns (the two dtypes differ in a conversion only). The other products are compiled in fp16 once; fp32 shows that
    its tiles fit. Those in Gluon, which have no bias, are compiled in both."""
    bf16, fp16 = Layer("bf16"), Layer("fp16", activation="gelu")
    yield from (Build(up, bf16, architecture, config) for config in row_configs("bf16", architecture))
    yield from (Build(down, bf16, architecture, config) for config in row_configs("bf16", architecture))
    yield from (Build(grad_up, bf16, architecture, config, PLAIN) for config in column_configs("bf16", architecture))
    yield from (Build(up, fp16, architecture, config) for config in row_configs("fp16", architecture))
    if architecture == 90:
        for layer in (Layer("bf16", activation="geglu"), Layer("fp16", activation="geglu")):
            yield gluon(up, layer, bias=False)
            yield gluon(down, layer, bias=False)
            yield gluon(grad_rows, layer)
            yield gluon(grad_hidden, layer)
            yield gluon(grad_up, layer)
            yield gluon(grad_down, layer)
    yield Build(down, fp16, architecture, row_configs("fp16", architecture)[0])
    yield Build(grad_up, fp16, architecture, column_configs("fp16", architecture)[0], PLAIN)
    yield Build(down, Layer("fp32"), architecture, row_configs("fp32", architecture)[0])


def forms(architecture: int) -> Iterator[Build]:
    """What hangs on no configuration, once: every layout, fp32, and the kernels that are not products."""
    for layout, tma in product(("rows", "columns", "varied", "strided"), (False, True)):
        if tma and layout in ("varied", "strided"):
            continue
        rows, columns = row_configs("bf16", architecture, tma), column_configs("bf16", architecture, tma)
        tile = -1 if layout == "strided" else 0
        yield Build(up, Layer(layout=layout), architecture, rows[tile])
        yield Build(down, Layer(layout=layout), architecture, rows[tile])
        yield Build(grad_down, Layer(layout=layout), architecture, columns[tile], PLAIN)
    for layout, tma in (("rows", True), ("columns", False)):
        for config in row_configs("bf16", architecture, tma)[: 2 if tma else 1]:
            yield Build(up, Layer(layout=layout, activation=GPT_OSS), architecture, config)
    if architecture == 90:
        yield gluon(up, Layer(layout="apart"), bias=False, save_pre=False)
        yield gluon(down, Layer(), bias=False)
        for layout in ("rows", "columns"):
            yield gluon(grad_hidden, Layer(layout=layout), order="rows")
            yield gluon(grad_down, Layer(layout=layout), order="rows")
    yield Build(up, Layer("fp32"), architecture, row_configs("fp32", architecture)[-1])
    yield Build(grad_down, Layer("fp32"), architecture, column_configs("fp32", architecture)[0])
    yield Build(helpers, Layer(), architecture)
    yield Build(helpers, Layer(layout="varied", activation="gelu"), architecture)
    yield Build(helpers, Layer(activation=GPT_OSS), architecture)


def full_product(architecture: int, dtype: str, name: str) -> Iterator[Build]:
    """Every combination of the flags and layouts of one product, or all helpers."""
    layouts = ("rows", "columns", "apart", "varied", "varied_odd", "odd", "strided")
    if name == "helpers":
        for layout, activation in product(("rows", "varied", "strided"), ACTIVATIONS):
            yield Build(helpers, Layer(dtype, layout, activation), architecture)
        return
    tiles = column_configs if name == "dsd_transposed" else row_configs
    configs = distinct([*tiles(dtype, architecture), *tiles(dtype, architecture, tma=False)])
    flag = (True, False)
    for config, call in product(configs, PRODUCTS[name]):
        if call is up:
            for activation, bias, save_pre in product(ACTIVATIONS, flag, flag):
                factors = {"bias": bias, "save_pre": save_pre}
                yield Build(up, Layer(dtype, activation=activation), architecture, config, factors)
            for layout, activation in product(layouts[1:], ("swiglu", "gelu")):
                yield Build(up, Layer(dtype, layout, activation), architecture, config)
            continue
        orders = [{"order": order} for order in ("tokens", "rows")] if call in (grad_hidden, grad_up, grad_down) else [{}]
        if call in (grad_up, grad_down) and architecture == 90 and config == GLUON_COLUMN_TILE:
            orders += [order | PLAIN for order in orders]
        biases = [{"bias": bias} for bias in flag] if call in (grad_hidden, down, grad_rows) else [{}]
        for layout, order, bias in product(layouts, orders, biases):
            yield Build(call, Layer(dtype, layout), architecture, config, order | bias)
