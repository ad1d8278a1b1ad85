"""What transformers says about a checkpoint: the reference of the model tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.checkpoints_toy import PAD


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and the log-probabilities of a whole sequence."""

    output_ids: list[int]
    logprobs: torch.Tensor  # [prompt and output, vocabulary], float64


class Reference:
    """A checkpoint loaded by transformers, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Answer:
        prompt = torch.tensor([list(prompt_ids)])
        whole = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        logits = self._model(whole).logits[0].double()
        return Answer(whole[0, len(prompt_ids) :].tolist(), torch.log_softmax(logits, dim=-1))
