"""Experts drawn anew: those and no others, with what the optimizer knew of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blocksparse_moe import MoEConfig, RouterConfig, dMoE
from blocksparse_moe.monitor import reinit_experts

from .support import DEVICE

H, E = 16, 5


def trained(widths=24, **router) -> tuple[dMoE, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = MoEConfig(H, widths, E, router=RouterConfig(2, **router), bias=True)
    layer = dMoE(config, device=DEVICE)
    optimizer = torch.optim.Adam(layer.parameters(), amsgrad=True)
    for _ in range(3):
        layer(torch.randn(60, H, device=DEVICE)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        layer.experts.gate_up_proj_bias.fill_(0.5)
        layer.experts.down_proj_bias.fill_(0.5)
    return layer, optimizer


def parts(layer: dMoE, held: dict[str, Tensor]) -> list[list[Tensor]]:
    """Of each expert."""
    columns = layer.config.columns
    found: list[list[Tensor]] = [[] for _ in range(E)]
    for name, tensor in held.items():
        flat = not columns.are_equal and name != "down_proj_bias"
        rows = tensor.split([len(tensor) // columns.total * size for size in columns.widths]) if flat else tensor
        for expert in range(E):
            found[expert].append(rows[expert].clone())
    return found


@pytest.mark.parametrize("widths", [24, (8, 24, 1, 40, 12)])
def test_those_experts_and_no_others(widths):
    layer, optimizer = trained(widths)
    experts = dict(layer.experts.named_parameters())
    states = [name for name in optimizer.state[layer.experts.down_proj] if name != "step"]
    assert len(states) == 3
    before = parts(layer, experts)
    reinit_experts(layer, [3, 1], optimizer=optimizer)
    after = parts(layer, experts)
    for expert in range(E):
        for name, old, new in zip(experts, before[expert], after[expert], strict=True):
            if expert not in (1, 3):
                assert torch.equal(old, new)
            elif name.endswith("bias"):
                assert not new.any()
            else:
                assert not (old == new).any() and new.std().item() == pytest.approx(0.02, rel=0.25)
    for state in states:
        held = parts(layer, {name: optimizer.state[parameter][state] for name, parameter in experts.items()})
        assert all(not part.any() for expert in (1, 3) for part in held[expert])
        assert all(part.any() for expert in (0, 2, 4) for part in held[expert])


def test_the_gate_gets_rows_like_the_others():
    layer, optimizer = trained(correction_bias=True)
    router = layer.router
    with torch.no_grad():
        router.weight.normal_(mean=3.0, std=0.1)
        router.weight[2] = 100.0
        router.correction_bias.copy_(torch.tensor([1.0, 2.0, 50.0, 3.0, 2.0]))
    before = router.weight.clone()
    reinit_experts(layer, [2], optimizer=optimizer)
    others = [0, 1, 3, 4]
    assert torch.equal(router.weight[others], before[others])
    assert router.weight[2].mean().item() == pytest.approx(3.0, abs=0.3) and 0.02 < router.weight[2].std().item() < 0.4
    assert router.correction_bias.tolist() == [1, 2, 2, 3, 2]
    assert not optimizer.state[router.weight]["exp_avg"][2].any() and optimizer.state[router.weight]["exp_avg"][others].any()
    before = router.weight.clone()
    reinit_experts(layer, [2], router=False)
    assert torch.equal(router.weight, before)


def test_all_experts_and_given_std_and_generator():
    layer, _ = trained()

    def drawn(seed: int) -> Tensor:
        reinit_experts(layer, range(E), std=0.5, generator=torch.Generator(DEVICE).manual_seed(seed))
        return layer.experts.gate_up_proj.detach().clone()

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.std().item() == pytest.approx(0.5, rel=0.05) and layer.router.weight.isfinite().all()


def test_layer_of_a_model():
    model = nn.Sequential(*(trained()[0] for _ in range(2)))
    with pytest.raises(ValueError, match="layer must be one of '0', '1'; got None"):
        reinit_experts(model, [0])
    before = model[0].experts.down_proj.clone()
    reinit_experts(model, [0], layer="1")
    assert torch.equal(before, model[0].experts.down_proj)


@pytest.mark.parametrize("ids", [[E], [-1]])
def test_refuses_other_experts(ids):
    with pytest.raises(ValueError, match=r"integers in \[0, 5\)"):
        reinit_experts(trained()[0], ids)


@pytest.mark.parametrize("ids", [3, ["a"], [0.5], [True, False], torch.tensor([True]), None])
def test_refuses_what_is_no_id(ids):
    layer, _ = trained()
    before = layer.experts.down_proj.clone()
    with pytest.raises(TypeError, match=r"expert_ids must be integers in \[0, 5\)"):
        reinit_experts(layer, ids)
    with pytest.raises(TypeError, match="optimizer must be of type Optimizer"):
        reinit_experts(layer, [1], optimizer=3)
    assert torch.equal(before, layer.experts.down_proj)


def test_ids_of_other_kinds():
    layer, _ = trained()
    before = layer.experts.down_proj.clone()
    reinit_experts(layer, torch.tensor([1, 3]))
    assert [not torch.equal(*pair) for pair in zip(before, layer.experts.down_proj, strict=True)] == [0, 1, 0, 1, 0]


def test_adafactor_forgets():
    layer, _ = trained()
    optimizer = torch.optim.Adafactor(layer.parameters())
    layer(torch.randn(60, H, device=DEVICE)).square().sum().backward()
    optimizer.step()
    reinit_experts(layer, [2], optimizer=optimizer)
    state = optimizer.state[layer.experts.gate_up_proj]
    for name in ("row_var", "col_var"):
        assert not state[name][2].any() and state[name][1].any()


def test_no_experts_is_nothing():
    layer, _ = trained()
    before = [parameter.clone() for parameter in layer.parameters()]
    reinit_experts(layer, [])
    assert all(torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))


def test_a_transformers_model():
    transformers = pytest.importorskip("transformers", minversion="5.9")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(DEVICE)
    experts = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    before = experts.gate_up_proj.detach().clone()
    reinit_experts(model, [2])
    changed = (experts.gate_up_proj != before).flatten(1).any(dim=1)
    assert changed.tolist() == [False, False, True, False]
    assert experts.gate_up_proj[2].std().item() == pytest.approx(0.1, rel=0.15)
