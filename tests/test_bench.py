"""The benchmarks on tiny shapes: table, CSV and routing are as described, and wrong results give no figure."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
import torch

from bench import layers, ops, peers, runner
from bench.check import disagreement
from bench.faults import FAULTS
from bench.inputs import HOTTEST, Case, even_routing, make_case, make_logits, make_router, skewed_routing
from bench.layers import expected_layer
from bench.lineup import STAGES, Choice, stage_of
from bench.ops import OPS
from bench.report import read_csv
from bench.runner import run_task
from bench.shapes import SHAPES, Shape, parse_shape
from bench.timing import measure
from bench.variants import Layer
from blocksparse_moe_kernels import Topology, reference

from .bench_support import ARGUMENTS, QUICK, TINY, bench, tiny_case


@pytest.fixture
def case() -> Case:
    return tiny_case()


@pytest.mark.parametrize(
    "op", ["topology", *(pytest.param(op, marks=pytest.mark.slow) for op in OPS if op not in ("topology", "decoder_layer"))]
)
def test_prints_a_table_and_writes_csv(op, tmp_path):
    path = tmp_path / "results.csv"
    result = bench(op, *(QUICK if op in ops.WITHOUT_BACKENDS else ARGUMENTS), "--csv", str(path))
    assert result.exit_code == 0, result.output
    assert "zipf 1.2" in result.output and "balanced" in result.output and "blocksparse" in result.output
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["op"] for line in lines} == {op}
    assert {line["routing"] for line in lines} == {"zipf 1.2", "balanced"}
    assert all(float(line["ms"]) > 0 and line["check"] in ("ok", "roof") for line in lines)
    for line in lines:
        assert line["mode"] == "eager"
        assert line["share_of_roof"] or line["kind"] == "roof"
        assert float(line["tflops"] or line["gb_per_s"]) > 0
        if line["kind"] == "roof":
            assert not (line["tflops"] and line["gb_per_s"]) and not line["over_fastest_peer"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["24,16,20,6,2", "mixtral-8x7b"])
def test_decoder_layers(shape, tmp_path, monkeypatch):
    """Routed by their gate, whatever the case says; those of Mixtral are Mixtral's."""
    pytest.importorskip("transformers", minversion="5.9")
    monkeypatch.setitem(SHAPES, "mixtral-8x7b", Shape("mixtral-8x7b", T=24, H=128, F=20, E=6, K=2))
    path = tmp_path / "results.csv"
    options = ("--seconds", "0", "--windows", "1", "--dtype", "float32", "--device", "cpu", "--csv", str(path))
    result = bench("decoder_layer", "--shape", shape, *options)
    assert result.exit_code == 0, result.output
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["routing"] for line in lines} == {"its own gate"}
    assert {line["variant"] for line in lines} >= {"blocksparse torch", "transformers eager", "transformers grouped_mm"}
    assert {line["stage"] for line in lines} == {"forward", "inference", "forward+backward"}
    assert {line["check"] for line in lines} == {"ok"}
    assert len({(line["stage"], line["variant"]) for line in lines}) == len(lines), "measured once"


def test_the_slowest_roof_binds(case):
    tasks = ops.expert_mlp(case, Choice(stages=("inference", "forward"), backends=("torch",), peers=()))
    names = {task.stage: [variant.name for variant in task.variants if variant.kind == "roof"] for task in tasks}
    assert names == {"inference": ["dense matmuls", "weights read"], "forward": ["dense matmuls"]}
    results = {result.variant: result for result in run_task(tasks[0], case, seconds=0, windows=1)}
    roofs = sorted((results[name] for name in names["inference"]), key=lambda result: result.ms)
    assert [roof.share_of_roof for roof in roofs] == [None, pytest.approx(1)]
    ours = results["blocksparse torch"]
    assert ours.share_of_roof == pytest.approx(roofs[1].ms / ours.ms)


def test_only_experts_that_are_hit_are_read():
    case = make_case(replace(TINY, T=1), 0.0, dtype=torch.float32, device=torch.device("cpu"))
    assert layers._weight_bytes(case) == TINY.K * 3 * TINY.H * TINY.F * 4


@pytest.mark.slow
def test_tokens_replace_those_of_the_shape(tmp_path):
    path = tmp_path / "results.csv"
    arguments = ("--shape", "cpu-16", "--device", "cpu", "--seconds", "0", "--windows", "1", "--skew", "0")
    result = bench("topology", *arguments, "--tokens", "3", "--tokens", "5", "--csv", str(path))
    assert result.exit_code == 0, result.output
    with path.open(newline="") as file:
        shapes = [(line["shape"], line["T"]) for line in csv.DictReader(file)]
    assert shapes == [("cpu-16 T=3", "3")] * 2 + [("cpu-16 T=5", "5")] * 2
    assert parse_shape("7,8,9,4,2").with_tokens(3) == parse_shape("3,8,9,4,2")


def test_graphs_are_checked_and_timed(monkeypatch, case):
    replays: list[str] = []

    def captured(work, device):
        return lambda: replays.append("replay") or work()

    monkeypatch.setattr(runner, "captured", captured)
    (task,) = ops.topology(case, Choice())
    results = runner.run_task(task, case, seconds=0, windows=1, graph=True)
    assert replays and all(result.mode == "CUDA graph" for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["expert_mlp", "combine"])
def test_a_cuda_graph_is_measured(op):
    result = bench(op, "--shape", "64,128,64,8,2", "--graph", "--peer", "none", "--seconds", "0", "--windows", "1")
    assert result.exit_code == 0, result.output
    assert "CUDA graph" in result.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_is_a_peer(dtype):
    case = make_case(replace(TINY, F=24), 1.2, dtype=dtype, device=torch.device("cpu"))
    (task,) = ops.expert_mlp(case, Choice(stages=("forward+backward",), backends=(), peers=("torch grouped_mm",)))
    assert [result.check for result in run_task(task, case, seconds=0, windows=1)] == ["ok", "roof"]
    odd = replace(case, shape=replace(TINY, H=15))
    for name in ("torch grouped_mm", "transformers grouped_mm"):
        assert "16 bytes" in peers.PEERS[name].why_not(odd)


def test_every_peer_runs_or_says_why_not(case):
    layers, left_out = peers.build_peers(case, peers.PEERS)
    assert {layer.name for layer in layers} | set(left_out) == set(peers.PEERS)
    assert all(left_out.values())


def test_a_peer_that_cannot_be_built_is_left_out(monkeypatch, case):
    def build(case: Case) -> Layer:
        raise TypeError("unexpected keyword\nand a long story")

    monkeypatch.setitem(peers.PEERS, "planted", peers.Peer(lambda case: None, build))
    layers, left_out = peers.build_peers(case, ("planted",))
    assert layers == [] and left_out == {"planted": "cannot be built: TypeError: unexpected keyword"}


def test_gradients_of_other_leaves_are_compared_in_our_layout(case):
    """As of a peer that keeps gate and up apart."""
    x, weights, up_proj, down_proj = case.leaves()
    gate, up = (half.detach().clone().requires_grad_() for half in up_proj.chunk(2, dim=1))

    def forward():
        topology = Topology.from_ids(case.expert_ids, case.shape.E)
        return reference.expert_mlp(x, topology, torch.cat((gate, up), dim=1), down_proj, weights)

    def gradients(found):
        return *found[:2], torch.cat(found[2:4], dim=1), found[4]

    layer = Layer("apart", "peer", (x, weights, gate, up, down_proj), forward, gradients)
    variant = stage_of(layer, "forward+backward", case.grad)
    expected = expected_layer(case, with_gradients=True)
    assert len(variant.run()) == 6
    assert disagreement(variant.comparable(variant.run()), expected, case.dtype) is None


def test_transformers_is_a_peer(case):
    pytest.importorskip("transformers")
    (task,) = ops.expert_mlp(case, Choice(stages=("forward+backward",), backends=("torch",)))
    results = {result.variant: result for result in run_task(task, case, seconds=0, windows=1)}
    assert results["transformers eager"].check == results["transformers grouped_mm"].check == "ok"
    assert "transformers grouped_mm compiled" in task.left_out
    fastest = min(result.ms for result in results.values() if result.kind == "peer")
    ours = results["blocksparse torch"]
    assert ours.over_fastest_peer == pytest.approx(fastest / ours.ms)


def test_a_pass_that_overwrites_its_input_finds_it_again(case):
    (task,) = ops.activation_backward(case, Choice(backends=("torch",)))
    ours, expected = task.variants[0], task.expected()
    for _ in range(3):
        assert disagreement(ours.run(), expected, case.dtype) is None


def test_sdd_activation_saves_the_pre_activation_for_a_backward_pass(case):
    forward, inference = ops.sdd_activation(case, Choice(backends=("torch",)))
    assert (forward.stage, inference.stage) == ("forward", "inference")
    for task, results in ((forward, 2), (inference, 1)):
        ours, roof = task.variants
        assert roof.kind == "roof" and task.flops == 4 * case.shape.M * case.shape.H * case.shape.F
        assert len(ours.run()) == results
        assert disagreement(ours.run(), task.expected(), case.dtype) is None


def wrong(case: Case) -> Layer:
    layer = ops._our_layer(case, "torch")
    return Layer("planted", "peer", layer.leaves, lambda: layer.forward() * 1.001)


def broken(case: Case) -> Layer:
    def forward():
        raise TypeError("no such kernel\nand a long story")

    return Layer("planted", "peer", case.leaves(), forward)


@pytest.mark.parametrize(
    ("planted", "reason"),
    [(wrong, "relative error"), pytest.param(broken, "TypeError: no such kernel", marks=pytest.mark.slow)],
)
def test_a_failed_check_prints_no_figure(monkeypatch, tmp_path, planted, reason):
    monkeypatch.setitem(peers.PEERS, "planted", peers.Peer(lambda case: None, planted))
    path = tmp_path / "results.csv"
    result = bench("expert_mlp", *ARGUMENTS, "--peer", "planted", "--skew", "0", "--csv", str(path))
    assert result.exit_code == 0, "only a failure of ours is an error of the run"
    assert result.output.count("FAILED") == 2 * len(STAGES) and reason in result.output
    with path.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["variant"] == "planted"]
    assert len(lines) == len(STAGES)
    for line in lines:
        assert line["check"].startswith("FAILED") and reason in line["check"]
        assert not any(line[figure] for figure in ("ms", "spread", "tflops", "share_of_roof", "over_fastest_peer"))


def test_a_failure_of_ours_is_an_error(monkeypatch):
    good = ops._our_layer

    def bad(case: Case, backend: str) -> Layer:
        layer = good(case, backend)
        return replace(layer, forward=lambda: layer.forward() + 1)

    monkeypatch.setattr(ops, "_our_layer", bad)
    result = bench("expert_mlp", *ARGUMENTS, "--peer", "none", "--skew", "0", "--stage", "inference")
    assert result.exit_code == 1 and "FAILED" in result.output


def test_check_finds_one_wrong_row_and_nan():
    expected = torch.randn(4096, 32, dtype=torch.float64)
    rounded = expected.bfloat16()
    assert disagreement((rounded,), (expected,), torch.bfloat16) is None
    for row, value in ((7, 0.0), (9, float("nan"))):
        planted = rounded.clone()
        planted[row] = value
        assert disagreement((planted,), (expected,), torch.bfloat16) is not None
    assert disagreement((rounded[1:],), (expected,), torch.bfloat16) is not None


@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_experts_of_a_token_differ(skew):
    ids = make_case(TINY, skew, dtype=torch.float32, device=torch.device("cpu")).expert_ids
    assert ids.shape == (TINY.T, TINY.K) and ids.min() >= 0 and ids.max() < TINY.E
    assert all(len(set(row)) == TINY.K for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_the_router_follows_the_drawn_routing(skew, dtype):
    case = make_case(Shape("", T=64, H=256, F=16, E=128, K=8), skew, dtype=dtype, device=torch.device("cpu"))
    x, gate = make_router(case)
    _, _, expert_ids = reference.router(x.double(), gate.double(), case.shape.K, normalize=True)
    assert torch.equal(expert_ids, case.expert_ids)
    with pytest.raises(ValueError, match="E <= H"):
        make_router(replace(case, shape=replace(case.shape, H=64)))


def test_logits_follow_the_drawn_routing():
    case = make_case(Shape("", T=64, H=8, F=8, E=128, K=8), 1.2, dtype=torch.float32, device=torch.device("cpu"))
    logits = make_logits(case)
    assert torch.equal(logits.topk(8).indices.sort().values, case.expert_ids.sort().values)
    assert logits.sort().values.diff().min() > 0.03


@pytest.mark.parametrize("shape", [TINY, replace(TINY, E=64, K=8), replace(TINY, E=7, K=1)])
def test_routers_agree_with_their_references(shape, device):
    case = make_case(shape, 1.2, dtype=torch.float32, device=torch.device(device))
    for task in ops.route(case, Choice(backends=("torch", "triton"))):
        checks = {result.variant: result.check for result in run_task(task, case, seconds=0, windows=1)}
        assert checks.pop("copy") == "roof" and set(checks.values()) == {"ok"} and len(checks) in (8, 10), checks


def test_balanced_routing_is_even():
    counts = even_routing(SHAPES["cpu-64"], torch.Generator().manual_seed(0)).reshape(-1).bincount(minlength=64)
    assert counts.unique().tolist() == [SHAPES["cpu-64"].M // 64]


def test_skewed_routing_has_one_empty_expert_and_a_bounded_hottest():
    shape = SHAPES["cpu-64"]
    counts = skewed_routing(shape, 1.2, torch.Generator().manual_seed(0)).reshape(-1).bincount(minlength=shape.E)
    mean = shape.M / shape.E
    assert (counts == 0).sum() == 1
    assert 4 * mean < counts.max() <= 1.02 * HOTTEST * mean


def test_infinite_skew_is_one_choice():
    case = make_case(TINY, math.inf, dtype=torch.float32, device=torch.device("cpu"))
    assert (
        case.routing == "2 of 6" and (case.expert_ids == case.expert_ids[0]).all() and case.expert_ids[0].unique().numel() == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.case(name)) for name in FAULTS])
def test_public_faults_of_speed_are_rows(name, monkeypatch, tmp_path):
    """What they measure can be asked for; here on a tiny shape, since no test judges a time."""
    fault = FAULTS[name]
    assert [parse_shape(shape) for shape in fault.shapes] and set(fault.peers) <= set(peers.PEERS)
    monkeypatch.setitem(FAULTS, name, replace(fault, shapes=("24,16,20,6,2",)))
    path = tmp_path / "fault.csv"
    result = bench("fault", name, "--device", "cpu", "--seconds", "0", "--windows", "1", "--csv", str(path))
    assert result.exit_code == 0, result.output
    assert name in result.output and "blocksparse" in result.output
    assert {line.op for line in read_csv(path)} == {fault.op}


def test_windows_take_turns():
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = measure(works, torch.device("cpu"), seconds=0, windows=3)
    turns = [name for index, name in enumerate(calls) if index == 0 or calls[index - 1] != name]
    assert "".join(turns) == "abcabcbcacab"  # warm, the window thrown away and the first round run together, then rotated
    assert all(timing.ms > 0 for timing in timings.values())


@pytest.mark.parametrize("text", ["mixtral", "1,2,3", "1,2,3,4,x", "8,8,8,4,0", "8,8,8,2,3", "8,8,99999999999,4,2"])
def test_a_bad_shape_is_one_line(text):
    with pytest.raises(ValueError, match="shape"):
        parse_shape(text)
    result = bench("sdd", "--shape", text)
    assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--skew", "nan"),
        ("--dtype", "int8"),
        ("--device", "abacus"),
        ("--device", "cpu:3"),
        ("--backend", "cublas"),
        ("--peer", "nobody"),
        ("--peer", "stk"),
        ("--stage", "sideways"),
        ("--skew", "-1"),
        ("--skew", "1000"),
        ("--graph",),
        ("--csv", "/nowhere/at/all.csv"),
    ],
)
def test_a_bad_option_is_refused(arguments):
    result = bench("expert_mlp", *ARGUMENTS, *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    (line,) = [line for line in result.output.splitlines() if not line.startswith("CPU")]
    assert arguments[0] in line, "one line, which names the option"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--csv", "new.csv", "topology"), "--csv: options of a command follow it"),
        (("topology", "--backend", "triton"), "--backend: topology has none to choose"),
        (("sdd", "--stage", "inference"), "--stage: sdd has none to choose"),
        (("decoder_layer", "--skew", "0"), "--skew: decoder_layer has none to choose"),
        (("dMoE", "--peer", "stk"), "--peer: nobody else does dMoE here"),
        (("sdd", "--peer", "none", "--peer", "stk"), "--peer: none goes alone"),
        (("topology", "--skew", "1.2", "--shape", "8,8,8,2,2"), "Balanced is --skew 0"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments, reason):
    result = bench(*arguments)
    assert result.exit_code == 2 and reason in result.output, result.output


def test_what_does_not_fit_is_one_line(monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory\nand a long story")

    monkeypatch.setattr(runner, "make_case", full)
    result = bench("sdd", *ARGUMENTS)
    assert result.exit_code == 2 and "Give fewer tokens or smaller sizes" in result.output and "story" not in result.output


def test_experts_that_all_are_chosen_are_balanced(tmp_path):
    result = bench("topology", "--shape", "8,8,8,2,2", "--device", "cpu", "--seconds", "0", "--windows", "1")
    assert result.exit_code == 0 and "balanced" in result.output and "zipf" not in result.output, result.output
