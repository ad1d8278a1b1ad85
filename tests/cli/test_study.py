"""`twinpool sweep` and `twinpool report`: how they blame options, and what fits on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.study.made_up import measured, settings
from tests.stranger import stranger
from twinpool.cli.app import main
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.order import all_cells

LIMITS = ("--ttft", "1s", "--tpot", "100ms")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rates", "1", "--workers", "0"], "study.workers: 0 is less than 1"),
        (["--rates", "0", "--workload", "sharegpt:"], "study.rates: 0 is not"),  # its workload is read first
        (["--rates", "0", "--workload", "synthetic:prompt=9"], "study.rates: 0 is not above 0"),
        (["--rates", "1", "--workload", "synthetic:prompt=9,"], "nothing stands beside a comma of"),
    ],
)
def test_a_wrong_option_is_named(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *LIMITS, "--out", str(tmp_path / "study"), *options]) == 2

    assert message in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_server_of_another_kind_is_told_with_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stranger() as address:
        code = main(["sweep", *LIMITS, "--rates", "1", "--out", str(tmp_path), "--url", f"http://{address}"])

    assert code == 1
    assert f"{address}/admin/workers: the answer is not JSON" in capsys.readouterr().err


def test_no_word_of_the_last_column_is_cut_on_a_terminal_of_80(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StudyFolder(tmp_path)
    folder.begin(settings())
    for cell in all_cells(settings()):
        made = measured(cell)
        folder.add(made.measurement, records=made.records, stories=made.stories)
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["report", str(tmp_path)]) == 0

    table = capsys.readouterr().out.partition("\n- ")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert {"against", "colocated", "no", "difference", "+33"} <= set(table.split())
