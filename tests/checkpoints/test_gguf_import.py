"""import_gguf: the weights, settings and tokenizer that went into the file come out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer

from tests.checkpoints.toy_gguf import (
    MARKUP,
    SPECIAL,
    byte_vocabulary,
    random_weights,
    write_gguf,
    write_sentence_piece,
)
from twinpool.checkpoints import gguf_import
from twinpool.checkpoints.gguf_file import GGUFFile
from twinpool.checkpoints.gguf_import import import_gguf
from twinpool.checkpoints.gguf_tokenizer import write_tokenizer
from twinpool.core.errors import ModelError

VOCAB = len(byte_vocabulary())


def silent(message: str) -> None:
    del message


def imported(tmp_path: Path, path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    import_gguf(path, folder, silent)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_come_out_as_they_went_in(quantization: str, tmp_path: Path) -> None:
    weights = random_weights(vocab_size=VOCAB)
    expected = write_gguf(tmp_path / "toy.gguf", weights, quantization=quantization)

    folder = imported(tmp_path, tmp_path / "toy.gguf")

    found = safetensors.numpy.load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_biases_are_permuted_for_llama_and_nothing_is_for_qwen2(tmp_path: Path) -> None:
    weights = random_weights(vocab_size=VOCAB, biases=True)
    for architecture in ("llama", "qwen2"):
        path = tmp_path / f"{architecture}.gguf"
        write_gguf(path, weights, architecture=architecture, pre="qwen2")
        folder = tmp_path / architecture
        folder.mkdir()

        import_gguf(path, folder, silent)

        found = safetensors.numpy.load_file(folder / "model.safetensors")
        for name, values in weights.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_the_settings_are_those_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", random_weights(vocab_size=VOCAB))

    config = config_of(imported(tmp_path, tmp_path / "toy.gguf"))

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert config["vocab_size"] == VOCAB
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["bos_token_id"], config["eos_token_id"]) == (257, 258)


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    weights = random_weights(vocab_size=VOCAB, lm_head=True)
    write_gguf(tmp_path / "toy.gguf", weights)

    folder = imported(tmp_path, tmp_path / "toy.gguf")

    assert config_of(folder)["tie_word_embeddings"] is False
    found = safetensors.numpy.load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], weights["lm_head.weight"])


def llama3_factors(factor: float) -> np.ndarray[Any, Any]:
    """The factors of Llama 3's scaling over 8192 tokens, pair by pair, for theta 500000 and 16 dimensions."""
    factors = []
    for pair in range(8):
        wavelength = 2 * np.pi * 500000.0 ** (2 * pair / 16)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / 3.0
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_each_known_rope_scaling_is_kept(tmp_path: Path) -> None:
    weights = random_weights(vocab_size=VOCAB)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"words": {"rope.scaling.type": "linear"}, "numbers": {"rope.scaling.factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "words": {"rope.scaling.type": "yarn"},
                "numbers": {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ]
    for index, (fields, expected) in enumerate(cases):
        path = tmp_path / f"{index}.gguf"
        write_gguf(path, weights, **fields)
        folder = tmp_path / str(index)
        folder.mkdir()

        import_gguf(path, folder, silent)

        assert config_of(folder)["rope_scaling"] == expected


def rewrite_theta(path: Path, theta: float) -> None:
    """Set the one float of the rope base in place."""
    content = path.read_bytes()
    at = content.index(b"llama.rope.freq_base") + len("llama.rope.freq_base") + 4
    path.write_bytes(content[:at] + np.float32(theta).tobytes() + content[at + 4 :])


def test_llama3_factors_become_the_setting_that_makes_them(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    write_gguf(path, random_weights(vocab_size=VOCAB), extra={"rope_freqs.weight": llama3_factors(32.0)})
    rewrite_theta(path, 500000.0)

    folder = imported(tmp_path, path)

    assert config_of(folder)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architecture": "gemma"}, "GGUF architecture gemma cannot be converted, known are llama"),
        ({"numbers": {"expert_count": 8}}, "GGUF architecture llama with experts cannot be converted"),
        ({"words": {"rope.scaling.type": "longrope"}}, "GGUF rope scaling longrope cannot be converted"),
        (
            {"numbers": {"rope.dimension_count": 8}},
            r"llama\.rope\.dimension_count differs from the head size 16",
        ),
        ({"pre": "viking"}, "GGUF pre-tokenizer viking cannot be converted, known are "),
        (
            {"extra": {"rope_freqs.weight": np.full(8, 3.0, dtype=np.float32)}},
            r"rope_freqs\.weight holds rope factors that are not Llama 3's",
        ),
        (
            {"extra": {"blk.0.ffn_gate_inp.weight": np.ones(8, dtype=np.float32)}},
            r"GGUF tensor blk\.0\.ffn_gate_inp\.weight has no place",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "toy.gguf", random_weights(vocab_size=VOCAB), **fields)

    with pytest.raises(ModelError, match=problem):
        imported(tmp_path, tmp_path / "toy.gguf")


def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = np.zeros((4, 40), dtype=np.uint8)
    writer.add_tensor("output_norm.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(
        ModelError, match=r"tensor output_norm\.weight has quantization Q8_1, which is not known"
    ):
        GGUFFile(path).load("output_norm.weight")


def test_a_damaged_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    write_gguf(path, random_weights(vocab_size=VOCAB))
    whole = path.read_bytes()

    for length in (0, 3, 10, 30, 500, 5000, len(whole) // 2, len(whole) - 4096):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GGUFFile(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ModelError, match="is no GGUF file"):
        GGUFFile(path)


def test_the_tokenizer_is_the_one_in_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", random_weights(vocab_size=VOCAB))

    folder = imported(tmp_path, tmp_path / "toy.gguf")

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = f"{SPECIAL[0]}cab 12{MARKUP}\n"
    encoding = tokenizer.encode(text)
    assert encoding.tokens == [SPECIAL[0], "c", "ab", "\u0120", "1", "2", MARKUP, "\u010a"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == f"cab 12{MARKUP}\n"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == SPECIAL
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_a_tokenizer_of_llama_2_is_rebuilt_from_its_scores(tmp_path: Path) -> None:
    tokens = write_sentence_piece(tmp_path / "toy.gguf")

    write_tokenizer(GGUFFile(tmp_path / "toy.gguf"), tmp_path)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoding = tokenizer.encode("abc ab\u00e9")
    assert encoding.tokens == ["<s>", "\u2581ab", "c", "\u2581ab", "<0xC3>", "<0xA9>"]
    assert encoding.ids == [tokens.index(token) for token in encoding.tokens]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "abc ab\u00e9"


def test_every_token_that_ends_a_turn_is_kept(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", random_weights(vocab_size=VOCAB))

    folder = imported(tmp_path, tmp_path / "toy.gguf")

    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 257, "eos_token_id": [258, 257]}


def test_a_large_model_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "_SHARD_BYTES", 100_000)
    weights = random_weights(vocab_size=VOCAB)
    write_gguf(tmp_path / "toy.gguf", weights)

    folder = imported(tmp_path, tmp_path / "toy.gguf")

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in weights.values())
    assert len(set(index["weight_map"].values())) > 1
    for name, file_name in index["weight_map"].items():
        found = safetensors.numpy.load_file(folder / file_name)
        np.testing.assert_array_equal(found[name], weights[name])
