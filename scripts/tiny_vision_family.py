"""The definition of a family of tiny vision models, and their common sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The properties of a family.

    Attributes:
        config: All of config.json, without vocabulary sizes and ids of tokens.
        token_ids: Special tokens by the field of config.json with their ids.
        placeholders: The chat template's text for a part of a message, by its type.
        named_tokens: Special tokens by the tokenizer attribute that the processor reads.
        further_tokens: Special tokens written only by the processor.
        files: The other files, which configure the processor.
        embedding_scale: Standard deviation of the token embeddings.
        gain: The factor by which a matrix widens its input.
        bos_token: The first token of the processor's prompts, if any.
        fixed_ids: Special tokens with ids hard-coded in the processor.
        code: The checkpoint's own model code, if any.
        words: Texts that are single tokens.
        section: The part of config.json with the model's configuration, if not all of it.
    """

    config: Config
    token_ids: Mapping[str, str]
    placeholders: Mapping[str, str]
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    further_tokens: tuple[str, ...] = ()
    files: Mapping[str, Config] = field(default_factory=dict)
    embedding_scale: float = 0.08
    gain: float = 2.0
    bos_token: str | None = None
    fixed_ids: Mapping[str, int] = field(default_factory=dict)
    code: str = ""
    words: tuple[str, ...] = ()
    section: str | None = None


# A decoder.
TEXT: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

# An encoder of images of 28 x 28 pixels.
TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
