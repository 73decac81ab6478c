"""How model families mark a thought. The first row that fits wins."""

from backend.output.evidence import Clue, FormatRow, as_tokens, in_template
from backend.output.format import NO_REASONING, ReasoningFormat

THINK = ReasoningFormat("think", ("<think>",), ("</think>",))

REASONING_ROWS = (
    FormatRow(
        ReasoningFormat(
            "harmony",
            ("<|channel|>analysis<|message|>",),
            ("<|end|>",),
            frames=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|return|>",
            ),
            tokens=("<|start|>", "<|channel|>", "<|message|>"),
            bridge="<|start|>assistant",
            answer="<|channel|>final<|message|>",
        ),
        (as_tokens("<|channel|>", "<|call|>", "<|constrain|>"),),
        ("gpt_oss", "openai_gptoss"),
    ),
    FormatRow(
        ReasoningFormat(
            "xtml_think",
            ("<|open|>think<|sep|>",),
            # An answer that begins ends a thought that was not closed.
            ("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
            frames=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
            answer="<|open|>response<|sep|>",
        ),
        (as_tokens("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),),
        ("kimi_k3",),
    ),
    FormatRow(
        ReasoningFormat(
            "muse",
            (" to=self<|message|>",),
            ("<|eom|>",),
            frames=("<|start|>assistant", " to=user<|message|>"),
            tokens=("<|start|>", "<|message|>"),
            bridge="<|start|>assistant",
            answer=" to=user<|message|>",
        ),
        (in_template("<atem:function_calls>"),),
        ("muse_spark", "muse_glimmer"),
    ),
    FormatRow(
        ReasoningFormat("mm_think", ("<mm:think>",), ("</mm:think>",)),
        (in_template("<mm:think>"),),
        ("minimax_m3",),
    ),
    FormatRow(
        ReasoningFormat(
            "gemma4_channel", ("<|channel>thought",), ("<channel|>",), tokens=("<|channel>",)
        ),
        (as_tokens("<|channel>", "<channel|>"), in_template("<|channel>thought")),
        ("gemma4", "gemma_channel"),
    ),
    FormatRow(
        ReasoningFormat("longcat_think", ("<longcat_think>",), ("</longcat_think>",)),
        (in_template("<longcat_think>"), as_tokens("<longcat_think>")),
        ("longcat",),
    ),
    FormatRow(
        ReasoningFormat(
            "seed_think",
            ("<seed:think>",),
            ("</seed:think>",),
            frames=("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
        ),
        (in_template("<seed:think>"), as_tokens("<seed:think>")),
        ("seed_oss",),
    ),
    FormatRow(
        ReasoningFormat("kimi_think", ("◁think▷",), ("◁/think▷",)),
        (in_template("◁think▷"), as_tokens("◁think▷")),
        ("kimi_vl",),
    ),
    FormatRow(
        ReasoningFormat(
            "cohere_think",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            frames=(
                "<|START_RESPONSE|>",
                "<|END_RESPONSE|>",
                "<|START_TEXT|>",
                "<|END_TEXT|>",
            ),
        ),
        (in_template("<|START_THINKING|>"), as_tokens("<|START_THINKING|>")),
        ("cohere", "command_r", "cohere_command3"),
    ),
    FormatRow(
        ReasoningFormat("hunyuan_think", ("<think:opensource>",), ("</think:opensource>",)),
        (as_tokens("<think:opensource>"), in_template("<think:opensource>")),
        ("hy_v3_opensource",),
    ),
    FormatRow(
        ReasoningFormat("apertus_inner", ("<|inner_prefix|>",), ("<|inner_suffix|>",)),
        (as_tokens("<|inner_prefix|>", "<|inner_suffix|>"),),
        ("apertus",),
    ),
    FormatRow(
        ReasoningFormat("colon_think", ("<|think:start|>",), ("<|think:end|>",)),
        (as_tokens("<|think:start|>", "<|think:end|>"),),
    ),
    FormatRow(
        ReasoningFormat("mistral_think", ("[THINK]",), ("[/THINK]",)),
        (as_tokens("[THINK]", "[/THINK]"),),
        ("mistral", "magistral", "ministral"),
    ),
    FormatRow(
        ReasoningFormat(
            "granite_text",
            ("<think>",),
            ("</think>",),
            frames=("<response>", "\n</response>", "</response>"),
        ),
        (
            in_template("<think>", "<response>", "<|start_of_role|>"),
            # ERNIE 4.5 frames its answers alike, MiniMax M2 the results of tools.
            Clue(vocabulary=("<response>", "</response>"), absent=("<minimax:tool_call>",)),
        ),
        ("granite", "ernie45"),
    ),
    FormatRow(
        ReasoningFormat(
            "hunyuan_answer",
            ("<think>",),
            ("</think>",),
            frames=("<answer>", "\n</answer>", "</answer>"),
        ),
        (in_template("</think>", "<|extra_0|>"),),
        ("hunyuan_a13b",),
    ),
    FormatRow(
        THINK,
        # A template that tells where thoughts end has a model behind it that writes them.
        (as_tokens("<think>", "</think>"), Clue(template=("</think>",))),
        (
            *("deepseek_r1", "deepseek_v3", "deepseek_v4", "qwen3", "qwen", "glm45", "olmo3"),
            *("step3", "step3p5", "nemotron", "nemotron_v3", "minimax_m2", "kimi_k2"),
            *("hy_v3", "exaone4", "smollm3", "poolside_v1", "mimo"),
        ),
    ),
    FormatRow(NO_REASONING),
)
