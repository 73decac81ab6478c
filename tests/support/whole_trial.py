"""Trials of a model, computed at once."""

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


def batch_plan(*given: Any, drafts: bool = False, **options: Any) -> Any:
    """Return the result of `planning`; the other arguments are those of `BatchTrial`."""
    from backend.engine.findings import Page
    from backend.engine.trials.batch_check import BatchTrial, planning
    from backend.engine.trials.trial_steps import at_once

    return at_once(planning(BatchTrial(*given, **options), Page(), drafts=drafts))


def measure(network: Any, fresh_caches: Any) -> Any:
    """Return the memory of one sequence's caches, from a pass of two tokens that is computed."""
    import mlx.core as mx

    from backend.engine.trials.pass_costs import profile_of

    caches = fresh_caches()
    mx.eval(network(mx.array([(0, 1)]), cache=caches), [cache.state for cache in caches])
    return profile_of(caches)
