"""How each family of decision models is asked, and how its outputs become probabilities."""

import json
import math
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from typing import ClassVar, TypeAlias

from backend.config import MAX_TOKEN_IDS
from backend.core.prompt import JsonValue, Prompt
from backend.core.request import new_id
from backend.core.scoring import (
    DecideRequest,
    Decision,
    DecisionProfile,
    QuestionType,
    ScoreRequest,
    Scores,
)
from backend.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from backend.model.text.prefix import common_length
from backend.pipeline.served_model import ServedModel, require_fit

CHOICE, SCORE, BOOL = QuestionType.CHOICE, QuestionType.SCORE, QuestionType.BOOL
# The answers to a statement, in the order of readings.
STATEMENT = ("false", "true")
# Names of types of questions in training.
_NAMES = {CHOICE: "choice", SCORE: "score", BOOL: "noul"}
_HOLDS = ("false: no, the statement does not hold", "true: yes, the statement holds")
# Numbers of options up to which a temperature is meant, by its name.
_BUCKETS = ((2, "2"), (5, "3-5"), (10, "6-10"), (math.inf, "11+"))

Request: TypeAlias = DecideRequest | ScoreRequest
Bounds: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a text, for a model.

    Attributes:
        labels: Candidates of the call; of a statement both answers, in any order.
    """

    kind: QuestionType
    asked: str
    text: str
    labels: tuple[str, ...]
    model: ServedModel

    @property
    def profile(self) -> DecisionProfile:
        """How the model answers."""
        return self.model.card.decisions or DecisionProfile()

    @property
    def count(self) -> int:
        """Its number of options."""
        return len(self.labels)

    @property
    def temperature(self) -> float:
        """The temperature for its type and number of options."""
        bucket = next(name for most, name in _BUCKETS if self.count <= most)
        return self.profile.temperature(self.kind, bucket)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text that contains guards."""
        return self.model.tokenizer.encode(text, adds_special=False)

    def guarded(self, text: str) -> str:
        """Return a text of the caller's in which nothing is a control token."""
        return self.model.guard.text(text)


@dataclass(frozen=True, slots=True)
class Reading:
    """The probabilities of labels, of a statement of `STATEMENT`, and metadata of the answer."""

    probabilities: Sequence[float]
    metadata: dict[str, JsonValue] = field(default_factory=dict)


class Form(ABC):
    """A family's way to ask.

    Attributes:
        most: Largest number of options by type of question.
        digits: Of the mean level of a score.
        sureness: Measures of probabilities by their names in the answer.
    """

    most: ClassVar[Mapping[QuestionType, int]] = {}
    digits: ClassVar[int] = 4
    sureness: ClassVar[Mapping[str, Callable[[Sequence[float]], float]]] = {"confidence": max}

    @abstractmethod
    def request(self, question: Question) -> Request:
        """Return the request to the engine; an error names the field that does not fit."""

    @abstractmethod
    def read(self, question: Question, result: Decision | Scores) -> Reading:
        """Return the answer from the engine's result."""


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return probabilities."""
    highest = max(logits)
    weights = [math.exp((each - highest) / temperature) for each in logits]
    return [each / sum(weights) for each in weights]


def evenness(probabilities: Sequence[float]) -> float:
    """Return 1 for a certain answer, and 0 for equal probabilities."""
    entropy = -sum(each * math.log(each) for each in probabilities if each > 0)
    return 1 - entropy / math.log(len(probabilities))


def _require_room(
    question: Sequence[int], options: Sequence[Sequence[int]], most: int, budget: int, least: int
) -> None:
    """Refuse tokens that the model would not read.

    Args:
        most: Of an option, with its mark.
        budget: Of all options and the question.
        least: Of these, the minimum for the question.
    """
    for i, option in enumerate(options):
        if len(option) > most:
            problem = f"takes {len(option) - 1} tokens, at most {most - 1} are read"
            raise InvalidRequestError(f"candidates[{i}]", problem)
    used = sum(map(len, options))
    if (room := budget - used) < least:
        problem = f"take {used} tokens, at most {budget - least} are read"
        raise InvalidRequestError("candidates", problem)
    _require_question(question, room)


def _require_question(question: Sequence[int], room: int) -> None:
    if len(question) > room:
        problem = f"its question takes {len(question)} tokens, {room} are left beside candidates"
        raise InvalidRequestError("prompt", problem)


def _fitting(token_ids: list[int], used: int, question: Question, most: int = 0) -> list[int]:
    """Return the tokens of a text, as many as fit if the options say so.

    Args:
        used: Tokens of the context for all else.
        most: Of the text; 0 for no such limit.
    """
    model = question.model
    limit = model.card.context_length or MAX_TOKEN_IDS
    room = min(limit - used, most or limit)
    if len(token_ids) <= room:
        return token_ids
    if room < 0 or not model.tuning.retrieval.truncate:
        if most and most <= limit - used:
            problem = f"{len(token_ids)} tokens of text are more than the {most} that are read"
            raise ContextLengthError("prompt", problem)
        count = used + len(token_ids)
        raise ContextLengthError.beyond("prompt", f"{count} tokens do not fit", limit)
    return token_ids[:room]


def _levels(question: Question) -> list[str]:
    """Return the texts of options, as Laya and d1-omni were trained."""
    if question.kind is BOOL:
        return list(_HOLDS)
    if question.kind is CHOICE:
        return list(question.labels)
    return [f"level {i}: {label}" for i, label in enumerate(question.labels)]


class Laya(Form):
    """`[CLS] question [SEP] [MASK] option ... [SEP] text [SEP]`."""

    sureness: ClassVar = {"confidence": evenness}
    _option_tokens = 48
    _least_question_tokens = 16

    def request(self, question: Question) -> DecideRequest:
        """Return the text, with a mask before each option."""
        hf, asked = question.model.tokenizer.hf, f"{_NAMES[question.kind]} question: "
        head = self._tokens(asked + question.asked, question)
        options = [
            [hf.mask_token_id, *self._tokens(f" {text}", question)] for text in _levels(question)
        ]
        limits = self._option_tokens + 1, question.profile.question_tokens
        _require_room(head, options, *limits, self._least_question_tokens)
        token_ids, marks = [hf.cls_token_id, *head, hf.sep_token_id], []
        for option in options:
            marks.append((len(token_ids), len(token_ids) + 1))
            token_ids += option
        token_ids.append(hf.sep_token_id)
        text = self._tokens(question.text, question)
        token_ids += _fitting(text, len(token_ids) + 1, question)
        return DecideRequest(
            token_ids=(*token_ids, hf.sep_token_id),
            options=tuple(marks),
            question_type=question.kind,
        )

    def read(self, question: Question, result: Decision | Scores) -> Reading:
        """Return the softmax of logits, and whether to act."""
        logits, act = _decision(result)
        metadata: dict[str, JsonValue] = {"rl_agent": {"act_probability": act}}
        return Reading(softmax(logits, question.temperature), metadata)

    @staticmethod
    def _tokens(text: str, question: Question) -> list[int]:
        """Return the tokens of a text, in which nothing is a mask or another control token."""
        mask = str(question.model.tokenizer.hf.mask_token)
        return question.tokens(question.guarded(text.replace(mask, " ")))


def _decision(result: Decision | Scores) -> tuple[Sequence[float], float | None]:
    if not isinstance(result, Decision):
        raise TypeError(f"{type(result).__name__} is no decision")
    return result.logits, result.act


class D1Omni(Form):
    """`<bos> <state> text <q> question <opt> <mask> option </opt> ... <decide>`."""

    most: ClassVar = {SCORE: 10}
    _delimiters = tuple(f"<|reserved_{i}|>" for i in range(7, 12))
    _mark = "<|mask|>"
    _per_option, _shared, _least = 24, 32, 96
    _special = re.compile(r"<\|([A-Za-z0-9_]+)\|>")

    def request(self, question: Question) -> DecideRequest:
        """Return the text, with a mask before each option."""
        state, asks, begins, ends, decides = map(self._id(question), self._delimiters)
        mask, bos = self._id(question)(self._mark), question.model.tokenizer.hf.bos_token_id
        head = [asks, *self._tokens(question.asked, question)]
        options = [self._tokens(f" {text}", question) for text in _levels(question)]
        self._require_room(head, options, question)
        used = 4 + len(head) + 3 * len(options) + sum(map(len, options))
        text = _fitting(self._tokens(question.text, question), used - 1, question)
        token_ids, marks = [bos, state, *text, *head], []
        for option in options:
            marks.append((len(token_ids) + 1, len(token_ids) + 2))
            token_ids += [begins, mask, *option, ends]
        return DecideRequest(
            token_ids=(*token_ids, decides), options=tuple(marks), question_type=question.kind
        )

    def read(self, question: Question, result: Decision | Scores) -> Reading:
        """Return the softmax of logits."""
        return Reading(softmax(_decision(result)[0], question.temperature))

    def _require_room(
        self, head: Sequence[int], options: Sequence[Sequence[int]], question: Question
    ) -> None:
        limit, count = question.model.card.context_length or MAX_TOKEN_IDS, len(options)
        budget = max(self._least, min(count * self._per_option + self._shared, limit // 2))
        most = max(2, (budget - 3 * count) // count)
        for i, option in enumerate(options):
            if len(option) > most:
                problem = f"takes {len(option)} tokens, at most {most} of {count} are read"
                raise InvalidRequestError(f"candidates[{i}]", problem)
        _require_question(head, budget)

    def _tokens(self, text: str, question: Question) -> list[int]:
        return question.tokens(question.guarded(self._special.sub(r"<¦\1¦>", text)))

    @staticmethod
    def _id(question: Question) -> Callable[[str], int]:
        # The load has checked that there are such tokens.
        return lambda text: question.model.tokenizer.token_id(text) or 0


class Clef(Form):
    """A turn of a chat with the text and a schema, whose only field is the question."""

    _head = (
        "<|im_start|>system\nRead the complete state and schema. Decide every field jointly. Each "
        "answer must be exactly one of that field's allowed options.<|im_end|>\n<|im_start|>user\n"
        "STATE:\n"
    )
    _tail = "\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
    _name = "answer"
    _holds: ClassVar = {
        "true": "The proposition is true or the answer is yes.",
        "false": "The proposition is false or the answer is no.",
    }

    def request(self, question: Question) -> DecideRequest:
        """Return the turn, and where question and options are in it."""
        tokens, kind = question.tokens, _NAMES[question.kind]
        schema = tokens("\n\nSCHEMA FIELDS:\n")
        schema += tokens(f"\nFIELD 1\nID: {self._name}\nTYPE: {kind}\nINSTRUCTION: ")
        asked = self._add(schema, tokens(question.guarded(question.asked or self._name)))
        schema += tokens("\nALLOWED OPTIONS:\n")
        options = []
        for number, option in enumerate(self._options(question), 1):
            schema += tokens(f"OPTION {number}: ")
            options.append(self._add(schema, tokens(question.guarded(option))))
            schema += tokens("\n")
        schema += tokens("END FIELD\n")
        head, tail = tokens(self._head), tokens(self._tail)
        fixed = len(head) + len(schema) + len(tail)
        text = _fitting(tokens(question.guarded(question.text)), fixed, question)
        shift = len(head) + len(text)
        return DecideRequest(
            token_ids=(*head, *text, *schema, *tail),
            options=tuple((first + shift, last + shift) for first, last in options),
            question_type=question.kind,
            question=(asked[0] + shift, asked[1] + shift),
        )

    def read(self, question: Question, result: Decision | Scores) -> Reading:
        """Return the softmax of logits, in the order of the labels."""
        found = softmax(_decision(result)[0], question.temperature)
        if question.kind is SCORE:
            return Reading(found)
        order = STATEMENT if question.kind is BOOL else question.labels
        by_label = dict(zip(self._order(question), found, strict=True))
        return Reading([by_label[label] for label in order])

    def _order(self, question: Question) -> Sequence[str]:
        return tuple(self._holds) if question.kind is BOOL else sorted(question.labels)

    def _options(self, question: Question) -> list[str]:
        described = [(label, self._holds.get(label)) for label in self._order(question)]
        if question.kind is CHOICE:
            described = [(label, None) for label, _ in described]
        if question.kind is SCORE:
            described = [(str(level), label) for level, label in enumerate(question.labels)]
        return [
            _compact({"option_id": name} | ({} if text is None else {"description": text}))
            for name, text in described
        ]

    @staticmethod
    def _add(schema: list[int], token_ids: Sequence[int]) -> Bounds:
        schema += token_ids
        return len(schema) - len(token_ids), len(schema)


def _compact(value: Mapping[str, str]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


class NextToken(Form):
    """Of a decoder: each option is a token, or several, that may come next."""

    def request(self, question: Question) -> ScoreRequest:
        """Return the prompt, and the tokens of all options."""
        prompt, boundary = self._prompt(question)
        answers = chain.from_iterable(self._answers(question))
        return _scores(question, prompt, boundary, [(each,) for each in answers])

    def read(self, question: Question, result: Decision | Scores) -> Reading:
        """Return the softmax over the likeliest token of each option."""
        found = (logprobs[-1] for logprobs in _logprobs(result))
        likeliest = [max(islice(found, len(ids))) for ids in self._answers(question)]
        return Reading(softmax(likeliest, question.temperature))

    @abstractmethod
    def _prompt(self, question: Question) -> tuple[list[int], int]:
        """Return a prompt, and the length that other questions about the same text share."""

    @abstractmethod
    def _answers(self, question: Question) -> Sequence[Sequence[int]]:
        """Return the tokens of each option."""


def _scores(
    question: Question, prompt: Sequence[int], boundary: int, rest: Sequence[Sequence[int]]
) -> ScoreRequest:
    require_fit("prompt", [*prompt, *max(rest, key=len)], question.model)
    return ScoreRequest(
        request_id=new_id(),
        prompt=Prompt(
            tuple(prompt),
            boundaries=(boundary,) if 0 < boundary < len(prompt) else (),
            scope=question.model.own_scope(),
        ),
        continuations=tuple(map(tuple, rest)),
    )


def _logprobs(result: Decision | Scores) -> Sequence[Sequence[float]]:
    if not isinstance(result, Scores):
        raise TypeError(f"{type(result).__name__} has no log-probabilities")
    return result.logprobs


def _single(question: Question, texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the texts that are single tokens, each token once."""
    seen = set()
    for text in texts:
        token_ids = question.tokens(text)
        if len(token_ids) == 1 and token_ids[0] not in seen:
            seen.add(token_ids[0])
            yield text, token_ids[0]


class D1(NextToken):
    """A turn of a chat: text, question, and codes of options, one of which is the reply."""

    most: ClassVar = {SCORE: 10}
    _asking = "{}<|im_end|>\n<|im_start|>assistant\n"
    _yes, _no = ("yes", "Yes", "YES"), ("no", "No", "NO")
    _codes = (
        *string.ascii_uppercase,
        *(f"{i:02d}" for i in range(100)),
        *string.ascii_lowercase,
        *(f"#{i}" for i in range(200)),
        *map("".join, product(string.ascii_uppercase, repeat=2)),
    )

    def _prompt(self, question: Question) -> tuple[list[int], int]:
        bos = question.model.tokenizer.hf.bos_token or ""
        text = question.guarded(question.text)
        shared = f"{bos}<|im_start|>user\n{text}\n\n\nQUESTION:\n"
        asked = self._asking.format(self._block(question))
        token_ids = question.tokens(shared + asked)
        return token_ids, common_length(question.tokens(shared), token_ids)

    def _block(self, question: Question) -> str:
        asked, labels = question.guarded(question.asked), map(question.guarded, question.labels)
        if question.kind is BOOL:
            return f"{asked}\n\nReply with yes or no only."
        if question.kind is SCORE:
            levels = "\n".join(f"{level} {label}" for level, label in enumerate(labels))
            last = question.count - 1
            return f"{asked}\n\n{levels}\n\nReply with a single digit 0-{last} only."
        codes = [code for code, _ in self._aliases(question)]
        pairs = zip(codes, labels, strict=True)
        lines = (f"{code} {label.replace('_', ' ')}" for code, label in pairs)
        listed = "\n".join(lines)
        return f"{asked}\n\nOptions:\n{listed}\n\nReply with the option code only."

    def _answers(self, question: Question) -> Sequence[Sequence[int]]:
        if question.kind is CHOICE:
            return [
                list(dict.fromkeys([token_id, *self._ids(question, [f" {code}"])]))
                for code, token_id in self._aliases(question)
            ]
        forms: list[tuple[str, ...]] = [self._no, self._yes]
        if question.kind is SCORE:
            forms = [(str(level),) for level in range(question.count)]
        groups = [self._ids(question, each) for each in forms]
        if missing := [each[0] for each, ids in zip(forms, groups, strict=True) if not ids]:
            raise UnsupportedError(f"Score: {missing[0]!r} is no single token of this model")
        return groups

    @staticmethod
    def _ids(question: Question, texts: Sequence[str]) -> list[int]:
        return [token_id for _, token_id in _single(question, texts)]

    def _aliases(self, question: Question) -> list[tuple[str, int]]:
        """Return a code of one token for each label, its own where all are letters."""
        labels = [label.strip() for label in question.labels]
        codes: Sequence[str] = [f"{i:02d}" for i in range(len(labels))]
        if all(len(label) == 1 and label.isalpha() for label in labels):
            codes = labels
        elif len(labels) <= len(string.ascii_uppercase):
            codes = string.ascii_uppercase[: len(labels)]
        found: dict[int, str] = {}
        spare = _single(question, self._codes)
        for code in codes:
            takes = chain(_single(question, [code]), spare)
            text, token_id = next(((t, i) for t, i in takes if i not in found), ("", None))
            if token_id is None:
                problem = f"holds {len(labels)} values, the model has tokens for {len(found)}"
                raise InvalidRequestError("candidates", problem)
            found[token_id] = text
        return [(code, token_id) for token_id, code in found.items()]


class Decider2(NextToken):
    """The text, the question, and lettered options, whose letter comes next."""

    most: ClassVar = {CHOICE: 255, SCORE: 10}
    digits: ClassVar = 2
    sureness: ClassVar = {"confidence": max, "certainty": lambda each: max(0.0, evenness(each))}
    _text_tokens = 32768
    # Up to so many options are tokenised together.
    _together = 10
    _names = (*string.ascii_uppercase, *map("".join, product(string.ascii_uppercase, repeat=2)))
    _level = re.compile(r"^\s*-?\d+\s*:\s*")

    def request(self, question: Question) -> ScoreRequest:
        """Return the prompt and the letters, or each level and both answers to it."""
        if not question.asked:
            raise InvalidRequestError("stable_prefix_len", "is 0: this model needs a question")
        if not self._isolates(question):
            return super().request(question)
        rests = [self._rest(asked, ("no", "yes"), question) for asked in self._fits(question)]
        text = self._text(question, max(map(len, rests)) + 1)
        answers = self._answers(question)[:2]
        return _scores(
            question, text, 0, [[*rest, *answer] for rest in rests for answer in answers]
        )

    def read(self, question: Question, result: Decision | Scores) -> Reading:
        """Return the softmax over letters, or how well each level fits of all."""
        if not self._isolates(question):
            return super().read(question, result)
        found = [logprobs[-1] for logprobs in _logprobs(result)]
        pairs = zip(found[::2], found[1::2], strict=True)
        fits = [softmax(pair, question.temperature)[1] for pair in pairs]
        mass = sum(fits)
        metadata: dict[str, JsonValue] = {
            "level_fit": {str(level): round(fit, 4) for level, fit in enumerate(fits)},
            "fit_mass": round(mass, 4),
        }
        return Reading([fit / (mass or 1e-9) for fit in fits], metadata)

    @staticmethod
    def _isolates(question: Question) -> bool:
        return question.kind is SCORE and question.profile.isolates_levels

    def _fits(self, question: Question) -> list[str]:
        levels = [self._level.sub("", label) for label in question.labels]
        tail = "Does the proposed answer fit?"
        return [f"{question.asked}\nProposed answer: {level}\n{tail}" for level in levels]

    def _prompt(self, question: Question) -> tuple[list[int], int]:
        options: Sequence[str] = ("no", "yes")
        if question.kind is CHOICE:
            options = question.labels
        if question.kind is SCORE:
            options = [f"{level}: {label}" for level, label in enumerate(question.labels)]
        rest = self._rest(question.asked, options, question)
        text = self._text(question, len(rest) + 1)
        return [*text, *rest], len(text)

    def _text(self, question: Question, used: int) -> list[int]:
        text = question.tokens(f"Context:\n{question.guarded(question.text)}")
        return _fitting(text, used, question, self._text_tokens)

    def _rest(self, asked: str, options: Sequence[str], question: Question) -> list[int]:
        """Return the tokens of a question and its options."""
        head, tail = f"\n\nQuestion: {question.guarded(asked)}\nOptions:", "\nAnswer: ("
        letters = list(islice(_single(question, self._names), len(options)))
        lettered = list(zip(letters, map(question.guarded, options), strict=False))
        if len(options) <= self._together:
            listed = "".join(f"\n({letter}) {text}" for (letter, _), text in lettered)
            return question.tokens(head + listed + tail)
        token_ids, begins = question.tokens(head), question.tokens("\n(")
        for (_, letter), text in lettered:
            token_ids += [*begins, letter, *question.tokens(f") {text}")]
        return token_ids + question.tokens(tail)

    def _answers(self, question: Question) -> Sequence[Sequence[int]]:
        letters = [(i,) for _, i in islice(_single(question, self._names), question.count)]
        if len(letters) < question.count:
            problem = f"holds {question.count} values, the model has tokens for {len(letters)}"
            raise InvalidRequestError("candidates", problem)
        return letters


FORMS: Mapping[str, Form] = {
    "laya": Laya(),
    "d1_omni": D1Omni(),
    "clef": Clef(),
    "d1": D1(),
    "decider2": Decider2(),
}
