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
from .backends import ExpertSpec, ExpertWeights, check_execution, check_layer, report, select
from .backends.execution import Execution
from .checks import number, positive_integer
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
        shared_ffn_hidden_size: F of an expert that every token goes to beside its K, the sum of the widths if there are several
            (DeepSeekMoE, arXiv:2401.06066); 0 for none.
        shared_gate: weigh it by the sigmoid of a gate of its own (Qwen2-MoE).
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
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False

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
        if self.shared_ffn_hidden_size != 0:
            shared = positive_integer("MoEConfig", "shared_ffn_hidden_size", self.shared_ffn_hidden_size)
            object.__setattr__(self, "shared_ffn_hidden_size", shared)
        elif self.shared_gate:
            raise ValueError("MoEConfig: shared_gate needs a shared expert; give shared_ffn_hidden_size.")
        for name in ("bias", "recompute", "shared_gate"):
            check_type("MoEConfig", name, getattr(self, name), bool, "Give True or False.")
        number("MoEConfig", "init_std", self.init_std, at_least=0)
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
        precision: str | None = None,
        require_fused: bool = False,
    ) -> None:
        super().__init__()
        check_type("Experts", "config", config, MoEConfig, "Give MoEConfig(hidden_size, ffn_hidden_size, num_experts).")
        self.config = config
        self.execution = check_execution(Execution(backend, precision, require_fused))
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
        check_layer(self.spec())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_projections(self, self.config.init_std)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            getattr(self, self.up_name), self.down_proj, getattr(self, f"{self.up_name}_bias"), self.down_proj_bias
        )

    def spec(self, dtype: torch.dtype | None = None, weights: ExpertWeights | None = None) -> ExpertSpec:
        """What a backend is asked for; `dtype` is that of the weights unless given, and those are read unless they were."""
        weights = self.weights if weights is None else weights
        up, weight = weights.up_proj, weights.down_proj
        config = self.config
        return ExpertSpec(
            config.columns,
            config.hidden_size,
            config.activation,
            config.bias,
            dtype or weight.dtype,
            weight.device,
            config.recompute,
            up.is_contiguous() and weight.is_contiguous(),
            self.execution,
        )

    def forward(self, x: Tensor, topology: Topology, routing_weights: Tensor | None = None) -> Tensor:
        check_type("Experts", "the input", x, Tensor, "Make one with torch.as_tensor.")
        weights = self.weights
        spec = self.spec(autocast_dtype(weights.down_proj), weights)
        backend, _ = select(spec)
        return backend.experts(x, topology, routing_weights, weights, spec)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"{config.num_experts} experts, H={config.hidden_size}, F={config.columns}, {config.activation}, "
            f"bias={config.bias}, backend={self.execution.backend!r}"
            + (f", precision={self.execution.precision!r}" if self.execution.precision else "")
            + (", require_fused=True" if self.execution.require_fused else "")
        )


def _reset_projections(module: nn.Module, std: float) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=std)


class SharedExpert(nn.Module):
    """The MLP that every token goes to: dense, with torch's own products.

    Parameters: `gate_up_proj` [2F, H] or `up_proj` [F, H], `down_proj` [H, F], with `bias` those as well, and with
    `shared_gate` `gate` [1, H].

    Shape:
        x [T, H] -> [T, H].
    Source: DeepSeekMoE, arXiv:2401.06066; its gate: Qwen2, arXiv:2407.10671.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None
    gate: nn.Parameter | None

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.activation = get_activation(config.activation)
        F, H = config.shared_ffn_hidden_size, config.hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        width = F * self.activation.halves
        self.up_name = "gate_up_proj" if self.activation.halves == 2 else "up_proj"
        self.register_parameter(self.up_name, parameter(width, H))
        self.register_parameter("down_proj", parameter(H, F))
        self.register_parameter(f"{self.up_name}_bias", parameter(width) if config.bias else None)
        self.register_parameter("down_proj_bias", parameter(H) if config.bias else None)
        self.register_parameter("gate", parameter(1, H) if config.shared_gate else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_projections(self, self.config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.down_proj.dtype)
        pre = nn.functional.linear(x, getattr(self, self.up_name), getattr(self, f"{self.up_name}_bias"))
        y = nn.functional.linear(self.activation(pre), self.down_proj, self.down_proj_bias)
        return y if self.gate is None else y * nn.functional.linear(x, self.gate).sigmoid()

    def extra_repr(self) -> str:
        config = self.config
        return f"H={config.hidden_size}, F={config.shared_ffn_hidden_size}, {config.activation}, gate={config.shared_gate}"


class dMoE(nn.Module):
    """Dropless mixture-of-experts layer: every token reaches its K experts, whatever their load.

    Args:
        config: sizes and router.
        device, dtype: of the parameters.
        backend: "auto" chooses by device and precision; "triton", "torch" or "te" (NVIDIA Transformer Engine) means exactly
            that, or an error that says why not.
        precision: of the experts' products: "bf16", "fp8_current", "fp8_block", "fp8_delayed", "mxfp8" or "nvfp4"; None is the
            dtype of the weights, or autocast's. docs/low-precision.md says which backend has which.
        require_fused: refuse to run unless Transformer Engine's fused grouped MLP does.
    Shape:
        x [..., H] -> [..., H], in the dtype of x, or autocast's. `expert_ids` [T, K] takes the place of the router's choice:
        see `Router`. With `return_routing` also the `RouterOutput` of its tokens:
        logits, weights, expert_ids, tokens_per_expert, load_balancing_loss, z_loss.
    Raises:
        ValueError: an unknown backend or precision, the last dimension of x is not H, or x is on another device; TypeError: x
            has no floating dtype; NotImplementedError: the backend computes no such layer, or not where it is.
    Source: MegaBlocks, arXiv:2211.15841.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        precision: str | None = None,
        require_fused: bool = False,
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
            backend="auto" if backend == "te" else backend,
        )
        self.experts = Experts(
            config, device=device, dtype=dtype, backend=backend, precision=precision, require_fused=require_fused
        )
        has_shared = config.shared_ffn_hidden_size > 0
        self.shared_expert = SharedExpert(config, device=device, dtype=dtype) if has_shared else None

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()

    def forward(
        self, x: Tensor, *, expert_ids: Tensor | None = None, return_routing: bool = False
    ) -> Tensor | tuple[Tensor, RouterOutput]:
        check_type("dMoE", "the input", x, Tensor, "Make one with torch.as_tensor.")
        if x.shape[-1:] != (self.config.hidden_size,):
            raise ValueError(f"dMoE: the input must be [..., {self.config.hidden_size}]; got {list(x.shape)}.")
        tokens = x.reshape(-1, self.config.hidden_size)
        routing = self._route(tokens, {} if expert_ids is None else {"expert_ids": expert_ids})
        topology = Topology.from_ids(routing.expert_ids, self.config.num_experts)
        y = self.experts(tokens, topology, routing.weights)
        if self.config.router.num_identity_experts:
            y = y + (self._identity_share(routing) * tokens).to(y.dtype)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens).to(y.dtype)
        y = y.view(x.shape)
        return (y, routing) if return_routing else y

    def _route(self, tokens: Tensor, given: dict[str, Tensor]) -> RouterOutput:
        if torch.compiler.is_compiling():  # which cannot break a graph inside of try
            return self.router(tokens, **given)
        try:
            return self.router(tokens, **given)
        except NotImplementedError:
            if self.router.backend != "auto":  # which is that of the experts, and refused there with the nearest that runs
                select(self._spec())
            raise

    def _identity_share(self, routing: RouterOutput) -> Tensor:
        """[T, 1]: the weights of a token's identity experts, whose ids come behind those of the others."""
        first = self.config.num_experts
        is_identity = (routing.expert_ids >= first) & (routing.expert_ids < first + self.config.router.num_identity_experts)
        return routing.weights.masked_fill(~is_identity, 0).sum(dim=1, keepdim=True)

    def backend_report(self) -> str:
        """Which backend computes the experts of this layer as it is now, why, and why the others would not."""
        return report(self._spec())

    def _spec(self) -> ExpertSpec:
        return self.experts.spec(autocast_dtype(self.experts.down_proj))
