import subprocess
import sys

import pytest

_REPORT = "import resource as r; {imports}; print(r.getrlimit(r.RLIMIT_NOFILE)[0])"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.mlx
def test_importing_mlx_lm_keeps_the_open_file_limit():
    """Engine notes 0.10; the second half tells when the guard may go."""
    before = run(_REPORT.format(imports="pass"))
    guarded = "from backend.model.checkpoint.upstream import import_mlx_lm; import_mlx_lm()"
    assert run(_REPORT.format(imports=guarded)) == before
    assert run(_REPORT.format(imports="import mlx_lm")) == "2048"


@pytest.mark.mlx
def test_the_door_is_what_the_loader_uses():
    code = _REPORT.format(imports="import backend.model.loader as l; l.import_mlx_lm()")
    assert run(code) == run(_REPORT.format(imports="pass"))


def test_what_serves_before_the_first_load_imports_nothing_heavy():
    heavy = run(
        "import sys, backend.model.loaded, backend.model.checkpoint.hub;"
        "print({'mlx', 'mlx_lm', 'transformers', 'huggingface_hub', 'jinja2'} & set(sys.modules))"
    )
    assert heavy == "set()"


@pytest.mark.mlx
def test_upstream_has_what_the_loader_calls():
    from transformers import AutoTokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    from backend.model.checkpoint.upstream import import_mlx_lm

    utils = import_mlx_lm()
    assert callable(utils.load_model)
    assert callable(utils.load_adapters)
    assert callable(AutoTokenizer.from_pretrained)
    assert callable(render_jinja_template)
