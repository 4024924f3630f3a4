"""`precision="mxfp8"` of the layer and of patched models: emulated here, the same on every backend."""

from __future__ import annotations

import copy

import pytest
import torch

from blocksparse_moe import Experts, MoEConfig, RouterConfig, Topology, dMoE, expert_mlp
from blocksparse_moe.backends import select
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.backends.products import NATIVE_MXFP8

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
    major, minor = torch.cuda.get_device_capability() if HAS_CUDA else (0, 0)
    native = 10 * major + minor in NATIVE_MXFP8
    assert text.startswith(
        f"backend {'triton' if HAS_CUDA else 'torch'} (the default on {'CUDA' if HAS_CUDA else DEVICE.type})"
    )
    assert f"precision mxfp8, {'native' if native else 'emulated'}" in text
    assert "precision='mxfp8'" in repr(dMoE(CONFIG, precision="mxfp8"))


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        *((emulated, "emulated") for emulated in ((8, 0), (8, 9), (9, 0), (12, 1), (13, 0), (101, 3))),
        *((native, "native") for native in ((10, 0), (10, 3), (11, 0), (12, 0))),
    ],
)
def test_where_it_is_native(monkeypatch, capability, kind):
    """Where Triton was seen to multiply natively, and on no newer device by guess."""
    from blocksparse_moe.backends import BACKENDS, ExpertSpec
    from blocksparse_moe_kernels import Columns

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    execution = Execution("triton", "mxfp8")
    spec = ExpertSpec(Columns.equal(32, 2), 32, "swiglu", False, torch.bfloat16, torch.device("cuda"), execution=execution)
    (line,) = BACKENDS["triton"].describe(spec)
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
    config = MoEConfig(64, (32, 64), 2)
    layer = dMoE(config, device=DEVICE)
    layer.experts.execution = Execution("auto", "mxfp8")
    with pytest.raises(NotImplementedError, match="where experts have one size; these differ"):
        select(layer.experts.spec())
    for backend, precision in (("torch", "mxfp8"), ("te", "fp8_block"), ("te", None), ("auto", "mxfp8"), ("auto", "fp8_block")):
        with pytest.raises(NotImplementedError, match=r"one size.*; these differ"):
            dMoE(config, device="meta", backend=backend, precision=precision)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (MoEConfig(40, 32, 2), {"precision": "fp8_current"}, "sizes 40: H and F must be multiples of 16"),
        (MoEConfig(64, 48, 2), {"precision": "mxfp8"}, "sizes 48: H and F must be multiples of 32"),
        (MoEConfig(64, 64, 2, bias=True), {"precision": "mxfp8", "require_fused": True}, "unfused, .* FAILS: no biases"),
        (
            MoEConfig(64, 64, 2, activation="geglu"),
            {"precision": "mxfp8", "require_fused": True},
            "FAILS: plain swiglu .*geglu",
        ),
        (MoEConfig(64, 64, 2), {"precision": "fp8_block", "require_fused": True}, r"FAILS: precision mxfp8 \(fp8_block\)"),
        (MoEConfig(64, 96, 2), {"precision": "mxfp8", "require_fused": True}, "FAILS: H and F multiples of 64 .*F=96"),
        (MoEConfig(64, 64, 2, recompute=True), {"precision": "fp8_block"}, "does not recompute"),
    ],
)
@pytest.mark.parametrize("backend", ["te", "auto"])
def test_what_no_device_computes_is_refused_at_once(config, options, message, backend):
    if options == {"precision": "mxfp8"} and backend == "auto":
        assert dMoE(config, device="meta", **options)
        return
    with pytest.raises(NotImplementedError, match=rf"backend 'te' .*{message}.* The nearest that runs here is "):
        dMoE(config, device="meta", backend=backend, **options)


def test_bf16_of_fp64_is_not_a_matter_of_autocast():
    layer = dMoE(CONFIG, dtype=torch.float64, precision="bf16")
    x = torch.randn(3, 64, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"in torch.float64\. Cast .*\.bfloat16\(\)\.$"):
        layer(x)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


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
