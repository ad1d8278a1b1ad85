"""check_folder: nothing outside the folder is read, and no pickle is a weight."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from twinpool.checkpoints.folder import check_folder
from twinpool.core.errors import ModelError


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros(2, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_a_plain_folder_is_fine_whatever_code_lies_in_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    (folder / "evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    (folder / "README.md").symlink_to(folder / "config.json")

    check_folder(folder)


def test_a_snapshot_of_the_hub_may_point_at_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "0").write_text("{}")
    (repository / "blobs" / "1").write_bytes(b"")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")

    check_folder(snapshot)

    (snapshot / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(ModelError, match=r"tokenizer\.json is a link out of its folder"):
        check_folder(snapshot)


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside.json", "../nowhere"])
def test_a_link_out_of_the_folder_is_refused(target: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (tmp_path / "outside.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(target)

    with pytest.raises(ModelError, match=r"generation_config\.json is a link out of its folder"):
        check_folder(folder)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "model.bin", 7]
)
def test_an_index_names_files_of_its_folder_only(shard: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (tmp_path / "secret.safetensors").write_bytes(b"")
    write_index(folder, {"weight_map": {"a": shard}})

    with pytest.raises(ModelError, match="which is no safetensors file of this folder"):
        check_folder(folder)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": []}}])
def test_a_damaged_index_is_refused(content: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    write_index(folder, content)

    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        check_folder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    write_index(folder, {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})

    with pytest.raises(ModelError, match=r"names model-2\.safetensors, which is missing"):
        check_folder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_alone_are_refused(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)

    with pytest.raises(ModelError, match=f"only pickled weights \\({name}\\), which can run code"):
        check_folder(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no safetensors weights"):
        check_folder(folder)

    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_folder(folder)
