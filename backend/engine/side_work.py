"""Turn commands for work beside generation into jobs for the loaded model."""

from typing import assert_never

from backend.engine.command import Embed, Judge, Score, SideCommand
from backend.engine.embedding import Embedder
from backend.engine.keeper import Keeper
from backend.engine.network import FreshCaches
from backend.engine.scoring import Scorer
from backend.engine.side_jobs import SideJobs, SideWork
from backend.errors import UnsupportedError
from backend.model.loaded import RunnableModel


class SideWorkFactory:
    """Makes jobs for one loaded model; belongs to the engine thread."""

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: FreshCaches,
        keeper: Keeper,
        jobs: SideJobs,
    ) -> None:
        """Prepare.

        Args:
            model: Computes the jobs.
            fresh_caches: Makes its caches.
            keeper: Knows prefixes that were computed before.
            jobs: Where the jobs will run: tells how many tokens the next pass takes.
        """
        self._embedder = Embedder(model, fresh_caches, jobs)
        self._scorer = Scorer(model, fresh_caches, keeper, jobs.chunk_size)

    def make(self, command: SideCommand) -> SideWork:
        """Return the job; nothing of it is computed yet."""
        match command:
            case Score(request):
                return self._scorer.score(request)
            case Embed():
                return self._embedder.embed(command)
            case Judge():
                return self._refuse("Rerank: the loaded model is no cross-encoder")
            case _:
                assert_never(command)

    @staticmethod
    def _refuse(reason: str) -> SideWork:
        yield
        raise UnsupportedError(reason)
