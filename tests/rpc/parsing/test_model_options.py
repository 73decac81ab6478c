import json
import logging
import math
from dataclasses import fields
from pathlib import Path

import pytest

from backend.config import Adapter, ModelOptions, TuningOptions
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.load_options import (
    CHOICES,
    OPTION_FIELDS,
    RANGES,
    model_options,
    tuning_options,
)


def read(**given):
    return model_options(pb.ModelOptions(**({"Model": "org/name"} | given)))


def test_a_bare_model_has_the_defaults():
    assert read() == ModelOptions(model="org/name")


def test_every_field_is_taken_over():
    assert read(
        ModelFile="models/name",
        ModelPath="models",
        Tokenizer="org/tokenizer",
        TrustRemoteCode=True,
        MaxModelLen=8192,
        DType="bf16",
        Threads=3,
        Options=["max_slots:4"],
    ) == ModelOptions(
        model="org/name",
        model_file="models/name",
        models_dir=Path("models"),
        tokenizer="org/tokenizer",
        trust_remote_code=True,
        max_model_len=8192,
        dtype="bfloat16",
        threads=3,
        tuning=TuningOptions.of(max_slots=4),
    )


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_that_are_not_set_are_not_limited(threads):
    assert read(Threads=threads).threads is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"DraftModel": "/models/small", "ModelPath": "/models"}, "/models/small"),
        ({"DraftModel": "/models", "ModelPath": "/models/"}, None),
        ({"DraftModel": "/models/a", "Options": ["draft_model:org/b"]}, "org/b"),
        ({"EngineArgs": '{"draft_model": "org/b", "speculation": "draft"}'}, "org/b"),
    ],
)
def test_a_draft_model_is_named_by_field_or_by_option(given, named):
    assert read(**given).tuning.speculation.draft_model == named


def test_the_context_size_that_hosts_always_send_does_not_cap():
    assert read(ContextSize=512).max_model_len is None


def test_a_directory_is_the_same_with_a_slash_at_its_end():
    assert read(Model="dir/model/", ModelFile="/models/dir/model/") == read(
        Model="dir/model", ModelFile="/models/dir/model"
    )


def test_a_file_alone_is_its_own_name():
    assert read(Model="", ModelFile="dir/model").model == "dir/model"


@pytest.mark.parametrize(
    "source", [{"Options": ["trust_remote_code:true"]}, {"TrustRemoteCode": 1}]
)
def test_remote_code_is_trusted_by_field_or_by_option(source):
    assert read(**source).trusts_remote_code


@pytest.mark.parametrize(
    ("given", "adapters"),
    [
        ({"LoraAdapter": "a"}, (Adapter("a", 1.0),)),
        ({"LoraAdapter": "a", "LoraScale": 0.5}, (Adapter("a", 0.5),)),
        ({"LoraAdapters": ["a", "b"]}, (Adapter("a"), Adapter("b"))),
        (
            {"LoraAdapters": ["a", "b"], "LoraScales": [0.5, 0.0]},
            (Adapter("a", 0.5), Adapter("b", 1.0)),
        ),
        ({"LoraAdapter": "a", "LoraAdapters": ["b"]}, (Adapter("a"), Adapter("b"))),
    ],
)
def test_adapters_have_a_scale_of_1_unless_told(given, adapters):
    assert read(**given).adapters == adapters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"Model": ""}, "Model: is empty, and so is ModelFile"),
        ({"MaxModelLen": -1}, "MaxModelLen: must be at least 0, not -1"),
        (
            {"CacheTypeKey": "int8"},
            "CacheTypeKey: 'int8' is unknown; known are f16, bf16, f32, q8_0",
        ),
        ({"CacheTypeValue": "int8"}, "CacheTypeValue: 'int8' is unknown"),
        ({"DType": "int8"}, "DType: 'int8' is unknown; known are bfloat16, float16, float32"),
        ({"LoraAdapters": ["a"], "LoraScales": [1, 2]}, "LoraScales: holds 2 scales for 1 Lora"),
        ({"LoraScales": [1]}, "LoraScales: holds 1 scales for 0 LoraAdapters"),
        ({"LoraAdapters": ["a", ""]}, "LoraAdapters[1]: is empty"),
        ({"LoraAdapter": "a", "LoraScale": math.nan}, "LoraAdapter: has the scale nan"),
        ({"LoraAdapter": "a", "LoraScale": -1}, "LoraAdapter: has the scale -1.0"),
        ({"Options": ["max_slots:many"]}, "Options: max_slots: expected an integer, got 'many'"),
        ({"EngineArgs": '{"max_slots": "4"}'}, "EngineArgs: max_slots: expected an integer"),
        (
            {"EngineArgs": f'{{"max_waiting": {10**30}}}'},
            "EngineArgs: max_waiting: expected an integer of at most 9007199254740992",
        ),
        (
            {"Options": ["hostfile:" + "a" * 256]},
            "Options: hostfile: holds a name of more than 255 bytes",
        ),
        ({"EngineArgs": "[]"}, "EngineArgs: must be a JSON object, not an array"),
        ({"EngineArgs": "{"}, "EngineArgs: is not valid JSON"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(given, message):
    with pytest.raises(InvalidRequestError) as caught:
        read(**given)
    assert str(caught.value).startswith(message)


def test_no_two_groups_have_an_option_of_one_name():
    groups = [getattr(TuningOptions(), group.name) for group in fields(TuningOptions)]
    names = [option.name for group in groups for option in fields(group)]
    assert list(TuningOptions().by_name()) == names
    assert list(OPTION_FIELDS) == names


def test_engine_args_win_over_options():
    read_options = tuning_options(["max_slots:2", "top_p:0.5"], '{"max_slots": 3}')
    assert read_options == TuningOptions.of(max_slots=3, top_p=0.5)


@pytest.mark.parametrize(
    ("options", "engine_args", "parser"),
    [
        (["tool_parser:hermes"], "", "hermes"),
        (["tool_parser!:hermes"], "", "hermes!"),
        (["tool_parser!:hermes", "tool_parser:mistral"], "", "hermes!"),
        (["tool_parser!"], "", None),
        ([], '{"tool_parser!": "hermes"}', "hermes!"),
    ],
)
def test_a_parser_can_be_forced(options, engine_args, parser):
    assert tuning_options(options, engine_args).text.tool_parser == parser


def test_a_forced_parser_that_is_no_name_is_refused():
    with pytest.raises(InvalidRequestError, match="tool_parser!"):
        tuning_options([], '{"tool_parser!": 3}')


def test_options_win_over_the_defaults_of_the_process():
    defaults = TuningOptions.of(max_slots=3)
    request = pb.ModelOptions(Model="m")
    assert model_options(request, defaults).tuning.scheduling.max_slots == 3
    request.Options.append("max_slots:5")
    assert model_options(request, defaults).tuning.scheduling.max_slots == 5


@pytest.mark.parametrize(("sent", "share"), [(0.0, 0.9), (0.5, 0.5), (1.0, 1.0)])
def test_the_share_of_the_memory_is_the_hosts_or_a_default(sent, share):
    assert read(GPUMemoryUtilization=sent).memory_utilization == share


@pytest.mark.parametrize("sent", [-0.1, 1e-45, 1e-8, 1.1, float("nan"), float("inf")])
def test_a_share_of_the_memory_out_of_range_is_refused(sent):
    with pytest.raises(InvalidRequestError, match="GPUMemoryUtilization: must be between "):
        read(GPUMemoryUtilization=sent)


def test_an_unknown_engine_arg_fails_with_the_list_of_names():
    with pytest.raises(InvalidRequestError) as caught:
        tuning_options([], '{"max_slotz": 3, "top_p": 0.5}')
    assert str(caught.value).startswith(
        "EngineArgs: unknown: max_slotz; valid names are max_slots,"
    )
    assert all(name in str(caught.value) for name in TuningOptions().by_name())


def test_unknown_options_are_logged_in_one_line_and_ignored(caplog):
    with caplog.at_level(logging.INFO):
        options = ["use_jinja", "max_slots:2", "vae:x:y", "max_slot:3"]
        assert tuning_options(options, "").scheduling.max_slots == 2
    (record,) = caplog.records
    told = "use_jinja, vae, max_slot (did you mean max_slots?)"
    assert record.getMessage() == f"Options: ignoring unknown options: {told}"


def test_a_flag_needs_no_value():
    assert tuning_options(["trust_remote_code"], "").checkpoint.trust_remote_code


@pytest.mark.parametrize("name", ["max_slots", "top_p", "cache_dir", "pooling"])
def test_any_other_option_without_a_value_is_warned_of_and_ignored(caplog, name):
    assert tuning_options([name], "") == TuningOptions()
    (record,) = caplog.records
    assert record.getMessage() == f"Options: ignoring {name}, which has no value"


def test_an_option_without_a_value_leaves_the_one_before_it():
    assert tuning_options(["max_slots:2", "max_slots"], "").scheduling.max_slots == 2


@pytest.mark.parametrize("name", OPTION_FIELDS)
def test_every_option_can_be_set_both_ways(name):
    value = {int: 2, float: 0.25, bool: True, str: "/x"}[OPTION_FIELDS[name].kind]
    value = CHOICES.get(name, (value,))[0]
    from_options = tuning_options([f"{name}:{str(value).lower()}"], "")
    assert from_options.by_name()[name] == value
    assert from_options == tuning_options([], json.dumps({name: value}))


def test_a_cache_lies_at_an_absolute_path_or_in_a_home():
    with pytest.raises(InvalidRequestError, match="Options: cache_dir: must be an absolute path"):
        tuning_options(["cache_dir:cache"], "")
    assert tuning_options(["cache_dir:~/cache"], "").prompt_cache.cache_dir == "~/cache"


@pytest.mark.parametrize("name", RANGES)
def test_every_range_refuses_what_is_below_it(name):
    with pytest.raises(InvalidRequestError, match=f"Options: {name}: must be"):
        tuning_options([f"{name}:-2"], "")


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_refuses_what_is_not_in_it(name):
    with pytest.raises(InvalidRequestError, match=f"Options: {name}: must be one of .*, not 5"):
        tuning_options([f"{name}:5"], "")


def test_cache_types_set_the_bits_where_the_option_does_not():
    assert read(CacheTypeKey="q8_0").tuning.memory.kv_bits == 8
    assert read(CacheTypeKey="q8_0", Options=["kv_bits:4"]).tuning.memory.kv_bits == 4
    assert read(CacheTypeKey="f16").tuning.memory.kv_bits is None


def test_a_base_for_an_adapter_is_ignored_with_a_warning(caplog):
    assert read(LoraBase="base").adapters == ()
    assert "LoraBase is ignored" in caplog.text


def map_entry(name, value):
    return pb.ModelOptions.EnvVar(key=name, value=value).SerializeToString()


def test_variables_of_the_engine_come_as_entries_of_a_map_or_as_assignments():
    given = [map_entry("B", "x=y"), b"A=1=2", map_entry("EMPTY", ""), b"A=3"]
    assert read(EnvVars=given).environment == (("A", "3"), ("B", "x=y"), ("EMPTY", ""))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (b"no assignment", "is not of the form NAME=value"),
        (b"=x", "is not a name of a variable"),
        (b"9A=x", "is not a name of a variable"),
        (b"A\0B=x", "is not a name of a variable"),
        (b"\xff\xfe", "is neither UTF-8 nor an entry of a map"),
        (b"A=x\0y", "contains a zero byte"),
        (b"A=" + b"x" * 70_000, "holds 70001 characters"),
    ],
)
def test_variables_that_cannot_be_set_are_refused(entry, problem):
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        read(EnvVars=[entry])
    assert str(refused.value).startswith("EnvVars")
