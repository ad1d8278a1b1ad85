"""The report of a made-up study says what its numbers say, and is one page that needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.lab.study.made_up import BAD, LIMITS, measured, settings
from twinpool.core.errors import ConfigError
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.study.cell import Cell
from twinpool.lab.study.findings.all import conclude
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.order import all_cells
from twinpool.lab.study.report import write_report
from twinpool.lab.study.results import read_results
from twinpool.lab.study.settings import SearchConfig
from twinpool.lab.study.tables import pools_table, requests_table


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    made = StudyFolder(tmp_path)
    made.begin(settings())
    for cell in all_cells(settings()):
        add(made, cell)
    return made


def add(folder: StudyFolder, cell: Cell, *, bad: int | None = None, problems: tuple[str, ...] = ()) -> None:
    made = measured(cell, bad=bad, problems=problems)
    folder.add(made.measurement, records=made.records, stories=made.stories)


def told(folder: StudyFolder, kind: str) -> list[str]:
    return [each.text for each in conclude(read_results(folder)) if each.kind == kind]


def test_conclusions_name_the_difference_and_where_there_is_none(folder: StudyFolder) -> None:
    conclusions = conclude(read_results(folder))

    # 2 req/s x 80 % are 1.6 within the limits, x 60 % are 1.2: a third more.
    first = conclusions[1]
    assert first.text == "At 2 req/s 1:1 serves 33 % more within the limits than colocated."
    assert first.evidence == (
        "1.6 against 1.2 req/s within the limits; the difference is +0.4 to +0.4 req/s "
        "(95 % bootstrap interval, 3 repeats)"
    )
    assert [told(folder, "goodput")[0], *told(folder, "goodput")[2:]] == [
        "Disaggregation wins with 1:1 at 2 req/s, and loses nowhere.",
        "At 1 req/s there is no difference in requests within the limits between colocated and 1:1.",
    ]


def test_a_loss_is_told_as_plainly(folder: StudyFolder) -> None:
    for repeat in range(3):
        add(folder, Cell(arm="1:1", rate=2.0, repeat=repeat), bad=12)

    assert told(folder, "goodput")[1] == "At 2 req/s 1:1 serves 33 % less within the limits than colocated."
    assert told(folder, "goodput")[0] == (
        "Disaggregation loses to colocated serving with 1:1 at 2 req/s, and wins nowhere."
    )


def test_ranges_that_overlap_are_no_difference(folder: StudyFolder) -> None:
    add(folder, Cell(arm="1:1", rate=2.0, repeat=1), bad=8)  # as many as colocated, once

    assert told(folder, "goodput") == [
        "Disaggregation neither wins nor loses against colocated serving at any of these rates.",
        "At 1 and 2 req/s there is no difference in requests within the limits between colocated and 1:1.",
    ]


def test_ratios_are_compared_with_each_other_too(tmp_path: Path) -> None:
    asked, made = settings(workers=3, ratios=("1:2", "2:1"), rates=(2.0,)), StudyFolder(tmp_path)
    made.begin(asked)
    bad = {"1:2": (10, 9, 11), "2:1": (6, 7, 5), "colocated": (8, 10, 6)}
    for cell in all_cells(asked):
        add(made, cell, bad=bad[cell.arm][cell.repeat])

    # Of 20 requests 10 and 14 on average, colocated from 10 to 14: it overlaps both, which keep apart.
    assert told(made, "goodput") == [
        "Disaggregation neither wins nor loses against colocated serving at any of these rates.",
        "At 2 req/s there is no difference in requests within the limits between colocated and 1:2 or 2:1.",
        "At 2 req/s 2:1 serves 40 % more within the limits than 1:2.",
    ]


def test_cells_that_do_not_count_leave_too_few_to_conclude_from(folder: StudyFolder) -> None:
    add(folder, Cell(arm="1:1", rate=2.0, repeat=1), problems=("sent late",))

    assert "Nothing can be concluded about 1:1 at 2 req/s." in told(folder, "goodput")
    assert told(folder, "doubt")[-1] == "1 of 12 cells do not count."


def test_latencies_of_who_refused_half_of_its_requests_are_not_compared(folder: StudyFolder) -> None:
    for repeat in range(3):
        cell = Cell(arm="1:1", rate=1.0, repeat=repeat)
        made = measured(cell)
        records = [
            replace(record, error="queue_full") if record.index % 2 else record for record in made.records
        ]
        bench = {**made.measurement.bench, "summary": Summary(LIMITS).add_all(records).to_json()}
        folder.add(replace(made.measurement, bench=bench), records=records, stories=made.stories)

    found = [each for each in conclude(read_results(folder)) if each.kind == "latency"]

    assert found[0].text == (
        "Latencies of 1:1 are not compared at 1 req/s: it answered another share of its requests than "
        "colocated."
    )
    assert found[0].evidence == "50 % and 100 % answered at 1 req/s"
    assert not any("1 req/s" in each.text or "1 and 2 req/s" in each.text for each in found[1:])


def test_chance_is_that_of_the_comparison_with_the_fewest_repeats(tmp_path: Path) -> None:
    asked, made = settings(repeats=5), StudyFolder(tmp_path)
    made.begin(asked)
    for cell in all_cells(asked):
        is_late = cell.arm == "1:1" and cell.rate == 1.0 and cell.repeat < 2
        add(made, cell, problems=("sent late",) if is_late else ())

    # Three repeats are left there: 2 of 20 orders, and not 2 of the 252 of five.
    assert told(made, "doubt")[0].startswith("Of comparisons between equal arms, up to 10 % would")


@pytest.mark.parametrize(
    ("shares", "problem_at", "text"),
    [
        # 20 requests, so many bad ones by rate; a rate is borne with up to 2 of them.
        ({1.0: 0, 2.0: 0}, None, "Nothing can be concluded about the rate that 1:1 bears."),
        ({1.0: 0, 2.0: 0, 4.0: 0}, None, "1:1 bears at least 4 req/s with 90 % within the limits."),
        ({1.0: 0, 2.0: 9, 1.41: 9}, None, "1:1 bears 1 req/s with 90 % within the limits."),
        ({1.0: 9, 2.0: 9}, 1.0, "Nothing can be concluded about the rate that 1:1 bears."),
    ],
)
def test_a_capacity_is_told_of_a_search_that_has_ended(
    tmp_path: Path, shares: dict[float, int], problem_at: float | None, text: str
) -> None:
    search = SearchConfig(least=1.0, most=4.0, precision=1.42)
    made = StudyFolder(tmp_path)
    made.begin(settings(rates=(), search=search, repeats=1, colocated=False))
    for rate, bad in shares.items():
        cell = Cell(arm="1:1", rate=rate, repeat=0)
        add(made, cell, bad=bad, problems=("sent late",) if rate == problem_at else ())

    assert told(made, "capacity") == [text]


def test_latencies_are_compared_at_their_median_and_their_90th_percentile(folder: StudyFolder) -> None:
    for repeat in range(3):
        # 18 requests take 0.20, 0.21 or 0.22 s and 2 take 2 s; rank 0.9 x 19 = 17.1 is 0.1 of the way from
        # one to the other: 0.389 s on average, against 0.21 s.
        add(folder, Cell(arm="1:1", rate=1.0, repeat=repeat), bad=2)

    slower = "The 90th percentile of the time to the first token of 1:1 is 85 % higher than that of colocated"
    assert f"{slower} at 1 req/s." in told(folder, "latency")
    assert any("difference in the median time to the first token" in each for each in told(folder, "latency"))


def test_the_busier_pool_and_hidden_time_are_told(folder: StudyFolder) -> None:
    assert told(folder, "pools") == [
        "At 2 req/s the prefill pool of 1:1 is the busier one; its decode pool has time left."
    ]
    # Each transfer takes 40 ms, and its last 10 ms come after the first token.
    assert told(folder, "transfer")[0].startswith("In 1:1 75 % of the time in which KV moves")


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        (0.03, 0.09, "both pools of 1:1 are hardly busy."),
        (0.5, 0.45, "both pools of 1:1 are about equally busy."),
        (0.3, 0.2, "the prefill pool of 1:1 is the busier one; its decode pool has time left."),
    ],
)
def test_pools_are_compared_by_the_ratio_of_their_busy_shares(
    folder: StudyFolder, prefill: float, decode: float, text: str
) -> None:
    for repeat in range(3):
        made = measured(Cell(arm="1:1", rate=2.0, repeat=repeat))
        pools = {
            role: replace(made.measurement.pools[role], busy_share=share)
            for role, share in (("prefill", prefill), ("decode", decode))
        }
        folder.add(replace(made.measurement, pools=pools), records=made.records, stories=made.stories)

    assert told(folder, "pools") == [f"At 2 req/s {text}"]


def test_repeats_that_are_parts_of_one_file_are_doubted(folder: StudyFolder, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ({"index": n, "arrival_s": float(n), "prompt_tokens": 64, "output_tokens": 4} for n in range(60))
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked, made = settings(workload={"kind": "trace", "path": str(trace)}), StudyFolder(tmp_path / "study")
    made.begin(asked)
    for cell in all_cells(asked):
        add(made, cell)

    assert not any("one file" in text for text in told(folder, "doubt"))
    assert told(made, "doubt")[1] == (
        "The repeats are parts of one file: how much they vary says nothing of another one."
    )


def test_tables_show_both_normalisations(folder: StudyFolder) -> None:
    results = read_results(folder)

    table = requests_table(results)
    row = dict(zip(table.columns, table.rows[2], strict=True))
    assert (row["rate, req/s"], row["arm"], row["within limits"], row["the same, req/s"]) == (
        "2",
        "1:1",
        "80 %",
        "1.60",
    )
    assert row["per worker, req/s"] == "0.80"
    assert row["against colocated"] == "+33 %"
    pools = pools_table(results)
    prefill, decode = (dict(zip(pools.columns, row, strict=True)) for row in pools.rows[3:5])
    assert (prefill["pool"], prefill["workers"], prefill["busy"]) == ("prefill", "1", "90 %")
    # 20 requests of 64 tokens, the last of them due after 9.5 s; it ends 0.36 s later on average.
    assert prefill["prompt tokens/s per worker"] == f"{20 * 64 / 9.86:.0f}"
    assert (decode["pool"], decode["output tokens/s per worker"]) == ("decode", f"{80 / 9.86:.1f}")
    assert (prefill["KV sent, MiB per cell"], prefill["of its time before the first token"]) == (
        "20.0",
        "75 %",
    )


def test_a_server_that_forgot_the_first_requests_is_not_said_to_show_all(folder: StudyFolder) -> None:
    for arm in ("1:1", "colocated"):
        for repeat in range(3):
            made = measured(Cell(arm=arm, rate=2.0, repeat=repeat))
            folder.add(made.measurement, records=made.records, stories=made.stories[5:])

    assert "The last 15 of 20 requests at 2 req/s" in write_report(folder).read_text(encoding="utf-8")


def test_the_page_needs_nothing_else_and_every_figure_is_there_twice(folder: StudyFolder) -> None:
    path = write_report(folder)

    text = path.read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', text)
    assert links and all(link.startswith("#") for link in links)
    assert "<script" not in text and "@import" not in text and "url(http" not in text
    assert text.count('<svg class="wide"') == text.count('<svg class="narrow"') == 6
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "At 2 req/s 1:1 serves 33 % more within the limits than colocated." in text
    ids = _Ids()
    ids.feed(text)
    assert len(ids.found) == len(set(ids.found)), "an id stands twice"
    assert {link[1:] for link in links} <= set(ids.found)
    for name in ("goodput", "share", "ttft", "tpot", "waterfall", "timeline"):
        assert (folder.path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((folder.path / "study.json").read_text())["cells"]) == 12


def test_axes_have_units(folder: StudyFolder) -> None:
    text = write_report(folder).read_text(encoding="utf-8")

    figures = [
        re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        for svg in re.findall(r'<svg class="wide".*?</svg>', text, re.DOTALL)
    ]
    labels = [
        ("rate of requests (req/s)", "within both limits (req/s)"),
        ("rate of requests (req/s)",),  # its other axis are arms
        ("rate of requests (req/s)", "time to first token (s)"),
        ("rate of requests (req/s)", "time per output token (s)"),
        ("time since the request was sent (s)",),
        ("time since the start of the cell (s)", "requests"),
    ]
    for told, wanted in zip(figures, labels, strict=True):
        assert set(wanted) <= set(told)


def test_where_there_are_too_many_rates_those_that_all_arms_have_are_shown(tmp_path: Path) -> None:
    rates = tuple(float(rate) for rate in range(1, 31))
    asked, made = settings(rates=rates, repeats=1), StudyFolder(tmp_path)
    made.begin(asked)
    for rate in rates:
        for arm in ("1:1", "colocated") if rate % 3 == 0 else ("1:1",):
            add(made, Cell(arm=arm, rate=rate, repeat=0), bad=0)

    results = read_results(made)

    assert results.some_rates(4) == (3.0, 12.0, 21.0, 30.0)
    assert results.some_rates(11)[:2] == (1.0, 3.0) and len(results.some_rates(11)) == 11
    assert results.some_rates(99) == rates
    assert write_report(made).exists()


def test_equal_studies_make_equal_pages(folder: StudyFolder) -> None:
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


def test_a_folder_in_which_more_than_roles_differ_has_no_report(folder: StudyFolder) -> None:
    path = folder.path / "cells" / "1-1_at_1_r2.json"
    changed = json.loads(path.read_text())
    changed["config"]["settings"]["threads"] = 2
    path.write_text(json.dumps(changed))

    with pytest.raises(
        ConfigError, match=r"^settings\.threads: is 1 in .* and 2 in 1:1 at 1 req/s, repeat 3"
    ):
        write_report(folder)


def test_the_made_up_numbers_are_those_of_the_docstring() -> None:
    assert [1 - bad / 20 for bad in BAD.values()] == [1.0, 1.0, 0.8, 0.6]


class _Ids(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name == "id" and value]
