"""Replies of each family, written as its template writes them."""

from dataclasses import dataclass

from backend.core.prompt import Tool

NOTE_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "pri": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "pin": {"type": "boolean"},
        "opts": {"$ref": "#/$defs/Options"},
        "mode": {"enum": ["fast", "slow"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 99}]},
    },
    "required": ["text"],
    "$defs": {
        "Options": {
            "type": "object",
            "properties": {
                "b": {"type": "boolean"},
                "y-z": {"type": "null"},
                "inner": {"$ref": "#/$defs/Options"},
            },
            "required": ["b"],
            "additionalProperties": False,
        }
    },
}


def tool(name, schema):
    return Tool(
        name=name, schema={"type": "function", "function": {"name": name, "parameters": schema}}
    )


TOOLS = (tool("note_add", NOTE_SCHEMA), tool("clock_now", {}))

MILK = {"text": "milk", "pri": 2}
HOSTILE_TEXT = 'say "hi" <b>\nok'
RICH = {
    "text": HOSTILE_TEXT,
    "pri": 2,
    "tags": ["a", "é"],
    "pin": True,
    "opts": {"b": True, "y-z": None},
}
ONE = (("note_add", MILK),)
TWO = (("note_add", MILK), ("clock_now", {}))
NONE = (("clock_now", {}),)
ALL = (("note_add", RICH),)

_MILK = '{"text": "milk", "pri": 2}'
_TURNED = '{"pri": 2, "text": "milk"}'
_RICH = (
    r'{"text": "say \"hi\" <b>\nok", "pri": 2, "tags": ["a", "é"], "pin": true, '
    '"opts": {"b": true, "y-z": null}}'
)


@dataclass(frozen=True)
class FormatReplies:
    """The same four replies in one family.

    Attributes:
        two: Nothing where a reply has room for one call.
        turned: The first, with its two arguments the other way round.
        markers: Texts that are one token in models of the family.
        parser: The parsers' name of the family.
        reasoning: The thought format that goes with it.
        prompt_tail: The end of the prompt.
        ends: Markers that end a reply.
    """

    one: str
    two: str
    none: str
    rich: str
    turned: str
    markers: tuple[str, ...] = ()
    parser: str = ""
    reasoning: str = "think"
    prompt_tail: str = ""
    ends: tuple[str, ...] = ()

    @property
    def replies(self):
        found = ((self.one, ONE), (self.two, TWO), (self.none, NONE), (self.rich, ALL))
        return tuple((text, calls) for text, calls in found if text)


def _replies(call, block="{}", between="", **fields):
    """Write the replies of a family whose calls hold JSON."""
    milk, clock = call.format("note_add", _MILK, 0), call.format("clock_now", "{}", 0)
    second, rich = call.format("clock_now", "{}", 1), call.format("note_add", _RICH, 0)
    turned = call.format("note_add", _TURNED, 0)
    texts = (milk, milk + between + second, clock, rich, turned)
    return FormatReplies(*(block.replace("{}", text) for text in texts), **fields)


def _hermes(begin="<tool_call>", end="</tool_call>", **fields):
    call = f'{begin}\n{{{{"name": "{{}}", "arguments": {{}}}}}}\n{end}'
    return _replies(call, between="\n", markers=(begin, end), **fields)


_LISTED = '{{"name": "{}", "arguments": {}}}'
_RICH_PAIRS = (
    ("text", HOSTILE_TEXT),
    ("pri", "2"),
    ("tags", '["a", "é"]'),
    ("pin", "true"),
    ("opts", '{"b": true, "y-z": null}'),
)


def _tagged(call, parameter, block="{}", between="", **fields):
    """Write the replies of a family whose calls hold raw values."""

    def written(name, *pairs):
        arguments = "".join(parameter(key, value) for key, value in pairs)
        return call.replace("NAME", name).replace("ARGUMENTS", arguments)

    milk, clock = written("note_add", ("text", "milk"), ("pri", "2")), written("clock_now")
    turned = written("note_add", ("pri", "2"), ("text", "milk"))
    texts = (milk, milk + between + clock, clock, written("note_add", *_RICH_PAIRS), turned)
    return FormatReplies(*(block.replace("{}", text) for text in texts), **fields)


def _pairs(prefix="", line="\n", suffix=""):
    return lambda key, value: (
        f"<{prefix}arg_key{suffix}>{key}</{prefix}arg_key{suffix}>{line}"
        f"<{prefix}arg_value{suffix}>{value}</{prefix}arg_value{suffix}>{line}"
    )


def _marked(between, block, mark="｜DSML｜", parser="deepseek_dsml"):
    def parameter(key, value):
        is_string = str(key == "text").lower()
        begin = f'<{mark}{between}parameter name="{key}" string="{is_string}">'
        return f"{begin}{value}</{mark}{between}parameter>\n"

    return _tagged(
        f'<{mark}{between}invoke name="NAME">\nARGUMENTS</{mark}{between}invoke>',
        parameter,
        block=f"<{mark}{between}{block}>\n{{}}\n</{mark}{between}{block}>",
        between="\n",
        markers=(mark,),
        parser=parser,
    )


def _gemma(begin, end, quote, reasoning):
    def call(text):
        return f"{begin}call:{text}{end}"

    milk, clock = call(f"note_add{{pri:2,text:{quote}milk{quote}}}"), call("clock_now{}")
    rich = call(
        f"note_add{{opts:{{b:true,y-z:null}},pin:true,pri:2,"
        f"tags:[{quote}a{quote},{quote}é{quote}],text:{quote}{HOSTILE_TEXT}{quote}}}"
    )
    turned = call(f"note_add{{text:{quote}milk{quote},pri:2}}")
    texts = (milk, milk + clock, clock, rich, turned)
    return FormatReplies(*texts, markers=(begin, end, quote), reasoning=reasoning)


def _minimax_m3():
    mark = "]<]minimax[>["

    def element(key, value):
        return f"{mark}<{key}>{value}{mark}</{key}>"

    def reply(*calls):
        return f"{mark}<tool_call>\n" + "\n".join(calls) + f"\n{mark}</tool_call>"

    def call(name, *elements):
        return f'{mark}<invoke name="{name}">{"".join(elements)}{mark}</invoke>'

    milk = call("note_add", element("text", "milk"), element("pri", 2))
    rich = call(
        "note_add",
        element("text", HOSTILE_TEXT),
        element("pri", 2),
        element("tags", element("item", "a") + element("item", "é")),
        element("pin", "true"),
        element("opts", element("b", "true") + element("y-z", "null")),
    )
    clock = call("clock_now")
    turned = call("note_add", element("pri", 2), element("text", "milk"))
    texts = (reply(milk), reply(milk, clock), reply(clock), reply(rich), reply(turned))
    return FormatReplies(*texts, markers=(mark,), reasoning="mm_think")


def _k3_argument(key, value):
    kinds = {"text": "string", "pri": "number", "tags": "array", "pin": "boolean"}
    begin = f'<|open|>argument key="{key}" type="{kinds.get(key, "object")}"<|sep|>'
    return f"{begin}{value}<|close|>argument<|sep|>"


def _python(block, between, **fields):
    milk, clock = "note_add(text='milk', pri=2)", "clock_now()"
    rich = (
        f"note_add(text='{HOSTILE_TEXT}', pri=2, tags=['a', \"é\"], pin=True, "
        "opts={'b': true, \"y-z\": None})"
    )
    turned = "note_add(pri=2, text='milk')"
    texts = (milk, milk + between + clock, clock, rich, turned)
    return FormatReplies(*(block.replace("{}", text) for text in texts), **fields)


def _cdata(value):
    return f"<![CDATA[{value}]]>" if "<" in value else value


_DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_DEEPSEEK_MARKERS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
_GLM_MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
_PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
_HARMONY_MARKERS = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    *("<|call|>", "<|return|>", "<|constrain|>"),
)


def _harmony(call):
    def written(name, arguments):
        return call.format(name) + arguments

    clock = written("clock_now", "{}")
    return FormatReplies(
        written("note_add", _MILK),
        "",
        clock,
        written("note_add", _RICH),
        written("note_add", _TURNED),
        markers=_HARMONY_MARKERS,
        parser="harmony",
        reasoning="harmony",
        prompt_tail="<|start|>assistant",
        ends=("<|call|>", "<|return|>"),
    )


def _single(call, markers, **fields):
    """Write the replies of a format that has room for one call."""
    milk, clock = call.format("note_add", _MILK), call.format("clock_now", "{}")
    rich, turned = (call.format("note_add", each) for each in (_RICH, _TURNED))
    return FormatReplies(milk, "", clock, rich, turned, markers, **fields)


FORMATS = {
    "hermes_json": _hermes(),
    "hermes_json exaone": _replies(
        f"<tool_call>{_LISTED}</tool_call>",
        between="\n",
        markers=("<tool_call>", "</tool_call>"),
        parser="hermes_json",
    ),
    "qwen3_coder_xml": _tagged(
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        _PARAMETER.format,
        between="\n",
        markers=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": _replies('{{"name": "{}", "parameters": {}}}', between="; "),
    "llama3_json ipython": _replies(
        '{{"name": "{}", "parameters": {}}}',
        "<|python_tag|>{}",
        between="; ",
        markers=("<|python_tag|>",),
        parser="llama3_json",
    ),
    "llama3_json functionary": _replies("<function={}>{}</function>", parser="llama3_json"),
    "harmony": _harmony("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"),
    "harmony template": _harmony(" to=functions.{}<|channel|>commentary json<|message|>"),
    "mistral": _replies(
        "[TOOL_CALLS]{}[ARGS]{}",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        reasoning="mistral_think",
    ),
    "mistral v11": _replies(
        "[TOOL_CALLS]{}[CALL_ID]aB3dE5fG{2}[ARGS]{1}".replace("{}", "{0}"),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        parser="mistral",
    ),
    "mistral v3": _replies(
        '{{"name": "{}", "arguments": {}, "id": "aB3dE5fG{}"}}',
        "[TOOL_CALLS][{}]",
        between=", ",
        markers=("[TOOL_CALLS]",),
        parser="mistral",
    ),
    "mistral v2": _replies(
        _LISTED, "[TOOL_CALLS] [{}]", between=", ", markers=("[TOOL_CALLS]",), parser="mistral"
    ),
    "glm4": _tagged(
        "<tool_call>NAME\nARGUMENTS</tool_call>",
        _pairs(),
        between="\n",
        markers=(*_GLM_MARKERS, "</arg_value>"),
    ),
    "glm4 compact": _tagged(
        "<tool_call>NAMEARGUMENTS</tool_call>",
        _pairs(line=""),
        markers=(*_GLM_MARKERS, "</arg_value>"),
        parser="glm4",
    ),
    "minimax_m2": _tagged(
        '<invoke name="NAME">\nARGUMENTS</invoke>',
        '<parameter name="{}">{}</parameter>\n'.format,
        block="<minimax:tool_call>\n{}\n</minimax:tool_call>",
        between="\n",
        markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "kimi_k2": _replies(
        "<|tool_call_begin|>functions.{}:{2}<|tool_call_argument_begin|>{1}<|tool_call_end|>".replace(
            "{}", "{0}"
        ),
        "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        markers=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>', "gemma4_channel"),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>", "none"),
    "pythonic": _python(
        "<|tool_call_start|>[{}]<|tool_call_end|>",
        ", ",
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "pythonic llama4": _python("[{}]", ", ", parser="pythonic"),
    "minicpm3": _python(
        "<|tool_call_start|>\n```python\n{}\n```\n<|tool_call_end|>",
        "\n",
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
        reasoning="minicpm3_thought",
    ),
    "olmo3": _python("<function_calls>\n{}\n</function_calls>", "\n"),
    "olmo3 tight": _python("<function_calls>{}</function_calls>", "\n", parser="olmo3"),
    "deepseek_v31": _replies(
        "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        _DEEPSEEK,
        markers=_DEEPSEEK_MARKERS,
    ),
    "deepseek_v3": _replies(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>",
        _DEEPSEEK,
        between="\n",
        markers=_DEEPSEEK_MARKERS,
    ),
    "deepseek_dsml v4": _marked("", "tool_calls"),
    "deepseek_dsml v3.2": _marked("", "function_calls"),
    "deepseek_dsml v4.1": _marked(" ", "calls"),
    "nemotron": _replies(_LISTED, "<TOOLCALL>[{}]</TOOLCALL>", between=", "),
    "nemotron_mini": _replies(f"<toolcall> {_LISTED} </toolcall>", between=" "),
    "json_list": _replies(_LISTED, "<tool_calls>[{}]</tool_calls>", between=", "),
    "json_list jamba": _replies(
        _LISTED, "<tool_calls>[\n    {}\n]</tool_calls>", between=",\n    ", parser="json_list"
    ),
    "json_list lines": _replies(
        _LISTED, "<tool_calls>\n{}\n</tool_calls>", between="\n", parser="json_list"
    ),
    "hunyuan_v1": _replies(
        "<tool_call>{}\n```json\n{}\n```</tool_call>",
        "<tool_calls>{}</tool_calls>",
        markers=("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>"),
    ),
    "granite": _replies(_LISTED, "<|tool_call|>[{}]", between=", ", markers=("<|tool_call|>",)),
    "sarashina": _replies(_LISTED, "<|tool_calls|>[{}]", between=", ", markers=("<|tool_calls|>",)),
    "phi4": _replies(
        _LISTED,
        "<|tool_call|>[{}]<|/tool_call|>",
        between=", ",
        markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "phi4 functools": _replies(_LISTED, "functools[{}]", between=", ", parser="phi4"),
    "cohere": _replies(
        '{{"tool_call_id": "{2}", "tool_name": "{0}", "parameters": {1}}}',
        "<|START_ACTION|>[\n    {}\n]<|END_ACTION|>",
        between=",\n    ",
        markers=("<|START_ACTION|>", "<|END_ACTION|>"),
        reasoning="cohere_think",
    ),
    "apertus": _replies(
        '{{"{}": {}}}',
        "<|tools_prefix|>[{}]<|tools_suffix|>",
        between=", ",
        markers=("<|tools_prefix|>", "<|tools_suffix|>"),
        reasoning="apertus_inner",
    ),
    "mimo": _tagged(
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        "<parameter={}>{}</parameter>\n".format,
        between="\n",
        markers=("<tool_call>", "</tool_call>"),
    ),
    "seed_oss": _tagged(
        "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
        "<parameter={}>{}</parameter>\n".format,
        between="\n",
        markers=("<seed:tool_call>", "</seed:tool_call>"),
        reasoning="seed_think",
    ),
    "minicpm5": _tagged(
        '<function name="NAME">ARGUMENTS</function>',
        lambda key, value: f'<param name="{key}">{_cdata(value)}</param>',
        between="\n",
    ),
    "longcat": _tagged(
        "<longcat_tool_call>NAME\nARGUMENTS</longcat_tool_call>",
        _pairs("longcat_"),
        between="\n",
        markers=("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"),
        reasoning="longcat_think",
    ),
    "longcat json": _hermes("<longcat_tool_call>", "</longcat_tool_call>", parser="longcat"),
    "hunyuan_v3": _tagged(
        "<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>",
        _pairs(),
        block="<tool_calls>\n{}\n</tool_calls>",
        between="\n",
        markers=("<tool_calls>", "</tool_calls>", *_GLM_MARKERS, "</arg_value>", "<tool_sep>"),
    ),
    "hunyuan_v3_opensource": _tagged(
        "<tool_call:opensource>NAME<tool_sep:opensource>\nARGUMENTS</tool_call:opensource>",
        _pairs(suffix=":opensource"),
        block="<tool_calls:opensource>\n{}\n</tool_calls:opensource>",
        between="\n",
        markers=("<tool_calls:opensource>", "<tool_call:opensource>", "<tool_sep:opensource>"),
        reasoning="hunyuan_think",
    ),
    "hunyuan_v4": _tagged(
        "<tool_call:6124c78e>NAME\nARGUMENTS</tool_call:6124c78e>",
        _pairs(suffix=":6124c78e"),
        block="<tool_calls:6124c78e>\n{}\n</tool_calls:6124c78e>",
        between="\n",
        markers=("<tool_calls:6124c78e>", "<tool_call:6124c78e>", "<arg_key:6124c78e>"),
        reasoning="hunyuan_v4_think",
    ),
    "k2_horizon": _tagged(
        "<ifm|tool_call>NAME\nARGUMENTS</ifm|tool_call>",
        lambda key, value: (
            f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{value}</ifm|arg_value>\n"
        ),
        block="<ifm|tool_calls>\n{}\n</ifm|tool_calls>",
        between="\n",
        markers=("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>", "<ifm|arg_key>"),
        reasoning="k2_think",
    ),
    "dots3": _tagged(
        '<invoke name="NAME">ARGUMENTS</invoke>',
        '<parameter name="{}">{}</parameter>'.format,
        block="<dots_function_call>{}</dots_function_call>",
        markers=("<dots_function_call>", "</dots_function_call>"),
    ),
    "iquest_coder": _tagged(
        "<iquestcoder_tool_call>NAME\nARGUMENTS</iquestcoder_tool_call>",
        _pairs(),
        between="\n",
        markers=("<iquestcoder_tool_call>", "</iquestcoder_tool_call>", "<arg_key>"),
    ),
    "solar_open2": _tagged(
        "<|tool_call:start|>NAME\nARGUMENTS<|tool_call:end|>",
        "<|tool_arg:start|>{}<|tool_arg:value|>{}<|tool_arg:end|>\n".format,
        between="\n",
        markers=(
            *("<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>"),
            *("<|tool_arg:value|>", "<|tool_arg:end|>"),
        ),
        reasoning="colon_think",
    ),
    "plamo3": _replies(
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{}"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
        "<|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|>"
        "<|plamo:end_tool_request:plamo|>",
        "<|plamo:begin_tool_requests:plamo|>{}<|plamo:end_tool_requests:plamo|>",
        markers=("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:msg|>"),
        reasoning="plamo_think",
    ),
    "hyperclovax": _replies(
        _LISTED,
        " -> tool/function_call\n[{}]",
        between=", ",
        markers=("<|im_end|>", "<|im_start|>"),
        reasoning="hyperclovax_think",
        prompt_tail="<|im_start|>assistant",
    ),
    "minimax_m3": _minimax_m3(),
    "kimi_k3": _tagged(
        '<|open|>call tool="NAME" index="1"<|sep|>ARGUMENTS<|close|>call<|sep|>',
        _k3_argument,
        block="<|open|>tools<|sep|>{}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        markers=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        reasoning="xtml_think",
        prompt_tail='<|open|>message role="assistant"<|sep|>',
        ends=("<|end_of_msg|>",),
    ),
    "muse_spark": _tagged(
        " to=NAME<|message|><atem:function_calls>\n"
        '<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n</atem:function_calls>',
        '<atem:parameter name="{}">{}</atem:parameter>\n'.format,
        between="<|eom|><|start|>assistant",
        markers=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        reasoning="muse",
        prompt_tail="<|start|>assistant",
    ),
    "gigachat3": _single(
        'function call<|role_sep|>\n{{"name": "{}", "arguments": {}}}', ("<|role_sep|>",)
    ),
    "gigachat3 token": _single(
        '<|function_call|>{{"name": "{}", "arguments": {}}}',
        ("<|function_call|>",),
        parser="gigachat3",
    ),
    "gigachat35": _marked("", "tool_calls", "｜GCML｜", "gigachat35"),
    "rwkv": _replies(
        '**Tool Call:**\n```json\n{{"name": "{}", "arguments": {}}}\n```', between="\n"
    ),
    "command_r_plus": _replies(
        '{{\n        "tool_name": "{}",\n        "parameters": {}\n    }}',
        "Action:\n```json\n[\n    {}\n]```",
        between=",\n    ",
    ),
    "xlam": _replies(_LISTED, "[{}]", between=", "),
    "internlm2": _replies(
        '<|action_start|><|plugin|>\n{{"name": "{}", "arguments": {}}}<|action_end|>',
        between="\n",
        markers=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "internlm2 intern_s1": _replies(
        '<|action_start|><|plugin|>\n{{"name": "{}", "parameters": {}}}\n<|action_end|>',
        between="\n",
        markers=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        parser="internlm2",
    ),
    "granite_20b_fc": _replies('<function_call> {{"name": "{}", "arguments": {}}}', between="\n"),
    "inkling": _replies(
        '<|content_invoke_tool_json|>{{"name": "{}", "args": {}}}',
        "{}<|end_message|>",
        between="<|end_message|><|message_model|>",
        markers=("<|content_invoke_tool_json|>", "<|end_message|>", "<|message_model|>"),
        reasoning="inkling_thinking",
    ),
    "solar_open": _replies(
        "<|tool_call:begin|>abcdefg{2}<|tool_call:name|>{0}<|tool_call:args|>{1}<|tool_call:end|>",
        "<|tool_calls|>{}<|calls|>",
        markers=(
            *("<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:end|>"),
            *("<|tool_call:name|>", "<|tool_call:args|>"),
        ),
        reasoning="solar_think",
    ),
    "mirothinker": _replies(
        "<use_mcp_tool>\n<server_name>default</server_name>\n<tool_name>{}</tool_name>\n"
        "<arguments>\n{}\n</arguments>\n</use_mcp_tool>",
        between="\n",
    ),
    "step3": _tagged(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">'
        "ARGUMENTS</steptml:invoke><｜tool_call_end｜>",
        '<steptml:parameter name="{}">{}</steptml:parameter>'.format,
        block="<｜tool_calls_begin｜>{}<｜tool_calls_end｜>",
        markers=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
    ),
    "glm4_0414": _replies(
        "{}\n{}",
        between="<|assistant|>",
        markers=("<|assistant|>",),
        prompt_tail="<|assistant|>",
    ),
    "functionary": _replies("{}\n{}", between=">>>", prompt_tail=">>>"),
}
