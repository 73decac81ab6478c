import json

from golden import named_calls, named_format, play
from hypothesis import given
from hypothesis import strategies as st

from backend.core.step import FinishReason
from backend.formats.messages import HARMONY_MESSAGES
from backend.output.readers.message_reader import MessageFrames, MessageReader
from backend.output.reply import ReplySpec
from backend.output.reply_format import warn_once
from backend.output.router import Router

HARMONY = named_format("harmony", "harmony")
MUSE = named_format("muse_spark", "muse")
TAIL = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
BODY = st.text(st.characters(exclude_characters="<`~", exclude_categories=["Cs"]))


def outcome(text, output_format=HARMONY, tools=None, stop=FinishReason.STOP):
    spec = ReplySpec(format=output_format, tools=tools, prompt_tail=TAIL)
    completion = play(spec, text, stop)
    return completion.reasoning, completion.content, named_calls(completion)


@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), BODY), max_size=5))
def test_every_message_comes_out_as_it_was_written(messages):
    text = "<|start|>assistant".join(
        f"<|channel|>{channel}<|message|>{body}<|end|>" for channel, body in messages
    )
    thought = "".join(body for channel, body in messages if channel == "analysis")
    content = "".join(body for channel, body in messages if channel != "analysis")
    assert outcome(text) == (thought, content, ())


def test_without_tools_a_message_to_one_is_content():
    assert outcome(f"{CALL}{{}}<|call|>", tools={}) == ("", "{}", ())


@given(st.lists(st.tuples(st.sampled_from(["self", "user", "commentary"]), BODY), max_size=5))
def test_every_recipient_gets_what_was_written_to_it(messages):
    text = "<|start|>assistant".join(
        f" to={recipient}<|message|>{body}<|eom|>" for recipient, body in messages
    )
    thought = "".join(body for recipient, body in messages if recipient == "self")
    content = "".join(body for recipient, body in messages if recipient != "self")
    assert outcome(text, MUSE) == (thought, content, ())


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
def test_arguments_come_out_as_they_were_written(arguments):
    text = json.dumps(arguments)
    assert outcome(f"{CALL}{text}<|call|>") == ("", "", (("f", text),))


def test_text_after_an_opener_that_a_sentence_names_leaves_at_once():
    router = Router(MUSE, tools={"f": {}}, prompt_tail=TAIL)
    deltas = router.feed(" to=user<|message|>Use the <invoke> tag, or <atem:function_calls> and so")
    text = "".join(delta.text for delta in deltas)
    assert text == "Use the <invoke> tag, or <atem:function_calls> and so"


def test_arguments_leave_while_they_are_written():
    router = Router(HARMONY, tools=None, prompt_tail=TAIL)
    assert router.feed(CALL) == []
    pieces = ['{"a', '": "x', "y", '"}', " ", "<|call|>"]
    sent = ["".join(delta.arguments for delta in router.feed(piece)) for piece in pieces]
    assert sent == ["", '{"a": "x', "y", '"', "", "}"]


def test_plain_text_without_a_header_is_not_held_up():
    router = Router(HARMONY, tools=None, prompt_tail=TAIL)
    assert [delta.text for delta in router.feed("H")] == ["H"]


def test_an_unknown_channel_is_content_and_warned_of_once(caplog):
    warn_once.cache_clear()
    for _ in range(3):
        assert outcome("<|channel|>summary<|message|>So.") == ("", "So.", ())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "summary" in caplog.text


def test_a_channel_without_a_name_counts_as_one():
    assert outcome("<|channel|><|message|>So.<|end|>") == ("", "So.", ())
    assert outcome("<|channel|>analysis<|message|><|end|>") == ("", "", ())


def test_an_unfinished_message_is_not_lost():
    assert outcome("<|channel|>final<|message|>So", stop=FinishReason.LENGTH) == ("", "So", ())
    assert outcome("<|channel|>analysis<|message|>Hm", stop=FinishReason.LENGTH) == ("Hm", "", ())


def test_the_beginning_of_cut_off_arguments_is_no_content():
    for begun in ('"', "```", "nul"):
        assert outcome(f"{CALL}{begun}", stop=FinishReason.LENGTH) == ("", "", ())


def test_a_failing_format_gives_all_its_text_as_content(caplog):
    class FailingFrames(MessageFrames):
        def read(self, header):
            raise ZeroDivisionError(header)

    def make_reader(_, context):
        return MessageReader(context, frames=FailingFrames(HARMONY_MESSAGES, None, warn_once))

    router = Router(HARMONY, tools=None, prompt_tail=TAIL, make_reader=make_reader)
    sent = [delta.text for delta in router.feed("So.<|channel|>") + router.feed("final<|mess")]
    sent += [delta.text for delta in router.feed("age|>Do") + router.feed("ne.")]
    assert sent == ["So.", "<|channel|>final<|message|>Do", "ne."]
    assert "routing failed" in caplog.text
