"""Train a small Qwen3-MoE on real text with transformers' Trainer, its experts computed by blocksparse_moe.

    python examples/finetune_trainer.py

Only the line with `patch_huggingface` is about this package. In place of the random model load one of your own, as by
`AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16")`.
"""

from __future__ import annotations

import tempfile

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from workshop import VOCABULARY, Text, mean_loss, steps_asked_for

from blocksparse_moe import patch_huggingface


def main() -> None:
    steps = steps_asked_for(str(__doc__))
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        output_router_logits=True,  # adds the load-balancing loss
    )
    model = Qwen3MoeForCausalLM(config)
    text = Text(length=128)

    handle = patch_huggingface(model)
    print(handle.report)
    before = mean_loss(model, text)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            warmup_steps=10,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=text).train()
    print(f"loss {before:.3f} -> {mean_loss(model, text):.3f}")


if __name__ == "__main__":
    main()
