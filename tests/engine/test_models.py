"""Every family and rope scaling gives the tokens and log-probabilities of transformers, however it is cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.checkpoints_toy import FAMILIES, make_checkpoint
from tests.engine.references import Answer, Reference
from tests.engine.runs import Sequenced, bench
from tests.shared import smollm2_references
from twinpool.checkpoints.resolve import resolve_model

WHOLE = 10_000
CHUNKS = (1, 7, 16, 17, 32, WHOLE)
BLOCKS = (8, 16, 32)
ROPES: dict[str, dict[str, object]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    "yarn with every setting": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
    },
    "yarn of a fixed strength": {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "truncate": False},
        "max_position_embeddings": 2048,
    },
}
WINDOWS: dict[str, tuple[str, dict[str, object]]] = {
    "mistral without": ("mistral", {"sliding_window": None}),
    "qwen2 from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3 by name": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2 switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
}
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with one KV head per head": ("llama", {"num_key_value_heads": None}),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama with heads of 24": ("llama", {"head_dim": 24}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "a large epsilon": ("llama", {"rms_norm_eps": 0.1}),
}


def prompt(num_tokens: int, *, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num_tokens)]


def assert_equal_to(answer: Answer, sequence: Sequenced) -> None:
    """Tokens equal; every log-probability within 1e-4."""
    assert sequence.output_ids == answer.output_ids
    num_prompt = sequence.num_prompt_tokens
    given = [*sequence.prompt_logprobs, *sequence.logprobs]
    assert len(given) == len(sequence.token_ids) - 1
    for position, logprob in enumerate(given):
        assert logprob is not None
        token_id = sequence.token_ids[position + 1]
        row = answer.logprobs[position]
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        for top_id, value in logprob.top:
            assert value == pytest.approx(float(row[top_id]), abs=1e-4)
        best = torch.sort(row, descending=True).values[: len(logprob.top)].tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best, abs=1e-4)
    assert num_prompt + len(sequence.logprobs) == len(sequence.token_ids)


def check(
    folder: Path, *, chunks: tuple[int, ...], blocks: tuple[int, ...] = (16,), length: int = 69
) -> None:
    answer = Reference(folder).answer(prompt(length), max_tokens=12)
    for block_tokens in blocks:
        made = bench(folder, block_tokens=block_tokens)
        for chunk in chunks:
            sequence = made.sequence(prompt(length), max_tokens=12, num_logprobs=3, num_prompt_logprobs=2)
            made.finish([sequence], chunk=chunk)
            assert_equal_to(answer, sequence)
            made.free.extend(sequence.blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_chunk_and_block_size_gives_the_reference(tmp_path: Path, family: str) -> None:
    check(make_checkpoint(tmp_path, family, seed=3), chunks=CHUNKS, blocks=BLOCKS)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rope_scaling_gives_the_reference(tmp_path: Path, family: str, rope: str) -> None:
    check(make_checkpoint(tmp_path, family, seed=4, **ROPES[rope]), chunks=(17, WHOLE), length=101)


@pytest.mark.parametrize("case", WINDOWS)
def test_every_spelling_of_a_window_gives_the_reference(tmp_path: Path, case: str) -> None:
    family, fields = WINDOWS[case]

    check(make_checkpoint(tmp_path, family, seed=6, **fields), chunks=(7, WHOLE))


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape_gives_the_reference(tmp_path: Path, case: str) -> None:
    family, fields = SHAPES[case]

    check(make_checkpoint(tmp_path, family, seed=7, **fields), chunks=(16,))


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 23, 24, 25, 200])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_length_gives_the_reference(tmp_path: Path, family: str, num_tokens: int) -> None:
    check(make_checkpoint(tmp_path, family, seed=8), chunks=(16,), length=num_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_a_mixed_batch_do_not_notice_each_other(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, seed=9)
    reference, made = Reference(folder), bench(folder)
    lengths = [1, 130, 5, 40, 69, 33, 7, 16, 17]
    waiting = [
        made.sequence(prompt(n, seed=n), max_tokens=10, num_logprobs=2, num_prompt_logprobs=0)
        for n in lengths
    ]
    chunks = random.Random(1)
    running: list[Sequenced] = []

    while waiting or not all(sequence.is_done for sequence in running):
        running.extend(waiting[:2])  # two new ones join in each step
        del waiting[:2]
        chunks.shuffle(running)
        made.step(running, chunk=chunks.choice(CHUNKS))

    for sequence in running:
        assert_equal_to(reference.answer(sequence.request.prompt_ids, max_tokens=10), sequence)


def test_smollm2_gives_its_reference_tokens() -> None:
    items = smollm2_references()
    made = bench(resolve_model("smollm2-135m-instruct"))

    sequences = [made.sequence(item["prompt_ids"], max_tokens=len(item["greedy_ids"])) for item in items]
    made.finish(sequences, chunk=17)

    assert [sequence.output_ids for sequence in sequences] == [item["greedy_ids"] for item in items]
