"""From commands to the background jobs of a decoder."""

from typing import assert_never

from backend.core.classification import ClassifyRequest
from backend.core.embedding import EmbeddingRequest
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.engine.background.embedder import Embedder
from backend.engine.background.jobs import BackgroundJobs, Job
from backend.engine.background.scorer import Scorer
from backend.engine.messages.commands import Compute
from backend.engine.passes.caches import CacheFactory
from backend.engine.prefixes.store import PrefixStore
from backend.errors import UnsupportedError
from backend.model.loaded import RunnableModel


class JobFactory:
    """Makes the jobs of one loaded decoder; belongs to the main thread."""

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: CacheFactory,
        prefixes: PrefixStore,
        jobs: BackgroundJobs,
    ) -> None:
        """Take the parts that jobs compute with.

        Args:
            model: Computes the jobs.
            fresh_caches: Makes its caches.
            prefixes: Stores prefixes that were computed before.
            jobs: Where the jobs will run: tells how many tokens the next pass takes.
        """
        self._embedder = Embedder(model, fresh_caches, jobs)
        self._scorer = Scorer(model, fresh_caches, prefixes, jobs.chunk_size)

    def make(self, command: Compute) -> Job:
        """Return the job of a command; nothing of it is computed yet."""
        match command.request:
            case ScoreRequest() as request:
                return self._scorer.score(request)
            case EmbeddingRequest() as request:
                return self._embedder.embed(request, command.reply)
            case ClassifyRequest():
                return _refuse("TokenClassify: the loaded model is no token classifier")
            case JudgeRequest():
                return _refuse("Rerank: the loaded model is no cross-encoder")
            case _:
                assert_never(command.request)


def _refuse(reason: str) -> Job:
    yield
    raise UnsupportedError(reason)
