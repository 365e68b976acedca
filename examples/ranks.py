"""Processes of an example: alone, or as ranks of torchrun, on CPUs or GPUs."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed


def arguments(name: str, steps: int) -> argparse.Namespace:
    """What all examples take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="urls of your own data of the same columns")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--folder", type=Path, default=Path("example-runs", name))
    return parser.parse_args()


def start(folder: Path, make: Callable[[Path], None]) -> torch.device:
    """Join the other ranks, if there are some; the first one makes the data of the example."""
    is_cuda, rank = torch.cuda.is_available(), int(os.environ.get("RANK", "0"))
    if is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if is_cuda else "gloo")
    if rank == 0 and not folder.exists():
        folder.mkdir(parents=True)
        make(folder)
    if distributed.is_initialized():
        distributed.barrier()
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def wrapped(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model on its device, and as one of DDP if there are other ranks."""
    model = model.to(device)
    return (
        torch.nn.parallel.DistributedDataParallel(model) if distributed.is_initialized() else model
    )


def say(text: str) -> None:
    """Print it once, whatever the number of ranks."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model within DDP."""
    return getattr(model, "module", model)


def load(folder: Path, model: torch.nn.Module, optimizer, loader) -> int:
    """Continue at the last checkpoint, if there is one; return its step."""
    if not (file := folder / "checkpoint.pt").exists():
        return 0
    saved = torch.load(file, map_location="cpu")
    plain(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    say(f"goes on after step {saved['step']}")
    return saved["step"]


def save(folder: Path, model: torch.nn.Module, optimizer, loader, step: int) -> None:
    """Write a checkpoint: the loader's state is the same on every rank."""
    state = loader.state_dict()
    if int(os.environ.get("RANK", "0")) == 0:
        saved = {"model": plain(model).state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "loader": state, "step": step}, folder / "checkpoint.new")
        (folder / "checkpoint.new").rename(folder / "checkpoint.pt")
