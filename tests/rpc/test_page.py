"""The page over HTTP, without a browser and without MLX."""

import asyncio
import json
import re
import socket
from contextlib import closing
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from google.protobuf.json_format import ParseDict
from scripted_engine import ScriptedEngine, inspector, served

import backend.rpc.page
from backend.pb import backend_pb2 as pb
from backend.rpc.page import PageServer
from common.address import AddressError

ANY_PORT = "127.0.0.1:0"
SESAME = "s3cret"
FILES = Path(backend.rpc.page.__file__).parent / "page_files"
TIMEOUT_S = 30.0


async def get(page, path="", *, method="GET", **headers):
    """Return the status, the headers and the body of an answer."""

    def ask():
        with closing(HTTPConnection(urlsplit(page.url).netloc, timeout=TIMEOUT_S)) as connection:
            connection.request(method, f"/{path}", headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()

    return await asyncio.to_thread(ask)


class Parts(HTMLParser):
    """The tags of a document, and all that it fetches."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.inline = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.links += [values[name] for name in ("src", "href") if name in values]
        self.inline += [name for name in values if name.startswith("on") or name == "style"]


async def test_the_page_and_its_files_are_served_with_a_policy_that_allows_nothing_else():
    with PageServer(ANY_PORT, ScriptedEngine()) as page:
        for path, kind in (("", "html"), ("page.js", "javascript"), ("page.css", "css")):
            status, headers, body = await get(page, path)
            assert (status, kind in headers["Content-Type"], len(body) > 500) == (200, True, True)
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_holds_nothing_inline_and_nothing_from_elsewhere():
    parts = Parts()
    parts.feed((FILES / "page.html").read_text(encoding="utf-8"))
    assert parts.links == ["page.css", "data:,", "page.js"]
    assert (parts.inline, "style" in parts.tags) == ([], False)
    assert (FILES / "page.html").read_text(encoding="utf-8").count("<script") == 1


def test_what_is_told_reaches_the_page_as_text_only():
    script = (FILES / "page.js").read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function", script
    )
    assert set(re.findall(r"https?://[\w./]+", script)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"https?:|@import|url\(", (FILES / "page.css").read_text(encoding="utf-8"))


async def test_it_tells_what_inspect_tells():
    engine = ScriptedEngine()
    with PageServer(ANY_PORT, engine) as page:
        status, _, body = await get(page, "inspect")
    async with served(engine) as channel:
        reply = await inspector(channel).Inspect(pb.InspectRequest())
    assert status == 200
    assert ParseDict(json.loads(body), pb.InspectReply()) == reply


async def test_data_wants_the_token_and_the_page_does_not():
    with PageServer(ANY_PORT, ScriptedEngine(), SESAME) as page:
        assert (await get(page))[0] == 200
        for path in ("inspect", "prompt-cache"):
            assert (await get(page, path))[0] == 401
            status, headers, body = await get(page, path, Authorization="Bearer other")
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "token" in json.loads(body)["error"]
        assert (await get(page, "inspect", Authorization=f"Bearer {SESAME}"))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8080", 200),
        ("localhost:8080", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("192.0.2.7", 200),
        ("evil.example", 421),
        ("evil.example:8080", 421),
        ("127.0.0.1.evil.example:8080", 421),
    ],
)
async def test_without_a_token_a_foreign_name_is_refused(host, status):
    """A web site may give itself the address of this machine, but not another name."""
    with PageServer(ANY_PORT, ScriptedEngine()) as page:
        for path in ("", "inspect"):
            assert (await get(page, path, Host=host))[0] == status
    with PageServer(ANY_PORT, ScriptedEngine(), SESAME) as page:
        assert (await get(page, Host=host))[0] == 200


@pytest.mark.parametrize("path", ["page", "../server.py", "%2e%2e/server.py", "files/page.js", "x"])
async def test_there_is_nothing_else(path):
    with PageServer(ANY_PORT, ScriptedEngine()) as page:
        assert (await get(page, path))[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_it_is_only_read(method):
    with PageServer(ANY_PORT, ScriptedEngine()) as page:
        assert (await get(page, "inspect", method=method))[0] == 405
        status, _, body = await get(page, "inspect", method="HEAD")
    assert (status, body) == (200, b"")


async def test_without_a_model_it_says_so():
    with PageServer(ANY_PORT, ScriptedEngine(loaded=False)) as page:
        status, _, body = await get(page, "prompt-cache")
        assert (status, json.loads(body)) == (503, {"error": "model not loaded"})
        assert json.loads((await get(page, "inspect"))[2])["state"] == "UNINITIALIZED"


async def test_a_caller_that_sends_nothing_keeps_nobody_waiting():
    with (
        PageServer(ANY_PORT, ScriptedEngine()) as page,
        socket.create_connection(("127.0.0.1", urlsplit(page.url).port)) as silent,
    ):
        silent.send(b"GET /insp")
        assert (await get(page, "inspect"))[0] == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:0", "192.0.2.7:0"])
async def test_an_address_that_cannot_be_is_named(address):
    with pytest.raises(AddressError, match=re.escape(f"cannot listen on {address}: ")):
        PageServer(address, ScriptedEngine())


async def test_only_a_door_without_a_lock_to_the_street_is_warned_of(caplog):
    for address, token in ((ANY_PORT, ""), ("localhost:0", ""), ("0.0.0.0:0", SESAME)):
        with PageServer(address, ScriptedEngine(), token):
            assert not caplog.records
    with PageServer("0.0.0.0:0", ScriptedEngine()):
        assert "is open to anyone who can reach it" in caplog.text
