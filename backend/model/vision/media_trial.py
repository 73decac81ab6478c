"""A prompt with media, prepared both by this backend and by the libraries alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.core.media import MediaKind, PreparedMedium
from backend.core.prompt import MediaSpan, Message, Placement, Prompt
from backend.errors import InvalidRequestError
from backend.model.text.snippets import written_out
from backend.model.text.template import ChatTemplate
from backend.model.text.tokenizer import Tokenizer
from backend.model.vision.media_processor import (
    MediaProcessor,
    ProcessorError,
)
from backend.model.vision.media_spans import (
    LostMediumError,
    as_processed,
    find_spans,
    with_own_tokens,
)
from backend.model.vision.samples import sample

_QUESTION = "What is shown here, and what was it before?"
_MOST = 2
_PLACES = (0, _QUESTION.index(","))


class OtherTokensError(ProcessorError):
    """The libraries' tokens differ from this backend's, which prepares media one by one."""

    def __init__(self) -> None:
        super().__init__("it writes other tokens for it inside a prompt than alone")


@dataclass(frozen=True, slots=True)
class MediaTrial:
    """One prompt, prepared in two ways.

    Attributes:
        prompt: The prompt as this backend feeds it.
        whole_inputs: Output of the model's processor for the prompt with all its media at once,
            by mlx-vlm's names, with its tokens `input_ids` [1, T].
    """

    prompt: Prompt
    whole_inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Examiner:
    """Builds trials for a model.

    Attributes:
        processor: The model's media processor.
        tokenizer: The model's tokenizer.
        template: The model's template; without one, questions are plain text.
    """

    processor: MediaProcessor
    tokenizer: Tokenizer
    template: ChatTemplate

    def most(self, kind: MediaKind) -> int:
        """Return how many media of a kind the libraries take per prompt, at most 2."""
        return _MOST if kind is not MediaKind.AUDIO or self.processor.takes_sounds else 1

    def trial(self, kind: MediaKind, count: int) -> MediaTrial:
        """Return a question about media of one kind, 1 or 2 of them.

        Some processors only take media of one size together; they get such media.

        Raises:
            ProcessorError: This backend and the libraries read different tokens.
        """
        text = self._text(kind, count)
        try:
            return self._trial(kind, count, text, have_own_sizes=True)
        except ProcessorError:
            if count == 1:
                raise
            return self._trial(kind, count, text, have_own_sizes=False)

    def _trial(self, kind: MediaKind, count: int, text: str, *, have_own_sizes: bool) -> MediaTrial:
        rate = self.processor.sampling_rate
        contents = [
            sample(kind, sampling_rate=rate, number=number, has_own_size=have_own_sizes)
            for number in range(count)
        ]
        whole = self.processor.prepare_whole(kind, contents, text)
        names = (f"trial {kind.name} {number} {have_own_sizes}" for number in range(count))
        media = [
            self.processor.prepare(kind, content, name.encode())
            for content, name in zip(contents, names, strict=True)
        ]
        ids = _own_tokens(whole, media)
        own = self._own_ids(text, media)
        # Either side may begin with a token that the other leaves out.
        lead = len(ids) - len(own)
        if lead not in (0, 1) or ids[lead:] != own:
            raise OtherTokensError
        return MediaTrial(Prompt(tuple(ids), media=_spans(ids, media)), whole)

    def _text(self, kind: MediaKind, count: int) -> str:
        """Return the rendered question, with snippets in place of media."""
        placements = tuple(Placement(place, kind) for place in _PLACES[:count])
        message = Message(role="user", content=_QUESTION, media=placements)
        flat = written_out(message, self.processor.snippets)
        try:
            shown = message if self.processor.takes_parts else flat
            return self.template.render([shown], (), {})
        except InvalidRequestError:
            return flat.content

    def _own_ids(self, text: str, media: Sequence[PreparedMedium]) -> list[int]:
        parts = text.split(self.processor.snippets[media[0].kind])
        if len(parts) != len(media) + 1:
            problem = f"its template has places for {len(parts) - 1} of {len(media)} media"
            raise ProcessorError(problem)
        texts = [*(medium.text for medium in media), ""]
        joined = "".join(part + text for part, text in zip(parts, texts, strict=True))
        return self.tokenizer.encode(as_processed(joined, media), adds_special=False)


def _own_tokens(inputs: Mapping[str, Any], media: Sequence[PreparedMedium]) -> list[int]:
    """Return the processor's tokens of a prompt, with this backend's own for its media."""
    try:
        return with_own_tokens(inputs["input_ids"].reshape(-1).tolist(), media)
    except LostMediumError as error:
        raise OtherTokensError from error


def _spans(ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
    try:
        return find_spans(ids, media)
    except LostMediumError as error:
        raise ProcessorError(str(error)) from error
