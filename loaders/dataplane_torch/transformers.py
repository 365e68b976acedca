"""A callback with which the Trainer of transformers resumes a loader from its checkpoints."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from dataplane.errors import ConfigError

_NAME = "LoaderState"


class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves the state of a Trainer's loader in trainer_state.json of every checkpoint.
    train(resume_from_checkpoint=…) continues from it, without reading consumed samples again.

        class MyTrainer(Trainer):
            def get_train_dataloader(self):
                return prepare(self.accelerator, super().get_train_dataloader())

        MyTrainer(…, callbacks=[LoaderState()]).train(resume_from_checkpoint=True)

    It sets `ignore_data_skip`, so that the Trainer does not skip batches itself. That file is JSON,
    so the states of your own datasets and samplers must be plain JSON values.

    Raises:  ConfigError: the loader or the checkpoint has no loader state; or the state is in the
    middle of an epoch whose batch count is not a multiple of gradient_accumulation_steps.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._epochs_ahead = 0.0

    def state(self) -> dict[str, Any]:
        """The value that transformers saves."""
        state = None if self._loader is None else self._loader.state_dict()
        return {"args": {}, "attributes": {"saved": state}}

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
        if not state.global_step:
            return
        told = state.stateful_callbacks.get(_NAME)
        saved = (told[0] if isinstance(told, list) else told or {}).get("attributes", {})
        if saved.get("saved") is None:
            raise ConfigError(
                "this checkpoint has no loader state: it was saved without LoaderState()",
                field="resume_from_checkpoint",
            )
        self._go_on(saved["saved"], args.gradient_accumulation_steps, state)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Correct the Trainer's epoch, which counts only the steps since it resumed."""
        state.epoch += self._epochs_ahead

    def on_epoch_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Stop correcting: the next epoch starts at its beginning."""
        self._epochs_ahead = 0.0

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
