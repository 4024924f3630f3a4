"""dMoE: the dropless mixture-of-experts layer.

    hidden_states [T, H]
      | router        scores, top-k                       -> RouterOutput
      | topology      stable sort by expert, on device    -> Topology
      | experts       sdd, activation, dsd, combine       -> [T, H]

Source: MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from blocksparse_moe_kernels import Columns, Topology, get_activation
from blocksparse_moe_kernels.launch import check_type

from .autocast import autocast_dtype
from .backends import ExpertSpec, ExpertWeights, check_name, report, select
from .checks import positive_integer
from .router import Router, RouterConfig, RouterOutput


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a mixture-of-experts layer.

    Attributes:
        hidden_size: H.
        ffn_hidden_size: F of every expert, or F_e of each.
        num_experts: E.
        activation: "swiglu", "geglu", "geglu_tanh", "reglu", "relu2_glu" (gated), "silu", "gelu", "gelu_tanh", "relu" or
            "relu2"; with parameters, as in "swiglu(alpha=1.702, gate_limit=7, up_limit=7, up_offset=1, interleaved)".
        bias: biases of both projections.
        router: how tokens choose experts.
        init_std: standard deviation of the initial weights.
        recompute: keep only the layer's input for the backward pass of the experts, which computes their pre-activation
            [M, 2F] once more: less memory for one more up-projection.
    """

    hidden_size: int
    ffn_hidden_size: int | Sequence[int]
    num_experts: int
    activation: str = "swiglu"
    bias: bool = False
    router: RouterConfig = field(default_factory=RouterConfig)
    init_std: float = 0.02
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts"):
            object.__setattr__(self, name, positive_integer("MoEConfig", name, getattr(self, name)))
        size = self.ffn_hidden_size
        if isinstance(size, Iterable) and not isinstance(size, str):
            size = tuple(positive_integer("MoEConfig", "ffn_hidden_size", one) for one in size)
            if len(size) != self.num_experts:
                raise ValueError(f"MoEConfig: ffn_hidden_size names {len(size)} experts; num_experts is {self.num_experts}.")
        else:
            size = positive_integer("MoEConfig", "ffn_hidden_size", size)
        object.__setattr__(self, "ffn_hidden_size", size)
        for name in ("bias", "recompute"):
            check_type("MoEConfig", name, getattr(self, name), bool, "Give True or False.")
        check_type("MoEConfig", "router", self.router, RouterConfig, "Give RouterConfig(top_k=...).")
        self.router.check("MoEConfig", self.num_experts)
        get_activation(self.activation)

    @property
    def columns(self) -> Columns:
        """F_e of each expert."""
        size = self.ffn_hidden_size
        return Columns.equal(size, self.num_experts) if isinstance(size, int) else Columns.of(size)


class Experts(nn.Module):
    """All expert MLPs of a layer.

    Parameters, for F equal in all experts and a gated activation: `gate_up_proj` [E, 2F, H] (gate rows, then up rows) and
    `down_proj` [E, H, F]; with `bias` also `gate_up_proj_bias` [E, 2F] and `down_proj_bias` [E, H]. Without a gate `up_proj`
    [E, F, H] and `up_proj_bias`. These are the names and layouts of Hugging Face transformers. Experts of unequal size are
    flat, one after the other: [sum 2F_e, H] and, transposed, `down_proj` [sum F_e, H].

    Shape:
        x [T, H], topology of M = T * K rows, routing_weights [T, K] -> [T, H].
    Oracle: reference.expert_mlp.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_type("Experts", "config", config, MoEConfig, "Give MoEConfig(hidden_size, ffn_hidden_size, num_experts).")
        self.config = config
        self.backend = check_name(backend)
        columns, H, E = config.columns, config.hidden_size, config.num_experts
        halves = get_activation(config.activation).halves
        self.up_name = "gate_up_proj" if halves == 2 else "up_proj"

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        if columns.are_equal:
            up_shape: tuple[int, ...] = (E, halves * columns.widest, H)
            down_shape: tuple[int, ...] = (E, H, columns.widest)
        else:
            up_shape, down_shape = (halves * columns.total, H), (columns.total, H)
        self.register_parameter(self.up_name, parameter(*up_shape))
        self.register_parameter("down_proj", parameter(*down_shape))
        self.register_parameter(f"{self.up_name}_bias", parameter(*up_shape[:-1]) if config.bias else None)
        self.register_parameter("down_proj_bias", parameter(E, H) if config.bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.init_std)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            getattr(self, self.up_name), self.down_proj, getattr(self, f"{self.up_name}_bias"), self.down_proj_bias
        )

    def spec(self, dtype: torch.dtype | None = None) -> ExpertSpec:
        """What a backend is asked for; `dtype` is that of the weights unless given."""
        weight = self.down_proj
        config = self.config
        return ExpertSpec(
            config.columns,
            config.hidden_size,
            config.activation,
            config.bias,
            dtype or weight.dtype,
            weight.device,
            config.recompute,
        )

    def forward(self, x: Tensor, topology: Topology, routing_weights: Tensor | None = None) -> Tensor:
        check_type("Experts", "the input", x, Tensor, "Make one with torch.as_tensor.")
        spec = self.spec(autocast_dtype(self.down_proj))
        backend, _ = select(self.backend, spec)
        return backend.experts(x, topology, routing_weights, self.weights, spec)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"{config.num_experts} experts, H={config.hidden_size}, F={config.columns}, {config.activation}, "
            f"bias={config.bias}, backend={self.backend!r}"
        )


class dMoE(nn.Module):
    """Dropless mixture-of-experts layer: every token reaches its K experts, whatever their load.

    Args:
        config: sizes and router.
        device, dtype: of the parameters.
        backend: "auto" chooses by device; "triton" or "torch" means exactly that, or an error that says why not.
    Shape:
        x [..., H] -> [..., H], in the dtype of x, or autocast's. With `return_routing` also the `RouterOutput` of its tokens:
        logits, weights, expert_ids, tokens_per_expert, load_balancing_loss, z_loss.
    Raises:
        ValueError: the last dimension of x is not H, or x is on another device; TypeError: x has no floating dtype.
    Source: MegaBlocks, arXiv:2211.15841.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_type("dMoE", "config", config, MoEConfig, "Give MoEConfig(hidden_size, ffn_hidden_size, num_experts).")
        self.config = config
        self.router = Router(
            config.hidden_size,
            config.num_experts,
            config.router,
            init_std=config.init_std,
            device=device,
            dtype=dtype,
            backend=backend,
        )
        self.experts = Experts(config, device=device, dtype=dtype, backend=backend)

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        self.experts.reset_parameters()

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, RouterOutput]:
        check_type("dMoE", "the input", x, Tensor, "Make one with torch.as_tensor.")
        if x.shape[-1:] != (self.config.hidden_size,):
            raise ValueError(f"dMoE: the input must be [..., {self.config.hidden_size}]; got {list(x.shape)}.")
        tokens = x.reshape(-1, self.config.hidden_size)
        routing = self.router(tokens)
        topology = Topology.from_ids(routing.expert_ids, self.config.num_experts)
        y = self.experts(tokens, topology, routing.weights).view(x.shape)
        return (y, routing) if return_routing else y

    def backend_report(self) -> str:
        """Which backend computes the experts of this layer as it is now, why, and why the others would not."""
        return report(self.experts.backend, self.experts.spec())
