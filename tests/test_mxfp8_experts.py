"""Weights that are kept in MXFP8 as a module: moved, cast, saved, loaded, copied and printed; and what cannot be quantised."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch

from blocksparse_moe import MoEConfig, RouterConfig, Topology, dMoE
from blocksparse_moe.mxfp8 import MXFP8Experts, mxfp8_expert_mlp, quantize_experts
from blocksparse_moe.products import mxfp8_launchers
from blocksparse_moe_kernels.mxfp8 import quantize

from .support import DEVICE, each_backend, randn

NAMES = ["up_codes", "up_scales", "down_codes", "down_scales"]


@pytest.fixture
def experts() -> MXFP8Experts:
    return quantize_experts(randn(4, 20, 40).bfloat16(), randn(4, 40, 10).bfloat16())


def test_the_numbers_are_those_of_the_weights():
    up, down = randn(4, 20, 40).bfloat16(), randn(4, 40, 10).bfloat16()
    experts = quantize_experts(up, down)
    for view, weight in ((experts.up_proj, up), (experts.down_proj, down)):
        assert torch.equal(view.dequantize(), quantize(weight).dequantize(torch.float32))
    assert experts.up_proj.codes.data_ptr() == experts.up_codes.data_ptr()
    assert experts.nbytes == sum(tensor.nbytes for tensor in experts.state_dict().values())
    assert not list(experts.parameters())


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.float(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)], ids=range(4)
)
def test_a_change_of_dtype_leaves_them_alone(experts, cast):
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    holder = torch.nn.Sequential(torch.nn.Linear(2, 2, device=DEVICE), experts)
    cast(holder)
    assert list(before) == NAMES
    for name, tensor in experts.state_dict().items():
        assert tensor.dtype == torch.uint8 and torch.equal(tensor, before[name])


def test_they_move(experts):
    moved = copy.deepcopy(experts).to("meta")
    assert {tensor.device.type for tensor in moved.state_dict().values()} == {"meta"}
    assert moved.up_proj.device.type == "meta" and moved.up_proj.shape == experts.up_proj.shape
    assert torch.equal(copy.deepcopy(experts).to("cpu").up_codes, experts.up_codes.cpu())


def test_they_are_saved_and_loaded(experts):
    file = io.BytesIO()
    torch.save(experts.state_dict(), file)
    file.seek(0)
    tensors = torch.load(file, weights_only=True)
    others = quantize_experts(randn(4, 20, 40), randn(4, 40, 10))
    others.load_state_dict(tensors)
    for twin in (MXFP8Experts(**tensors), others, pickle.loads(pickle.dumps(experts)), copy.deepcopy(experts)):
        assert type(twin) is MXFP8Experts and list(twin.state_dict()) == NAMES
        for ours, theirs in zip(twin.buffers(), experts.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    topology = Topology.from_ids(torch.tensor([[0, 2], [1, 3]], device=DEVICE), 4)
    x = randn(2, 40).bfloat16()
    assert torch.equal(
        mxfp8_expert_mlp(x, topology, MXFP8Experts(**tensors), None), mxfp8_expert_mlp(x, topology, experts, None)
    )


@pytest.mark.parametrize(
    "convert",
    [lambda t: t.float(), lambda t: t.bfloat16(), lambda t: t.int(), lambda t: t.view(torch.float8_e4m3fn)],
    ids=["fp32", "bf16", "int32", "E4M3"],
)
@pytest.mark.parametrize("name", NAMES)
def test_they_are_loaded_from_bytes_only(experts, name, convert):
    holder = torch.nn.ModuleDict({"one": experts})
    before = {key: tensor.clone() for key, tensor in holder.state_dict().items()}
    given = before | {f"one.{name}": convert(before[f"one.{name}"])}
    for assign in (False, True):
        with pytest.raises(TypeError, match=rf"MXFP8Experts: {name} must be uint8; got torch\.\w+\. Codes are given as bytes"):
            holder.load_state_dict(given, assign=assign)
    assert all(torch.equal(tensor, before[key]) for key, tensor in holder.state_dict().items())
    with pytest.raises(RuntimeError, match=f"Missing key.*one.{name}"):
        holder.load_state_dict({key: tensor for key, tensor in before.items() if key != f"one.{name}"})


def test_they_print_in_a_line(experts):
    assert re.fullmatch(r"MXFP8Experts\(4 experts, H=40, F=10, 20 rows up, 5,\d\d\d bytes on \w+(:\d)?\)", repr(experts))
    assert re.fullmatch(r"MXFP8\(\[4, 20, 40\], blocks along axis -1, torch.float32, \w+(:\d)?\)", repr(experts.up_proj))


@torch.no_grad()
def test_a_layer_in_mxfp8():
    """As docs/low-precision.md has it."""
    config = MoEConfig(64, 96, 4, activation="geglu", bias=True, router=RouterConfig(top_k=2), init_std=0.2)
    layer = dMoE(config, device=DEVICE)
    x = torch.randn(33, 64, device=DEVICE)
    kept = quantize_experts(layer.experts.weights.up_proj, layer.experts.weights.down_proj)
    routing = layer.router(x)
    topology = Topology.from_ids(routing.expert_ids, config.num_experts)
    biases = {"up_proj_bias": layer.experts.weights.up_proj_bias, "down_proj_bias": layer.experts.weights.down_proj_bias}
    y = mxfp8_expert_mlp(x, topology, kept, routing.weights, activation=config.activation, **biases)
    expected = layer(x)
    assert 0.005 < (y - expected).norm() / expected.norm() < 0.06


@each_backend
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.uint8, torch.complex64], ids=str)
def test_what_cannot_be_quantised(backend, dtype):
    kernels, wrong = mxfp8_launchers(backend), torch.zeros(4, 8, 8, device=DEVICE).to(dtype)
    topology = Topology.from_ids(torch.tensor([[0], [1]], device=DEVICE), 2)
    message = f"must be fp64, fp32, fp16 or bf16; got {dtype}"
    with pytest.raises(TypeError, match=f"quantize: x {message}"):
        kernels.quantize(wrong)
    with pytest.raises(TypeError, match=f"quantize_columns: x {message}"):
        kernels.quantize_columns(wrong[0, :2], topology)
    right = torch.zeros(4, 8, 8, device=DEVICE)
    with pytest.raises(TypeError, match=f"quantize_experts: up_proj {message}"):
        quantize_experts(wrong, right, backend=backend)
    with pytest.raises(TypeError, match=f"quantize_experts: down_proj {message}"):
        quantize_experts(right, wrong, backend=backend)


@each_backend
@pytest.mark.parametrize("wrong", [[1.0], None, 3.0], ids=repr)
def test_what_is_no_tensor(backend, wrong):
    kernels, right = mxfp8_launchers(backend), torch.zeros(4, 8, 8, device=DEVICE)
    with pytest.raises(TypeError, match=r"quantize: x must be of type Tensor; got \w+\. Make one with torch.as_tensor"):
        kernels.quantize(wrong)
    with pytest.raises(TypeError, match="quantize: x must be of type Tensor; got MXFP8"):
        kernels.quantize(quantize(right))
    for pair in ((wrong, right), (right, wrong), (quantize(right), right)):
        with pytest.raises(TypeError, match=r"quantize_experts: \w+_proj must be of type Tensor"):
            quantize_experts(*pair, backend=backend)


def test_what_the_expert_mlp_does_not_take(experts):
    topology, x = Topology.from_ids(torch.tensor([[0]], device=DEVICE), 4), torch.zeros(1, 40, device=DEVICE)
    for arguments, named, message in (
        ((None, topology, experts), {}, r"x must be of type Tensor; got NoneType\. Make one with torch.as_tensor"),
        ((x, None, experts), {}, "topology must be of type Topology; got NoneType"),
        ((x, topology, None), {}, "experts must be of type MXFP8Experts; got NoneType"),
        ((x, topology, experts), {"quantize_activations": "yes"}, "quantize_activations must be of type bool; got str. Give"),
    ):
        with pytest.raises(TypeError, match=f"mxfp8_expert_mlp: {message}"):
            mxfp8_expert_mlp(*arguments, **named)


def test_what_experts_are_not_made_of(experts):
    given = dict(experts.state_dict())
    with pytest.raises(TypeError, match=r"up_codes must be uint8; got torch\.float8_e4m3fn"):
        MXFP8Experts(**given | {"up_codes": experts.up_proj.codes})
    with pytest.raises(TypeError, match="down_scales must be of type Tensor; got list"):
        MXFP8Experts(**given | {"down_scales": [1]})
    with pytest.raises(ValueError, match=r"down_scales must be \[4, 40, 1\]; got \[4, 40, 2\]"):
        MXFP8Experts(**given | {"down_scales": given["down_scales"].repeat(1, 1, 2)})
    with pytest.raises(ValueError, match=r"up_proj must be \[E, 2F, H\] or \[E, F, H\]"):
        MXFP8Experts(**given | {"up_codes": given["up_codes"][:, :3]})
    with pytest.raises(ValueError, match="up_scales on meta; move one"):
        MXFP8Experts(**given | {"up_scales": given["up_scales"].to("meta")})
    with pytest.raises(TypeError, match=r"down_proj is torch.float16 and up_proj is torch.float32"):
        quantize_experts(torch.zeros(4, 8, 8), torch.zeros(4, 8, 8).half())
