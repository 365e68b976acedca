"""Train under Ray: a service on the cluster, ranks that go on from the last checkpoint.

python ray_train.py /data/train --workers 8 --storage s3://bucket/run-7 --steps 10000

Beyond loopback, nodes need `--environ DATAPLANE_INSECURE=true`, or the settings of TLS.
If a worker or a host is lost, Ray starts the workers again (`max_failures`); with `--workers-min`
on as many as there is room for. Each checkpoint has the loader's state, so that none of the samples
is lost or repeated, whatever their number.
"""

import argparse
import json
import tempfile
from pathlib import Path

import ray
import torch
from dataplane_torch import DataLoader
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

from dataplane.ray import start_nodes


def train_loop(given):
    loader = DataLoader(
        given["url"], global_batch_size=given["global_batch"], shuffle=True, seed=7,
        service=given["service"],
    )  # fmt: skip
    model = torch.nn.Linear(1, 1)
    step, rank = 0, train.get_context().get_world_rank()
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"))
            progress = json.loads(Path(folder, "progress.json").read_text())
        model.load_state_dict(saved)
        step = progress["step"]
        loader.load_state_dict(progress["loader"])
    trained = prepare_model(model)  # checkpoints have the model itself, for any number of workers
    optimizer = torch.optim.SGD(trained.parameters(), 1e-6)
    while step < given["steps"]:
        for batch in loader:
            inputs = batch["id"].float().unsqueeze(1)
            (trained(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if given["record"]:
                with open(f"{given['record']}-{rank}", "a") as file:
                    file.write(f"{step} {json.dumps(batch['id'].tolist())}\n")
            if step % given["every"] and step < given["steps"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    torch.save(model.state_dict(), Path(folder, "model.pt"))
                    progress = {"step": step, "loader": loader.state_dict()}
                    Path(folder, "progress.json").write_text(json.dumps(progress))
                    saved = train.Checkpoint.from_directory(folder)
                train.report({"step": step}, checkpoint=saved)
            if step == given["steps"]:
                break
    loader.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--workers-min", type=int, help="fewer will do if hosts are lost")
    parser.add_argument("--storage", required=True, help="a folder or url for checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--record", help="append the ids of each batch to files of this name")
    parser.add_argument("--environ", nargs="*", default=[], help="NAME=VALUE for nodes")
    given = parser.parse_args()
    ray.init()
    nodes = start_nodes(environ=dict(pair.split("=", 1) for pair in given.environ))
    number = (given.workers_min, given.workers) if given.workers_min else given.workers
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={**vars(given), "service": nodes.service},
        scaling_config=train.ScalingConfig(
            num_workers=number, use_gpu=torch.cuda.is_available()
        ),
        run_config=train.RunConfig(
            name="run", storage_path=given.storage,
            failure_config=train.FailureConfig(max_failures=3),
        ),
    )  # fmt: skip
    print(f"steps={trainer.fit().metrics['step']}", flush=True)
    nodes.close()


if __name__ == "__main__":
    main()
