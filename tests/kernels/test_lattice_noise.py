"""Noise on a lattice: tables and decisions against exact values, its distribution, and the attack it is made for."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from gradveil.clipping.backends import native
from gradveil.errors import ConfigError
from gradveil.mechanism.noise import lattice
from gradveil.mechanism.noise.lattice import UNITS
from gradveil.mechanism.noise.streams import NoiseSource, SecretKey, Shard

needs_kernel = pytest.mark.skipif(native.kernels() is None, reason=native.status())
KEY = bytes(range(32))
SOUND = 1e-6  # keys are fixed here: a sound generator fails never or always
TABLE = lattice.layers()


def draws(count, *, start=0, tensor=0, key=KEY, threads=1):
    """In standard deviations; of the kernel where there is one."""
    if native.kernels() is None:
        return lattice.draws(key, [(tensor, start, count)])[0] / UNITS
    out = torch.zeros(count, dtype=torch.float64)
    native.kernels().add_noise(
        key, [(out, UNITS, tensor)], divide_by=1.0, starts=[start], threads=threads, lattice=True
    )
    return out.numpy() / UNITS


@pytest.fixture(autouse=True)
def precise():
    with mpmath.workprec(200):
        yield


def density(n):
    return mpmath.exp(-((mpmath.mpf(int(n)) / 2**32) ** 2) / 2)


# ---- tables and decisions, against exact values


def test_layers_cover_the_density_and_lie_under_it_where_they_say_so():
    unit = mpmath.mpf(2) ** -92
    for i in range(2048):
        bottom, top = TABLE.bottom[i] * unit, (TABLE.bottom[i] + TABLE.height[i]) * unit
        if i:  # the first reaches to the end of all
            assert density(TABLE.width[i]) < bottom - mpmath.mpf(2) ** -60
        assert TABLE.inner[i] == 0 or density(TABLE.inner[i]) > top + mpmath.mpf(2) ** -60
        assert (TABLE.inside[i] - 1.0) * TABLE.width[i] <= TABLE.inner[i]
        assert 0 <= lattice._AREA - TABLE.height[i] * int(TABLE.width[i]) < int(TABLE.width[i])
    assert TABLE.bottom[-1] + TABLE.height[-1] >= 2**92  # the top of the density
    assert TABLE.width[0] == 12 * 2**32


def test_tables_are_the_same_everywhere():
    """They are computed with the machine's logarithm; this is what they are, whatever it is."""
    digest = hashlib.sha256(TABLE.width.astype("<f8").tobytes()).hexdigest()
    assert digest == "ba6ab978fa11f17bd67d1bff49cf7315a6d50e10aabdbdf6f9c7c8668fd581e1"
    if native.kernels() is not None:
        assert native.kernels().lattice_layers() == TABLE.width.astype(int).tolist()


def test_the_density_is_right_to_113_bits():
    assert int(mpmath.log(2) * 2**120) == lattice._LN_2
    generator = np.random.default_rng(0)
    places = [0, 1, 2**32, 12 * 2**32, *generator.integers(0, 12 * 2**32, 500).tolist()]
    for n in places:
        assert abs(lattice.density(n * n) - density(n) * 2**120) < 2**7


def words_for(layer, n, *, negative=False):
    """The words that propose n: a share of the layer's width in the middle of its cell."""
    share = (n << 116) // int(TABLE.width[layer])
    return layer | (share >> 64) << 11 | int(negative) << 63, share & (2**64 - 1)


@pytest.mark.parametrize("negative", [False, True])
def test_a_proposal_is_taken_with_the_right_probability_to_90_bits(negative):
    generator = np.random.default_rng(1)
    sigmas = [4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    cases = [(0, int(s * 2**32)) for s in sigmas]  # the tail is all in the first layer
    for layer in [*range(1, 2047, 23), 2046, 2047]:
        n = int(generator.integers(TABLE.inner[layer], max(1, int(TABLE.width[layer]) - 600)))
        cases.append((layer, n))
    for layer, n in cases:
        word, rest = words_for(layer, n, negative=negative)
        wanted = (density(n) * 2**92 - TABLE.bottom[layer]) / TABLE.height[layer]
        for away in (-(mpmath.mpf(2) ** -90), mpmath.mpf(2) ** -90):
            uniform = int((wanted + away) * 2**128)
            if 0 <= uniform < 2**128:
                found = lattice.decided(word, [rest, uniform >> 64, uniform & (2**64 - 1), 0])
                assert found == (None if away > 0 else -n if negative else n)
    word, rest = words_for(1000, int(TABLE.width[1000]) - 1)  # beyond the density: never
    assert lattice.decided(word, [rest, 0, 0, 0]) is None


def test_the_first_word_decides_only_what_no_further_bits_could_change():
    """Values of the fast path are those of exact arithmetic, for all the bits that may follow."""
    words = lattice.chacha12(KEY, np.zeros(16, np.uint32), np.arange(16, dtype=np.uint64), 0)
    bits = np.ascontiguousarray(words).reshape(-1).view(np.uint64).tolist()
    values, left = lattice._by_first_words(KEY, np.zeros(1, np.uint32), np.zeros(1, np.uint64))
    for place, word in enumerate(bits):
        if place not in left:
            for rest in (0, 2**64 - 1):
                assert lattice.decided(word, [rest, 2**64 - 1, 2**64 - 1, 0]) == values[0, place]


# ---- the two implementations


@needs_kernel
@pytest.mark.parametrize(("start", "count"), [(0, 100_000), (0, 1), (127, 2), (12_345, 3000), (2**36 + 5, 300), (0, 0)])
def test_numpy_and_the_kernel_draw_the_same_bits(start, count):
    mine = draws(count, start=start, tensor=7) * UNITS
    assert np.array_equal(mine, lattice.draws(KEY, [(3, 0, 5), (7, start, count), (8, 1, 200)])[1])
    if start == 0:
        assert np.array_equal(mine, draws(count, tensor=7, threads=3) * UNITS)


@pytest.mark.parametrize("dtypes", [[torch.float32] * 4, [torch.float64] * 4, [torch.float32, torch.float64] * 2])
def test_gradients_get_the_same_noise_with_and_without_kernels(dtypes, monkeypatch):
    shapes, stds = [(300,), (70, 41), (), (0,)], [0.5, 2.0, 1e-3, 1.0]
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(s, generator=generator, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]

    def noised():
        grads = [g.clone() for g in before]
        versions = [g._version for g in grads]
        source = NoiseSource(SecretKey(3), 4)
        source.add_on_lattice(grads, stds, divide_by=3.0)
        assert all(g._version > v for g, v in zip(grads, versions, strict=True))  # torch is told
        return [*grads, torch.tensor(source.noised([1.5, -2.0], 3.0, sensitivity=1.0))]

    found = noised()
    monkeypatch.setattr(native, "kernels", lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(found, noised(), strict=True))


def test_shards_half_precision_and_strides_get_the_noise_of_their_places():
    whole = torch.linspace(-1, 1, 1000)
    noised = whole.clone()
    NoiseSource(SecretKey(3), 4).add_on_lattice([noised], [2.0], divide_by=4.0)
    parts = [whole[:300].clone(), whole[300:].clone()]
    for part, start in zip(parts, (0, 300), strict=True):
        shard = Shard(start, len(part), 1000)
        NoiseSource(SecretKey(3), 4).add_on_lattice([part], [2.0], divide_by=4.0, shards=[shard])
    assert torch.equal(torch.cat(parts), noised)
    half = whole.to(torch.bfloat16)
    NoiseSource(SecretKey(3), 4).add_on_lattice([half], [2.0], divide_by=4.0)
    assert torch.allclose(half.float(), noised, rtol=2**-7, atol=2**-7)
    turned = whole.view(25, 40).t().contiguous().t()
    assert not turned.is_contiguous()
    NoiseSource(SecretKey(3), 4).add_on_lattice([turned], [2.0], divide_by=4.0)
    assert torch.equal(turned.reshape(-1), noised)
    silent = whole.clone()
    NoiseSource(SecretKey(3), 4).add_on_lattice([silent], [0.0], divide_by=4.0)
    assert torch.equal(silent, whole / 4.0)


# ---- the distribution


def test_a_million_draws_are_normal_down_to_the_last_bits():
    z = draws(1_000_000)
    assert stats.kstest(z, "norm").pvalue > SOUND
    edges = stats.norm.ppf(np.linspace(0, 1, 501)[1:-1])
    counts = np.bincount(np.searchsorted(edges, z), minlength=500)
    assert stats.chisquare(counts).pvalue > SOUND
    for moment, wanted, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs((z**moment).mean() - wanted) < 5 * math.sqrt(spread / len(z))
    n = np.abs(z * UNITS).astype(np.uint64)
    for shift in (0, 8, 16):  # whole numbers of units: every one of their bits is random
        assert stats.chisquare(np.bincount((n >> np.uint64(shift)).astype(np.uint8), minlength=256)).pvalue > SOUND
    assert np.array_equal(n, np.abs(z * UNITS))
    shares = np.histogram2d(np.abs(z) * UNITS % 1024, z, bins=(8, [-9, -1, 0, 1, 9]))[0]
    assert stats.chi2_contingency(shares).pvalue > SOUND  # the last bits tell nothing of the first
    for apart in (1, 8, 16, 64, 127, 128, 4096):
        for f in (np.sign, np.abs, lambda v: v):
            assert abs(np.corrcoef(f(z[:-apart]), f(z[apart:]))[0, 1]) * math.sqrt(len(z)) < 5.5


@pytest.mark.parametrize("sigma", [5.0, 6.0, 7.0, 9.0])
def test_tails_are_as_heavy_as_they_should_be(sigma):
    """By proposals of the first layer that lie between sigma and sigma + 1, and low enough to be taken at all.

    The share of all proposals that are such ones is known exactly: so tails are counted that no million draws reach.
    """
    generator = np.random.default_rng(2)
    count, height = 20_000, float(TABLE.height[0]) * 2.0**-92
    low = min(1.0, 1.01 * math.exp(-0.5 * sigma**2) / height)  # above, none is taken
    taken = 0
    for share, uniform in generator.random((count, 2)).tolist():
        word, rest = words_for(0, int((sigma + share) * UNITS))
        number = int(uniform * low * 2**128)
        taken += lattice.decided(word, [rest, number >> 64, number & (2**64 - 1), 0]) is not None
    accepted = math.sqrt(math.pi / 2) / (2048 * lattice._AREA * 2.0**-92 / UNITS)  # of all proposals
    expected = 2 * (stats.norm.sf(sigma) - stats.norm.sf(sigma + 1)) * accepted * 2048 * 12 / low
    assert abs(taken - count * expected) < 5 * math.sqrt(count * expected * (1 - expected))


def test_steps_tensors_and_keys_have_noise_of_their_own():
    other = bytes([1]) + KEY[1:]
    columns = [draws(20_000), draws(20_000, tensor=1), draws(20_000, key=other), draws(20_000, start=20_000)]
    for step in (0, 1):
        source = NoiseSource(SecretKey(5), step)
        columns += [source.lattice_draws([20_000]).numpy() / UNITS for _ in range(2)]
        columns.append(np.array(source.noised([0.0] * 20_000, 1.0, sensitivity=1e4)))
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 5.5 / math.sqrt(20_000)


# ---- rounding, and the noise that allows for it


@given(some.floats(-1e6, 1e6, width=32), some.floats(1e-6, 1e6), some.floats(1.0, 1e5))
def test_what_is_stored_is_a_whole_number_of_units_next_to_the_gradient(x, std, batch):
    x = max(-1e5 * std, min(1e5 * std, x))
    found = lattice.noised(torch.tensor([x], dtype=torch.float64), torch.tensor([0.0]), std, divide_by=batch)
    units = Fraction(UNITS / std)
    whole = round(Fraction(float(found)) * Fraction(batch) * units)
    assert abs(whole - Fraction(x) * units) <= Fraction(3, 4)
    assert float(found) == whole * (std / UNITS / batch)


@given(some.floats(1e-3, 1e3), some.floats(1e-3, 1e3), some.integers(1, 10**9))
def test_wider_noise_hides_the_rounding(std, bound, coordinates):
    if std / bound * math.sqrt(coordinates) > UNITS / 8:
        with pytest.raises(ConfigError, match="too coarse"):
            lattice.widened(std, sensitivity=bound, coordinates=coordinates)
        return
    wide = lattice.widened(std, sensitivity=bound, coordinates=coordinates)
    moved = bound * (1 + 0.999 * lattice.MARGIN) + 1.5 * wide / UNITS * math.sqrt(coordinates)
    assert moved / wide <= bound / std
    assert wide <= std * (1 + 1.01 * lattice.MARGIN + 2.1 * std / bound * math.sqrt(coordinates) / UNITS)
    assert lattice.widened(0.0, sensitivity=bound, coordinates=coordinates) == 0.0


def test_sums_beyond_all_measure_are_cut_off_and_nan_is_seen():
    x = torch.tensor([1e30, -1e30, float("inf"), float("nan")])
    NoiseSource(SecretKey(1), 0).add_on_lattice([x], [1.0], divide_by=1.0)
    assert x[:3].tolist() == pytest.approx([2**19, -(2**19), 2**19], rel=1e-4)
    assert math.isnan(x[3])


# ---- the attack of Mironov (2012), on the last bits


def last_bit(value):
    """The exponent of the last bit that is set."""
    mantissa, exponent = math.frexp(struct.unpack("<f", struct.pack("<f", value))[0])
    whole = int(mantissa * 2**24)
    return exponent - 24 + (whole & -whole).bit_length() - 1 if whole else None


def only_one_side_can_give(add, count=40_000):
    """How often something is released for sum 0 that is never released for sum 1, and the other way round.

    What is looked at is the exponent of the last bit, for values around 1/2, which both sums give nearly alike: noise
    hides whether the sum was 0 or 1 up to a factor of e^0.8 there.
    """
    seen = []
    for step, x in enumerate((0.0, 1.0)):
        grads = torch.full((count,), x)
        getattr(NoiseSource(SecretKey(step), 0), add)([grads], [1.0], divide_by=1.0)
        near = grads[(grads - 0.5).abs() < 0.75]
        found = np.array([last_bit(v) for v in near.tolist() if v])
        seen.append(found)
    values = np.unique(np.concatenate(seen))
    counts = np.array([[(side == v).sum() for v in values] for side in seen])
    return int(counts[0, counts[1] == 0].sum()), int(counts[1, counts[0] == 0].sum()), counts


@needs_kernel
def test_the_attack_on_the_last_bits_sees_through_noise_in_floating_point():
    from_zero, from_one, _ = only_one_side_can_give("add_to")
    assert from_zero > 1000  # each of them proves that the sum was not 1, whatever epsilon says
    assert from_one == 0


def test_the_attack_on_the_last_bits_does_not_see_through_noise_on_a_lattice():
    from_zero, from_one, counts = only_one_side_can_give("add_on_lattice")
    assert from_zero + from_one < 20  # the rarest bits of all
    common = counts[:, counts.sum(axis=0) > 400]
    ratio = common[0] / common[1]
    assert len(ratio) > 5 and ratio.max() < 2.5 and ratio.min() > 1 / 2.5  # e^0.8, and chance


def test_every_release_of_one_sum_is_one_of_its_neighbour_too():
    """In whole units: what is released is a whole number whatever the sum was, and noise reaches each of them."""
    for x in (0.0, 1.0, 0.3, 1e-9):
        grads = torch.full((5000,), x, dtype=torch.float64)
        NoiseSource(SecretKey(1), 0).add_on_lattice([grads], [1.0], divide_by=1.0)
        units = grads * UNITS
        assert torch.equal(units, units.round())
        assert stats.chisquare(np.bincount((units.long() & 255).numpy(), minlength=256)).pvalue > SOUND
