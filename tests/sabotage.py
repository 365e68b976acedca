"""Real processes in which one of our functions raises once, when a test says so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Python imports this module at its start from PYTHONPATH. Only the processes that have the target's
# module in them anyway are touched: nodes and services, no workers and no trainers.
_SITE = """
import functools, importlib, os, sys
from pathlib import Path

def spoil(target, trigger):
    module, _, name = target.partition(":")
    cls, _, name = name.partition(".")
    owner = getattr(importlib.import_module(module), cls)
    sound = getattr(owner, name)

    @functools.wraps(sound)
    def spoilt(*arguments, **named):
        if trigger.exists():
            trigger.unlink()
            raise RuntimeError("Set changed size during iteration")
        return sound(*arguments, **named)

    setattr(owner, name, spoilt)

if {"--listener-fd", "serve"} & set(sys.orig_argv):
    spoil(os.environ["SABOTAGE_TARGET"], Path(os.environ["SABOTAGE_TRIGGER"]))
"""


@dataclass(frozen=True, slots=True)
class Sabotage:
    """`environ` is for the processes; `strike` has the next call of the target raise."""

    environ: dict[str, str]
    trigger: Path

    def strike(self) -> None:
        self.trigger.touch()


def sabotage(folder: Path, target: str) -> Sabotage:
    """Of `target`, a method as "package.module:Class.method"."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    trigger = folder / "strike"
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    environ = {"PYTHONPATH": path, "SABOTAGE_TARGET": target, "SABOTAGE_TRIGGER": str(trigger)}
    return Sabotage(environ, trigger)
