"""The tiny vision models of Qwen: their positions have three axes."""

from collections.abc import Mapping

from scripts.tiny_vision_family import TEXT, Config, VisionFamily

_QWEN_TOWER: Config = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "spatial_patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

_QWEN_TOKEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "vision_token_id": "<|vision_pad|>",
}

_QWEN_PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}

# A token for every 16 x 16 pixels of an image that is scaled to between 1 and 16 of them.
_QWEN_PATCHES: Config = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
_QWEN_FILES: Mapping[str, Config] = {
    "preprocessor_config.json": {
        **_QWEN_PATCHES,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
}

QWEN3_VL = VisionFamily(
    config={
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen3_vl",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    token_ids=_QWEN_TOKEN_IDS,
    placeholders=_QWEN_PLACEHOLDERS,
    files=_QWEN_FILES,
)

QWEN2_5_VL = VisionFamily(
    config={
        **TEXT,
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen2_5_vl",
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    token_ids=_QWEN_TOKEN_IDS,
    placeholders=_QWEN_PLACEHOLDERS,
    files={
        "preprocessor_config.json": {
            **_QWEN_PATCHES,
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 16 * 16,
            "max_pixels": 64 * 64,
        }
    },
)

QWEN3_5 = VisionFamily(
    config={
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen3_5",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
    },
    token_ids=_QWEN_TOKEN_IDS,
    placeholders=_QWEN_PLACEHOLDERS,
    files=_QWEN_FILES,
)
