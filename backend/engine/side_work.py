"""Turn commands for work beside generation into jobs for the loaded model."""

from functools import cached_property
from typing import assert_never

from backend.core.embedding import EmbeddingRequest
from backend.engine.command import Embed, Score
from backend.engine.embedding import embed
from backend.engine.hidden_states import find_decoder
from backend.engine.keeper import Keeper
from backend.engine.network import FreshCaches, Network
from backend.engine.scoring import Scorer
from backend.engine.side_jobs import ChunkSize, SideWork
from backend.errors import UnsupportedError
from backend.model.loaded import RunnableModel


class SideWorkFactory:
    """Makes jobs for one loaded model; belongs to the engine thread."""

    def __init__(
        self,
        model: RunnableModel,
        fresh_caches: FreshCaches,
        keeper: Keeper,
        chunk_size: ChunkSize,
    ) -> None:
        """Prepare.

        Args:
            model: Computes the jobs.
            fresh_caches: Makes its caches.
            keeper: Knows prefixes that were computed before.
            chunk_size: Says how many tokens the next pass takes.
        """
        self._model = model
        self._fresh_caches = fresh_caches
        self._chunk_size = chunk_size
        self._scorer = Scorer(model.network, fresh_caches, keeper, chunk_size)

    def make(self, command: Score | Embed) -> SideWork:
        """Return the job; nothing of it is computed yet."""
        match command:
            case Score(request):
                return self._scorer.score(request)
            case Embed(request):
                return self._embed(request)
            case _:
                assert_never(command)

    def _embed(self, request: EmbeddingRequest) -> SideWork:
        # Inside the generator: a model without hidden states fails the job, not the command.
        if self._decoder is None:
            kind = self._model.card.model_type
            raise UnsupportedError(f"Embedding: the code of {kind} gives no hidden states")
        return (yield from embed(request, self._decoder, self._fresh_caches, self._chunk_size))

    @cached_property
    def _decoder(self) -> Network | None:
        return find_decoder(self._model.network, self._fresh_caches, self._model.card.vocab_size)
