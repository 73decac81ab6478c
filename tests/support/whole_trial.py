"""A trial of batches, computed at once."""

from typing import Any


class WholeTrial:
    """Answers as `BatchTrial` does, in one piece."""

    def __init__(self, *given: Any, **options: Any) -> None:
        from backend.engine.trials.batch_check import BatchTrial
        from backend.engine.trials.trial_steps import at_once

        self._trial = BatchTrial(*given, **options)
        self._at_once = at_once
        at_once(self._trial.prefill())

    def fault(self, *given: Any, **options: Any) -> str | None:
        return self._at_once(self._trial.fault(*given, **options))

    def ragged_fault(self, *given: Any) -> str | None:
        return self._at_once(self._trial.ragged_fault(*given))

    @property
    def keeps_positions(self) -> bool:
        return self._trial.keeps_positions
