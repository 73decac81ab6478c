import json
import os
import subprocess
import sys

import pytest

from backend.model.checkpoint.upstream import INDEX_NAME

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


# The code of a process that asks transformers for classes of models.
_ASKS = """
import logging, sys
from pathlib import Path
from backend.model.checkpoint.upstream import index_transformers
logging.basicConfig(stream=sys.stdout, format="%(message)s")
index_transformers(Path(sys.argv[1]))
import transformers.utils.import_utils as scanner
models = Path(scanner.__file__).parents[1] / "models"
"""
_LISTS = """
found = scanner.define_import_structure(models, prefix="models")
found[frozenset()]["a caller's"] = {"Own"}
again = scanner.define_import_structure(models / "__init__.py")
print(sorted(found[frozenset()].items()), sorted(again[frozenset()].items()))
"""
_COMPARES = """
import transformers.models
found = scanner.define_import_structure(str(models))
own = scanner.spread_import_structure(scanner.create_import_structure_from_path(str(models)))
print(len(found) > 1 and found == own and transformers.AutoTokenizer.__module__)
"""
_SCANNER = """
def define_import_structure(path, prefix=None):
    print("is read")
    parts = [prefix] if prefix else []
    folder = path.parent if path.is_file() else path
    files = [each for each in sorted(folder.glob("*.py")) if each.stem != "__init__"]
    return {frozenset(): {".".join([*parts, each.stem]): {each.read_text()} for each in files}}
"""
_LISTED = "[(\"a caller's\", {'Own'}), ('models.llama', {'Llama'})] [('llama', {'Llama'})]"


def asked(state, code, *path):
    """Return the lines of a process with such code and an index in a directory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
    command = [sys.executable, "-c", _ASKS + code, str(state)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path):
    """The directory of modules of models in a package with transformers' name."""
    package = tmp_path / "path" / "transformers"
    for name in (".", "utils", "models"):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").touch()
    (package / "utils" / "import_utils.py").write_text(_SCANNER)
    (package / "models" / "llama.py").write_text("Llama")
    return package / "models"


@pytest.fixture
def listed(folder, tmp_path):
    """Lists the classes of that package."""
    return lambda: asked(tmp_path / "state", _LISTS, folder.parents[1])


@pytest.fixture
def index(listed, tmp_path):
    """The file that the first listing leaves."""
    assert listed() == ["is read", "is read", _LISTED]
    return tmp_path / "state" / INDEX_NAME


@pytest.mark.usefixtures("index")
def test_classes_of_transformers_are_read_once(listed):
    assert listed() == [_LISTED]


@pytest.mark.usefixtures("index")
def test_they_are_read_again_after_a_change(listed, folder):
    (folder / "llama.py").write_text("Alpaca")
    for reads in (2, 0):
        assert listed() == [*["is read"] * reads, _LISTED.replace("Llama", "Alpaca")]


def test_an_index_that_others_can_write_is_not_used(listed, index):
    index.chmod(0o666)
    warning, *rest = listed()
    assert warning == f"{index} is not used, and transformers is read: others may have written it"
    assert rest == ["is read", "is read", _LISTED]
    # It was replaced.
    assert listed() == [_LISTED]


@pytest.mark.parametrize("content", ["", "[]", '{"source": 1}', "{" * 9000])
def test_an_index_that_is_none_is_replaced(listed, index, content):
    index.write_text(content)
    warning, *rest = listed()
    assert warning.startswith(f"{index} is not used, and transformers is read: ")
    assert rest == ["is read", "is read", _LISTED]
    assert listed() == [_LISTED]


def test_structures_of_another_shape_are_read_again(listed, index):
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "structures": {"": [1], "models": {}}}))
    assert listed() == ["is read", "is read", _LISTED]
    assert listed() == [_LISTED]


def test_classes_are_found_where_no_index_can_be_written(folder, tmp_path):
    (tmp_path / "file").touch()
    assert asked(tmp_path / "file", _LISTS, folder.parents[1])[-1] == _LISTED


@pytest.mark.mlx
def test_an_index_of_the_installed_transformers_has_what_it_finds_itself(tmp_path):
    for _ in range(2):
        (line,) = [line for line in asked(tmp_path, _COMPARES) if "." in line]
        assert line == "transformers.models.auto.tokenization_auto"
