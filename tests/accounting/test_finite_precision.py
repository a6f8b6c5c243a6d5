"""What the finite precision of noise on a lattice costs, and what is said of it."""

from __future__ import annotations

import json
import math

import mpmath
import pytest
import torch

import gradveil
from gradveil.accounting import finite_precision, ledger
from gradveil.accounting.statement import statement_of
from gradveil.errors import ConfigError, RunDirectoryError, UnknownNameError
from gradveil.reports.checklist import checklist
from gradveil.reports.facts import read_run
from loops import dataset, network, run, start
from small_runs import trained

UNIT = mpmath.mpf(2) ** -32


def relative_error(z):
    """Of the density in the middle of a cell, for the integral over it."""
    with mpmath.workprec(400):
        integral = mpmath.ncdf(z + UNIT / 2) - mpmath.ncdf(z - UNIT / 2)
        return mpmath.npdf(z) * UNIT / integral - 1


def test_the_density_in_the_middle_of_a_cell_is_its_integral_to_the_proved_precision():
    for z in (0.0, 0.3, 1.0, 2.0, 4.0, 7.0, 11.9):
        with mpmath.workprec(400):
            leading = -(UNIT**2) * (mpmath.mpf(z) ** 2 - 1) / 24
            assert abs(relative_error(mpmath.mpf(z)) - leading) < UNIT**4 * (1 + z**4)
    root = mpmath.sqrt(mpmath.quad(lambda z: mpmath.npdf(z) * ((z**2 - 1) / 24) ** 2, [-12, 0, 12])) * UNIT**2
    of_116_bits, of_heights = mpmath.mpf(12) * 2**32 / 2**116, mpmath.mpf(12) * 2**32 / (0x28291002 << 84)
    assert (root + 2 * (of_116_bits + of_heights)) / mpmath.sqrt(2) < finite_precision._OF_ROOT


def test_what_adds_up_draw_by_draw_is_bounded():
    with mpmath.workprec(400):
        tail = 2 * (1 - mpmath.ncdf(12))
        lowest = mpmath.mpf((0x28291002 << 84) // (12 << 32)) / 2**92  # height of a layer
        decisions = (mpmath.mpf(2) ** -113 + mpmath.mpf(2) ** -120) / lowest + mpmath.mpf(2) ** -128
        assert tail + 2 * decisions < finite_precision._OF_SUM
    assert finite_precision.distance(1e6 * 1e4) < 4e-16
    assert finite_precision.distance(0) == 0


def test_delta_is_charged_with_both_neighbours_distances():
    engine, *loop = start(noise="lattice", steps=3)
    run(engine, *loop)
    header, said = engine.header, engine.statement()
    draws = 3 * (sum(header.plan["group_sizes"]) + len(header.groups))
    wanted = (1 + math.exp(said.proved.epsilon)) * finite_precision.distance(draws)
    assert said.extra_delta == wanted == said.to_dict()["floating_point"]["extra_delta"]
    assert 0 < wanted < 1e-15
    assert finite_precision.extra_delta(header, math.inf, steps=3) == 0.0
    assert finite_precision.extra_delta(header, 1e6, steps=3) == 1.0


@pytest.mark.parametrize("noise", ["lattice", "float"])
def test_the_statement_the_record_and_the_checklist_say_which_noise_it_was(noise, tmp_path):
    path = trained(tmp_path / "run", noise=noise)
    contents = ledger.read(path / "ledger.jsonl")
    said = statement_of(contents)
    lattice = noise == "lattice"
    assert contents.header.plan.get("noise") == ("lattice" if lattice else None)
    assert said.to_dict()["floating_point"]["covered"] is lattice
    assert any("floating point" in note for note in said.not_covered) is not lattice
    text = " ".join(str(said).split())
    assert ("Floating point: covered" in text) is lattice
    assert ("adds at most" in text) is lattice
    assert any("exactly Gaussian" in note for note in said.assumptions) is not lattice
    found = {item.name: item.answer for item in checklist(read_run(path))}
    assert found["Floating point"] == ("satisfied" if lattice else "open")
    json.dumps(said.to_dict())


def test_noise_is_on_a_lattice_by_default_from_large_batches_on():
    for batch_size, wanted in ((10, None), (500, "lattice")):
        data = torch.utils.data.TensorDataset(torch.randn(1000, 1, 5, 5), torch.randint(0, 3, (1000,)))
        model = network()
        engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=3, delta=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.make_private(module=model, optimizer=optimizer, data_loader=data, batch_size=batch_size)
        assert engine.header.plan.get("noise") == wanted
    assert len(dataset()) == 60
    with pytest.raises(UnknownNameError, match="noise"):
        start(noise="exact")
    with pytest.raises(ConfigError, match="too coarse"):
        run(*start(noise="lattice", sigma=1e9, steps=1))


def test_noise_on_a_lattice_is_not_captured_as_a_cuda_graph():
    engine, *_ = start(noise="lattice", steps=1)
    with pytest.raises(ConfigError, match="drawn on the CPU"):
        gradveil.cuda_graph_step(engine, torch.nn.functional.cross_entropy)


def test_a_run_keeps_the_noise_it_was_begun_with(tmp_path):
    for noise in ("float", "lattice"):
        engine, *_ = start(noise=noise, run_dir=tmp_path / noise, steps=3)
        engine.detach()
    engine, *_ = start(noise="auto", run_dir=tmp_path / "float", resume=True, steps=3)
    assert not finite_precision.is_covered(engine.header)
    engine.detach()
    with pytest.raises(RunDirectoryError, match="begun with noise in floating point"):
        start(noise="lattice", run_dir=tmp_path / "float", resume=True, steps=3)
    with pytest.raises(RunDirectoryError, match="begun with"):
        start(noise="float", run_dir=tmp_path / "lattice", resume=True, steps=3)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_float32_moves_sums_of_clipped_gradients_far_less_than_is_allowed_for(clipping, monkeypatch):
    """Of one batch with and without one example: how far their sums are apart, in bounds, at most."""
    from gradveil.mechanism.noise.lattice import MARGIN
    from gradveil.mechanism.release import Releaser

    seen = {}
    monkeypatch.setattr(Releaser, "add_noise", lambda self, sums, scale, noise: seen.update(sums))
    generator = torch.Generator().manual_seed(0)
    x = 30 * torch.randn(512, 1, 5, 5, generator=generator)
    y = torch.randint(0, 3, (512,), generator=generator)
    sums = []
    for count in (511, 512):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=1, delta=1e-4, clipping=clipping, noise="lattice")
        data = torch.utils.data.TensorDataset(x[:count], y[:count])
        _, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=data, batch_size=count)
        for rows, labels in loader:
            torch.nn.functional.cross_entropy(model(rows), labels, reduction="mean").backward()
        sums.append([dict(seen)[n].double() for g in engine.groups for n in g.parameters])
        groups = engine.groups
    parameters = iter(zip(*sums, strict=True))
    for group in groups:
        apart = math.sqrt(sum(float((b - a).square().sum()) for a, b in (next(parameters) for _ in group.parameters)))
        assert 0.9 < apart < 1 + MARGIN / 4
