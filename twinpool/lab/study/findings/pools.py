"""Why an arm does what it does: which pool is the busier one, and whether a second token waits for KV."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from twinpool.lab.study.cell import TransferUse
from twinpool.lab.study.findings.words import Conclusion, ms, percent
from twinpool.lab.study.results import Results

_EQUAL = 0.8  # of the busier pool's share: from there on both are said to be equally busy
_HARDLY = 0.25  # a share up to which it is of no interest which pool is the busier one


def find(results: Results) -> Iterator[Conclusion]:
    """Say it for each arm that has two pools."""
    for arm in results.arms:
        yield from _busier(results, arm)
    for arm in results.arms:
        yield from _moved(results, arm)


def _busier(results: Results, arm: str) -> Iterator[Conclusion]:
    rate = max(each.cell.rate for each in results.valid if each.cell.arm == arm)
    shares: dict[str, list[float]] = {}
    for each in results.cells(arm, rate):
        for role, use in each.pools.items():
            if use.busy_share is not None:
                shares.setdefault(role, []).append(use.busy_share)
    busy = {role: fmean(told) for role, told in shares.items()}
    if len(busy) != 2:
        return
    idler, busier = sorted(busy, key=busy.__getitem__)
    if busy[busier] <= _HARDLY:
        text = f"At {rate:g} req/s both pools of {arm} are hardly busy."
    elif busy[idler] >= _EQUAL * busy[busier]:
        text = f"At {rate:g} req/s both pools of {arm} are about equally busy."
    else:
        text = (
            f"At {rate:g} req/s the {busier} pool of {arm} is the busier one; its {idler} pool has time left."
        )
    evidence = ", ".join(
        f"{role} workers are in a step {percent(share)} of the time" for role, share in busy.items()
    )
    yield Conclusion(kind="pools", text=text, evidence=evidence)


def _moved(results: Results, arm: str) -> Iterator[Conclusion]:
    use = sum((each.transfers for each in results.valid if each.cell.arm == arm), TransferUse())
    if use.hidden_share is None or use.tail_s is None:
        return
    yield Conclusion(
        kind="transfer",
        text=f"In {arm} {percent(use.hidden_share)} of the time in which KV moves lies before the first "
        f"token of its own request reached the router; {ms(use.tail_s)} of a transfer are left then.",
        evidence=f"{use.transfers:,} transfers of {use.kv_bytes / use.transfers / 2**20:.2f} MiB and "
        f"{ms(use.total_s / use.transfers)} on average",
    )
