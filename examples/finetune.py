"""A causal model of transformers, fine-tuned by its Trainer on prompts and answers.

python examples/finetune.py, or torchrun --nproc-per-node 2 examples/finetune.py
"""

import json
from pathlib import Path

import ranks
import torch
from dataplane_torch import DataLoader
from dataplane_torch.accelerate import prepare
from dataplane_torch.transformers import LoaderState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def make(folder: Path) -> None:
    """Sums, and their results."""
    rows = [{"prompt": f"What is {i} plus {i}? ", "answer": str(2 * i)} for i in range(1000)]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))


class MyTrainer(Trainer):
    """A Trainer whose training data come from Dataplane."""

    data: str

    def get_train_dataloader(self):
        loader = DataLoader(
            self.data, self.args.train_batch_size, shuffle=True, seed=self.args.seed,
            drop_last=True, map="functions:Chat", lists="ragged", collate="functions:pad",
        )  # fmt: skip
        return prepare(self.accelerator, loader)


def main() -> None:
    given = ranks.arguments("finetune", steps=30)
    ranks.start(given.folder, make)
    # Put AutoModelForCausalLM.from_pretrained(…) here, and its tokenizer into functions.Chat.
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        str(given.folder / "checkpoints"), per_device_train_batch_size=16, max_steps=given.steps,
        save_steps=10, logging_steps=10, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = MyTrainer(GPT2LMHeadModel(config), arguments, callbacks=[LoaderState()])
    trainer.data = given.data or f"{given.folder}/answers.jsonl"
    saved = any((given.folder / "checkpoints").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=saved or None)


if __name__ == "__main__":
    main()
