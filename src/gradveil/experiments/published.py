"""The published tables as data: Wei & Liu, "Gradient Leakage Attack Resilient Deep Learning".

Figures as printed, misprints and roundings included: something to compare our own results with, never targets
to reach. Tables are numbered in the order in which they appear there; the first holds no results. Data sets and
strategies have the names they have in this project. Where nothing else is said, sigma is 6, C is 4, q is .01 and
delta is 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")

METHODS = ("BaseC", "AdvC", "OptC", "zCDP", "MA")
SETS = ("mnist", "fashion-mnist", "cifar10", "lfw", "purchase-10", "purchase-50")
IMAGES = SETS[:4]
CLIPS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
POLICIES = ("linear", "exponential", "cyclic")
FIXED_SIGMA = ("baseline", "dyn-s-decay", "dyn-s-l2max", "dyn-s")
DECAYING_SIGMA = ("dyn-sigma", "dyn-sigma-decay", "dyn-sigma-l2max", "dyn-s-sigma")
ATTACKED = ("non-private", "baseline", "quantile-clip", "adaclip", "dyn-s-sigma")
TIMED = ("non-private", *FIXED_SIGMA, "dyn-s-sigma")


class Leak(NamedTuple):
    """An attack on the gradients of the first step: mean iterations and MSE, and the share that succeeds."""

    iterations: float
    asr: float
    mse: float


class Spent(NamedTuple):
    """What each accountant says is spent, and after how many iterations."""

    epsilons: dict[str, float]
    iterations: int


class Target(NamedTuple):
    """A test accuracy, and what each strategy spends to reach it."""

    accuracy: float
    spent: dict[str, Spent]


class FixedVariance(NamedTuple):
    """The same with the noise's standard deviation fixed, where no iterations are printed."""

    accuracy: float
    epsilons: dict[str, dict[str, float]]


class Decay(NamedTuple):
    """A policy of noise decay: accuracies by strategy and accountant, and where each accountant's budget ends."""

    accuracies: dict[str, dict[str, float]]
    iterations: dict[str, int]


def _named(names: Iterable[K], *values: V) -> dict[K, V]:
    return dict(zip(names, values, strict=True))


def _by_clip(*rows: tuple[float, ...]) -> dict[str, dict[float, float]]:
    return _named(FIXED_SIGMA, *(_named(CLIPS, *row) for row in rows))


def _by_method(*rows: tuple[float, ...]) -> dict[str, dict[str, float]]:
    return _named(FIXED_SIGMA, *(_named(METHODS, *row) for row in rows))


def _spent(*row: float, iterations: int) -> Spent:
    return Spent(_named(METHODS, *row), iterations)


def _target(accuracy: float, *rows: tuple[int, tuple[float, ...]]) -> Target:
    return Target(accuracy, _named(FIXED_SIGMA, *(_spent(*row, iterations=n) for n, row in rows)))


def _decay(*rows: tuple[float, ...], iterations: tuple[int, ...]) -> Decay:
    accuracies = _named(DECAYING_SIGMA, *(_named(METHODS, *row) for row in rows))
    return Decay(accuracies, _named(METHODS, *iterations))


# fmt: off

# Table II: test accuracy without privacy. Table IV has a fourth digit for MNIST: .9892.
NON_PRIVATE: dict[str, float] = _named(SETS, 0.989, 0.875, 0.687, 0.766, 0.825, 0.667)

# Table III: [set][strategy], at most 300 attack iterations.
LEAKAGE: dict[str, dict[str, Leak]] = {
    "mnist": _named(
        ATTACKED,
        Leak( 11.5, 1.0,   1.50e-05),
        Leak( 13.4, 0.23,  0.547),
        Leak( 12.9, 0.64,  0.097),
        Leak( 12.6, 0.72,  0.033),
        Leak(300.0, 0.0,   0.886),
    ),
    "fashion-mnist": _named(
        ATTACKED,
        Leak( 12.4, 1.0,   2.59e-05),
        Leak( 14.1, 0.25,  0.588),
        Leak( 14.3, 0.67,  0.121),
        Leak( 14.1, 0.76,  0.041),
        Leak(300.0, 0.0,   0.904),
    ),
    "cifar10": _named(
        ATTACKED,
        Leak( 28.3, 0.973, 2.20e-04),
        Leak( 30.5, 0.16,  0.401),
        Leak( 30.5, 0.47,  0.203),
        Leak( 29.9, 0.58,  0.129),
        Leak(300.0, 0.0,   0.912),
    ),
    "lfw": _named(
        ATTACKED,
        Leak( 25.0, 1.0,   2.20e-04),
        Leak( 26.3, 0.13,  0.352),
        Leak( 27.1, 0.49,  0.229),
        Leak( 26.4, 0.61,  0.144),
        Leak(300.0, 0.0,   0.897),
    ),
}

# Table IV: [set][strategy][C], test accuracy.
SENSITIVITY: dict[str, dict[str, dict[float, float]]] = {
    #     C = 1      2      4      8     16     32
    "mnist": _by_clip(
        (0.945, 0.963, 0.960, 0.945, 0.915, 0.881),
        (0.948, 0.966, 0.964, 0.951, 0.931, 0.919),
        (0.959, 0.975, 0.977, 0.983, 0.975, 0.976),
        (0.955, 0.975, 0.978, 0.980, 0.978, 0.977),
    ),
    "fashion-mnist": _by_clip(
        (0.825, 0.832, 0.833, 0.831, 0.812, 0.765),
        (0.824, 0.834, 0.839, 0.837, 0.829, 0.822),
        (0.830, 0.840, 0.845, 0.844, 0.840, 0.840),
        (0.829, 0.841, 0.848, 0.845, 0.840, 0.840),
    ),
    "cifar10": _by_clip(
        (0.576, 0.595, 0.608, 0.588, 0.538, 0.397),
        (0.575, 0.596, 0.610, 0.592, 0.564, 0.507),
        (0.583, 0.603, 0.616, 0.609, 0.591, 0.592),
        (0.582, 0.604, 0.621, 0.612, 0.595, 0.595),
    ),
    "lfw": _by_clip(
        (0.704, 0.709, 0.692, 0.647, 0.595, 0.406),
        (0.692, 0.714, 0.703, 0.675, 0.643, 0.606),
        (0.715, 0.722, 0.738, 0.710, 0.683, 0.645),
        (0.711, 0.725, 0.749, 0.716, 0.685, 0.662),
    ),
    "purchase-10": _by_clip(
        (0.731, 0.734, 0.744, 0.739, 0.716, 0.683),
        (0.727, 0.738, 0.749, 0.744, 0.729, 0.721),
        (0.751, 0.766, 0.769, 0.763, 0.759, 0.761),
        (0.752, 0.768, 0.773, 0.770, 0.765, 0.766),
    ),
    "purchase-50": _by_clip(
        (0.549, 0.561, 0.571, 0.574, 0.556, 0.503),
        (0.545, 0.569, 0.577, 0.581, 0.579, 0.562),
        (0.571, 0.573, 0.591, 0.595, 0.587, 0.580),
        (0.573, 0.577, 0.596, 0.604, 0.591, 0.593),
    ),
}

# Table V: [set][method], epsilon of a whole run, one for the four strategies; accuracies are SENSITIVITY's at C = 4.
ACCOUNTING: dict[str, dict[str, float]] = {
    "mnist":         _named(METHODS, 123.354, 7.450, 6.740, 1.159, 0.823),
    "fashion-mnist": _named(METHODS, 123.354, 7.450, 6.740, 1.159, 0.823),
    "cifar10":       _named(METHODS, 123.354, 7.450, 6.740, 1.159, 0.823),
    "lfw":           _named(METHODS,  74.024, 5.503, 5.037, 0.893, 0.636),
    "purchase-10":   _named(METHODS,  61.689, 4.952, 4.546, 0.814, 0.580),
    "purchase-50":   _named(METHODS,  61.689, 4.952, 4.546, 0.814, 0.580),
}

# Table VI: [set], what reaching the baseline's accuracy costs at a fixed sigma.
TARGET_ACCURACY: dict[str, Target] = {
    "mnist": _target(
        0.960,
        (10000, (123.354, 7.450, 6.740, 1.159, 0.823)),
        ( 7996, ( 98.646, 6.518, 5.930, 1.034, 0.735)),
        ( 5419, ( 66.858, 5.188, 4.756, 0.848, 0.604)),
        ( 5137, ( 63.379, 5.029, 4.615, 0.825, 0.588)),
    ),
    "fashion-mnist": _target(
        0.833,
        (10000, (123.354, 7.450, 6.740, 1.159, 0.823)),
        ( 8124, (100.200, 6.578, 5.983, 1.042, 0.741)),
        ( 5826, ( 71.878, 5.411, 4.955, 0.880, 0.626)),
        ( 5532, ( 68.251, 5.250, 4.812, 0.857, 0.610)),
    ),
    "cifar10": _target(
        0.608,
        (10000, (123.354, 7.450, 6.740, 1.159, 0.823)),
        ( 8841, (109.044, 6.919, 6.280, 1.088, 0.773)),
        ( 6550, ( 80.809, 5.794, 5.294, 0.934, 0.664)),
        ( 6336, ( 78.169, 5.682, 5.195, 0.918, 0.653)),
    ),
    "lfw": _target(
        0.692,
        ( 6000, ( 74.024, 5.503, 5.037, 0.893, 0.636)),
        ( 5059, ( 62.417, 4.985, 4.576, 0.819, 0.583)),
        ( 3836, ( 47.331, 4.254, 3.919, 0.711, 0.508)),
        ( 3645, ( 44.975, 4.132, 3.809, 0.693, 0.495)),
    ),
    "purchase-10": _target(
        0.744,
        ( 5000, ( 61.689, 4.952, 4.546, 0.814, 0.580)),
        ( 4776, ( 58.926, 4.822, 4.430, 0.795, 0.567)),
        ( 3778, ( 46.615, 4.217, 3.886, 0.706, 0.504)),
        ( 3690, ( 45.530, 4.161, 3.835, 0.697, 0.498)),
    ),
    "purchase-50": _target(
        0.571,
        ( 5000, ( 61.689, 4.952, 4.546, 0.814, 0.580)),
        ( 4807, ( 59.308, 4.840, 4.446, 0.798, 0.568)),
        ( 4123, ( 50.871, 4.433, 4.080, 0.738, 0.526)),
        ( 3995, ( 49.292, 4.354, 4.009, 0.726, 0.518)),
    ),
}

# Table VII, the first four blocks: [set, C], what the baseline's accuracy costs at a fixed noise of 6 C.
FIXED_VARIANCE: dict[tuple[str, float], FixedVariance] = {
    ("mnist", 4.0): FixedVariance(0.9596, _by_method(
        (123.354, 7.450, 6.740, 1.159, 0.823),
        (105.173, 5.889, 5.736, 1.119, 0.806),
        ( 34.412, 1.866, 1.787, 0.436, 0.314),
        ( 32.529, 1.783, 1.694, 0.412, 0.307),
    )),
    ("mnist", 8.0): FixedVariance(0.945, _by_method(
        (123.354, 7.450, 6.740, 1.159, 0.823),
        (114.531, 6.552, 6.341, 0.994, 0.675),
        ( 28.828, 1.589, 1.511, 0.378, 0.283),
        ( 28.015, 1.426, 1.412, 0.366, 0.269),
    )),
    ("cifar10", 4.0): FixedVariance(0.608, _by_method(
        (123.354, 7.450, 6.740, 1.159, 0.823),
        (120.119, 7.006, 6.662, 1.153, 0.812),
        (116.717, 6.292, 6.330, 1.114, 0.790),
        (113.458, 5.557, 5.536, 1.044, 0.763),
    )),
    ("cifar10", 8.0): FixedVariance(0.588, _by_method(
        (123.354, 7.450, 6.740, 1.159, 0.823),
        (116.304, 6.316, 6.405, 1.137, 0.792),
        (109.405, 5.865, 5.886, 1.063, 0.754),
        (105.256, 5.849, 5.834, 1.022, 0.748),
    )),
}

# Table VII, the last block: the same for the accuracy of dyn-s-l2max.
LAST_SCENARIO: dict[tuple[str, float], FixedVariance] = {
    ("mnist", 4.0): FixedVariance(0.9773, _by_method(
        (523.375, 232.117, 258.635, 4.109, 21.174),
        (155.677,   8.575,   9.037, 1.370,  0.944),
        (123.354,   7.450,   6.740, 1.159,  0.823),
        (117.266,   7.036,   6.687, 1.149,  0.806),
    )),
}

# Table VIII, the block of a fixed sigma: [strategy], accuracy on MNIST after 10000 iterations.
NOISE_DECAY_FIXED: dict[str, float] = _named(FIXED_SIGMA, 0.9596, 0.9639, 0.9773, 0.9778)

# Table VIII, the other blocks: [policy], accuracy on MNIST where each accountant reaches ACCOUNTING["mnist"].
NOISE_DECAY: dict[str, Decay] = {
    "linear": _decay(
        (0.9620, 0.9614, 0.9608, 0.9618, 0.9614),
        (0.9673, 0.9650, 0.9641, 0.9653, 0.9649),
        (0.9788, 0.9780, 0.9775, 0.9781, 0.9778),
        (0.9791, 0.9783, 0.9779, 0.9783, 0.9782),
        iterations=(9646, 9481, 8908, 9494, 9450),
    ),
    "exponential": _decay(
        (0.9616, 0.9604, 0.9597, 0.9608, 0.9603),
        (0.9681, 0.9652, 0.9647, 0.9665, 0.9665),
        (0.9790, 0.9775, 0.9775, 0.9786, 0.9781),
        (0.9803, 0.9781, 0.9781, 0.9789, 0.9787),
        iterations=(9678, 9311, 8955, 9553, 9501),
    ),
    "cyclic": _decay(
        (0.9601, 0.9599, 0.9596, 0.9599, 0.9599),
        (0.9652, 0.9644, 0.9641, 0.9648, 0.9645),
        (0.9784, 0.9779, 0.9776, 0.9781, 0.9779),
        (0.9787, 0.9781, 0.9779, 0.9785, 0.9784),
        iterations=(8019, 7724, 7251, 7993, 7876),
    ),
}

# Table IX: [policy], what .9596 on MNIST costs dyn-s-sigma; its rows of a fixed sigma are TARGET_ACCURACY["mnist"].
NOISE_DECAY_TARGET: dict[str, Spent] = {
    "linear":      _spent(51.365, 4.538, 4.501, 0.561, 0.459, iterations=5532),
    "exponential": _spent(48.027, 4.017, 3.962, 0.537, 0.453, iterations=5541),
    "cyclic":      _spent(56.776, 4.703, 4.667, 0.683, 0.572, iterations=5493),
}

# Table X: [set][strategy], seconds per iteration; "purchase" stands for both of its sets.
SECONDS: dict[str, dict[str, float]] = {
    "mnist":         _named(TIMED, 0.138, 1.63,  1.70,  1.71,  1.72,  1.72),
    "fashion-mnist": _named(TIMED, 0.144, 1.68,  1.72,  1.72,  1.74,  1.74),
    "cifar10":       _named(TIMED, 0.504, 1.80,  1.83,  1.83,  1.84,  1.85),
    "lfw":           _named(TIMED, 0.069, 0.149, 0.152, 0.153, 0.155, 0.155),
    "purchase":      _named(TIMED, 0.024, 0.125, 0.131, 0.131, 0.132, 0.132),
}

# Table XI: [strategy][set], accuracy and seconds per iteration.
ADAPTIVE: dict[str, dict[str, tuple[float, float]]] = {
    "baseline":      _named(IMAGES, (0.960, 1.63), (0.833, 1.68), (0.608, 1.80), (0.692, 0.149)),
    "quantile-clip": _named(IMAGES, (0.971, 2.66), (0.846, 2.75), (0.614, 2.92), (0.733, 0.304)),
    "adaclip":       _named(IMAGES, (0.969, 1.81), (0.843, 1.84), (0.611, 1.94), (0.725, 0.185)),
    "dyn-s-sigma":   _named(IMAGES, (0.978, 1.72), (0.848, 1.74), (0.621, 1.85), (0.749, 0.155)),
}

# fmt: on
