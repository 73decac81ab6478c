"""A generation as its caller asks for it (`GenerationCall`) and in tokens (`GenerationRequest`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from backend.core.guide import ReplyGrammar
from backend.core.media import Medium
from backend.core.prompt import JsonValue, Message, Prompt, Tool, ToolChoice, ToolMode

# At lower temperatures, scaled logits leave the range of float32.
MIN_TEMPERATURE = 1e-5


class Remembered(Enum):
    """The part of a request that may enter the prompt cache."""

    NOTHING = "nothing"
    PROMPT = "prompt"
    ALL = "all"


class CacheHint(Enum):
    """What a caller knows of the requests that come after this one."""

    NONE = "none"
    KEEP = "keep"
    ONCE = "once"


class Priority(IntEnum):
    """The order of competing requests; the smallest number goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling of one request. Every default switches its part off.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one.
        xtc_probability: Chance per token of removing the likeliest candidates.
        xtc_threshold: Probability from which a token counts as such a candidate.
        repetition_penalty: Divides positive and multiplies negative logits of seen tokens.
        presence_penalty: Subtracted once from the logit of a seen token.
        frequency_penalty: Subtracted per occurrence from the logit of a seen token.
        penalty_window: Latest tokens, prompt included, that count as seen; 0 is all.
        logit_bias: Added to the logits of token ids.
        seed: With the position it determines every draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is the most likely token, whatever the seed."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether a penalty or a bias changes the distribution before the draw."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A parsed and checked call, not yet rendered.

    Attributes:
        prompt: Raw text; ignored when there are messages.
        messages: A conversation for the chat template.
        media: Images, sounds and videos, in order.
        template_options: Variables of the template besides messages and tools
            (`enable_thinking`, `reasoning_effort`, ...); a missing key stays undefined there.
        max_tokens: Limit of generated tokens; `None` is up to the context.
        top_logprobs: Alternatives per token; `None` is no logprobs at all.
        grammar: GBNF or a JSON schema that the reply must follow; wins over `tool_choice`.
        parallel_tool_calls: Whether a reply may hold more than one call.
        constrains_calls: Whether calls of the model's own choice are held to their schemas.
        thinking_budget: The most tokens of thought; `None` is no limit.
        remembered: The part that may enter the prompt cache.
        cache_hint: Whether the conversation is going to go on.
        cache_path: The caller's path for its prefix on disk; empty for none.
        cache_scope: Calls of other scopes never meet a prefix that this one stored; see `Prompt`.
        shares_system_prompt: Whether they may meet its system prompt and tools all the same.
        priority: Its rank when not all requests can run.
        may_speculate: Whether its tokens may be drafted; no reply depends on it.
        max_draft_tokens: The most of a draft; `None` leaves it to the model's options.
        debug: Whether the log may hold the text of this request.
        size_bytes: Of the whole request as it came.
    """

    request_id: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    media: tuple[Medium, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_options: Mapping[str, JsonValue] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    grammar: str = ""
    parallel_tool_calls: bool = True
    constrains_calls: bool = True
    thinking_budget: int | None = None
    remembered: Remembered = Remembered.ALL
    cache_hint: CacheHint = CacheHint.NONE
    cache_path: str = ""
    cache_scope: str = ""
    shares_system_prompt: bool = False
    priority: Priority = Priority.NORMAL
    may_speculate: bool = True
    max_draft_tokens: int | None = None
    debug: bool = False
    size_bytes: int = 0

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is shown, and may call."""
        return () if self.tool_choice.mode is ToolMode.NONE else self.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A call in the engine's terms: token ids and numbers, all in range for the model.

    Attributes:
        max_tokens: At least 1; prompt and limit together fit the context.
        is_open_ended: Whether the context alone sets that limit.
        stop_token_ids: Ids that end generation; empty when the caller ignores them.
        top_logprobs: Alternatives per token; `None` is no logprobs at all.
        grammar: The grammar of the reply and the budget of its thoughts, if it has any.
        remembered: The part that may enter the prompt cache.
        cache_hint: Whether the conversation is going to go on.
        cache_path: The caller's path for its prefix on disk; empty for none.
        priority: Its rank when not all requests can run.
        may_speculate: Whether its tokens may be drafted; no reply depends on it.
        max_draft_tokens: The most of a draft; `None` leaves it to the model's options.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    is_open_ended: bool = False
    top_logprobs: int | None = None
    grammar: ReplyGrammar | None = None
    remembered: Remembered = Remembered.ALL
    cache_hint: CacheHint = CacheHint.NONE
    cache_path: str = ""
    priority: Priority = Priority.NORMAL
    may_speculate: bool = True
    max_draft_tokens: int | None = None
