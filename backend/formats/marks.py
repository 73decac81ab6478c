"""Marks that users write by a model's documentation: the task, a place in a picture, a phrase."""

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
