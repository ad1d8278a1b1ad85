"""`twinpool status` shows what /admin/ tells, in a table that fits a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import pytest

from router.http.config import HTTPConfig
from tests.router_http.toys import DISAGGREGATED, Site, worker_info
from twinpool.cli.status import status
from twinpool.core.ports import Role


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site(HTTPConfig(port=0), workers=DISAGGREGATED)
    yield site
    site.close()


def shown(site: Site, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of each line."""
    options = argparse.Namespace(url=f"http://127.0.0.1:{site.port}", api_key=None, json=False)
    status(options)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_worker_is_shown_with_the_transport_that_its_kv_took_last(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    before = shown(site, capsys)
    site.post("/v1/completions", {"prompt": "a"})
    after = shown(site, capsys)

    (names,) = (line for line in before if line[:1] == ["worker"])
    assert names[-3:] == ["host", "KV", "by"]
    rows = [
        {line[0]: line[-1] for line in lines if line[:1] in (["p0"], ["d0"])} for lines in (before, after)
    ]
    assert rows == [{"p0": "-", "d0": "-"}, {"p0": "shm", "d0": "shm"}]


def test_workers_stand_in_the_order_of_their_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    names = ("decode-10", "decode-2", "decode-0")
    decodes = [worker_info(name, Role.DECODE) for name in names]
    site = Site(HTTPConfig(port=0), workers=(*decodes, worker_info("prefill-0", Role.PREFILL)))
    try:
        lines = shown(site, capsys)
    finally:
        site.close()

    assert [line[0] for line in lines if "ready" in line] == [
        "prefill-0",
        "decode-0",
        "decode-2",
        "decode-10",
    ]


def test_ranks_are_shown_where_a_worker_has_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    prefill, decode = DISAGGREGATED
    split = replace(decode, layout=replace(decode.layout, tp_size=2), ranks=decode.ranks * 2)
    site = Site(HTTPConfig(port=0), workers=(prefill, split))
    try:
        lines = shown(site, capsys)
    finally:
        site.close()

    assert [line[:3] for line in lines if line[:1] in (["worker"], ["p0"], ["d0"])] == [
        ["worker", "role", "ranks"],
        ["p0", "prefill", "1"],
        ["d0", "decode", "2"],
    ]


def test_where_it_is_narrow_the_transports_are_left_out_and_the_worker_ids_are_whole(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(site, capsys)

    assert "KV" not in [word for line in lines for word in line]
    assert {"p0", "d0"} <= {line[0] for line in lines if line}
