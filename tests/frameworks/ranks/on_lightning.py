"""One rank of a Lightning run: whole, stopped in its second epoch, and resumed from there."""

import logging
import sys

import lightning
import torch
from dataplane_torch import DataLoader
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import Model, loader_of, tell

STOP = 9
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
out, *sources = sys.argv[1:]


class Module(lightning.LightningModule):
    def __init__(self, source):
        super().__init__()
        self.source, self.model = source, Model()

    def train_dataloader(self):
        return loader_of(self.source)

    def training_step(self, batch):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(source, folder, resume=None, **given):
    lightning.seed_everything(1, verbose=False)
    module = Module(source)
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=STOP, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[keep],
        logger=False, enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume)
    assert type(trainer.train_dataloader) is DataLoader
    return module.model.seen


for nth, source in enumerate(sources):
    folder = f"{out}/checkpoints-{nth}"
    whole = seen(source, f"{out}/others-{nth}")
    first = seen(source, folder, max_steps=STOP)
    rest = seen(source, f"{out}/others-{nth}", f"{folder}/step={STOP}.ckpt")
    tell(out, str(nth), {"whole": whole, "first": first, "rest": rest})
