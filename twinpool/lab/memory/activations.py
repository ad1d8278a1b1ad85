"""Tensors that live while a step is computed: the most there is room needed for, on one rank.

Follows ``twinpool/engine/decoder.py`` and ``attention/torch_sdpa.py`` line by line, so for one rank on a CPU
it is a bound for the models that our engine runs; a test runs them and compares.  Else it is an estimate.

Shapes as in the decoder: T tokens, S tokens seen, M model dim, F inner dim, H query heads, K KV heads,
D head dim, V vocabulary; those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.layout import DTYPE_BYTES
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig
from twinpool.lab.memory.model_fields import HEADS, INNER, ModelFields

_PROMPT_LOGITS = 2**23  # rank_step.LOGITS_PER_SLICE
_INDEX_BYTES = 8  # int64
# A thread's blocks of scores in torch's FlashAttentionKernel.cpp: 256 queries by 512 keys, sums, output.
_FLASH_QUERIES, _FLASH_KEYS = 256, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What of a model and a worker the tensors of a step depend on."""

    model_dim: int
    inner_dim: int
    query_dim: int  # H x D
    kv_dim: int  # K x D
    head_dim: int
    vocab_size: int
    dtype_bytes: int
    num_threads: int
    num_windows: int  # unlike ones: each kind of layer has masks of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The largest steps of a worker."""

    prompt_tokens: int  # of prompts, in one step
    chunk_tokens: int  # of one of them
    decoding: int  # sequences that compute one token each; 0 on a worker that only computes prompts
    chosen: int  # sequences of which a token is chosen
    longest: int  # tokens that one sequence can have
    cached_tokens: int  # of all sequences together: what the KV cache holds


def step_sizes(fields: ModelFields, *, num_ranks: int, dtype: str, num_threads: int) -> StepSizes:
    """Read the sizes of one rank.

    Raises:
        ModelError: A field is missing.
    """
    attends = fields.optional(HEADS) is not None
    head_dim = fields.head_dim() if attends else 64
    # A layer with a state and without attention widens its input twice.
    query_dim = fields.num_heads * head_dim if attends else 2 * fields.model_dim
    kv_dim = max(1, max(fields.kv_heads()) // num_ranks) * head_dim if attends else 0
    return StepSizes(
        model_dim=fields.model_dim,
        inner_dim=-(-_inner_dim(fields) // num_ranks),
        query_dim=-(-query_dim // num_ranks),
        kv_dim=kv_dim,
        head_dim=head_dim,
        vocab_size=fields.vocab_size,
        dtype_bytes=DTYPE_BYTES[dtype],
        num_threads=num_threads,
        num_windows=2 if "sliding_window" in fields.config else 1,
    )


def step_load(config: EngineConfig, role: Role, *, longest: int, cached_tokens: int) -> StepLoad:
    """Return the largest steps that an engine takes.

    A decode worker computes prompts too: those whose KV did not arrive, and those it had to give up.
    """
    chunk = config.max_chunk_tokens or config.max_batch_tokens
    batch = max(1, min(config.max_batch_tokens, cached_tokens))  # a token is computed into a block
    return StepLoad(
        prompt_tokens=batch,
        chunk_tokens=min(chunk, batch, longest),
        decoding=0 if role is Role.PREFILL else config.max_sequences,
        chosen=config.max_sequences,
        longest=longest,
        cached_tokens=cached_tokens,
    )


def layer_bytes(sizes: StepSizes, load: StepLoad) -> int:
    """Return the most that the layers of a step need.

    The feed-forward part and attention take turns, so it is the larger of the two; what a layer made is
    there until the next one makes it anew.  Sequences attend one after the other, those of one token
    together.
    """
    tokens, e = load.prompt_tokens, sizes.dtype_bytes
    kept = tokens * e * (2 * sizes.model_dim + 2 * sizes.query_dim + 2 * sizes.kv_dim + 2 * sizes.head_dim)
    feed_forward = kept + 3 * tokens * e * sizes.inner_dim
    rotation = kept + tokens * e * (sizes.inner_dim + 3 * sizes.query_dim)
    chunk = load.chunk_tokens * (load.longest * e + 2 * sizes.query_dim * e)  # mask as floats, and the output
    chunk += load.longest * 2 * sizes.kv_dim * e
    outputs = tokens * e * (sizes.inner_dim + 2 * sizes.query_dim)
    attention = kept + outputs + max(chunk, _gathered(sizes, load)) + _flash(sizes)
    return max(feed_forward, rotation, attention) + _prepared(sizes, load)


def logits_bytes(sizes: StepSizes, load: StepLoad) -> int:
    """Return what logits take after the layers: those of every sequence, or a slice of a prompt's."""
    e, wider = sizes.dtype_bytes, 4 + (sizes.dtype_bytes if sizes.dtype_bytes != 4 else 0)
    hidden = load.prompt_tokens * sizes.model_dim * e
    chosen = load.chosen * (sizes.vocab_size * wider + 2 * sizes.model_dim * e)
    alone = 4 * sizes.vocab_size * 8  # one sequence that draws its token: float64, and its sums
    of_prompt = _PROMPT_LOGITS * (wider + 1 + 8)  # logits, and a comparison that is summed up as int64
    return hidden + max(chosen + alone, of_prompt)


def activation_bytes(sizes: StepSizes, load: StepLoad) -> int:
    """Return the most that any step needs."""
    return max(layer_bytes(sizes, load), logits_bytes(sizes, load))


def _inner_dim(fields: ModelFields) -> int:
    """Return the inner dim of a token's feed-forward part: of a mixture, that of all experts it goes to."""
    config = fields.config
    if config.fields.get("num_experts_per_tok") and "moe_intermediate_size" in config:
        return config.integer("num_experts_per_tok") * config.integer("moe_intermediate_size")
    return fields.optional(INNER) or 4 * fields.model_dim


def _gathered(sizes: StepSizes, load: StepLoad) -> int:
    """Return keys and values of one layer for sequences of one token, padded to less than twice their size.

    A prefix that sequences share is gathered by each of them, which is not counted.
    """
    return _padded(load) * (2 * sizes.kv_dim * sizes.dtype_bytes + sizes.dtype_bytes + 1)


def _prepared(sizes: StepSizes, load: StepLoad) -> int:
    """Return masks and slots of all sequences, which are made before the first layer."""
    chunks = -(-load.prompt_tokens // load.chunk_tokens)
    slots = min(chunks * load.longest, load.cached_tokens) + _padded(load)
    return sizes.num_windows * (load.prompt_tokens * load.longest + 2 * slots * _INDEX_BYTES)


def _padded(load: StepLoad) -> int:
    return min(2 * load.cached_tokens, load.decoding * load.longest)


def _flash(sizes: StepSizes) -> int:
    scores = _FLASH_QUERIES * _FLASH_KEYS + 2 * _FLASH_QUERIES + _FLASH_QUERIES * sizes.head_dim
    return sizes.num_threads * 4 * scores
