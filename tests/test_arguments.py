"""What sdd, dsd, combine and expert_mlp refuse before anything is computed: types, dtypes, devices, shapes, orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from blocksparse_moe import BlockSparse, Columns, MoEConfig, Topology, combine, dMoE, dsd, expert_mlp, sdd
from blocksparse_moe.products import implementation

from .support import DEVICE

T, K, E, H, F = 4, 2, 3, 5, 3
EXPERT_IDS = [[0, 1], [2, 0], [-1, 5], [1, 1]]


def topology() -> Topology:
    return Topology.from_ids(torch.tensor(EXPERT_IDS, device=DEVICE), E)


def sparse() -> BlockSparse:
    return BlockSparse(torch.randn(T * K, F, device=DEVICE), topology(), Columns.equal(F, E))


OPS: dict[str, tuple[Callable, dict[str, tuple[int, ...]]]] = {
    "sdd": (lambda **named: sdd(topology=topology(), **named), dict(x=(T, H), w=(E, F, H))),
    "dsd": (lambda **named: dsd(sparse(), **named), dict(w=(E, F, H))),
    "combine": (lambda **named: combine(topology=topology(), **named), dict(y=(T * K, H), weights=(T, K))),
    "expert_mlp": (
        lambda **named: expert_mlp(topology=topology(), **named),
        dict(
            x=(T, H),
            up_proj=(E, 2 * F, H),
            down_proj=(E, H, F),
            routing_weights=(T, K),
            up_proj_bias=(E, 2 * F),
            down_proj_bias=(E, H),
        ),
    ),
}
each_operand = pytest.mark.parametrize(("op", "name"), [(op, name) for op, (_, shapes) in OPS.items() for name in shapes])


def call(op: str, name: str = "", change: Callable[[Tensor], object] = lambda tensor: tensor) -> Tensor | BlockSparse:
    """The op with fitting operands, the one called `name` changed."""
    function, shapes = OPS[op]
    operands: dict[str, object] = {key: torch.randn(shape, device=DEVICE) for key, shape in shapes.items()}
    if name:
        operands[name] = change(operands[name])
    return function(**operands)


@each_operand
def test_operands_lie_on_one_device(op, name):
    """The dispatcher would take a kernel of the meta device and return memory that nobody wrote."""
    call(op)
    with pytest.raises(ValueError, match=f"{op}: the topology is on {DEVICE.type}.* and {name} on meta; move one"):
        call(op, name, lambda tensor: tensor.to("meta"))


@each_operand
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_operands_have_a_floating_dtype(op, name, dtype):
    with pytest.raises(TypeError, match=f"{op}: {name} must have a floating dtype; got {dtype}"):
        call(op, name, lambda tensor: tensor.to(dtype))


@each_operand
def test_operands_are_tensors(op, name):
    with pytest.raises(TypeError, match=f"{op}: {name} must be of type Tensor; got list"):
        call(op, name, Tensor.tolist)


def test_other_arguments_have_their_types():
    x, up, down = (torch.randn(shape, device=DEVICE) for shape in ((T, H), (E, 2 * F, H), (E, H, F)))
    with pytest.raises(TypeError, match=r"dsd: s must be of type BlockSparse; got Tensor\. sdd makes one"):
        dsd(x, up)
    with pytest.raises(TypeError, match=r"sdd: columns must be of type Columns; got list\. Give Columns\.of"):
        sdd(x, up, topology(), columns=[2, 3, 4])
    with pytest.raises(TypeError, match=r"expert_mlp: columns must be of type Columns; got list"):
        expert_mlp(x, topology(), up, down, columns=[2, 3, 4])
    with pytest.raises(TypeError, match=r"expert_mlp: topology must be of type Topology; got list\. Make one with"):
        expert_mlp(x, EXPERT_IDS, up, down)


@pytest.mark.parametrize("shape", [(K, T), (T * K, 1), (1, T * K), (T, K, 1), (T, K + 1), (T,)], ids=str)
@pytest.mark.parametrize(("op", "name"), [("combine", "weights"), ("expert_mlp", "routing_weights")])
def test_shapes_of_routing_weights(op, name, shape):
    call(op, name, lambda weights: weights.reshape(T * K))
    with pytest.raises(ValueError, match=rf"{op}: .* one entry for each of the 8 slots, as \[4, 2\] or \[8\]; got"):
        call(op, name, lambda weights: weights.new_ones(shape))


@pytest.mark.parametrize("shape", [(E, F), (2 * F, E), (E, F, 2), (2 * E * F, 1), (2 * E * F,)], ids=str)
def test_shapes_of_a_bias(shape):
    call("expert_mlp", "up_proj_bias", lambda bias: bias.unflatten(1, (2, F)))
    with pytest.raises(ValueError, match=r"expert_mlp: up_proj_bias must be \[3, 6\] or \[3, 2, 3\]; got"):
        call("expert_mlp", "up_proj_bias", lambda bias: bias.new_ones(shape))


COLUMNS = Columns.of([2, 3, 4])
FLAT = dict(x=(T, H), up_proj=(18, H), down_proj=(9, H))


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        (dict(up_proj_bias=(18, 1)), COLUMNS, r"up_proj_bias must be \[18\]; got \[18, 1\]"),
        (dict(up_proj_bias=(3, 6)), COLUMNS, r"up_proj_bias must be \[18\]; got \[3, 6\]"),
        (dict(up_proj_bias=(3, 6)), Columns.equal(3, 3), r"up_proj_bias must be \[18\]; got \[3, 6\]"),
        (dict(up_proj=(20, H), down_proj=(10, H)), Columns.of([5, 5]), "columns describe 2 experts; the topology has 3"),
        (dict(up_proj=(9, H)), COLUMNS, r"need flat weights, up_proj \[18, H\] and down_proj \[9, H\]; got \[9, 5\]"),
        (dict(down_proj=(9, H, 1)), COLUMNS, r"need flat weights, .* got \[18, 5\] and \[9, 5, 1\]"),
    ],
)
def test_shapes_of_flat_weights(change, columns, message):
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in (FLAT | change).items()}
    with pytest.raises(ValueError, match=message):
        expert_mlp(topology=topology(), columns=columns, **tensors)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("shape", "columns"), [((E, F, 1), None), ((E * F, 1), COLUMNS), ((F + E,), None)], ids=str)
def test_launchers_refuse_a_misshapen_bias(backend, shape, columns):
    x, w = torch.randn(T, H, device=DEVICE), torch.randn(E, F, H, device=DEVICE)
    with pytest.raises(ValueError, match=r"sdd: the bias must be \["):
        implementation(backend).sdd(
            x,
            w if columns is None else w.flatten(0, 1),
            topology(),
            columns=columns,
            bias=torch.randn(shape, device=DEVICE),
        )


@pytest.mark.parametrize("order", ["tokens", "banana"])
def test_rows_are_the_only_order_of_a_plain_product(order):
    w, x = torch.randn(E, F, H, device=DEVICE), torch.randn(T * K, H, device=DEVICE)
    assert dsd(sparse(), w, order="rows").shape == (T * K, H)
    with pytest.raises(ValueError, match=f'dsd: order must be "rows" unless s is transposed, .* got {order!r}'):
        dsd(sparse(), w, order=order)
    with pytest.raises(ValueError, match='dsd: order must be "tokens" or "rows"; got'):
        dsd(sparse().T, x, order="banana")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Topology.from_ids(torch.tensor([[0]]), 2.5), TypeError, "num_experts must be an integer; got 2.5"),
        (lambda: Topology.from_counts([1, 2], 3), TypeError, "from_counts: counts must be a tensor; got a list"),
        (lambda: Topology.from_counts(torch.tensor([1, 2]), 3.0), TypeError, "num_rows must be an integer; got 3.0"),
        (lambda: Topology.from_pairs([0], [0], num_tokens=1, num_experts=1), TypeError, "tokens must be a tensor"),
        (
            lambda: Topology.from_pairs(torch.tensor([0]), torch.tensor([0], device="meta"), num_tokens=1, num_experts=1),
            ValueError,
            "tokens are on cpu and experts on meta; move one",
        ),
        (lambda: dsd(sparse().T, torch.ones(H, device=DEVICE), order="tokens"), ValueError, r"must be \[T, H\] or \[M, H\]"),
        (lambda: dMoE(5), TypeError, "dMoE: config must be of type MoEConfig; got int"),
        (lambda: dMoE(MoEConfig(H, F, E))([[1.0] * H]), TypeError, "dMoE: the input must be of type Tensor; got list"),
        (lambda: MoEConfig(H, F, E, activation=["a"]), ValueError, "activation: .* is not known"),
        (lambda: MoEConfig(H, F, E, bias="no"), TypeError, "bias must be of type bool; got str"),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused(op):
    """It is not implemented, and must not take an op for a constant."""
    function, shapes = OPS[op]
    operands = {key: torch.randn(shape, device=DEVICE) for key, shape in shapes.items()}
    name = next(iter(shapes))

    def of_one(tensor: Tensor) -> Tensor:
        result = function(**operands | {name: tensor})
        return result.values if isinstance(result, BlockSparse) else result

    with pytest.raises(NotImplementedError, match=f"{op}: forward-mode AD .* use reverse mode"):
        torch.func.jvp(of_one, (operands[name],), (torch.ones_like(operands[name]),))
    with forward_ad.dual_level():
        of_one(operands[name])
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            of_one(forward_ad.make_dual(operands[name], torch.ones_like(operands[name])))


@pytest.mark.parametrize("op", OPS)
def test_autocast_leaves_double_precision_alone(op):
    function, shapes = OPS[op]
    operands = {key: torch.randn(shape, device=DEVICE, dtype=torch.float64) for key, shape in shapes.items()}
    if op == "dsd":
        w = operands.pop("w")
        values = torch.randn(T * K, F, device=DEVICE, dtype=torch.float64)
        function = lambda: dsd(BlockSparse(values, topology(), Columns.equal(F, E)), w)  # noqa: E731
    expected = function(**operands)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = function(**operands)
    ours, other = (one.values if isinstance(one, BlockSparse) else one for one in (found, expected))
    assert ours.dtype == torch.float64
    assert torch.equal(ours, other)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_backward_pass_under_autocast_rounds_nothing(backend):
    """The forward pass is outside; autocast would compute inner products of the backward pass in bf16."""
    shapes = OPS["expert_mlp"][1]
    leaves = {key: torch.randn(shape, device=DEVICE, requires_grad=True) for key, shape in shapes.items()}
    y = torch.randn(T * K, H, device=DEVICE)
    layer = expert_mlp(topology=topology(), backend=backend, **leaves)
    combined = combine(y, topology(), leaves["routing_weights"], backend=backend)
    for result, inputs in ((layer, list(leaves.values())), (combined, [leaves["routing_weights"]])):
        grad = torch.randn_like(result)
        expected = torch.autograd.grad(result, inputs, grad, retain_graph=True)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            found = torch.autograd.grad(result, inputs, grad)
        for ours, other in zip(found, expected, strict=True):
            assert torch.equal(ours, other)
