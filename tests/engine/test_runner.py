"""TorchRunner: layers are announced when they are written, and no sequence disturbs another."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.checkpoints_toy import make_checkpoint
from tests.engine.references import Reference
from tests.engine.runs import Bench, Sequenced, bench
from tests.kv_bytes import kv_bytes
from twinpool.core.errors import ConfigError, InternalError
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.engine import rank_step
from twinpool.engine.plan import BatchItem, BatchPlan
from twinpool.engine.runner import TorchRunner

PROMPT = list(b"A prompt whose length is no multiple of any block size, as it should be.")


@pytest.fixture
def made(tmp_path: Path) -> Bench:
    return bench(make_checkpoint(tmp_path, "llama", seed=12))


def whole(sequence: Sequenced) -> BatchItem:
    return sequence.item(chunk=10_000)


def test_each_layer_is_announced_in_order_with_its_kv_in_the_cache(made: Bench) -> None:
    sequence = made.sequence(PROMPT)
    seen: list[tuple[int, bool, bool]] = []

    def on_layer(layer: int) -> None:
        filled = [
            bool(torch.frombuffer(bytearray(part), dtype=torch.float32).count_nonzero() > 0)
            for part in (read(made, sequence, 0), read(made, sequence, 1))
        ]
        seen.append((layer, *filled))

    made.runner.run(BatchPlan((whole(sequence),)), on_layer)

    assert seen == [(0, True, False), (1, True, True)]


def read(made: Bench, sequence: Sequenced, layer: int) -> bytes:
    return kv_bytes(made.cache, layer=layer, blocks=sequence.blocks, num_tokens=len(PROMPT))


def test_a_chunk_that_is_not_the_last_chooses_nothing(made: Bench) -> None:
    (result,) = made.runner.run(BatchPlan((made.sequence(PROMPT).item(chunk=20),)), None)

    assert (result.token_id, result.logprob, result.error) == (None, None, None)


def test_results_are_in_the_order_of_the_plan(made: Bench) -> None:
    alone = [made.generate(PROMPT[:n], max_tokens=1) for n in (40, 3, 60, 9)]
    sequences = [made.sequence(PROMPT[:n], max_tokens=2) for n in (40, 3, 60, 9)]
    made.step(sequences[::2], chunk=10_000)  # two decode, two prefill in what follows

    results = made.step([sequences[1], sequences[0], sequences[3], sequences[2]], chunk=10_000)

    assert [sequence.output_ids[:1] for sequence in sequences] == alone
    assert [result.token_id for result in results] == [
        sequence.token_ids[-1] for sequence in (sequences[1], sequences[0], sequences[3], sequences[2])
    ]


def test_kv_moved_to_a_cache_of_another_block_size_goes_on_with_the_same_tokens(
    made: Bench, tmp_path: Path
) -> None:
    expected = made.generate(PROMPT, max_tokens=20)
    first = made.sequence(PROMPT, max_tokens=20)
    made.step([first], chunk=10_000)
    other = bench(make_checkpoint(tmp_path / "other", "llama", seed=12), block_tokens=24)
    second = other.sequence(PROMPT, max_tokens=20)

    for layer in range(2):
        payload = HostPayload([memoryview(read(made, first, layer))])
        part = KVRange(
            layer=layer,
            blocks=second.blocks,
            first_token=0,
            num_tokens=len(PROMPT),
            heads=other.cache.heads,
        )
        other.cache.write(payload, part, wire=other.cache.layout.dtype)
    second.token_ids.append(first.output_ids[0])
    second.num_computed_tokens = len(PROMPT)
    other.finish([second], chunk=1)

    assert second.output_ids == expected


def test_a_continued_request_goes_on_as_if_nothing_had_happened(made: Bench) -> None:
    settings: dict[str, object] = {
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 15,
    }
    expected = made.generate(PROMPT, **settings)

    for sent in (1, 10, 23):
        sequence = made.sequence(PROMPT, **settings)
        sequence.token_ids.extend(expected[:sent])
        made.finish([sequence], chunk=32)
        assert sequence.output_ids == expected


def test_what_an_earlier_owner_left_in_a_block_reaches_nobody(made: Bench) -> None:
    lengths = (5, 33, 40, 47, 70)  # three of them are padded to one length
    expected = [made.generate(PROMPT[:n], max_tokens=12) for n in lengths]
    made.free.extend(range(1, 100))
    for layer in range(2):
        for side in made.cache.slots(layer):
            side.fill_(math.nan)

    sequences = [made.sequence(PROMPT[:n], max_tokens=12) for n in lengths]
    made.finish(sequences, chunk=16)

    assert [sequence.output_ids for sequence in sequences] == expected


def test_a_sequence_whose_numbers_break_fails_alone(made: Bench) -> None:
    expected = made.generate(PROMPT, max_tokens=6)
    good, bad = made.sequence(PROMPT, max_tokens=6), made.sequence(PROMPT[::-1], max_tokens=6)
    made.step([good, bad], chunk=10_000)
    block_tokens = made.cache.layout.block_tokens
    made.cache.slots(1)[1][bad.blocks[0] * block_tokens :][:block_tokens] = math.nan

    results = made.runner.run(BatchPlan((whole(bad), whole(good))), None)

    assert isinstance(results[0].error, InternalError)
    assert results[0].token_id is None
    assert results[1].error is None
    good.commit(whole(good), results[1])
    made.finish([good], chunk=1)
    assert good.output_ids == expected


def test_prompt_logprobs_in_slices_equal_those_in_one_piece(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_piece = made.sequence(PROMPT, num_prompt_logprobs=2)
    made.step([whole_piece], chunk=10_000)
    monkeypatch.setattr(rank_step, "LOGITS_PER_SLICE", 262 * 5)

    sliced = made.sequence(PROMPT, num_prompt_logprobs=2)
    made.step([sliced], chunk=10_000)

    assert len(sliced.prompt_logprobs) == len(PROMPT) - 1
    for one, other in zip(sliced.prompt_logprobs, whole_piece.prompt_logprobs, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_prompt_logprobs_end_with_the_prompt_when_an_answer_is_continued(made: Bench) -> None:
    sequence = made.sequence(PROMPT, max_tokens=9, num_prompt_logprobs=0)
    sequence.token_ids.extend([7, 8, 9])

    made.step([sequence], chunk=10_000)

    assert [entry.token_id for entry in sequence.prompt_logprobs] == PROMPT[1:]


def test_seeded_draws_are_equal_alone_and_in_company(made: Bench) -> None:
    settings: dict[str, object] = {"max_tokens": 12, "temperature": 1.0, "seed": 77}
    expected = made.generate(PROMPT, **settings)

    for company in range(4):
        made.free[:] = range(256)
        sequences = [made.sequence(PROMPT, **settings)]
        sequences += [
            made.sequence(PROMPT[: 9 + 7 * n], max_tokens=12, temperature=0.9, seed=n, top_k=20)
            for n in range(company)
        ]
        made.finish(sequences[::-1], chunk=16)
        assert sequences[0].output_ids == expected


def test_an_unknown_kernel_is_refused_with_the_list_of_those_known(made: Bench) -> None:
    with pytest.raises(ConfigError, match=r"engine.attention: 'flash9' is none of torch_sdpa"):
        TorchRunner(made.loaded, made.cache, attention="flash9")


def test_a_cache_of_another_model_is_our_own_bug(made: Bench, tmp_path: Path) -> None:
    other = bench(make_checkpoint(tmp_path / "other", "qwen3"))

    with pytest.raises(AssertionError, match="a cache of another model"):
        TorchRunner(made.loaded, other.cache)


def test_bfloat16_runs_and_stays_near_float32(made: Bench, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "again", "llama", seed=12)
    narrow = bench(folder, dtype="bfloat16")
    answer = Reference(folder).answer(PROMPT, max_tokens=1)
    sequence = narrow.sequence(PROMPT, max_tokens=1, num_prompt_logprobs=0)

    narrow.finish([sequence], chunk=16)

    assert narrow.cache.slots(0)[0].dtype == torch.bfloat16
    assert len(sequence.prompt_logprobs) == len(PROMPT) - 1
    for position, entry in enumerate(sequence.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(answer.logprobs[position, entry.token_id]), abs=0.5)
