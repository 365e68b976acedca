"""Train, save at SIGTERM, and go on elsewhere, on any number of ranks.

torchrun --nproc-per-node 8 train.py s3://bucket/train --checkpoints s3://bucket/run-7 --steps 10000

Engines announce the end of a process by SIGTERM: Kubernetes when a pod is evicted, Slurm before a
preemption (`--signal`), the cloud's handler of spot notices by draining the host. One rank that
hears of it is enough. All save the same step and exit with status 75, so that the engine starts the
job again. Replace the model; the rest is what a run of weeks needs.
"""

import argparse
import json
import os
import signal
import sys

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dataplane_torch import DataLoader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

TRY_AGAIN = 75


class Training(Stateful):
    """Everything that a checkpoint holds. The loader's state is the same on every rank."""

    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader, self.step = model, optimizer, loader, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        progress = json.dumps({"step": self.step, "loader": self.loader.state_dict()})
        return {"model": model, "optimizer": optimizer, "progress": progress}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        progress = json.loads(state_dict["progress"])
        self.step = progress["step"]
        self.loader.load_state_dict(progress["loader"])


def save(training, folder):
    """Write a checkpoint, then name it as the last: whoever dies meanwhile leaves the old one."""
    name = f"step-{training.step:09d}"
    dcp.save({"training": training}, checkpoint_id=f"{folder}/{name}")
    if dist.get_rank() == 0:
        with fsspec.open(f"{folder}/last", "w") as file:
            file.write(name)
        print(f"saved step={training.step}", flush=True)


def load(training, folder):
    """Load the last checkpoint, if there is one."""
    try:
        with fsspec.open(f"{folder}/last") as file:
            name = file.read().decode()
    except FileNotFoundError:
        return
    dcp.load({"training": training}, checkpoint_id=f"{folder}/{name}")
    if dist.get_rank() == 0:
        print(f"resumed step={training.step} ranks={dist.get_world_size()}", flush=True)


def leave(loader, status):
    """End at once: SIGKILL may be near, and a normal exit can wait for ever for gloo's threads."""
    loader.close()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--checkpoints", required=True, help="a folder or a url of fsspec")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--sharing", help="a name for jobs of one host that load alike")
    parser.add_argument("--record", help="append the ids of each batch to files of this name")
    given = parser.parse_args()

    noticed = []
    signal.signal(signal.SIGTERM, lambda number, frame: noticed.append(number))
    # Before the model, so that the node opens the dataset meanwhile.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    loader = DataLoader(
        given.url, global_batch_size=given.global_batch, shuffle=True, seed=7, sharing=given.sharing
    )
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    training = Training(model, optimizer, loader)
    load(training, given.checkpoints)

    while training.step < given.steps:
        for batch in loader:
            inputs = batch["id"].to(device).float().unsqueeze(1)
            loss = (model(inputs / 1000) - inputs / 500).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step += 1
            if given.record:
                with open(f"{given.record}-{dist.get_rank()}", "a") as file:
                    file.write(f"{training.step} {json.dumps(batch['id'].tolist())}\n")
            # Ranks hear of a notice at different steps: they agree on one.
            ends = torch.tensor(len(noticed), device=device)
            dist.all_reduce(ends)
            if ends or training.step % given.every == 0 or training.step == given.steps:
                save(training, given.checkpoints)
            if ends:
                leave(loader, TRY_AGAIN)
            if training.step == given.steps:
                break
    leave(loader, 0)


if __name__ == "__main__":
    main()
