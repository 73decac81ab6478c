"""The drafts of one row, from its grammar, its own text and a draft model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from backend.engine.drafts.pricing import Leave, Source, Trust
from backend.engine.rows.row import Row

# A shorter match is not worth a draft.
MATCH_TOKENS = 3
# Matches are measured up to this length: longer ones are no more reliable.
MAX_MATCH_TOKENS = 32


@dataclass(eq=False, slots=True)
class Lookup:
    """An index of the runs of tokens in one text, which may grow at the end.

    Attributes:
        tokens: The row's live list; only tokens added later are read again.
    """

    tokens: Sequence[int]
    _indexed: int = 0
    _latest: dict[tuple[int, ...], int] = field(default_factory=dict)

    def follow(self, limit: int) -> tuple[list[int], int]:
        """Return up to `limit` tokens that may come next, and how many tokens matched.

        The last earlier occurrence of the latest tokens counts. A text that repeats itself up to
        its end is continued in a loop.
        """
        tokens = self.tokens
        if len(tokens) > self._indexed:
            self._catch_up()
        end = len(tokens)
        place = self._latest.get(tuple(tokens[end - MATCH_TOKENS :]))
        if place is None or limit <= 0:
            return [], 0
        period = end - place
        found = [tokens[place + n % period] for n in range(limit)]
        return found, self._match_length(place, end)

    def _catch_up(self) -> None:
        """Index the runs that end before the last token: the last run is the query."""
        tokens, latest = self.tokens, self._latest
        for end in range(max(self._indexed, MATCH_TOKENS), len(tokens)):
            latest[tuple(tokens[end - MATCH_TOKENS : end])] = end
        self._indexed = max(self._indexed, len(tokens))

    def _match_length(self, place: int, end: int) -> int:
        """Return how many tokens before two positions are equal."""
        tokens = self.tokens
        length = MATCH_TOKENS
        most = min(place, MAX_MATCH_TOKENS)
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length


_SURE_MATCH_TOKENS = 8
# A less likely match is not worth waiting for the token in flight.
_LEAST_CHANCE = 0.3


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        is_cut: Whether one more token was drafted that cannot be right.
    """

    tokens: tuple[int, ...]
    source: Source
    trust: Trust
    is_cut: bool = False


class _Foreseen(NamedTuple):
    """A prediction of the token in flight from the row's text, and its position in the text."""

    token_id: int
    place: int
    trust: Trust


class Drafter:
    """Writes the drafts of a row while it is in a batch."""

    def __init__(self, row: Row, vocab_size: int, chances: Mapping[Source, float]) -> None:
        """Start with the text of a row.

        Args:
            row: A row with at least one token of its reply.
            vocab_size: Ids from here on stand for media, and are never drafted.
            chances: For each source, the chance that a token is right, from other rows. Sources
                not listed do not draft.
        """
        self.row = row
        self._vocab_size = vocab_size
        self._lookup = Lookup(row.token_ids)
        self._trusts = {source: Trust(chance) for source, chance in chances.items()}
        self._foreseen: _Foreseen | None = None
        spans = row.request.prompt.media
        # A token that ends the reply saves no pass, and a matcher cannot go back past it.
        self._never = {row.token_ids[span.start] for span in spans} | row.request.stop_token_ids

    def likely(self, leave: Leave) -> Source | None:
        """Return the source of a likely draft, before the latest token is read, if there is one."""
        if self._room <= 0:
            return None
        if Source.MODEL in self._trusts and self._is_worth_it(Source.MODEL, leave):
            return Source.MODEL
        has_grammar = self.row.request.grammar is not None
        is_worth_it = has_grammar and self._is_worth_it(Source.FORCED, leave)
        matcher = self.row.matcher if is_worth_it else None
        # The first forced token is the one in flight.
        if matcher and matcher.may_force and len(self._forced(leave)) > 1:
            return Source.FORCED
        return self._foretold(leave)

    def _foretold(self, leave: Leave) -> Source | None:
        """Return the source if the row's text predicts the token in flight, and so those after."""
        tokens, matched = self._lookup.follow(1)
        if not tokens:
            return None
        source = _kind(matched)
        if not self._is_worth_it(source, leave):
            return None
        self._foreseen = _Foreseen(tokens[0], len(self.row.token_ids), self._trusts[source])
        return source

    def propose(self, limit: int, leave: Leave) -> Draft | None:
        """Return at most `limit` tokens that may come next, from the row's grammar or text.

        Args:
            limit: At least 0.
            leave: If forced text does not pay, the row's text may predict better how the model
                spells it.
        """
        self._check_foreseen()
        limit = min(limit, self._room)
        if limit <= 0:
            return None
        if forced := self._forced(leave):
            return self._draft(forced[:limit], Source.FORCED)
        tokens, matched = self._lookup.follow(limit)
        if _kind(matched) not in self._trusts or _kind(matched) not in leave.drafts:
            return None
        matcher = self.row.matcher
        allowed = len(tokens) if matcher is None else matcher.count_allowed(tokens)
        return self._draft(tokens[:allowed], _kind(matched))

    def _forced(self, leave: Leave) -> list[int]:
        """Return the tokens that the grammar forces, if they are worth a draft."""
        if self.row.request.grammar is None or not self._is_worth_it(Source.FORCED, leave):
            return []
        matcher = self.row.matcher
        return matcher.forced() if matcher else []

    def _check_foreseen(self) -> None:
        """Learn from a wrong prediction, for which the whole batch waited."""
        foreseen, self._foreseen = self._foreseen, None
        row = self.row
        if foreseen is None or foreseen.place != len(row.token_ids) - 1:
            return
        if row.token_ids[-1] != foreseen.token_id:
            foreseen.trust.learn(1, 0, row.drawn)
            if foreseen.trust.chance < _LEAST_CHANCE:
                foreseen.trust.rest(row.drawn)

    @property
    def model_trust(self) -> Trust:
        """The trust in the draft model's drafts for the row."""
        return self._trusts[Source.MODEL]

    def writable(self, limit: int, found: Draft | None, leave: Leave) -> int:
        """Return how many tokens a draft model may write; 0 if a better draft was found."""
        trust = self._trusts.get(Source.MODEL)
        if trust is None or Source.MODEL not in leave.drafts:
            return 0
        if found and (found.source is not Source.MATCH or found.trust.chance >= trust.chance):
            return 0
        return max(min(limit, self._room), 0)

    def written(self, tokens: Sequence[int]) -> Draft:
        """Return a draft model's draft, up to the first token that cannot be right."""
        # Other rows of the pass may have room for more.
        tokens, matcher = tokens[: self._room], self.row.matcher
        allowed = len(tokens) if matcher is None else matcher.count_allowed(tokens)
        usable = self._usable(tokens[:allowed])
        # A token that ends the reply may be right, but is not fed.
        is_cut = usable == 0 or usable == allowed < len(tokens)
        return Draft(tuple(tokens[:usable]), Source.MODEL, self.model_trust, is_cut)

    def leave_out(self, source: Source) -> None:
        """Disable a source."""
        self._trusts.pop(source, None)

    @property
    def _room(self) -> int:
        """The most tokens that may be drafted, with one left to draw after them."""
        row = self.row
        has_begun = len(row.token_ids) > row.prompt_tokens
        left = row.max_tokens - row.drawn - 1 if has_begun else 0
        most = row.params.max_draft_tokens
        return left if most is None else min(left, most)

    def _is_worth_it(self, source: Source, leave: Leave) -> bool:
        trust = self._trusts.get(source)
        if trust is None or source not in leave.drafts:
            return False
        return trust.pays or (source in leave.trials and trust.wants_trial(self.row.drawn))

    def _draft(self, tokens: Sequence[int], source: Source) -> Draft | None:
        usable = self._usable(tokens)
        return Draft(tuple(tokens[:usable]), source, self._trusts[source]) if usable else None

    def _usable(self, tokens: Sequence[int]) -> int:
        """Return how many tokens come before the first that may not be drafted."""
        return next(
            (n for n, t in enumerate(tokens) if t >= self._vocab_size or t in self._never),
            len(tokens),
        )


def _kind(matched: int) -> Source:
    return Source.LONG_MATCH if matched >= _SURE_MATCH_TOKENS else Source.MATCH
