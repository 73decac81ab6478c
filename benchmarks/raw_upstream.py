"""mlx-lm's prompt cache, used as in its server: `python -m benchmarks.raw_upstream`.

Reads a JSON object: a model's directory and the turns of a conversation. It answers with the
content of the store after the last one.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load_model

from backend.engine.plan import Caches, Decoder

MODEL_KEY = "model"


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt.

    Attributes:
        segments: Its tokens, split where the server splits: after the system prompt, and only if
            a user spoke last.
        new_tokens: The number of generated tokens.
    """

    segments: Sequence[Sequence[int]]
    new_tokens: int

    @property
    def prompt(self) -> list[int]:
        """All tokens."""
        return [token_id for segment in self.segments for token_id in segment]

    def rest(self, known: int) -> list[list[int]]:
        """Return the segments without their first `known` tokens."""
        left = []
        for segment in self.segments:
            if len(segment) > known:
                left.append(list(segment[known:]))
            known = max(known - len(segment), 0)
        return left


@dataclass(frozen=True, slots=True)
class Holdings:
    """The content of the store.

    Attributes:
        reused_tokens: Of each prompt.
    """

    stored_bytes: int
    entries: int
    reused_tokens: Sequence[int]


class UpstreamServer:
    """The part of `mlx_lm.server` that serves requests one by one from a prompt cache."""

    def __init__(self, network: Decoder) -> None:
        self._generator = BatchGenerator(network)
        self._store = LRUPromptCache()
        self._reused_tokens: list[int] = []

    @property
    def holdings(self) -> Holdings:
        """The present content."""
        return Holdings(self._store.nbytes, len(self._store), tuple(self._reused_tokens))

    def serve(self, turn: Turn) -> None:
        """Generate a reply, and store as the server does."""
        caches, rest = self._store.fetch_nearest_cache(MODEL_KEY, turn.prompt)
        reused = len(turn.prompt) - len(rest)
        self._reused_tokens.append(reused)
        segments = turn.rest(reused)
        kinds = ["system", "user"][-len(segments) :] if len(turn.segments) > 1 else ["assistant"]
        (uid,) = self._generator.insert_segments(
            [segments], [turn.new_tokens], [caches], [turn.prompt[:reused]]
        )
        while not self._step(uid, kinds):
            pass

    def _step(self, uid: int, kinds: list[str]) -> bool:
        """Compute a step, and tell whether the reply has ended."""
        progress, replies = self._generator.next()
        for step in progress:
            if step.end_of_segment and not step.end_of_prompt and kinds:
                caches, token_ids = self._generator.extract_cache([uid])[uid]
                self._insert(token_ids, caches, kinds.pop(0))
        for reply in replies:
            if reply.finish_reason is not None:
                self._insert(reply.all_tokens, reply.prompt_cache, "assistant")
                return True
        return False

    def _insert(self, token_ids: Sequence[int], caches: Caches, kind: str) -> None:
        self._store.insert_cache(MODEL_KEY, list(token_ids), caches, cache_type=kind)


def main() -> None:
    """Serve the turns from standard input."""
    question = json.load(sys.stdin)
    network, _ = load_model(Path(question["directory"]))
    server = UpstreamServer(network)
    for turn in question["turns"]:
        server.serve(Turn(**turn))
    json.dump(asdict(server.holdings), sys.stdout)


if __name__ == "__main__":
    main()
