"""load_model: what a checkpoint may look like, and how each thing we cannot do is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints_toy import (
    END,
    EOS,
    FAMILIES,
    TOKENIZER_SIZE,
    absent,
    make_checkpoint,
    make_successor_checkpoint,
    piece_ids,
)
from tests.engine.references import Reference
from tests.engine.runs import bench
from twinpool.core.errors import ConfigError, ModelError
from twinpool.engine.load import known_families, load_model

PROMPT = list(b"The text that every model of this file goes on with")


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors, add some, or (None) drop some; ``__`` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_shards_give_the_tokens_of_a_single_file(tmp_path: Path) -> None:
    single = make_checkpoint(tmp_path / "single", "llama", seed=2)
    sharded = make_checkpoint(tmp_path / "sharded", "llama", seed=2, num_shards=3)

    assert len(list(sharded.glob("*.safetensors"))) == 3
    assert bench(sharded).generate(PROMPT, max_tokens=16) == bench(single).generate(PROMPT, max_tokens=16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_compute_in_float32_as_in_the_reference(tmp_path: Path, dtype: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", seed=2, dtype=dtype)

    assert (
        bench(folder).generate(PROMPT, max_tokens=16)
        == Reference(folder).answer(PROMPT, max_tokens=16).output_ids
    )


TIED: dict[str, dict[str, object]] = {
    "tied": {"tie_word_embeddings": True},
    "tied with a redundant head": {"tie_word_embeddings": True, "write_lm_head": True},
    "untied": {"tie_word_embeddings": False},
    "flag absent": {},
}


@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_way_to_tie_gives_the_reference(tmp_path: Path, family: str, case: str) -> None:
    folder = make_checkpoint(tmp_path, family, seed=5, **TIED[case])  # type: ignore[arg-type]

    assert (
        bench(folder).generate(PROMPT, max_tokens=16)
        == Reference(folder).answer(PROMPT, max_tokens=16).output_ids
    )


def test_a_tied_model_whose_head_differs_uses_the_head_as_the_reference_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=5, tie_word_embeddings=True, write_lm_head=True)
    edit_weights(folder, lm_head__weight=load_file(folder / "model.safetensors")["lm_head.weight"].flip(0))

    assert (
        bench(folder).generate(PROMPT, max_tokens=16)
        == Reference(folder).answer(PROMPT, max_tokens=16).output_ids
    )


def test_weights_are_mapped_not_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=1024)
    loaded = load_model(folder)

    maps = Path("/proc/self/maps").read_text()

    assert str(folder / "model.safetensors") in maps
    assert loaded.spec.dtype == "float32"


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    edit_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))

    assert load_model(folder).spec.num_layers == 2


WRONG_WEIGHTS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": (
        {"model__layers__1__mlp__up_proj__weight": None},
        "weight model.layers.1.mlp.up_proj.weight is missing",
    ),
    "missing head": ({"lm_head__weight": None}, "weight lm_head.weight is missing"),
    "wrong shape": (
        {"model__norm__weight": torch.ones(63)},
        r"weight model.norm.weight has shape \[63\], needed is \[64\]",
    ),
    "left over": (
        {"model__layers__0__self_attn__q_proj__bias": torch.ones(64)},
        "1 weights have no use: model.layers.0.self_attn.q_proj.bias",
    ),
    "integers": (
        {"model__norm__weight": torch.ones(64, dtype=torch.int8)},
        "weight model.norm.weight has type torch.int8",
    ),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_a_weight_that_does_not_fit_is_named(tmp_path: Path, case: str) -> None:
    changes, message = WRONG_WEIGHTS[case]
    folder = make_checkpoint(tmp_path, "llama")
    edit_weights(folder, **changes)

    with pytest.raises(ModelError, match=message):
        load_model(folder)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "family": (
        {"model_type": "mixtral"},
        "model_type: 'mixtral' is none of llama, mistral, qwen2, qwen3",
    ),
    "path as family": ({"model_type": "../load"}, "model_type: '../load' is none of"),
    "no family": ({"model_type": None}, "model_type: is missing"),
    "architecture": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures: 'LlamaForSequenceClassification' is not LlamaForCausalLM",
    ),
    "rope type": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_type: 'longrope' is none of default, dynamic, linear, llama3, yarn",
    ),
    "rope type, old spelling": (
        {"rope_scaling": {"type": "su"}},
        "rope_scaling: type: 'su' is none of default, dynamic, linear, llama3, yarn",
    ),
    "rope type, new spelling": (
        {"rope_parameters": {"rope_type": "proportional"}},
        "rope_parameters: rope_type: 'proportional' is none of",
    ),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: is missing"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: is not 1.0"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is none of silu"),
    "quantization": (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config: 'awq' weights cannot be read",
    ),
    "experts": ({"num_local_experts": 8}, "num_local_experts: mixtures of experts are not served"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
    "odd heads": ({"head_dim": 15}, "head_dim: 15 is odd"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size: '64' is no whole number above 0"),
    "no size": ({"hidden_size": absent()}, "hidden_size: is missing"),
    "end token": ({"eos_token_id": "257"}, "eos_token_id: '257' is no token id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_we_cannot_do_is_refused_by_name(tmp_path: Path, case: str) -> None:
    fields, message = REFUSED[case]
    folder = make_checkpoint(tmp_path, "llama")
    edited = {**json.loads((folder / "config.json").read_text()), **fields}
    edited = {name: value for name, value in edited.items() if value is not absent()}
    (folder / "config.json").write_text(json.dumps(edited))

    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder)

    assert caught.value.field == "--model"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types: 1 names for 2 layers"),
        ({"layer_types": ["full_attention", "chunked"]}, "'chunked' is none of full_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "a sliding layer, but no window is in use"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(make_checkpoint(tmp_path, "qwen3", **fields))


def test_code_and_pickles_of_the_folder_are_not_touched(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('run')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")

    assert load_model(folder).spec.architecture == "llama"


def test_a_folder_with_pickles_only_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_cut_weight_file_is_refused(tmp_path: Path, keep: int) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:keep])

    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_cannot_name_files_outside_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", num_shards=2)
    edit_json(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": name})

    with pytest.raises(ModelError, match="is no safetensors file of this folder"):
        load_model(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(ModelError, match=r"weight file model-00002-of-00002.safetensors is missing"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "config.json").write_text(text)

    with pytest.raises(ModelError, match=r"config.json"):
        load_model(folder)


def test_end_tokens_of_all_files_are_united(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", eos_token_id=[256, END])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|eos|>"})

    assert load_model(folder).spec.eos_ids == (256, EOS, 258, END)


def test_a_generation_config_does_not_drop_the_end_tokens_of_the_config(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", eos_token_id=[EOS, END])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))

    assert load_model(folder).spec.eos_ids == (EOS, END)


def test_ids_beyond_the_tokenizer_are_not_for_sampling(tmp_path: Path) -> None:
    spec = load_model(make_checkpoint(tmp_path, "llama", vocab_size=320)).spec

    assert (spec.vocab_size, spec.sampling_vocab_size) == (320, TOKENIZER_SIZE)


def test_without_a_tokenizer_all_ids_are_for_sampling(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=320)
    (folder / "tokenizer.json").unlink()

    assert load_model(folder).spec.sampling_vocab_size == 320


def test_the_spec_tells_the_layout_of_the_cache(tmp_path: Path) -> None:
    layout = load_model(make_checkpoint(tmp_path, "qwen3"), dtype="bfloat16").spec.layout(block_tokens=8)

    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 2, 32)
    assert (layout.block_tokens, layout.dtype) == (8, "bfloat16")


@pytest.mark.parametrize(
    ("rope", "max_tokens"),
    [
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_the_longest_request_follows_the_rope(
    tmp_path: Path, rope: dict[str, object], max_tokens: int
) -> None:
    assert (
        load_model(make_checkpoint(tmp_path, "llama", rope_scaling=rope)).spec.max_model_tokens == max_tokens
    )


FINGERPRINTED: dict[str, tuple[str, dict[str, object], set[str]]] = {
    "other weights": ("llama", {"seed": 1}, {"weights"}),
    "another window": ("mistral", {"sliding_window": 23}, {"config", "windows"}),
    "another base": ("llama", {"rope_theta": 5000.0}, {"config", "rope_frequencies"}),
    "another epsilon": ("llama", {"rms_norm_eps": 1e-5}, {"config"}),
}


@pytest.mark.parametrize("case", FINGERPRINTED)
def test_fingerprints_differ_in_the_setting_that_differs(tmp_path: Path, case: str) -> None:
    family, fields, names = FINGERPRINTED[case]
    one = load_model(make_checkpoint(tmp_path / "one", family)).spec.fingerprint
    other = load_model(make_checkpoint(tmp_path / "other", family, **fields)).spec.fingerprint  # type: ignore[arg-type]

    assert {name for name in one if one[name] != other[name]} == names
    assert one.keys() == other.keys()


def test_copies_of_a_checkpoint_have_one_fingerprint(tmp_path: Path) -> None:
    one = load_model(make_checkpoint(tmp_path / "one", "llama", _name_or_path="a")).spec.fingerprint
    other = load_model(make_checkpoint(tmp_path / "other", "llama", _name_or_path="b")).spec.fingerprint

    assert one == other


def test_another_tokenizer_or_dtype_is_another_fingerprint(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    one = load_model(folder).spec.fingerprint
    edit_json(folder / "tokenizer.json", truncation=None, extra=1)
    other = load_model(folder, dtype="bfloat16").spec.fingerprint

    assert {name for name in one if one[name] != other[name]} == {"tokenizer", "dtype"}


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:x", "cuda:", "cuda:99", ""])
def test_a_device_that_is_not_here_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="--device"):
        load_model(make_checkpoint(tmp_path, "llama"), device=device)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype: 'int8' is none of auto, float32, bfloat16, float16"):
        load_model(make_checkpoint(tmp_path, "llama"), dtype="int8")


def test_the_known_families_are_the_files_of_their_folder() -> None:
    assert known_families() == FAMILIES


def test_the_scripted_model_says_its_script(tmp_path: Path) -> None:
    script = ["The qu", "ick br", "own fo", "x", b"\xf0", b"\x9f\x98", b"\x80"]
    folder = make_successor_checkpoint(tmp_path, script)

    assert bench(folder).generate([72, 105], max_tokens=8) == [*piece_ids(script), EOS]
