"""The one model that is served, as the HTTP side sees it: its name, its text and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.text.chat import ChatTemplate
from twinpool.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the edge must know to check a request before any worker sees it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int  # ids from 0 to vocab_size - 1 can be prompts and can be sampled
    max_model_tokens: int  # prompt and answer together
    created_s: int  # Unix time, for /v1/models
