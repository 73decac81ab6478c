import math

import pytest

from backend.config import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, ModelOptions, TuningOptions
from backend.core.prompt import Message
from backend.core.request import CacheHint, Priority, SamplingParams
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.generation_fields import generation_call

NAN, INF = math.nan, math.inf
USER = pb.Message(role="user", content="hi")


def call(tuning=None, **fields):
    request = pb.PredictOptions(**({"Prompt": "hi"} | fields))
    return generation_call(request, ModelOptions(model="m", tuning=tuning or TuningOptions()))


def sampling(tuning=None, **fields):
    return call(tuning, **fields).params.sampling


def test_an_empty_request_samples_greedily_with_everything_off():
    seed = sampling().seed
    assert sampling(Seed=seed) == SamplingParams(seed=seed)


def test_temperature_0_is_greedy():
    assert sampling(Temperature=0.0, TopP=0.95).is_greedy


def test_the_request_is_read_field_by_field():
    read = sampling(
        Temperature=0.5,
        TopK=40,
        TopP=0.75,
        MinP=0.25,
        Penalty=1.5,
        PresencePenalty=-2.0,
        FrequencyPenalty=2.5,
        Repeat=64,
        LogitBias='{"1": -100, "7": 0.5}',
        Seed=9,
    )
    assert read == SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.5,
        penalty_window=64,
        logit_bias={1: -100.0, 7: 0.5},
        seed=9,
    )


TUNING = TuningOptions.of(
    max_tokens=100,
    top_p=0.5,
    top_k=20,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    seed=7,
    xtc_probability=0.2,
    xtc_threshold=0.3,
    enable_thinking=True,
)


def test_what_the_request_leaves_unset_comes_from_the_model_options():
    read = call(TUNING)
    assert read.params.max_tokens == 100
    assert read.template_options == {"enable_thinking": True}
    assert read.params.sampling == SamplingParams(
        top_k=20,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        seed=7,
        xtc_probability=0.2,
        xtc_threshold=0.3,
    )


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"TopP": 0.75}, "top_p", 0.75),
        ({"TopK": 3}, "top_k", 3),
        ({"TopK": -1}, "top_k", 0),
        ({"MinP": 0.25}, "min_p", 0.25),
        ({"Penalty": 1.0}, "repetition_penalty", 1.0),
        ({"PresencePenalty": -0.5}, "presence_penalty", -0.5),
        ({"FrequencyPenalty": 0.5}, "frequency_penalty", 0.5),
        ({"Seed": 5}, "seed", 5),
    ],
)
def test_the_request_wins_over_the_model_options(fields, name, value):
    assert getattr(sampling(TUNING, **fields), name) == value


@pytest.mark.parametrize(("tokens", "limit"), [(0, None), (-1, None), (5, 5)])
def test_no_token_limit_means_no_private_cap(tokens, limit):
    assert call(Tokens=tokens).params.max_tokens == limit


def test_the_token_limit_of_the_request_wins():
    assert call(TUNING, Tokens=5000).params.max_tokens == 5000


def test_a_negative_seed_is_fresh_in_each_request():
    assert len({sampling(Seed=-1).seed for _ in range(20)}) > 1


def test_0_is_a_seed_because_the_host_draws_one_for_a_request_without():
    assert sampling(Seed=0).seed == 0


@pytest.mark.parametrize("seed", [0, -1])
def test_the_seed_of_the_options_is_for_requests_without_one(seed):
    assert sampling(TuningOptions.of(seed=7), Seed=seed).seed == 7


@pytest.mark.parametrize("repeat", [0, -1])
def test_an_unset_penalty_window_is_the_whole_text(repeat):
    assert sampling(Repeat=repeat).penalty_window == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"Temperature": NAN}, "Temperature: must be a finite number, not nan"),
        ({"Temperature": INF}, "Temperature: must be a finite number, not inf"),
        ({"Temperature": -0.5}, "Temperature: must be at least 0, not -0.5"),
        ({"TopP": -0.5}, "TopP: must be between 0 and 1, not -0.5"),
        ({"TopP": 1.5}, "TopP: must be between 0 and 1, not 1.5"),
        ({"TopP": NAN}, "TopP: must be a finite number, not nan"),
        ({"TopK": -2}, "TopK: must be at least -1, not -2"),
        ({"MinP": 2.0}, "MinP: must be between 0 and 1, not 2"),
        ({"MinP": -1.0}, "MinP: must be between 0 and 1, not -1"),
        ({"Penalty": -1.0}, "Penalty: must be at least 0, not -1"),
        ({"Penalty": NAN}, "Penalty: must be a finite number, not nan"),
        ({"PresencePenalty": INF}, "PresencePenalty: must be a finite number, not inf"),
        ({"FrequencyPenalty": NAN}, "FrequencyPenalty: must be a finite number, not nan"),
        ({"LogitBias": "{"}, "LogitBias: is not valid JSON"),
        ({"LogitBias": "[1]"}, "LogitBias: must be a JSON object, not an array"),
        ({"LogitBias": '{"x": 1}'}, "LogitBias: 'x' is not a token id"),
        ({"LogitBias": '{"-1": 1}'}, "LogitBias: '-1' is not a token id"),
        ({"LogitBias": '{"99999999999": 1}'}, "LogitBias: '99999999999' is not a token id"),
        ({"LogitBias": '{"1": "a"}'}, 'LogitBias["1"]: must be a number, not a string'),
        ({"LogitBias": '{"1": true}'}, 'LogitBias["1"]: must be a number, not a boolean'),
        ({"LogitBias": '{"1": 1e39}'}, 'LogitBias["1"]: must be a finite number'),
        ({"LogitBias": '{"1": NaN}'}, "LogitBias: is not valid JSON: NaN is not a JSON number"),
        ({"Logprobs": -1}, "Logprobs: must be between 0 and 20, not -1"),
        ({"TopLogprobs": MAX_TOP_LOGPROBS + 1}, "TopLogprobs: must be between 0 and 20, not 21"),
        ({"Images": ["aGk=", ""]}, "Images[1]: is empty"),
        ({"Prompt": ""}, "Prompt: is empty"),
        ({"Prompt": "", "Messages": [USER]}, "Prompt: is empty, and Messages are read with Use"),
        ({"Prompt": "", "UseTokenizerTemplate": True}, "Messages: is empty, and so is Prompt"),
        (
            {"UseTokenizerTemplate": True, "Messages": [USER, pb.Message(content="x")]},
            "Messages[1].role: must not be empty",
        ),
        (
            {"StopPrompts": [str(number) for number in range(MAX_STOP_STRINGS + 1)]},
            "StopPrompts: holds 65 stop strings, at most 64 are allowed",
        ),
        (
            {"CorrelationId": "a\nb"},
            "CorrelationId: must be at most 128 printable characters",
        ),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(fields, message):
    with pytest.raises(InvalidRequestError) as caught:
        call(**fields)
    assert str(caught.value).startswith(message)


def test_the_schema_in_the_metadata_wins_over_a_grammar():
    schema = {"json_schema": '{"type": "object"}'}
    assert call(Metadata=schema).grammar == '{"type": "object"}'
    assert call(Grammar='\nroot ::= "x"', Metadata=schema).grammar == '{"type": "object"}'
    assert call(Grammar='\nroot ::= "x"').grammar == '\nroot ::= "x"'
    assert call().grammar == ""


@pytest.mark.parametrize(("text", "allowed"), [("", True), ("true", True), ("false", False)])
def test_parallel_calls_are_allowed_unless_forbidden(text, allowed):
    assert call(Metadata={"parallel_tool_calls": text}).parallel_tool_calls is allowed


def test_another_clients_word_for_parallel_calls_is_ignored_and_logged(caplog):
    caplog.set_level("INFO")
    assert call(Metadata={"parallel_tool_calls": "maybe"}).parallel_tool_calls
    assert "Metadata['parallel_tool_calls'] is ignored: 'maybe'" in caplog.text


def test_anthropics_switch_inside_the_choice_forbids_parallel_calls():
    choice = '{"type": "auto", "disable_parallel_tool_use": true}'
    assert not call(ToolChoice=choice).parallel_tool_calls
    assert call(ToolChoice=choice.replace("true", "false")).parallel_tool_calls


@pytest.mark.parametrize(
    ("word", "hint"),
    [("keep", CacheHint.KEEP), ("once", CacheHint.ONCE), ("", CacheHint.NONE)],
)
def test_a_hint_for_the_prompt_cache_is_one_of_two_words(word, hint):
    assert call(Metadata={"cache_hint": word}).params.cache_hint is hint


def test_another_clients_word_for_a_hint_is_ignored_and_logged(caplog):
    caplog.set_level("INFO")
    assert call(Metadata={"cache_hint": "none"}).params.cache_hint is CacheHint.NONE
    assert "Metadata['cache_hint'] is ignored" in caplog.text


@pytest.mark.parametrize("name", ["high", "normal", "low", ""])
def test_a_priority_is_normal_unless_it_is_named(name):
    expected = Priority[name.upper()] if name else Priority.NORMAL
    assert call(Metadata={"priority": name}).params.priority is expected
    assert call().params.priority is Priority.NORMAL


@pytest.mark.parametrize("name", ["urgent", "HIGH", "0", "high "])
def test_another_clients_word_for_a_priority_is_ignored_and_logged(name, caplog):
    caplog.set_level("INFO")
    assert call(Metadata={"priority": name}).params.priority is Priority.NORMAL
    assert "Metadata['priority'] is ignored" in caplog.text


def test_messages_win_over_the_prompt_when_the_template_is_asked_for():
    read = call(Prompt="already rendered", UseTokenizerTemplate=True, Messages=[USER])
    assert read.messages == (Message(role="user", content="hi"),)
    assert read.prompt == ""


@pytest.mark.parametrize(
    "fields", [{"UseTokenizerTemplate": False, "Messages": [USER]}, {"UseTokenizerTemplate": True}]
)
def test_otherwise_the_prompt_is_raw_text(fields):
    read = call(Prompt="raw", **fields)
    assert (read.prompt, read.messages) == ("raw", ())


def test_stop_strings_are_distinct_and_not_empty():
    assert call(StopPrompts=["b", "", "a", "b"]).stop_strings == ("b", "a")


@pytest.mark.parametrize(
    ("logprobs", "top_logprobs", "asked"),
    [(0, 0, None), (1, 1, 1), (5, 5, 5), (1, 0, 1), (0, 3, 3)],
)
def test_either_logprobs_field_asks_for_them(logprobs, top_logprobs, asked):
    assert call(Logprobs=logprobs, TopLogprobs=top_logprobs).params.top_logprobs == asked


def test_request_ids_are_unique_even_for_one_correlation_id():
    ids = {call(CorrelationId="abc").request_id for _ in range(3)} | {call().request_id}
    assert len(ids) == 4
    assert sum(request_id.startswith("abc-") for request_id in ids) == 3


@pytest.mark.parametrize("field", ["Debug", "DebugMode"])
def test_either_debug_field_lets_the_log_hold_text(field):
    assert call(**{field: True}).debug
    assert not call().debug


def test_the_stop_token_may_be_ignored():
    assert call(IgnoreEOS=True).ignore_eos
