"""Install and packaging: what the wheel owns and needs, and what an import may cost (cases T1 to T6)."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from blocksparse_moe_kernels.versions import release, require

ROOT = Path(__file__).parent.parent
SITE = sysconfig.get_path("purelib")
NAMES = {"blocksparse_moe", "blocksparse_moe_kernels"}

# A layer in one line of training: enough to see that an installed copy computes.
SMOKE = """
import torch
from blocksparse_moe import MoEConfig, RouterConfig, dMoE
layer = dMoE(MoEConfig(hidden_size=16, ffn_hidden_size=24, num_experts=4, router=RouterConfig(top_k=2)))
layer(torch.randn(5, 16)).sum().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
"""


def python(code: str, *, executable: str | Path = sys.executable, path: Path | None = None, **env: str) -> str:
    """Run `code` in a fresh interpreter outside the checkout, with `path` first on its path; its output."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = inherited | ({"PYTHONPATH": str(path)} if path else {}) | env
    done = subprocess.run([executable, "-c", code], capture_output=True, text=True, env=env, cwd=path or Path(SITE).anchor)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(*args: str | Path, executable: str | Path = sys.executable, **env: str) -> str:
    command = [executable, "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    if done.returncode and "Retrying (Retry" in done.stderr:
        pytest.skip("needs a package registry; pip reached none")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fake_distribution(site: Path, name: str, version: str) -> None:
    """Make `site` look as if it held an installed `name`, for pip and importlib.metadata."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")


def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in metadata.get_all("Requires-Dist")]


@pytest.fixture(scope="session")
def poison(tmp_path_factory) -> Path:
    """A folder whose `torch` and `triton` cannot be imported."""
    path = tmp_path_factory.mktemp("poison")
    for name in ("torch", "triton"):
        (path / f"{name}.py").write_text(f"raise ImportError('no module named {name}')\n")
    return path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory, poison) -> Path:
    """The wheel, built offline where neither torch nor Triton can be imported."""
    pytest.importorskip("hatchling", reason="needs hatchling, the build backend")
    out = tmp_path_factory.mktemp("wheel")
    pip(
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        ROOT,
        PYTHONPATH=str(poison),
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="needs hatchling, the build backend")
    out = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out], cwd=ROOT, check=True)
    (built,) = out.glob("*.tar.gz")
    return built


def test_kernels_is_not_a_package():
    """A top-level `kernels` would shadow the Hugging Face package of that name."""
    assert not (ROOT / "kernels/__init__.py").exists()


def test_lock_names_every_requirement_of_the_test_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements/test.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    locked = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert all(re.fullmatch(r"==[\d.]+(post\d+)?", str(pin.specifier)) for pin in pins)

    extras = project["optional-dependencies"]
    wanted = [Requirement(line) for line in project["dependencies"] + extras["test"]]
    for extra in next(r.extras for r in wanted if r.name == project["name"]):
        wanted += [Requirement(line) for line in extras[extra]]
    for requirement in wanted:
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


@pytest.mark.case("T1")
def test_wheel_is_pure_and_owns_two_names(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == NAMES
    assert {f"{name}/py.typed" for name in NAMES} < set(files)
    assert "blocksparse_moe_kernels/configs/sm_90.json" in files, "the tiles are package data"
    assert any(name.endswith("LICENSE") for name in files)


@pytest.mark.slow
@pytest.mark.case("T1")
def test_installs_with_build_isolation(tmp_path, poison):
    """The isolated build gets the build backend from a registry, and no torch."""
    pip("install", "--no-deps", "--target", tmp_path / "site", ROOT, PYTHONPATH=str(poison))
    installed = {entry.name for entry in (tmp_path / "site").iterdir()}
    assert installed >= NAMES


@pytest.mark.slow
def test_imports_beside_the_package_kernels(wheel, tmp_path):
    """In an environment of its own, the wheel and Hugging Face's `kernels` do not shadow each other."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    executable = tmp_path / "bin/python"
    pip("install", "--no-index", "--no-deps", wheel, executable=executable)
    find = "from importlib.util import find_spec\nprint(*(name for name in {names} if find_spec(name)))"
    found = python(find.format(names=(*sorted(NAMES), "torch")), executable=executable).split()
    assert found == sorted(NAMES)

    ours = Path(python("import sysconfig; print(sysconfig.get_path('purelib'))", executable=executable).strip())
    (ours / "torch_and_others.pth").write_text(SITE)
    pip("install", "--retries", "1", "kernels", executable=executable)
    code = "import kernels, blocksparse_moe, blocksparse_moe_kernels as ours, transformers\n"
    code += "print(kernels.__file__, blocksparse_moe.__file__, ours.__file__)"
    for order in (code, code.replace("kernels, blocksparse_moe", "blocksparse_moe, kernels", 1)):
        files = python(order, executable=executable).split()
        assert files == [f"{ours}/{name}/__init__.py" for name in ("kernels", *sorted(NAMES))]


@pytest.mark.case("T2")
def test_requirements_are_lower_bounds(wheel):
    for requirement in requirements(wheel):
        assert {specifier.operator for specifier in requirement.specifier} <= {">="}, requirement


@pytest.mark.case("T2")
def test_a_newer_torch_stays(wheel, tmp_path):
    """pip would install nothing but the wheel beside newer releases of everything that it needs."""
    base = [requirement.name for requirement in requirements(wheel) if requirement.marker is None]
    assert "torch" in base and "triton" not in base
    for name in base:
        fake_distribution(tmp_path, name, "99.0.dev1+local" if name == "torch" else "99.0")
    report = tmp_path / "report.json"
    plain = {"PYTHONPATH": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}
    pip("install", "--dry-run", "--no-index", "--report", report, wheel, **plain)
    installs = [entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]]
    assert installs == ["blocksparse-moe"]


@pytest.mark.slow
@pytest.mark.case("T3")
def test_sdist_is_complete(sdist, tmp_path):
    """Installed offline from the source archive, the layer computes; the archive holds the whole checkout."""
    target = tmp_path / "site"
    pip("install", "--no-index", "--no-deps", "--no-build-isolation", "--target", target, sdist)
    assert python(SMOKE + "print(__import__('blocksparse_moe').__file__)", path=target).startswith(str(target))

    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "LICENSE",
        "Makefile",
        "README.md",
        "pyproject.toml",
        "requirements/test.lock",
        "tests/conftest.py",
    }
    if (ROOT / ".git").exists():
        tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        needed |= {name for name in tracked if (ROOT / name).exists()}
    assert needed <= held


@pytest.mark.slow
def test_sdist_runs_its_own_tests(sdist, tmp_path):
    """From the unpacked archive alone every test is found."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'kernels'}"}
    done = subprocess.run(collect, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_import_is_light():
    """At most 0.3 s on top of torch, as a processor's time so that a busy machine counts as an idle one; no
    compiler, no model library, no call to CUDA."""
    code = """
import sys, time, torch
def forbidden(*args): raise AssertionError("importing blocksparse_moe called CUDA")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = forbidden
before, start = set(sys.modules), time.process_time()
import blocksparse_moe, blocksparse_moe_kernels
print(time.process_time() - start)
print(*(set(sys.modules) - before))
"""
    outputs = [python(code).split() for _ in range(5)]
    heavy = {"torch._dynamo", "triton", "transformers", "transformer_engine", "stk", "matplotlib", "peft"}
    assert not heavy & set(outputs[0])
    assert statistics.median(float(seconds) for seconds, *_ in outputs) < 0.3


@pytest.mark.slow
@pytest.mark.case("T4")
def test_without_cuda_only_a_call_complains():
    """Import and construction work; the report says what is unsupported, and the call that asks for it fails."""
    code = """
import torch
from blocksparse_moe import MoEConfig, RouterConfig, dMoE
config = MoEConfig(hidden_size=16, ffn_hidden_size=24, num_experts=4, router=RouterConfig(top_k=2))
assert "triton: needs a CUDA device" in dMoE(config).backend_report()
layer = dMoE(config, backend="triton")
try:
    layer(torch.randn(5, 16))
except NotImplementedError as error:
    print(error)
"""
    assert "needs a CUDA device; the tensors are on cpu" in python(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "distribution", "found", "needed"),
    [
        pytest.param("triton", "triton", "3.5.1", "3.6", marks=pytest.mark.case("T5")),
        pytest.param("stk_conversion", "stanford-stk", "0.6.2", "0.7.1", marks=pytest.mark.case("T6")),
    ],
)
def test_an_old_dependency_is_refused_at_load(tmp_path, module, distribution, found, needed):
    fake_distribution(tmp_path, distribution, found)
    code = f"""
import blocksparse_moe
try:
    import blocksparse_moe_kernels.{module}
except ImportError as error:
    print(error)
"""
    message = python(code, path=tmp_path)
    assert f"needs {distribution} >= {needed}; found {distribution} {found}" in message


@pytest.mark.case("T5")
@pytest.mark.case("T6")
@pytest.mark.parametrize(("found", "fits"), [("3.5.1", False), ("3.6.0", True), ("3.10.0+cu130", True), ("4.0rc1", True)])
def test_versions_compare_as_numbers(tmp_path, monkeypatch, found, fits):
    fake_distribution(tmp_path, "some-kernels", found)
    monkeypatch.syspath_prepend(tmp_path)
    if fits:
        require("some-kernels", "3.6", "this test")
    else:
        with pytest.raises(ImportError, match=r"this test needs some-kernels >= 3\.6; found some-kernels 3\.5\.1"):
            require("some-kernels", "3.6", "this test")


def test_a_missing_package_is_named_with_the_cure():
    with pytest.raises(ImportError, match=r"not installed.*pip install --upgrade 'some-kernels>=3\.6'"):
        require("some-kernels", "3.6", "this test")


def test_release_reads_the_number_alone():
    assert release("3.10.0rc1+cu130") == release("3.10") == (3, 10)
    with pytest.raises(ValueError, match="unknown"):
        release("unknown")
