"""The demo's training script, which torchrun starts once per rank.

    torchrun --nproc-per-node 2 -m dataplane_bench.demo.train RUN.json

Dataplane requires only a different import, and a loader state in the checkpoint. The rest is an
ordinary training script, which also records evidence: the samples that it received.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dataplane_torch import DataLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from dataplane_bench.demo.journal import JournalWriter, Run, Step, row_sums
from dataplane_bench.processes import die_with_parent

VOCABULARY = 256


class Layer(nn.Module):
    """Causal attention, then a feed-forward network, each on normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_net = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shapes:  x, result: float32[batch, length, width]."""
        batch, length, width = x.shape
        mixed = self.attention_in(self.before_attention(x))
        split = mixed.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.net(self.before_net(x))
        return result


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, context: int, width: int = 64, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        nn.init.normal_(self.token.weight, std=0.02)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes:  tokens: int[batch, length], length <= context.
        result: float32[batch, length, VOCABULARY], logits.
        """
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        result: Tensor = self.out(self.layers(x))
        return result


DIST_TIMEOUT = timedelta(seconds=60)


class Trainer:
    """One rank: model, optimizer, loader, and the evidence of this run.

    On rank 0, `kept` holds (id, checksum) of every sample that the run received, in global order.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(run.seed)
        self.model = DistributedDataParallel(ByteTransformer(run.context))
        self.optimiser = AdamW(self.model.parameters(), lr=run.learning_rate)
        self.loader = DataLoader(
            run.url,
            global_batch_size=run.global_batch,
            shuffle=True,
            seed=run.seed,
            columns=["id", "tokens"],
            service=run.service,
            name="train",
        )
        self.step = 0
        self.kept: list[Tensor] = []
        self._fresh: list[Tensor] = []
        if run.resume:
            self._load(torch.load(run.checkpoint, weights_only=True))

    def train(self, journal: JournalWriter) -> None:
        """Train to the end of the epoch."""
        batches = iter(self.loader)
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            wait_s = time.monotonic() - began
            if batch is None:
                break
            loss = self._learn(batch["tokens"])
            self._fresh.append(_evidence(batch))
            self.step += 1
            saved = self.step % self.run.checkpoint_every == 0
            if saved:
                self._save()
            step_s, batch_bytes = time.monotonic() - began, sum(x.nbytes for x in batch.values())
            ids = tuple(batch["id"].tolist())
            journal.write(Step(self.step, loss, ids, batch_bytes, step_s, wait_s, saved))
        self._save()

    def close(self) -> None:
        self.loader.close()

    def _learn(self, tokens: Tensor) -> float:
        """Make one step. The loss is averaged over the global batch, so that a rank with fewer
        samples has less weight.
        """
        left = self.run.sample_count - self.step * self.run.global_batch
        targets_count = min(self.run.global_batch, left) * (tokens.shape[1] - 1)
        logits = self.model(tokens[:, :-1].reshape(-1, self.run.context))
        targets = tokens[:, 1:].reshape(-1).long()
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY), targets, reduction="sum")
        loss = loss / targets_count
        # DDP divides the sum of the ranks' gradients by the number of ranks: undo that.
        (loss * self.world_size).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        everywhere = loss.detach()
        dist.all_reduce(everywhere)
        return float(everywhere)

    def _save(self) -> None:
        """Save a checkpoint: rank 0 writes one file, which appears whole or not at all."""
        self._gather()
        if self.rank != 0:
            return
        saved = {
            "model": self.model.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "loader": self.loader.state_dict(),
            "step": self.step,
            "kept": torch.cat(self.kept) if self.kept else torch.empty(0, 2, dtype=torch.int64),
        }
        unfinished = self.run.checkpoint.with_suffix(".new")
        torch.save(saved, unfinished)
        unfinished.replace(self.run.checkpoint)

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.model.module.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.loader.load_state_dict(saved["loader"])
        self.step = saved["step"]
        self.kept = [saved["kept"]]

    def _gather(self) -> None:
        """Gather the evidence of all ranks since the last checkpoint, in global order.

        In each step, a rank's j-th sample is at position j * world_size + rank.
        """
        if not self._fresh:
            return
        rows = -(-self.run.global_batch // self.world_size)
        mine = torch.full((len(self._fresh), rows, 2), -1, dtype=torch.int64)
        for place, evidence in zip(mine, self._fresh, strict=True):
            place[: len(evidence)] = evidence
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        in_order = torch.stack(everyone, dim=2).reshape(-1, 2)
        self.kept.append(in_order[in_order[:, 0] >= 0])
        self._fresh = []


def _evidence(batch: Mapping[str, Any]) -> Tensor:
    """Shapes:  result: int64[rows, 2], id and checksum."""
    sums = row_sums(np.asarray(batch["tokens"]))
    return torch.stack([batch["id"].clone(), torch.from_numpy(sums)], dim=1)


def main(arguments: list[str]) -> int:
    """Exit status 0: the epoch is done."""
    die_with_parent()
    run = Run.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=DIST_TIMEOUT)
    journal = JournalWriter(run.journal(dist.get_rank()))
    trainer = Trainer(run)
    try:
        trainer.train(journal)
        dist.barrier()
    finally:
        journal.close()
        trainer.close()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
