"""Shipped profiles say what their sources say, and the times between measured points are sensible."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared import vectors
from twinpool.core.errors import ConfigError
from twinpool.lab.profile.cost import Chunk, CostModel, line_s
from twinpool.lab.profile.curve import Curve
from twinpool.lab.profile.profile import load_links, load_profile, profile_names

KNOWN = vectors()
NAMES = profile_names()
SPLITWISE = sorted(name for name in KNOWN if name.startswith("splitwise-profile"))
AIC = sorted(name for name in KNOWN if name.startswith("aic-profile"))


@pytest.mark.parametrize("name", SPLITWISE)
def test_splitwise_medians(name: str) -> None:
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    hardware = given["hardware"].removesuffix("-80gb")
    cost = load_profile(f"{hardware}-{given['model'].replace('llama2', 'llama-2')}-tp8").cost_model()
    for tokens, prompt_ms, token_ms in zip(
        wanted["batch_tokens"], wanted["prompt_ms"], wanted["token_ms"], strict=True
    ):
        assert 1e3 * cost.step_s([Chunk(0, tokens)], 0, 0) == pytest.approx(prompt_ms, rel=1e-3)
        assert 1e3 * cost.step_s([], tokens, 0) == pytest.approx(token_ms, rel=1e-3)


@pytest.mark.parametrize("name", AIC)
def test_times_of_aiconfigurator(name: str) -> None:
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    size = given["model"].rsplit("-", 1)[1].lower()
    tp = f"-tp{given['tp']}" if given["tp"] > 1 else ""
    cost = load_profile(f"{given['system'].split('_')[0]}-llama-3.1-{size}{tp}").cost_model()
    for tokens, ms in wanted["prefill_bs1_ms"]:
        assert 1e3 * cost.step_s([Chunk(0, tokens)], 0, 0) == pytest.approx(ms, rel=1e-9)
    for batch, context, ms in wanted["decode_step_ms_bs_ctx"]:
        assert 1e3 * cost.step_s([], batch, batch * context) == pytest.approx(ms, rel=1e-9)


def measured_profiles() -> list[str]:
    return [name for name in NAMES if load_profile(name).measured is not None]


@pytest.mark.parametrize("name", measured_profiles())
def test_batches_of_prompts_are_predicted_from_single_ones_within_six_percent(name: str) -> None:
    profile = load_profile(name)
    assert profile.measured is not None
    cost = profile.cost_model()
    for batch, tokens, cached, seconds in profile.measured.prefill:
        chunks = [Chunk(int(cached), int(tokens))] * int(batch)
        assert cost.step_s(chunks, 0, 0) == pytest.approx(seconds, rel=0.061)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_takes_less_for_more(name: str) -> None:
    cost = load_profile(name).cost_model()
    assert cost.step_s([Chunk(0, 600)], 0, 0) < cost.step_s([Chunk(0, 1200)], 0, 0)
    assert cost.step_s([Chunk(0, 600)], 0, 0) <= cost.step_s([Chunk(600, 600)], 0, 0)
    assert cost.step_s([Chunk(0, 600)], 0, 0) <= cost.step_s([Chunk(0, 600)], 20, 20_000)
    assert cost.step_s([], 20, 20_000) <= cost.step_s([Chunk(0, 600)], 20, 20_000)
    assert cost.step_s([], 4, 4000) <= cost.step_s([], 8, 8000) * 1.02  # one source is that noisy
    two = cost.step_s([Chunk(0, 600), Chunk(0, 600)], 0, 0)
    assert two <= 2.0 * cost.step_s([Chunk(0, 600)], 0, 0) * 1.01


@cache
def cost_of(name: str) -> CostModel:
    return load_profile(name).cost_model()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(num_decodes=st.integers(1, 300), mean_context=st.integers(1, 20_000))
def test_decodes_lie_on_their_line(name: str, num_decodes: int, mean_context: int) -> None:
    cost = cost_of(name)
    context = num_decodes * mean_context
    line = cost.decode_line(num_decodes, context)
    assert context < line.up_to_tokens
    assert cost.step_s([], num_decodes, context) == line_s(line, context) > 0.0


def test_a_curve_goes_through_its_points_and_on_beyond_them() -> None:
    curve = Curve([(2.0, 10.0), (1.0, 6.0), (4.0, 12.0)])
    assert [curve.at(x) for x in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)] == [
        2.0,
        6.0,
        8.0,
        10.0,
        11.0,
        12.0,
        14.0,
    ]
    assert Curve([(5.0, 3.0)]).at(99.0) == 3.0


def test_an_unknown_profile_and_a_wrong_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"profile: b200 is no path to a \.yaml file and none of a100-bloom"
    ):
        load_profile("b200")
    text = (Path(load_profile.__code__.co_filename).parent / "data" / "a100-opt-13b.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(
        text.replace("large_batch: 95", "large_batch: 95\nbatch_tokens:\n  prefill: []\n  decode: []")
    )
    with pytest.raises(ConfigError, match=r"batch_tokens\.prefill: has no row"):
        load_profile(str(path))
    path.write_text(text.replace("kv_cache_bytes: 46293012480", "kv_cache_bytes: 0"))
    with pytest.raises(ConfigError, match="kv_cache_bytes: 0 is less than 1"):
        load_profile(str(path))


def test_every_shipped_profile_and_link_names_its_source() -> None:
    assert len(NAMES) == 15
    for name in NAMES:
        profile = load_profile(name)
        assert profile.name == name
        assert "Apache-2.0" in profile.source or "MIT" in profile.source
        assert profile.num_blocks(block_tokens=16) > 1000
    for link in load_links().values():
        assert link.source
