import subprocess
from pathlib import Path

import pytest

from backend import __version__
from scripts.release import ReleaseError, gather, notes, sums

ROOT = Path(__file__).parents[1]


@pytest.fixture
def built(tmp_path):
    """A wheel and a package, as `make wheel package` leaves them."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "mlx_grpc_backend-1.2.3-py3-none-any.whl").write_text("wheel")
    (tmp_path / "package" / "mlx").mkdir(parents=True)
    for name in ("run.sh", "THIRD-PARTY.txt"):
        (tmp_path / "package" / "mlx" / name).write_text(name)
    return tmp_path


def gathered(built, version="1.2.3"):
    places = {"dist": built / "dist", "package": built / "package"}
    return gather(built / "release", version, **places)


def test_a_release_has_wheel_package_and_notices_with_sums_that_check(built):
    files = gathered(built)
    kinds = {path.name.partition("-1.2.3-")[2] or path.name for path in files}
    assert {"py3-none-any.whl", "NOTICES.md", "THIRD-PARTY.txt"} <= kinds
    assert any(name.endswith(".tar.gz") for name in kinds)
    (built / "release" / "SHA256SUMS").write_text("".join(sums(files)))
    command = ["/usr/bin/env", "sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(command, cwd=built / "release", check=True)


def test_an_image_is_part_of_it_where_one_was_built(built):
    (built / "package" / "mlx.tar").write_text("image")
    assert any(path.name.endswith("-image.tar") for path in gathered(built))


def test_what_is_of_another_version_is_no_release(built):
    with pytest.raises(ReleaseError, match="make wheel package"):
        gathered(built, "1.2.4")


def test_notes_are_the_section_of_the_version():
    changelog = "# C\n\n## [Unreleased]\n\nlater\n\n## [1.2.3] - 2026-01-31\n\nnow\n\n## [1.2.2]\n"
    assert notes(changelog, "1.2.3") == "now\n"
    with pytest.raises(ReleaseError, match=r"no section '## \[1.2.2\] - DATE'"):
        notes(changelog, "1.2.2")


def test_notes_keep_no_link_that_leads_nowhere_on_the_page_of_a_release():
    body = "- [A\ntree](docs/tree.md#roots), and [LocalAI](https://localai.io).\n"
    assert notes(f"## [1.0.0] - 2026-01-31\n{body}", "1.0.0") == (
        "- A\ntree, and [LocalAI](https://localai.io).\n"
    )


def test_the_changelog_has_this_version():
    assert notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
