"""How model families write tool calls. The first row that fits wins.

A row without `make_cursor` is known by name only: its calls are content.
"""

from backend.output.evidence import Clue, FormatRow, as_tokens, in_template
from backend.output.format import NO_TOOLS, ToolFormat
from backend.output.tool_calls import arg_pairs, xml_function

HERMES_JSON = ToolFormat(
    name="hermes_json",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    make_cursor=xml_function.make_json_or_xml,
)

TOOL_ROWS = (
    FormatRow(
        ToolFormat(name="deepseek_dsml"),
        (in_template("｜DSML｜"), as_tokens("｜DSML｜")),
        ("deepseek_v32", "deepseek_v4", "dsml"),
    ),
    FormatRow(
        ToolFormat(name="harmony"),
        (as_tokens("<|channel|>", "<|call|>", "<|constrain|>"),),
        ("gpt_oss", "openai"),
    ),
    FormatRow(
        ToolFormat(name="kimi_k3"),
        (as_tokens("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),),
    ),
    FormatRow(ToolFormat(name="minimax_m3"), (in_template("]<]minimax[>["),)),
    FormatRow(ToolFormat(name="minimax_m2"), (in_template("<minimax:tool_call>"),), ("minimax",)),
    FormatRow(ToolFormat(name="gemma4"), (in_template("<|tool_call>", "<tool_call|>"),)),
    FormatRow(ToolFormat(name="functiongemma"), (in_template("<start_function_call>"),)),
    FormatRow(
        ToolFormat(name="muse_spark"),
        (in_template("<atem:function_calls>"),),
        ("muse", "muse_glimmer"),
    ),
    FormatRow(ToolFormat(name="longcat"), (in_template("<longcat_tool_call>"),)),
    FormatRow(ToolFormat(name="seed_oss"), (in_template("<seed:tool_call>"),)),
    FormatRow(
        ToolFormat(name="hunyuan_v3"),
        (in_template("<tool_sep", "<arg_key"),),
        ("hy_v3", "hy3", "hunyuan"),
    ),
    FormatRow(
        ToolFormat(
            name="glm4",
            openers=(arg_pairs.OPENER,),
            closers=(arg_pairs.CLOSER,),
            tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            make_cursor=arg_pairs.make_arg_pairs,
        ),
        (in_template("<arg_key>"),),
        ("glm", "glm45", "glm47", "glm4_moe", "glm47_moe", "poolside_v1"),
    ),
    FormatRow(ToolFormat(name="kimi_k2"), (in_template("<|tool_calls_section_begin|>"),)),
    FormatRow(
        ToolFormat(name="deepseek_v3"),
        (Clue(template=("```json",), anywhere=("<｜tool▁calls▁begin｜>",)),),
        ("deepseek", "deepseek_r1"),
    ),
    FormatRow(ToolFormat(name="deepseek_v31"), (Clue(anywhere=("<｜tool▁calls▁begin｜>",)),)),
    FormatRow(
        ToolFormat(name="cohere"),
        (in_template("<|START_ACTION|>"),),
        ("command_r", "cohere_command3"),
    ),
    FormatRow(
        ToolFormat(name="pythonic"),
        (
            in_template("<|tool_list_start|>"),
            in_template("<|tool_call_start|>"),
            as_tokens("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        ("lfm2", "llama4_pythonic", "llama4", "toolace"),
    ),
    FormatRow(
        ToolFormat(
            name="qwen3_coder_xml",
            openers=xml_function.OPENERS,
            closers=(xml_function.CLOSER,),
            make_cursor=xml_function.make_xml_function,
        ),
        (
            in_template("<tool_call>\n<function="),
            # In most templates the newline is an escape inside a string.
            in_template(r"<tool_call>\n<function="),
        ),
        ("qwen3_coder", "qwen3_xml", "nemotron_v3", "nemotron_3", "step3p5", "mimo"),
    ),
    FormatRow(ToolFormat(name="minicpm5"), (in_template('<function name="', '<param name="'),)),
    FormatRow(
        ToolFormat(name="nemotron"), (in_template("<TOOLCALL>"),), ("nemotron_v2", "nemotron_json")
    ),
    FormatRow(
        ToolFormat(name="mistral"),
        (Clue(anywhere=("[TOOL_CALLS]",)),),
        ("mistral_v11", "magistral"),
    ),
    FormatRow(
        ToolFormat(name="granite"),
        (in_template("<|tool_call|>", "<|start_of_role|>"),),
        ("granite3",),
    ),
    FormatRow(
        ToolFormat(name="phi4"),
        (in_template("<|tool_call|>", "<|tool|>"), in_template("functools[")),
        ("phi4_mini_json", "phi4_mini"),
    ),
    # OLMo 3 writes the same list without its brackets.
    FormatRow(ToolFormat(name="olmo3"), (in_template("<function_calls>"),)),
    FormatRow(
        ToolFormat(name="llama3_json"), (in_template("<|python_tag|>"),), ("llama3", "llama4_json")
    ),
    FormatRow(ToolFormat(name="functionary"), (in_template(">>>all"), in_template("'>>>'"))),
    FormatRow(
        ToolFormat(name="json_list"),
        (in_template("<tool_calls>"),),
        ("hunyuan_a13b", "jamba", "apriel"),
    ),
    FormatRow(ToolFormat(name="apertus"), (in_template("<|tools_prefix|>"),)),
    FormatRow(
        HERMES_JSON,
        (
            in_template("<tool_call>", "tool_call.name"),
            in_template("<tool_call>", '"arguments"'),
        ),
        ("hermes", "json_tools", "qwen", "qwen25", "qwen3", "granite4", "exaone4", "ernie45"),
    ),
    FormatRow(NO_TOOLS),
)
