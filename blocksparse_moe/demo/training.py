"""The model, its three trainings, and what is counted on the way."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from blocksparse_moe_kernels import Topology
from blocksparse_moe_kernels.config import choose_block_m

from ..integrations.huggingface import patch_huggingface
from .results import EAGER, GROUPED_MM, OURS, Curve, Results
from .settings import DemoError, Settings, Text

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 25
# Adam moves a router's logits alike for all tokens: at the full rate whole batches swing from expert to expert, and every tie
# that they pass on the way amplifies rounding.
ROUTER_SHARE = 0.1
GRADIENT_NORM = 1.0
SMALL_GRADIENT = 1e-4  # of the norm of all gradients
SAMPLE_BYTES = 200
SAMPLE_SECONDS = 20.0


class Observer(Protocol):
    """Who is told how the training goes."""

    def start(self, settings: Settings, text: Text, parameters: int, backend: str) -> None:
        """Before anything is computed."""

    def say(self, message: str) -> None:
        """What else a person should know."""

    def step(self, curves: dict[str, Curve]) -> None:
        """After a step of every training."""

    def stop(self) -> None:
        """After the last step."""


class Training:
    """One training: a copy of the model, its optimizer and its curve."""

    def __init__(self, name: str, model: transformers.MixtralForCausalLM) -> None:
        self.curve = Curve(name)
        self.model = copy.deepcopy(model)
        routers = [parameter for name, parameter in self.model.named_parameters() if name.endswith("gate.weight")]
        others = [parameter for name, parameter in self.model.named_parameters() if not name.endswith("gate.weight")]
        groups = [{"params": others, "share": 1.0}, {"params": routers, "share": ROUTER_SHARE}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def gradients(self, batch: Tensor) -> dict[str, Tensor]:
        """Of the loss of one batch, by parameter; the model stays as it is."""
        self.model(input_ids=batch, labels=batch).loss.backward()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.optimizer.zero_grad()
        return gradients

    def step(self, batch: Tensor, rate: float) -> None:
        """One step of AdamW with learning rate `rate`, timed with everything that it set going on the device."""
        _synchronize(batch.device)
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        _synchronize(batch.device)
        self.curve.seconds.append(time.perf_counter() - begin)
        self.curve.losses.append(loss.item())


class ScheduleRecorder:
    """Counts what the schedules of a model's experts cover, forward by forward.

    A schedule is made, as `expert_mlp` makes it, from the expert ids that the router hands to an experts module. A slot counts
    as served when a tile of the expert that it chose covers its row, and as dropped otherwise.

    Attributes:
        loads: of every step [layers, E] int64, rows of each expert.
        slots, dropped: over all layers and steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loads: list[Tensor] = []
        self.slots = self.dropped = 0
        self._ids: list[Tensor] = []
        self._hooks = []
        for module in model.modules():
            if isinstance(module, MixtralExperts):
                self._num_experts: int = module.num_experts
                self._hooks.append(module.register_forward_pre_hook(self._keep_ids))

    def count(self) -> None:
        """Count the forward that was just done."""
        loads = torch.zeros(len(self._ids), self._num_experts, dtype=torch.int64)
        for load, expert_ids in zip(loads, self._ids, strict=True):
            topology = Topology.from_ids(expert_ids, self._num_experts)
            schedule = topology.schedule(choose_block_m(topology.num_slots, self._num_experts))
            experts, first_rows, lengths = schedule.tiles[:, schedule.lengths > 0].long()
            row_in_tile = torch.arange(int(lengths.sum()), device=lengths.device)
            row_in_tile -= (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
            slots = topology.slots[first_rows.repeat_interleave(lengths) + row_in_tile].long()
            right = expert_ids.reshape(-1)[slots] == experts.repeat_interleave(lengths)
            self.slots += topology.num_slots
            self.dropped += topology.num_slots - slots[right].unique().numel()
            load.index_add_(0, experts.cpu(), lengths.cpu())
        self.loads.append(loads)
        self._ids.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_ids(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._ids.append(arguments[1])


def train(settings: Settings, text: Text, observer: Observer) -> Results | None:
    """Train three copies of one model on the same batches, a step of each in turn.

    Returns:
        What was found; None when Ctrl-C came before every training had done its first step.
    Raises:
        DemoError: the backend is unknown or cannot run here.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(settings.seed)
    model = transformers.MixtralForCausalLM(model_config(settings)).to(settings.torch_device, settings.torch_dtype)
    ours = Training(OURS, model)
    try:
        handle = patch_huggingface(ours.model, backend=settings.backend)
    except (ValueError, NotImplementedError) as error:
        raise DemoError(str(error)) from error
    trainings = [Training(EAGER, model), Training(GROUPED_MM, model), ours]
    for training in trainings[:2]:
        training.model.set_experts_implementation(training.curve.name)
    curves = {training.curve.name: training.curve for training in trainings}
    backend = "; ".join(dict.fromkeys(str(layer).partition(": ")[2] for layer in handle.layers))

    with _first_interrupt() as interrupted:
        observer.start(settings, text, sum(parameter.numel() for parameter in model.parameters()), backend)
        try:
            _compare_gradients(trainings, text.batch(settings, torch.Generator().manual_seed(settings.seed)))
            for curve in curves.values():
                if curve.obstacle:
                    observer.say(f"{curve.name} cannot run here and is left out: {curve.obstacle}")
            generator = torch.Generator().manual_seed(settings.seed)
            recorder = ScheduleRecorder(ours.model)
            for step in range(settings.steps):
                if interrupted.is_set():
                    break
                batch = text.batch(settings, generator)
                for training in trainings:
                    if training.curve.obstacle is None:
                        training.step(batch, _learning_rate(step, settings.steps))
                recorder.count()
                observer.step(curves)
        finally:
            observer.stop()
        recorder.remove()
        if not recorder.loads:
            return None
        prompt, sample = _write_on(ours.model, text, settings)
        return Results(
            settings=settings,
            text=text.source,
            model=_description(model),
            backend=backend,
            curves=curves,
            loads=torch.stack(recorder.loads, dim=2),
            dropped=recorder.dropped,
            slots=recorder.slots,
            prompt=prompt,
            sample=sample,
            interrupted=len(recorder.loads) < settings.steps,
        )


def _learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, and linear decay to a tenth at the end."""
    return LEARNING_RATE * min(1, (step + 1) / WARM_UP_STEPS) * (1 - 0.9 * step / steps)


def model_config(settings: Settings) -> transformers.MixtralConfig:
    """Small enough for two CPU cores. Auxiliary loss as in Mixtral; attention in plain torch, the same bits every time."""
    return transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(1024, settings.sequence_length),
        num_local_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )


def _description(model: transformers.MixtralForCausalLM) -> dict[str, Any]:
    config = model.config
    return {
        "type": config.model_type,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
        "warm_up_steps": WARM_UP_STEPS,
        "router_share": ROUTER_SHARE,
        "gradient_norm": GRADIENT_NORM,
    }


def _compare_gradients(trainings: list[Training], batch: Tensor) -> None:
    """Gradients of one batch, all from the same weights, against eager's; an implementation that fails says so in its curve.
    One that is nil but for rounding, as that of attention among equal bytes, is measured by what the others are.

    Only grouped_mm may fail: what it supports depends on dtype, device and version of torch.
    """
    eager, *others = trainings
    expected = eager.gradients(batch)
    total = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in expected.values()]).norm()
    for training in others:
        curve = training.curve
        try:
            found = training.gradients(batch)
        except RuntimeError as error:
            if curve.name != GROUPED_MM:
                raise
            curve.obstacle = str(error).partition("\n")[0]
            continue
        for name, gradient in found.items():
            norm = torch.linalg.vector_norm(expected[name], dtype=torch.float64)
            error_norm = torch.linalg.vector_norm(gradient.double() - expected[name].double())
            difference = (error_norm / torch.maximum(norm, SMALL_GRADIENT * total)).item() if total > 0 else error_norm.item()
            if not difference <= curve.gradient_difference:
                curve.gradient_difference, curve.gradient_parameter = difference, name


def _write_on(model: transformers.MixtralForCausalLM, text: Text, settings: Settings) -> tuple[str, str]:
    """(the beginning of a line of the text, how the model writes on)."""
    prompt = text.prompt()
    ids = torch.tensor([list(prompt)], device=model.device)
    torch.manual_seed(settings.seed)
    written = model.eval().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=SAMPLE_BYTES,
        max_time=SAMPLE_SECONDS,
        do_sample=True,
        temperature=0.7,
        output_router_logits=False,
    )
    return _readable(prompt), _readable(bytes(written[0, len(prompt) :].tolist()))


def _readable(content: bytes) -> str:
    """As UTF-8, without what a terminal would obey."""
    characters = content.decode(errors="replace").expandtabs(4)
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}" for character in characters
    )


@contextmanager
def _first_interrupt() -> Iterator[Event]:
    """An event that the first Ctrl-C sets; after that, Ctrl-C does what it did before."""
    event = Event()
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
