"""All formats, in the order in which their evidence is checked, and marks that belong to none.

The first match wins.
"""

from collections.abc import Collection

from backend.formats import literal, messages, named, objects, tagged, thoughts
from backend.formats.format import NO_REASONING, NO_TOOLS, FormatEvidence, ToolFormat

TOOL_FORMATS = (
    tagged.DSML,
    tagged.GIGACHAT35,
    messages.HARMONY,
    objects.INKLING,
    named.SOLAR_OPEN,
    tagged.SOLAR_OPEN2,
    named.MIROTHINKER,
    tagged.KIMI_K3,
    tagged.MINIMAX_M3,
    tagged.MINIMAX_M2,
    literal.GEMMA4,
    literal.FUNCTIONGEMMA,
    messages.MUSE_SPARK,
    tagged.LONGCAT,
    tagged.SEED_OSS,
    tagged.HUNYUAN_V3_OPENSOURCE,
    tagged.HUNYUAN_V3,
    tagged.HUNYUAN_V4,
    tagged.K2_HORIZON,
    named.PLAMO3,
    tagged.DOTS3,
    tagged.IQUEST_CODER,
    objects.HYPERCLOVAX,
    tagged.GLM4,
    named.GLM4_0414,
    named.KIMI_K2,
    tagged.STEP3,
    named.DEEPSEEK_V3,
    named.DEEPSEEK_V31,
    objects.COHERE,
    objects.COMMAND_R_PLUS,
    objects.GIGACHAT3,
    objects.RWKV,
    objects.INTERNLM2,
    literal.MINICPM3,
    objects.NEMOTRON,
    objects.NEMOTRON_MINI,
    objects.LLAMA3_JSON,
    literal.PYTHONIC,
    tagged.QWEN3_CODER,
    tagged.MIMO,
    tagged.MINICPM5,
    named.MISTRAL,
    objects.GRANITE,
    objects.GRANITE_20B_FC,
    objects.PHI4,
    objects.SARASHINA,
    literal.OLMO3,
    named.FUNCTIONARY,
    objects.HUNYUAN_V1,
    objects.JSON_LIST,
    named.APERTUS,
    objects.XLAM,
    objects.HERMES,
    NO_TOOLS,
)

REASONING_FORMATS = (
    messages.HARMONY_THOUGHT,
    objects.INKLING_THOUGHT,
    named.SOLAR_OPEN_THOUGHT,
    tagged.KIMI_K3_THOUGHT,
    messages.MUSE_SPARK_THOUGHT,
    tagged.MINIMAX_M3_THOUGHT,
    literal.GEMMA4_THOUGHT,
    literal.MINICPM3_THOUGHT,
    tagged.LONGCAT_THOUGHT,
    tagged.SEED_OSS_THOUGHT,
    thoughts.KIMI_VL,
    objects.COHERE_THOUGHT,
    tagged.HUNYUAN_V3_OPENSOURCE_THOUGHT,
    tagged.HUNYUAN_V4_THOUGHT,
    tagged.K2_HORIZON_THOUGHT,
    named.PLAMO3_THOUGHT,
    objects.HYPERCLOVAX_THOUGHT,
    named.APERTUS_THOUGHT,
    thoughts.COLON,
    named.MISTRAL_THOUGHT,
    thoughts.GRANITE,
    thoughts.GRANITE_32,
    thoughts.APRIEL,
    thoughts.HUNYUAN_A13B,
    thoughts.QWEN3,
    thoughts.GLM,
    thoughts.THINK,
    NO_REASONING,
)


def tool_format(name: str, marks: Collection[str]) -> ToolFormat:
    """Return a format of calls by its name, as the checkpoint with these marks writes it."""
    known = next(each for each in TOOL_FORMATS if each.name == name)
    own = known.of(FormatEvidence(vocabulary=marks, chat_template="")) if known.own else None
    return own or known


# Texts with which chat templates begin the model's turn.
TURN_STARTS = (
    "<|im_start|>",
    "<|im_assistant|>",
    "<|start_header_id|>",
    "<|header_start|>",
    "<|start_of_role|>",
    "<|start|>",
    "<|assistant|>",
    "<|assistant_start|>",
    "<｜Assistant｜>",
    "<｜hy_Assistant",
    "<|turn>",
    "<start_of_turn>",
    "<|CHATBOT_TOKEN|>",
    "<|open|>message",
    "<seed:bos>",
    "<longcat_assistant>",
    "<SPECIAL_11>",
    "[|assistant|]",
    "]~b]ai",
    "[/INST]",
)

# Marks that users write by a model's documentation: the task, a place in a picture, a phrase.
TASK_MARKS = frozenset(
    {
        # DeepSeek-OCR and DeepSeek-VL2.
        *("<|grounding|>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"),
        # Qwen-VL.
        *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
        *("<|quad_start|>", "<|quad_end|>"),
        # InternVL and MiniCPM-V.
        *("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<point>", "</point>"),
    }
)
