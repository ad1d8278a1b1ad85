"""Pools of one deployment may differ in ranks, blocks and dtype; what cannot work is told at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from twinpool.cluster.config import DeploymentConfig, PoolConfig, PoolsConfig, WorkerConfig
from twinpool.cluster.pools import Life
from twinpool.cluster.serve import check_ranks, deployment_spec
from twinpool.cluster.share import device_of
from twinpool.core.config import bind
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role

DEPLOYMENT = {
    "pools": {
        "prefill": {"workers": 2, "tensor_parallel": 2, "dtype": "bfloat16"},
        "decode": {"workers": 3, "tensor_parallel": 4, "block_tokens": 32, "ranks_on": "trusted_network"},
    },
    "transfer": {"convert_dtypes": True},
    "dtype": "float32",
}


def worker_of(role: Role) -> WorkerConfig:
    spec = deployment_spec(
        bind(DeploymentConfig, DEPLOYMENT), folder=Path("/m"), name="toy", join="127.0.0.1:1"
    )
    return spec.worker_of(Life(worker_id=f"{role}-0", pool=role, role=role, generation=9))


def test_a_worker_is_told_what_its_pool_says_and_what_all_share() -> None:
    prefill, decode = worker_of(Role.PREFILL), worker_of(Role.DECODE)

    assert (prefill.worker_id, prefill.role, prefill.generation) == ("prefill-0", Role.PREFILL, 9)
    assert (prefill.tensor_parallel, prefill.dtype, prefill.engine.block_tokens) == (2, "bfloat16", 16)
    assert (decode.tensor_parallel, decode.dtype, decode.engine.block_tokens) == (4, "float32", 32)
    assert (prefill.num_neighbours, decode.num_neighbours) == (2 * 2 + 3 * 4 - 2, 2 * 2 + 3 * 4 - 4)
    assert not prefill.starts_ranks and not decode.starts_ranks


def test_a_worker_keeps_the_shape_of_its_pool_in_another_role() -> None:
    spec = deployment_spec(
        bind(DeploymentConfig, DEPLOYMENT), folder=Path("/m"), name="toy", join="127.0.0.1:1"
    )
    life = Life(worker_id="prefill-0", pool=Role.PREFILL, role=Role.DECODE, generation=10)

    assert spec.worker_of(life) == replace(worker_of(Role.PREFILL), role=Role.DECODE, generation=10)


def test_ranks_listen_on_loopback_unless_they_are_on_several_machines() -> None:
    assert bind_worker(host="10.0.0.2").rank_host == "127.0.0.1"
    assert bind_worker(host="10.0.0.2", ranks_on="trusted_network").rank_host == "10.0.0.2"
    assert worker_of(Role.DECODE).ranks_on == "trusted_network"


def bind_worker(**settings: object) -> WorkerConfig:
    own = {"worker_id": "d", "role": "decode", "generation": 1, "join": "127.0.0.1:1"}
    return bind(WorkerConfig, own | settings)


@pytest.mark.parametrize(
    ("device", "tensor_parallel", "starts_ranks", "devices"),
    [
        ("cpu", 2, True, ["cpu", "cpu"]),
        ("cuda:x", 1, True, ["cuda:x"]),  # refused where the model is loaded
        ("cuda", 1, True, ["cuda:0"]),
        ("cuda", 3, True, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:2", 2, True, ["cuda:2", "cuda:3"]),
        ("cuda", 2, False, ["cuda:0", "cuda:0"]),  # each process sees the GPU that Ray gave it, and no other
    ],
)
def test_each_rank_has_a_device(
    device: str, tensor_parallel: int, starts_ranks: bool, devices: list[str]
) -> None:
    config = bind_worker(device=device, tensor_parallel=tensor_parallel, starts_ranks=starts_ranks)

    assert [device_of(config, rank=rank) for rank in range(tensor_parallel)] == devices


@pytest.mark.parametrize(
    ("pools", "fields", "problem"),
    [
        (
            PoolsConfig(decode=PoolConfig(workers=1, tensor_parallel=3)),
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            "pools.decode.tensor_parallel: 3 ranks do not divide 8 query heads",
        ),
        (
            PoolsConfig(prefill=PoolConfig(workers=1, tensor_parallel=4)),
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "pools.prefill.tensor_parallel: 4 ranks and 6 KV heads do not divide each other",
        ),
    ],
)
def test_heads_that_ranks_cannot_share_are_told(
    pools: PoolsConfig, fields: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(pools, fields)

    assert str(caught.value) == problem


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_heads_that_ranks_can_share_are_fine(num_kv_heads: int) -> None:
    pools = PoolsConfig(
        prefill=PoolConfig(workers=1, tensor_parallel=8), decode=PoolConfig(workers=1, tensor_parallel=2)
    )

    check_ranks(pools, {"num_attention_heads": 8, "num_key_value_heads": num_kv_heads})
    check_ranks(pools, {"hidden_size": 64})  # the worker knows what its family means by that


def test_two_dtypes_need_the_word_that_they_are_meant() -> None:
    pools = PoolsConfig(decode=PoolConfig(workers=1, dtype="bfloat16"))

    with pytest.raises(ConfigError, match=r"transfer\.convert_dtypes: is off, and prefill workers use auto"):
        DeploymentConfig(pools=pools)
    DeploymentConfig(pools=pools, transfer=TransferConfig(convert_dtypes=True))
    DeploymentConfig(pools=pools, dtype="bfloat16")


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        ({"tensor_parallel": 0}, r"pools: tensor_parallel 0 is not in \[1, 64\]"),
        ({"tensor_parallel": 65}, r"pools: tensor_parallel 65 is not in \[1, 64\]"),
        ({"block_tokens": 0}, "pools: block_tokens 0 is less than 1"),
        ({"ranks_on": "any"}, "ranks_on"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_nonsense_of_a_pool_is_told(pool: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        bind(DeploymentConfig, {"pools": {"decode": {"workers": 1, **pool}}})


def test_nonsense_of_a_worker_is_told() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 0 is not in \[1, 64\]"):
        bind_worker(tensor_parallel=0)
    with pytest.raises(ConfigError, match="threads: -1 is less than 0"):
        bind_worker(threads=-1)
