"""Bad input over the socket: its status, a text that names the field, and nobody else disturbed."""

import asyncio
import json
import re

import grpc
import pytest
from serving import chat, code_of, served, stream, user

from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

TOOL = {"type": "function", "function": {"name": "clock_now", "parameters": {"type": "object"}}}
NAN, INFINITY = float("nan"), float("inf")


def raw(**options) -> pb.PredictOptions:
    return pb.PredictOptions(**{"Prompt": "ba be bi", "Tokens": 4, **options})


BAD_REQUESTS = {
    "Temperature": [raw(Temperature=NAN), raw(Temperature=-1.0), raw(Temperature=INFINITY)],
    "TopP": [raw(TopP=-0.5), raw(TopP=1.5), raw(TopP=NAN)],
    "TopK": [raw(TopK=-2)],
    "MinP": [raw(MinP=-0.1), raw(MinP=2.0)],
    "Penalty": [raw(Penalty=-1.0), raw(Penalty=NAN)],
    "PresencePenalty": [raw(PresencePenalty=NAN)],
    "FrequencyPenalty": [raw(FrequencyPenalty=INFINITY)],
    "LogitBias": [
        raw(LogitBias="{"),
        raw(LogitBias="[1]"),
        raw(LogitBias='{"x": 1}'),
        raw(LogitBias='{"1": "y"}'),
        raw(LogitBias='{"1": NaN}'),
        raw(LogitBias='{"-1": 1}'),
        raw(LogitBias='{"100000": 1}'),
    ],
    "TopLogprobs": [raw(TopLogprobs=1000, Logprobs=1)],
    "Tools": [
        chat([user("ba")], tools=[{"function": 3}]),
        chat([user("ba")], tools=[{"type": "function", "function": {"name": 3}}]),
        pb.PredictOptions(UseTokenizerTemplate=True, Messages=[pb.Message(role="user")], Tools="{"),
    ],
    "ToolChoice": [
        chat([user("ba")], tools=[TOOL], ToolChoice="{"),
        chat([user("ba")], tools=[TOOL], ToolChoice='"sometimes"'),
        chat(
            [user("ba")],
            tools=[TOOL],
            ToolChoice=json.dumps({"type": "function", "function": {"name": "nobody"}}),
        ),
    ],
    "Metadata": [
        chat([user("ba")], Metadata={"enable_thinking": "perhaps"}),
        chat([user("ba")], Metadata={"chat_template_kwargs": "{"}),
        chat([user("ba")], Metadata={"chat_template_kwargs": "[]"}),
    ],
    "Messages": [
        chat([{"role": "wizard", "content": "ba"}]),
        chat([{"role": "", "content": "ba"}]),
        chat([{"role": "assistant", "tool_calls": "{"}]),
    ],
    "Prompt": [raw(Prompt=""), pb.PredictOptions(UseTokenizerTemplate=True)],
    "Images": [raw(Images=["iVBORw0KGgo="])],
}


def classify(**fields):
    return "TokenClassify", pb.TokenClassifyRequest(**{"text": "ba be bi", **fields})


def transcribe(**fields):
    return "AudioTranscription", pb.TranscriptRequest(**{"dst": "/nowhere/a.wav", **fields})


def quantise(**fields):
    paths = {"model": "tiny", "output_dir": "/nowhere"}
    return "StartQuantization", pb.QuantizationRequest(**{**paths, **fields})


def train(**fields):
    paths = {"model": "tiny", "output_dir": "/nowhere", "dataset_source": "/nowhere/a.jsonl"}
    return "StartFineTune", pb.FineTuneRequest(**{**paths, **fields})


def export(**fields):
    paths = {"checkpoint_path": "/nowhere/checkpoint-1", "output_path": "/nowhere/out"}
    return "ExportModel", pb.ExportModelRequest(**{**paths, **fields})


def unknown(name, message):
    return name, message(job_id="nobody's")


NULL, LONG = "a\0b", "a/" * 600
KNOWN_BITS = "q2, q3, q4, q5, q6, q8, mxfp4, mxfp8, nvfp4, mixed_2_6"
NO_JOB = 'job_id: this process has no job "nobody\'s"; jobs end with the process that runs them'
BAD_SIDE_CALLS = [
    (classify(threshold=-0.1), "threshold: must be between 0 and 1, not -0.1"),
    (classify(threshold=NAN), "threshold: must be between 0 and 1, not nan"),
    (transcribe(dst=" "), "dst: is empty"),
    (transcribe(dst=NULL), "dst: is not a path: it contains a null character"),
    (transcribe(dst=LONG), "dst: is a path of more than 1024 bytes"),
    (transcribe(temperature=NAN), "temperature: must be at least 0, not nan"),
    (transcribe(temperature=INFINITY), "temperature: must be at least 0, not inf"),
    (transcribe(language="en\n"), "language: must be at most 64 printable characters"),
    (transcribe(prompt="a" * 4097), "prompt: has 4097 characters, at most 4096 are allowed"),
    (quantise(model=""), "model: is empty"),
    (quantise(model=NULL), "model: is not a path: it contains a null character"),
    (quantise(output_dir=" "), "output_dir: is empty"),
    (quantise(output_dir=f"/{LONG}"), "output_dir: is a path of more than 1024 bytes"),
    (quantise(quantization_type="q7"), f"quantization_type: 'q7' is not one of {KNOWN_BITS}"),
    (quantise(quantization_type="../q4"), "quantization_type: '../q4' is not one of q2"),
    (
        quantise(extra_options={"group_size": "-1"}),
        "extra_options[\"group_size\"]: must be a number, not '-1'",
    ),
    (quantise(extra_options={"check": "perhaps"}), 'extra_options["check"]: '),
    (quantise(job_id="a\n"), "job_id: must be at most 128 printable characters"),
    (train(model=""), "model: is empty"),
    (train(output_dir=""), "output_dir: is empty"),
    (train(dataset_source=""), "dataset_source: is empty"),
    (train(dataset_source=NULL), "dataset_source: is not a path: it contains a null character"),
    (train(dataset_split="test"), "dataset_split: 'test': only the split 'train'"),
    (train(training_method="dpo"), "training_method: 'dpo' is not offered"),
    (train(training_type="qlora"), "training_type: 'qlora' is not one of lora, dora, full"),
    (train(adapter_rank=-1), "adapter_rank: must be between 0 and 65536, not -1"),
    (train(adapter_rank=2**16 + 1), "adapter_rank: must be between 0 and 65536, not 65537"),
    (train(output_dir="out"), "output_dir: must be an absolute path, not 'out'"),
    (quantise(output_dir="~/out"), "output_dir: must be an absolute path, not '~/out'"),
    (export(output_path="./out"), "output_path: must be an absolute path, not './out'"),
    (train(adapter_alpha=-1), "adapter_alpha: must be at least 0, not -1"),
    (train(adapter_dropout=1.0), "adapter_dropout: must be at least 0 and below 1, not 1"),
    (train(learning_rate=NAN), "learning_rate: must be between 0 and 1, not nan"),
    (train(learning_rate=2.0), "learning_rate: must be between 0 and 1, not 2"),
    (train(num_epochs=-1), "num_epochs: must be at least 0, not -1"),
    (train(batch_size=-1), "batch_size: must be at least 0, not -1"),
    (train(gradient_accumulation_steps=-1), "gradient_accumulation_steps: must be at least 0"),
    (train(warmup_steps=-1), "warmup_steps: must be at least 0, not -1"),
    (train(max_steps=-1), "max_steps: must be at least 0, not -1"),
    (train(save_steps=-1), "save_steps: must be at least 0, not -1"),
    (train(weight_decay=-0.5), "weight_decay: must be at least 0 and below 1, not -0.5"),
    (train(optimizer="lion"), "optimizer: 'lion' is not one of adamw, adam, sgd"),
    (train(target_modules=["a"] * 257), "target_modules: holds 257 values, at most 256"),
    (train(target_modules=["a", "b\n"]), "target_modules[1]: must be at most 128 printable"),
    (train(resume_from_checkpoint=NULL), "resume_from_checkpoint: is not a path"),
    (
        train(extra_options={"max_seq_length": "many"}),
        "extra_options[\"max_seq_length\"]: must be a number, not 'many'",
    ),
    (train(extra_options={"mask_prompt": "x"}), 'extra_options["mask_prompt"]: '),
    (train(job_id="a" * 129), "job_id: must be at most 128 printable characters"),
    (export(checkpoint_path=""), "checkpoint_path: is empty"),
    (export(output_path=""), "output_path: is empty"),
    (export(output_path=NULL), "output_path: is not a path: it contains a null character"),
    (export(export_format="gguf"), "export_format: 'gguf' is not one of lora, merged_16bit"),
    (export(model=NULL), "model: is not a path: it contains a null character"),
    (("ListCheckpoints", pb.ListCheckpointsRequest(output_dir=NULL)), "output_dir: is not a path"),
    (("ListCheckpoints", pb.ListCheckpointsRequest(output_dir=__file__)), "output_dir: "),
    (unknown("FineTuneProgress", pb.FineTuneProgressRequest), NO_JOB),
    (unknown("StopFineTune", pb.FineTuneStopRequest), NO_JOB),
    (unknown("QuantizationProgress", pb.QuantizationProgressRequest), NO_JOB),
    (unknown("StopQuantization", pb.QuantizationStopRequest), NO_JOB),
]


def answer(backend, name, request):
    """Make a call; of one that streams, take the first reply."""
    call = getattr(backend.stub, name)(request)
    return call.read() if hasattr(call, "read") else call


async def test_a_bad_field_of_a_side_call_is_named_whatever_is_loaded(shared):
    async with shared() as backend:
        for (name, request), problem in BAD_SIDE_CALLS:
            code, details = await code_of(answer(backend, name, request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (name, details)
            assert details.startswith(problem), details
            if name == "AudioTranscription":
                streamed = answer(backend, "AudioTranscriptionStream", request)
                assert await code_of(streamed) == (code, details)


@pytest.mark.parametrize(
    ("method", "field", "data"),
    [
        ("Score", "question_type", b"\x0a\x01p\x12\x01c\x3a\x04ball"),
        ("Score", "question_type", b"\x0a\x01p\x12\x01c\x38\x02"),
        ("TokenClassify", "labels", b"\x0a\x01t\x20\x01"),
    ],
)
async def test_a_newer_hosts_field_of_another_type_or_value_is_refused_by_name(
    shared, method, field, data
):
    async with shared() as backend:
        code, details = await code_of(
            backend.channel.unary_unary(f"/backend.Backend/{method}")(data)
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(f"{field}: ")


async def test_what_a_newer_host_says_beside_the_model_is_tolerated(tiny_models):
    own = pb.ModelOptions(Model=str(tiny_models("llama"))).SerializeToString()
    newer = b"\xd2\x04\x02\x08\x01" + b"\xea\x04\x05a.yml" + b"\xf2\x04\x01x"  # 74, 77, 78
    async with served() as backend:
        load = backend.channel.unary_unary("/backend.Backend/LoadModel")
        assert pb.Result.FromString(await load(own + newer)).success


async def test_paths_where_nothing_is_are_refused_by_their_field(tmp_path):
    nothing = str(tmp_path / "none")
    async with served() as backend:
        found = await backend.stub.ListCheckpoints(pb.ListCheckpointsRequest(output_dir=nothing))
        assert not found.checkpoints
        exported = await backend.stub.ExportModel(
            pb.ExportModelRequest(checkpoint_path=nothing, output_path=nothing)
        )
        assert not exported.success
        assert exported.message.startswith(f"checkpoint_path: '{nothing}' is not a checkpoint: ")
        _, request = train(model=nothing, dataset_source=nothing, output_dir=nothing)
        started = await backend.stub.StartFineTune(request)
        progress = pb.FineTuneProgressRequest(job_id=started.job_id)
        *_, last = [update async for update in backend.stub.FineTuneProgress(progress)]
        problem = f"dataset_source: there is no file or directory '{nothing}'"
        assert (last.status, last.message) == ("failed", problem)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", BAD_REQUESTS)
async def test_a_bad_field_is_named_and_disturbs_nobody(shared, tiny_models, field):
    async with shared(tiny_models("llama")) as backend:
        good = raw(Tokens=30, IgnoreEOS=True)
        expected = (await backend.stub.Predict(good)).message
        running = asyncio.create_task(stream(backend.stub, good))
        for request in BAD_REQUESTS[field]:
            code, details = await code_of(backend.stub.Predict(request))
            assert (code, field in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
            streamed = await code_of(stream(backend.stub, request))
            assert streamed == (code, details)
        assert (await running).message.encode() == expected


async def test_bytes_that_are_no_text_name_their_field(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        call = backend.channel.unary_unary("/backend.Backend/Predict")
        request = b"\x0a\x02\xff\xfe"  # field 1, Prompt, two bytes that are no UTF-8
        code, details = await code_of(call(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Prompt" in details
        code, _ = await code_of(call(b"\xff\xff\xff\xff"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('root ::= "yes', "line 1"),
        ('root ::= "a"\nthing ::= other', "line 2"),
        ("root ::= root", "Grammar"),
        ('{"type": "objekt"}', "objekt"),
        ('{"type": "string", "not": {"pattern": "a"}}', "not"),
        ('root ::= "' + "x" * 300_000 + '"', "256 KiB"),
        ('root ::= "a" root', "Grammar"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused(shared, tiny_models, grammar, problem):
    async with shared(tiny_models("llama")) as backend:
        neighbour = backend.stub.Predict(raw(Tokens=30, IgnoreEOS=True))
        code, details = await code_of(backend.stub.Predict(raw(Grammar=grammar)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Grammar" in details
        assert problem in details
        assert (await neighbour).tokens == 30


async def test_a_schema_of_the_metadata_that_cannot_be_followed_is_named_as_such(
    shared, tiny_models
):
    async with shared(tiny_models("llama")) as backend:
        request = raw(Metadata={"json_schema": '{"type": "objekt"}'}, Grammar='root ::= "a"')
        for answer in (backend.stub.Predict(request), stream(backend.stub, request)):
            code, details = await code_of(answer)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert re.match(r'Metadata\["json_schema"\]: (?!Grammar).*objekt', details)


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "object", "propertyNames": {"type": [{}]}}',
        '{"type": "array", "items": {"enum": [1]}, "uniqueItems": true, "minItems": -1}',
        '{"type": "array", "items": {"enum": [1]}, "uniqueItems": true, "minItems": 1e999}',
    ],
)
async def test_a_schema_with_values_that_cannot_be_is_the_callers_fault(
    shared, tiny_models, schema
):
    async with shared(tiny_models("llama")) as backend:
        request = raw(Metadata={"json_schema": schema})
        code, details = await code_of(backend.stub.Predict(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "json_schema" in details


async def test_the_wrong_identity_is_refused_on_every_call_that_carries_one(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        other = {"ModelIdentity": "another"}
        calls = [
            backend.stub.Predict(raw(**other)),
            stream(backend.stub, raw(**other)),
            backend.stub.TokenizeString(raw(**other)),
            backend.stub.Embedding(raw(**other)),
            backend.stub.Rerank(pb.RerankRequest(query="q", **other)),
            backend.stub.Score(pb.ScoreRequest(prompt="p", **other)),
            backend.stub.TokenClassify(pb.TokenClassifyRequest(text="t", **other)),
            backend.stub.AudioTranscription(pb.TranscriptRequest(dst="a.wav", **other)),
            backend.stub.AudioTranscriptionStream(pb.TranscriptRequest(dst="a", **other)).read(),
        ]
        for call in calls:
            code, details = await code_of(call)
            assert code is grpc.StatusCode.NOT_FOUND
            assert details.startswith("model identity mismatch: ModelIdentity is ")
        right = str(tiny_models("llama"))
        assert (await backend.stub.Predict(raw(ModelIdentity=right))).tokens > 0


async def test_without_a_model_calls_fail_with_the_hosts_words(shared):
    async with shared() as backend:
        calls = [
            backend.stub.Predict(raw()),
            stream(backend.stub, raw()),
            backend.stub.TokenizeString(raw()),
            backend.stub.Detokenize(pb.DetokenizeRequest(tokens=[1])),
            backend.stub.TokenClassify(pb.TokenClassifyRequest(text="t")),
            backend.stub.AudioTranscription(pb.TranscriptRequest(dst="a.wav")),
            backend.stub.AudioTranscriptionStream(pb.TranscriptRequest(dst="a.wav")).read(),
        ]
        for call in calls:
            code, details = await code_of(call)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "model not loaded" in details


async def test_what_a_model_cannot_do_is_unimplemented(shared, tiny_models):
    async with shared(tiny_models("llama")) as backend:
        calls = [
            backend.stub.Rerank(pb.RerankRequest(query="q", documents=["d"])),
            backend.stub.TokenClassify(pb.TokenClassifyRequest(text="t")),
            backend.stub.AudioTranscription(pb.TranscriptRequest(dst="a.wav")),
            backend.stub.AudioTranscriptionStream(pb.TranscriptRequest(dst="a.wav")).read(),
            backend.channel.unary_unary("/backend.Backend/Sing")(b""),
        ]
        for call in calls:
            code, _ = await code_of(call)
            assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_tools_that_may_not_be_written_are_refused(tiny_models, tmp_path):
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    options = [f"chat_template:{plain}", "write_tools:false"]
    async with served(tiny_models("llama"), Options=options) as backend:
        request = chat([user("ba")], tools=[TOOL], Tokens=3)
        code, details = await code_of(backend.stub.Predict(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "Tools" in details
        hidden = chat([user("ba")], tools=[TOOL], Tokens=3, ToolChoice='"none"')
        assert (await backend.stub.Predict(hidden)).tokens == 3


async def test_a_template_that_refuses_gives_its_own_words(tiny_models, tmp_path):
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('only poems, please') }}")
    options = [f"chat_template:{strict}"]
    async with served(tiny_models("llama"), Options=options) as backend:
        code, details = await code_of(backend.stub.Predict(chat([user("ba")])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "only poems, please" in details
