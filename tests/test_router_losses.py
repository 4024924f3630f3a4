"""What keeps experts equally busy: losses of padded, split and spread batches, and correction biases that move."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEConfig, Router, RouterConfig, RouterOutput, dMoE
from blocksparse_moe.router import (
    BiasBalancer,
    GlobalLoadBalancingLoss,
    importance_loss,
    load_balancing_loss,
    load_loss,
    z_loss,
)
from blocksparse_moe_kernels import reference

from .router_support import given_logits
from .support import DEVICE, HAS_CUDA


def routed(logits: Tensor, top_k: int = 1, **options) -> RouterOutput:
    router, x = given_logits(logits, top_k, normalize=options.pop("normalize", False))
    router.config = RouterConfig(top_k, normalize=False, **options)
    return router(x)


def one_expert_each(experts: list[int], num_experts: int = 4) -> Tensor:
    return 10 * nn.functional.one_hot(torch.tensor(experts), num_experts).float()


# -------------------------------------------------------------------- the loss of a batch


@pytest.mark.case("N1")
def test_scale():
    balanced, collapsed = one_expert_each([0, 1, 2, 3] * 2), one_expert_each([0] * 8)
    assert load_balancing_loss(routed(balanced)).item() == pytest.approx(1)
    assert load_balancing_loss(routed(collapsed)).item() == pytest.approx(4, rel=1e-3)
    uniform = routed(torch.zeros(8, 4), top_k=2)
    assert load_balancing_loss(uniform).item() == pytest.approx(1)
    assert load_balancing_loss(uniform, transformers_scale=True).item() == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 3])
def test_the_scale_of_transformers(top_k):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits, mask = torch.randn(24, 6), torch.ones(2, 12, dtype=torch.long)
    mask[1, 5:] = 0
    routing = routed(logits, top_k)
    for attended in (None, mask):
        expected = mixtral.load_balancing_loss_func((logits,), 6, top_k, attended)
        flat = None if attended is None else attended.to(DEVICE)
        ours = load_balancing_loss(routing, mask=flat, transformers_scale=True)
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.case("N2")
def test_layers_that_lean_to_opposite_sides_do_not_cancel():
    layers = [routed(one_expert_each([expert] * 8)) for expert in (0, 1)]
    assert torch.stack([load_balancing_loss(layer) for layer in layers]).mean().item() == pytest.approx(4, rel=1e-3)


@pytest.mark.case("N3")
def test_padding_does_not_count():
    logits = one_expert_each([0, 1, 2, 3, 0, 0, 0, 0])
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], device=DEVICE)
    assert load_balancing_loss(routed(logits), mask=mask).item() == pytest.approx(1)
    assert load_balancing_loss(routed(logits)).item() == pytest.approx(1.75, rel=1e-3)


@given(data=st.data())
def test_padding_is_as_if_it_were_not_there(data):
    T, E = data.draw(st.integers(1, 12)), data.draw(st.integers(2, 6))
    top_k = data.draw(st.integers(1, E - 1))
    logits = torch.randn(T, E)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=T, max_size=T)))
    options = dict(score=data.draw(st.sampled_from(["softmax", "sigmoid"])))
    full, real = routed(logits, top_k, **options), routed(logits[mask], top_k, **options)
    full.logits[~mask.to(DEVICE)].sum()
    for loss in (load_balancing_loss, z_loss, importance_loss):
        torch.testing.assert_close(loss(full, mask=mask.to(DEVICE)), loss(real), rtol=1e-5, atol=1e-6)


def test_padding_that_is_not_finite_harms_nothing():
    logits = torch.randn(6, 4)
    logits[4:] = torch.nan
    mask = torch.arange(6, device=DEVICE) < 4
    routing = routed(logits, 2)
    for loss in (load_balancing_loss, z_loss, importance_loss):
        assert loss(routing, mask=mask).isfinite()


@pytest.mark.case("N4")
def test_a_loss_is_there_when_it_is_read_and_costs_nothing_before():
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    layer, x = dMoE(MoEConfig(8, 12, 4), device=DEVICE), torch.randn(5, 8, device=DEVICE)
    with Names() as forward:
        _, routing = layer(x, return_routing=True)
    with Names() as reading:
        assert routing.load_balancing_loss.requires_grad and routing.z_loss.requires_grad
    assert "logsumexp" in reading.names and "logsumexp" not in forward.names and "scatter_add" not in forward.names


@pytest.mark.case("N6")
def test_a_sigmoid_router_cannot_escape_by_small_scores():
    routing = routed(torch.full((8, 4), -50.65), score="sigmoid")  # scores of 1e-22
    torch.testing.assert_close(routing.probabilities.sum(dim=1), torch.ones(8, device=DEVICE))
    assert load_balancing_loss(routing).item() == pytest.approx(1)


@pytest.mark.case("N7")
@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_sequences(sequences):
    """The mean over sequences of each one's own loss, of scores that are normalised as the router's are."""
    logits = torch.randn(20, 6) * 2
    routing = routed(logits, 2, score="sigmoid")
    scores = routing.logits.double().sigmoid()
    scores = scores / scores.sum(dim=1, keepdim=True)
    parts = zip(scores.chunk(sequences), routing.expert_ids.chunk(sequences), strict=True)
    expected = torch.stack([reference.load_balancing_loss(part, ids) for part, ids in parts]).mean()
    ours = load_balancing_loss(routing, sequences=sequences)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)


def test_sequences_of_padding_alone_do_not_count():
    logits, mask = torch.randn(12, 4), torch.ones(12, dtype=torch.bool, device=DEVICE)
    mask[4:8] = False
    padded = load_balancing_loss(routed(logits, 2), sequences=3, mask=mask)
    torch.testing.assert_close(padded, load_balancing_loss(routed(torch.cat((logits[:4], logits[8:])), 2), sequences=2))


def test_no_tokens():
    routing = routed(torch.empty(0, 4), 2)
    for loss in (load_balancing_loss, z_loss, importance_loss):
        value = loss(routing)
        assert value.item() == 0
        value.backward(retain_graph=True)


def test_gradients_are_finite_at_a_router_of_zeros():
    router = Router(8, 4, RouterConfig(2, normalize=False), device=DEVICE, init_std=0.0)
    routing = router(torch.randn(10, 8, device=DEVICE))
    (load_balancing_loss(routing) + z_loss(routing) + importance_loss(routing)).backward()
    assert router.weight.grad.isfinite().all() and router.weight.grad.any()


def test_what_is_refused():
    routing = routed(torch.randn(9, 4), 2)
    with pytest.raises(ValueError, match="9 tokens do not make 2 sequences"):
        load_balancing_loss(routing, sequences=2)
    with pytest.raises(ValueError, match=r"mask must have an element for each of the 9 tokens; got \[8\]"):
        z_loss(routing, mask=torch.ones(8))
    with pytest.raises(ValueError, match="the router drew no noise"):
        load_loss(routing)


# -------------------------------------------------------------------- Shazeer's losses


def test_importance():
    assert importance_loss(routed(one_expert_each([0, 1, 2, 3]))).item() == pytest.approx(0, abs=1e-6)
    assert importance_loss(routed(one_expert_each([2] * 5))).item() == pytest.approx(3)
    routing = routed(torch.randn(20, 5), 2)
    spread = torch.zeros(20, 5, device=DEVICE).scatter(1, routing.expert_ids, routing.weights).double().sum(dim=0)
    torch.testing.assert_close(importance_loss(routing).double(), spread.var(correction=0) / spread.mean() ** 2)


@pytest.mark.parametrize("options", [dict(noise=0.7), dict(learned_noise=True), dict(noise=0.4, learned_noise=True)], ids=str)
def test_load_is_the_probability_of_being_chosen(options):
    """Against drawing the noise of each expert anew, many times."""
    E, top_k, draws = 5, 2, 40_000
    router = Router(6, E, RouterConfig(top_k, **options), device=DEVICE, init_std=1.0)
    routing = router(torch.randn(3, 6, device=DEVICE))
    scale = routing.noise_scale.expand(3, E)
    chance = torch.zeros(3, E, device=DEVICE)
    for token in range(3):
        for expert in range(E):
            logits = routing.logits[token].repeat(draws, 1)
            logits[:, expert] = routing.clean_logits[token, expert] + scale[token, expert] * torch.randn(draws, device=DEVICE)
            chance[token, expert] = (logits.topk(top_k).indices == expert).any(dim=1).float().mean()
    load = chance.sum(dim=0)
    torch.testing.assert_close(load_loss(routing), load.var(correction=0) / load.mean() ** 2, rtol=0.05, atol=2e-3)
    load_loss(routing).backward()
    assert router.weight.grad.isfinite().all() and router.weight.grad.any()


def test_the_smooth_load_of_closed_experts_and_of_small_noise():
    for seed in range(10):
        torch.manual_seed(seed)
        router = Router(4, 4, RouterConfig(2, learned_noise=True, expert_dropout=0.6), device=DEVICE)
        load_loss(router(torch.randn(8, 4, device=DEVICE))).backward()
        assert router.weight.grad.isfinite().all() and router.noise_weight.grad.isfinite().all()
    for logit in (-20, -40, -60, -200):  # of the noise: its scale is 0 at last
        router = Router(8, 6, RouterConfig(2, learned_noise=True), device=DEVICE)
        with torch.no_grad():
            router.noise_weight[1] = logit
        load_loss(router(torch.ones(7, 8, device=DEVICE) / 8 + 1e-3 * torch.randn(7, 8, device=DEVICE))).backward()
        assert router.weight.grad.isfinite().all() and router.noise_weight.grad.isfinite().all()
    router = Router(3, 4, RouterConfig(2, learned_noise=True), device=DEVICE)
    torch.nn.init.constant_(router.noise_weight, -20)
    router(torch.ones(3, 3, device=DEVICE)).weights[:, 0].sum().backward()
    assert router.noise_weight.grad.isfinite().all()


# -------------------------------------------------------------------- balance without a loss

BALANCED = RouterConfig(2, score="sigmoid", correction_bias=True)


def layers(*configs: RouterConfig) -> nn.Sequential:
    return nn.Sequential(*(dMoE(MoEConfig(8, 12, 4, router=config, init_std=0.5), device=DEVICE) for config in configs))


@pytest.mark.case("N10")
def test_one_update_a_step_whatever_the_micro_batches():
    model = layers(BALANCED, RouterConfig(2), BALANCED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = BiasBalancer(model, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: balancer.step())
    x, counts = torch.randn(4, 30, 8, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    for micro_batch in x:
        first, routing = model[0](micro_batch, return_routing=True)
        last, other_routing = model[2](model[1](first), return_routing=True)
        last.sum().backward()
        counts += torch.stack((routing.tokens_per_expert, other_routing.tokens_per_expert))
    optimizer.step()
    for layer, load in zip((model[0], model[2]), counts, strict=True):
        assert torch.equal(layer.router.correction_bias, 0.5 * (load.mean() - load).sign())
    before = [layer.router.correction_bias.clone() for layer in (model[0], model[2])]
    optimizer.step()  # nothing was seen since
    assert all(map(torch.equal, before, [model[0].router.correction_bias, model[2].router.correction_bias]))
    assert "0.router.correction_bias" in model.state_dict() and "1.router.correction_bias" not in model.state_dict()


@pytest.mark.case("N8")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_neither_validation_nor_recompute_counts(use_reentrant):
    model, x = layers(BALANCED), torch.randn(30, 8, device=DEVICE, requires_grad=True)
    balancer = BiasBalancer(model)
    model.eval()
    for _ in range(3):
        model(x)
    assert balancer._counts == [None]
    model.train()
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert balancer._counts[0].sum() == 60
    balancer.remove()
    model(x)
    assert balancer._counts[0].sum() == 60


@pytest.mark.case("N9")
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_neither_biases_nor_losses_depend_on_the_number_of_stages(stages):
    """Layers that are spread over the stages of a pipeline: each stage has what is its own."""
    whole = nn.ModuleList(Router(8, 4, BALANCED, device=DEVICE, init_std=1.0) for _ in range(4))
    split = copy.deepcopy(whole)
    per_stage = 4 // stages
    parts = [split[first : first + per_stage] for first in range(0, 4, per_stage)]
    one, several = BiasBalancer(whole, gamma=0.5), [BiasBalancer(part, gamma=0.5) for part in parts]
    all_of, each = GlobalLoadBalancingLoss(), [GlobalLoadBalancingLoss() for _ in parts]
    for x in torch.randn(3, 10, 8, device=DEVICE):
        expected = all_of(*(router(x) for router in whole))
        losses = [balance(*(router(x) for router in part)) for balance, part in zip(each, parts, strict=True)]
        torch.testing.assert_close(torch.stack(losses).mean(), expected)
        expected.backward()
        torch.stack(losses).mean().backward()
    for balancer in (one, *several):
        balancer.step()
    for router, other in zip(whole, split, strict=True):
        assert torch.equal(router.correction_bias, other.correction_bias) and router.correction_bias.any()
        torch.testing.assert_close(router.weight.grad, other.weight.grad)


def test_a_bias_that_is_loaded_in_bf16_is_widened():
    router = Router(8, 4, BALANCED)
    state = {name: tensor.bfloat16() for name, tensor in router.state_dict().items()}
    for assign in (False, True):
        router.load_state_dict(state, assign=assign)
        assert router.correction_bias.dtype == torch.float32
    assert router.weight.dtype == torch.bfloat16


def test_it_balances():
    """A router that sends most tokens to two of eight experts sends equally many to all after a while."""
    router = Router(16, 8, RouterConfig(2, score="sigmoid", correction_bias=True), device=DEVICE, init_std=0.1)
    with torch.no_grad():
        router.weight[:2] += 0.5
    x = torch.randn(2000, 16, device=DEVICE) + 0.5
    balancer = BiasBalancer(router)
    before = router(x).tokens_per_expert
    for step in range(200):
        balancer.gamma = 0.02 if step < 100 else 0.001
        router(x)
        balancer.step()
    after = router(x).tokens_per_expert
    assert before.max() > 1500 and before.min() < 100
    assert after.max() < 700 and after.min() > 300


def test_the_average_of_the_load_outlives_a_step():
    router = Router(4, 4, RouterConfig(1, normalize=False, correction_bias=True), device=DEVICE)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    balancer = BiasBalancer(router, gamma=1e-6, ema=0.75)
    for counts in ([0, 0, 8, 0], [8, 0, 0, 0]):
        router(torch.eye(4, device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE), dim=0))
        balancer.step()
    assert balancer._loads[0].tolist() == [2, 0, 6, 0]
    assert (router.correction_bias * 1e6).round().tolist() == [1, 2, -2, 2]  # 2 is the mean: no move at the second step


def test_padding_is_not_balanced():
    model, x = layers(BALANCED), torch.randn(3, 10, 8, device=DEVICE)
    balancer, mask = BiasBalancer(model), torch.rand(3, 10, device=DEVICE) < 0.5
    balancer.mask = mask
    model(x)
    balancer.remove()
    assert torch.equal(balancer._counts[0], model[0](x[mask], return_routing=True)[1].tokens_per_expert)


def test_steps_without_tokens_move_nothing():
    model = layers(BALANCED)
    balancer = BiasBalancer(model, ema=0.5)
    model(torch.randn(30, 8, device=DEVICE))
    balancer.step()
    bias, load = model[0].router.correction_bias.clone(), balancer._loads[0].clone()
    assert bias.any()
    balancer.step()
    assert torch.equal(model[0].router.correction_bias, bias) and torch.equal(balancer._loads[0], load)


def test_a_training_that_goes_on():
    model, x = layers(BALANCED, BALANCED), torch.randn(2, 30, 8, device=DEVICE)
    balancer = BiasBalancer(model, ema=0.9)
    model(x[0])
    balancer.step()
    saved = io.BytesIO()
    torch.save((model.state_dict(), balancer.state_dict()), saved)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    other = layers(BALANCED, BALANCED)
    other.load_state_dict(states[0])
    resumed = BiasBalancer(other, ema=0.9)
    resumed.load_state_dict(states[1])
    for one in (model, other):
        one(x[1])
    balancer.step()
    resumed.step()
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    with pytest.raises(ValueError, match="2 routers; the model has 1"):
        BiasBalancer(layers(BALANCED)).load_state_dict(states[1])
    with pytest.raises(ValueError, match="of 3 experts; the router has 4"):
        BiasBalancer(layers(BALANCED)).load_state_dict({"loads": [torch.ones(3)]})


def test_a_copy_of_a_balanced_model_is_not_counted():
    model, saved = layers(BALANCED), io.BytesIO()
    balancer = BiasBalancer(model)
    balancer.group = lambda: None  # as a process group, no copy nor pickle takes it
    copied = copy.deepcopy(model)
    torch.save(model, saved)
    saved.seek(0)
    for other in (copied, torch.load(saved, weights_only=False)):
        other(torch.randn(30, 8, device=DEVICE))
    assert balancer._counts == [None]
    model(torch.randn(30, 8, device=DEVICE))
    assert balancer._counts[0].sum() == 60


@pytest.mark.gpu
def test_routers_on_several_devices():
    routers, alone = [Router(8, 4, BALANCED, device=device) for device in ("cpu", "cuda")], Router(8, 4, BALANCED)
    for router in (*routers, alone):
        router.load_state_dict(routers[0].state_dict())
    x = torch.randn(5, 8)
    balancers = [BiasBalancer(nn.ModuleList(routers), gamma=0.5, ema=0.5), BiasBalancer(alone, gamma=0.5, ema=0.5)]
    together, once = GlobalLoadBalancingLoss(), GlobalLoadBalancingLoss()
    for _ in range(2):
        routings = [router(x.to(router.weight.device)) for router in routers]
        torch.testing.assert_close(together(*routings), once(alone(x)))
        for balancer in balancers:
            balancer.step()
    for router in routers:
        assert torch.equal(router.correction_bias.cpu(), alone.correction_bias) and alone.correction_bias.any()


def test_a_model_without_correction_biases():
    with pytest.raises(ValueError, match=r"none of the 2 routers of the model has a correction bias"):
        BiasBalancer(layers(RouterConfig(2), RouterConfig(2)))
    with pytest.raises(ValueError, match="ema must be at least 0 and below 1; got 1"):
        BiasBalancer(layers(BALANCED), ema=1)


@pytest.mark.slow
@pytest.mark.case("N8")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_of_compiled_code_is_not_counted(use_reentrant):
    model, x = layers(BALANCED), torch.randn(30, 8, device=DEVICE, requires_grad=True)
    balancer, compiled = BiasBalancer(model), torch.compile(model, backend="aot_eager")
    for calls in (1, 2, 3):
        checkpoint(compiled, x, use_reentrant=use_reentrant).sum().backward()
        assert balancer._counts[0].sum() == 60 * calls


@pytest.mark.slow
def test_compiled():
    model, x = layers(BALANCED), torch.randn(30, 8, device=DEVICE)
    balancer = BiasBalancer(model, gamma=0.5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if not HAS_CUDA else "inductor")
    for _ in range(2):
        compiled(x).sum().backward()
    assert balancer._counts[0].sum() == 120
    balancer.step()
    assert model[0].router.correction_bias.any()
