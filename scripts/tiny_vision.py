"""Builds tiny random-weight vision models, one of each kind, for tests.

They are complete, as mlx-vlm would load any model: config, weights, tokenizer, processor and chat
template. The same arguments always give the same weights.
"""

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from scripts.tiny_models import CHAT_TEMPLATE, PADDING, TURN_END, VOCAB_SIZE, train_bpe
from scripts.tiny_vision_configs import VISION_FAMILIES
from scripts.tiny_vision_family import VisionFamily

_TEXT_SECTIONS = {"text_config", "language_config"}
_SECTIONS = ("text", "vision", "audio", "perceiver", "projector")
_GATE = 0.3  # wider open, an image in mllama drowns the text

# Writes the parts of each message as text, for the template that follows.
_FLATTENED = """\
{%- set flat = namespace(messages=[]) %}
{%- for message in messages %}
    {%- set flat.text = message.content or '' %}
    {%- if flat.text is not string %}
        {%- set flat.text = '' %}
        {%- for part in message.content %}
            {%- set flat.text = flat.text + (part.text or '' if part.type == 'text' else
                placeholders[part.type] if part.type in placeholders else
                raise_exception('unknown part: ' + part.type)) %}
        {%- endfor %}
    {%- endif %}
    {%- set flat.messages = flat.messages + [dict(message, content=flat.text)] %}
{%- endfor %}
{%- set messages = flat.messages %}

"""


def build(family: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a tiny model of `family`, a key of `VISION_FAMILIES`, and return its directory."""
    return build_shape(VISION_FAMILIES[family], directory, seed=seed)


def build_shape(shape: VisionFamily, directory: Path, *, seed: int = 0) -> Path:
    """Write a tiny model and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _complete_config(shape, _write_tokenizer(shape, directory))
    if shape.code:
        config["model_file"] = "model.py"
        (directory / "model.py").write_text(shape.code, encoding="utf-8")
    weights = _draw_weights(directory, config, shape, seed=seed)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    generation = {"do_sample": False, "eos_token_id": config["eos_token_id"]}
    files = {"config.json": config, "generation_config.json": generation, **shape.files}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return directory


def _write_tokenizer(shape: VisionFamily, directory: Path) -> PreTrainedTokenizerFast:
    """Write tokenizer and chat template."""
    bpe = _reserved(train_bpe(shape.words), shape.fixed_ids)
    media = (
        *shape.fixed_ids,
        *shape.token_ids.values(),
        *shape.named_tokens.values(),
        *shape.further_tokens,
    )
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(media)])
    placeholders = f"{{%- set placeholders = {json.dumps(shape.placeholders)} %}}\n"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=shape.bos_token,
        eos_token=TURN_END,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(shape.named_tokens),
        chat_template=placeholders + _FLATTENED + CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def _reserved(bpe: Tokenizer, fixed_ids: Mapping[str, int]) -> Tokenizer:
    """Give tokens the ids that an upstream processor expects, and fill the gaps."""
    if not fixed_ids:
        return bpe
    content = json.loads(bpe.to_str())
    known = content["model"]["vocab"]
    known.update({token["content"]: token["id"] for token in content["added_tokens"]})
    names = {number: token for token, number in fixed_ids.items()}
    displaced = [token for token, number in known.items() if number in names]
    for number in range(len(known), max(names) + 1):
        known[names.get(number, f"<unused_{number}>")] = number
    known.update({token: len(known) + count for count, token in enumerate(displaced)})
    known.update(fixed_ids)
    return Tokenizer.from_str(json.dumps(content))


def _complete_config(shape: VisionFamily, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Fill in the fields that depend on the tokenizer."""
    config: dict[str, Any] = deepcopy(dict(shape.config))
    config["eos_token_id"] = tokenizer.eos_token_id
    config["vocab_size"] = len(tokenizer)
    for section in [config, *([config[shape.section]] if shape.section else [])]:
        for name, token in shape.token_ids.items():
            section[name] = tokenizer.convert_tokens_to_ids(token)
        for text in _TEXT_SECTIONS & section.keys():
            section[text]["vocab_size"] = len(tokenizer)
            if config["model_type"].startswith("gemma"):
                section[text]["vocab_size_per_layer_input"] = len(tokenizer)
    return config


def _draw_weights(
    directory: Path, config: Mapping[str, Any], shape: VisionFamily, *, seed: int
) -> dict[str, mx.array]:
    """Draw every matrix again, wide enough for an image to matter, and open every gate.

    The head never produces the tokens of media, which only the processor may write.
    """
    mx.random.seed(seed)
    parameters = tree_flatten(make_network(config, directory).parameters())
    heads = tuple(name for name, _ in parameters if name.endswith("lm_head.weight"))
    answers = heads or tuple(name for name, _ in parameters if _is_embedding(name))

    def draw(name: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if weight.ndim < 2:
            return mx.full(weight.shape, _GATE) if "gate" in name.rsplit(".")[-1] else weight
        fan_in = math.prod(weight.shape[1:])
        scale = shape.embedding_scale if _is_embedding(name) else shape.gain * fan_in**-0.5
        drawn = mx.random.normal(weight.shape, weight.dtype, scale=scale)
        if name in answers and weight.shape[0] == config["vocab_size"]:
            drawn[VOCAB_SIZE:] = 0
        return drawn

    return {name: draw(name, weight) for name, weight in parameters}


def _is_embedding(name: str) -> bool:
    return "embed_tokens" in name or name.endswith(("tok_embeddings.weight", "wte.weight"))


def make_network(config: Mapping[str, Any], directory: Path) -> nn.Module:
    """Return mlx-vlm's network for a complete config.json."""
    module, _ = get_model_and_args(dict(config), directory)
    sections = {f"{kind}_config": {} for kind in _SECTIONS[:3]} | deepcopy(dict(config))
    return module.Model(
        update_module_configs(module.ModelConfig.from_dict(sections), module, sections, _SECTIONS)
    )


@click.command()
@click.argument("family", type=click.Choice(sorted(VISION_FAMILIES)))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True)
def main(family: str, directory: Path, seed: int) -> None:
    """Write a tiny random-weight model of FAMILY to DIRECTORY."""
    click.echo(build(family, directory, seed=seed))


if __name__ == "__main__":
    main()
