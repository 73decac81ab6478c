import re

import pytest

from backend.__main__ import OPTIONS, TRACE_ENDPOINTS, SettingError, memory_ledger, server_config
from backend.config import ServerConfig

SESAME = "s3cret"


def test_nothing_given_is_the_defaults():
    assert server_config([], {}) == ServerConfig()


def test_backends_of_a_user_meet_in_one_directory_whatever_is_temporary(tmp_path):
    home = {"HOME": str(tmp_path)}
    own = {"TMPDIR": str(tmp_path / "own"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    assert memory_ledger(home) == memory_ledger(home | own)
    assert memory_ledger(home).is_relative_to(tmp_path)
    assert memory_ledger({"MLX_BACKEND_LEDGER": str(tmp_path)}) == tmp_path


def test_a_ledger_at_a_relative_path_is_none(caplog, tmp_path):
    home = {"HOME": str(tmp_path)}
    assert memory_ledger(home | {"MLX_BACKEND_LEDGER": "here"}) == memory_ledger(home)
    assert "'here' is not an absolute path" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["--addr", "0.0.0.0:7"], "0.0.0.0:7"),
        (["--addr=[::1]:7"], "[::1]:7"),
        (["--other", "x", "-v", "y", "--addr", "h:7", "z"], "h:7"),
        (["--address", "h:7"], ServerConfig().address),
    ],
)
def test_the_address_is_found_among_other_arguments(arguments, address):
    assert server_config(arguments, {}).address == address


def test_the_help_of_the_script_has_its_name(capsys):
    with pytest.raises(SystemExit, match="0"):
        server_config(["--help"], {})
    assert capsys.readouterr().out.startswith("usage: run.sh ")


def test_options_that_mean_nothing_here_are_named_in_one_warning(caplog):
    arguments = ["--adr=h:7", "--port", "7", "--addr", "h:8", "x", "--metrics-adr", "h:9", "--y"]
    assert server_config(arguments, {}).address == "h:8"
    (record,) = caplog.records
    assert record.getMessage() == (
        "ignoring unknown options: --adr (did you mean --addr?), "
        "--port (did you mean --addr HOST:PORT?), --metrics-adr (did you mean --metrics-addr?), --y"
    )


def test_values_of_unknown_options_stay_out_of_the_log(caplog):
    server_config([f"--token={SESAME}", "--secret", SESAME], {})
    assert "--token, --secret" in caplog.text
    assert SESAME not in caplog.text


def test_arguments_that_are_no_options_are_nothing_to_warn_of(caplog):
    server_config(["--addr", "h:7", "extra", "-", "--"], {})
    assert not caplog.records


def test_every_option_can_be_meant(capsys):
    with pytest.raises(SystemExit):
        server_config(["--help"], {})
    assert set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) == set(OPTIONS)


def test_the_metrics_have_an_address_of_their_own_or_none():
    assert server_config(["--addr", "h:7", "--metrics-addr", "h:8"], {}) == ServerConfig(
        address="h:7", metrics_address="h:8"
    )


@pytest.mark.parametrize(
    ("given", "address"), [("h:9", "h:9"), ("9", "127.0.0.1:9"), ("[::1]:9", "[::1]:9")]
)
def test_the_dashboard_is_on_loopback_unless_a_host_is_named(given, address):
    assert server_config(["--dashboard", given], {}).dashboard_address == address
    assert server_config([], {}).dashboard_address == ""


@pytest.mark.parametrize(
    ("text", "watches"),
    [("", True), ("true", True), ("1", True), ("0", False), ("False", False), (" off ", False)],
)
def test_the_parent_is_watched_unless_told_not_to(text, watches):
    environment = {"LOCALAI_BACKEND_PARENT_WATCH": text}
    assert server_config([], environment).watches_parent is watches


@pytest.mark.parametrize("name", TRACE_ENDPOINTS)
def test_the_environment_names_where_traces_go(name):
    assert server_config([], {name: "http://collector:4317"}).traces
    assert not server_config([], {name: ""}).traces


def test_the_environment_sets_token_and_interval():
    environment = {
        "LOCALAI_GRPC_AUTH_TOKEN": SESAME,
        "LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": "500ms",
    }
    assert server_config([], environment) == ServerConfig(
        auth_token=SESAME, parent_watch_interval_s=0.5
    )


@pytest.mark.parametrize("option", ["--metrics-addr", "--dashboard"])
def test_an_impossible_address_is_told_with_its_option_before_anything_starts(option):
    with pytest.raises(SettingError, match=f"^{option}: cannot listen on h:x: 'x' is not a port"):
        server_config([option, "h:x"], {})


@pytest.mark.parametrize("token", ["ü", "word\n"])
def test_a_token_that_no_caller_can_send_is_refused(token):
    with pytest.raises(SettingError, match=r"^LOCALAI_GRPC_AUTH_TOKEN: no caller can send it"):
        server_config([], {"LOCALAI_GRPC_AUTH_TOKEN": token})


@pytest.mark.parametrize(
    ("environment", "max_slots"),
    [
        ({"PYTHON_GRPC_MAX_WORKERS": "1"}, 1),
        ({"LLAMACPP_PARALLEL": " 8 "}, 8),
        ({"PYTHON_GRPC_MAX_WORKERS": "3", "LLAMACPP_PARALLEL": "8"}, 3),
        ({"PYTHON_GRPC_MAX_WORKERS": "", "LLAMACPP_PARALLEL": "8"}, 8),
    ],
)
def test_the_environment_sets_the_number_of_slots(environment, max_slots):
    assert server_config([], environment).max_slots == max_slots


@pytest.mark.parametrize("text", ["0", "-1", "many", "2000", "1.5"])
def test_a_bad_number_of_slots_is_logged_and_the_default_taken(text, caplog):
    assert server_config([], {"LLAMACPP_PARALLEL": text}) == ServerConfig()
    assert f"LLAMACPP_PARALLEL: '{text}' is not a number from 1 to 1024; taking 16" in caplog.text


def test_a_bad_interval_is_logged_and_the_default_taken(caplog):
    config = server_config([], {"LOCALAI_BACKEND_PARENT_WATCH_INTERVAL": "often"})
    assert config == ServerConfig()
    assert "LOCALAI_BACKEND_PARENT_WATCH_INTERVAL: 'often' is not an interval" in caplog.text
