"""One rank of a run with torch's own parallelism, over gloo: what its loader found and gave it."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed
from dataplane_torch import DataLoader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 8, 4
layout, url, out = sys.argv[1:]
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
seen = []


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def train(module, loader):
    """Step as a loop would: every rank as often."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for batch in loader:
        seen.append(batch["id"].tolist())
        module(batch["tokens"].float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ddp():
    with DataLoader(url, BATCH, shuffle=True, seed=1) as loader:
        train(DistributedDataParallel(model()), loader)
        return loader


def on_fsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    two = model()
    parallelize_module(two, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(two, mesh=mesh["dp"])
    with DataLoader(url, BATCH, shuffle=True, seed=1, device_mesh=mesh) as loader:
        train(two, loader)
        return loader


def on_pipeline():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    at = mesh["pp"].get_local_rank()
    part = nn.Linear(WIDTH, WIDTH) if at == 0 else nn.Linear(WIDTH, 1)
    stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(
        stage, 2, loss_fn=lambda found, wanted: (found - wanted).square().mean()
    )
    columns = {0: ["id", "tokens"], -1: ["id", "label"]}
    with DataLoader(
        url, BATCH, shuffle=True, seed=1, device_mesh=mesh, columns_by_stage=columns
    ) as loader:
        for batch in loader:
            seen.append(batch["id"].tolist())
            assert list(batch) == columns[-at]
            if at == 0:
                schedule.step(batch["tokens"].float())
            else:
                schedule.step(target=batch["label"].view(-1, 1).float())
        return loader


def on_context():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    with DataLoader(
        url, BATCH, shuffle=True, seed=1, device_mesh=mesh, sequence_part=["tokens"]
    ) as loader:
        for batch in loader:
            seen.append(batch["id"].tolist())
            part = batch["tokens"].contiguous()
            parts = [torch.empty_like(part) for _ in range(2)]
            torch.distributed.all_gather(parts, part, group=group)
            rows = torch.cat(parts, 1)
            assert torch.equal(rows, batch["id"][:, None] * 100 + torch.arange(WIDTH)), rows
        return loader


loader = {"ddp": on_ddp, "fsdp": on_fsdp, "pipeline": on_pipeline, "context": on_context}[layout]()
place = loader._shards._job.request.topology
told = {"seen": seen, "dp_rank": place.dp_rank, "dp_size": place.dp_size, "source": place.source}
(Path(out) / f"{rank}.json").write_text(json.dumps(told))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
