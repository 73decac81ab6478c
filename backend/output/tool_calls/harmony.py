"""The wire of gpt-oss: messages on channels, `<|channel|>final<|message|>…<|return|>`.

A message with a recipient is a call, whatever its channel is. The recipient may stand before
the channel or behind it. Commentary without one is a preamble: text for the user.
"""

import re
from functools import partial

from backend.output.evidence import warn_once
from backend.output.tool_calls.json_message import JsonMessageCursor
from backend.output.tool_calls.message_dialect import START, Address, MessageDialect
from backend.output.tool_calls.messages import MessageCursor

CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_IS_THOUGHT = {"analysis": True, "commentary": False, "final": False}
_ROLES = ("assistant", "functions.", "tool", "user", "system", "developer")
# A message to one of these is no call.
_PEOPLE = frozenset({"assistant", "user", "all"})
_NAMESPACE = "functions."

_CHANNEL = re.compile(re.escape(CHANNEL) + r"[^\w<]*(\w*)")
_RECIPIENT = re.compile(r"\bto=\s*([^\s<]+)")


def read_header(header: str) -> Address:
    """Tell who a message is for; of several channels the first known one counts."""
    tools = [name for name in _RECIPIENT.findall(header) if name not in _PEOPLE]
    if tools:
        return Address(tools=(tools[-1].removeprefix(_NAMESPACE), tools[-1]))
    channels = _CHANNEL.findall(header)
    known = [channel for channel in channels if channel in _IS_THOUGHT]
    if channels and not known:
        warn_once(f"the channel {channels[0][:32]!r} is unknown: its text passes as content")
    return Address(is_thought=bool(known) and _IS_THOUGHT[known[0]])


DIALECT = MessageDialect(
    read=read_header,
    header_tokens=(CHANNEL, CONSTRAIN),
    header_words=frozenset({*_IS_THOUGHT, "json", "code"}),
    heads=(*(START + role for role in _ROLES), *(CHANNEL + name for name in _IS_THOUGHT)),
    ends=(END, CALL, RETURN),
    last_ends=(CALL, RETURN),
    make_call=JsonMessageCursor,
)

make_harmony = partial(MessageCursor, dialect=DIALECT)
