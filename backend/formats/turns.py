"""Texts with which chat templates begin the model's turn."""

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
