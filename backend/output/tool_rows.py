"""How model families write tool calls. The first row that fits wins."""

from backend.output.evidence import Clue, FormatRow, as_tokens, in_template
from backend.output.format import NO_TOOLS, ToolFormat
from backend.output.tool_calls import (
    apertus,
    arg_pairs,
    atem,
    deepseek,
    dsml,
    functionary,
    gemma,
    harmony,
    hunyuan,
    json_lists,
    kimi_k2,
    minicpm,
    minimax,
    mistral,
    named_function,
    pythonic,
    xml_function,
    xtml,
)

HERMES_JSON = ToolFormat(
    name="hermes_json",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    make_cursor=xml_function.make_json_or_xml,
)

TOOL_ROWS = (
    FormatRow(
        ToolFormat(
            name="deepseek_dsml",
            openers=dsml.OPENERS,
            closers=dsml.CLOSERS,
            tokens=(dsml.MARK,),
            make_cursor=dsml.make_dsml,
            is_quotable=False,
        ),
        (in_template("｜DSML｜"), as_tokens("｜DSML｜")),
        ("deepseek_v32", "deepseek_v4", "dsml"),
    ),
    FormatRow(
        ToolFormat(
            name="harmony",
            closers=(harmony.CALL,),
            tokens=harmony.DIALECT.tokens,
            make_cursor=harmony.make_harmony,
            owns_reply=True,
        ),
        (as_tokens("<|channel|>", "<|call|>", "<|constrain|>"),),
        ("gpt_oss", "openai"),
    ),
    FormatRow(
        ToolFormat(
            name="kimi_k3",
            openers=(xtml.OPENER,),
            closers=(xtml.CLOSER,),
            tokens=xtml.TOKENS,
            make_cursor=xtml.make_xtml,
            is_quotable=False,
        ),
        (as_tokens("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),),
    ),
    FormatRow(
        ToolFormat(
            name="minimax_m3",
            openers=(minimax.M3_OPENER, minimax.M2_OPENER),
            closers=(minimax.M3_CLOSER, minimax.M2_CLOSER),
            tokens=(minimax.MARK,),
            make_cursor=minimax.make_minimax,
        ),
        (in_template("]<]minimax[>["),),
    ),
    FormatRow(
        ToolFormat(
            name="minimax_m2",
            openers=(minimax.M2_OPENER,),
            closers=(minimax.M2_CLOSER,),
            make_cursor=minimax.make_minimax,
        ),
        (in_template("<minimax:tool_call>"),),
        ("minimax",),
    ),
    FormatRow(
        ToolFormat(
            name="gemma4",
            openers=(gemma.GEMMA4_OPENER,),
            leads=(gemma.CALL,),
            closers=(gemma.GEMMA4_CLOSER,),
            tokens=(gemma.GEMMA4_QUOTE,),
            make_cursor=gemma.make_gemma4,
            is_quotable=False,
        ),
        (in_template("<|tool_call>", "<tool_call|>"),),
    ),
    FormatRow(
        ToolFormat(
            name="functiongemma",
            openers=(gemma.FUNCTION_OPENER,),
            leads=(gemma.CALL,),
            closers=(gemma.FUNCTION_CLOSER,),
            tokens=(gemma.FUNCTION_QUOTE,),
            make_cursor=gemma.make_functiongemma,
            is_quotable=False,
        ),
        (in_template("<start_function_call>"),),
    ),
    FormatRow(
        ToolFormat(
            name="muse_spark",
            openers=atem.OPENERS,
            closers=(atem.CLOSER,),
            tokens=atem.DIALECT.tokens,
            make_cursor=atem.make_muse,
            owns_reply=True,
        ),
        (in_template("<atem:function_calls>"),),
        ("muse", "muse_glimmer"),
    ),
    FormatRow(
        ToolFormat(
            name="longcat",
            openers=(arg_pairs.LONGCAT_OPENER,),
            closers=(arg_pairs.LONGCAT_CLOSER,),
            tokens=arg_pairs.LONGCAT_TAGS,
            make_cursor=arg_pairs.make_longcat,
        ),
        (in_template("<longcat_tool_call>"),),
    ),
    FormatRow(
        ToolFormat(
            name="seed_oss",
            openers=(xml_function.SEED_OPENER,),
            closers=(xml_function.SEED_CLOSER,),
            make_cursor=xml_function.make_seed,
        ),
        (in_template("<seed:tool_call>"),),
    ),
    FormatRow(
        ToolFormat(
            name="hunyuan_v3_opensource",
            openers=hunyuan.OPENSOURCE.openers,
            closers=hunyuan.OPENSOURCE.closers,
            tokens=(hunyuan.OPENSOURCE.name_end, *hunyuan.OPENSOURCE.pair_tags),
            make_cursor=hunyuan.OPENSOURCE.make_cursor,
        ),
        (Clue(anywhere=(hunyuan.OPENSOURCE.name_end,)),),
        ("hy_v3_opensource",),
    ),
    FormatRow(
        ToolFormat(
            name="hunyuan_v3",
            openers=hunyuan.PLAIN.openers,
            closers=hunyuan.PLAIN.closers,
            tokens=(hunyuan.PLAIN.name_end, *hunyuan.PLAIN.pair_tags),
            make_cursor=hunyuan.PLAIN.make_cursor,
        ),
        (Clue(anywhere=(hunyuan.PLAIN.name_end, "<arg_key>")),),
        ("hy_v3", "hy3", "hunyuan"),
    ),
    FormatRow(
        ToolFormat(
            name="glm4",
            openers=(arg_pairs.OPENER,),
            closers=(arg_pairs.CLOSER,),
            tokens=arg_pairs.TAGS,
            make_cursor=arg_pairs.make_arg_pairs,
        ),
        (in_template("<arg_key>"),),
        ("glm", "glm45", "glm47", "glm4_moe", "glm47_moe", "poolside_v1"),
    ),
    FormatRow(
        ToolFormat(
            name="kimi_k2",
            openers=kimi_k2.OPENERS,
            closers=kimi_k2.CLOSERS,
            tokens=(kimi_k2.ARGUMENTS, kimi_k2.CALL_END),
            make_cursor=kimi_k2.make_kimi_k2,
        ),
        (in_template("<|tool_calls_section_begin|>"),),
    ),
    FormatRow(
        ToolFormat(
            name="deepseek_v3",
            openers=deepseek.OPENERS,
            closers=deepseek.CLOSERS,
            tokens=(deepseek.SEPARATOR, deepseek.CALL_END),
            make_cursor=deepseek.make_deepseek,
        ),
        (Clue(template=("```json",), anywhere=("<｜tool▁calls▁begin｜>",)),),
        ("deepseek", "deepseek_r1"),
    ),
    FormatRow(
        ToolFormat(
            name="deepseek_v31",
            openers=deepseek.OPENERS,
            closers=deepseek.CLOSERS,
            tokens=(deepseek.SEPARATOR, deepseek.CALL_END),
            make_cursor=deepseek.make_deepseek,
        ),
        (Clue(anywhere=("<｜tool▁calls▁begin｜>",)),),
    ),
    FormatRow(
        ToolFormat(
            name="cohere",
            openers=("<|START_ACTION|>",),
            closers=("<|END_ACTION|>",),
            make_cursor=json_lists.make_cohere,
        ),
        (in_template("<|START_ACTION|>"),),
        ("command_r", "cohere_command3"),
    ),
    FormatRow(
        ToolFormat(
            name="pythonic",
            openers=pythonic.OPENERS,
            leads=(pythonic.LIST,),
            closers=pythonic.CLOSERS,
            make_cursor=pythonic.make_pythonic,
            is_quotable=False,
        ),
        (
            in_template("<|tool_list_start|>"),
            in_template("<|tool_call_start|>"),
            in_template("[func_name1(params_name1="),
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
    FormatRow(
        ToolFormat(
            name="minicpm5",
            openers=(minicpm.OPENER,),
            closers=(minicpm.CLOSER,),
            make_cursor=minicpm.make_minicpm,
        ),
        (in_template('<function name="', '<param name="'),),
    ),
    FormatRow(
        ToolFormat(
            name="nemotron",
            openers=("<TOOLCALL>",),
            closers=("</TOOLCALL>",),
            make_cursor=json_lists.make_nemotron,
        ),
        (in_template("<TOOLCALL>"),),
        ("nemotron_v2", "nemotron_json"),
    ),
    FormatRow(
        ToolFormat(
            name="mistral",
            openers=(mistral.OPENER,),
            tokens=(mistral.CALL_ID, mistral.ARGUMENTS),
            make_cursor=mistral.make_mistral,
            make_call_id=mistral.new_mistral_id,
        ),
        (Clue(anywhere=("[TOOL_CALLS]",)),),
        ("mistral_v11", "magistral"),
    ),
    FormatRow(
        ToolFormat(
            name="granite",
            openers=("<|tool_call|>", "<tool_call>", "<function_call>"),
            leads=("[",),
            make_cursor=json_lists.make_bare,
        ),
        (in_template("<|tool_call|>", "<|start_of_role|>"),),
        ("granite3", "granite_20b_fc"),
    ),
    FormatRow(
        ToolFormat(
            name="phi4",
            openers=("<|tool_call|>", "functools["),
            leads=("{", "["),
            closers=("<|/tool_call|>",),
            make_cursor=json_lists.make_phi4,
        ),
        (in_template("<|tool_call|>", "<|tool|>"), in_template("functools[")),
        ("phi4_mini_json", "phi4_mini"),
    ),
    # OLMo 3 writes the same list without its brackets.
    FormatRow(
        ToolFormat(
            name="olmo3",
            openers=(pythonic.OLMO_OPENER,),
            closers=(pythonic.OLMO_CLOSER,),
            make_cursor=pythonic.make_pythonic,
        ),
        (in_template("<function_calls>"),),
    ),
    FormatRow(
        ToolFormat(
            name="llama3_json",
            openers=("<|python_tag|>", named_function.OPENER),
            leads=("{",),
            closers=(named_function.CLOSER,),
            make_cursor=named_function.make_json_or_named,
        ),
        (in_template("<|python_tag|>"),),
        ("llama3", "llama4_json"),
    ),
    FormatRow(
        ToolFormat(
            name="functionary",
            openers=functionary.OPENERS,
            make_cursor=functionary.make_functionary,
            owns_reply=True,
        ),
        (in_template(">>>all"), in_template("'>>>'")),
    ),
    FormatRow(
        ToolFormat(
            name="json_list",
            openers=("<tool_calls>",),
            closers=("</tool_calls>",),
            make_cursor=json_lists.make_json_list,
        ),
        (in_template("<tool_calls>"),),
        ("hunyuan_a13b", "jamba", "apriel"),
    ),
    FormatRow(
        ToolFormat(
            name="apertus",
            openers=(apertus.OPENER,),
            closers=(apertus.CLOSER,),
            make_cursor=apertus.make_apertus,
        ),
        (in_template("<|tools_prefix|>"),),
    ),
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
