"""One rank of a Trainer's run: whole, stopped in its second epoch, and resumed from there."""

import sys

import pytest
import transformers
from dataplane_torch import DataLoader
from dataplane_torch.accelerate import prepare
from dataplane_torch.transformers import LoaderState
from samples import BATCH, Model, Samples, loader_of, tell
from transformers import Trainer, TrainerCallback, TrainingArguments

from dataplane.model.errors import ConfigError

STOP = 9
transformers.logging.set_verbosity_error()
out, *sources = sys.argv[1:]


class Ours(Trainer):
    source, batch = "", BATCH

    def get_train_dataloader(self):
        is_dataset = self.source == "dataset"
        loader = (
            super().get_train_dataloader() if is_dataset else loader_of(self.source, self.batch)
        )
        return prepare(self.accelerator, loader)


class Stop(TrainerCallback):
    def on_save(self, args, state, control, **given):
        control.should_training_stop = True


def seen(source, folder, resume=None, *callbacks, batch=BATCH, **given):
    model = Model()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch, num_train_epochs=3, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        dataloader_num_workers=1, dataloader_pin_memory=False, save_steps=STOP, **given,
    )  # fmt: skip
    trainer = Ours(model, arguments, train_dataset=Samples(), callbacks=[LoaderState(), *callbacks])
    trainer.source, trainer.batch = source, batch
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.callback_handler.train_dataloader, DataLoader)
    return model.seen, trainer.state.epoch


for nth, source in enumerate(sources):
    folder = f"{out}/checkpoints-{nth}"
    whole, _ = seen(source, folder, save_strategy="no")
    first, stopped_at = seen(source, folder, None, Stop(), save_strategy="steps")
    rest, ended_at = seen(source, folder, f"{folder}/checkpoint-{STOP}", save_strategy="no")
    assert (stopped_at, ended_at) == (1.5, 3.0)
    # The Trainer would take step 9 for the start of the fourth epoch of three steps.
    with pytest.raises(ConfigError, match=r"epochs had 6 steps when .* saved, and have 3 now"):
        seen(source, folder, f"{folder}/checkpoint-{STOP}", batch=2 * BATCH, save_strategy="no")
    tell(out, str(nth), {"whole": whole, "first": first, "rest": rest})
