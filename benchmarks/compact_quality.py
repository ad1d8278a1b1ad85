"""What compact KV (int8 on the wire) does to the answers of SmolLM2-135M-Instruct.

    python -m benchmarks.compact_quality [--write]

Twice: greedy answers of a whole deployment, exact and compact, token by token; and the model's own
distributions over the exact answer, once over exact KV of the prompt and once over KV that was compact on its
way.  The first token is the prefill worker's and always exact, so it is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.document import provenance, table, write_section
from benchmarks.models import smollm2
from kv_transfer.config import TransferConfig
from tests.system import system
from twinpool.core.errors import ModelError
from twinpool.core.layout import COMPACT
from twinpool.core.ports import KVRange
from twinpool.core.request import Request, SamplingParams
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, load_model
from twinpool.engine.rank_plan import RankItem, RankPlan
from twinpool.engine.rank_step import RankStep
from twinpool.text.tokenizer import Tokenizer

ANSWER_TOKENS = 48
_BLOCK_TOKENS, _NUM_BLOCKS = 16, 64
_STORY = (
    "The old lighthouse keeper climbed the stairs every evening at six, counting the steps as he had done "
    "for thirty years. On the day the supply boat did not come he lit the lamp early and wrote its name, the "
    "Marigold, into his book. "
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Who wrote Romeo and Juliet, and when was it first performed?",
    "Give me three tips for learning a language.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the difference between a virus and a bacterium?",
    "Translate into German: the weather is nice today.",
    "List the planets of the solar system in order.",
    "How do I boil an egg?",
    "What happens if I divide a number by zero?",
    "Tell me a joke about computers.",
    _STORY + "What was the name of the boat?",
    _STORY * 4 + "How many years had he counted the steps?",
    _STORY * 8 + "Summarise this in one sentence.",
    _STORY * 8 + "When did he climb the stairs?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """How two distributions over the same answer differ, token by token after the first."""

    divergences: list[float]  # Kullback-Leibler, of exact to compact, in nats
    differences: list[float]  # of the log-probability of the token that the exact one chose
    agreements: list[bool]  # both put the same token first


def prompts() -> list[tuple[int, ...]]:
    """Return the questions as the model's chat template has them."""
    tokenizer = Tokenizer.load(smollm2())
    chats = (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS)
    return [tuple(tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]


async def answers(
    loaded: LoadedModel, asked: Sequence[tuple[int, ...]], *, compact: bool
) -> tuple[list[list[int]], int]:
    """Return the greedy answers of one prefill and one decode worker, and the bytes between them."""
    config = TransferConfig(compact=compact)
    async with system(loaded, prefill=1, decode=1, transfer=config, num_blocks=_NUM_BLOCKS) as running:
        found = []
        for prompt_ids in asked:
            sampling = SamplingParams(
                seed=0, max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS, temperature=0.0
            )
            request = Request(request_id="", prompt_ids=prompt_ids, sampling=sampling, timeout_s=300.0)
            found.append([output.token_id for output in await running.answer(request)])
        return found, sum(worker.receiver.counters.bytes for worker in running.workers)


@torch.inference_mode()
def forced(loaded: LoadedModel, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Forced:
    """Compare the distributions over ``answer_ids`` after exact KV and after compact KV of the prompt."""
    layout = loaded.spec.layout(block_tokens=_BLOCK_TOKENS)
    exact, compact = (KVCache(layout, _NUM_BLOCKS, "cpu") for _ in range(2))
    steps = [RankStep(loaded, cache, attention="torch_sdpa") for cache in (exact, compact)]
    _logits(steps[0], 0, prompt_ids)
    for layer in range(layout.num_layers):
        part = KVRange(
            layer=layer,
            blocks=range(_NUM_BLOCKS),
            first_token=0,
            num_tokens=len(prompt_ids),
            heads=exact.heads,
        )
        compact.write(exact.payload(part, wire=COMPACT), part, wire=COMPACT)
    divergences, differences, agreements = [], [], []
    for position, token_id in enumerate(answer_ids[:-1]):
        ours, theirs = (
            torch.log_softmax(_logits(step, len(prompt_ids) + position, [token_id]).double(), dim=-1)
            for step in steps
        )
        divergences.append(float((ours.exp() * (ours - theirs)).sum()))
        chosen = answer_ids[position + 1]
        differences.append(abs(float(ours[chosen] - theirs[chosen])))
        agreements.append(bool(ours.argmax() == theirs.argmax()))
    return Forced(divergences=divergences, differences=differences, agreements=agreements)


def _logits(step: RankStep, first_token: int, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute tokens and return the logits after the last one, [V]."""
    num_blocks = -(-(first_token + len(token_ids)) // _BLOCK_TOKENS)
    item = RankItem(
        first_token=first_token,
        token_ids=np.asarray(token_ids, np.int32),
        blocks=np.arange(num_blocks, dtype=np.int32),
        samples=True,
        num_prompt_logits=0,
        request_id="",
    )
    logits_RV = step.sampled_logits(step.forward(RankPlan((item,)), None))
    assert logits_RV is not None, "the item samples"
    return logits_RV[0]


def describe(loaded: LoadedModel, asked: Sequence[tuple[int, ...]]) -> str:
    """Return what was found, as Markdown."""
    exact, exact_bytes = asyncio.run(answers(loaded, asked, compact=False))
    compact, compact_bytes = asyncio.run(answers(loaded, asked, compact=True))
    pairs = list(zip(exact, compact, strict=True))
    same = [_num_equal(ours, theirs) for ours, theirs in pairs]
    compared = [forced(loaded, prompt_ids, ids) for prompt_ids, ids in zip(asked, exact, strict=True)]
    divergences = [value for each in compared for value in each.divergences]
    differences = [value for each in compared for value in each.differences]
    agreements = [value for each in compared for value in each.agreements]
    rows = [
        ["bytes on the wire", f"{exact_bytes:,}", f"{compact_bytes:,} ({compact_bytes / exact_bytes:.1%})"],
        [
            "greedy answers that are equal",
            "-",
            f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}",
        ],
        [f"equal tokens before the first other one, of {ANSWER_TOKENS}", "-", f"{statistics.mean(same):.1f}"],
        ["same most likely token, over the exact answer", "-", f"{statistics.mean(agreements):.2%}"],
        [
            "KL divergence, mean (worst), nats",
            "0",
            f"{statistics.mean(divergences):.1e} ({max(divergences):.1e})",
        ],
        [
            "log-probability off by, mean (worst)",
            "0",
            f"{statistics.mean(differences):.1e} ({max(differences):.1e})",
        ],
    ]
    return table([f"{len(asked)} prompts of {_range_of(asked)} tokens", "exact", "compact"], rows)


def _num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def _range_of(asked: Sequence[tuple[int, ...]]) -> str:
    lengths = [len(prompt_ids) for prompt_ids in asked]
    return f"{min(lengths)} to {max(lengths)}"


def main() -> None:
    """Print what was found, and keep it in the document if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # two engines take turns, and sums of floats are always cut in the same way
    try:
        loaded = load_model(smollm2(), dtype="float32")
    except ModelError as error:
        raise SystemExit(f"skipped: {error}") from None
    found = describe(loaded, prompts())
    text = f"{found}\n\n{provenance('benchmarks.compact_quality')}"
    print(text)
    if args.write:
        write_section("compact quality", text)


if __name__ == "__main__":
    main()
