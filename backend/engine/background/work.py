"""Commands to background jobs of a decoder."""

from typing import assert_never

from backend.core.classification import ClassifyRequest
from backend.core.embedding import EmbeddingRequest
from backend.core.scoring import JudgeRequest, ScoreRequest
from backend.engine.background.embedder import Embedder
from backend.engine.background.jobs import BackgroundJobs, Job
from backend.engine.background.scorer import Scorer
from backend.engine.messages.commands import BackgroundRequest
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
        """Create a factory.

        Args:
            model: Computes the jobs.
            fresh_caches: Makes its caches.
            prefixes: Stores prefixes that were computed before.
            jobs: The queue of the jobs; gives the number of tokens of the next pass.
        """
        self._embedder = Embedder(model, fresh_caches, jobs)
        self._scorer = Scorer(model, fresh_caches, prefixes, jobs.chunk_size)

    def make(self, number: int, request: BackgroundRequest) -> Job:
        """Return the job of a request; nothing is computed yet."""
        match request:
            case ScoreRequest():
                return self._scorer.score(request)
            case EmbeddingRequest():
                return self._embedder.embed(number, request)
            case ClassifyRequest():
                return _refuse("TokenClassify: the loaded model is no token classifier")
            case JudgeRequest():
                return _refuse("Rerank: the loaded model is no cross-encoder")
            case _:
                assert_never(request)


def _refuse(reason: str) -> Job:
    yield
    raise UnsupportedError(reason)
