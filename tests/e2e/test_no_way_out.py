"""The content of a request is text: it opens no file and no address, and runs no code."""

import contextlib
import json
import shutil
import socket
import threading

import grpc
import pytest
from serving import code_of, served
from waiting import until

from backend.cache.node_files import FOLDER_NAME
from backend.pb import backend_pb2 as pb

pytestmark = pytest.mark.mlx

CONTENT = "the secret of the file"
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}


@pytest.fixture
def trap():
    """A listener that counts who connects: nobody may."""
    visits = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        is_over = threading.Event()

        def listen():
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    visits.append(server.accept())

        thread = threading.Thread(target=listen)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        is_over.set()
        thread.join()
    assert not visits


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text(CONTENT)
    return path


def raw(**fields):
    return pb.PredictOptions(**{"Prompt": "ba", "Tokens": 2, **fields})


def chat(content, **fields):
    message = pb.Message(role="user", content=content)
    return raw(UseTokenizerTemplate=True, Messages=[message], **fields)


@pytest.mark.parametrize("field", ["Images", "Audios", "Videos"])
async def test_media_are_payloads_and_neither_paths_nor_addresses(
    shared, tiny_models, trap, secret, field
):
    references = (str(secret), secret.as_uri(), trap, "~/.ssh/id_rsa", f"data:text/plain,{trap}")
    async with shared(tiny_models("llama")) as backend:
        for reference in references:
            code, details = await code_of(backend.stub.Predict(raw(**{field: [reference]})))
            assert code in REFUSED
            assert CONTENT not in details


async def test_references_in_text_stay_text(shared, tiny_models, trap, secret):
    texts = (f"@{secret}", f"{{% include '{secret}' %}}", f"![x]({trap})", f"<img src='{trap}'>")
    async with shared(tiny_models("llama")) as backend:
        for text in texts:
            assert (await backend.stub.Predict(chat(text))).tokens == 2
            reply = await backend.stub.TokenizeString(raw(Prompt=text))
            back = await backend.stub.Detokenize(pb.DetokenizeRequest(tokens=reply.tokens))
            assert back.content.strip() == text


@pytest.mark.parametrize("key", ["$ref", "$schema", "$id"])
async def test_a_schema_fetches_nothing(shared, tiny_models, trap, secret, key):
    async with shared(tiny_models("llama")) as backend:
        for reference in (trap, secret.as_uri(), str(secret)):
            schema = json.dumps({"type": "integer", key: reference})
            call = backend.stub.Predict(raw(Grammar=schema))
            try:
                await call
            except grpc.aio.AioRpcError as error:
                assert error.code() in REFUSED  # noqa: PT017 (it may also be taken, and ignored)


async def test_template_variables_are_values(shared, tiny_models, secret):
    source = f"{{% include '{secret}' %}}{{{{ ''.__class__ }}}}"
    for name in ("chat_template", "messages"):
        kwargs = json.dumps({name: source})
        async with shared(tiny_models("llama")) as backend:
            request = chat("ba", Metadata={"chat_template_kwargs": kwargs})
            code, details = await code_of(backend.stub.Predict(request))
            assert (code, CONTENT in details) == (grpc.StatusCode.INVALID_ARGUMENT, False)


async def test_a_cache_path_outside_of_the_models_is_not_touched(tiny_models, tmp_path):
    inside = tiny_models("llama").parent
    async with served(tiny_models("llama"), ModelPath=str(inside)) as backend:
        for path in (tmp_path / "cache", f"{inside}/../{tmp_path.name}/cache", "~/cache"):
            request = raw(PromptCachePath=str(path), PromptCacheAll=True)
            assert (await backend.stub.Predict(request)).tokens == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_named_by_request", [False, True])
async def test_a_cache_in_the_models_directory_removes_no_weights(
    tiny_models, tmp_path, is_named_by_request
):
    models = tmp_path / "models"
    directory = shutil.copytree(tiny_models("llama"), models / "org" / "llama")
    shutil.copytree(directory, models / "loose")
    before = {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    # Room for one of the two prompts; the weights alone are more.
    named = [] if is_named_by_request else [f"cache_dir:{models}"]
    options = ["max_cache_disk_bytes:250000", *named]
    fields = {"PromptCachePath": str(models), "PromptCacheAll": True} if is_named_by_request else {}
    async with served(directory, ModelPath=str(models), Options=options) as backend:
        for word in ("ba ", "be "):
            await backend.stub.Predict(raw(Prompt=word * 200, **fields))
        await until(lambda: any(models.glob(f"{FOLDER_NAME}/*/*.kv")))
    after = {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    written = after.keys() - before.keys()
    assert {path: after[path] for path in before} == before
    assert {path.relative_to(models).parts[0] for path in written} == {FOLDER_NAME}


async def test_code_of_a_checkpoint_runs_only_if_its_load_says_so(tiny_models, tmp_path):
    directory = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (directory / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_file": "custom.py", "auto_map": {"AutoConfig": "custom.Config"}}
    (directory / "config.json").write_text(json.dumps(config))
    async with served() as backend:
        await code_of(backend.load(directory))
    assert not (tmp_path / "ran").exists()
