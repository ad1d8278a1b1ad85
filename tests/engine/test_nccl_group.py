"""The calls that a group on GPUs makes of NCCL, on the one GPU there may be."""

from __future__ import annotations

import pytest
import torch

from twinpool.core.secret import Secret
from twinpool.engine.parallel import GroupConfig
from twinpool.engine.rank_links import RankLinks
from twinpool.engine.torch_group import TorchRankGroup

pytestmark = pytest.mark.gpu


class NoLinks(RankLinks):
    """The links of a rank that is alone."""

    def __init__(self) -> None:
        self.rank = 0
        self.host = "127.0.0.1"

    def exchange(self, data: bytes, *, timeout_s: float) -> tuple[bytes, ...]:
        return (data,)

    def close(self, last_words: bytes | None = None) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_sums_and_gathers_with_itself(dtype: torch.dtype) -> None:
    group = TorchRankGroup(NoLinks(), GroupConfig(size=1, secret=Secret(), device="cuda:0"), rank=0)
    tensor = torch.arange(6, dtype=dtype, device="cuda:0").view(2, 3)

    with torch.inference_mode(), group.step():
        total = group.all_reduce(tensor.clone())
        (part,) = group.gather(tensor)

    assert total.tolist() == part.tolist() == [[0, 1, 2], [3, 4, 5]]
    group.close()
