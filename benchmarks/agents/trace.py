"""Agent traces: the requests of several concurrent sessions to a server.

A session is one user's: a system prompt with tools, turns of thought, tool call and result,
parallel sub-agents on the same prefix, edited last messages, replies requested again or broken
off, requests for a title, and a summary in place of a conversation that became too long.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from backend.core.prompt import Message, Tool, ToolCall

_SYLLABLES = ("ba", "be", "di", "do", "fa", "fi", "ka", "ko", "la", "lu", "ma", "mi", "na", "zu")
_MARKS = ("\n", "{", "}", "=", "(", ")", ".", ",")
_CHARACTERS_PER_TOKEN = 1.15

Wave = Sequence["AgentRequest"]


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The size of a trace.

    Attributes:
        seed: Determines everything.
        sessions: Concurrent agents.
        turns: Tool turns of each.
        system_tokens: Of the system prompt with its tools.
        context_tokens: A longer session summarises and continues with the summary.
    """

    seed: int
    sessions: int = 2
    turns: int = 30
    system_tokens: int = 4000
    context_tokens: int = 20_000


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request, and the model's reply.

    Attributes:
        is_cut: Whether the caller leaves before the reply has ended.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    reply: Message
    is_cut: bool = False


def make_trace(shape: TraceShape) -> list[Wave]:
    """Return waves of concurrent requests; each starts when the previous one has ended."""
    writer = _Writer(random.Random(shape.seed))
    tools = tuple(writer.tool(shape.system_tokens // 24) for _ in range(12))
    system = Message(role="system", content=writer.text(shape.system_tokens // 2))
    sessions = [_Session(shape, writer, system, tools).waves() for _ in range(shape.sessions)]
    waves: list[Wave] = []
    while sessions:
        for session in list(sessions):
            wave = next(session, None)
            if wave is None:
                sessions.remove(session)
            else:
                waves.append(wave)
    return waves


class _Writer:
    """Writes text without special meaning to any template or tokenizer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._calls = 0

    def word(self) -> str:
        return "".join(self.rng.choices(_SYLLABLES, k=self.rng.randint(1, 4)))

    def text(self, tokens: int) -> str:
        words: list[str] = []
        length = 0
        while length < tokens * _CHARACTERS_PER_TOKEN:
            words.append(self.rng.choice(_MARKS) if self.rng.random() < 0.1 else self.word())
            length += len(words[-1]) + 1
        return " ".join(words)

    def tool(self, tokens: int) -> Tool:
        name = f"{self.word()}_{self.rng.randrange(100)}"
        text = {"type": "string", "description": self.text(tokens // 4)}
        parameters = {"type": "object", "properties": {self.word(): text}}
        function = {"name": name, "description": self.text(tokens // 2), "parameters": parameters}
        return Tool(name=name, schema={"type": "function", "function": function})

    def reply(self, tools: Sequence[Tool] = (), tokens: int = 0) -> Message:
        calls = ()
        if tools:
            self._calls += 1
            arguments = json.dumps({self.word(): self.text(self.rng.randint(3, 30))})
            name = self.rng.choice(tools).name
            calls = (ToolCall(call_id=f"call{self._calls}", name=name, arguments=arguments),)
        return Message(
            role="assistant",
            content=self.text(tokens or self.rng.randint(10, 60)),
            reasoning_content=self.text(self.rng.randint(20, 150)),
            tool_calls=calls,
        )

    def result(self, reply: Message) -> Message:
        """Return a tool's result: many are short, few are long."""
        call = reply.tool_calls[0]
        text = self.text(200 + int(1800 * self.rng.random() ** 2))
        return Message(role="tool", content=text, name=call.name, tool_call_id=call.call_id)


@dataclass(slots=True)
class _Session:
    shape: TraceShape
    writer: _Writer
    system: Message
    tools: tuple[Tool, ...]
    messages: list[Message] = field(default_factory=list)

    def waves(self) -> Iterator[Wave]:
        rng = self.writer.rng
        self.messages = [self.system, self._question()]
        if rng.random() < 0.5:
            yield [self._title()]
        left = rng.randint(4, 12)
        for _ in range(self.shape.turns):
            if self._tokens() > self.shape.context_tokens:
                yield [self._summarised()]
            left -= 1
            if rng.random() < 0.05:
                yield [self._request(self.writer.reply(), is_cut=True)]
            reply = self.writer.reply(self.tools if left else ())
            yield [self._request(reply)]
            is_question = self.messages[-1].role == "user"
            if is_question and rng.random() < 0.3:
                reply = self._second_thought(reply)
                yield [self._request(reply)]
            self.messages.append(reply)
            if not left:
                self.messages.append(self._question())
                left = rng.randint(4, 12)
                continue
            if rng.random() < 0.06:
                yield from self._sub_agents()
            self.messages.append(self.writer.result(reply))

    def _request(self, reply: Message, *, is_cut: bool = False) -> AgentRequest:
        return AgentRequest(tuple(self.messages), self.tools, reply, is_cut)

    def _question(self) -> Message:
        return Message(role="user", content=self.writer.text(self.writer.rng.randint(20, 200)))

    def _title(self) -> AgentRequest:
        system = Message(role="system", content="Write a title for this conversation.")
        return AgentRequest((system, self.messages[1]), (), self.writer.reply(tokens=6))

    def _second_thought(self, reply: Message) -> Message:
        """Ask again for a reply, or edit the last message and send that."""
        if self.writer.rng.random() < 0.7:
            content = self.messages[-1].content
            edited = f"{content[: len(content) * 2 // 3]} {self.writer.text(15)}"
            self.messages[-1] = Message(role="user", content=edited)
        return self.writer.reply(self.tools if reply.tool_calls else ())

    def _summarised(self) -> AgentRequest:
        """Ask for a summary, and continue with it and the last messages."""
        ask = Message(role="user", content="Summarise the conversation so far.")
        summary = self.writer.reply(tokens=400)
        request = AgentRequest((*self.messages, ask), self.tools, summary)
        tail = self.messages[-4:]
        while tail and tail[0].role == "tool":
            tail = tail[1:]
        before = Message(role="user", content=f"Summary of the past:\n{summary.content}")
        self.messages = [self.system, before, *tail]
        return request

    def _sub_agents(self) -> Iterator[Wave]:
        count = self.writer.rng.randint(2, 4)
        agents = [self._sub_agent() for _ in range(count)]
        while wave := [request for agent in agents if (request := next(agent, None))]:
            yield wave

    def _sub_agent(self) -> Iterator[AgentRequest]:
        messages = [self.system, self._question()]
        turns = self.writer.rng.randint(2, 5)
        for turn in range(turns + 1):
            reply = self.writer.reply(self.tools if turn < turns else ())
            yield AgentRequest(tuple(messages), self.tools, reply)
            if reply.tool_calls:
                messages += [reply, self.writer.result(reply)]

    def _tokens(self) -> int:
        characters = sum(len(each.content) + len(each.reasoning_content) for each in self.messages)
        return self.shape.system_tokens + int(characters / _CHARACTERS_PER_TOKEN)
