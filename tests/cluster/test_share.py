"""What each rank of a worker loads."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

from tests.checkpoints_toy import make_checkpoint
from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.share import load_share
from twinpool.core.ports import Role
from twinpool.engine.parallel import SingleRank

WORKER = WorkerConfig(
    model_name="toy",
    worker_id="decode-0",
    role=Role.DECODE,
    generation=1,
    join="127.0.0.1:1",
    kv_memory="1MiB",
)


def test_what_a_rank_has_loaded_is_no_more_looked_through_for_garbage(tmp_path: Path) -> None:
    config = replace(WORKER, model=str(make_checkpoint(tmp_path, "llama")))
    num_frozen = gc.get_freeze_count()
    try:
        loaded, cache = load_share(config, SingleRank())
        assert gc.get_freeze_count() > num_frozen + 10_000
        assert not any(each is loaded or each is cache for each in gc.get_objects())
    finally:
        gc.unfreeze()
