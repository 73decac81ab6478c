"""Parts of mlx-lm are read without MLX, and one of transformers without the package."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.model.checkpoint.upstream import mlx_lm_part

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "d", "parameters": {"type": "object"}},
    }
]
CODE = """
import json, sys
from backend.model.checkpoint.upstream import mlx_lm_part
turns, tools = json.loads(sys.argv[1])
write = mlx_lm_part("chat_templates.deepseek_v32").apply_chat_template
newline = mlx_lm_part("tokenizer_utils").NewlineTokenizer
texts = [write(turns, tools=each, add_generation_prompt=True) for each in (None, tools)]
known = [name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm")]
print(json.dumps([texts, newline.__name__, known]))
"""


def test_parts_of_mlx_lm_are_the_same_without_mlx():
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([TURNS, TOOLS])],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    texts, newline, known = json.loads(done.stdout.splitlines()[-1])
    write = importlib.import_module("mlx_lm.chat_templates.deepseek_v32").apply_chat_template
    upstream = [write(TURNS, tools=each, add_generation_prompt=True) for each in (None, TOOLS)]
    assert (texts, newline, known) == (upstream, "NewlineTokenizer", [])


TEMPLATES = """
import json, sys
from backend.model.text.isolated import rendering_process
from backend.model.text.jinja_renderer import JinjaSource, make_jinja_renderer, upstream_render
upstream_render()
light = [name for name in sys.modules if name.split(".")[0] == "transformers"]
text = make_jinja_renderer(JinjaSource(*2 * ["{{ messages[0].content }}"], "{}"))(
    [{"role": "user", "content": "hello"}], None, {}
)
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template
print(json.dumps([light, text, AutoTokenizer.__name__]))
"""


def test_what_renders_templates_does_without_most_of_transformers_which_can_follow():
    done = subprocess.run(
        [sys.executable, "-c", TEMPLATES],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], "hello", "AutoTokenizer"]


@pytest.mark.parametrize("name", ["chat_templates.none", "../os", "chat_templates/muse_spark", ""])
def test_what_mlx_lm_does_not_have_is_a_missing_module(name):
    with pytest.raises(ModuleNotFoundError):
        mlx_lm_part(name)
