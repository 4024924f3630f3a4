"""The router: scores, choice, weights and losses against the fp64 oracle, and the values of public reports."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_moe import MoEConfig, Router, RouterConfig, dMoE
from blocksparse_moe_kernels import reference

from .router_support import SCORES, assert_agrees, configs, given_logits
from .support import DEVICE, leaf, randn

NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.filterwarnings("ignore:RouterConfig")
@given(data=st.data(), dtype=st.sampled_from([torch.float32, *NARROW]))
def test_router(data, dtype):
    """Values, losses and gradients; narrow weights and inputs are widened, so the error is always that of fp32."""
    T, H, E = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40)), data.draw(st.integers(2, 12))
    config = data.draw(configs(E))
    named = {"x": randn(T, H, dtype=dtype), "weight": randn(E, H, dtype=dtype, scale=H**-0.5)}
    if config.bias:
        named["bias"] = randn(E, dtype=dtype)
    coefficients = randn(T, config.top_k, dtype=torch.float32)
    router = Router(H, E, config, device=DEVICE, dtype=dtype)
    correction = randn(E, dtype=torch.float32) if config.correction_bias else None
    with torch.no_grad():
        for name, value in named.items():
            if name != "x":
                getattr(router, name).copy_(value)
        if correction is not None:
            router.correction_bias.copy_(correction)
    ours_x = leaf(named["x"], dtype)
    out = router(ours_x)
    assert out.logits.dtype == out.weights.dtype == torch.float32
    ids = out.expert_ids

    def oracle(precision):
        leaves = {name: leaf(value, precision) for name, value in named.items()}
        logits = leaves["x"] @ leaves["weight"].T + leaves.get("bias", 0)
        scores = SCORES[config.score](logits)
        weights = scores.gather(1, ids)
        weights = config.scaling_factor * (weights / weights.sum(dim=-1, keepdim=True) if config.normalize else weights)
        balance = reference.load_balancing_loss(scores / scores.sum(dim=-1, keepdim=True), ids)
        return list(leaves.values()), (logits, weights, balance, reference.z_loss(logits)), leaves

    def grads(leaves, results):
        _, weights, balance, z = results
        total = (weights * coefficients.to(weights.dtype)).sum() + balance + 0.1 * z
        return torch.autograd.grad(total, leaves)

    (exact_leaves, exact, exact_named), (torch_leaves, torchs, _) = oracle(torch.float64), oracle(torch.float32)
    ours = (out.logits, out.weights, out.load_balancing_loss, out.z_loss)
    for name, *values in zip(("logits", "weights", "load_balancing_loss", "z_loss"), ours, exact, torchs, strict=True):
        assert_agrees(name, *values, terms=E)
    our_leaves = [ours_x, *(getattr(router, name) for name in named if name != "x")]
    for name, found, oracle, fp32 in zip(
        named, grads(our_leaves, ours), grads(exact_leaves, exact), grads(torch_leaves, torchs), strict=True
    ):
        assert found.dtype == dtype
        assert_agrees(name, found, oracle, fp32.to(dtype), terms=E)

    rest = ("normalize", "score", "scaling_factor", "num_groups", "top_groups", "group_score")
    options = {name: getattr(config, name) for name in rest} | {"correction_bias": correction}
    _, _, best = reference.router(top_k=config.top_k, **exact_named, **options)
    values = SCORES[config.score](exact[0]) + (0 if correction is None else correction)
    # in descending order; near ties may swap
    torch.testing.assert_close(values.gather(1, ids), values.gather(1, best), rtol=0, atol=1e-5)
    assert all(len(set(row)) == config.top_k for row in ids.tolist())
    assert torch.equal(out.tokens_per_expert, torch.bincount(ids.flatten(), minlength=E))


@pytest.mark.parametrize("dtype", NARROW)
def test_scores_are_fp32_whatever_the_dtype(dtype):
    router = Router(32, 8, RouterConfig(2), device=DEVICE, init_std=1.0)
    x = torch.randn(20, 32, device=DEVICE)
    with torch.no_grad():
        router.weight.copy_(router.weight.to(dtype))
    x = x.to(dtype).float()
    wide = router(x)
    narrow = router.to(dtype)(x.to(dtype))
    for name in ("logits", "weights"):  # products of narrow operands are exact, their sums are of another order
        torch.testing.assert_close(getattr(wide, name), getattr(narrow, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(wide.expert_ids, narrow.expert_ids)
    assert narrow.logits.dtype == narrow.weights.dtype == narrow.z_loss.dtype == torch.float32
    assert narrow.load_balancing_loss.dtype == torch.float32


def test_scores_are_fp32_under_autocast():
    router = Router(32, 8, RouterConfig(2), device=DEVICE, init_std=1.0)
    x = torch.randn(20, 32, device=DEVICE)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        cast = router(x)
        losses = cast.load_balancing_loss, cast.z_loss
    plain = router(x)
    assert torch.equal(cast.logits, plain.logits)
    assert torch.equal(cast.weights, plain.weights)
    assert torch.equal(losses[0], plain.load_balancing_loss)
    assert torch.equal(losses[1], plain.z_loss)


@pytest.mark.parametrize("normalize", [True, False])
def test_sum_of_the_weights(normalize):
    out = Router(16, 8, RouterConfig(3, normalize=normalize), device=DEVICE, init_std=0.3)(torch.randn(50, 16, device=DEVICE))
    sums = out.weights.sum(dim=-1)
    if normalize:
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=3e-7)
    else:
        chosen = out.logits.softmax(dim=-1).gather(1, out.expert_ids)
        torch.testing.assert_close(out.weights, chosen, rtol=2e-6, atol=0)
        assert (sums < 0.99).any()


# -------------------------------------------------------------------- the choice


@pytest.mark.case("D2")
def test_an_expert_with_a_high_id_can_win():
    router, x = given_logits([[0.01 * expert for expert in range(512)]], 10, normalize=True)
    assert router(x).expert_ids.tolist() == [list(range(511, 501, -1))]


@pytest.mark.parametrize("num_tokens", [1, 17, 33, 129, 1000])
def test_every_row_is_routed(num_tokens):
    router = Router(32, 128, RouterConfig(8), device=DEVICE, init_std=1.0)
    out = router(torch.randn(num_tokens, 32, device=DEVICE))
    ids = out.expert_ids.sort(dim=-1).values
    assert (ids.diff(dim=-1) > 0).all()
    assert ids.min() >= 0 and ids.max() < 128
    torch.testing.assert_close(out.weights.sum(dim=-1), torch.ones(num_tokens, device=DEVICE))


def test_top_k_is_at_most_the_number_of_experts():
    with pytest.raises(ValueError, match="top_k=16 experts per token, but there are only 8 experts"):
        Router(4, 8, RouterConfig(16))
    with pytest.raises(ValueError, match="top_k must be at least 1; got 0"):
        RouterConfig(0)
    router = Router(4, 8, RouterConfig(8), device=DEVICE, init_std=1.0)
    out = router(torch.randn(5, 4, device=DEVICE))
    everything = torch.zeros_like(out.logits).scatter(1, out.expert_ids, out.weights)
    torch.testing.assert_close(everything, out.logits.softmax(dim=-1))


@pytest.mark.parametrize("top_k", [2.0, "2", None, True], ids=repr)
def test_top_k_is_an_integer(top_k):
    with pytest.raises(TypeError, match="RouterConfig: top_k must be an integer; got"):
        RouterConfig(top_k)


def test_hidden_states_that_are_refused():
    router = Router(4, 8, RouterConfig(2), device=DEVICE)
    with pytest.raises(TypeError, match=r"Router: hidden states must have a floating dtype; got torch\.int64"):
        router(torch.ones(5, 4, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="Router: the hidden states are on meta and the weight on"):
        router(torch.ones(5, 4, device="meta"))


def test_the_correction_bias_is_a_buffer_that_stays_fp32():
    config = RouterConfig.preset("deepseek_v3", num_groups=1, top_groups=1, top_k=2)
    router = Router(8, 4, config, device=DEVICE)
    router.correction_bias[2] = 1 + 2**-20
    for cast in (router.bfloat16(), router.half(), router.to(torch.bfloat16), router.double()):
        assert cast.correction_bias.dtype == torch.float32 and cast.correction_bias[2] == 1 + 2**-20
    assert list(router.state_dict()) == ["weight", "correction_bias"]
    other = Router(8, 4, config, device="meta").to_empty(device=DEVICE)
    other.reset_parameters()
    assert not other.correction_bias.any() and other.correction_bias.device.type == DEVICE.type
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.correction_bias, router.correction_bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(score="relu"), "score must be one of 'softmax', 'sigmoid', 'sqrt_softplus'; got 'relu'"),
        (dict(group_score="sum"), "group_score must be one of 'max', 'best_two'; got 'sum'"),
        (dict(scaling_factor=0.0), "scaling_factor must be above 0; got 0.0"),
        (dict(scaling_factor=math.inf), "scaling_factor must be above 0; got inf"),
        (dict(jitter=1.0), "jitter must be at least 0 and below 1; got 1.0"),
        (dict(noise=-1), "noise must be at least 0; got -1"),
        (dict(expert_dropout=0.1, num_groups=2), "expert_dropout could close whole groups"),
        (dict(num_groups=2, top_groups=3), "top_groups=3 groups to choose from, but num_groups=2"),
    ],
)
def test_a_config_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_groups=3, top_groups=2), "8 experts do not make num_groups=3 equal groups"),
        (dict(top_k=3, num_groups=4), "top_k=3 experts per token, but top_groups=1 of num_groups=4 groups hold only 2"),
    ],
)
def test_groups_must_hold_enough_experts(options, message):
    config = RouterConfig(**options)
    with pytest.raises(ValueError, match=f"Router: {message}"):
        Router(4, 8, config)
    with pytest.raises(ValueError, match=f"MoEConfig: {message}"):
        MoEConfig(4, 4, 8, router=config)


@pytest.mark.case("E8")
def test_negative_logits():
    logits = -5 - torch.randn(40, 256).abs()
    router, x = given_logits(logits, 8, normalize=True)
    out = router(x)
    expected = logits.sort(dim=-1, descending=True).indices[:, :8]
    assert torch.equal(out.expert_ids.cpu(), expected)
    weights = logits.gather(1, expected).softmax(dim=-1)
    torch.testing.assert_close(out.weights.cpu(), weights, rtol=0, atol=1e-6)


@pytest.mark.case("E9")
def test_close_scores_are_no_ties():
    router, x = given_logits([[1.0, 1.001, 0.9, 0.9]], 1, normalize=False)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert router(x).expert_ids.tolist() == [[1]]


@pytest.mark.case("U1")
def test_a_row_that_is_not_finite_harms_no_other():
    logits = torch.randn(8, 16)
    router, x = given_logits(logits, 4, normalize=True)
    clean = router(x)
    logits[3], logits[5] = torch.nan, torch.inf
    out = router(given_logits(logits, 4, normalize=True)[1])
    ids = out.expert_ids.sort(dim=-1).values
    assert (ids.diff(dim=-1) > 0).all()
    assert ids.min() >= 0 and ids.max() < 16
    others = [row for row in range(8) if row not in (3, 5)]
    assert torch.equal(out.expert_ids[others], clean.expert_ids[others])
    assert torch.equal(out.weights[others], clean.weights[others])


# -------------------------------------------------------------------- the weights


@pytest.mark.case("E1")
@pytest.mark.filterwarnings("ignore:RouterConfig")
def test_normalisation_is_over_the_experts_of_a_token():
    scores = torch.tensor([[0.7, 0.3], [0.4, 0.6]])
    router, x = given_logits(scores.log(), 1, normalize=True)
    out = router(x)
    assert out.weights.tolist() == [[1.0], [1.0]]
    assert out.expert_ids.tolist() == [[0], [1]]


@pytest.mark.case("E2")
@pytest.mark.parametrize(("normalize", "expected"), [(True, [0.7311, 0.2689]), (False, [0.6439, 0.2369])])
def test_renormalisation_is_an_option(normalize, expected):
    router, x = given_logits([[2.0, 1.0, 0.0, -1.0]], 2, normalize)
    torch.testing.assert_close(router(x).weights.cpu(), torch.tensor([expected]), rtol=0, atol=5e-5)


@pytest.mark.case("E3")
@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_is_over_all_experts(normalize):
    router, x = given_logits([[2.0, 1.0, 0.0, -1.0]], 2, normalize)
    weights = router(x).weights
    assert weights.sum().item() == pytest.approx(1.0 if normalize else 0.8808, abs=5e-5)
    (grad,) = torch.autograd.grad(weights[0, 0], x)
    unchosen = grad[0, 2:].abs()
    if normalize:
        assert unchosen.max() < 1e-7
    else:
        assert unchosen.min() > 0.01


@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck_of_the_oracle(normalize):
    x, weight = randn(4, 5).requires_grad_(), randn(6, 5).requires_grad_()

    def oracle(x, weight):
        logits, weights, ids = reference.router(x, weight, 3, normalize=normalize)
        return weights, reference.load_balancing_loss(logits.softmax(dim=-1), ids), reference.z_loss(logits)

    assert torch.autograd.gradcheck(oracle, (x, weight))


def test_one_expert_per_token_that_cannot_be_trained_warns():
    with pytest.warns(UserWarning, match="top_k=1 and normalize=True"):
        useless = RouterConfig(1)
    norms = []
    for config in (useless, RouterConfig(1, normalize=False)):
        layer = dMoE(MoEConfig(8, 12, 4, router=config, init_std=0.5), device=DEVICE)
        layer(torch.randn(16, 8, device=DEVICE)).square().sum().backward()
        norms.append(layer.router.weight.grad.norm())
    assert norms[0] < 1e-5 * norms[1]


# -------------------------------------------------------------------- the losses


@pytest.mark.case("N1")
@pytest.mark.parametrize(("choice", "expected"), [("balanced", 1.0), ("collapsed", 4.0)])
def test_load_balancing_loss_has_the_scale_of_the_paper(choice, expected):
    token = torch.arange(8)
    expert = token % 4 if choice == "balanced" else torch.zeros_like(token)
    router, x = given_logits(10.0 * torch.nn.functional.one_hot(expert, 4), 1, normalize=False)
    assert router(x).load_balancing_loss.item() == pytest.approx(expected, abs=2e-3)


@pytest.mark.case("N1")
def test_load_balancing_loss_is_a_mean_over_the_chosen_experts():
    router, x = given_logits([[1.0, 1.0, 0, 0], [0, 1.0, 1.0, 0], [0, 0, 1.0, 1.0], [1.0, 0, 0, 1.0]], 2, normalize=True)
    assert router(x).load_balancing_loss.item() == pytest.approx(1.0, abs=1e-6)


def test_z_loss_value():
    router, x = given_logits([[0.0] * 4, [math.log(2)] * 4], 2, normalize=True)
    expected = (math.log(4) ** 2 + math.log(8) ** 2) / 2
    assert router(x).z_loss.item() == pytest.approx(expected, rel=1e-6)


def test_no_tokens():
    router = Router(6, 4, RouterConfig(2), device=DEVICE)
    out = router(torch.empty(0, 6, device=DEVICE, requires_grad=True))
    assert out.logits.shape == (0, 4) and out.weights.shape == (0, 2) and out.expert_ids.shape == (0, 2)
    assert out.tokens_per_expert.tolist() == [0] * 4
    assert out.load_balancing_loss.item() == 0.0
    assert out.z_loss.item() == 0.0
    (out.load_balancing_loss + out.z_loss + out.weights.sum()).backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


def test_losses_of_a_router_of_zeros_have_finite_gradients():
    router, x = given_logits(torch.zeros(6, 4), 2, normalize=True)
    out = router(x)
    (out.load_balancing_loss + out.z_loss + out.weights[:, 0].sum()).backward()
    assert x.grad.isfinite().all() and router.weight.grad.isfinite().all()


def test_the_balance_loss_alone_trains_the_router_alone():
    layer = dMoE(MoEConfig(8, 12, 4, init_std=0.5), device=DEVICE)
    x = torch.randn(16, 8, device=DEVICE)
    grads = []
    for coefficient in (1.0, 2.0):
        layer.zero_grad()
        _, routing = layer(x, return_routing=True)
        (coefficient * routing.load_balancing_loss).backward()
        grads.append(layer.router.weight.grad)
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in layer.experts.parameters())
    assert grads[0].norm() > 1e-3
    torch.testing.assert_close(grads[1], 2 * grads[0])


@pytest.mark.case("N8")
def test_losses_are_kept_nowhere():
    router = Router(8, 4, RouterConfig(2), device=DEVICE)
    before = set(vars(router))
    for mode in (True, False, True):
        out = router.train(mode)(torch.randn(3, 8, device=DEVICE))
        assert out.load_balancing_loss.isfinite()
    assert set(vars(router)) == before
    assert list(router.state_dict()) == ["weight"]
    assert not list(router.buffers())


# -------------------------------------------------------------------- the module


def test_extra_repr():
    assert "32 -> top 2 of 8, normalize=False" in repr(Router(32, 8, RouterConfig(2, normalize=False)))


def test_reset_parameters():
    router = Router(64, 64, RouterConfig(2), init_std=0.1, device="meta").to_empty(device=DEVICE)
    router.weight.data.fill_(torch.nan)
    router.reset_parameters()
    assert router.weight.std().item() == pytest.approx(0.1, rel=0.1)
    assert router.weight.mean().item() == pytest.approx(0.0, abs=0.01)
