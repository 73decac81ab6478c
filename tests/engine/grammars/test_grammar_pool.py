"""Grammars are made side by side, and a failure of one costs its request alone."""

import errno
import os
import queue
import signal
import threading
import time
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
from tool_replies import TOOLS
from waiting import wait_until

from backend.config import MAX_WRITING_S, SMALL_RULE_BYTES
from backend.core.guide import (
    Guide,
    OfferedTool,
    ReplyRule,
    Thought,
    ThoughtBudget,
    ThoughtTexts,
)
from backend.core.model import ModelCard
from backend.engine.grammars.pool import GrammarPool, GrammarWorkshop
from backend.engine.grammars.writer_process import (
    Write,
    WriterProcess,
    WritingTooLongError,
    Written,
)
from backend.errors import GrammarError, GrammarSyntaxError, HelperLostError
from backend.formats.registry import TOOL_FORMATS, tool_format
from common.helper import ProcessEndedError, TooLateError

END, OPENER = 256, 257
CARD = ModelCard(
    name="bytes",
    path="",
    model_type="tiny",
    context_length=64,
    vocab_size=300,
    eos_token_ids=frozenset({END}),
    weights_bytes=0,
    supports_tools=False,
    supports_thinking=False,
)
YES = Guide(rule=ReplyRule(text='root ::= "yes"'))
TEXTS = ThoughtTexts(starts=("<think>",), ends=("</think>",))


class Bytes:
    """A tokenizer whose tokens are bytes, an end, and the opener of a call."""

    added_texts: ClassVar = {END: "<eos>", OPENER: "<tool_call>"}

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < END else self.added_texts.get(token_id, "").encode()

    def encode(self, text, **_options):
        return list(text.encode())


class Scripted:
    """In place of a process: writes a grammar when it is let, or is lost."""

    is_alive, is_guarded = True, False

    def __init__(self, script, *, is_asked=False, is_timed=False):
        self.script, self.is_asked, self.is_timed = script, is_asked, is_timed

    def await_start(self):
        """Be there at once."""

    def send(self, data, _deadline):
        self.order = msgspec.msgpack.decode(data, type=Write)

    def receive(self, deadline):
        more = [self.order.is_suspect] if self.is_asked else []
        more += [round(deadline - time.monotonic())] if self.is_timed else []
        return msgspec.msgpack.encode(self.script(self.order.rule, *more))

    def kill(self):
        self.is_alive = False


class Asked:
    """A pool, and its answers."""

    def __init__(self, **options):
        self.noted = []
        self.pool = GrammarPool(GrammarWorkshop(Bytes(), CARD), self.noted.append, **options)
        self.pool.start()
        self.answers = {}

    def submit(self, name, guide, caller=""):
        self.answers[name] = queue.SimpleQueue()
        self.pool.submit(name, guide, self.answers[name].put, caller)

    def made(self, name, guide=None):
        if guide is not None:
            self.submit(name, guide)
        return self.answers[name].get(timeout=60)


@pytest.fixture(scope="module")
def asked():
    pool = Asked()
    yield pool
    for process in pool.pool.idle:
        process.kill()


def takes(grammar, text):
    matcher = grammar.matcher()
    return all(map(matcher.consume, [*text.encode(), END]))


def tools(*offered):
    return tuple(OfferedTool(each.name, '{"type": "object"}') for each in offered)


def test_equal_rules_share_a_grammar(asked):
    one, other = asked.made("a", YES), asked.made("b", Guide(rule=ReplyRule(text='root ::= "yes"')))
    assert one is other
    assert takes(one, "yes")
    assert not takes(one, "no")
    assert asked.noted[:2] == [["a"], []]


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("root ::= (", GrammarSyntaxError, "Grammar: line 1, column 10"),
        ('{"type": "integer", "not": {}}', GrammarError, "not"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', GrammarError, "complete"),
        ('root ::= "' + "a" * 300_000 + '"', GrammarError, "larger than 256 KiB"),
    ],
)
def test_a_malformed_rule_is_the_error_of_its_request(asked, text, kind, problem):
    error = asked.made("a", Guide(rule=ReplyRule(text=text)))
    assert type(error) is kind
    assert problem in str(error)


def test_calls_are_written_in_the_format_of_the_rule(asked):
    rule = ReplyRule(tools=tools(*TOOLS), must_call=True, format="hermes_json")
    grammar = asked.made("a", Guide(rule=rule))
    matcher = grammar.matcher()
    assert matcher.consume(OPENER)
    assert all(map(matcher.consume, b'\n{"name": "clock_now"'))


def test_calls_that_no_grammar_can_hold_leave_the_reply_free(asked, caplog):
    caplog.set_level("INFO")
    refused = OfferedTool("never", '{"type": "string"}')
    rule = ReplyRule(tools=(refused,), format="hermes_json")
    assert asked.made("a", Guide(rule=rule)) is None
    assert asked.made("b", Guide(rule=rule, is_told=True)) is None
    assert "id=a: calls are not constrained: no grammar can hold them" in caplog.text
    assert "id=b: calls are not constrained: Grammar: tool 'never'" in caplog.text


def test_a_required_call_of_a_tool_that_no_arguments_fit_is_the_error_of_its_request(asked):
    never = OfferedTool("never", '{"type": "string"}')
    rule = ReplyRule(tools=(never,), must_call=True, format="hermes_json")
    error = asked.made("a", Guide(rule=rule))
    assert type(error) is GrammarError
    assert "tool 'never'" in str(error)


def test_what_is_not_held_of_a_tool_is_told_once(asked, caplog):
    caplog.set_level("INFO")
    odd = OfferedTool("odd", '{"properties": {"a": {"type": "string", "pattern": "(?=b)c"}}}')
    for most_calls in (1, 2):
        rule = ReplyRule(tools=(odd,), format="hermes_json", most_calls=most_calls)
        assert asked.made("a", Guide(rule=rule)) is not None
    assert caplog.text.count("tool 'odd': not enforced: '#/properties/a/pattern'") == 1


def test_a_budget_alone_needs_no_process():
    asked = Asked(start_process=lambda _begin: Scripted(pytest.fail))
    grammar = asked.made("a", Guide(budget=ThoughtBudget(tokens=3, texts=TEXTS)))
    assert grammar.parts.budget.tokens == 3


def test_a_thought_and_a_budget_come_with_the_grammar(asked):
    rule = ReplyRule(text='root ::= "yes"', thought=Thought(starts=("<think>",), ends=TEXTS.ends))
    grammar = asked.made("a", Guide(rule=rule, budget=ThoughtBudget(tokens=3, texts=TEXTS)))
    assert takes(grammar, "<think>so</think>\n\nyes")


def test_a_slow_grammar_holds_up_no_other_and_equal_ones_are_written_once():
    let, begun = threading.Event(), queue.SimpleQueue()

    def script(rule):
        begun.put(rule.text)
        if rule.text == "slow":
            assert let.wait(60)
        return Written((f'"{rule.text}"',))

    asked = Asked(start_process=lambda _begin: Scripted(script))
    for name in ("slow", "slow too", "slow as well"):
        asked.submit(name, Guide(rule=ReplyRule(text="slow")))
    assert begun.get(timeout=60) == "slow"
    for text in ("a", "b", "c"):
        assert takes(asked.made(text, Guide(rule=ReplyRule(text=text))), text)
    # One that is known waits for no slot.
    asked.submit("slow and other", Guide(rule=ReplyRule(text="slow"), is_told=True))
    assert takes(asked.made("again", Guide(rule=ReplyRule(text="a"))), "a")
    asked.pool.cancel("slow too")
    let.set()
    for name in ("slow", "slow as well", "slow and other"):
        assert takes(asked.made(name), "slow")
    assert asked.answers["slow too"].empty()
    assert [begun.get(timeout=60) for _ in "abc"] == ["a", "b", "c"]
    assert begun.empty()


def test_large_rules_hold_up_no_small_one_however_many_wait():
    let = threading.Event()

    def script(rule):
        if len(rule.text) > SMALL_RULE_BYTES:
            assert let.wait(60)
        return Written((f'"{rule.text[:4]}"',))

    asked = Asked(start_process=lambda _begin: Scripted(script))
    large = [f"{number:04}" + "x" * SMALL_RULE_BYTES for number in range(9)]
    for text in large:
        asked.submit(text, Guide(rule=ReplyRule(text=text)))
    for text in ("a", "b", "c"):
        assert takes(asked.made(text, Guide(rule=ReplyRule(text=text))), text)
    let.set()
    for text in large:
        assert takes(asked.made(text), text[:4])


def rule(text):
    return Guide(rule=ReplyRule(text=text))


def test_small_rules_that_take_long_hold_up_no_other_however_many_wait():
    """One that takes too long on the thread of small rules waits again, with the large ones."""
    let, stopped = threading.Event(), queue.SimpleQueue()

    def script(written, limit_s):
        if written.text.startswith("slow"):
            if limit_s < MAX_WRITING_S:
                stopped.put(written.text)
                raise TooLateError
            assert let.wait(60)
        return Written((f'"{written.text}"',))

    asked = Asked(start_process=lambda _begin: Scripted(script, is_timed=True))
    slow = [f"slow {number}" for number in range(6)]
    for text in slow:
        asked.submit(text, rule(text))
    for text in ("a", "b", "c"):
        assert takes(asked.made(text, rule(text)), text)
    let.set()
    for text in slow:
        assert takes(asked.made(text), text)
    assert not stopped.empty()


def taken_in_order(script, submissions, **options):
    """Return the texts in the order in which one thread made them, the first being held."""
    let, begun = threading.Event(), []

    def noting(written):
        begun.append(written.text)
        assert let.wait(60)
        script(written.text)
        return Written((f'"{written.text[:4]}"',))

    asked = Asked(slots=1, start_process=lambda _begin: Scripted(noting), **options)
    asked.submit("first", rule("first"), "first")
    wait_until(lambda: begun == ["first"])
    for text, caller in submissions:
        asked.submit(text, rule(text), caller)
    let.set()
    for text, _ in submissions:
        assert takes(asked.made(text), text[:4])
    return [text[:4] for text in begun[1:]]


def test_a_small_rule_overtakes_larger_ones_of_equal_callers():
    large = [(f"{number:04}" + "x" * 12_000, f"{number}") for number in range(3)]
    order = taken_in_order(lambda _text: None, [*large, ("tiny", "other")])
    assert order == ["tiny", "0000", "0001", "0002"]


def test_the_caller_for_whom_least_time_was_spent_is_next():
    """Another caller's rule goes first, though it came last, and is the largest."""
    now = [0.0]

    def script(text):
        now[0] += 0.0 if text == "last" else 1.0

    many = [(f"{number:04}", "one") for number in range(4)]
    submissions = [*many, ("last" + "x" * 100, "other")]
    order = taken_in_order(script, submissions, clock=lambda: now[0])
    assert order == ["0000", "last", "0001", "0002", "0003"]


def test_nothing_is_begun_for_requests_that_have_left():
    let, begun = threading.Event(), queue.SimpleQueue()

    def script(rule):
        begun.put(rule.text)
        assert let.wait(60)
        return Written((f'"{rule.text}"',))

    asked = Asked(slots=1, start_process=lambda _begin: Scripted(script))
    for text in ("first", "left", "last"):
        asked.submit(text, Guide(rule=ReplyRule(text=text)))
    asked.pool.cancel("left")
    let.set()
    assert takes(asked.made("last"), "last")
    assert (begun.get(), begun.get(), begun.empty()) == ("first", "last", True)


@pytest.mark.parametrize(
    ("was_killed", "kind", "problem"),
    [
        (True, HelperLostError, "was killed twice"),
        (False, WritingTooLongError, "is too large"),
    ],
)
def test_a_grammar_over_which_two_processes_end_fails_its_request(was_killed, kind, problem):
    def script(_rule):
        raise ProcessEndedError(was_killed=was_killed)

    error = Asked(start_process=lambda _begin: Scripted(script)).made("a", YES)
    assert type(error) is kind
    assert problem in str(error)


def refused(_begin):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


class Slow(WriterProcess):
    """Takes longer to start than it may."""

    def receive_start(self, _deadline):
        raise TooLateError


@pytest.mark.parametrize("start", [refused, Slow])
def test_a_process_that_cannot_start_is_no_fault_of_the_rule(start):
    error = Asked(start_process=start).made("a", YES)
    assert type(error) is HelperLostError
    assert "none can start: try again" in str(error)


def test_a_grammar_over_which_a_process_ends_is_tried_with_care_in_another():
    def script(rule, is_suspect):
        if not is_suspect:
            raise ProcessEndedError(was_killed=False)
        return Written((f'"{rule.text}"',))

    asked = Asked(start_process=lambda _begin: Scripted(script, is_asked=True))
    assert takes(asked.made("a", Guide(rule=ReplyRule(text="yes"))), "yes")


def test_a_process_that_is_killed_is_replaced(asked):
    asked.made("a", Guide(rule=ReplyRule(text='root ::= "a"')))
    for process in asked.pool.idle:
        os.kill(process.process.pid, signal.SIGKILL)
    assert takes(asked.made("b", Guide(rule=ReplyRule(text='root ::= "b"'))), "b")


def test_a_process_that_takes_too_long_is_killed():
    made = []

    def start(begin):
        made.append(WriterProcess(begin))
        made[0].await_start()
        os.kill(made[0].process.pid, signal.SIGSTOP)
        return made[0]

    asked = Asked(slots=1, start_process=start, limit_s=0.2)
    error = asked.made("a", Guide(rule=ReplyRule(text="x")))
    assert type(error) is WritingTooLongError
    assert "takes longer than 0.2 s to translate" in str(error)
    assert not made[0].is_alive


@pytest.mark.parametrize(("text", "is_free"), [("", True), ("yes", False)])
def test_tools_that_take_too_long_refuse_no_request_that_leaves_the_choice(text, is_free):
    def script(rule):
        if rule.tools:
            raise TooLateError
        return Written((f'"{rule.text}"',))

    asked = Asked(start_process=lambda _begin: Scripted(script))
    rule = ReplyRule(text=text, tools=tools(*TOOLS), format="hermes_json")
    made = asked.made("a", Guide(rule=rule))
    assert made is None if is_free else takes(made, "yes")
    error = asked.made("b", Guide(rule=replace(rule, text="", must_call=True)))
    assert "takes longer" in str(error)


@pytest.mark.parametrize("known", TOOL_FORMATS, ids=lambda known: known.name)
def test_a_format_is_found_by_its_name(known):
    assert tool_format(known.name, known.own_marks).openers == known.openers


def test_a_format_of_one_checkpoint_is_found_by_its_marks():
    family = next(known for known in TOOL_FORMATS if known.own)
    for end in ((), ("<tool_sep:ab12>",)):
        own = tool_format(family.name, ("<arg_key:ab12>", *end))
        again = tool_format(family.name, own.own_marks)
        assert own is not family
        assert again is own
