import gzip
import io
import json
import shutil
import tarfile

import pytest

from scripts.package.image import ImageError, write_image, write_layer

TAG = "mlx-grpc-backend:0"


@pytest.fixture
def package(tmp_path):
    directory = tmp_path / "mlx"
    (directory / "backend").mkdir(parents=True)
    (directory / "backend" / "__init__.py").touch()
    run_script = directory / "run.sh"
    run_script.write_text("#!/bin/sh\n")
    run_script.chmod(0o755)
    return directory


def assert_is_the_package(layer):
    assert set(layer.getnames()) == {"run.sh", "backend", "backend/__init__.py"}
    run_script = layer.getmember("run.sh")
    assert run_script.mode & 0o111 == 0o111
    assert (run_script.uid, run_script.gid) == (0, 0)


def test_the_root_of_the_layer_is_the_package(package, tmp_path):
    write_layer(package, tmp_path / "layer.tar")
    with tarfile.open(tmp_path / "layer.tar") as layer:
        assert_is_the_package(layer)


@pytest.mark.skipif(shutil.which("crane") is None, reason="needs crane on the PATH")
def test_the_archive_holds_one_image_of_one_layer(package, tmp_path):
    archive = tmp_path / "mlx.tar"
    write_image(package, archive, TAG)
    with tarfile.open(archive) as image:
        (manifest,) = json.load(image.extractfile("manifest.json"))
        config = json.load(image.extractfile(manifest["Config"]))
        (layer_name,) = manifest["Layers"]
        layer = gzip.decompress(image.extractfile(layer_name).read())
    assert manifest["RepoTags"] == [TAG]
    assert "Entrypoint" not in config["config"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert_is_the_package(tar)


def test_without_crane_it_says_what_is_missing(package, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="crane is not here: install it"):
        write_image(package, tmp_path / "mlx.tar", TAG)
    assert not (tmp_path / "mlx.tar").exists()
