"""`twinpool role` says what a change did, or why there was none, in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from router.http.config import HTTPConfig
from tests.router_http.toys import DISAGGREGATED, Site, worker_info
from twinpool.cli.app import main
from twinpool.core.ports import Role


@pytest.fixture
def site() -> Iterator[Site]:
    workers = (*DISAGGREGATED, worker_info("d 1", Role.DECODE))
    site = Site(HTTPConfig(port=0, api_key="sesame"), workers=workers)
    yield site
    site.close()


def run(site: Site, capsys: pytest.CaptureFixture[str], *args: str, key: str = "sesame") -> tuple[int, str]:
    """Run the command; return its exit code and the one line that it printed."""
    code = main(["role", *args, "--url", f"http://127.0.0.1:{site.port}", "--api-key", key])
    out, err = capsys.readouterr()
    (line,) = (out + err).splitlines()
    return code, line


def test_a_change_is_told_with_what_it_did(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = run(site, capsys, "d 1", "prefill", "--clear-cache", "--timeout", "5")

    assert code == 0
    assert re.fullmatch(
        r"d 1, decode until now, is prefill after \d\.\d s; 7 cached blocks are free", line
    ), line
    assert site.worker.roles == [Role.PREFILL]

    assert run(site, capsys, "d 1", "prefill") == (0, "d 1 was prefill already")
    assert site.worker.roles == [Role.PREFILL]


def test_what_is_refused_is_told_and_force_does_it(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    run(site, capsys, "d 1", "prefill")

    assert run(site, capsys, "d9", "prefill") == (
        1,
        "twinpool: error: worker: d9 is not here; the workers are p0, d0, d 1",
    )
    assert run(site, capsys, "d0", "prefill") == (
        1,
        "twinpool: error: worker: d0 as prefill would leave no decode worker",
    )
    assert run(site, capsys, "d0", "prefill", "--timeout", "0") == (
        2,
        "twinpool: error: --timeout: 0 is not above 0",
    )
    assert run(site, capsys, "d0", "prefill", key="guess")[0] == 1
    assert site.worker.roles == [Role.PREFILL]
    code, _ = run(site, capsys, "d0", "prefill", "--force")
    assert (code, site.worker.roles) == (0, [Role.PREFILL, Role.PREFILL])


@pytest.mark.parametrize("args", [["d0"], ["d0", "boss"], ["d0", "prefill", "--timeout", "soon"]])
def test_an_order_that_is_none_is_refused_before_anybody_is_asked(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["role", *args])

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("twinpool: error: ")
