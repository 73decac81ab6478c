"""Chat templates come with checkpoints: one that attacks or loops is refused or ended, no more."""

import contextlib
import itertools
import os
import queue
import sys
import threading

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from backend.config import LONG_JOB_MESSAGES, LONG_TEXT_NICENESS, MAX_RENDER_BYTES
from backend.core.prompt import Message
from backend.errors import HelperLostError, InvalidRequestError
from backend.model.text.hf_renderer import jinja_source
from backend.model.text.isolated.template_pool import (
    IsolatedTemplate,
    TemplateProcess,
    TemplateProcesses,
)
from backend.model.text.jinja_renderer import JinjaSource
from backend.model.text.template import ChatTemplate
from backend.rpc.server import status_code
from common.rpc import AbandonedError, enter_work

QUESTION = Message(role="user", content="{{ 7 * 7 }}{% include 'x' %}")
NESTED_LOOPS = "{% for n in range(90000) %}" * 4 + "{% endfor %}" * 4
# One operation of many minutes, which no exception interrupts.
LOCKING = "{{ 7 ** (99999999 * (messages | length)) }}"
ENDLESS_MACRO = (
    "{% macro walk(depth) %}{% if depth %}{{ walk(depth - 1) }}{{ walk(depth - 1) }}{% endif %}"
    "{% endmacro %}{{ walk(100) }}"
)


def template_of(source: str, seconds: float = 60.0) -> ChatTemplate:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer(models.BPE()), chat_template=source
    )
    return IsolatedTemplate(jinja_source(tokenizer), seconds=seconds)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.__init__.__globals__['__builtins__']['open']('/etc/hostname').read() }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ open('/etc/hostname').read() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ walk(1) }}",
        "{% macro walk() %}{{ walk() }}{% endmacro %}{{ walk() }}",
    ],
)
def test_a_template_gets_out_of_its_sandbox_by_no_way(source):
    with pytest.raises(InvalidRequestError, match=r"^Messages: "):
        template_of(source).render([QUESTION], [], {})


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception.__globals__ }}", "{{ messages | attr('__class__') | attr('__mro__') }}"],
)
def test_what_python_hides_is_undefined(source):
    assert template_of(source).render([QUESTION], [], {}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("source", [NESTED_LOOPS, ENDLESS_MACRO, LOCKING])
def test_a_template_that_does_not_end_is_ended(source):
    template = template_of(source, seconds=0.2)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.2 s"):
            template.render([QUESTION], [], {})
    assert template_of("fine").render([QUESTION], [], {}) == "fine"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS bounds no address space")
def test_a_template_that_takes_all_memory_is_refused():
    template = template_of("{{ 'x' * (2 ** 33) }}")
    with pytest.raises(InvalidRequestError, match=r"MemoryError|takes too much memory"):
        template.render([QUESTION], [], {})
    assert template_of("fine").render([QUESTION], [], {}) == "fine"


def test_a_template_that_writes_without_measure_is_refused():
    template = template_of(f"{{{{ 'x' * {MAX_RENDER_BYTES + 1} }}}}")
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_RENDER_BYTES} characters"):
        template.render([QUESTION], [], {})


def test_others_run_while_a_template_holds_the_lock_of_python():
    template, ended, turns = template_of(LOCKING, seconds=0.5), threading.Event(), 0

    def render():
        with pytest.raises(InvalidRequestError):
            template.render([QUESTION], [], {})
        ended.set()

    thread = threading.Thread(target=render)
    thread.start()
    while not ended.wait(0.01):
        turns += 1
    thread.join()
    assert turns > 10


def test_short_conversations_do_not_wait_for_long_ones_which_yield_to_others():
    condition = f"messages | length > {LONG_JOB_MESSAGES}"
    endless = f"{{% if {condition} %}}{LOCKING}{{% endif %}}fine"
    long, left = [QUESTION] * (LONG_JOB_MESSAGES + 1), threading.Event()

    def render_long():
        enter_work(left)
        with pytest.raises(AbandonedError):
            template.render(long, [], {})

    with contextlib.closing(TemplateProcesses(1)) as processes:
        template = IsolatedTemplate(JinjaSource(endless, endless, "{}"), processes=processes)
        assert template.render([QUESTION], [], {}) == "fine"
        threads = [threading.Thread(target=render_long) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert template.render([QUESTION], [], {}) == "fine"
        (short,) = processes.idle
        left.set()
        for thread in threads:
            thread.join()
        assert template.render([QUESTION], [], {}) == "fine"
        assert processes.idle == [short]


def test_a_long_conversation_has_a_process_of_low_priority():
    with contextlib.closing(TemplateProcesses(1)) as processes:
        template = IsolatedTemplate(JinjaSource("fine", "fine", "{}"), processes=processes)
        assert template.render([QUESTION] * (LONG_JOB_MESSAGES + 1), [], {}) == "fine"
        (short,), (long,) = processes.idle, processes.long_idle
        mine, others = (os.getpriority(os.PRIO_PROCESS, each.process.pid) for each in (short, long))
        assert others == min(mine + LONG_TEXT_NICENESS, 19)


def test_a_process_that_was_killed_is_started_again_unseen():
    with contextlib.closing(TemplateProcesses(1)) as processes:
        template = IsolatedTemplate(JinjaSource("fine", "fine", "{}"), processes=processes)
        (process,) = processes.idle
        process.process.kill()
        process.process.wait()
        assert template.render([QUESTION], [], {}) == "fine"
        assert processes.idle not in ([], [process])


def test_dead_processes_are_no_second_try():
    with contextlib.closing(TemplateProcesses(2)) as processes:
        template = IsolatedTemplate(JinjaSource("fine", "fine", "{}"), processes=processes)
        processes.idle.append(TemplateProcess())
        for process in processes.idle:
            process.process.kill()
        assert template.render([QUESTION], [], {}) == "fine"


@contextlib.contextmanager
def killing(count):
    """Kill so many processes as soon as they have started."""
    started = queue.SimpleQueue()

    class Mortal(TemplateProcess):
        def __init__(self, niceness):
            super().__init__(niceness)
            started.put(self)

    def kill():
        for _ in range(count):
            started.get().process.kill()

    killer = threading.Thread(target=kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backend.model.text.isolated.template_pool.TemplateProcess", Mortal)
        killer.start()
        yield
        killer.join()


def test_a_process_that_is_killed_again_and_again_is_nothing_that_the_caller_did():
    with contextlib.closing(TemplateProcesses(1)) as processes:
        template = IsolatedTemplate(JinjaSource("fine", "fine", "{}"), processes=processes)
        processes.close()
        with killing(2), pytest.raises(HelperLostError, match="try again"):
            template.render([QUESTION], [], {})
        assert status_code(HelperLostError("")) is grpc.StatusCode.UNAVAILABLE
        assert template.render([QUESTION], [], {}) == "fine"


THINKING = "{{ enable_thinking }}"


def test_an_examination_whose_processes_are_killed_is_made_again():
    with contextlib.closing(TemplateProcesses(1)) as processes, killing(2):
        template = IsolatedTemplate(JinjaSource(THINKING, THINKING, "{}"), processes=processes)
    assert template.supports_thinking


def test_a_template_that_could_not_be_examined_is_not_taken_for_one_without_abilities():
    lost = pytest.raises(HelperLostError, match="try again")
    with contextlib.closing(TemplateProcesses(1)) as processes, killing(4), lost:
        IsolatedTemplate(JinjaSource(THINKING, THINKING, "{}"), processes=processes)


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_caller_that_leaves_takes_no_process_along(answers, monkeypatch):
    """Whenever it leaves: before its job, before the prompt, or before those of branches."""
    monkeypatch.setattr("backend.model.text.isolated.template_pool.HELPER_GRACE_S", 60.0)
    left, received = threading.Event(), itertools.count(1)
    receive = TemplateProcess.answer

    def received_while_leaving(process, deadline, *reader):
        if next(received) == answers:
            left.set()
        return receive(process, deadline, *reader)

    def leave():
        enter_work(left)
        with pytest.raises(AbandonedError):
            template.render_with_branches([QUESTION], [[QUESTION]], [], {})

    with contextlib.closing(TemplateProcesses(1)) as processes:
        template = IsolatedTemplate(JinjaSource("fine", "fine", "{}"), processes=processes)
        (process,) = processes.idle
        if answers == 0:
            left.set()
        monkeypatch.setattr(TemplateProcess, "answer", received_while_leaving)
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert left.is_set()
        assert processes.idle == [process]
        assert template.render([QUESTION], [], {}) == "fine"


def test_a_caller_that_leaves_ends_the_rendering():
    template, left, outcome = template_of(LOCKING, seconds=0.2), threading.Event(), []
    template.seconds = 3600.0

    def render():
        enter_work(left)
        with pytest.raises(AbandonedError):
            template.render([QUESTION], [], {})
        outcome.append("left")

    thread = threading.Thread(target=render)
    thread.start()
    left.set()
    thread.join()
    assert outcome == ["left"]


def test_branches_that_take_too_long_are_left_out():
    source = "{% if messages[0].content == 'other' %}" + LOCKING + "{% endif %}here"
    other = [Message(role="user", content="other")]
    texts = template_of(source).render_with_branches([QUESTION], [[QUESTION], other], [], {})
    assert texts == ("here", ["", ""])


def test_what_a_message_says_is_no_template():
    text = template_of("{{ messages[0].content }}").render([QUESTION], [], {})
    assert text == QUESTION.content


@pytest.mark.parametrize("name", ["messages", "chat_template", "tools", "tokenize"])
def test_the_options_of_a_request_replace_no_part_of_it(name):
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs"):
        template_of("{{ messages }}").render([QUESTION], [], {name: "{{ 1 }}"})
