"""One rank of `test_global_loss.py`: what balances, over two processes, of parts of one batch; a shared expert, a monitor.

    torchrun --nproc-per-node 2 -m tests.balance_ranks FOLDER

FOLDER/inputs.pt holds the batch and the router's state; FOLDER/RANK.pt gets what was found.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from blocksparse_moe import MoEConfig, MoEMonitor, Router, RouterConfig, dMoE
from blocksparse_moe.monitor import SCALARS
from blocksparse_moe.router import BiasBalancer, GlobalLoadBalancingLoss


def router(state: dict[str, Tensor]) -> Router:
    num_experts, hidden_size = state["weight"].shape
    made = Router(hidden_size, num_experts, RouterConfig(2, score="sigmoid", correction_bias=True))
    made.load_state_dict(state)
    return made


def shared_alone(x: Tensor) -> tuple[Tensor, Tensor]:
    """Output of a layer whose routed experts give nil, and of its shared expert."""
    torch.manual_seed(0)
    layer = dMoE(MoEConfig(x.shape[1], 8, 4, shared_ffn_hidden_size=12, init_std=0.5))
    with torch.no_grad():
        layer.experts.down_proj.zero_()
        return layer(x), layer.shared_expert(x)


def watched(x: Tensor, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """What a monitor read after two steps of the same tokens."""
    torch.manual_seed(0)
    layer = dMoE(MoEConfig(x.shape[1], 8, 4, init_std=0.5))
    monitor = MoEMonitor(layer, group=group)
    for _ in range(2):
        layer(x)
        monitor.step()
    (reading,) = monitor.read()
    counted = {name: torch.tensor(reading.scalars[name]) for name in SCALARS if name not in ("changed", "gate_norm")}
    return counted | {"load": reading.experts["load"], "history": reading.history}


def balanced(inputs: dict) -> dict[str, object]:
    """What balances, after a step of this rank's micro-batches."""
    layer, micro_batches = router(inputs["state"]), inputs["x"][dist.get_rank()]
    balance, losses = GlobalLoadBalancingLoss(), []
    if inputs["beforehand"]:
        for x in micro_batches:
            balance.count(layer(x))
    balancer = BiasBalancer(layer, gamma=0.01)
    for x in micro_batches:
        losses.append(balance(layer(x)))
        (losses[-1] / len(micro_batches)).backward()
    dist.all_reduce(layer.weight.grad)
    balancer.step()
    return {"grad": layer.weight.grad / 2, "losses": torch.stack(losses).detach(), "bias": layer.correction_bias}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    inputs, rank = torch.load(folder / "inputs.pt"), dist.get_rank()
    found = balanced(inputs) | {
        "shared": shared_alone(torch.cat(inputs["x"][0])),
        "watched": watched(torch.cat(inputs["x"][rank]), dist.group.WORLD),
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    gc.collect()  # what still holds the group; its threads must end before the interpreter does
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
