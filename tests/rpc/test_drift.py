"""Calls as models drift into writing them, over a socket."""

import json

import golden
import grpc
import pytest
from scripted_engine import ScriptedEngine, served, steps, stub
from serving import chat, stream, user

from backend.pb import backend_pb2 as pb

KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS, KIMI_SECTION_END = "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>"


def tool(name, *required, **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
TEXT = {"type": "string"}
BASH = tool("bash", "command", command=TEXT)
READ = tool("read_file_2", "path", path=TEXT)


WRITE = tool("write", "path", "content", path=TEXT, content=TEXT)


async def reply_to(parser, text, tools, *earlier):
    loading = pb.ModelOptions(
        Model="org/tiny", Options=[f"tool_parser!:{parser}", "reasoning_parser:none"]
    )
    async with served(ScriptedEngine(steps(text), loaded=False)) as channel:
        client = stub(channel)
        assert (await client.LoadModel(loading)).success
        return await stream(client, chat([user("hi"), *earlier], tools=tools))


def called(reply):
    return [(call["name"], json.loads(call["arguments"])) for call in reply.calls.values()]


def qwen(head, key, value="ls"):
    return f"<tool_call>\n{head}\n{key}\n{value}\n</parameter>\n</function>\n</tool_call>"


def dsml(parameter):
    call = f'<｜DSML｜invoke name="bash">\n{parameter}</｜DSML｜parameter>\n</｜DSML｜invoke>'
    return f"<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"


def minimax(head, parameter):
    return f"<minimax:tool_call>\n{head}\n{parameter}\n</invoke>\n</minimax:tool_call>"


def glm(key, value):
    pair = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
    return f"<tool_call>bash\n{pair}\n</tool_call>"


def kimi(call_id, arguments='{"command": "ls"}'):
    return f"{KIMI_BEGIN}{call_id}{KIMI_ARGUMENTS}{arguments}{KIMI_END}{KIMI_SECTION_END}"


@pytest.mark.parametrize(
    "call_id",
    [
        *("functions.bash:5", "functions_bash_5", "functions.bash0", "functionsbash5", "bash_5"),
        *("bash:0", "bash", "call00003", "call_ab12CD"),
    ],
)
async def test_an_id_of_kimi_in_any_form_is_a_call(call_id):
    reply = await reply_to("kimi_k2", kimi(call_id), [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": "ls"})], "")


@pytest.mark.parametrize("call_id", ["call_1", "functions:0", "0"])
async def test_without_a_name_the_arguments_tell_the_tool(call_id):
    reply = await reply_to("kimi_k2", kimi(call_id, '{"path": "a"}'), [BASH, READ])
    assert called(reply) == [("read_file_2", {"path": "a"})]
    reply = await reply_to("kimi_k2", kimi(call_id, '{"other": "a"}'), [BASH, READ])
    assert not reply.calls


def earlier_call(call_id):
    function = {"name": "bash", "arguments": '{"command": "pwd"}'}
    calls = json.dumps([{"id": call_id, "type": "function", "function": function}])
    return (
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "/"},
    )


async def test_an_id_of_an_earlier_call_does_not_come_again():
    text = kimi("functions.bash:0")
    reply = await reply_to("kimi_k2", text, [BASH], *earlier_call("functions.bash:0"))
    assert [call["id"] for call in reply.calls.values()] == ["functions.bash:1"]
    reply = await reply_to("kimi_k2", text, [BASH])
    assert [call["id"] for call in reply.calls.values()] == ["functions.bash:0"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"command": "ls" /* all */}', "ls"),
        ('{"command": "ls" // all\n}', "ls"),
        ('{"command": "a\\u00"}', "a\\u00"),
        ('{"command": "ls"]}', "ls"),
        ('{"command": "ls}', "ls"),
        ('{"command": "ls"', "ls"),
        ('{"arguments": {"command": "ls"}}', "ls"),
        ('{"input": "{\\"command\\": \\"ls\\"}"}', "ls"),
        ('{"command": "say "hi""}', 'say "hi"'),
    ],
)
async def test_damaged_json_is_read_as_it_was_meant(arguments, expected):
    texts = {
        "hermes_json": HERMES.format("bash", arguments),
        "kimi_k2": kimi("functions.bash:0", arguments),
        "mistral": f"[TOOL_CALLS]bash[ARGS]{arguments}",
        "harmony": HARMONY.format("bash", arguments),
    }
    for parser, text in texts.items():
        reply = await reply_to(parser, text, [BASH])
        assert (called(reply), reply.content) == ([("bash", {"command": expected})], ""), parser


KEY_TAG = "<function=bash><command>ls</command></function>"
GEMMA = "<|tool_call>call:bash{}<tool_call|>"
GEMMA_TEXT = '{command:<|"|>ls<|"|>}'
PYTHONIC = "<|tool_call_start|>[bash({})]<|tool_call_end|>"
DRIFTS = [
    ("gemma4", GEMMA.format('({"command": "ls"})')),
    ("gemma4", GEMMA.format('{command:<|"|>ls<|"|>)')),
    ("gemma4", f"<|tool_call|>call:bash{GEMMA_TEXT}<tool_call|>"),
    ("gemma4", f"<|tool_call>call:bash{GEMMA_TEXT}<|tool_call|>"),
    ("gemma4", f"<|tool_call>call:bash{GEMMA_TEXT}</tool_call>"),
    ("pythonic", PYTHONIC.format("command=f'ls'")),
    ("pythonic", PYTHONIC.format("command=r'ls'")),
    ("pythonic", PYTHONIC.format("command=b'ls'")),
    ("pythonic", PYTHONIC.format("command='l' 's'")),
    ("pythonic", PYTHONIC.format('command="""ls"""')),
    ("pythonic", PYTHONIC.format("f'ls'")),
    ("hermes_json", '<tool_call>{"name": "bash" "arguments": {"command": "ls"}}</tool_call>'),
    ("hermes_json", '<tool_call>{"name="bash", "arguments": {"command": "ls"}}</tool_call>'),
    ("qwen3_coder_xml", qwen("<function=bash>", "<parameter=arguments>", '{"command": "ls"}')),
    ("deepseek_dsml", dsml('<｜DSML｜parameter name="args" string="true">{"command": "ls"}')),
    ("glm4", glm("arguments", '{"command": "ls"}')),
    ("qwen3_coder_xml", qwen("<function bash>", "<parameter=command>")),
    ("qwen3_coder_xml", qwen('<function name="bash">', "<parameter=command>")),
    ("qwen3_coder_xml", qwen("<function=bash>", "<parameter command>")),
    ("qwen3_coder_xml", qwen("<function=bash>", '<parameter name="command">')),
    ("qwen3_coder_xml", qwen("<function=bash>", "<command>ls</command>", "")),
    ("hermes_json", qwen("<function bash>", "<parameter command>")),
    ("deepseek_dsml", dsml("<command>ls</command>")),
    ("deepseek_dsml", dsml("<｜DSML｜command>ls</｜DSML｜command>")),
    ("minimax_m2", minimax('<invoke name="bash">', "<command>ls</command>")),
    ("minimax_m2", minimax("<invoke bash>", "<parameter=command>ls</parameter>")),
    ("glm4", "<tool_call>bash\n<command>ls</command>\n</tool_call>"),
    (
        "seed_oss",
        "<seed:tool_call><function=bash><command>ls</command></function></seed:tool_call>",
    ),
    ("pythonic", '[bash(kwargs={"command": "ls"})]'),
]


@pytest.mark.parametrize(("parser", "text"), DRIFTS)
async def test_a_call_that_drifts_is_a_call(parser, text):
    reply = await reply_to(parser, text, [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": "ls"})], "")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes_json", '<tool_call>\n{"name": "write", "arguments": {"path": "a"'),
        ("hermes_json", "<tool_call>\n{'name': 'write', 'arguments': {'path': 'a'"),
        ("qwen3_coder_xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n"),
        ("glm4", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n"),
        ("gemma4", '<|tool_call>call:write{path:<|"|>a<|"|>'),
        ("pythonic", '[write(path="a"'),
        ("harmony", HARMONY.format("write", '{"path": "a"').removesuffix("<|call|>")),
        ("kimi_k2", f"{KIMI_BEGIN}functions.write:0{KIMI_ARGUMENTS}"),
    ],
)
async def test_a_call_that_was_cut_off_never_runs_without_what_it_needs(parser, text):
    reply = await reply_to(parser, text, [WRITE])
    for call in reply.calls.values():
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["arguments"])


async def test_a_closed_call_stays_what_the_model_wrote():
    reply = await reply_to("hermes_json", HERMES.format("write", '{"path": "a"}'), [WRITE])
    assert called(reply) == [("write", {"path": "a"})]


@pytest.mark.parametrize("parser", ["kimi_k2", "pythonic", "gemma4", "deepseek_v3", "cohere"])
async def test_a_stray_marker_is_not_shown(parser):
    closer = golden.tool_format(parser).closer
    for text, shown in [(closer, ""), (f"Done.\n{closer}", "Done.\n"), (f"A {closer} mark", None)]:
        reply = await reply_to(parser, text, [BASH])
        assert (reply.content, reply.calls) == (text if shown is None else shown, {})


IN_STRING = "a <|tool_calls|> b </tool_call> c"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("sarashina", "<|tool_calls|>[{'name': 'bash', 'arguments': {'command': %r}}]"),
        (
            "hermes_json",
            "<tool_call>\n{'name': 'bash', 'arguments': {'command': %r}}\n</tool_call>",
        ),
    ],
)
async def test_a_marker_in_a_string_of_python_ends_no_call(parser, text):
    reply = await reply_to(parser, text % IN_STRING, [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": IN_STRING})], "")


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        ("pythonic", '[bash(command=run("a", n=[1]))]', 'run("a", n=[1])'),
        (
            "gemma4",
            GEMMA.format('{command:call:run{a:<|"|>b<|"|>,n:[1]}}'),
            'call:run{a:"b",n:[1]}',
        ),
        ("harmony", HARMONY.format("bash", r'"{\"command\": \"ls\"}"'), "ls"),
        ("gemma4", '<|tool_call>call:tool:bash{command:<|"|>ls<|"|>}<tool_call|>', "ls"),
    ],
)
async def test_what_stands_in_place_of_a_value_is_text(parser, text, value):
    reply = await reply_to(parser, text, [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": value})], "")


async def test_code_that_writes_a_call_is_a_value():
    parameter = '<parameter name="command">{}</parameter>'
    code = 'print("<invoke name=\\"bash\\">{}</invoke></dots_function_call>")\n'.format(
        parameter.replace('"', '\\"').format("ls")
    )
    call = f'<invoke name="bash">{parameter.format(code)}</invoke>'
    reply = await reply_to("dots3", f"<dots_function_call>{call}</dots_function_call>", [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": code})], "")


async def test_gemma_3_calls_in_python_in_a_fence():
    text = 'So:\n```tool_code\nprint(default_api.bash(command="ls"))\n```'
    reply = await reply_to("hermes_json", text, [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": "ls"})], "So:\n")
    text = '```tool_code\nprint(rm("/"))\n```'
    reply = await reply_to("hermes_json", text, [BASH])
    assert (called(reply), reply.content) == ([], text)


async def test_tags_of_citations_are_not_sent():
    reply = await reply_to("cohere", "It is <co>**here**</co: 0:[0]>, <co>a</co>.", [BASH])
    assert reply.content == "It is **here**, <co>a</co>."


async def test_names_with_quotes_and_brackets_are_called_by_their_names():
    odd = tool('a"<b>', "k>x", **{"k": TEXT, "k>x": TEXT})
    text = qwen('<function=a"<b>>', "<parameter=k>x>")
    reply = await reply_to("qwen3_coder_xml", text, [odd, BASH])
    assert called(reply) == [('a"<b>', {"k>x": "ls"})]


@pytest.mark.parametrize(
    ("parser", "name"), [("harmony", "a b"), ("harmony", "a<b"), ("muse_spark", "self")]
)
async def test_a_tool_whose_name_the_format_cannot_carry_is_refused(parser, name):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reply_to(parser, "ok", [BASH, tool(name)])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == (
        f"Tools: this model's format of calls cannot carry the name {name!r} ({parser})"
    )
    assert (await reply_to("hermes_json", "ok", [BASH, tool(name)])).content == "ok"


BARE = '{"name": "bash", "arguments": {"command": "ls"}}'


@pytest.mark.parametrize("parser", ["hermes_json", "qwen3_coder_xml", "glm4", "mistral", "gemma4"])
@pytest.mark.parametrize("text", [BARE, f"```json\n{BARE}\n```"])
async def test_json_without_a_marker_is_a_call_if_its_tool_was_offered(parser, text):
    reply = await reply_to(parser, text, [BASH])
    assert (called(reply), reply.content) == ([("bash", {"command": "ls"})], "")
    reply = await reply_to(parser, text, [READ])
    assert (called(reply), reply.content) == ([], text)
    assert (await reply_to(parser, text, [])).content == text
