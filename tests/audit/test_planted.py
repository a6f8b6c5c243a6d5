"""The auditor finds faults: each is planted in gradveil's own code, and the lower bound rises above what is proved."""

from __future__ import annotations

import math

import pytest
import torch
from audited import UsedTwice, layers, setting

from gradveil import audit
from gradveil.clipping import clip_factors
from gradveil.clipping import clipper as clippers
from gradveil.clipping.clip_factors import ClipFactors
from gradveil.clipping.per_sample_grads import PerSampleGrads, row_sq_norms
from gradveil.mechanism.noise.streams import NoiseSource
from gradveil.mechanism.records import Release


def found(made, steps=400):
    """The audit of a setting; run before and after a fault is planted."""
    return audit.audit_steps(made, steps=steps, seed=3)


@pytest.fixture(scope="module")
def healthy():
    """Of the setting that most tests break."""
    return found(setting())


def noise_scaled_by(monkeypatch, factor):
    add = NoiseSource.add_to

    def less(self, grads, stds, **rest):
        add(self, grads, [factor * std for std in stds], **rest)

    monkeypatch.setattr(NoiseSource, "add_to", less)


def test_noise_halved(monkeypatch, healthy):
    assert healthy.verdict() == "consistent with what is proved"
    noise_scaled_by(monkeypatch, 0.5)
    broken = found(setting())
    assert broken.proved == healthy.proved
    assert broken.verdict() == "BROKEN: above what is proved"


def test_noise_halved_under_flat_clipping(monkeypatch):
    assert not found(setting(clipping="flat")).is_broken
    noise_scaled_by(monkeypatch, 0.5)
    assert found(setting(clipping="flat")).is_broken


def clipped_to(monkeypatch, other):
    """Other bounds than the engine set. Asked for them, the clipper states those, so that the engine cannot tell."""
    set_bounds = ClipFactors.bounds.fset

    def set_others(self, bounds):
        self.stated = tuple(bounds)
        set_bounds(self, other(self._bounds, self.stated))

    monkeypatch.setattr(ClipFactors, "bounds", property(lambda self: self.stated, set_others))


def test_clip_not_applied_to_one_layer(monkeypatch, healthy):
    assert not healthy.is_broken
    clipped_to(monkeypatch, lambda before, bounds: (1e6, *bounds[1:]))
    assert found(setting()).is_broken


def test_noise_added_per_physical_batch_at_the_wrong_scale(monkeypatch):
    """Each of k parts gets noise of std / k, and their sum none: together std / sqrt(k)."""
    parts, made = 4, {"physical": 2, "examples": 8}
    assert not found(setting(**made)).is_broken
    take_sums = clippers.Clipper.take_sums
    noise_scaled_by(monkeypatch, 0.0)
    generator = torch.Generator().manual_seed(7)

    def noised_part(self):
        sums = take_sums(self)
        return {n: t + torch.randn(t.shape, generator=generator) / parts for n, t in sums.items()}  # sigma C = 1

    monkeypatch.setattr(clippers.Clipper, "take_sums", noised_part)
    assert found(setting(**made)).is_broken


def test_a_clip_schedule_that_changes_the_noise_but_not_the_clip(monkeypatch):
    made = {"strategy": "dyn-s-decay", "clip_end": 0.25}
    assert not found(setting(**made), steps=1600).is_broken
    clipped_to(monkeypatch, lambda before, bounds: before or bounds)
    assert found(setting(**made), steps=1600).is_broken


def test_a_parameter_used_twice_clipped_separately(monkeypatch):
    made = {"model": UsedTwice()}
    assert not found(setting(**made), steps=800).is_broken

    class Apart(PerSampleGrads):
        """Each use clipped on its own at C = 1, and the clipped uses added up."""

        def __init__(self, uses):
            self.uses, self.examples, self.device = uses, uses[0].examples, uses[0].device

        def per_example(self, rows):
            columns = zip(*(self._clipped(use, rows) for use in self.uses), strict=True)
            return [torch.stack(column).sum(0) for column in columns]

        @staticmethod
        def _clipped(use, rows):
            grads = use.per_example(rows)
            norms = sum(row_sq_norms(g) for g in grads).sqrt()
            return [g * (1.0 / norms).clamp(max=1.0).view(-1, *[1] * (g.dim() - 1)) for g in grads]

        def clipped_sums(self, weigh):
            weigh(slice(None), [torch.zeros(self.examples) for _ in self.per_example(slice(None))])
            return [g.sum(0) for g in self.per_example(slice(None))]  # clipped already, so it says

    monkeypatch.setattr(clip_factors.LinearGrads, "joined", lambda uses: Apart(uses))
    assert found(setting(**made), steps=800).is_broken


def test_accounting_with_sigma_instead_of_sigma_over_the_root_of_the_number_of_layers(monkeypatch):
    made = {"model": layers(64, 16, 16, 10)}
    healthy = found(setting(**made), steps=800)
    assert not healthy.is_broken
    monkeypatch.setattr(Release, "multiplier", property(lambda self: self.sigma))
    broken = found(setting(**made), steps=800)
    assert broken.bounds == healthy.bounds  # the release is the same; what is claimed for it is not
    assert broken.proved == pytest.approx(audit.gaussian_epsilon(1.0, 1e-5))
    assert healthy.proved == pytest.approx(audit.gaussian_epsilon(math.sqrt(3), 1e-5))
    assert broken.is_broken
