"""Thought formats that do not belong to a single tool-call format."""

from backend.formats import tagged
from backend.formats.format import Clue, ReasoningFormat, as_tokens, in_template

_START, _END = "<think>", "</think>"
_KIMI = "◁think▷"
_COLON, _COLON_END = "<|think:start|>", "<|think:end|>"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"
_FINAL = "[BEGIN FINAL RESPONSE]"
_PROCESS = "Here is my thought process:"
_ANSWER, _ANSWER_END = "<answer>", "</answer>"

THINK = ReasoningFormat(
    name="think",
    aliases=(
        *("deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "olmo3"),
        *("step3", "step3p5", "nemotron", "nemotron_v3", "minimax_m2", "kimi_k2"),
        *("hy_v3", "exaone4", "smollm3", "poolside_v1", "mimo", "glm47", "holo2", "nemotron_3"),
        *("minimax", "interns1", "ling3", "rwkv", "gigachat35", "hyperclovax_seed_think"),
        "minimax_m2_append_think",
    ),
    # A template mentions a mark of thoughts only if the model writes thoughts. Many begin one at
    # the end of the prompt and mention no end, and the marks of OLMo 3 are no tokens.
    clues=(as_tokens(_START, _END), in_template(_END), in_template(_START)),
    starts=(_START,),
    ends=(_END,),
)

QWEN3 = ReasoningFormat(
    name="qwen3_think",
    aliases=("qwen3", "qwen", "qwen3_thinking"),
    # Only Qwen's tokenizers have this token.
    clues=(as_tokens(_START, _END, "<|quad_start|>"),),
    starts=(_START,),
    ends=(_END,),
    parting=(
        "\n\nConsidering the limited time by the user, I have to give the solution based on the "
        "thinking directly now.\n"
    ),
)

GLM = ReasoningFormat(
    name="glmv_think",
    clues=(as_tokens(_START, _END, *tagged.GLM_BOXES),),
    starts=(_START,),
    ends=(_END,),
    boxes=tagged.GLM_BOXES,
)

KIMI_VL = ReasoningFormat(
    name="kimi_think",
    aliases=("kimi_vl", "kimi"),
    clues=(in_template(_KIMI), as_tokens(_KIMI)),
    starts=(_KIMI,),
    ends=("◁/think▷",),
)

COLON = ReasoningFormat(
    name="colon_think",
    aliases=("solar_open2",),
    clues=(as_tokens(_COLON, _COLON_END),),
    starts=(_COLON,),
    ends=(_COLON_END,),
)

GRANITE = ReasoningFormat(
    name="granite_text",
    aliases=("ernie45",),
    clues=(
        in_template(_START, _RESPONSE, "<|start_of_role|>"),
        # ERNIE 4.5 frames its answers like this, MiniMax M2 the results of tools.
        Clue(vocabulary=(_RESPONSE, _RESPONSE_END), absent=(tagged.MINIMAX_M2_OPENER,)),
    ),
    starts=(_START,),
    ends=(_END,),
    frames=(_RESPONSE, f"\n{_RESPONSE_END}", _RESPONSE_END),
)

APRIEL = ReasoningFormat(
    name="apriel_steps",
    aliases=("apriel",),
    clues=(in_template(_FINAL),),
    starts=("Here are my reasoning steps:",),
    ends=(_FINAL,),
    frames=("[END FINAL RESPONSE]",),
)

GRANITE_32 = ReasoningFormat(
    name="granite_sentences",
    # Under this name vLLM reads the sentences; version 3.3 has tags.
    aliases=("granite", "granite32"),
    clues=(in_template(_PROCESS),),
    starts=(_PROCESS, "Here's my thought process:", _START),
    ends=("Here is my response:", "Here's my response:", _END),
    frames=GRANITE.frames,
)

HUNYUAN_A13B = ReasoningFormat(
    name="hunyuan_answer",
    aliases=("hunyuan_a13b",),
    # The dense models frame their answers, too, but Hunyuan 3 does not.
    clues=(in_template(_END, "<|extra_0|>"), in_template(_END, _ANSWER, "<｜hy_Assistant")),
    starts=(_START,),
    ends=(_END,),
    frames=(_ANSWER, f"\n{_ANSWER_END}", _ANSWER_END),
    # With tools, its prompt asks for answers that begin with the role.
    first_frames=("助手：",),
)
