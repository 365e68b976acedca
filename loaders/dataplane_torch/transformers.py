"""A callback with which the Trainer of transformers resumes a loader from its checkpoints."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from dataplane.model.errors import ConfigError
from dataplane_torch.accelerate import EPOCH_KEY

_NAME = "LoaderState"


class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Save the state of a Trainer's loader in trainer_state.json of every checkpoint.
    train(resume_from_checkpoint=…) continues from that state, without reading consumed samples
    again.

        class MyTrainer(Trainer):
            def get_train_dataloader(self):
                return prepare(self.accelerator, super().get_train_dataloader())

        MyTrainer(…, callbacks=[LoaderState()]).train(resume_from_checkpoint=True)

    The callback sets `ignore_data_skip`, so that the Trainer does not skip batches itself. The file
    trainer_state.json is JSON, so the states of your own datasets and samplers must be JSON values.

    Raises:  ConfigError: the loader or the checkpoint has no loader state; the state is in the
    middle of an epoch whose batch count is not a multiple of gradient_accumulation_steps; or epochs
    had another number of steps when the checkpoint was saved: the Trainer counts epochs by steps.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._epochs_ahead = 0.0
        self._accumulation = 1

    def state(self) -> dict[str, Any]:
        """Return the value that transformers saves."""
        if self._loader is None:
            return {"args": {}, "attributes": {"saved": None}}
        saved = {"saved": self._loader.state_dict(), "epoch_steps": self._epoch_steps()}
        return {"args": {}, "attributes": saved}

    def on_init_end(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Leave skipping to the loader."""
        args.ignore_data_skip = True

    def on_train_begin(
        self, args: Any, state: Any, _control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Resume the loader from the checkpoint."""
        if not hasattr(train_dataloader, "load_state_dict"):
            raise ConfigError(
                "the Trainer's loader has no state: return dataplane_torch.accelerate.prepare("
                "self.accelerator, loader) from get_train_dataloader()",
                field="get_train_dataloader",
            )
        self._loader, self._epochs_ahead = train_dataloader, 0.0
        self._accumulation = args.gradient_accumulation_steps
        if not state.global_step:
            return
        told = state.stateful_callbacks.get(_NAME)
        saved = (told[0] if isinstance(told, list) else told or {}).get("attributes", {})
        if saved.get("saved") is None:
            raise ConfigError(
                "this checkpoint has no loader state: it was saved without LoaderState()",
                field="resume_from_checkpoint",
            )
        self._check_epochs(saved, state.global_step)
        self._go_on(saved["saved"], args.gradient_accumulation_steps, state)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Correct the Trainer's epoch, which counts only the steps since it resumed."""
        state.epoch += self._epochs_ahead

    def on_epoch_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Stop correcting: the next epoch starts at its beginning."""
        self._epochs_ahead = 0.0

    def _epoch_steps(self) -> int | None:
        """Return the Trainer's steps of an epoch; None if the loader has no length."""
        try:
            batch_count = len(self._loader)
        except TypeError:
            return None
        return max(1, -(-batch_count // self._accumulation))

    def _check_epochs(self, saved: dict[str, Any], global_step: int) -> None:
        """Check that the Trainer, which computes the epoch from its steps and the present steps per
        epoch, continues in the epoch of the loader, and ends the run where that ends.

        Raises:  ConfigError: epochs had another number of steps when the state was saved.
        """
        now = self._epoch_steps()
        before, epoch = saved.get("epoch_steps", now), saved["saved"].get(EPOCH_KEY)
        if now is None or before is None:
            return
        if before == now and epoch in (None, global_step // now):
            return
        reason = f"epochs had {before} steps when this checkpoint was saved, and have {now} now"
        if before == now:
            at = f"{global_step // now} epochs of {now} steps"
            reason = f"this checkpoint is of epoch {epoch}, and its {global_step} steps are {at}"
        raise ConfigError(
            f"{reason}: the Trainer counts epochs by steps, so it would leave samples out or read "
            "some again. Resume with the ranks, batch size, end and gradient_accumulation_steps "
            "of that run",
            field="resume_from_checkpoint",
        )

    def _go_on(self, saved: dict[str, Any], accumulation: int, state: Any) -> None:
        batch_count = len(self._loader)
        done = state.global_step % -(-batch_count // accumulation) * accumulation
        if done and batch_count % accumulation:
            raise ConfigError(
                f"an epoch has {batch_count} batches, which is not a multiple of "
                f"gradient_accumulation_steps={accumulation}: the Trainer would skip the last step "
                "of an epoch that it resumes. Drop the remainder (drop_last), or save at "
                "epoch ends",
                field="gradient_accumulation_steps",
            )
        self._loader.load_state_dict(saved)
        self._epochs_ahead = done / batch_count
