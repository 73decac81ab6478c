import re

from backend import __version__
from scripts.package.contents import PAPERS, ROOT, metadata, requirements, third_party, write_papers


def test_the_host_finds_it_by_the_name_mlx():
    assert metadata() == {"alias": "mlx", "name": "mlx", "version": __version__}


def test_requirements_are_those_of_the_project_without_itself():
    found = {re.match(r"[\w-]+", entry)[0] for entry in requirements(["media", "cpu"])}
    assert {"mlx", "mlx-lm", "grpcio", "pillow"} <= found
    assert "mlx[cpu]==0.32.4" in requirements(["cpu"])
    assert "mlx-grpc-backend" not in found


def test_papers_stand_at_the_top_and_the_script_stays_executable(tmp_path):
    write_papers(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*PAPERS, "THIRD-PARTY.txt", "metadata.json"}
    assert (tmp_path / "run.sh").stat().st_mode & 0o111
    assert (tmp_path / "run.sh").read_bytes() == (ROOT / "run.sh").read_bytes()


def test_every_installed_package_is_named_with_its_licence(tmp_path):
    folder = tmp_path / "some-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: some\nVersion: 1.0\nLicense-Expression: MIT\n")
    assert third_party(tmp_path) == "some 1.0: MIT\n"
