"""The same GRPO task with TRL and PEFT, for ``quickstart.py --peer trl``.

Needs ``pip install -c constraints.txt trl==1.16.0``. Two things have to be mended before it trains
this model at all or at a fair speed: ``router_aux_loss_coef`` must be 0 (else it asks the model for
an attribute it does not have), and the KDA fallback gets a chunk that fits the sequence.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def cpu_seconds_per_step(hf_checkpoint: Path, steps: int = 12, skip: int = 3) -> float:
    """Median CPU seconds of one GRPO step of 16 prompts x 8 samples x 2 tokens, one thread."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, Glm5NextForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from glm_lora.arch.spec import builtin
    from glm_lora.config import RECIPE_EXCLUDES, SelectionConfig
    from glm_lora.export.peft import target_pattern
    from glm_lora.model.hf_hooks import mend_kda
    from glm_lora.targets.resolve import resolve

    torch.set_num_threads(1)
    selection = resolve(
        builtin("tiny"),
        "tiny",
        SelectionConfig(lora_rank=8, lora_alpha=16.0, exclude_modules=RECIPE_EXCLUDES),
    ).selection
    model = Glm5NextForConditionalGeneration.from_pretrained(hf_checkpoint)
    model.config.get_text_config().router_aux_loss_coef = 0.0
    mend_kda(model)
    tokenizer = AutoTokenizer.from_pretrained(hf_checkpoint)
    rows = [{"prompt": f"{d}?>", "label": str(d)} for d in range(10)] * 40

    def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
        return [float(c.strip() == x) for c, x in zip(completions, label, strict=True)]

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=8, lora_alpha=16, lora_dropout=0.0, target_modules=target_pattern(selection)
            ),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=128,
                num_generations=8,
                max_completion_length=2,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                max_steps=steps,
                temperature=1.0,
                beta=0.0,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return statistics.median(b - a for a, b in zip(marks[skip:], marks[skip + 1 :], strict=False))
