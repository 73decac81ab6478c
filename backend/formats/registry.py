"""All formats, in the order in which their evidence is checked: the first match wins."""

from collections.abc import Collection

from backend.formats import thoughts
from backend.formats.evidence import FormatEvidence
from backend.formats.format import NO_REASONING, NO_TOOLS, ToolFormat
from backend.formats.literal import functiongemma, gemma4, olmo3, pythonic
from backend.formats.messages import harmony, muse_spark
from backend.formats.named import (
    apertus,
    deepseek_v3,
    deepseek_v31,
    functionary,
    kimi_k2,
    mirothinker,
    mistral,
    plamo3,
    solar_open,
)
from backend.formats.objects import (
    cohere,
    command_r_plus,
    gigachat3,
    granite,
    granite_20b_fc,
    hermes_json,
    hyperclovax,
    inkling,
    internlm2,
    json_list,
    llama3_json,
    nemotron,
    phi4,
    sarashina,
    xlam,
)
from backend.formats.tagged import (
    deepseek_dsml,
    dots3,
    glm4,
    hunyuan_v3,
    hunyuan_v3_opensource,
    hunyuan_v4,
    iquest_coder,
    k2_horizon,
    kimi_k3,
    longcat,
    minicpm5,
    minimax_m2,
    minimax_m3,
    qwen3_coder_xml,
    seed_oss,
    step3,
)

TOOL_FORMATS = (
    deepseek_dsml.FORMAT,
    harmony.FORMAT,
    inkling.FORMAT,
    solar_open.FORMAT,
    mirothinker.FORMAT,
    kimi_k3.FORMAT,
    minimax_m3.FORMAT,
    minimax_m2.FORMAT,
    gemma4.FORMAT,
    functiongemma.FORMAT,
    muse_spark.FORMAT,
    longcat.FORMAT,
    seed_oss.FORMAT,
    hunyuan_v3_opensource.FORMAT,
    hunyuan_v3.FORMAT,
    hunyuan_v4.FORMAT,
    k2_horizon.FORMAT,
    plamo3.FORMAT,
    dots3.FORMAT,
    iquest_coder.FORMAT,
    hyperclovax.FORMAT,
    glm4.FORMAT,
    kimi_k2.FORMAT,
    step3.FORMAT,
    deepseek_v3.FORMAT,
    deepseek_v31.FORMAT,
    cohere.FORMAT,
    command_r_plus.FORMAT,
    gigachat3.FORMAT,
    internlm2.FORMAT,
    pythonic.FORMAT,
    qwen3_coder_xml.FORMAT,
    minicpm5.FORMAT,
    nemotron.FORMAT,
    mistral.FORMAT,
    granite.FORMAT,
    granite_20b_fc.FORMAT,
    phi4.FORMAT,
    sarashina.FORMAT,
    olmo3.FORMAT,
    llama3_json.FORMAT,
    functionary.FORMAT,
    json_list.FORMAT,
    apertus.FORMAT,
    xlam.FORMAT,
    hermes_json.FORMAT,
    NO_TOOLS,
)

REASONING_FORMATS = (
    harmony.THOUGHT,
    inkling.THOUGHT,
    solar_open.THOUGHT,
    kimi_k3.THOUGHT,
    muse_spark.THOUGHT,
    minimax_m3.THOUGHT,
    gemma4.THOUGHT,
    longcat.THOUGHT,
    seed_oss.THOUGHT,
    thoughts.KIMI_VL,
    cohere.THOUGHT,
    hunyuan_v3_opensource.THOUGHT,
    hunyuan_v4.THOUGHT,
    k2_horizon.THOUGHT,
    plamo3.THOUGHT,
    hyperclovax.THOUGHT,
    apertus.THOUGHT,
    thoughts.COLON,
    mistral.THOUGHT,
    thoughts.GRANITE,
    thoughts.GRANITE_32,
    thoughts.APRIEL,
    thoughts.HUNYUAN_A13B,
    thoughts.QWEN3,
    thoughts.THINK,
    NO_REASONING,
)


def tool_format(name: str, marks: Collection[str]) -> ToolFormat:
    """Return a format of calls by its name, as the checkpoint with these marks writes it."""
    known = next(each for each in TOOL_FORMATS if each.name == name)
    own = known.of(FormatEvidence(vocabulary=marks, chat_template="")) if known.own else None
    return own or known
