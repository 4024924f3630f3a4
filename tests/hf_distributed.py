"""One rank of `test_hf_distributed.py`: models sharded by transformers' own plans, computed here, against the whole model.

    torchrun --nproc-per-node 2 -m tests.hf_distributed FOLDER

FOLDER/NAME holds a checkpoint of each family; FOLDER/RANK.json gets what was found.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from blocksparse_moe import patch_huggingface, register_huggingface
from blocksparse_moe.integrations.huggingface import patch

PLANS = {
    "tensor parallel": dict(tp_size=2),
    "expert parallel": dict(tp_size=2, ep_size=2),
    "sharded data": dict(fsdp_size=2),
    "sharded data, expert parallel": dict(fsdp_size=2, ep_size=2),
}
ROUTES = ("by name", "patched")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    register_huggingface()
    found = {}
    for name in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        expected = step(AutoModelForCausalLM.from_pretrained(folder / name, experts_implementation="eager"))
        for plan, route in product(PLANS, ROUTES):
            found[f"{name}, {plan}, {route}"] = compare(folder / name, PLANS[plan], route, expected)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    gc.collect()  # what still holds a group; its threads must end before the interpreter does
    dist.destroy_process_group()


def compare(checkpoint: Path, plan: dict[str, Any], route: str, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Layers that ran here, how many experts and columns they saw, and the largest relative difference of each tensor."""
    load = partial(AutoModelForCausalLM.from_pretrained, checkpoint, distributed_config=DistributedConfig(**plan))
    with recorded() as shapes:
        if route == "by name":
            ours = step(load(experts_implementation="blocksparse"))
        else:
            model = load(experts_implementation="eager")
            patch_huggingface(model)
            ours = step(model)
    differences = {name: float((ours[name] - one).abs().max() / one.abs().max()) for name, one in expected.items()}
    worst = max(differences, key=differences.__getitem__)
    return {
        "shapes": shapes,
        "worst": worst,
        "difference": differences[worst],
        "missing": sorted(expected.keys() ^ ours.keys()),
    }


@contextmanager
def recorded() -> Iterator[list[list[int]]]:
    """Shapes of the down-projections of the experts that are computed here."""
    shapes: list[list[int]] = []
    original = patch.experts_forward

    def forward(module: nn.Module, *args: Any, **named: Any) -> Tensor:
        shapes.append(list(module.down_proj.shape))
        return original(module, *args, **named)

    patch.experts_forward = forward
    try:
        yield shapes
    finally:
        patch.experts_forward = original


def step(model: nn.Module) -> dict[str, Tensor]:
    """Loss, logits and the gradient of every parameter, whole. Both ranks take the same batch."""
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **grads}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]))
