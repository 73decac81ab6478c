import json
import os
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from backend.cli import doctor
from backend.cli.app import main
from backend.cli.doctor import Verdict
from common.remedies import install_command, version_of


def run_doctor(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["doctor", *arguments])


def only(findings):
    (finding,) = findings
    return finding


@pytest.mark.mlx
def test_a_machine_on_which_everything_works_is_told_so():
    result = run_doctor("--addr", "127.0.0.1:0", "--json")
    findings = {each["subject"]: each for each in map(json.loads, result.output.splitlines())}
    assert result.exit_code == 0, result.output
    assert findings["python"]["text"] == ".".join(map(str, sys.version_info[:3]))
    assert f"mlx {version_of('mlx')}" in findings["packages"]["text"]
    assert "GFLOP/s" in findings["mlx"]["text"]
    assert {each["verdict"] for each in findings.values()} <= {"ok", "warning"}


@pytest.mark.mlx
def test_every_warning_and_fault_has_a_remedy():
    result = run_doctor("--addr", "8080", "--cache-dir", "/proc/none", "--json")
    assert result.exit_code == 1
    for finding in map(json.loads, result.output.splitlines()):
        assert (
            bool(finding["remedy"]) == (finding["verdict"] != "ok")
            or finding["subject"] == "wired limit"
        )


@pytest.mark.mlx
def test_the_table_names_what_is_wrong_and_what_mends_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_doctor("--addr", address)
    assert result.exit_code == 1
    assert f"cannot listen on {address}: Address already in use" in result.output
    assert "→ serve --addr 127.0.0.1:" in result.output


def with_mlx(folder, code):
    """Return an environment in which another MLX is found before the real one."""
    (folder / "mlx").mkdir()
    (folder / "mlx" / "core.py").write_text(code)
    (folder / "mlx" / "__init__.py").write_text("")
    first = f"import sys; sys.path.insert(0, {str(folder)!r})"
    (folder / "sitecustomize.py").write_text(first)
    return os.environ | {"PYTHONPATH": str(folder)}


def test_an_mlx_that_does_not_start_is_told_in_its_own_words(tmp_path):
    environment = with_mlx(tmp_path, "raise ImportError('libmlx.so: cannot open')")
    finding = only(doctor.check_device(environment))
    assert finding.verdict is Verdict.BAD
    assert finding.text == "ImportError: libmlx.so: cannot open"


MLX_OF_CUDA = """
from types import SimpleNamespace


class Matrix:
    def __matmul__(self, other):
        return self


def eval(*arrays):
    pass


def device_info():
    return {"device_name": "A GPU", "total_memory": 80 * 10**9}


def default_device():
    return SimpleNamespace(type=SimpleNamespace(name="gpu"))


array, random = Matrix, SimpleNamespace(normal=lambda shape: Matrix())
"""


def test_the_memory_of_a_gpu_is_told_beside_that_of_the_machine(tmp_path):
    _, memory = doctor.check_device(with_mlx(tmp_path, MLX_OF_CUDA))
    assert (memory.subject, memory.text) == ("gpu memory", "80.0 GB, shared by all backends on it")


def test_a_blas_that_is_switched_off_is_a_warning():
    finding = only(doctor.check_blas({"MLX_BACKEND_PRELOAD_BLAS": "0"}))
    assert finding.verdict is Verdict.WARNING
    assert finding.remedy == "unset MLX_BACKEND_PRELOAD_BLAS"


def test_a_package_of_another_version_is_named_with_the_command_that_mends_it():
    requirement = doctor.Requirement(f"numpy<{version_of('numpy')}")
    finding = doctor.compared(requirement)
    assert finding.verdict is Verdict.WARNING
    assert finding.remedy == install_command()


def test_a_package_that_is_missing_is_a_fault():
    finding = doctor.compared(doctor.Requirement("no-such-package>=1"))
    assert finding.verdict is Verdict.BAD


def test_a_missing_extra_says_what_does_not_work_without_it():
    for finding in doctor.check_extras():
        assert finding.verdict is Verdict.GOOD or "install" in finding.remedy


def test_a_free_address_is_good():
    assert only(doctor.check_address("127.0.0.1:0")).verdict is Verdict.GOOD


def test_a_backend_that_runs_at_the_address_is_known(scripted, script):
    scripted.reports = [script.report()]
    finding = only(doctor.check_address(scripted.address))
    assert finding.verdict is Verdict.GOOD
    assert "a backend runs there, with org/tiny" in finding.text


def test_a_backend_that_wants_a_token_is_known_too(scripted):
    scripted.token = "secret"  # noqa: S105 - a made-up one
    assert "a backend with a token" in only(doctor.check_address(scripted.address)).text


def test_a_socket_in_a_folder_that_is_not_there_is_a_fault(tmp_path):
    finding = only(doctor.check_address(f"unix:{tmp_path}/none/mlx.sock"))
    assert finding.verdict is Verdict.BAD


def test_the_folder_of_models_follows_the_environment(tmp_path):
    finding = only(doctor.check_models({"HF_HOME": str(tmp_path / "models")}))
    assert str(tmp_path / "models") in finding.text
    own = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": "/proc/none"}
    assert str(tmp_path / "hub") in only(doctor.check_models(own)).text


def test_a_folder_that_cannot_be_written_is_a_fault():
    finding = only(doctor.check_models({"HF_HOME": "/proc/none"}))
    assert finding.verdict is Verdict.BAD
    assert "HF_HOME" in finding.remedy


def test_a_file_is_no_folder_for_the_prompt_cache(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "cache"):
        finding = only(doctor.check_cache(place))
        assert (finding.verdict, finding.text) == (Verdict.BAD, f"{place}: Not a directory")


def test_a_cache_folder_is_judged_as_a_load_judges_it(tmp_path):
    own = tmp_path / "mlx-backend-prompt-cache"
    own.mkdir(mode=0o700)
    assert only(doctor.check_cache(tmp_path)).verdict is Verdict.GOOD
    own.chmod(0o777)
    finding = only(doctor.check_cache(tmp_path))
    assert (finding.verdict, "others can write" in finding.text) == (Verdict.BAD, True)
    own.chmod(0o700)
    (own / "notes.txt").touch()
    finding = only(doctor.check_cache(tmp_path))
    assert (finding.verdict, "notes.txt" in finding.text) == (Verdict.BAD, True)
    finding = only(doctor.check_cache(Path("cache")))
    assert finding.text == "cache_dir: must be an absolute path, not 'cache'"


def test_without_a_cache_folder_there_is_nothing_to_look_at():
    assert not list(doctor.check_cache(None))
