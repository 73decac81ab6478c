"""The tiny vision models: one for each way of reading an image."""

from collections.abc import Mapping

from scripts.tiny_vision_family import TEXT, TOWER, VisionFamily
from scripts.tiny_vision_qwen import QWEN2_5_VL, QWEN3_5, QWEN3_VL

_SMOLVLM_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
_SMOLVLM = VisionFamily(
    config={
        "model_type": "smolvlm",
        "scale_factor": 2,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "smolvlm_vision"},
    },
    token_ids={"image_token_id": "<image>"},
    placeholders={"image": "<image>"},
    named_tokens={
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    further_tokens=_SMOLVLM_TILES,
    files={
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
    },
)

_GEMMA3 = VisionFamily(
    config={
        "model_type": "gemma3",
        "hidden_size": 64,
        "pad_token_id": 0,
        "text_config": {
            **TEXT,
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "tie_word_embeddings": True,
            "mm_tokens_per_image": 4,
        },
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
    },
    token_ids={"image_token_index": "<image_soft_token>"},
    placeholders={"image": "<start_of_image>"},
    named_tokens={
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    files={
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_seq_length": 4,
        },
    },
)

_GEMMA4 = VisionFamily(
    config={
        "model_type": "gemma4",
        "hidden_size": 64,
        "vision_soft_tokens_per_image": 70,
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT,
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 16,
            "use_double_wide_mlp": False,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **TOWER,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "patch_size": 8,
            "default_output_length": 70,
            "position_embedding_size": 256,
            "pooling_kernel_size": 3,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [16, 8],
            "output_proj_dims": 64,
            "use_clipped_linears": False,
        },
    },
    token_ids={
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "audio_token_id": "<|audio|>",
        "boa_token_id": "<|audio>",
        "eoa_token_id": "<audio|>",
        "video_token_id": "<|video|>",
    },
    placeholders={"image": "<|image|>", "audio": "<|audio|>", "video": "<|video|>"},
    named_tokens={
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    },
    files={
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "audio_seq_length": 750,
            "audio_ms_per_token": 40,
            "image_processor": {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        }
    },
    embedding_scale=0.05,  # the head is tied: with longer rows each token predicts itself
    gain=3.0,
)

_LLAVA = VisionFamily(
    config={
        "model_type": "llava",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
    },
    token_ids={"image_token_index": "<image>"},
    placeholders={"image": "<image>\n"},
    further_tokens=("<image>",),
    files={
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
    },
)

_MLLAMA = VisionFamily(
    config={
        "model_type": "mllama",
        "text_config": {
            **TEXT,
            "model_type": "mllama_text_model",
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
        },
        "vision_config": {
            **TOWER,
            "model_type": "mllama_vision_model",
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 3 * 32,
        },
    },
    token_ids={"image_token_index": "<|image|>"},
    placeholders={"image": "<|image|>"},
    named_tokens={"image_token": "<|image|>"},
    further_tokens=("<|begin_of_text|>", "<|python_tag|>"),
    bos_token="<|begin_of_text|>",  # noqa: S106 (no password)
    files={
        "preprocessor_config.json": {
            "image_processor_type": "MllamaImageProcessor",
            "size": {"height": 28, "width": 28},
            "max_image_tiles": 4,
        }
    },
    gain=1.0,
)

# By `model_type`.
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen3_vl": QWEN3_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_5": QWEN3_5,
    "smolvlm": _SMOLVLM,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "llava": _LLAVA,
    "mllama": _MLLAMA,
}
