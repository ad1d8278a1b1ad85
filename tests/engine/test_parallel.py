"""A model on several ranks says what it says on one, and each rank keeps its own heads' KV and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints_toy import FAMILIES, make_checkpoint
from tests.engine.ranks import PROMPT, led
from tests.engine.runs import Bench, Sequenced, bench
from tests.toys import request
from twinpool.core.clock import ManualClock
from twinpool.core.errors import ConfigError
from twinpool.core.request import TokenLogprob
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.load import load_model
from twinpool.engine.parallel import SingleRank
from twinpool.engine.plan import BatchPlan
from twinpool.engine.runner import TorchRunner

PROMPTS = (PROMPT, PROMPT[40:], PROMPT[:3], PROMPT[5:38])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(made: Bench) -> list[Sequenced]:
    """Compute all prompts in one company, in chunks, with everything that can be asked for."""
    sequences = [
        made.sequence(prompt, request_id=f"r{n}", max_tokens=5, num_logprobs=3, num_prompt_logprobs=n)
        for n, prompt in enumerate(PROMPTS)
    ]
    made.finish(sequences, chunk=30)
    return sequences


def assert_equal(given: Sequence[Sequenced], expected: Sequence[Sequenced]) -> None:
    for one, other in zip(given, expected, strict=True):
        assert one.output_ids == other.output_ids
        logprobs = [*one.prompt_logprobs, *one.logprobs]
        assert len(logprobs) == len(one.token_ids) - 1
        for mine, theirs in zip(logprobs, [*other.prompt_logprobs, *other.logprobs], strict=True):
            assert_near(mine, theirs)


def assert_near(mine: TokenLogprob | None, theirs: TokenLogprob | None) -> None:
    assert mine is not None and theirs is not None
    assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


def check(folder: Path, *, size: int) -> None:
    expected = answers(bench(folder))
    with led(folder, size=size) as worker:
        assert_equal(answers(worker.bench), expected)
        assert [seen.error for seen in worker.ended()] == [""] * (size - 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_tokens_of_one_rank(
    tmp_path: Path, family: str, kv_heads: int, size: int
) -> None:
    check(make_checkpoint(tmp_path, family, seed=21, num_key_value_heads=kv_heads), size=size)


SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied with a redundant head": ("qwen2", {"tie_word_embeddings": True, "write_lm_head": True}),
    "an inner dim that does not divide": ("llama", {"intermediate_size": 126}),
    "fewer inner dims than ranks": ("llama", {"intermediate_size": 2}),
    "a padded vocabulary": ("llama", {"vocab_size": 301}),
    "sliding layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "weights of 16 bits": ("llama", {"dtype": "bfloat16"}),
    "shards": ("llama", {"num_shards": 3}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape_gives_the_tokens_of_one_rank(tmp_path: Path, case: str) -> None:
    family, fields = SHAPES[case]

    check(make_checkpoint(tmp_path, family, seed=22, **fields), size=4)  # type: ignore[arg-type]


def test_nine_heads_with_three_kv_heads_go_to_three_ranks(tmp_path: Path) -> None:
    check(smollm2(tmp_path), size=3)


def test_nine_heads_with_three_kv_heads_do_not_go_to_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^tensor_parallel: 2 ranks and 3 KV heads do not divide each other"
    ):
        load_model(smollm2(tmp_path), group=Place(0, 2))


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M's heads."""
    return make_checkpoint(
        folder,
        "llama",
        hidden_size=144,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )


class Place(SingleRank):
    """A place in a group that does not exist: enough to load a model."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 4), (3, 3)])
def test_each_rank_keeps_the_kv_of_its_own_heads(tmp_path: Path, kv_heads: int, size: int) -> None:
    heads = kv_heads * 4 // size if kv_heads != 3 else 9
    folder = make_checkpoint(
        tmp_path, "qwen3", num_attention_heads=max(heads, 4), num_key_value_heads=kv_heads
    )
    whole = bench(folder, num_blocks=64)
    answers(whole)

    with led(folder, size=size) as worker:
        answers(worker.bench)
        caches = [[worker.bench.cache.slots(layer) for layer in range(2)]]
        caches += [seen.layers for seen in worker.ended()]

    layout = worker.bench.cache.layout
    for rank, layers in enumerate(caches):
        own = layout.rank_heads(rank)
        for layer, sides in enumerate(layers):
            for given, expected in zip(sides, whole.cache.slots(layer), strict=True):
                mine = np.asarray(given)
                assert mine.shape[1] == len(own) == max(1, kv_heads // size)
                assert np.count_nonzero(mine) > 1000
                np.testing.assert_allclose(mine, expected[:, own.start : own.stop].numpy(), atol=1e-5)


def test_the_others_are_told_what_is_written_of_sequences_with_a_destination(tmp_path: Path) -> None:
    with led(make_checkpoint(tmp_path, "llama"), size=2) as worker:
        made = worker.bench
        leaves, stays = made.sequence(PROMPT, request_id="leaves"), made.sequence(PROMPT, request_id="stays")
        leaves.has_destination = True
        for _ in range(3):
            made.step([leaves, stays], chunk=30)
        (seen,) = worker.ended()

    told = [
        (layer, *(w.request_id for w in ws), ws[0].num_tokens, ws[0].blocks) for layer, ws in seen.written
    ]
    blocks = leaves.blocks
    assert told == [
        (0, "leaves", 30, blocks[:2]),
        (1, "leaves", 30, blocks[:2]),
        (0, "leaves", 60, blocks[:4]),
        (1, "leaves", 60, blocks[:4]),
        (0, "leaves", 72, blocks[:5]),
        (1, "leaves", 72, blocks[:5]),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_share_of_the_weights_and_nothing_more(tmp_path: Path, size: int) -> None:
    folder = make_checkpoint(
        tmp_path,
        "llama",
        dtype="bfloat16",
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=2048,
    )
    whole = 2 * (4 * 512 * 512 + 3 * 512 * 2048) + 2 * 2048 * 512  # elements of all matrices

    with led(folder, size=size) as worker:
        for seen in worker.ended():
            assert 0.9 * whole * 4 / size < seen.loaded_bytes < 1.2 * whole * 4 / size


def test_rows_that_another_rank_keeps_are_not_even_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", hidden_size=256, num_attention_heads=4, vocab_size=262)

    model = load_model(folder, group=Place(1, 2)).model

    embedding, layer = model._embedding_VM, model._layers[0]
    assert embedding.shape == (131, 256)
    assert layer.query.weight.shape == (128, 256)
    assert embedding.untyped_storage().nbytes() > embedding.nbytes  # a view of the mapped file
    assert layer.query.weight.untyped_storage().nbytes() > layer.query.weight.nbytes
    assert layer.down.weight.untyped_storage().nbytes() == layer.down.weight.nbytes  # columns are a copy
    assert layer.out.weight.untyped_storage().nbytes() == layer.out.weight.nbytes


def test_a_worker_may_idle_for_longer_than_a_step_may_take(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    expected = bench(folder).generate(PROMPT, max_tokens=3)

    with led(folder, size=2, step_timeout_s=3.0) as worker:
        time.sleep(3.5)
        assert worker.bench.generate(PROMPT, max_tokens=3) == expected
        assert worker.ended()[0].error == ""


def test_all_ranks_take_the_number_of_blocks_that_each_has_room_for(tmp_path: Path) -> None:
    folder = smollm2(tmp_path)

    with led(folder, size=3, rank_1={"num_blocks": 41}, rank_2={"num_blocks": 50}) as worker:
        assert worker.bench.cache.num_blocks == 41
        assert [seen.num_blocks for seen in worker.ended()] == [41, 41]


def test_ranks_that_load_different_models_refuse_to_start(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", "llama", seed=1)
    other = make_checkpoint(tmp_path / "other", "llama", seed=2)

    with (
        pytest.raises(ConfigError, match=r"^tensor_parallel: weights is \w+ on rank 0 and \w+ on rank 1"),
        led(one, size=2, rank_1={"folder": other}),
    ):
        pass


def test_sampled_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", seed=9)
    settings: dict[str, object] = {
        "max_tokens": 12,
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 5,
        "presence_penalty": 0.5,
    }
    expected = bench(folder).generate(PROMPT, **settings)

    with led(folder, size=2) as worker:
        assert worker.bench.generate(PROMPT, **settings) == expected


def test_a_sequence_whose_numbers_break_fails_alone_on_all_ranks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    expected = bench(folder).generate(PROMPT, max_tokens=4)

    with led(folder, size=2) as worker:
        made = worker.bench
        bad = made.sequence(PROMPT[::-1], max_tokens=4, num_prompt_logprobs=1)
        good = made.sequence(PROMPT, max_tokens=4)
        made.cache.slots(0)[1][bad.blocks[0] * 16 :][:16] = torch.nan
        bad.num_computed_tokens = 16

        results = made.runner.run(BatchPlan((bad.item(chunk=100), good.item(chunk=100))), None)

        assert str(results[0].error) == "the model's logits are not finite"
        good.commit(good.item(chunk=100), results[1])
        made.finish([good], chunk=1)
        assert good.output_ids == expected
        assert worker.ended()[0].error == ""


def test_an_engine_shares_prefixes_and_preempts_as_on_one_rank(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    expected, _, _ = run_engine(bench(folder, num_blocks=64), num_blocks=64)

    with led(folder, size=2, num_blocks=12) as worker:
        given, num_preemptions, num_cached_tokens = run_engine(worker.bench, num_blocks=12)
        assert worker.ended()[0].error == ""

    assert given == expected
    assert num_preemptions > 0
    assert num_cached_tokens >= 4 * 48


def run_engine(made: Bench, *, num_blocks: int) -> tuple[list[list[int]], int, int]:
    """Let an engine answer prompts that begin alike; return answers, preemptions, and tokens found."""
    spec = made.loaded.spec
    limits = EngineLimits(
        num_blocks=num_blocks,
        max_model_tokens=spec.max_model_tokens,
        vocab_size=spec.vocab_size,
    )
    engine = Engine(made.runner, config=EngineConfig(block_tokens=16), limits=limits, clock=ManualClock())
    prompts = [PROMPT[:48] + [n] * (3 + n) for n in range(5)]
    answers: dict[str, list[int]] = {str(n): [] for n in range(5)}
    for n, prompt_ids in enumerate(prompts):
        engine.submit(request(tuple(prompt_ids), request_id=str(n), max_tokens=30))
        if n == 0:
            engine.step()  # the others find what this one computed
    num_cached_tokens = 0
    while engine.has_work:
        for sequence, output in engine.step().outputs:
            answers[sequence.request.request_id].append(output.token_id)
            num_cached_tokens += output.cached_tokens
    return list(answers.values()), engine.counters["preemptions"], num_cached_tokens


def test_a_cache_of_another_rank_is_our_own_bug(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    loaded = load_model(folder, group=Place(0, 2))
    other = bench(folder)

    with pytest.raises(AssertionError, match="a cache of another model"):
        TorchRunner(loaded, other.cache)
