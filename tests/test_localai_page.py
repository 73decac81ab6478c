"""The backend reads the settings that `docs/start/localai.md` tells users to write.

With `LOCALAI=/path/to/local-ai` in the environment its first section is run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from waiting import wait_until

from backend.config import TuningOptions
from backend.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from backend.rpc.parsing.load_options import tuning_options

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "start" / "localai.md").read_text(encoding="utf-8")
MODELS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
# Compose has services, a model has a backend.
MODELS = [model for model in MODELS if "backend" in model]
NAMES = [model["name"] for model in MODELS]


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_options_of_the_yaml_are_known_and_of_their_types(model):
    names = [option.partition(":")[0] for option in model["options"]]
    assert set(names) <= TuningOptions().by_name().keys()
    assert len(set(names)) == len(names)
    tuning_options(model["options"], "")


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_models_are_such_as_the_host_takes(model):
    assert re.fullmatch(r"[a-zA-Z0-9-_]+", model["backend"])
    assert not model["parameters"]["model"].startswith("/")
    assert ".." not in model["parameters"]["model"]


def test_parsers_of_the_yaml_are_formats_that_there_are():
    options = tuning_options(MODELS[0]["options"], "")
    assert any(row.is_called(options.text.tool_parser) for row in TOOL_FORMATS)
    assert any(row.is_called(options.text.reasoning_parser) for row in REASONING_FORMATS)


def test_chat_models_get_their_template():
    assert MODELS[0]["template"] == {"use_tokenizer_template": True}


def test_external_backends_are_names_and_places():
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert set(json.loads(block)) == {"mlx", "mlx-vlm"}


def test_targets_that_the_page_names_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([\w-]+)", PAGE, re.MULTILINE))
    assert targets >= {"package", "image", "test-extra-backend"}
    assert targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


FIRST = PAGE.partition("## From nothing to an answer\n")[2].partition("\n### ")[0]
STEPS = re.findall(r"^```sh\n(.*?)^```", FIRST, re.MULTILINE | re.DOTALL)
START_TIMEOUT_S, POLL_S = 120.0, 0.5


def as_here(step):
    """Return the commands of a step for a folder of its own, with this checkout's backend."""
    own = f"{sys.executable} -m backend.cli"
    places = {
        "$PWD/run.sh": str(ROOT / "run.sh"),
        "backend/demo": str(ROOT / "backend" / "demo"),
        ".venv/bin/mlx-grpc-backend": own,
    }
    for written, here in places.items():
        step = step.replace(written, here)
    return step


def run(step, folder, environment):
    return subprocess.run(
        ["/bin/bash", "-ec", as_here(step)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def wait_until_ready(host, log):
    wait_until(lambda: is_ready() or host.poll() is not None, timeout_s=START_TIMEOUT_S)
    assert host.poll() is None, f"LocalAI did not start: {log.read_text()[-2000:]}"


def is_ready():
    try:
        urllib.request.urlopen("http://localhost:8080/readyz", timeout=5).close()
    except OSError:
        return False
    return True


def test_the_first_section_leads_from_an_installation_to_a_look_inside():
    assert STEPS[0] == "make install\n"
    assert [step.split()[0] for step in STEPS[1:]] == [
        "mkdir",
        "local-ai",
        "curl",
        "curl",
        re.match(r"address=\S+", STEPS[-1])[0],
    ]


@pytest.mark.skipif("LOCALAI" not in os.environ, reason="needs LOCALAI, the host's binary")
def test_the_commands_of_the_first_section_answer(tmp_path):
    folder = Path(os.environ["LOCALAI"]).parent
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    _, model, start, question, tool, look = STEPS
    assert run(model, tmp_path, environment).returncode == 0
    with (tmp_path / "log").open("wb") as log:
        host = subprocess.Popen(
            ["/bin/bash", "-c", f"exec {as_here(start)}"],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until_ready(host, tmp_path / "log")
        answer = json.loads(run(question, tmp_path, environment).stdout)
        assert answer["choices"][0]["message"]["content"]
        (call,) = json.loads(run(tool, tmp_path, environment).stdout)["choices"][0]["message"][
            "tool_calls"
        ]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Hanoi"}
        assert "demo (qwen3)" in run(look, tmp_path, environment).stdout
    finally:
        if host.poll() is None:
            os.killpg(host.pid, signal.SIGTERM)
        host.wait(60)
