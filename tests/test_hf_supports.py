"""Which Hugging Face models can be computed here, asked without weights; and the page that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from blocksparse_moe import supports
from blocksparse_moe.__main__ import app
from blocksparse_moe.integrations import huggingface

transformers = pytest.importorskip("transformers", minversion="5.9")

from .hf_families import FAMILIES, QUICK, build, folders, missing, slow_but_for  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "huggingface.md"


@pytest.mark.parametrize("name", slow_but_for(QUICK, FAMILIES))
def test_a_model_its_config_and_its_type_agree(name):
    if (reason := missing(FAMILIES[name])) is not None:
        pytest.skip(reason)
    model = build(name)
    answers = [supports(model), supports(model.config), supports(model.config.model_type)]
    tier = "interface" if FAMILIES[name].experts is None else "adapter"
    assert [(answer.tier, answer.reason) for answer in answers] == [(tier, "")] * 3
    assert set(answers[0].experts) <= set(answers[1].experts)


def test_the_list_is_that_of_the_installed_transformers():
    found = {support.model_type: support for support in huggingface.all_supports()}
    assert {name for name, classes in folders().items() if classes} == {
        name for name, one in found.items() if one.tier == "interface"
    }
    adapted = {name for name, one in found.items() if one.tier == "adapter"}
    by_hand = {name: family for name, family in FAMILIES.items() if family.experts is not None}
    assert {name for name, family in by_hand.items() if missing(family) is None} <= adapted <= by_hand.keys()
    assert {"switch_transformers", "nllb_moe"} <= {name for name, one in found.items() if not one}
    assert all(one.reason for one in found.values() if not one)


def test_models_without_experts():
    assert supports("llama").tier == "dense" and not supports("llama")
    assert supports(transformers.LlamaConfig()).reason == "it has no mixture-of-experts layer"
    assert supports(nn.Linear(2, 2)).tier == "dense"


def test_quantised_weights():
    config = transformers.MixtralConfig(quantization_config={"quant_method": "fp8"})
    assert "quantised" in supports(config).reason and not supports(config)
    model = build("mixtral")
    experts = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert "quantised" in supports(model).reason


def test_what_is_nothing_of_the_kind():
    with pytest.raises(ValueError, match="no model type 'mixtral2'"):
        supports("mixtral2")
    with pytest.raises(TypeError, match="a model, a config or a model type; got int"):
        supports(3)


def run(*arguments: str):
    return CliRunner().invoke(app, ["supports", *arguments])


def test_the_command():
    result = run("mixtral")
    assert (result.exit_code, result.output) == (0, "mixtral: MixtralExperts\n")
    result = run("switch_transformers")
    assert result.exit_code == 1 and result.output.startswith("switch_transformers: no, its experts are modules of their own")
    result = run("nothing")
    assert result.exit_code == 2 and "no model type 'nothing'" in result.output
    assert run().output.count("\n") == len(huggingface.all_supports())


def test_the_page_has_the_table_of_the_newest_transformers():
    page = PAGE.read_text()
    (version,) = re.findall(r"with transformers (\S+):$", page, re.MULTILINE)
    if transformers.__version__ != version:
        pytest.skip(f"the page is of transformers {version}; installed is {transformers.__version__}")
    assert run("--markdown").output in page
