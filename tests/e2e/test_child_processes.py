"""The environment of every process that a backend starts: the host's variables, no secret."""

import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from real_process import TIMEOUT_S, real_backend
from serving import code_of, served
from waiting import wait_until

from backend.demo import MODEL_DIR
from backend.engine.supervision import engine_process
from backend.model.checkpoint.upstream import INDEX_NAME
from backend.pb import backend_pb2 as pb
from common.directories import NAME

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SESAME = "t0ken"
SECRETS = {
    "LOCALAI_GRPC_AUTH_TOKEN": SESAME,
    "HF_TOKEN": "hf",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "AWS_ACCESS_KEY_ID": "id",
    "OPENAI_API_KEY": "key",
    "DB_PASSWORD": "word",
    **dict.fromkeys(("PGPASSWORD", "MYSQL_PWD", "GHTOKEN", "MY_TOKEN2", "CLIENTSECRET"), "word"),
    **dict.fromkeys(("OPENAI_KEY", "SIGNING_KEY", "GITHUB_PAT", "SMTP_PASS", "JWT"), "word"),
    "DATABASE_URL": "postgres://me:word@db/x",
}
SETTINGS = {
    "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "TOKENIZERS_PARALLELISM": "false",
    "MLX_METAL_JIT": "1",
    "A_VARIABLE_OF_MINE": "kept",
    "OLDPWD": "/",
    "KEYBOARD": "us",
    "http_proxy": "http://me:word@proxy:3128",
}
AUTHORISED = (("authorization", f"Bearer {SESAME}"),)


def descendants(process_id):
    """Return the processes below one, each with its command line."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(place.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            command = place.joinpath("cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        found[int(place.name)] = (parent, command)
    below, known = {}, {process_id}
    while new := {each for each, (parent, _) in found.items() if parent in known} - known:
        known |= new
        below |= {each: found[each][1] for each in new}
    return below


def environment_of(process_id):
    entries = Path(f"/proc/{process_id}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def named(process_id, part):
    return [each for each, command in descendants(process_id).items() if part in command]


def test_no_child_has_a_secret_the_engine_has_all_else_and_all_share_the_servers_session(tmp_path):
    environment = {**os.environ, **SECRETS, **SETTINGS}
    with real_backend(tmp_path / "log", environment, token=SESAME) as backend:
        pid = backend.process.pid
        request = pb.ModelOptions(
            Model=str(MODEL_DIR),
            EnvVars=[
                pb.ModelOptions.EnvVar(key="MLX_OF_THIS_MODEL", value="a=b").SerializeToString(),
                b"A_VARIABLE_OF_MINE=replaced",
            ],
        )
        assert backend.stub.LoadModel(request, timeout=TIMEOUT_S, metadata=AUTHORISED).success
        message = pb.PredictOptions(
            Messages=[pb.Message(role="user", content="hi")], UseTokenizerTemplate=True, Tokens=1
        )
        backend.stub.Predict(message, timeout=TIMEOUT_S, metadata=AUTHORISED)
        backend.stub.TokenizeString(
            pb.PredictOptions(Prompt="x" * 100_000), timeout=TIMEOUT_S, metadata=AUTHORISED
        )
        job = pb.QuantizationRequest(
            model=str(MODEL_DIR), output_dir=str(tmp_path), quantization_type="q4"
        )
        backend.stub.StartQuantization(job, timeout=TIMEOUT_S, metadata=AUTHORISED)
        (job_process,) = wait_until(lambda: named(pid, b"backend.jobs"))
        engines = named(pid, b"backend.rank")
        found = {each: environment_of(each) for each in descendants(pid)}
        assert job_process in found
        (reader,) = named(pid, b"isolated.encoding")
        assert reader in found
        for variables in found.values():
            assert not variables.keys() & SECRETS.keys()
        # There niceness counts; whoever ends an engine ends its group.
        assert {os.getsid(each) for each in [*engines, reader]} == {os.getsid(pid)}
        assert [os.getpgid(each) for each in engines] == engines
        assert os.getpgid(reader) == os.getpgid(pid)
        loaded = [found[each] for each in engines if "MLX_OF_THIS_MODEL" in found[each]]
        assert len(loaded) == 1
        expected = {**SETTINGS, "A_VARIABLE_OF_MINE": "replaced", "MLX_OF_THIS_MODEL": "a=b"}
        assert expected.items() <= loaded[0].items()
        log = backend.log_text
    assert "kept from child processes:" in log
    assert "HF_TOKEN" in log
    assert not [value for value in (SESAME, "word") if value in log]


def test_variables_with_which_no_engine_starts_leave_the_model_and_its_streams(tmp_path):
    variables = [b"PYTHONHOME=/nowhere"]
    for shadowed in ("json", "mlx_lm"):
        (tmp_path / shadowed).mkdir()
        (tmp_path / shadowed / f"{shadowed}.py").write_text("raise ImportError", encoding="utf-8")
        variables.append(f"PYTHONPATH={tmp_path / shadowed}".encode())
    with real_backend(tmp_path / "log") as backend:
        backend.load("demo")
        request = pb.PredictOptions(Prompt="Once", Tokens=0, IgnoreEOS=True)
        stream = backend.stub.PredictStream(request, timeout=TIMEOUT_S)
        next(stream)
        for variable in variables:
            with pytest.raises(grpc.RpcError) as caught:
                backend.load("demo", EnvVars=[variable])
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith("EnvVars: no engine starts with them")
            next(stream)
        stream.cancel()
        backend.load("demo", EnvVars=[b"A_VARIABLE=1"])


async def test_variables_with_which_an_engine_hangs_leave_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_process, "ENGINE_START_S", 0.5)
    (tmp_path / "json.py").write_text("import signal; signal.pause()", encoding="utf-8")
    async with served(MODEL_DIR) as backend:
        process = backend.engine.process_id
        asked = backend.load(MODEL_DIR, EnvVars=[f"PYTHONPATH={tmp_path}".encode()])
        code, details = await code_of(asked)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        problem = "its process has not begun after 0.5 s"
        assert details == f"EnvVars: no engine starts with them: {problem}"
        engines = named(os.getpid(), b"backend.rank")
        assert not [
            each for each in engines if environment_of(each).get("PYTHONPATH") == str(tmp_path)
        ]
        assert (await backend.stub.Predict(pb.PredictOptions(Prompt="hi", Tokens=2))).tokens == 2
        assert backend.engine.process_id == process


def test_kernels_are_compiled_where_no_other_user_can_put_one(tmp_path):
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    (everybodys / "mlx").mkdir()
    state = tmp_path / "new" / "state"
    environment = {**os.environ, "TMPDIR": str(everybodys), "XDG_STATE_HOME": str(state)}
    before = os.umask(0)
    try:
        with real_backend(tmp_path / "log", environment) as backend:
            backend.stub.LoadModel(pb.ModelOptions(Model=str(MODEL_DIR)), timeout=TIMEOUT_S)
            backend.stub.Predict(pb.PredictOptions(Prompt="hi", Tokens=2), timeout=TIMEOUT_S)
            used = {environment_of(each)["TMPDIR"] for each in descendants(backend.process.pid)}
    finally:
        os.umask(before)
    (directory,) = map(Path, used)
    assert directory.is_relative_to(state)
    # So is the index that the import of transformers looks for.
    assert (state / NAME / INDEX_NAME).is_file()
    assert not list((everybodys / "mlx").iterdir())
    for each in (directory, *directory.parents[: len(directory.relative_to(tmp_path).parts) - 1]):
        assert not each.stat().st_mode & 0o077, each


def test_an_idle_process_for_templates_that_ends_is_replaced_before_a_request_needs_it(tmp_path):
    with real_backend(tmp_path / "log") as backend:
        backend.load(MODEL_DIR)
        pid, kind = backend.process.pid, b"rendering_process"
        message = pb.Message(role="user", content="hi")
        chat = pb.PredictOptions(UseTokenizerTemplate=True, Messages=[message], Tokens=1)
        for _ in range(2):
            (idle,) = named(pid, kind)
            os.kill(idle, signal.SIGKILL)
            (successor,) = wait_until(lambda idle=idle: {*named(pid, kind)} - {idle})
            assert backend.stub.Predict(chat, timeout=TIMEOUT_S).tokens == 1
            assert named(pid, kind) == [successor]
