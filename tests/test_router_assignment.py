"""Slots that go elsewhere: experts that compute nothing, top-p, capacities, given and replayed ids; and the shared expert."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blocksparse_moe import MoEConfig, Router, RouterConfig, dMoE
from blocksparse_moe.router import balanced_ids, record_routing, replay_routing
from blocksparse_moe.router.assignment import within_top_p
from blocksparse_moe.router.choice import choose_experts
from blocksparse_moe_kernels import get_activation

from .router_support import given_logits
from .support import DEVICE, each_backend_slowly

H, F_SIZE, E = 8, 12, 4


def layer_of(backend: str = "auto", dtype: torch.dtype | None = None, **options) -> dMoE:
    router = RouterConfig(options.pop("top_k", 2), **options.pop("router", {}))
    return dMoE(MoEConfig(H, F_SIZE, E, router=router, init_std=0.5, **options), device=DEVICE, dtype=dtype, backend=backend)


def routed(logits: Tensor, config: RouterConfig):
    router, x = given_logits(logits, config.top_k, normalize=config.normalize)
    router.config = config
    return router(x)


# -------------------------------------------------------------------- experts that compute nothing


@each_backend_slowly
def test_identity_and_null_experts(backend):
    layer = layer_of(backend, top_k=3, router=dict(num_identity_experts=2, num_null_experts=1, score="sigmoid"))
    assert layer.router.weight.shape == (E + 3, H) and layer.experts.down_proj.shape[0] == E
    x = torch.randn(40, H, device=DEVICE, requires_grad=True)
    y, routing = layer(x, return_routing=True)
    ids, weights = routing.expert_ids, routing.weights
    assert ids.max() == E + 2 and len(routing.tokens_per_expert) == E + 3 and routing.tokens_per_expert.sum() == 120

    expected = torch.zeros_like(x, dtype=torch.float64)
    up, down = layer.experts.gate_up_proj.double(), layer.experts.down_proj.double()
    act = get_activation("swiglu")
    for k in range(3):
        for token in range(40):
            expert, row = int(ids[token, k]), x[token].double()
            if expert < E:
                row = down[expert] @ act(up[expert] @ row)
            elif expert == E + 2:
                row = torch.zeros_like(row)
            expected[token] += weights[token, k].double() * row
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    y.sum().backward()
    assert x.grad.isfinite().all() and layer.router.weight.grad[E : E + 2].any()


def test_as_many_experts_as_there_are_with_those_that_compute_nothing():
    assert layer_of(top_k=E + 1, router=dict(num_identity_experts=1))(torch.randn(3, H, device=DEVICE)).isfinite().all()
    with pytest.raises(ValueError, match="top_k=6 experts per token, but there are only 5 experts"):
        layer_of(top_k=6, router=dict(num_null_experts=1))
    with pytest.raises(ValueError, match="num_null_experts must be at least 1; got -1"):
        RouterConfig(num_null_experts=-1)


# -------------------------------------------------------------------- top-p


@given(data=st.data())
def test_top_p(data):
    T, num_experts = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 8))
    config = RouterConfig(
        data.draw(st.integers(2, num_experts)),
        top_p=data.draw(st.sampled_from([0.01, 0.4, 0.75, 0.999])),
        normalize=data.draw(st.booleans()),
        scaling_factor=data.draw(st.sampled_from([1.0, 2.5])),
        score=data.draw(st.sampled_from(["softmax", "sigmoid"])),
    )
    routing = routed(torch.randn(T, num_experts) * 2, config)
    for token in range(T):
        probability = routing.probabilities[token].detach().double()
        order = probability.argsort(descending=True).tolist()
        total, wanted = 0.0, []
        for expert in order[: config.top_k]:
            if total < config.top_p:
                wanted.append(expert)
            total += float(probability[expert])
        ids, weights = routing.expert_ids[token], routing.weights[token].double()
        assert ids.tolist() == wanted + [-1] * (config.top_k - len(wanted))
        scores = routing.logits[token].double()
        scores = scores.softmax(0) if config.score == "softmax" else scores.sigmoid()
        expected = scores[wanted]
        expected = config.scaling_factor * (expected / expected.sum() if config.normalize else expected)
        torch.testing.assert_close(weights[: len(wanted)], expected, rtol=1e-5, atol=1e-7)
        assert not weights[len(wanted) :].any()


def test_top_p_of_none_and_of_all():
    logits = torch.randn(20, 6)
    one, all_of_them, plain = (routed(logits, RouterConfig(3, top_p=p)) for p in (1e-6, 1.0, None))
    assert (one.expert_ids[:, 1:] == -1).all() and one.drop_rate.item() == pytest.approx(2 / 3)
    torch.testing.assert_close(one.weights[:, 0], torch.ones(20, device=DEVICE))
    assert torch.equal(all_of_them.expert_ids, plain.expert_ids) and plain.drop_rate == 0
    bad = torch.randn(4, 6)
    bad[1, 2], bad[2] = torch.nan, torch.inf
    ids = choose_experts(bad.to(DEVICE), None, RouterConfig(3))[1]
    _, ids = within_top_p(bad.to(DEVICE), torch.ones(4, 3, device=DEVICE), ids, RouterConfig(3, top_p=0.9))
    assert all(len(set(row)) == 3 and min(row) >= 0 for row in ids[1:3].tolist())
    with pytest.raises(ValueError, match="top_p must be above 0; got 0"):
        RouterConfig(top_p=0.0)


# -------------------------------------------------------------------- capacity


def first_come(routing, capacity: int, by_probability: bool, plain) -> list[list[int]]:
    """The ids that have room, one slot after the other."""
    T, top_k = plain.expert_ids.shape
    slots = [(k, t) for k in range(top_k) for t in range(T)]
    if by_probability:
        slots.sort(key=lambda slot: -plain.weights[slot[1], slot[0]].item())
    room, ids = {}, plain.expert_ids.tolist()
    for k, t in slots:
        expert = ids[t][k]
        room[expert] = room.get(expert, 0) + 1
        if room[expert] > capacity:
            ids[t][k] = -1
    return ids


@given(data=st.data())
def test_capacity(data):
    T, num_experts = data.draw(st.integers(0, 14)), data.draw(st.integers(2, 6))
    top_k = data.draw(st.integers(1, num_experts))
    factor, drop = data.draw(st.sampled_from([0.3, 1.0, 1.25, 100.0])), data.draw(st.sampled_from(["position", "probability"]))
    config = RouterConfig(top_k, normalize=False, capacity_factor=factor, drop=drop)
    logits = torch.randn(T, num_experts) + torch.arange(num_experts) * 0.5
    plain, routing = routed(logits, replace(config, capacity_factor=None)), routed(logits, config)
    capacity = math.ceil(round(factor * T * top_k / num_experts, 6))
    assert routing.expert_ids.tolist() == first_come(routing, capacity, drop == "probability", plain)
    assert not T or routing.tokens_per_expert.max() <= capacity
    dropped = routing.expert_ids == -1
    assert torch.equal(routing.weights, plain.weights.masked_fill(dropped, 0))
    assert routing.drop_rate.item() == pytest.approx(float(dropped.float().mean()) if T else 0)


def test_dropped_tokens_give_nil_and_all_others_what_they_did():
    layer = layer_of(top_k=1, router=dict(normalize=False, capacity_factor=0.5))
    dropless = layer_of(top_k=1, router=dict(normalize=False))
    dropless.load_state_dict(layer.state_dict())
    x = torch.randn(60, H, device=DEVICE)
    y, routing = layer(x, return_routing=True)
    dropped = (routing.expert_ids == -1)[:, 0]
    assert 0.2 < routing.drop_rate < 0.9 and not y[dropped].any()
    assert torch.equal(y[~dropped], dropless(x)[~dropped])


# -------------------------------------------------------------------- given ids


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_ids_that_the_router_would_choose_have_its_weights(score, normalize):
    config = RouterConfig(3, score=score, normalize=normalize, scaling_factor=2.5)
    router, x = Router(6, 9, config, device=DEVICE, init_std=1.0), torch.randn(20, 6, device=DEVICE)
    own = router(x)
    for dtype in (torch.int16, torch.int32, torch.int64):
        given = router(x, expert_ids=own.expert_ids.to(dtype))
        torch.testing.assert_close(given.weights, own.weights)
        assert torch.equal(given.expert_ids, own.expert_ids)
    grads = [torch.autograd.grad(out.weights.square().sum(), router.weight)[0] for out in (own, given)]
    torch.testing.assert_close(*grads)


@pytest.mark.case("D3")
@pytest.mark.parametrize("num_experts", [255, 256, 257, 301, 40_000])
def test_recorded_routing_given_back(num_experts):
    router = Router(4, num_experts, RouterConfig(2), device=DEVICE, init_std=1.0)
    with torch.no_grad():
        router.weight[-1] += 5
    x = [torch.randn(30, 4, device=DEVICE) for _ in range(2)]
    with record_routing(router) as recording:
        own = [router(one) for one in x]
    assert [ids.dtype for ids in recording[""]] == [torch.int16 if num_experts <= 2**15 else torch.int32] * 2
    assert max(int(ids.max()) for ids in recording[""]) == num_experts - 1
    with torch.no_grad():
        router.weight.normal_()
    with replay_routing(router, recording):
        given = [router(one) for one in x]
        with pytest.raises(ValueError, match="called more often than the 2 recorded times"):
            router(x[0])
    for one, other in zip(own, given, strict=True):
        assert torch.equal(one.expert_ids, other.expert_ids) and not torch.equal(one.weights, other.weights)
    assert not torch.equal(router(x[0]).expert_ids, own[0].expert_ids)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_replay_under_activation_checkpointing(use_reentrant):
    layer, x = layer_of(), torch.randn(20, H, device=DEVICE, requires_grad=True)
    with record_routing(layer) as recording:
        expected = layer(x)
        checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert len(recording["router"]) == 2
    expected_grad, x.grad = x.grad, None
    with torch.no_grad():
        recording["router"] = [ids.clone() for ids in recording["router"]]
    with replay_routing(layer, recording):
        for _ in range(2):
            x.grad = None
            y = checkpoint(layer, x, use_reentrant=use_reentrant)
            y.sum().backward()
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(x.grad, expected_grad)
    with pytest.raises(ValueError, match=r"the recording is of the routers \['router'\]; the model has \[''\]"):
        replay_routing(layer.router, recording).__enter__()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_replay_does_not_guess_which_call_is_made_once_more(use_reentrant):
    layer, x = layer_of(), torch.randn(20, H, device=DEVICE, requires_grad=True)
    with record_routing(layer) as recording:
        layer(x), layer(2 * x)
    with replay_routing(layer, recording):
        y = checkpoint(layer, x, use_reentrant=use_reentrant) + checkpoint(layer, 2 * x, use_reentrant=use_reentrant)
        with pytest.raises(ValueError, match="'router' was called twice before a backward pass"):
            y.sum().backward()
    with pytest.raises(ValueError, match=r"some were not made: {'router': '1 of 2'}"), replay_routing(layer, recording):
        layer(x)


def test_a_model_without_routers_has_nothing_to_record():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="record_routing: Linear has no Router"), record_routing(model):
        pass
    with pytest.raises(ValueError, match="replay_routing: Linear has no Router"), replay_routing(model, {}):
        pass


def test_balanced_ids():
    for T, K, experts in ((12, 2, 6), (7, 3, 5), (0, 1, 1), (3, 4, 4)):
        ids = balanced_ids(T, K, experts)
        counts = ids.flatten().bincount(minlength=experts)
        assert ids.shape == (T, K) and counts.max() - counts.min() <= 1
        assert all(len(set(row)) == K for row in ids.tolist())
    for arguments, message in (
        ((-1, 1, 1), "num_tokens must be at least 0"),
        ((1, 0, 1), "top_k must be at least 1"),
        ((1, 1, 0), "num_experts must be at least 1"),
        ((1, 3, 2), "top_k must be at most num_experts=2; got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            balanced_ids(*arguments)


def test_given_ids_are_not_left_out():
    options = dict(expert_dropout=0.7, token_dropout=0.5, capacity_factor=0.3)
    layer, x = layer_of(router=options), torch.randn(40, H, device=DEVICE)
    routing = layer.router(x, expert_ids=balanced_ids(40, 2, E, DEVICE))
    assert routing.drop_rate == 0 and routing.weights.isfinite().all() and (routing.weights > 0).all()


@each_backend_slowly
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_bias_opens_a_closed_expert(backend, score):
    config = RouterConfig(2, score=score, correction_bias=True, expert_dropout=0.7)
    router = Router(16, 8, config, device=DEVICE, init_std=1.0, backend=backend)
    router.correction_bias.copy_(torch.tensor([1.0] * 4 + [0.0] * 4))
    for _ in range(10):
        routing = router(torch.randn(32, 16, device=DEVICE))
        assert routing.logits.gather(1, routing.expert_ids).isfinite().all() and routing.weights.isfinite().all()


@each_backend_slowly
def test_given_ids_through_the_layer(backend):
    layer, x = layer_of(backend), torch.randn(12, H, device=DEVICE)
    y, routing = layer(x, return_routing=True)
    torch.testing.assert_close(layer(x, expert_ids=routing.expert_ids), y)
    forced = balanced_ids(12, 2, E, DEVICE)
    _, routing = layer(x, expert_ids=forced, return_routing=True)
    assert routing.tokens_per_expert.tolist() == [6] * E
    not_here = torch.full((12, 2), -1, device=DEVICE)
    not_here[::2, 0] = E
    assert not layer(x, expert_ids=not_here).any()
    for wrong in (forced.float(), forced[:5], forced.flatten(), forced > 1, forced[:, :0]):
        with pytest.raises(ValueError, match=r"expert_ids must be integers \[12, K\]"):
            layer(x, expert_ids=wrong)


# -------------------------------------------------------------------- the shared expert


@pytest.mark.case("R2")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1)"])
def test_a_shared_expert(activation, gated):
    layer = layer_of(activation=activation, shared_ffn_hidden_size=20, shared_gate=gated, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
        layer.experts.down_proj.zero_()
        layer.experts.down_proj_bias.zero_()
    x = torch.randn(2, 9, H, device=DEVICE)
    y = layer(x)
    shared = layer.shared_expert
    pre = F.linear(x, getattr(shared, shared.up_name), getattr(shared, f"{shared.up_name}_bias"))
    expected = F.linear(get_activation(activation)(pre), shared.down_proj, shared.down_proj_bias)
    if gated:
        expected = expected * F.linear(x, shared.gate).sigmoid()
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in shared.parameters())


@pytest.mark.case("E11")
@each_backend_slowly
def test_the_scaling_factor_is_of_the_routed_experts(backend):
    layers = [layer_of(backend, router=dict(scaling_factor=factor), shared_ffn_hidden_size=16) for factor in (1.0, 2.5)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(10, H, device=DEVICE)
    one, scaled = (layer(x) - layer.shared_expert(x) for layer in layers)
    torch.testing.assert_close(scaled, 2.5 * one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_a_layer_with_everything(dtype):
    layer = layer_of(dtype=dtype, shared_ffn_hidden_size=16, shared_gate=True, router=dict(num_identity_experts=2))
    x = torch.randn(10, H, device=DEVICE)
    assert layer(x.to(dtype)).dtype == dtype
    assert layer(x).dtype == torch.float32
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert sorted(layer.shared_expert.state_dict()) == ["down_proj", "gate", "gate_up_proj"]
    meta = dMoE(layer.config, device="meta").to_empty(device=DEVICE)
    meta.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in meta.parameters())


def test_a_gate_without_a_shared_expert():
    with pytest.raises(ValueError, match="shared_gate needs a shared expert"):
        MoEConfig(H, F_SIZE, E, shared_gate=True)
    with pytest.raises(ValueError, match="shared_ffn_hidden_size must be at least 1; got -3"):
        MoEConfig(H, F_SIZE, E, shared_ffn_hidden_size=-3)


@pytest.mark.slow
def test_compiled_with_everything():
    options = dict(num_identity_experts=1, top_p=0.8, score="sigmoid", correction_bias=True)
    layer = layer_of(shared_ffn_hidden_size=16, shared_gate=True, router=options)
    x = torch.randn(10, H, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
