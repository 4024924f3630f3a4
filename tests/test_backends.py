"""Who computes the experts: names, reasons and reports, and that the registered ops are what torch expects of an op."""

from __future__ import annotations

import importlib.util
import inspect
import re

import pytest
import torch
from torch import Tensor

from blocksparse_moe import products
from blocksparse_moe.backends import BACKENDS, ExpertSpec, ExpertWeights, check_name, report, select
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.custom_ops.define import flatten
from blocksparse_moe_kernels import Columns, Topology, get_activation, reference, torch_products
from blocksparse_moe_kernels.mxfp8_linear import QuantizedProducts

from .support import DEVICE, HAS_CUDA, each_backend

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


def spec(name: str = "auto", dtype: torch.dtype = torch.float32, device: torch.device = DEVICE) -> ExpertSpec:
    return ExpertSpec(Columns.equal(6, 3), 8, "swiglu", False, dtype, device, execution=Execution(name))


# -------------------------------------------------------------------- which one, and why


def test_the_registry():
    assert list(BACKENDS) == ["triton", "torch", "te"]
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert check_name(name) == name
    assert check_name("auto") == "auto"


@pytest.mark.parametrize("name", ["Triton", "", "grouped_mm"])
def test_unknown_names(name):
    message = f"backend: '{name}' is not known; choose one of auto, triton, torch"
    with pytest.raises(ValueError, match=message):
        check_name(name)
    with pytest.raises(ValueError, match=message):
        select(spec(name))
    with pytest.raises(ValueError, match=message):
        products.choose(name, CPU, torch.float32)


def test_single_products_are_not_for_transformer_engine():
    with pytest.raises(ValueError, match=r"backend: 'te' computes whole layers.*choose one of auto, triton, torch"):
        products.choose("te", CPU, torch.float32)


@pytest.mark.parametrize("device", [CPU, META, torch.device("mps")], ids=str)
def test_auto_is_torch_where_there_is_no_cuda(device):
    assert products.choose("auto", device, torch.float32) == ("torch", f"the default on {device.type}")
    backend, reason = select(spec(device=device))
    assert (backend.name, reason) == ("torch", f"the default on {device.type}")


@pytest.mark.parametrize(
    ("dtype", "capability", "hip", "expected"),
    [
        (torch.bfloat16, (9, 0), None, ("triton", "the default on CUDA")),
        (torch.float16, (8, 0), None, ("triton", "the default on CUDA")),
        (torch.float32, (12, 0), None, ("triton", "the default on CUDA")),
        (torch.float64, (9, 0), None, ("torch", "triton computes in fp32, fp16 and bf16; got torch.float64")),
        (torch.bfloat16, (7, 5), None, ("torch", "triton needs compute capability 8.0 or newer; cuda has (7, 5)")),
        (torch.bfloat16, (9, 0), "6.4", ("torch", "triton needs an NVIDIA GPU; this torch is built for ROCm")),
    ],
    ids=["hopper", "ampere", "blackwell", "fp64", "turing", "rocm"],
)
def test_auto_on_cuda(monkeypatch, dtype, capability, hip, expected):
    monkeypatch.setattr(products, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert products.choose("auto", CUDA, dtype) == expected
    backend, reason = select(spec(dtype=dtype, device=CUDA))
    assert (backend.name, reason) == expected


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_backend_that_was_asked_for(name):
    assert products.why_not(name, DEVICE, torch.float32) is None
    assert products.choose(name, DEVICE, torch.float32) == (name, "asked for")
    assert BACKENDS[name].why_not(spec(name)) is None


@pytest.mark.parametrize(
    ("name", "dtype", "device", "reason"),
    [
        ("triton", torch.float64, DEVICE, "computes in fp32, fp16 and bf16; got torch.float64"),
        ("triton", torch.float32, META, "needs a CUDA device; the tensors are on meta (TRITON_INTERPRET=1 runs kernels"),
    ],
    ids=["triton in fp64", "triton on meta"],
)
def test_a_backend_that_cannot_says_why(name, dtype, device, reason):
    assert BACKENDS[name].why_not(spec(name, dtype, device)).startswith(reason)
    with pytest.raises(NotImplementedError) as error:
        select(spec(name, dtype, device))
    assert str(error.value).startswith(f"backend {name!r} {reason}")
    assert report(spec(name, dtype, device)).startswith(f"nothing runs here: backend 'triton' {reason}")


@pytest.mark.parametrize("name", ["auto", "torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_only_floating_dtypes_are_computed(name, dtype):
    with pytest.raises(TypeError, match=f"backend '{name}' needs a floating dtype of 16 bits or more; got {dtype}"):
        select(spec(name, dtype, CPU))


@pytest.mark.skipif(HAS_CUDA, reason="about machines without a GPU")
def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch):
    monkeypatch.setattr(products, "_interpreting", lambda: False)
    with pytest.raises(NotImplementedError, match=r"the tensors are on cpu \(TRITON_INTERPRET=1"):
        select(spec("triton"))
    assert select(spec())[0].name == "torch"


def test_triton_that_is_not_installed(monkeypatch):
    absent = lambda name: None if name == "triton" else importlib.util.find_spec(name)  # noqa: E731
    monkeypatch.setattr(products, "find_spec", absent)
    with pytest.raises(NotImplementedError, match=r"needs Triton, which is not installed \(pip install triton\)"):
        select(spec("triton"))
    text = report(spec(device=CUDA))
    assert text.startswith("backend torch (triton needs Triton, which is not installed")
    assert text.splitlines()[0].endswith(f"torch {torch.__version__}")


def test_report():
    obstacle = BACKENDS["te"].why_not(spec())
    te = f"  te: {'possible, not chosen' if obstacle is None else obstacle}"
    first, *others = report(spec("torch")).splitlines()
    assert first.startswith(f"backend torch (asked for), torch {torch.__version__}, triton ")
    assert others == ["  triton: possible, not chosen", te]
    _, *others = report(spec("triton")).splitlines()
    assert others == ["  torch: possible, not chosen", te]
    first, *others = report(spec(dtype=torch.float64, device=META)).splitlines()
    assert first.startswith("backend torch (the default on meta)")
    assert others == [
        "  triton: computes in fp32, fp16 and bf16; got torch.float64",
        "  te: needs a CUDA device; the tensors are on meta",
    ]


@each_backend
def test_experts_of_a_backend(backend):
    """The protocol's call, as a module makes it."""
    topology = Topology.from_ids(torch.tensor([[0, 2], [2, 1], [0, 0]], device=DEVICE), 3)
    x, weights = torch.randn(3, 8, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    up, down = torch.randn(3, 12, 8, device=DEVICE), torch.randn(3, 8, 6, device=DEVICE)
    y = BACKENDS[backend].experts(x, topology, weights, ExpertWeights(up, down), spec())
    expected = reference.expert_mlp(x.double(), topology, up.double(), down.double(), weights.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------- two implementations, one signature


def launchers() -> list[str]:
    return [name for name, function in inspect.getmembers(torch_products, inspect.isfunction)
            if function.__module__ == torch_products.__name__ and not name.startswith("_")]  # fmt: skip


def test_both_implementations_have_the_same_launchers():
    assert set(launchers()) == set(vars(products.implementation("triton")))
    assert products.implementation("torch") is torch_products


def test_no_product_escapes_mxfp8():
    """Whatever multiplies is one of those that quantise, and what they leave to the others multiplies nothing."""
    own = {name for name in vars(QuantizedProducts) if not name.startswith("_")}
    others = set(launchers()) - own
    assert own == {"sdd", "sdd_activation", "dsd", "dsd_transposed"}
    for name in others:
        source = inspect.getsource(getattr(torch_products, name))
        assert not re.search(r"torch\.(mm|matmul|addmm)|addmm_|_project|\bdsd|\bsdd", source), name


@pytest.mark.parametrize("name", launchers())
def test_launchers_take_the_same_arguments(name):
    ours, theirs = (inspect.signature(getattr(products.implementation(kind), name)) for kind in ("torch", "triton"))
    parameters = [parameter for parameter in theirs.parameters.values() if parameter.name != "config"]
    assert list(ours.parameters.values()) == parameters
    assert ours.return_annotation == theirs.return_annotation
    if "config" in theirs.parameters:
        config = theirs.parameters["config"]
        assert config.default is None and config.kind is inspect.Parameter.KEYWORD_ONLY


# -------------------------------------------------------------------- opcheck

TOPOLOGIES = {
    "ids": lambda: Topology.from_ids(torch.tensor([[0, 2], [2, -1], [0, 0], [7, 2]], device=DEVICE), 3),
    "pairs": lambda: Topology.from_pairs(
        torch.tensor([0, 3, 3, 1, 3], device=DEVICE),
        torch.tensor([2, 0, 2, 0, 5], device=DEVICE),
        num_tokens=4,
        num_experts=3,
    ),
    "none": lambda: Topology.from_ids(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3),
}
EQUAL, UNEQUAL = Columns.equal(5, 3), Columns.of([2, 4, 3])
HIDDEN = 6


class Arguments:
    """Operands of the registered ops for one topology; every floating tensor wants a gradient."""

    def __init__(self, kind: str, columns: Columns, backend: str, activation: str = "swiglu") -> None:
        self.topology = TOPOLOGIES[kind]()
        self.columns, self.backend, self.activation = columns, backend, activation
        self.halves, self.weight_halves = get_activation(activation).halves, get_activation(activation).weight_halves
        self.flat = flatten(self.topology, backend)
        self.widths = None if columns.are_equal else list(columns.widths)
        self.experts = (*self.flat, self.widths, activation, backend)

    @staticmethod
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, requires_grad=True)

    def rows(self) -> Tensor:
        return self.randn(self.topology.num_slots, HIDDEN)

    def tokens(self) -> Tensor:
        return self.randn(self.topology.num_tokens, HIDDEN)

    def values(self, halves: int = 1) -> Tensor:
        rows, width = self.topology.num_slots, halves * self.columns.widest
        return self.randn(rows, width) if self.widths is None else self.randn(rows * width)

    def weight(self) -> Tensor:
        """[E, N, H] with the strides of a transposed down-projection, or flat."""
        if self.widths is None:
            return self.randn(3, HIDDEN, self.columns.widest).detach().transpose(1, 2).requires_grad_()
        return self.randn(self.columns.total, HIDDEN)

    def up(self) -> Tensor:
        if self.widths is None:
            rows = self.halves * self.columns.widest // self.weight_halves
            return self.randn(3, self.weight_halves, rows, HIDDEN)
        return self.randn(self.halves * self.columns.total, HIDDEN)

    def up_bias(self) -> Tensor:
        return self.randn(*self.up().shape[:-1])

    def down_bias(self) -> Tensor:
        return self.randn(3, HIDDEN)

    def routing_weights(self) -> Tensor:
        """[T, K], or [M] by slot when tokens have any number of slots."""
        pairs = self.topology.token_offsets is not None
        return self.randn(self.topology.num_slots) if pairs else self.randn(self.topology.num_tokens, 2)


def check(op: str, *arguments: object) -> None:
    results = torch.library.opcheck(getattr(torch.ops.blocksparse_moe, op), arguments)
    assert set(results) == {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert set(results.values()) == {"SUCCESS"}


SLOW = [] if HAS_CUDA else [pytest.mark.slow]
COMBINATIONS = [
    pytest.param(backend, kind, columns, id=f"{backend}-{kind}-{columns}", marks=marks)
    for backend, kind, columns, marks in [
        ("torch", "ids", EQUAL, []),
        ("torch", "pairs", UNEQUAL, [pytest.mark.slow]),
        ("torch", "ids", UNEQUAL, [pytest.mark.slow]),
        ("torch", "none", UNEQUAL, [pytest.mark.slow]),
        ("triton", "ids", EQUAL, SLOW),
        ("triton", "pairs", UNEQUAL, SLOW),
    ]
]
combinations = pytest.mark.parametrize(("backend", "kind", "columns"), COMBINATIONS)


@combinations
@pytest.mark.parametrize("order", ["tokens", "rows"])
def test_opcheck_sdd(backend, kind, columns, order):
    a = Arguments(kind, columns, backend)
    check("sdd", a.tokens() if order == "tokens" else a.rows(), a.weight(), *a.flat, a.widths, order, backend)


@combinations
def test_opcheck_dsd(backend, kind, columns):
    a = Arguments(kind, columns, backend)
    check("dsd", a.values(), a.weight(), *a.flat, a.widths, backend)


@combinations
@pytest.mark.parametrize(("order", "like"), [("tokens", True), ("rows", False)])
def test_opcheck_dsd_transposed(backend, kind, columns, order, like):
    a = Arguments(kind, columns, backend)
    x = a.tokens() if order == "tokens" else a.rows()
    check("dsd_transposed", a.values(), x, a.weight().detach() if like else None, *a.flat, a.widths, order, backend)


@combinations
@pytest.mark.parametrize("weighted", [True, False])
def test_opcheck_combine(backend, kind, columns, weighted):
    a = Arguments(kind, columns, backend)
    check("combine", a.rows(), a.routing_weights() if weighted else None, *a.flat, backend)


@combinations
@pytest.mark.parametrize(("activation", "bias"), [("relu2", False), ("swiglu(up_limit=1, interleaved)", True)])
def test_opcheck_expert_up(backend, kind, columns, activation, bias, fresh_memory):
    fresh_memory.value, fresh_memory.guard = 0.0, 0  # rows of the hidden activation that were dropped are not written
    a = Arguments(kind, columns, backend, activation)
    check("expert_up", a.tokens(), a.up(), a.up_bias() if bias else None, *a.experts)
    with torch.no_grad():
        grad, x, up, up_bias = a.values(a.halves).detach(), a.tokens().detach(), a.up().detach(), a.up_bias().detach()
    for wanted in ([True, True, bias], [False, True, False]):
        check("expert_up_backward", grad, x, up, up_bias if bias else None, wanted, *a.experts)


@pytest.mark.usefixtures("poisoned_memory")
@combinations
@pytest.mark.parametrize(("activation", "bias", "weighted"), [("swiglu", True, True), ("gelu", False, False)])
def test_opcheck_expert_down(backend, kind, columns, activation, bias, weighted):
    a = Arguments(kind, columns, backend, activation)
    pre, hidden, w = a.values(a.halves), a.values().detach(), a.weight()
    options = (a.down_bias() if bias else None, a.routing_weights() if weighted else None)
    check("expert_down", pre, hidden, w, *options, *a.experts)
    constants = [None if tensor is None else tensor.detach() for tensor in (pre, w, *options)]
    for wanted in ([True, True, bias, weighted], [False, False, bias, False]):
        check("expert_down_backward", a.tokens().detach(), *constants, wanted, *a.experts)


@combinations
@pytest.mark.parametrize(("activation", "bias", "weighted"), [("geglu(interleaved)", True, True), ("relu", False, False)])
def test_opcheck_expert_mlp(backend, kind, columns, activation, bias, weighted):
    a = Arguments(kind, columns, backend, activation)
    inputs = (
        a.tokens(),
        a.up(),
        a.up_bias() if bias else None,
        a.weight(),
        a.down_bias() if bias else None,
        a.routing_weights() if weighted else None,
    )
    check("expert_mlp_recompute", *inputs, *a.experts)
    check("expert_mlp", *(None if tensor is None else tensor.detach() for tensor in inputs), *a.experts)
