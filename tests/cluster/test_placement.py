"""place: who fits starts, and who does not learns the reason in numbers."""

from __future__ import annotations

import pytest

from twinpool.cluster.placement import Machine, Need, place


def machine(
    *, cpus: float = 8, gpus: float = 0, free_cpus: float | None = None, free_gpus: float | None = None
) -> Machine:
    return Machine(
        total={"CPU": cpus, "GPU": gpus},
        available={
            "CPU": cpus if free_cpus is None else free_cpus,
            "GPU": gpus if free_gpus is None else free_gpus,
        },
    )


def need(worker_id: str = "prefill-1", **resources: float) -> Need:
    return Need(worker_id=worker_id, resources=resources)


def test_who_fits_is_placed_and_the_rest_waits() -> None:
    needs = [need("a", GPU=1), need("b", GPU=3), need("c", GPU=1)]

    fitting, reasons = place(needs, [machine(gpus=2)])

    assert [item.worker_id for item in fitting] == ["a", "c"]
    assert reasons == {"b": "b needs 3 GPUs, the cluster has 2"}


def test_fractions_of_a_gpu_share_it() -> None:
    needs = [need(str(i), GPU=0.1) for i in range(10)]

    fitting, reasons = place(needs, [machine(gpus=1)])

    assert len(fitting) == 10
    assert reasons == {}


def test_ranks_that_must_be_together_take_one_machine() -> None:
    pair = Need(worker_id="a", resources={"GPU": 1}, num_ranks=2)

    assert place([pair], [machine(gpus=1), machine(gpus=2)]) == ((pair,), {})
    assert place([pair, need("b", GPU=1)], [machine(gpus=2)])[0] == (pair,)
    assert place([pair], [machine(gpus=1), machine(gpus=1)])[1] == {
        "a": "a needs 2 GPUs on one machine, the largest has 1"
    }


def test_ranks_on_a_trusted_network_take_what_machines_there_are_or_nothing() -> None:
    pair = Need(worker_id="a", resources={"GPU": 1}, num_ranks=2, on_one_machine=False)
    three = Need(worker_id="b", resources={"GPU": 1}, num_ranks=3, on_one_machine=False)
    machines = [machine(gpus=1), machine(gpus=1)]

    assert place([pair], machines) == ((pair,), {})
    assert place([three, pair], machines) == ((pair,), {"b": "b needs 3 x 1 GPUs, there is room for fewer"})
    assert place([three], [machine(gpus=0)])[1] == {"b": "b needs 1 GPUs, the cluster has 0"}


@pytest.mark.parametrize(
    ("resources", "machines", "reason"),
    [
        ({"GPU": 8}, [machine(gpus=4)], "prefill-1 needs 8 GPUs, the cluster has 4"),
        (
            {"GPU": 8},
            [machine(gpus=4), machine(gpus=4)],
            "prefill-1 needs 8 GPUs on one machine, the largest has 4",
        ),
        (
            {"GPU": 2},
            [machine(gpus=4, free_gpus=1), machine(gpus=4, free_gpus=0)],
            "prefill-1 needs 2 GPUs, 1 of the cluster's 8 are free",
        ),
        (
            {"CPU": 4, "GPU": 1},
            [
                machine(cpus=8, gpus=1, free_gpus=0),
                machine(cpus=8, free_cpus=8),
                machine(cpus=8, gpus=1, free_cpus=1),
            ],
            "prefill-1 needs 4 CPUs, 1 GPUs on one machine, no machine has all of them free",
        ),
        ({"CPU": 1}, [], "prefill-1 cannot be placed: the cluster has no machine"),
        ({"tpu": 1}, [machine()], "prefill-1 needs 1 tpu, the cluster has 0"),
    ],
)
def test_the_reason_says_what_is_missing(
    resources: dict[str, float], machines: list[Machine], reason: str
) -> None:
    assert place([need(**resources)], machines) == ((), {"prefill-1": reason})
