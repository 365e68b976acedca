"""One rank of an Accelerate run: whole, or killed in its second epoch, or resumed from there."""

import os
import signal
import sys

import torch
from accelerate import Accelerator
from dataplane_torch import DataLoader
from dataplane_torch.accelerate import prepare
from samples import Model, loader_of, tell

SAVED, KILLED = 9, 11
what, out, *sources = sys.argv[1:]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)


def run(name, source, what):
    torch.manual_seed(0)
    accelerator.free_memory()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    loader = prepare(accelerator, loader_of(source))
    assert isinstance(loader, DataLoader)
    if what == "rest":
        accelerator.load_state(f"{out}/state-{name}")
    updates = []
    for _ in range(loader.iteration, 3):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            updates.append(accelerator.sync_gradients)
            if what == "first" and len(updates) == SAVED:
                accelerator.save_state(f"{out}/state-{name}")
                accelerator.wait_for_everyone()
                tell(out, f"{name}-first", model.seen)
            if what == "first" and len(updates) == KILLED and source == sources[-1]:
                accelerator.wait_for_everyone()
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "first" and len(updates) == KILLED:
                return
    tell(out, f"{name}-{what}", model.seen)
    tell(out, f"{name}-{what}-updates", updates)


for nth, source in enumerate(sources):
    run(str(nth), source, what)
    if what == "rest":
        run(str(nth), source, "whole")
accelerator.end_training()
