"""How Gaussian the noise on a lattice is: 10^8 draws by chi-square and moments, tails counted beyond 4 to 9 sigma.

    python benchmarks/noise_quality.py --draws 1e8 --tail-draws 1e10 --out benchmarks/results/noise_quality.json

Draws are the kernel's, under a key from the operating system unless --seed is given. Tails beyond 6 sigma are counted
in --tail-draws draws. Those beyond 7 sigma (one draw in 4e11) and 9 sigma are counted among proposals of the sampler
that lie there and are low enough to be taken: the share of all proposals that are such ones is known exactly.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import description, write
from scipy import stats

from gradveil.clipping.backends import native
from gradveil.mechanism.noise import lattice

CHUNK = 1 << 22
BINS = 1000
MOMENTS = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170), 8: (105, 2016000)}  # mean, variance


class Draws:
    """The kernel's draws, chunk by chunk, each place once."""

    def __init__(self, key: bytes) -> None:
        self._key, self._next, self._room = key, 0, torch.empty(CHUNK, dtype=torch.float64)

    def __call__(self, count: int) -> np.ndarray[Any, Any]:
        """In standard deviations; valid until the next call."""
        kernels = native.kernels()
        assert kernels is not None, native.status()
        out = self._room[:count].zero_()
        kernels.add_noise(
            self._key, [(out, lattice.UNITS, 0)], divide_by=lattice.UNITS, starts=[self._next], threads=1, lattice=True
        )
        self._next += count
        return out.numpy()


def bulk(draws: Draws, count: int) -> dict[str, Any]:
    edges = stats.norm.ppf(np.linspace(0, 1, BINS + 1)[1:-1])
    counts, last, powers = np.zeros(BINS, np.int64), np.zeros(256, np.int64), dict.fromkeys(MOMENTS, 0.0)
    done, largest, pairs = 0, 0.0, np.zeros((20, 20))
    while done < count:
        z = draws(min(CHUNK, count - done))
        counts += np.bincount(np.searchsorted(edges, z), minlength=BINS)
        last += np.bincount(np.abs(z * lattice.UNITS).astype(np.uint64).astype(np.uint8), minlength=256)
        uniform = stats.norm.cdf(z[: 1 << 18])
        pairs += np.histogram2d(uniform[::2], uniform[1::2], bins=20, range=[[0, 1]] * 2)[0]
        for power in powers:
            powers[power] += float((z**power).sum())
        largest = max(largest, float(np.abs(z).max()))
        done += len(z)
    return {
        "draws": count,
        "chi_square": {"bins": BINS, "p": float(stats.chisquare(counts).pvalue)},
        "chi_square_of_last_byte": {"bins": 256, "p": float(stats.chisquare(last).pvalue)},
        "chi_square_of_neighbours": {"bins": 400, "p": float(stats.chisquare(pairs.ravel()).pvalue)},
        "moments": {
            str(power): {
                "found": total / count,
                "wanted": MOMENTS[power][0],
                "z_score": (total / count - MOMENTS[power][0]) / math.sqrt(MOMENTS[power][1] / count),
            }
            for power, total in powers.items()
        },
        "largest": largest,
    }


def counted_tails(draws: Draws, count: int) -> dict[str, Any]:
    found, done = dict.fromkeys((4.0, 5.0, 6.0), 0), 0
    while done < count:
        z = np.abs(draws(min(CHUNK, count - done)))
        beyond = z[z > 4.0]
        for sigma in found:
            found[sigma] += int((beyond > sigma).sum())
        done += len(z)
    rows = {}
    for sigma, seen in found.items():
        expected = 2 * float(stats.norm.sf(sigma)) * count
        p = 2 * min(float(stats.poisson.cdf(seen, expected)), float(stats.poisson.sf(seen - 1, expected)))
        rows[f"{sigma:g} sigma"] = {"found": seen, "expected": expected, "p": min(1.0, p)}
    return {"draws": count, "rows": rows}


def proposed_tails(generator: np.random.Generator, count: int) -> dict[str, Any]:
    table, rows = lattice.layers(), {}
    height, width = float(table.height[0]) * 2.0**-92, int(table.width[0])
    taken_of_all = math.sqrt(math.pi / 2) / (len(table.width) * lattice._AREA * 2.0**-92 / lattice.UNITS)
    for sigma in (6.0, 7.0, 8.0, 9.0):
        low = min(1.0, 1.01 * math.exp(-0.5 * sigma**2) / height)
        taken = 0
        for place, uniform in generator.random((count, 2)).tolist():
            share = (int((sigma + (12.0 - sigma) * place) * lattice.UNITS) << 116) // width
            number = int(uniform * low * 2**128)
            more = [share & (2**64 - 1), number >> 64, number & (2**64 - 1), 0]
            taken += lattice.decided((share >> 64) << 11, more) is not None
        stratum = low * (12.0 - sigma) / 12.0 / len(table.width)  # of all proposals, by sign and magnitude together
        found = taken / count * stratum / taken_of_all
        expected = 2 * float(stats.norm.sf(sigma))
        chance = expected * taken_of_all / stratum
        rows[f"{sigma:g} sigma"] = {
            "probability": found,
            "wanted": expected,
            "taken": taken,
            "of": count,
            "z_score": (taken - count * chance) / math.sqrt(count * chance * (1 - chance)),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=float, default=1e8)
    parser.add_argument("--tail-draws", type=float, default=1e10)
    parser.add_argument("--proposals", type=int, default=200_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    key = secrets.token_bytes(32) if given.seed is None else hashlib.sha256(str(given.seed).encode()).digest()
    draws = Draws(key)
    found = {
        **description("cpu", 1),
        "seed": given.seed,
        "bulk": bulk(draws, int(given.draws)),
        "counted_tails": counted_tails(draws, int(given.tail_draws)),
        "tails_of_proposals": proposed_tails(np.random.default_rng(list(key)), given.proposals),
    }
    for name in ("bulk", "counted_tails", "tails_of_proposals"):
        print(name, found[name], flush=True)
    if given.out is not None:
        write(given.out, found)


if __name__ == "__main__":
    main()
