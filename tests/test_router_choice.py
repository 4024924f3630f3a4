"""How experts are chosen from logits and weighed: torch's operators and the kernel, against fp64 and public reports."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocksparse_moe import Router, RouterConfig
from blocksparse_moe.router.choice import choose_experts
from blocksparse_moe.router.gate import gate_logits
from blocksparse_moe_kernels import reference

from .router_support import SCORES, assert_agrees, configs
from .support import DEVICE, HAS_CUDA, LAYOUTS, each_backend, each_backend_slowly, layouts, leaf, randn


def chosen(backend: str, logits: list[list[float]], correction: list[float] | None = None, **options) -> tuple[list, Tensor]:
    """(expert ids, weights) of given logits."""
    config = RouterConfig(**options, correction_bias=correction is not None)
    bias = None if correction is None else torch.tensor(correction, device=DEVICE)
    weights, ids = choose_experts(torch.tensor(logits, device=DEVICE), bias, config, backend)
    return ids.tolist(), weights.cpu()


@each_backend
@pytest.mark.filterwarnings("ignore:RouterConfig")
@given(data=st.data())
def test_choice(backend, data):
    """Ids, weights and their gradient; between scores that are nearly equal either choice is right."""
    T, E = data.draw(st.integers(0, 20)), data.draw(st.integers(2, 24))
    config, layout = data.draw(configs(E)), data.draw(layouts)
    logits, coefficients = randn(T, E, scale=3).float().double(), randn(T, config.top_k).float().double()
    correction = randn(E, dtype=torch.float32, scale=0.3).float() if config.correction_bias else None
    ours_in = leaf(logits, torch.float32, layout)
    weights, ids = choose_experts(ours_in, correction, config, backend)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64 and weights.shape == ids.shape == (T, config.top_k)
    assert all(len(set(row)) == config.top_k and set(row) <= set(range(E)) for row in ids.tolist())

    def expected(dtype):
        z = leaf(logits, dtype)
        w = SCORES[config.score](z).gather(1, ids)
        w = config.scaling_factor * (w / w.sum(dim=-1, keepdim=True) if config.normalize else w)
        return w, *torch.autograd.grad((w * coefficients.to(dtype)).sum(), z)

    grad = torch.autograd.grad((weights * LAYOUTS[layout](coefficients.float())).sum(), ours_in)[0]
    if T == 0:
        return
    for name, found, oracle, torchs in zip(
        ("weights", "gradient"), (weights, grad), expected(torch.float64), expected(torch.float32), strict=True
    ):
        assert_agrees(name, found, oracle, torchs, terms=2 * config.scaling_factor)

    eye = torch.eye(E, dtype=torch.float64, device=DEVICE)
    rest = ("normalize", "score", "scaling_factor", "num_groups", "top_groups", "group_score")
    options = {name: getattr(config, name) for name in rest} | {"correction_bias": correction}
    _, _, best = reference.router(logits, eye, config.top_k, **options)
    values = SCORES[config.score](logits) + (0 if correction is None else correction)
    same = (ids == best).all(dim=1)
    torch.testing.assert_close(values.gather(1, ids)[same], values.gather(1, best)[same])
    assert same.float().mean() > 0.9 or T < 10


@each_backend_slowly
def test_many_rows_and_sizes_that_are_no_powers_of_two(backend):
    for T, E, K in ((20_000 if HAS_CUDA else 50, 60, 6), (7, 130, 33), (3, 1, 1), (2, 1100, 5)):
        logits = torch.randn(T, E, device=DEVICE)
        weights, ids = choose_experts(logits, None, RouterConfig(K, normalize=K > 1), backend)
        assert torch.equal(ids, logits.sort(dim=1, descending=True, stable=True).indices[:, :K])
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(T, device=DEVICE))


@each_backend
@pytest.mark.parametrize("steps", [2, 5, 60])
def test_logits_that_differ_in_the_last_bit_are_told_apart(backend, steps):
    logits = 1 + torch.randint(0, steps, (30, 64), device=DEVICE) * torch.finfo(torch.float32).eps
    _, ids = choose_experts(logits, None, RouterConfig(5), backend)
    assert torch.equal(ids, logits.sort(dim=1, descending=True, stable=True).indices[:, :5])


@each_backend
@pytest.mark.parametrize("steps", [1, 2, 5, 60])
@pytest.mark.parametrize(("groups", "size"), [(8, 8), (3, 5), (16, 1), (2, 16)])
def test_groups_that_differ_in_the_last_bit_are_told_apart(backend, groups, size, steps):
    """Of equal groups the lowest are kept, and of equal experts."""
    logits = 1 + torch.randint(0, steps, (30, groups * size), device=DEVICE) * torch.finfo(torch.float32).eps
    kept = (groups + 1) // 2
    config = RouterConfig(kept * size - size // 2, num_groups=groups, top_groups=kept, group_score="max")
    _, ids = choose_experts(logits, None, config, backend)
    best = logits.unflatten(1, (groups, size)).amax(dim=2).sort(dim=1, descending=True, stable=True).indices[:, :kept]
    inside = torch.zeros(30, groups, dtype=torch.bool, device=DEVICE).scatter(1, best, True).repeat_interleave(size, dim=1)
    falling = logits.masked_fill(~inside, -torch.inf).sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, falling.indices[:, : config.top_k])


@each_backend_slowly
@pytest.mark.parametrize(("groups", "size"), [(8, 2), (8, 4), (8, 16), (8, 32), (4, 24), (4, 64)])
def test_groups_of_logits_with_any_strides(backend, groups, size):
    """By the values as well: each token has distinct logits, so that the best experts are those of plain sorting."""
    E = groups * size
    wide = torch.rand(37, 2 * E, device=DEVICE).argsort(dim=1).float() / E
    config = RouterConfig(2, num_groups=groups, top_groups=groups - 1, group_score="max")
    for logits in (wide[:, :E], wide[:, E:].contiguous(), wide[:, ::2], wide.T.contiguous().T[:, :E]):
        _, ids = choose_experts(logits, None, config, backend)
        assert torch.equal(ids, logits.argsort(dim=1, descending=True)[:, :2])


@each_backend
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_closed_experts_of_the_best_groups_come_before_those_of_others(backend, score):
    closed = -float("inf")
    logits = [[1.0, 2.0, closed, 5.0, closed, closed], [3.0, closed, closed, 1.0, 1.0, 1.0]]
    ids, weights = chosen(backend, logits, top_k=3, score=score, num_groups=2, top_groups=1, group_score="max", normalize=True)
    assert ids == [[3, 4, 5], [0, 1, 2]]
    assert weights.tolist() == [[1, 0, 0], [1, 0, 0]]


@each_backend
@pytest.mark.parametrize(
    ("score", "logits", "correction", "expected"),
    [
        ("sigmoid", [1e38, 3e38, 1e38, 2e38], [0.0] * 4, [0, 1]),
        ("sigmoid", [-300.0, -200.0, -150.0, -120.0], [0.0] * 4, [0, 1]),
        ("softmax", [0.0, -200.0, -150.0, -120.0], [0.0] * 4, [0, 1]),
        ("sigmoid", [math.inf, 1.0, 2.0, 3.0], [-1.0, 0.0, 0.0, 0.0], [3, 2]),
        ("sigmoid", [-math.inf, -1.0, -2.0, -math.inf], [9.0, 0.0, 0.0, 9.0], [0, 3]),
        ("sqrt_softplus", [-140.0, -130.0, -120.0, -125.0], [0.0] * 4, [2, 3]),
    ],
)
def test_logits_do_not_decide_between_scores_that_are_equal(backend, score, logits, correction, expected):
    """Those at which a score saturates included."""
    ids, _ = chosen(backend, [logits], correction, top_k=2, score=score, normalize=True)
    assert ids == [expected]


@each_backend
def test_after_nan_come_the_best(backend):
    ids, _ = chosen(backend, [[0.5, math.nan, 2.0, 3.0, 1.0, -1.0, 2.5, 0.0]], top_k=3)
    assert ids == [[1, 3, 6]]


@each_backend
@pytest.mark.parametrize("score", SCORES)
def test_equal_logits_are_equal_wherever_they_are(backend, score):
    """So are their scores, in every part that a processor computes by itself."""
    E = 101
    logits = torch.linspace(-8, 8, 501, device=DEVICE)[:, None].expand(-1, E).contiguous()
    _, ids = choose_experts(logits, torch.zeros(E, device=DEVICE), RouterConfig(3, score=score, correction_bias=True), backend)
    assert torch.equal(ids, torch.arange(3, device=DEVICE).expand(501, 3))


@each_backend
def test_scores_of_small_logits(backend):
    """sqrt(softplus(z)) is exp(z / 2) there, far below where exp(z) is a normal number."""
    logits = torch.linspace(-160, -10, 151, device=DEVICE)[:, None]
    weights, _ = choose_experts(logits, None, RouterConfig(1, normalize=False, score="sqrt_softplus"), backend)
    torch.testing.assert_close(weights, F.softplus(logits.double()).log().div(2).exp().float(), rtol=1e-5, atol=0)


@each_backend
def test_both_zeros_are_equal(backend):
    ids, _ = chosen(backend, [[-0.0, 0.0, -0.0, 0.0]], top_k=3)
    assert ids == [[0, 1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_op(score, normalize):
    logits, bias = leaf(randn(5, 6), torch.float32), torch.randn(6, device=DEVICE)
    arguments = (logits, bias, 2, normalize, score, 2.5, 3, 2, "best_two")
    torch.library.opcheck(torch.ops.blocksparse_moe.route.default, arguments)


def test_second_order_gradients_say_what_to_do():
    logits = leaf(randn(5, 6), torch.float32)
    weights, _ = choose_experts(logits, None, RouterConfig(2), "triton")
    (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order gradients are not implemented"):
        grad.sum().backward()
    weights, _ = choose_experts(logits, None, RouterConfig(2), "torch")
    (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    grad.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_the_op_does_not_keep_logits_that_it_can_do_without():
    logits, saved = leaf(randn(5, 6), torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        choose_experts(logits, None, RouterConfig(2), "triton")
    assert [tuple(tensor.shape) for tensor in saved] == [(5, 2), (5, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_second_order_gradients_of_the_gate(dtype):
    """Those asked for by name as well, which need not pass where a backward pass could refuse."""

    def penalty(x, weight, multiply):
        first = torch.autograd.grad(multiply(x, weight).square().sum() + x.float().pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in first), (x, weight))

    x, weight = randn(7, 12, scale=0.5).to(dtype), randn(5, 12, scale=0.5).to(dtype)
    ours = penalty(leaf(x, dtype), leaf(weight, dtype), torch.ops.blocksparse_moe.linear_fp32)
    exact = penalty(leaf(x, torch.float64), leaf(weight, torch.float64), lambda x, weight: x @ weight.T)
    for found, expected in zip(ours, exact, strict=True):
        assert (found.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gate_of_narrow_operands(dtype):
    """Logits as exact as those of widened operands, up to the order of the sum; gradients as well, rounded once."""
    T, H, E = 50, 96, 12
    x, weight, grad = randn(T, H, dtype=dtype), randn(E, H, dtype=dtype), randn(T, E, dtype=torch.float32)

    def run(precision, product):
        leaves = leaf(x, precision), leaf(weight, precision)
        logits = product(*leaves)
        return logits, *torch.autograd.grad(logits, leaves, grad.to(logits.dtype))

    ours = run(dtype, gate_logits)
    oracle = run(torch.float64, lambda x, weight: x @ weight.T)
    assert [tensor.dtype for tensor in ours] == [torch.float32, dtype, dtype]
    for name, found, exact, accuracy in zip(("logits", "x", "weight"), ours, oracle, (1e-6, 1, 1), strict=True):
        bound = accuracy if name == "logits" else torch.finfo(dtype).eps
        assert (found.double() - exact).abs().max() <= bound * exact.abs().max(), name
    with torch.no_grad():
        assert torch.equal(gate_logits(leaf(x, dtype), leaf(weight, dtype)), ours[0])
    torch.library.opcheck(torch.ops.blocksparse_moe.linear_fp32.default, (leaf(x, dtype), leaf(weight, dtype)))


def test_a_narrow_gate_rounds_the_wider_operand():
    wide, narrow = (Router(16, 4, RouterConfig(2, narrow_gate=flag), device=DEVICE, init_std=1.0) for flag in (False, True))
    narrow.load_state_dict(wide.state_dict())
    x = torch.randn(30, 16, device=DEVICE).bfloat16()
    exact, rounded = (x.double() @ weight.double().T for weight in (wide.weight, wide.weight.bfloat16()))
    assert (wide(x).logits - exact).abs().max() < 1e-5 < (rounded - exact).abs().max()
    assert (narrow(x).logits - rounded).abs().max() < 1e-5 and narrow(x).logits.dtype == torch.float32


@each_backend
@pytest.mark.case("E4")
def test_the_correction_bias_chooses_and_does_not_weigh(backend):
    logits, bias = [[1.0, 0.0, -1.0, -2.0]], [0.0, 0.0, 0.0, 0.9]
    ids, weights = chosen(backend, logits, bias, top_k=2, score="sigmoid")
    assert ids == [[3, 0]]
    sigmoids = torch.tensor(logits).sigmoid()[0, [3, 0]]
    torch.testing.assert_close(weights[0], sigmoids / sigmoids.sum())


@each_backend
@pytest.mark.case("E5")
@pytest.mark.parametrize("group_score", ["max", "best_two"])
def test_groups_of_one_expert(backend, group_score):
    ids, _ = chosen(backend, [[1.0, 4.0, 2.0, 3.0]], top_k=2, num_groups=4, top_groups=3, group_score=group_score)
    assert ids == [[1, 3]]


@each_backend
@pytest.mark.parametrize(("group_score", "expected"), [("max", [[0, 1]]), ("best_two", [[2, 3]])])
def test_groups_are_compared_by_their_best_or_their_best_two(backend, group_score, expected):
    logits = [[3.0, -9.0, 2.5, 2.4]]
    ids, _ = chosen(backend, logits, top_k=2, score="sigmoid", num_groups=2, top_groups=1, group_score=group_score)
    assert ids == expected


@each_backend
@pytest.mark.case("E6")
def test_a_bias_does_not_wipe_out_small_scores(backend):
    logits = [[-60.0, -61.0, -62.0, -63.0]]
    ids, weights = chosen(backend, logits, [1.0, 1.0, 0.0, 0.0], top_k=2, score="sigmoid", normalize=False)
    assert ids == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[-60.0, -61.0]]).sigmoid(), rtol=1e-6, atol=0)


@each_backend
@pytest.mark.case("E7")
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("level", [-40.0, -120.0, -500.0])
def test_scores_that_underflow_have_weights_that_sum_to_one(backend, score, level):
    logits = torch.tensor([[level, level - 1, level - 2, level - 3]], device=DEVICE, requires_grad=True)
    weights, ids = choose_experts(logits, None, RouterConfig(2, score=score), backend)
    assert ids.tolist() == [[0, 1]]
    ratio = 1.0 if score == "sigmoid" else 0.5
    torch.testing.assert_close(weights[0].cpu(), torch.tensor([0.0, -ratio]).softmax(0), rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(weights[0, 0], logits)
    assert grad.isfinite().all() and grad[0, 0] > 0.05


@each_backend
@pytest.mark.case("E11")
def test_the_scaling_factor_counts_once(backend):
    logits = [[2.0, 1.0, 0.0, -1.0]]
    for normalize in (True, False):
        _, plain = chosen(backend, logits, top_k=2, score="sigmoid", normalize=normalize)
        _, scaled = chosen(backend, logits, top_k=2, score="sigmoid", normalize=normalize, scaling_factor=2.5)
        torch.testing.assert_close(scaled, 2.5 * plain)


@each_backend
@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "top_groups": 2}, {"score": "sigmoid"}], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_ties_go_to_the_lowest_id(backend, options, with_bias):
    ids, _ = chosen(backend, [[0.0] * 64], [0.0] * 64 if with_bias else None, top_k=5, **options)
    assert ids == [[0, 1, 2, 3, 4]]


@each_backend
@pytest.mark.case("U1")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "top_groups": 2}, {"score": "sigmoid"}], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_ids_of_rows_that_are_not_finite_are_distinct_and_in_range(backend, bad, options, with_bias):
    logits = torch.randn(6, 16, device=DEVICE)
    logits[0], logits[1, :5], logits[2, 7] = bad, bad, bad
    bias = torch.zeros(16, device=DEVICE) if with_bias else None
    _, ids = choose_experts(logits, bias, RouterConfig(6, **options, correction_bias=with_bias), backend)
    assert all(len(set(row)) == 6 and set(row) <= set(range(16)) for row in ids.tolist())
