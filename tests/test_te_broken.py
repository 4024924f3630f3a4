"""The backend `te` where Transformer Engine is absent, too old or broken: it says so, and nothing else is affected."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch

from blocksparse_moe import MoEConfig, dMoE, products
from blocksparse_moe.backends import ExpertSpec, report, select
from blocksparse_moe.backends.execution import Execution
from blocksparse_moe.backends.te import engine as te_engine
from blocksparse_moe_kernels import Columns

CUDA = torch.device("cuda", 0)


class Skipped(BaseException):
    """As pytest has one."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def spec(precision: str | None = None, name: str = "te") -> ExpertSpec:
    execution = Execution(name, precision)
    return ExpertSpec(Columns.equal(128, 4), 256, "swiglu", False, torch.bfloat16, CUDA, execution=execution)


def te_line(text: str) -> str:
    """What a report says of `te`, in its one line."""
    (line,) = re.findall(r"^  te: (.*)$", text, re.MULTILINE)
    assert len(text.splitlines()) == 3
    return line


# -------------------------------------------------------------------- it cannot be loaded


@pytest.fixture
def fresh_load():
    remembered = (te_engine.load, te_engine.ask, te_engine.at_import)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.mark.parametrize(
    ("version", "failure", "message"),
    [
        (None, None, r"needs Transformer Engine >= 2.17, which is not installed \(pip install 'blocksparse-moe\[te\]'\)\. The"),
        ("2.16.1", None, r"needs Transformer Engine >= 2.17; found 2.16.1 \(pip install --upgrade '"),
        ("1!2.16.1", None, r"needs Transformer Engine >= 2.17; found 1!2.16.1 \(pip"),
        ("main-abc", None, r"found one whose version is 'main-abc', which cannot be compared \(pip install --upgrade '"),
        ("", None, r"found one whose version is 'unknown', which cannot be compared \(pip install --upgrade '"),
        (
            "2.20.2",
            ImportError("undefined symbol: cublasLt"),
            "found Transformer Engine 2.20.2, which cannot be imported.*cublas",
        ),
        ("2.20.2", OSError("libtransformer_engine.so"), "cannot be imported beside torch .*OSError: libtransformer_engine.so"),
        ("2.20.2", AssertionError("Minimum torch"), "cannot be imported.*AssertionError: Minimum torch"),
        ("2.20.2", ValueError("invalid literal for int()"), "cannot be imported.*ValueError: invalid literal"),
        ("2.20.2", SystemExit(1), "cannot be imported.*SystemExit: 1"),
        ("2.20.2", SystemExit(), "cannot be imported.*SystemExit, which gave no reason"),
        ("2.20.2", Skipped("no GPU"), "cannot be imported.*Skipped: no GPU"),
        ("2.20.2", Speechless(), "cannot be imported.*Speechless, which gave no reason"),
        ("2.20.2", RuntimeError("a\n  b\r\nc"), r"cannot be imported.*RuntimeError: a b c\. The"),
    ],
)
def test_an_engine_that_is_not_there(monkeypatch, fresh_load, version, failure, message):
    was_there = "transformer_engine" in sys.modules
    monkeypatch.setattr(products, "_capability", lambda device: (9, 0))

    def of(distribution: str) -> str:
        if distribution != te_engine.DISTRIBUTION:
            return metadata.distribution(distribution).version
        if version is None:
            raise metadata.PackageNotFoundError(distribution)
        return version

    def broken(name: str) -> ModuleType:
        raise failure

    monkeypatch.setattr(te_engine.metadata, "version", of)
    monkeypatch.setattr(te_engine, "find_spec", lambda name: None)
    if failure is not None:
        monkeypatch.setattr(te_engine, "import_module", broken)
    with pytest.raises(NotImplementedError, match=message):
        select(spec())
    assert "nothing runs here" in report(spec()) and te_line(report(replace(spec(), execution=Execution())))
    layer = dMoE(MoEConfig(8, 8, 2), backend="te")
    layer.experts.execution = Execution("auto")
    assert layer(torch.randn(3, 8)).shape == (3, 8)  # nothing else is affected
    assert ("transformer_engine" in sys.modules) == was_there


def test_an_interruption_while_it_is_imported_is_one(monkeypatch, fresh_load):
    def interrupted(name: str) -> ModuleType:
        raise KeyboardInterrupt

    monkeypatch.setattr(te_engine, "installed", lambda: "2.20.2")
    monkeypatch.setattr(te_engine, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        te_engine.load()


@pytest.mark.parametrize("failure", [SystemExit(1), RuntimeError("no driver")])
def test_an_engine_that_does_not_answer(monkeypatch, fresh_load, failure):
    def broken(te: ModuleType, device: torch.device) -> None:
        raise failure

    monkeypatch.setattr(te_engine, "load", lambda: ModuleType("te"))
    monkeypatch.setattr(te_engine, "_answers", broken)
    assert f"which does not answer: {type(failure).__name__}: {failure}" in te_engine.ask(CUDA)


# -------------------------------------------------------------------- it answers in part, or oddly


def answers(value: object):
    """A function of `transformer_engine.pytorch` that returns, or raises, `value`."""

    def answer(return_reason: bool = False) -> object:
        if isinstance(value, BaseException):
            raise value
        return value

    return answer


@pytest.fixture
def engine(monkeypatch, fresh_load):
    """An installed Transformer Engine that answers yes to everything but what is given here: by the names of its functions."""

    def install(**functions: object) -> None:
        given = (
            dict.fromkeys(te_engine.QUESTIONS.values(), (True, "")) | {"cublaslt": 130100, "is_supported": False} | functions
        )
        pytorch = SimpleNamespace(**{name: answers(value) for name, value in given.items() if value is not None})
        modules = {
            "transformer_engine.pytorch": pytorch,
            "transformer_engine_torch": SimpleNamespace(get_cublasLt_version=answers(given["cublaslt"])),
            "transformer_engine.pytorch.ops.fused.grouped_mlp": SimpleNamespace(GroupedMLP_CuTeGEMMGLU=pytorch),
        }

        def imported(name: str) -> object:
            if name.endswith("grouped_mlp") and isinstance(given.get("grouped_mlp"), BaseException):
                raise given["grouped_mlp"]
            return modules[name]

        monkeypatch.setattr(te_engine, "installed", lambda: "2.20.2")
        monkeypatch.setattr(te_engine, "import_module", imported)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        monkeypatch.setattr(products, "_capability", lambda device: (10, 0))

    return install


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ({"grouped_mlp": RuntimeError("cudnn\nis broken")}, "RuntimeError: cudnn is broken"),
        ({"grouped_mlp": ImportError("no such module")}, "ImportError: no such module"),
        ({"is_supported": None}, "AttributeError: .*has no attribute 'is_supported'"),
        ({"is_supported": RuntimeError("no driver")}, "RuntimeError: no driver"),
        ({"is_supported": Skipped("why")}, "Skipped: why"),
        ({"is_supported": False}, "not registered"),
    ],
)
def test_a_fused_path_that_fails_to_answer_is_a_condition_that_fails(engine, failure, words):
    engine(**failure)
    for precision in (None, "bf16", "fp8_current", "mxfp8"):
        assert select(spec(precision))[0].name == "te"
    assert te_line(report(spec(name="auto"))) == "possible, not chosen"
    failing = [line for line in report(spec("mxfp8")).splitlines() if "FAILS" in line and "is registered by" in line]
    assert len(failing) == 1 and re.search(words, failing[0])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, r"AttributeError: .*has no attribute 'is_nvfp4_available'"),
        (RuntimeError("no driver"), "RuntimeError: no driver"),
        (Skipped("odd"), "Skipped: odd"),
        (SystemExit(1), "SystemExit: 1"),
        (True, "TypeError: cannot unpack"),
        ((False, None), "Transformer Engine gave no reason"),
        ((False, "two\nlines"), "two lines"),
        ((False, 5), "5"),
    ],
)
def test_each_recipe_answers_by_itself(engine, answer, reason):
    engine(is_nvfp4_available=answer)
    for precision in (None, "bf16", "fp8_current", "fp8_block", "mxfp8"):
        assert select(spec(precision))[0].name == "te"
    with pytest.raises(NotImplementedError, match=rf"cannot compute in nvfp4 on cuda:0 \(compute capability 10.0\): {reason}"):
        select(spec("nvfp4"))


@pytest.mark.parametrize(
    ("version", "words"),
    [(130100, "13.1"), ("130100", "13.1"), ("13.1", "of an unknown"), ((13, 1), "of an unknown"), (OSError(), "of an unknown")],
)
def test_a_version_of_cublas(engine, version, words):
    engine(cublaslt=version)
    assert f"Transformer Engine 2.20.2, cuBLASLt {words}" in report(spec())


def test_an_interruption_while_it_answers_is_one(engine):
    engine(is_fp8_available=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        select(spec())


# -------------------------------------------------------------------- the variable and versions


def test_the_variable_is_read_before_the_import(monkeypatch, fresh_load):
    def imported(name: str) -> ModuleType:
        monkeypatch.setenv(te_engine.FUSED_VARIABLE, "1")
        return ModuleType(name)

    monkeypatch.delenv(te_engine.FUSED_VARIABLE, raising=False)
    monkeypatch.setattr(te_engine, "installed", lambda: "2.20.2")
    monkeypatch.setattr(te_engine, "import_module", imported)
    assert isinstance(te_engine.load(), ModuleType)
    assert te_engine.at_import().fused_variable is None


@pytest.mark.parametrize("value", ["\u00b2", "", "true", "0", "-1"])
def test_a_variable_that_is_no_number_is_not_set(monkeypatch, engine, value):
    monkeypatch.setenv(te_engine.FUSED_VARIABLE, value)
    engine()
    (line,) = [line for line in report(spec("mxfp8")).splitlines() if te_engine.FUSED_VARIABLE in line]
    assert "FAILS" in line and line.split("set to ")[1].startswith(value)


@pytest.mark.parametrize("version", ["2.17.0rc1", "1!2.20", "2.17.0.dev0+abc"])
def test_versions_that_are_new_enough(monkeypatch, fresh_load, version):
    monkeypatch.setattr(te_engine, "installed", lambda: version)
    monkeypatch.setattr(te_engine, "import_module", ModuleType)
    assert isinstance(te_engine.load(), ModuleType)


@pytest.mark.parametrize("content", [b"Metadata-Version: 2.1\nName: transformer-engine\n", b"\xff\xfe\x00\x80Name"])
def test_metadata_that_tells_no_version(monkeypatch, fresh_load, tmp_path, content):
    (tmp_path / "transformer_engine-2.dist-info").mkdir()
    (tmp_path / "transformer_engine-2.dist-info" / "METADATA").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    assert te_engine.installed() == "unknown"
    assert "whose version is 'unknown', which cannot be compared (pip install" in te_engine.load()


def test_a_package_without_a_distribution_is_not_called_absent(monkeypatch, fresh_load, tmp_path):
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(te_engine.metadata, "version", none)
    assert "whose version is 'unknown', which cannot be compared (pip install" in te_engine.load()
