"""`precision="mxfp8"` of the layer and of patched models: emulated here, the same on every backend."""

from __future__ import annotations

import copy

import pytest
import torch

from blocksparse_moe import Experts, MoEConfig, RouterConfig, Topology, dMoE, expert_mlp
from blocksparse_moe.backends import select
from blocksparse_moe.backends.execution import Execution

from .support import DEVICE, HAS_CUDA

CONFIG = MoEConfig(64, 96, 4, router=RouterConfig(top_k=2), init_std=0.2)


def test_a_layer_in_mxfp8_rounds_its_operands():
    layer = dMoE(CONFIG, device=DEVICE, precision="mxfp8")
    exact = copy.deepcopy(layer)
    exact.experts.execution = Execution()
    x = torch.randn(33, 64, device=DEVICE)
    y, expected = layer(x), exact(x)
    error = (y - expected).norm() / expected.norm()
    assert 0.02 < error < 0.08  # a product's is 3.7 %, and two follow one another
    y.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() / theirs.grad.norm() < 0.25, name
    assert layer.state_dict().keys() == exact.state_dict().keys()


def test_it_is_expert_mlp_in_mxfp8():
    experts = Experts(CONFIG, device=DEVICE, precision="mxfp8")
    topology = Topology.from_ids(torch.tensor([[0, 3], [1, 1], [3, 0]], device=DEVICE), 4)
    x, p = torch.randn(3, 64, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    expected = expert_mlp(x, topology, experts.gate_up_proj, experts.down_proj, p, precision="mxfp8")
    assert torch.equal(experts(x, topology, p), expected)


def test_the_report_says_emulated():
    text = dMoE(CONFIG, device=DEVICE, precision="mxfp8").backend_report()
    native = HAS_CUDA and torch.cuda.get_device_capability()[0] == 10
    assert text.startswith(
        f"backend {'triton' if HAS_CUDA else 'torch'} (the default on {'CUDA' if HAS_CUDA else DEVICE.type})"
    )
    assert f"precision mxfp8, {'native' if native else 'emulated'}" in text
    assert "precision='mxfp8'" in repr(dMoE(CONFIG, precision="mxfp8"))


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_where_it_is_native(monkeypatch, capability):
    from blocksparse_moe.backends import BACKENDS, ExpertSpec, products
    from blocksparse_moe_kernels import Columns

    monkeypatch.setattr(products, "architecture_of", lambda device: capability)
    execution = Execution("triton", "mxfp8")
    spec = ExpertSpec(Columns.equal(32, 2), 32, "swiglu", False, torch.bfloat16, torch.device("cuda"), execution=execution)
    (line,) = BACKENDS["triton"].describe(spec)
    kind = "native" if capability >= 100 else "emulated"
    assert f"precision mxfp8, {kind}" in line and BACKENDS["triton"].brief(spec) == f"mxfp8, {kind}"
    assert ("never run here" in line) == (kind == "native")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_compiled_in_a_precision(precision, backend):
    layer = dMoE(CONFIG, device=DEVICE, dtype=torch.bfloat16, precision=precision, backend=backend)
    x = torch.randn(7, 64, device=DEVICE, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"precision": "fp8_block"}, "has no fp8_block. The nearest that runs here is .*precision=None"),
        ({"precision": "nvfp4"}, "has no nvfp4. The nearest that runs here is .*precision=None"),
        ({"require_fused": True}, "has no fused grouped MLP.* The nearest that runs here is require_fused=False"),
    ],
)
def test_what_a_backend_never_has_is_refused_at_once(backend, wanted, message):
    with pytest.raises(NotImplementedError, match=message):
        dMoE(CONFIG, device="meta", backend=backend, **wanted)


@pytest.mark.parametrize("backend", [[], {}, None, 3])
def test_a_backend_is_a_name(backend):
    with pytest.raises(ValueError, match=r"backend: .* is not known"):
        dMoE(CONFIG, device="meta", backend=backend)


def test_a_dtype_that_nobody_computes_in_is_reported():
    layer = dMoE(CONFIG, device=DEVICE).to(torch.float8_e4m3fn)
    assert "nothing runs here" in layer.backend_report()


def test_experts_of_unequal_size_are_refused():
    layer = dMoE(MoEConfig(64, (32, 64), 2), device=DEVICE, precision="mxfp8")
    with pytest.raises(NotImplementedError, match="where experts have one size; these differ"):
        select(layer.experts.spec())
    for backend, precision in (("torch", "mxfp8"), ("te", "fp8_block"), ("te", None)):
        with pytest.raises(NotImplementedError, match=r"one size.*; these differ"):
            dMoE(layer.config, device="meta", backend=backend, precision=precision)


def test_autocast_and_bf16():
    layer = dMoE(CONFIG, device=DEVICE, precision="bf16")
    x = torch.randn(5, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r'precision="bf16": the experts compute in torch.float32'):
        layer(x)
    text = layer.backend_report()
    assert "nothing runs here" in text and "possible" not in text
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert layer.backend_report().startswith("backend ")
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_patched_model(name):
    pytest.importorskip("transformers", minversion="5.9")
    from blocksparse_moe import patch_huggingface

    from . import hf_families

    model = hf_families.build(name, DEVICE).eval()
    given = hf_families.inputs(model, name)
    with torch.no_grad():
        expected = model(**given).logits
        with patch_huggingface(model, precision="mxfp8") as handle:
            assert "precision mxfp8, " in handle.report
            found = model(**given).logits
        assert 0.001 < (found - expected).norm() / expected.norm() < 0.2
        assert torch.equal(model(**given).logits, expected)
