"""Group G: sums in fp32, fp32 that is fp32, and the same result from every kernel configuration."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_moe import combine, dsd, sdd
from blocksparse_moe.products import implementation
from blocksparse_moe_kernels import BlockSparse, Columns, Topology, get_activation
from tests.cases.configs import each_column_config_and_depth, each_row_config_and_depth, skip_what_does_not_fit
from tests.cases.helpers import Problem, distinct_ids, layer, low_precision
from tests.support import DEVICE, HAS_CUDA, each_backend_and_dtype, each_backend_slowly


@pytest.mark.case("G1")
@each_backend_slowly
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "gather-sum"])
@pytest.mark.parametrize("form", ["ids", "pairs"])
def test_contributions_are_summed_in_fp32(backend, weighted, form):
    """vLLM 15045, mlx-lm PR 938: K partial outputs summed in bf16 lose what is small beside the first."""
    dtype = low_precision(backend)
    large = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    ids = torch.randperm(8, device=DEVICE)[None]
    if form == "ids":
        rows = Topology.from_ids(ids, 8)
    else:
        rows = Topology.from_pairs(torch.zeros_like(ids[0]), ids[0], num_tokens=1, num_experts=8)
    contributions = torch.tensor([large, *[1.0] * 7], device=DEVICE)
    y = contributions[rows.slots.long(), None].to(dtype).expand(8, 20).contiguous()
    weights = torch.ones(1, 8, device=DEVICE, dtype=dtype) if weighted else None
    out = combine(y, rows, weights, backend=backend)
    expected = torch.tensor(large + 7).to(dtype).item()
    assert expected == large + 8  # 263 is halfway between 262 and 264 in bf16
    assert (out == expected).all()


# -------------------------------------------------------------------- G2: every configuration


SIZE = 256
ROWS, WIDTH = (256, 256) if HAS_CUDA else (32, 64)  # the inner dimension is 256 everywhere


def exact(dtype: torch.dtype) -> tuple[Tensor, float]:
    """([256, WIDTH] whose rows k differ, sum over k of column 0): in fp32 the report's numbers, else integers that fit."""
    if dtype == torch.float32:
        matrix = torch.arange(SIZE**2, device=DEVICE, dtype=dtype).view(SIZE, SIZE) / SIZE**2
        return matrix[:, :WIDTH].contiguous(), 127.5
    return torch.arange(SIZE, device=DEVICE)[:, None].expand(SIZE, WIDTH).to(dtype).contiguous(), 32640.0


def experts_of_16_rows() -> Topology:
    return Topology.from_counts(torch.full((ROWS // 16,), 16, device=DEVICE), ROWS)


@pytest.mark.case("G2", "G6")
@each_row_config_and_depth
@skip_what_does_not_fit
def test_row_products_of_every_configuration(config, dtype):
    """pytorch 113587: ones in 16 x 16 blocks times arange / 65536 depends on the depth of the pipeline (112.5, not 127.5)."""
    kernels, rows = implementation("triton"), experts_of_16_rows()
    matrix, expected = exact(dtype)
    ones = torch.ones(ROWS, SIZE, device=DEVICE, dtype=dtype)
    column_sums = matrix.double().sum(0)
    assert column_sums[0] == expected

    s = BlockSparse(ones, rows, Columns.equal(SIZE, rows.num_experts))
    y = kernels.dsd(s, matrix.expand(rows.num_experts, -1, -1), config=config)
    assert (y == column_sums.to(dtype)).all()
    w = matrix.T.expand(rows.num_experts, -1, -1)
    pre, hidden = kernels.sdd_activation(ones, w, rows, get_activation("relu"), config=config)
    assert (pre.values == column_sums.to(dtype)).all()
    assert (hidden.values == column_sums.to(dtype)).all()


@pytest.mark.case("G2", "G6")
@each_column_config_and_depth
@skip_what_does_not_fit
def test_weight_gradients_of_every_configuration(config, dtype):
    """pytorch 113587: the same for the transposed product, whose inner dimension is the rows of an expert."""
    rows = Topology.from_counts(torch.tensor([SIZE], device=DEVICE), SIZE)
    matrix, _ = exact(dtype)
    ones = torch.ones(SIZE, SIZE, device=DEVICE, dtype=dtype)
    s = BlockSparse(ones[:, :WIDTH], rows, Columns.equal(WIDTH, 1))
    grad = implementation("triton").dsd(s.T, matrix, order="tokens", config=config)
    assert (grad == matrix.double().sum(0).to(dtype)).all()


# -------------------------------------------------------------------- G3, G4, G6


@pytest.mark.case("G3")
@each_backend_slowly
def test_equal_experts_are_one_mlp(backend):
    """torchtitan PR 1974: an inexact combine costs accuracy: relative error 0.0098 where 0.0025 is possible."""
    dtype = low_precision(backend)
    H, ffn, E, K, T = (2048, 768, 128, 8, 4096) if HAS_CUDA else (64, 48, 6, 3, 16)
    moe = layer(H, ffn, E, K, backend=backend, dtype=dtype)
    with torch.no_grad():
        for weight in (moe.experts.gate_up_proj, moe.experts.down_proj):
            weight.copy_(weight[:1].expand_as(weight).clone())
    x = torch.randn(T, H, device=DEVICE, dtype=dtype)

    @torch.no_grad()
    def one_mlp(precision: torch.dtype) -> Tensor:
        gate, up = F.linear(x.to(precision), moe.experts.gate_up_proj[0].to(precision)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, moe.experts.down_proj[0].to(precision)).double()

    exact = one_mlp(torch.float64)

    def error(y: Tensor) -> float:
        return float((y.double() - exact).norm() / exact.norm())

    assert error(moe(x).detach()) <= max(4e-3, error(one_mlp(dtype)))


@pytest.fixture
def fp32_setting() -> Iterator[None]:
    """Puts torch's setting for fp32 matrix products back."""
    products, everything = torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = everything
    torch.backends.cuda.matmul.fp32_precision = products


def errors_of_fp32_products(backend: str) -> list[float]:
    """Largest errors of sdd, dsd and transposed dsd on 512 x 512 normal numbers against fp64."""
    size = 512
    rows = Topology.from_counts(torch.tensor([size], device=DEVICE), size)
    a, b = torch.randn(size, size, device=DEVICE), torch.randn(1, size, size, device=DEVICE)
    s = BlockSparse(a, rows, Columns.equal(size, 1))
    wide, dense = a.double(), b[0].double()
    found = (sdd(a, b, rows, backend=backend).values, dsd(s, b, backend=backend), dsd(s.T, b[0], backend=backend)[0])
    expected = (wide @ dense.T, wide @ dense, wide.T @ dense)
    return [float((ours - exact).abs().max()) for ours, exact in zip(found, expected, strict=True)]


@pytest.mark.case("G4")
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_fp32_is_fp32_unless_asked(backend, fp32_setting):
    """triton 2042, 6265, 8654: fp32 operands silently go through TF32, and users see errors of 1e-2."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert max(errors_of_fp32_products(backend)) <= 1e-4


@pytest.mark.case("G4")
@pytest.mark.gpu
@each_backend_slowly
def test_tf32_is_used_when_asked(backend, fp32_setting):
    """triton 6265: the setting of torch decides, for both backends alike."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert min(errors_of_fp32_products(backend)) > 1e-3
    assert max(errors_of_fp32_products(backend)) < 1


@pytest.mark.case("G4")
@pytest.mark.parametrize("interface", ["matmul", "everything", "set_float32_matmul_precision", "allow_tf32"])
def test_kernels_follow_torchs_setting(interface, fp32_setting):
    """triton 8654: whichever of torch's interfaces sets the precision, the kernels read the same."""
    from blocksparse_moe_kernels.triton.tiles import fp32_precision

    def ask(tf32: bool) -> None:
        if interface == "matmul":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        elif interface == "everything":
            torch.backends.cuda.matmul.fp32_precision = "none"
            torch.backends.fp32_precision = "tf32" if tf32 else "ieee"
        elif interface == "set_float32_matmul_precision":
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        else:
            torch.backends.cuda.matmul.allow_tf32 = tf32

    for tf32 in (False, True, False):
        ask(tf32)
        assert fp32_precision() == ("tf32" if tf32 else "ieee")


@pytest.mark.case("G6")
@each_backend_and_dtype
def test_parity_on_this_pair_of_gpu_and_compiler(backend, dtype, record_property):
    """Liger PR 1294: one version of the compiler gives silently wrong input gradients on one GPU generation."""
    where = torch.cuda.get_device_capability() if HAS_CUDA else "interpreter"
    record_property("pair", f"{where}, triton {metadata.version('triton')}, torch {torch.__version__}")
    H, ffn, E, K, T = (2048, 768, 32, 4, 4096) if HAS_CUDA else (36, 20, 3, 2, 10)
    Problem.draw(H, ffn, E, distinct_ids(T, E, K), dtype=dtype).check(backend)
