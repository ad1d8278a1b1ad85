"""A model that is busy long enough to be hit: a second for a long prompt, milliseconds per token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints_toy import make_checkpoint


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("slow"),
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        max_position_embeddings=4096,
    )
