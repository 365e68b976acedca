"""Convert a folder of images with ray.data, then train trials of Ray Tune that share one decode.

python ray_tune.py /data/photos /data/shards --lr 0.1 0.03 0.01 0.003

Beyond loopback, nodes need `--environ DATAPLANE_INSECURE=true`, or the settings of TLS.
All processors of the cluster convert, so the folder may be larger than a host. Trials whose loaders
are equal and have one `sharing=` get the same batches; on each host, every image is decoded once.
"""

import argparse
import json
from pathlib import Path

import ray
import torch
from dataplane_torch import DataLoader, RandomResizedCrop
from ray import tune

from dataplane.ray import start_nodes


def convert(folder, shards):
    """Write encoded images as Parquet; `/data/photos/7/x.jpg` has the label 7."""

    def columns(rows):
        labels = [int(Path(path).parent.name) for path in rows["path"]]
        return {"jpg": rows["bytes"], "label": labels}

    files = ray.data.read_binary_files(folder, include_paths=True)
    files.map_batches(columns).write_parquet(shards)


def trial(given):
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 64 * 64, given["classes"])
    optimizer = torch.optim.SGD(model.parameters(), given["lr"])
    with DataLoader(
        given["shards"], batch_size=given["batch"], shuffle=True, seed=7,
        transforms={"jpg": [RandomResizedCrop(64)]}, sharing="sweep", service=given["service"],
    ) as loader:  # fmt: skip
        for _ in range(given["epochs"]):
            rows, total = 0, 0.0
            for batch in loader:
                pixels = batch["jpg"].float().flatten(1) / 255
                loss = torch.nn.functional.cross_entropy(model(pixels), batch["label"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rows, total = rows + len(pixels), total + loss.item() * len(pixels)
            tune.report({"loss": total / rows, "rows": rows})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("photos")
    parser.add_argument("shards")
    parser.add_argument("--lr", nargs="+", type=float, default=[0.1, 0.03, 0.01, 0.003])
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="of a trial")
    parser.add_argument("--storage", help="a folder or url for results")
    parser.add_argument("--environ", nargs="*", default=[], help="NAME=VALUE for nodes")
    given = parser.parse_args()
    ray.init()
    convert(given.photos, given.shards)
    nodes = start_nodes(environ=dict(pair.split("=", 1) for pair in given.environ))
    space = {**vars(given), "service": nodes.service, "lr": tune.grid_search(given.lr)}
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": given.cpus}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=given.storage),
    )
    results = tuner.fit()
    nodes.close()
    for result in results:
        shown = {"lr": result.config["lr"], "loss": result.metrics["loss"]}
        print(json.dumps(shown | {"rows": result.metrics["rows"]}), flush=True)
    print(f"best: lr={results.get_best_result('loss', 'min').config['lr']}", flush=True)


if __name__ == "__main__":
    main()
