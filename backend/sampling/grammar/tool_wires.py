"""How model families write tool calls, as grammars need it; the names are the parsers'."""

from dataclasses import replace

from backend.sampling.grammar.call_frame import CallFrame
from backend.sampling.grammar.call_template import Maybe, Slot, Template
from backend.sampling.grammar.literal_strings import PythonStrings, RawStrings
from backend.sampling.grammar.messages import Messages
from backend.sampling.grammar.tool_wire import ToolWire
from backend.sampling.grammar.tools_literal import LiteralArguments
from backend.sampling.grammar.tools_tagged import TaggedArguments
from backend.sampling.grammar.writer import Expression

NAME, QUOTED_NAME, ARGUMENTS, KEY = Slot.NAME, Slot.QUOTED_NAME, Slot.ARGUMENTS, Slot.KEY
_INDEX = Expression("/0|[1-9][0-9]{0,3}/")
_MISTRAL_ID = Expression("/[a-zA-Z0-9]{9}/")
_LINE, _BLANK = Maybe(("\n",)), Maybe((" ",))


def _json_call(name_key: str, arguments_key: str) -> Template:
    return (f'{{"{name_key}": ', QUOTED_NAME, f', "{arguments_key}": ', ARGUMENTS, "}")


_CALL = _json_call("name", "arguments")
_LEADING_CALL = r"\[?\s*\{+\s*\x22(name|function|type|id|index)\x22"


def _json_list(opener: str, end: str) -> CallFrame:
    return CallFrame(opener=opener, begin=("[",), call=_CALL, separator=(", ",), end=end)


def _gemma(opener: str, closer: str, quote: str) -> ToolWire:
    arguments = LiteralArguments(
        assign=":",
        comma=",",
        colon=":",
        strings=RawStrings(quote),
        constants={"true": ("true",), "false": ("false",), "null": ("null",)},
        sorts_names=True,
    )
    frame = CallFrame(
        opener=opener,
        call=("call:", NAME, "{", ARGUMENTS, f"}}{closer}"),
        separator=(opener,),
        arguments=arguments,
        is_block=False,
    )
    return ToolWire(frames=(frame,), lead="call:")


def _python_calls(opener: str, begin: str, separator: str, end: str) -> CallFrame:
    return CallFrame(
        opener=opener,
        begin=(begin,),
        call=(NAME, "(", ARGUMENTS, ")"),
        separator=(separator,),
        end=end,
        arguments=_PYTHON_ARGUMENTS,
    )


_PYTHON_ARGUMENTS = LiteralArguments(
    assign="=",
    comma=", ",
    colon=": ",
    strings=PythonStrings(),
    constants={"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
)
_FUNCTION_TAGS = ("</parameter>", "<parameter=", "</function>")
_FUNCTION: Template = ("<function=", NAME, ">\n", ARGUMENTS, "</function>")
_PADDED_ARGUMENTS = TaggedArguments(
    begin=("<parameter=", KEY, ">\n"),
    end=("\n</parameter>\n",),
    taboos=(*_FUNCTION_TAGS, "</tool_call>"),
)
_SEED_ARGUMENTS = TaggedArguments(
    begin=("<parameter=", KEY, ">"),
    end=("</parameter>\n",),
    taboos=(*_FUNCTION_TAGS, "</seed:tool_call>"),
)


def _pairs(prefix: str, closer: str) -> TaggedArguments:
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    return TaggedArguments(
        begin=(f"<{key}", KEY, f"</{key}", _LINE, f"<{value}"),
        end=(f"</{value}", _LINE),
        taboos=(f"</{value}", f"<{key}", closer),
    )


def _dsml(between: str, block: str) -> CallFrame:
    begin, end = f"<｜DSML｜{between}", f"</｜DSML｜{between}"
    return CallFrame(
        opener=f"{begin}{block}>",
        call=(f'\n{begin}invoke name="', NAME, '">\n', ARGUMENTS, f"{end}invoke>"),
        end=f"\n{end}{block}>",
        arguments=TaggedArguments(
            begin=(f'{begin}parameter name="', KEY, '" string="true">'),
            begin_json=(f'{begin}parameter name="', KEY, '" string="false">'),
            end=(f"{end}parameter>\n",),
            taboos=(f"{end}parameter>", f"{begin}parameter", f"{end}invoke>", f"{end}{block}>"),
        ),
    )


def _deepseek(*call: str | Slot, separator: str) -> ToolWire:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    frame = CallFrame(
        opener="<｜tool▁calls▁begin｜>",
        call=(begin, *call, end),
        separator=(separator,) if separator else (),
        end="<｜tool▁calls▁end｜>",
    )
    return ToolWire(frames=(frame,), taboos=(begin,))


TOOL_WIRES = {
    "hermes_json": ToolWire(
        frames=(
            CallFrame(
                opener="<tool_call>",
                call=("\n", *_CALL, "\n</tool_call>"),
                separator=("\n<tool_call>",),
                is_block=False,
            ),
        ),
    ),
    "qwen3_coder_xml": ToolWire(
        frames=(
            CallFrame(
                opener="<tool_call>",
                call=("\n", *_FUNCTION, "\n</tool_call>"),
                separator=("\n<tool_call>",),
                arguments=_PADDED_ARGUMENTS,
                is_block=False,
            ),
            CallFrame(
                opener="<function=",
                call=_FUNCTION[1:],
                separator=("\n<function=",),
                arguments=_PADDED_ARGUMENTS,
                is_block=False,
                is_lapse=True,
            ),
        ),
    ),
    "llama3_json": ToolWire(
        frames=(
            CallFrame(
                opener='{"name": ',
                call=(QUOTED_NAME, ', "parameters": ', ARGUMENTS, "}"),
                separator=('; {"name": ',),
                is_lead=True,
            ),
            CallFrame(
                opener="<|python_tag|>",
                call=_json_call("name", "parameters"),
                separator=("; ",),
                needs="<|python_tag|>",
            ),
        ),
        taboos=("<|python_tag|>", "<function="),
        lead=_LEADING_CALL,
    ),
    "harmony": ToolWire(
        frames=(
            CallFrame(
                opener="<|channel|>commentary to=functions.",
                call=(NAME, _BLANK, "<|constrain|>json<|message|>", ARGUMENTS),
                end="<|call|>",
            ),
            CallFrame(
                opener=" to=functions.",
                call=(
                    *(NAME, "<|channel|>commentary ", Maybe(("<|constrain|>",))),
                    *("json<|message|>", ARGUMENTS),
                ),
                end="<|call|>",
            ),
        ),
        most_calls=1,
        surroundings=Messages,
    ),
    "mistral": ToolWire(
        frames=(
            CallFrame(
                opener="[TOOL_CALLS]",
                call=(NAME, Maybe(("[CALL_ID]", _MISTRAL_ID)), "[ARGS]", ARGUMENTS),
                separator=("[TOOL_CALLS]",),
                needs="[ARGS]",
                is_block=False,
            ),
            CallFrame(
                opener="[TOOL_CALLS]",
                begin=(_BLANK, "["),
                call=(*_CALL[:-1], Maybe((', "id": "', _MISTRAL_ID, '"')), "}"),
                separator=(", ",),
                end="]",
                lacks="[ARGS]",
            ),
        ),
    ),
    "glm4": ToolWire(
        frames=(
            CallFrame(
                opener="<tool_call>",
                call=(NAME, _LINE, ARGUMENTS, "</tool_call>"),
                separator=(_LINE, "<tool_call>"),
                arguments=_pairs("", "</tool_call>"),
                is_block=False,
            ),
        ),
    ),
    "minimax_m2": ToolWire(
        frames=(
            CallFrame(
                opener="<minimax:tool_call>",
                call=('\n<invoke name="', NAME, '">\n', ARGUMENTS, "</invoke>"),
                end="\n</minimax:tool_call>",
                arguments=TaggedArguments(
                    begin=('<parameter name="', KEY, '">'),
                    end=("</parameter>\n",),
                    taboos=("</parameter>", "<parameter", "</invoke>", "</minimax:tool_call>"),
                ),
            ),
        ),
    ),
    "kimi_k2": ToolWire(
        frames=(
            CallFrame(
                opener="<|tool_calls_section_begin|>",
                call=(
                    *("<|tool_call_begin|>functions.", NAME, ":", _INDEX),
                    *("<|tool_call_argument_begin|>", ARGUMENTS, "<|tool_call_end|>"),
                ),
                end="<|tool_calls_section_end|>",
            ),
        ),
        taboos=("<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": ToolWire(
        frames=(
            replace(_python_calls("[", "", ", ", "]"), lacks="<|tool_call_start|>", is_lead=True),
            replace(
                _python_calls("<|tool_call_start|>", "[", ", ", "]<|tool_call_end|>"),
                needs="<|tool_call_start|>",
            ),
        ),
        taboos=("<|python_start|>",),
        lead=r"\[\s*[\w.\x2f-]+\(",
    ),
    "olmo3": ToolWire(
        frames=(_python_calls("<function_calls>", "\n", "\n", "\n</function_calls>"),),
    ),
    "deepseek_v31": _deepseek(NAME, "<｜tool▁sep｜>", ARGUMENTS, separator=""),
    "deepseek_v3": _deepseek(
        *("function<｜tool▁sep｜>", NAME, "\n```json\n", ARGUMENTS, "\n```"), separator="\n"
    ),
    "nemotron": ToolWire(frames=(_json_list("<TOOLCALL>", "]</TOOLCALL>"),)),
    "json_list": ToolWire(frames=(_json_list("<tool_calls>", "]</tool_calls>"),)),
    "granite": ToolWire(
        frames=(_json_list("<|tool_call|>", "]"),),
        taboos=("<tool_call>", "<function_call>"),
        lead=_LEADING_CALL,
    ),
    "phi4": ToolWire(
        frames=(_json_list("<|tool_call|>", "]<|/tool_call|>"),),
        taboos=("functools[",),
        lead=_LEADING_CALL,
    ),
    "cohere": ToolWire(
        frames=(
            CallFrame(
                opener="<|START_ACTION|>",
                begin=("[\n    ",),
                call=(
                    *('{"tool_call_id": "', _INDEX, '", "tool_name": ', QUOTED_NAME),
                    *(', "parameters": ', ARGUMENTS, "}"),
                ),
                separator=(",\n    ",),
                end="\n]<|END_ACTION|>",
            ),
        ),
    ),
    "apertus": ToolWire(
        frames=(
            CallFrame(
                opener="<|tools_prefix|>",
                begin=("[",),
                call=("{", QUOTED_NAME, ": ", ARGUMENTS, "}"),
                separator=(", ",),
                end="]<|tools_suffix|>",
            ),
        ),
    ),
    "seed_oss": ToolWire(
        frames=(
            CallFrame(
                opener="<seed:tool_call>",
                call=("\n", *_FUNCTION, "\n</seed:tool_call>"),
                separator=("\n<seed:tool_call>",),
                arguments=_SEED_ARGUMENTS,
                is_block=False,
            ),
        ),
    ),
    "minicpm5": ToolWire(
        frames=(
            CallFrame(
                opener="<function name=",
                call=('"', NAME, '">', ARGUMENTS, "</function>"),
                separator=("\n<function name=",),
                arguments=TaggedArguments(
                    begin=('<param name="', KEY, '">'),
                    end=("</param>",),
                    taboos=("</param>",),
                    verbatim=("<![CDATA[", "]]>"),
                    special="<&",
                ),
                is_block=False,
            ),
        ),
    ),
    "longcat": ToolWire(
        frames=(
            CallFrame(
                opener="<longcat_tool_call>",
                call=(NAME, "\n", ARGUMENTS, "</longcat_tool_call>"),
                separator=("\n<longcat_tool_call>",),
                arguments=_pairs("longcat_", "</longcat_tool_call>"),
                needs="<longcat_arg_key>",
                is_block=False,
            ),
            CallFrame(
                opener="<longcat_tool_call>",
                call=("\n", *_CALL, "\n</longcat_tool_call>"),
                separator=("\n<longcat_tool_call>",),
                lacks="<longcat_arg_key>",
                is_block=False,
            ),
        ),
    ),
    "hunyuan_v3": ToolWire(
        frames=(
            CallFrame(
                opener="<tool_calls>",
                call=("\n<tool_call>", NAME, "<tool_sep>\n", ARGUMENTS, "</tool_call>"),
                end="\n</tool_calls>",
                arguments=_pairs("", "</tool_call>"),
            ),
        ),
        taboos=("<tool_call>",),
    ),
    "deepseek_dsml": ToolWire(
        frames=(
            _dsml("", "tool_calls"),
            _dsml("", "function_calls"),
            _dsml(" ", "calls"),
        ),
        taboos=("<｜DSML｜r:tool_calls>",),
    ),
}
