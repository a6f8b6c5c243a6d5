"""Reference values, orderings, and every way to be infinite."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import numpy as np
import pytest
from accounting_records import make_header, make_release, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.accounting import paper_epsilons, proved_epsilon
from gradveil.accounting._quantize import cells
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.mechanism.records import AuxiliaryRelease
from gradveil.mechanism.schedules import Exponential, Linear

STEPS = (10_000, 7_996, 6_000, 5_419, 5_000)
REFERENCE = {
    ("poisson", "add-remove", "PLD"): (0.601, 0.532, 0.455, 0.431, 0.412),
    ("poisson", "add-remove", "RDP"): (0.659, 0.584, 0.501, 0.474, 0.454),
    ("poisson", "replace-one", "PLD"): (1.271, 1.124, 0.960, 0.908, 0.868),
    ("without-replacement", "replace-one", "PLD"): (1.488, 1.315, 1.122, 1.061, 1.014),
    ("without-replacement", "replace-one", "RDP"): (3.106, 2.740, 2.338, 2.213, 2.117),
}


@pytest.mark.parametrize("view", REFERENCE, ids=" ".join)
def test_reference_values(view) -> None:
    sampling, neighbours, accountant = view
    for steps, expected in zip(STEPS, REFERENCE[view], strict=True):
        header, releases = make_run(taken=steps, sampling=sampling)
        got = proved_epsilon(header, releases, neighbours=neighbours, accountant=accountant)
        assert got.epsilon == pytest.approx(expected, rel=5e-3)
        assert (got.steps_charged, got.sampler, got.reason) == (steps, sampling, None)


@pytest.mark.parametrize(
    ("groups", "neighbours", "expected"),
    [(3, "add-remove", 1.116), (3, "replace-one", 2.342), (6, "add-remove", 1.681)],
)
def test_groups_clipped_apart_share_one_sensitivity(groups, neighbours, expected) -> None:
    header, releases = make_run(groups=tuple("abcdef"[:groups]))
    assert proved_epsilon(header, releases, neighbours=neighbours).epsilon == pytest.approx(expected, rel=5e-3)


def test_decaying_sigma_is_exact_enough_and_fast() -> None:
    header, releases = make_run(sigmas=list(map(Exponential.to(15.0, end=4.0, steps=10_000), range(10_000))))
    start = time.perf_counter()
    pld = proved_epsilon(header, releases).epsilon
    assert time.perf_counter() - start < 15  # 2 s on one idle core
    assert pld == pytest.approx(0.5302, rel=5e-3)
    assert pld >= 0.5302 * (1 - 5e-4), "multipliers must be rounded to the safe side"
    assert proved_epsilon(header, releases, accountant="RDP").epsilon == pytest.approx(0.584, rel=5e-3)


def test_decaying_clip_is_free() -> None:
    header, baseline = make_run(taken=500)
    decay = Linear.to(4.0, end=2.0, steps=500)
    shrinking = [make_release(header, t, clip=decay(t)) for t in range(500)]
    assert proved_epsilon(header, shrinking).epsilon == pytest.approx(
        proved_epsilon(header, baseline).epsilon, rel=1e-9
    )


def test_replace_one_rdp_lies_above_its_pld_and_below_group_privacy() -> None:
    header, releases = make_run()
    rdp = proved_epsilon(header, releases, neighbours="replace-one", accountant="RDP").epsilon
    assert 1.271 < rdp < 1.271 * 1.15


def test_fixed_size_pld_lies_between_its_worst_case_and_the_rdp_bound() -> None:
    # Everyone at -C and the one example at +C or -C: exactly a Poisson step with twice the sensitivity.
    worst = proved_epsilon(*make_run(sigmas=[3.0] * 10_000)).epsilon
    got = {}
    for sampling in ("without-replacement", "with-replacement"):
        header, releases = make_run(sampling=sampling)
        got[sampling] = proved_epsilon(header, releases, neighbours="replace-one").epsilon
    assert worst < got["without-replacement"] < got["with-replacement"] < 3.106
    assert got["with-replacement"] == pytest.approx(got["without-replacement"], rel=0.02)


def test_full_batches_are_the_plain_gaussian() -> None:
    from scipy.stats import norm

    header, releases = make_run(taken=10, sampling="full", sample_rate=1.0)
    for neighbours, shift in (("add-remove", math.sqrt(10) / 6), ("replace-one", 2 * math.sqrt(10) / 6)):
        got = proved_epsilon(header, releases, neighbours=neighbours).epsilon
        delta = norm.cdf(shift / 2 - got / shift) - math.exp(got) * norm.cdf(-shift / 2 - got / shift)
        assert delta == pytest.approx(1e-5, rel=0.02)


@settings(max_examples=6, deadline=None)
@given(
    steps=st.integers(1, 2000),
    more=st.integers(1, 500),
    q=st.floats(0.002, 0.1),
    sigma=st.floats(0.9, 12),
    smaller=st.floats(0.7, 0.99),
)
def test_orderings(steps: int, more: int, q: float, sigma: float, smaller: float) -> None:
    def epsilon(n: int = steps, rate: float = q, noise: float = sigma, **view) -> float:
        header, releases = make_run(sigmas=[noise] * n, sample_rate=rate)
        return proved_epsilon(header, releases, **view).epsilon

    pld, rdp = epsilon(), epsilon(accountant="RDP")
    slack = 1 + 1e-6
    # The grid of losses may cost the PLD steps * interval^2 or so where epsilon is tiny.
    assert pld <= rdp * 1.005 + 1e-4
    assert rdp <= paper_epsilons([sigma] * steps, q, 1e-5)["MA"].epsilon * slack
    for kind in ("PLD", "RDP"):
        base = epsilon(accountant=kind)
        assert base <= epsilon(n=steps + more, accountant=kind) * slack + 1e-9
        assert base <= epsilon(rate=min(1.0, q * 1.3), accountant=kind) * slack + 1e-9
        assert base <= epsilon(noise=sigma * smaller, accountant=kind) * slack + 1e-9
        assert base <= epsilon(neighbours="replace-one", accountant=kind) * slack + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=60), st.floats(0.5, 50))
def test_cells_never_round_up_and_adding_a_step_never_helps(values: list[float], extra: float) -> None:
    def inverse_squares(zs: list[float]) -> float:
        return sum(n / z**2 for z, n in cells(zs, exact_limit=3, cell_limit=8))

    assert sum(n for _, n in cells(values, exact_limit=3, cell_limit=8)) == len(values)
    assert inverse_squares(values) >= sum(1 / z**2 for z in values) * (1 - 1e-12)
    assert inverse_squares([*values, extra]) > inverse_squares(values)


# --- infinite, with the reason ------------------------------------------------------------------


def reason(header, releases, **view) -> str:
    got = proved_epsilon(header, releases, **view)
    assert got.epsilon == math.inf
    assert json.loads(json.dumps(got.to_dict()))["epsilon"] == "inf"
    assert got.reason is not None
    return got.reason


def test_data_dependent_scale_is_infinite_and_names_the_step() -> None:
    header, releases = make_run(taken=3, strategy="dyn-s-l2max", guarantee="paper-only")
    releases[2] = make_release(header, 2, scale_is_public=False, sensitivity_rule="l2max-batch", sensitivity=(1.0,))
    why = reason(header, releases)
    assert "step 2" in why
    assert "l2max-batch" in why
    assert "differ in scale" in why


@pytest.mark.parametrize(("sampler", "word"), [("shuffle", "shuffled"), ("unknown", "own sampler"), ("odd", "'odd'")])
def test_samplers_without_a_bound(sampler: str, word: str) -> None:
    header, releases = make_run(taken=3)
    releases[1] = make_release(header, 1, sampler=sampler)
    assert word in reason(header, releases)


def test_fixed_size_has_no_add_remove_and_with_replacement_no_rdp() -> None:
    assert "replace-one" in reason(*make_run(taken=3, sampling="without-replacement"))
    assert "replace-one" in reason(*make_run(taken=3, sampling="with-replacement"))
    assert "PLD" in reason(*make_run(taken=3, sampling="with-replacement"), neighbours="replace-one", accountant="RDP")
    odd = {"expected_batch_size": 600.5, "sample_rate": 600.5 / 60_000}
    assert "whole batch size" in reason(
        *make_run(taken=3, sampling="with-replacement", **odd), neighbours="replace-one"
    )
    assert "cannot be drawn" in reason(
        *make_run(taken=3, sampling="without-replacement", **odd), neighbours="replace-one"
    )


def test_no_noise_is_infinite() -> None:
    assert "adds no noise" in reason(*make_run(taken=2, strategy="non-private", guarantee="none"))
    header, releases = make_run(taken=2)
    releases[1] = make_release(header, 1, noise_std=(0.0,))
    assert "step 1" in reason(header, releases)
    releases[1] = dataclasses.replace(releases[0], step=1, clip=(), sensitivity=(), noise_std=())
    assert "step 1" in reason(header, releases)
    releases[1] = make_release(header, 1, noise_std=(math.nan,))
    assert "step 1" in reason(header, releases)


# --- what is charged ----------------------------------------------------------------------------


def test_no_releases_cost_nothing() -> None:
    got = proved_epsilon(make_header(), [])
    assert (got.epsilon, got.steps_charged, got.reason) == (0.0, 0, None)


def test_recovered_and_redone_steps_are_charged() -> None:
    header, releases = make_run(taken=200)
    plain = proved_epsilon(header, releases).epsilon
    again = [*releases, *(make_release(header, t, recovered=t == 150) for t in range(100, 200))]
    got = proved_epsilon(header, again)
    assert got.steps_charged == 300
    assert got.epsilon == pytest.approx(proved_epsilon(*make_run(taken=300)).epsilon, rel=1e-12)
    assert got.epsilon > plain
    recovered = [make_release(header, t, recovered=True) for t in range(200)]
    assert proved_epsilon(header, recovered).epsilon == plain


@pytest.mark.parametrize("groups", [1, 3])
def test_side_releases_are_charged_jointly(groups: int) -> None:
    sigma, sigma_b = 6.0, 30.0
    names = tuple("abc"[:groups])
    side = (AuxiliaryRelease(name="b", values=(0.0,) * groups, sensitivity=math.sqrt(groups) / 2, noise_std=sigma_b),)
    joint = proved_epsilon(*make_run(taken=1_000, groups=names, side=side)).epsilon
    z = (groups / sigma**2 + groups / (2 * sigma_b) ** 2) ** -0.5
    assert joint == pytest.approx(proved_epsilon(*make_run(sigmas=[z] * 1_000)).epsilon, rel=1e-9)
    assert joint > proved_epsilon(*make_run(taken=1_000, groups=names)).epsilon


def test_fixed_variance_is_the_baseline_and_its_ledger_stays_private() -> None:
    header, baseline = make_run(taken=100)
    plan = {**header.plan, "fixed_variance": True, "varsigma": 24.0}
    header = dataclasses.replace(header, plan=plan, guarantee="paper-only")
    norms = np.random.default_rng(0).uniform(0.5, 4.0, 100)
    fixed = [
        make_release(header, t, sigma=24.0 / s, sensitivity=(s,), sensitivity_rule="l2max-batch", noise_std=(24.0,))
        for t, s in enumerate(norms.tolist())
    ]
    got = proved_epsilon(header, fixed)
    assert got.epsilon == pytest.approx(proved_epsilon(header, baseline).epsilon, rel=1e-9)
    assert got.reason is None
    assert any("must not be published" in note for note in got.assumptions)
    assert not any("must not be published" in note for note in proved_epsilon(header, baseline).assumptions)


def test_assumptions_are_stated() -> None:
    notes = " / ".join(proved_epsilon(*make_run(taken=1)).assumptions)
    for words in ("one example", "secret", "floating point", "hyper-parameter", "at most one row"):
        assert words in notes
    assert "seed" not in notes
    assert "anyone who knows the seed can subtract the noise" in " ".join(
        proved_epsilon(*make_run(taken=1, seeded=True)).assumptions
    )
    repeated = proved_epsilon(*make_run(taken=1, sampling="with-replacement"), neighbours="replace-one")
    assert "at most one row" not in " ".join(repeated.assumptions)
    header, releases = make_run(taken=1)
    viewed = proved_epsilon(dataclasses.replace(header, plan={**header.plan, "views": 4}), releases)
    assert (
        "at most one row of a batch in each step; the 4 views of an example are averaged before they are clipped"
        in (" ".join(viewed.assumptions))
    )
    assert viewed.epsilon == proved_epsilon(header, releases).epsilon


def test_delta_can_be_given_and_is_checked() -> None:
    header, releases = make_run(taken=100)
    assert proved_epsilon(header, releases, delta=1e-7).epsilon > proved_epsilon(header, releases).epsilon
    with pytest.raises(ConfigError, match="delta 0"):
        proved_epsilon(header, releases, delta=0)
    with pytest.raises(UnknownNameError):
        proved_epsilon(header, releases, neighbours="add")
    with pytest.raises(UnknownNameError):
        proved_epsilon(header, releases, accountant="GDP")
