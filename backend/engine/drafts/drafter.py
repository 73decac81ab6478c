"""The drafts of one row, from all of its sources."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from backend.engine.drafts.lookup import Lookup
from backend.engine.drafts.trust import Trust
from backend.engine.rows.row import Row

_SURE_MATCH_TOKENS = 8


class Source(Enum):
    """Where a draft comes from.

    Attributes:
        FORCED: The grammar of the reply allows one text only.
        MATCH: The latest few tokens stood in the row's text before.
        LONG_MATCH: Many of the latest tokens did.
    """

    FORCED = "forced"
    MATCH = "match"
    LONG_MATCH = "long match"


# That a drafted token is right, until the source has shown how often it is.
FIRST_CHANCES = {Source.FORCED: 0.9, Source.MATCH: 0.5, Source.LONG_MATCH: 0.8}


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        source: Where they come from.
        trust: In this source, for this row.
    """

    tokens: tuple[int, ...]
    source: Source
    trust: Trust


class Drafter:
    """Drafts of a row while it is in a batch."""

    def __init__(
        self, row: Row, vocab_size: int, chances: Mapping[Source, float], *, forces: bool
    ) -> None:
        """Take a row with what it has said.

        Args:
            row: One that has a token of its reply.
            vocab_size: Ids beyond it stand for media, and are never drafted.
            chances: That a token of each source is right, from other rows.
            forces: Whether what a grammar forces is drafted.
        """
        self.row = row
        self._vocab_size = vocab_size
        self._forces = forces
        self._lookup = Lookup(row.token_ids)
        self._trusts = {source: Trust(chance) for source, chance in chances.items()}
        spans = row.request.prompt.media
        # What ends a reply saves no pass, and a matcher cannot go back behind it.
        self._never = {row.token_ids[span.start] for span in spans} | row.request.stop_token_ids

    def may_draft(self, *, tries: bool) -> bool:
        """Tell whether there would be a draft, before the latest token is read.

        Args:
            tries: Whether there is time for one that did not pay of late.
        """
        if self._room <= 0:
            return False
        matcher = self.row.matcher if self._forces else None
        may_force = matcher is not None and self._is_worth_it(Source.FORCED, tries=tries)
        # The first of them is the one in flight.
        if matcher and may_force and matcher.may_force and len(matcher.forced()) > 1:
            return True
        tokens, matched = self._lookup.follow(1)
        return bool(tokens) and self._is_worth_it(_kind(matched), tries=tries)

    def propose(self, limit: int) -> Draft | None:
        """Return at most `limit` tokens that may come next, if any source knows some."""
        limit = min(limit, self._room)
        if limit <= 0:
            return None
        matcher = self.row.matcher
        if matcher is not None and self._forces and (forced := matcher.forced()):
            return self._draft(forced[:limit], Source.FORCED)
        tokens, matched = self._lookup.follow(limit)
        if matcher is not None:
            tokens = tokens[: matcher.count_allowed(tokens)]
        return self._draft(tokens, _kind(matched))

    @property
    def _room(self) -> int:
        """How many tokens may be drafted before the one that is drawn after them is the last."""
        row = self.row
        return row.request.max_tokens - row.drawn - 1 if row.generated else 0

    def _is_worth_it(self, source: Source, *, tries: bool) -> bool:
        trust = self._trusts[source]
        return trust.pays or (tries and trust.wants_trial(self.row.drawn))

    def _draft(self, tokens: list[int], source: Source) -> Draft | None:
        usable = 0
        for token_id in tokens:
            if token_id >= self._vocab_size or token_id in self._never:
                break
            usable += 1
        return Draft(tuple(tokens[:usable]), source, self._trusts[source]) if usable else None


def _kind(matched: int) -> Source:
    return Source.LONG_MATCH if matched >= _SURE_MATCH_TOKENS else Source.MATCH
