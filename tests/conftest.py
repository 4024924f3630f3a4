"""What every test shares: the device, the seed, Hypothesis' profiles, and how tests are chosen."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from importlib import metadata
from importlib.util import find_spec

import hypothesis
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# Triton decides at its import whether kernels are compiled or interpreted.
if not HAS_CUDA:
    if "triton" in sys.modules:
        raise pytest.UsageError("triton was imported before tests/conftest.py could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        from tests.quick_interpreter import install

        install()


class TorchRandom:
    """Lets Hypothesis seed torch before each example, so that a failing one replays alone."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


hypothesis.register_random(TorchRandom)
DEFAULT = hypothesis.settings(deadline=None, max_examples=20, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.register_profile("default", DEFAULT)
hypothesis.settings.register_profile("quick", DEFAULT, max_examples=6)
hypothesis.settings.register_profile("sanitizer", DEFAULT, max_examples=3)
hypothesis.settings.register_profile("thorough", DEFAULT, max_examples=1000)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    """The first call of a form is made in full, whatever ran before the test."""
    if replay := sys.modules.get("blocksparse_moe_kernels.triton.replay"):
        replay._recordings.clear()


@pytest.fixture(autouse=True)
def _forget_compiled_code(request: pytest.FixtureRequest) -> None:
    """What other tests had compiled counts towards the limit of a function."""
    if "compile" in request.node.name:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def _free_memory(request: pytest.FixtureRequest):
    """Real sizes take tens of gigabytes: give them back before the next test."""
    yield
    if HAS_CUDA and request.node.get_closest_marker("gpu"):
        from tests.cases.helpers import free_memory

        free_memory()


@pytest.fixture(scope="module")
def poisoned_memory():
    """Fresh memory holds NaN, so that what is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fresh_memory(monkeypatch: pytest.MonkeyPatch):
    """The same with guards around each tensor, and a value to choose: a `tests.cases.helpers.FreshMemory`."""
    from tests.cases.helpers import FreshMemory

    memory = FreshMemory(monkeypatch)
    assert torch.empty(3, device="cuda" if HAS_CUDA else "cpu").isnan().all()
    return memory


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends of the expert MLPs that this package computed for a Hugging Face model, in order."""
    from blocksparse_moe.integrations.huggingface import experts

    made: list[str] = []

    def counted(*args, backend: str, **named) -> torch.Tensor:
        made.append(backend)
        return expert_mlp(*args, backend=backend, **named)

    expert_mlp = experts.expert_mlp
    monkeypatch.setattr(experts, "expert_mlp", counted)
    return made


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="run exactly the tests of this public fault report, for example A1 (may be repeated)",
    )


def pytest_configure(config: pytest.Config) -> None:
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(workers)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The workers of `-n auto`: none for a few tests, or on a GPU, whose memory they would have to share."""
    few = HAS_CUDA or config.getoption("--case")
    return 0 if few else min(2, len(os.sched_getaffinity(0)))


def pytest_report_header() -> str:
    named = ("torch", "triton", "transformers", "numpy")
    found = {dist.name: dist.version for dist in metadata.distributions() if dist.name in named}
    versions = ", ".join(f"{name} {found.get(name, 'absent')}" for name in named)
    where = torch.cuda.get_device_name() if HAS_CUDA else "no CUDA GPU, Triton's interpreter"
    return f"versions: {versions}; {where}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--case"):
        _keep_cases(config, items, wanted)
    # The longest of those at the end go first, or one worker runs them while the other has nothing left.
    items.sort(key=lambda item: item.path.name != "test_examples.py")
    if not HAS_CUDA:
        skip = pytest.mark.skip(reason=f"needs a CUDA GPU; torch {torch.__version__} sees none")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def _keep_cases(config: pytest.Config, items: list[pytest.Item], wanted: list[str]) -> None:
    """Deselect all but the tests of the wanted cases; refuse an id that no collected test carries."""
    tests_of = defaultdict(list)
    for item in items:
        for marker in item.iter_markers("case"):
            for case in marker.args:
                tests_of[case].append(item)
    if unknown := sorted(set(wanted) - tests_of.keys()):
        known = ", ".join(sorted(tests_of, key=lambda case: (case[0], len(case), case)))
        raise pytest.UsageError(f"--case: no collected test carries {', '.join(unknown)}; known are {known}")
    kept = {item for case in wanted for item in tests_of[case]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
