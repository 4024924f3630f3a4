"""The backend `te` with the real Transformer Engine, on a GPU. Elsewhere tests/test_te.py and tests/test_te_layers.py
have a stand-in for it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from blocksparse_moe import Experts, MoEConfig, RouterConfig, Topology, dMoE
from blocksparse_moe.backends.te import engine as te_engine
from blocksparse_moe.backends.te.engine import Engine
from blocksparse_moe.backends.te.products import Form, FusedModules, Modules
from blocksparse_moe_kernels import reference
from blocksparse_moe_kernels.mxfp8 import quantize

from .support import DEVICE, HAS_CUDA
from .te_stand_in import HOPPER

if not HAS_CUDA or isinstance(te_engine.load(), str):
    pytest.skip("needs a GPU" if not HAS_CUDA else f"backend te {te_engine.load()}", allow_module_level=True)

pytestmark = pytest.mark.gpu

PRECISIONS = ["bf16", "fp8_current", "fp8_block", "fp8_delayed"]

ONE_PRODUCT = 0.07
"""Relative error of a product in FP8, forward or backward, in the Frobenius norm: Transformer Engine's own."""

ROUTINGS = {
    "odd counts, an empty expert": ([513, 255, 0, 1021, 1, 47, 641, 1618], 1),
    "one takes all": ([0, 0, 0, 777, 0, 0, 0, 0], 1),
    "one expert": ([300], 1),
    "top-8": (None, 8),
    "no tokens": ([0, 0, 0, 0], 1),
}


def ids_of(routing: str) -> tuple[Tensor, int]:
    """([T, K] ids, E)"""
    counts, top_k = ROUTINGS[routing]
    if counts is None:
        return torch.rand(333, 16, device=DEVICE).topk(top_k, dim=1).indices, 16
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids))].to(DEVICE)[:, None], len(counts)


def relative(ours: Tensor, oracle: Tensor) -> float:
    return float((ours.double() - oracle).norm() / oracle.norm().clamp_min(1e-30))


def run(layer: Experts, x: Tensor, topology: Topology, weights: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, topology, weights)
    y.backward(grad)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "dp": weights.grad,
        **{f"d{name}": parameter.grad for name, parameter in layer.named_parameters()},
    }


def oracle_of(layer: Experts, x: Tensor, topology: Topology, weights: Tensor, grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: parameter.detach().double().requires_grad_() for name, parameter in layer.named_parameters()}
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    up = leaves.get("gate_up_proj", leaves.get("up_proj"))
    up_bias = leaves.get("gate_up_proj_bias", leaves.get("up_proj_bias"))
    y = reference.expert_mlp(
        x, topology, up, leaves["down_proj"], weights,
        activation=layer.config.activation, up_proj_bias=up_bias, down_proj_bias=leaves.get("down_proj_bias"),
    )  # fmt: skip
    y.backward(grad.double())
    grads = {"y": y.detach(), "dx": x.grad, "dp": weights.grad}
    return {**grads, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def build(num_experts: int, precision: str | None, activation: str = "swiglu", bias: bool = False, **named) -> Experts:
    router = RouterConfig(top_k=1, normalize=False)
    config = MoEConfig(256, 192, num_experts, activation=activation, bias=bias, init_std=0.06, router=router)
    layer = Experts(config, device=DEVICE, dtype=torch.bfloat16, backend="te", precision=precision, **named)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return layer


def test_the_stand_in_has_the_real_answers():
    engine = te_engine.ask(DEVICE)
    assert isinstance(engine, Engine)
    if engine.capability == HOPPER.capability:
        assert engine.available == HOPPER.available
    assert set(engine.available) == set(HOPPER.available)
    for field in ("version", "fused_variable", "cudnn_frontend"):
        assert isinstance(getattr(engine, field), str | None)
    assert engine.cublaslt > 120000


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts(precision, routing):
    torch.manual_seed(0)
    ids, num_experts = ids_of(routing)
    topology = Topology.from_ids(ids, num_experts)
    layer = build(num_experts, precision)
    x = torch.randn(ids.shape[0], 256, device=DEVICE, dtype=torch.bfloat16)
    weights, grad = torch.rand(ids.shape, device=DEVICE), torch.randn_like(x)
    for _ in range(3):  # delayed scaling knows its scales after a step
        ours = run(layer, x, topology, weights, grad)
    oracle = oracle_of(layer, x, topology, weights, grad)
    errors = {name: relative(ours[name], oracle[name]) for name in oracle}
    for name, tensor in ours.items():
        assert tensor.isfinite().all(), name
    if precision == "bf16":
        products = copy.deepcopy(layer)
        products.execution = type(layer.execution)("triton")
        theirs = run(products, x, topology, weights, grad)
        for name, error in errors.items():
            assert error <= 2 * relative(theirs[name], oracle[name]) + 2**-9, name
    empty = topology.counts == 0
    for name in ("dgate_up_proj", "ddown_proj"):
        assert (ours[name][empty] == 0).all()
    # Two products follow one another in either direction, and their errors are independent.
    assert precision == "bf16" or max(errors.values()) < 2**0.5 * ONE_PRODUCT


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("transposed", [False, True], ids=["up", "down"])
def test_one_product(precision, transposed):
    torch.manual_seed(0)
    counts, (N, K) = [528, 256, 0, 1024, 16], (256, 384) if transposed else (384, 256)
    form = Form(len(counts), 256, 384, 1, False, torch.bfloat16, DEVICE, precision)
    modules = Modules(te_engine.load(), form)
    module = modules.down if transposed else modules.up
    weight = (0.06 * torch.randn(len(counts), N, K, device=DEVICE)).bfloat16().requires_grad_()
    x = torch.randn(sum(counts), K, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(sum(counts), N, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        x.grad = weight.grad = None
        with modules.precision():
            y = modules.project(module, x, counts, weight, weight)
        y.backward(grad)
    rows, blocks = x.detach().double().split(counts), grad.double().split(counts)
    matrices = weight.detach().double().unbind()
    assert relative(y, torch.cat([row @ matrix.T for row, matrix in zip(rows, matrices, strict=True)])) < ONE_PRODUCT
    assert relative(x.grad, torch.cat([block @ matrix for block, matrix in zip(blocks, matrices, strict=True)])) < ONE_PRODUCT
    assert relative(weight.grad, torch.stack([b.T @ row for b, row in zip(blocks, rows, strict=True)])) < ONE_PRODUCT


@pytest.mark.parametrize(
    ("activation", "bias"), [("swiglu", True), ("gelu", True), ("relu2", False), ("swiglu(gate_limit=1, up_limit=1)", False)]
)
def test_activations_and_biases(activation, bias):
    torch.manual_seed(0)
    ids = torch.rand(200, 6, device=DEVICE).topk(2, dim=1).indices
    ids[3] = -1
    topology = Topology.from_ids(ids, 6)
    layer = build(6, "bf16", activation, bias)
    x = torch.randn(200, 256, device=DEVICE, dtype=torch.bfloat16)
    weights, grad = torch.rand(ids.shape, device=DEVICE), torch.randn_like(x)
    ours, oracle = run(layer, x, topology, weights, grad), oracle_of(layer, x, topology, weights, grad)
    products = copy.deepcopy(layer)
    products.execution = type(layer.execution)("triton")
    theirs = run(products, x, topology, weights, grad)
    for name in oracle:  # a clamp that rounds to its other side changes a gradient in both
        assert relative(ours[name], oracle[name]) <= 2 * relative(theirs[name], oracle[name]) + 2**-9, name
    assert (ours["y"][3] == 0).all() and (ours["dx"][3] == 0).all() and (ours["dp"][3] == 0).all()


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize("flag", [False, True], ids=["plain", "Megatron's flag"])
def test_main_grad(precision, flag):
    """Two micro-batches, both forward before the first backward, add to main_grad what they would add to grad."""
    torch.manual_seed(0)
    layer = build(5, precision)
    other = copy.deepcopy(layer)
    for parameter in layer.parameters():
        parameter.main_grad = torch.ones(parameter.shape, device=DEVICE)
        if flag:
            parameter.grad_added_to_main_grad = False
    batches = []
    for _ in range(2):
        ids = torch.rand(150, 5, device=DEVICE).topk(2, dim=1).indices
        x = torch.randn(150, 256, device=DEVICE, dtype=torch.bfloat16)
        batches.append((x, Topology.from_ids(ids, 5), torch.rand(ids.shape, device=DEVICE)))
    for module in (layer, other):
        outputs = [module(*batch) for batch in batches]
        for y in outputs:
            y.square().sum().backward()
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        assert relative(ours.main_grad - 1, theirs.grad.double()) < 0.01
        assert not flag or ours.grad_added_to_main_grad
        assert ours.grad is None if not flag else (ours.grad == 0).all()


def test_a_layer_trains_and_keeps_its_state_dict():
    torch.manual_seed(0)
    config = MoEConfig(128, 64, 8, router=RouterConfig(top_k=2))
    layers = {
        name: dMoE(config, device=DEVICE, dtype=torch.bfloat16, backend=name, precision=precision)
        for name, precision in (("te", "fp8_delayed"), ("triton", None))
    }
    layers["triton"].load_state_dict(layers["te"].state_dict())
    assert layers["te"].state_dict().keys() == layers["triton"].state_dict().keys()
    x = torch.randn(4, 33, 128, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        for layer in layers.values():
            layer(x).square().mean().backward()
    assert layers["te"].state_dict().keys() == layers["triton"].state_dict().keys()
    twin = copy.deepcopy(layers["te"])
    assert not twin.experts.execution.memory and layers["te"].experts.execution.memory
    assert relative(twin(x), layers["triton"](x).double()) < 0.2
    with torch.no_grad():
        assert relative(layers["te"](x), layers["triton"](x).double()) < 0.2


def test_autocast_and_checkpointing():
    torch.manual_seed(0)
    layer = dMoE(MoEConfig(128, 64, 4, router=RouterConfig(top_k=2)), device=DEVICE, backend="te")
    x = torch.randn(65, 128, device=DEVICE)
    grads = {}
    for reentrant in (None, False, True):
        layer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            inputs = x.clone().requires_grad_()
            if reentrant is None:
                y = layer(inputs)
            else:
                y = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=reentrant)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        grads[reentrant] = [inputs.grad, *(parameter.grad for parameter in layer.parameters())]
    for reentrant in (False, True):
        for ours, plain in zip(grads[reentrant], grads[None], strict=True):
            assert torch.equal(ours, plain)


def codes_of_activations(x: Tensor) -> tuple[Tensor, ...]:
    """Codes and scales along rows and along columns, by the kernel that quantises during a step."""
    if te_engine.ask(DEVICE).capability < (10, 0):
        pytest.skip("empty below compute capability 10.0: it writes nothing. Never run here, for want of such a device")
    te = te_engine.load()
    quantized = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x)
    return (
        quantized._rowwise_data,
        quantized._rowwise_scale_inv,
        quantized._columnwise_data,
        quantized._columnwise_scale_inv,
    )


def codes_of_weights(x: Tensor) -> tuple[Tensor, ...]:
    """The same by the kernels that quantise sharded weights, which run on any device."""
    import transformer_engine_torch as kernels

    rows, columns = x.shape
    bytes_of = partial(torch.zeros, dtype=torch.uint8, device=x.device)
    shapes = (-(-rows // 128) * 128, -(-columns // 128) * 4), (-(-rows // 128) * 4, -(-columns // 128) * 128)
    largest = [x.new_zeros(shape) for shape in shapes]
    scales = [bytes_of(shape) for shape in shapes]
    codes = [bytes_of(x.numel()) for _ in shapes]
    kernels.mxfp8_scaling_compute_partial_amax(x.flatten(), *largest, rows, columns, 0)
    kernels.multi_tensor_compute_scale_inv_e8m0(65536, None, [largest, scales])
    kernels.mxfp8_scaling_partial_cast(x.flatten(), *codes, *scales, rows, columns, 0)
    return codes[0].view_as(x), scales[0], codes[1].view_as(x), scales[1]


@pytest.mark.parametrize("codes_of", [codes_of_weights, codes_of_activations])
def test_codes_of_mxfp8_are_those_of_transformer_engine(codes_of):
    """Both copies, of numbers of every size but the least (docs/low-precision.md), with zeros and outliers."""
    x = torch.randn(256, 384, device=DEVICE) * torch.exp2(torch.randint(-110, 120, (256, 1), device=DEVICE))
    x[:32, :32] = 0
    x[64, 5] = 1e38
    x = x.bfloat16()
    row_codes, row_scales, column_codes, column_scales = codes_of(x)
    rows, columns = quantize(x), quantize(x, axis=-2)
    assert torch.equal(row_scales[:256, :12].view(torch.uint8), rows.scales)
    assert torch.equal(row_codes.view(torch.uint8), rows.codes.view(torch.uint8))
    assert torch.equal(column_scales[:8, :384].view(torch.uint8), columns.scales)
    assert torch.equal(column_codes.view(torch.uint8), columns.codes.view(torch.uint8))


def test_mxfp8_is_refused_here():
    if te_engine.ask(DEVICE).available["mxfp8"] is None:
        pytest.skip("MXFP8 runs on this device")
    layer = build(4, "mxfp8")
    x = torch.randn(8, 256, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"cannot compute in mxfp8.*The nearest that runs here is precision='fp8_block'"
    ):
        layer(x, Topology.from_ids(torch.zeros(8, 1, dtype=torch.long, device=DEVICE), 4))


def test_the_ops_of_the_fused_path_agree_unfused():
    """In bf16 Transformer Engine does not fuse them; what is given to them is the same."""
    torch.manual_seed(0)
    E, H, F = 4, 256, 192
    modules = FusedModules(te_engine.load(), Form(E, H, F, 2, False, torch.bfloat16, DEVICE, "bf16"))
    counts = [256, 0, 512, 256]
    up = (0.06 * torch.randn(E, 2 * F, H, device=DEVICE)).bfloat16().requires_grad_()
    down = (0.06 * torch.randn(E, H, F, device=DEVICE)).bfloat16().requires_grad_()
    x = torch.randn(sum(counts), H, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    p = torch.rand(sum(counts), device=DEVICE, requires_grad=True)
    y = modules(x, counts, p, up, (down, down))
    assert modules.ran and not modules.ran_fused
    grad = torch.randn_like(y)
    y.backward(grad)
    topology = Topology.from_counts(torch.tensor(counts, device=DEVICE), sum(counts))
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, up, down, p)]
    expected = reference.expert_mlp(leaves[0], topology, leaves[1], leaves[2], leaves[3])
    expected.backward(grad.double())
    assert relative(y, expected) < 0.01
    for tensor, leaf in zip((x, up, down, p), leaves, strict=True):
        assert relative(tensor.grad, leaf.grad) < 0.012
