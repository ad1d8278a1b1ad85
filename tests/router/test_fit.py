"""check_fit: what two workers of one model may differ in, and what they may not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.fit import check_fit
from tests.router.fakes import World, worker_info
from tests.toys import layout
from twinpool.core.errors import ConfigError, LayoutMismatch
from twinpool.core.layout import KVLayout
from twinpool.core.ports import Role, WorkerInfo
from twinpool.core.ticket import Endpoint

BASE = {"weights": "abc", "dtype": "float32", "kv_protocol": "2", "kv_compact": "false"}
YES = {"convert_dtypes": "true"}
NO = {"convert_dtypes": "false"}
BF16 = {"dtype": "bfloat16"}
FLOAT32, BFLOAT16 = layout(), layout(dtype="bfloat16")


FITTING = [
    ({}, {}, layout(), layout()),
    ({}, {}, layout(block_tokens=8), layout(block_tokens=32)),
    ({}, {}, layout(tp_size=1), layout(tp_size=2)),
    ({}, {}, layout(tp_size=8), layout(tp_size=2)),
    (NO, YES, FLOAT32, FLOAT32),
    (YES, YES | BF16, FLOAT32, BFLOAT16),
    (YES, YES | BF16, layout(tp_size=2, block_tokens=8), BFLOAT16),
]
REFUSED = [
    ({}, {}, FLOAT32, BFLOAT16, ("dtype", "float32", "bfloat16")),
    (YES, NO | BF16, FLOAT32, BFLOAT16, ("dtype", "float32", "bfloat16")),
    (NO, YES | BF16, FLOAT32, BFLOAT16, ("dtype", "float32", "bfloat16")),
    (YES, BF16, FLOAT32, BFLOAT16, ("dtype", "float32", "bfloat16")),
    ({"convert_dtypes": "1"}, YES | BF16, FLOAT32, BFLOAT16, ("dtype", "float32", "bfloat16")),
    (YES, YES | BF16 | {"weights": "abd"}, FLOAT32, BFLOAT16, ("weights", "abc", "abd")),
    ({"kv_compact": "true"}, {}, FLOAT32, FLOAT32, ("kv_compact", "true", "false")),
    ({}, {"kv_protocol": "3"}, FLOAT32, FLOAT32, ("kv_protocol", "2", "3")),
    ({}, {"rope": "yarn"}, FLOAT32, FLOAT32, ("rope", "nothing", "yarn")),
    (YES, YES, layout(num_layers=2), layout(num_layers=3), ("num_layers", 2, 3)),
    (YES, YES, layout(num_kv_heads=2), layout(num_kv_heads=4), ("num_kv_heads", 2, 4)),
    (YES, YES, layout(head_dim=4), layout(head_dim=8), ("head_dim", 4, 8)),
]


def pair(
    prefill: dict[str, str], decode: dict[str, str], prefill_kv: KVLayout, decode_kv: KVLayout
) -> tuple[WorkerInfo, WorkerInfo]:
    """Two workers with what their fingerprints say besides BASE."""
    return (
        worker_info(Role.PREFILL, fingerprint=BASE | prefill, kv=prefill_kv),
        worker_info(Role.DECODE, number=1, fingerprint=BASE | decode, kv=decode_kv),
    )


@pytest.mark.parametrize(("prefill", "decode", "prefill_kv", "decode_kv"), FITTING)
def test_two_workers_may_differ_in_this(
    prefill: dict[str, str], decode: dict[str, str], prefill_kv: KVLayout, decode_kv: KVLayout
) -> None:
    there, new = pair(prefill, decode, prefill_kv, decode_kv)

    check_fit(there, new)
    check_fit(new, there)


@pytest.mark.parametrize(("prefill", "decode", "prefill_kv", "decode_kv", "refusal"), REFUSED)
def test_two_workers_that_differ_in_this_are_told_in_what(
    prefill: dict[str, str],
    decode: dict[str, str],
    prefill_kv: KVLayout,
    decode_kv: KVLayout,
    refusal: tuple[str, object, object],
) -> None:
    there, new = pair(prefill, decode, prefill_kv, decode_kv)

    name, old_value, new_value = refusal
    with pytest.raises(LayoutMismatch) as caught:
        check_fit(there, new)
    assert str(caught.value) == f"{name}: prefill-0 stores {old_value}, decode-1 stores {new_value}"
    with pytest.raises(LayoutMismatch) as caught:
        check_fit(new, there)
    assert str(caught.value) == f"{name}: decode-1 stores {new_value}, prefill-0 stores {old_value}"


def test_workers_of_two_models_do_not_fit() -> None:
    there, new = worker_info(Role.PREFILL), replace(worker_info(Role.DECODE), model="other")

    with pytest.raises(LayoutMismatch, match=r"^model: prefill-0 stores toy, decode-0 stores other$"):
        check_fit(there, new)


def test_two_workers_without_a_transport_in_common_are_told_so() -> None:
    there, new = worker_info(Role.PREFILL), worker_info(Role.DECODE)
    there = replace(there, ranks=((Endpoint("tcp", "a:1"),),))
    new = replace(new, ranks=((Endpoint("shm", "b"), Endpoint("grpc", "b:1")),))

    with pytest.raises(
        LayoutMismatch, match=r"^transports: prefill-0 has tcp, decode-0 has grpc, shm, and none in common$"
    ):
        check_fit(there, new)
    check_fit(there, replace(new, role=Role.PREFILL))


@pytest.mark.parametrize("num_named", [0, 1, 3])
def test_a_worker_that_does_not_name_its_ranks_is_refused(num_named: int) -> None:
    async def main() -> None:
        world = World()
        two = worker_info(Role.DECODE, kv=layout(tp_size=2))
        with pytest.raises(
            ConfigError, match=f"^worker decode-0: {num_named} ranks are named, tp_size is 2$"
        ):
            world.pool.joined(replace(two, ranks=two.ranks[:1] * num_named))
        assert world.pool.handles == ()

    asyncio.run(main())
