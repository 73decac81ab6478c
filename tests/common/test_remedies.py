"""Remedies for each way in which this backend can be installed."""

import json
import sys
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlunsplit

import pytest

from common.remedies import adding, command_of, present_extras, source_of

WHEEL = {"url": "file:///srv/a%20dir/x-0.1.0.whl", "archive_info": {}}
FOLDER, FILE = (urlunsplit(("https", "h", path, "", "")) for path in ("x", "x.whl"))


class Installed(Distribution):
    """An installation as a tool has recorded it."""

    def __init__(self, direct_url=None, installer="pip", metadata=""):
        self._files = {
            "direct_url.json": direct_url and json.dumps(direct_url),
            "INSTALLER": f"{installer}\n",
            "METADATA": f"Metadata-Version: 2.4\nName: x\n{metadata}",
        }

    def read_text(self, filename):
        return self._files.get(filename)

    def locate_file(self, path):
        return Path(path)


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        (None, "mlx-grpc-backend"),
        ({"url": "file:///src", "dir_info": {"editable": True}}, None),
        (WHEEL, "/srv/a dir/x-0.1.0.whl"),
        ({"url": FILE, "archive_info": {}}, f"mlx-grpc-backend @ {FILE}"),
        (
            {"url": FOLDER, "vcs_info": {"vcs": "git"}},
            f"mlx-grpc-backend @ git+{FOLDER}",
        ),
    ],
)
def test_the_source_is_the_one_it_was_installed_from(direct_url, source):
    assert source_of(Installed(direct_url)) == source


@pytest.mark.parametrize(
    ("installer", "start"),
    [("pip", f"{sys.executable} -m pip install"), ("uv", "uv pip install --python")],
)
def test_the_tool_is_the_one_it_was_installed_with(installer, start):
    command = command_of(Installed(WHEEL, installer), "/srv/x.whl", ("cpu",))
    assert command.startswith(start)
    assert command.endswith("'/srv/x.whl[cpu]'")
    assert adding(Installed(WHEEL, installer)).startswith(start)


def test_an_extra_of_an_address_is_named_before_it():
    command = command_of(Installed(), f"mlx-grpc-backend @ {FILE}", ("cpu", "media"))
    assert command.endswith(f"'mlx-grpc-backend[cpu,media] @ {FILE}'")


def test_a_tool_of_uv_is_made_anew_with_its_extras_and_added_to_in_its_place(tmp_path, monkeypatch):
    (tmp_path / "uv-receipt.toml").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    lines = [
        *("Provides-Extra: there", "Provides-Extra: missing"),
        'Requires-Dist: mlx-vlm==1.2; extra == "missing"',
        *('Requires-Dist: pytest; extra == "there"', 'Requires-Dist: nix; extra == "missing"'),
    ]
    ours = Installed(WHEEL, "uv", "\n".join(lines))
    assert present_extras(ours) == ["there"]
    command = command_of(ours, "/srv/x.whl", ("media",))
    assert command == "uv tool install --force '/srv/x.whl[media,there]'"
    assert adding(ours) == f"uv pip install --python {sys.executable} --no-deps mlx-vlm==1.2"
