"""Adapt a small Mixtral with PEFT: LoRA in attention and on the stacked weights of the experts.

    python examples/finetune_lora.py

Frozen experts cost no weight gradient; adapters on `gate_up_proj` and `down_proj` work as they do without this package.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM
from workshop import VOCABULARY, Text, mean_loss, steps_asked_for

from blocksparse_moe import patch_huggingface


def main() -> None:
    steps = steps_asked_for(str(__doc__))
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")
    print(patch_huggingface(model).report)
    lora = LoraConfig(
        r=8,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["embed_tokens", "lm_head"],  # this model is random; a trained one does not need them
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    text = Text(length=128)
    before = mean_loss(model, text)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=3e-3)
    batches = torch.utils.data.DataLoader(text, batch_size=8, shuffle=True)
    for step, batch in zip(range(steps), batches, strict=False):
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step} loss {loss:.3f}")
    merged = model.merge_and_unload()
    print(f"loss {before:.3f} -> {mean_loss(merged, text):.3f}")


if __name__ == "__main__":
    main()
