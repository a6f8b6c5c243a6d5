"""Line charts as SVG, and which of them a report shows. No torch, no matplotlib.

A chart is text: its colours are CSS classes (``s0`` ... ``s7``), so that one drawing serves light, dark and print. A
run has the same colour and marker in every chart. At most ``POINTS`` points are drawn per line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from markupsafe import Markup, escape

from gradveil.accounting import default_view, is_noised, paper_curve, proved_curve
from gradveil.accounting._release_table import kinds, sigmas_of, steps_of
from gradveil.accounting._rounding import at_most
from gradveil.reports.facts import RunFacts

POINTS = 200
COLOURS = 8
METHODS = ("BaseC", "AdvC", "OptC", "zCDP", "MA")  # the five of the paper
_CURVE = 12  # points of the curve of the proved epsilon: each is a composition
_MARKS = 10  # markers per line: enough to tell lines apart without colour
_WIDTH, _HEIGHT = 330, 218
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 30, 42

_SHAPES = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0Z",  # circle
    "M-3 -3H3V3H-3Z",  # square
    "M0 -4L3.8 3H-3.8Z",  # triangle
    "M0 -4.2L4.2 0L0 4.2L-4.2 0Z",  # diamond
    "M0 4L3.8 -3H-3.8Z",  # triangle, upside down
    "M-1.2 -3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",  # plus
    "M-3.8 -1.7H3.8V1.7H-3.8Z",  # bar
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that are not finite leave a gap. ``style`` chooses colour and marker."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: int = 0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its title; ``svg`` is None where there is nothing to draw, and ``notes`` say why."""

    title: str
    svg: Markup | None
    notes: tuple[str, ...] = ()
    legend: tuple[tuple[str, Markup], ...] = ()  # only where the lines are not the runs


@dataclass(frozen=True, kw_only=True)
class Group:
    title: str
    note: str
    figures: tuple[Figure, ...]


# ---- drawing


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers within [low, high], at most ``most`` of them.

    >>> ticks(0, 1), ticks(3, 3)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [3.0])
    """
    if not high > low:
        return [float(low)]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * size for f in (1, 2, 5, 10, 20, 50) if (high - low) / (f * size) <= most - 1 + 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Powers of ten within [low, high], at most ``most`` of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, -(-(last - first + 1) // most))
    return [10.0**k for k in range(first, last + 1, every)]


def label(value: float) -> str:
    """A tick's number, short.

    >>> label(0.5), label(20000.0), label(1e-7), label(1e12)
    ('0.5', '20,000', '1e-7', '1e12')
    """
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    log: bool
    start: float  # where low is drawn
    end: float

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def is_log(values: Sequence[float]) -> bool:
    """Whether the range of the values spans more than two decades."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > 100


def _scale(values: Sequence[float], start: float, end: float, *, log: bool, tight: bool = False) -> _Scale:
    low, high = min(values), max(values)
    if log:
        return _Scale(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)), True, start, end)
    if tight and high > low:  # no margin: the last step ends the axis
        return _Scale(0.0 if 0 <= low < 0.5 * high else low, high, False, start, end)
    if high == low:
        low, high = (0.0, 1.25 * high) if high > 0 else (high - 1.0, high + 1.0)
    elif 0 <= low < 0.5 * high:
        low = 0.0
    margin = 0.05 * (high - low)
    return _Scale(low - (margin if low else 0.0), high + margin, False, start, end)


def _finite(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]


def thinned(count: int, most: int = POINTS) -> list[int]:
    """At most ``most`` indices below ``count``, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def mark(style: int) -> Markup:
    """A line's colour and marker, for legends and beside a run's name."""
    shape = _SHAPES[style % len(_SHAPES)]
    return Markup(
        f'<svg class="mark s{style % COLOURS}" viewBox="0 0 24 12" width="24" height="12" aria-hidden="true">'
        f'<path class="line" d="M1 6H23"/><path class="dot" transform="translate(12 6)" d="{shape}"/></svg>'
    )


def line_chart(lines: Sequence[Line], *, ident: str, title: str, x: str, y: str, log_x: bool = False) -> Markup | None:
    """The lines in one frame, or None where no point is finite. y is logarithmic where it spans two decades; x only if
    ``log_x`` allows it, because steps are counted. ``x`` and ``y`` are the axes' titles, with their units.
    """
    points = [point for line in lines for point in _finite(line)]
    if not points:
        return None
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    across = _scale(xs, _LEFT, _WIDTH - _RIGHT, log=log_x and is_log(xs), tight=True)
    up = _scale(ys, _HEIGHT - _BOTTOM, _TOP, log=is_log(ys))
    names = ", ".join(line.name for line in lines if _finite(line))
    about = (
        f"{y} from {label(min(ys))} to {label(max(ys))} over {x} from {label(min(xs))} to {label(max(xs))}: {names}."
    )
    body = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{ident}-t {ident}-d">',
        f'<title id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(about)}</desc>',
        f'<text class="axis" x="0" y="12">{escape(y)}{", log scale" if up.log else ""}</text>',
        f'<text class="axis end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">{escape(x)}',
        ", log scale</text>" if across.log else "</text>",
    ]
    for value in up.ticks:
        at = up(value)
        body.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        body.append(f'<text class="tick end" x="{_LEFT - 7}" y="{at + 4:.1f}">{label(value)}</text>')
    floor = _HEIGHT - _BOTTOM
    body.append(f'<path class="frame" d="M{_LEFT} {floor}H{_WIDTH - _RIGHT}"/>')
    for value in across.ticks:
        at = across(value)
        side = " end" if at > _WIDTH - _RIGHT - 12 else " middle"
        body.append(f'<path class="frame" d="M{at:.1f} {floor}v4"/>')
        body.append(f'<text class="tick{side}" x="{at:.1f}" y="{floor + 17}">{label(value)}</text>')
    body += [_drawn(line, across, up, x, y) for line in lines]
    return Markup("".join([*body, "</svg>"]))


def _read(name: str, value: float) -> str:
    """A coordinate in print; of a proved epsilon never less than it is."""
    return at_most(value) if "epsilon" in name else f"{value:.6g}" if name == "step" else f"{value:.4g}"


def _drawn(line: Line, across: _Scale, up: _Scale, x: str, y: str) -> str:
    kept = thinned(len(line.x))
    path, dots, pen_down = [], [], False
    shown = [i for i in kept if math.isfinite(line.x[i]) and math.isfinite(line.y[i])]
    marked = {shown[j] for j in _marked(len(shown), line.style)}
    for i in kept:
        if i not in shown:
            pen_down = False
            continue
        px, py = across(line.x[i]), up(line.y[i])
        path.append(f"{'L' if pen_down else 'M'}{px:.1f} {py:.1f}")
        pen_down = True
        if i in marked:
            told = escape(f"{line.name}: {y} {_read(y, line.y[i])} at {x} {_read(x, line.x[i])}")
            shape = _SHAPES[line.style % len(_SHAPES)]
            dots.append(
                f'<path class="dot" transform="translate({px:.1f} {py:.1f})" d="{shape}"><title>{told}</title></path>'
            )
    drawn = f'<path class="line" d="{"".join(path)}"/>' if path else ""
    return f'<g class="s{line.style % COLOURS}">{drawn}{"".join(dots)}</g>'


def _marked(count: int, style: int) -> list[int]:
    """Which points carry a marker: apart for each style, so that two lines on each other can both be seen."""
    if count <= _MARKS:
        return list(range(count))
    return [int((j + 0.382 * style % 1) * count / _MARKS) for j in range(_MARKS)]


# ---- what is drawn of runs

Points = tuple[Sequence[float] | np.ndarray[Any, Any], Sequence[float] | np.ndarray[Any, Any]]
_NOTHING: Points = ((), ())


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """The epsilons of one run after each of its releases, from the ledger alone."""

    proved: Points
    why_not: str | None  # nothing is proved
    published: dict[str, Points]


@dataclass(frozen=True, kw_only=True)
class _Run:
    name: str
    style: int
    facts: RunFacts
    spent: _Spent


_Values = Callable[[_Run], Points | str]  # or why there are none


WITHHELD = "left out: it follows the data while the noise does not, and showing it would undo what is proved."


def must_withhold(run: RunFacts) -> bool:
    """Whether S_t follows the data while the noise does not (l2-max at a fixed variance).

    The proof takes it that S_t stays secret; so must sigma_t, the fixed noise over S_t, and with it published epsilons.
    """
    releases = run.contents.releases if run.contents is not None else ()
    return any(release.scale_is_public and release.sensitivity_rule != "clip" for release, _ in kinds(releases))


def figures(named: Sequence[tuple[str, RunFacts]]) -> list[Group]:
    """The charts over the steps, the runs as lines. What a run has no values for is said under the chart."""
    runs = [_Run(name=name, style=i, facts=run, spent=_spent(run)) for i, (name, run) in enumerate(named)]
    share = "accuracy, share of the test set"
    noise = (
        _chart(runs, "Noise standard deviation", "std of the noise on the sum", _released("noise_std")),
        _chart(runs, "Clip bound C_t", "C_t, l2 norm", _released("clip")),
        _chart(runs, "Sensitivity S_t", "S_t, l2 norm", _released("sensitivity")),
        _chart(runs, "Noise scale sigma_t", "sigma_t", _released("sigma")),
    )
    if len(runs) == 1:
        epsilons: tuple[Figure, ...] = (_accountants(runs[0].spent),)
    else:
        proved = _chart(runs, "Epsilon, proved", "epsilon", lambda run: run.spent.why_not or run.spent.proved)
        published = (
            _chart(runs, f"Epsilon, {m} as published", "epsilon, not a guarantee", _published(m))
            for m in reversed(METHODS)
        )
        epsilons = (proved, *published)
    against_proved: _Values = lambda run: run.spent.why_not or _against(run.facts, run.spent.proved)  # noqa: E731
    against_ma: _Values = lambda run: _against(run.facts, run.spent.published.get("MA", _NOTHING))  # noqa: E731
    utility = (
        _chart(runs, "Test accuracy", share, lambda run: _looks(run.facts, "accuracy")),
        _chart(runs, "Training loss", "mean loss since the last evaluation", lambda run: _looks(run.facts, "loss")),
        _chart(runs, "Accuracy against proved epsilon", share, against_proved, x="proved epsilon"),
        _chart(runs, "Accuracy against published epsilon", share, against_ma, x="epsilon by MA, not a guarantee"),
    )
    return [
        Group(title="Noise and bounds", note=_NOISE_NOTE, figures=noise),
        Group(title="Privacy spent", note=_SPENT_NOTE, figures=epsilons),
        Group(title="Utility", note=_UTILITY_NOTE, figures=utility),
    ]


_NOISE_NOTE = (
    "As recorded in the ledger; the largest value over the clipping groups. C_t is the enforced bound, S_t the factor "
    "of sigma_t."
)
_SPENT_NOTE = (
    "Computed from the ledger, after each step taken: what is spent if it was fixed in advance to stop there. A run "
    "that stopped early may be charged for more, see its statement. The proved curve is by the statement's accountant, "
    "at some of the steps. The published curves are not guarantees."
)
_UTILITY_NOTE = (
    "Recorded during training. The loss is computed from the training data, and no epsilon covers it: check with your "
    "privacy team before sharing this page."
)


def _chart(runs: Sequence[_Run], title: str, y: str, of: _Values, *, x: str = "step") -> Figure:
    found = [(run, of(run)) for run in runs]
    lines = [_line(r.name, p, r.style) for r, p in found if not isinstance(p, str) and len(p[0])]
    notes = [f"{run.name}: {why}" if len(runs) > 1 else why.capitalize() for run, why in found if isinstance(why, str)]
    ident = "chart-" + "".join(c if c.isalnum() else "-" for c in title.lower())
    drawn = line_chart(lines, ident=ident, title=title, x=x, y=y, log_x=x != "step")
    return Figure(title=title, svg=drawn, notes=tuple(notes) or (() if drawn else ("There are no values.",)))


def _released(name: str) -> _Values:
    """A field of the releases, one by one; the largest of the groups."""

    def values(run: _Run) -> Points | str:
        contents = run.facts.contents
        if contents is None:
            return "no valid ledger."
        if not contents.releases:
            return "nothing was released yet." if run.facts.is_private else "no noise was added."
        if name in ("sensitivity", "sigma") and must_withhold(run.facts):
            return WITHHELD
        drawn = thinned(len(contents.releases), _MOST_VALUES)
        found = [getattr(contents.releases[i], name) for i in drawn]
        return [i + 1 for i in drawn], [max(value) if isinstance(value, tuple) else value for value in found]

    return values


_MOST_VALUES = 50_000  # of one line: far more than are drawn, and little memory


def _line(name: str, points: Points, style: int) -> Line:
    """Of at most :data:`_MOST_VALUES` of the points, evenly spread."""
    (x, y), kept = points, thinned(len(points[0]), _MOST_VALUES)
    return Line(name=name, x=[float(x[i]) for i in kept], y=[float(y[i]) for i in kept], style=style)


def _published(method: str) -> _Values:
    return lambda run: run.spent.published.get(method, _NOTHING)


def _looks(run: RunFacts, name: str) -> Points:
    """By step; a step that was redone after a crash counts as it was seen last."""
    found = {m["step"]: m.get(name) for m in run.metrics if _is_number(m.get("step"))}
    kept = sorted((float(step), float(value)) for step, value in found.items() if _is_number(value))
    return [s for s, _ in kept], [v for _, v in kept]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _against(run: RunFacts, epsilon: Points) -> Points:
    """Accuracy at each look against the epsilon that was spent by then."""
    if run.contents is None:
        return _NOTHING
    steps, accuracies = _looks(run, "accuracy")
    looked, after = {int(step) for step in steps}, dict[int, int]()
    for releases, step in enumerate(steps_of(run.contents.releases), start=1):
        if step + 1 in looked:
            after[step + 1] = releases
    counts = np.asarray(epsilon[0], dtype=np.int64)
    places = {n: int(np.searchsorted(counts, n)) for n in set(after.values())}
    spent = {n: float(epsilon[1][i]) for n, i in places.items() if i < len(counts) and counts[i] == n}
    pairs = [(spent.get(after.get(int(step), 0)), value) for step, value in zip(steps, accuracies, strict=True)]
    kept = [(e, v) for e, v in pairs if e is not None]
    return [e for e, _ in kept], [v for _, v in kept]


def _looked_at(run: RunFacts) -> list[int]:
    """After how many releases epsilon is computed: at some of the looks, after the first release and the last."""
    assert run.contents is not None
    total = len(run.contents.charged())
    after = {release.step + 1: i + 1 for i, release in enumerate(run.contents.releases)}
    looks = [after[int(step)] for step in _looks(run, "accuracy")[0] if int(step) in after]
    even = [1 + i * (total - 1) // (_CURVE - 1) for i in range(_CURVE)]
    chosen = [looks[i] for i in thinned(len(looks), _CURVE)] if looks else even
    return sorted({1, total, *chosen})


def _spent(run: RunFacts) -> _Spent:
    if run.contents is None or run.statement is None:
        return _Spent(proved=_NOTHING, why_not="no valid ledger.", published={})
    header, releases = run.contents.header, run.contents.charged()
    if header.guarantee == "none":
        return _Spent(proved=_NOTHING, why_not="not private.", published={})
    if not releases:
        return _Spent(proved=_NOTHING, why_not="nothing was released yet.", published={})
    proved = run.statement.proved
    neighbours, accountant = default_view(header.sampling)
    curve = proved_curve(header, releases, neighbours=neighbours, accountant=accountant, at=_looked_at(run))
    published: dict[str, Points] = {}
    if is_noised(header, releases) and not must_withhold(run):
        found = paper_curve(sigmas_of(releases), header.sample_rate, proved.delta, methods=METHODS)
        published = {m: (range(1, len(v) + 1), v) for m, v in found.items()}
    return _Spent(
        proved=(curve.steps, curve.epsilon),
        why_not=None if curve.reason is None else "nothing is proved.",
        published=published,
    )


def _accountants(spent: _Spent) -> Figure:
    """One run: the accountants are the lines."""
    named: Iterable[tuple[str, Points]] = [("proved", spent.proved), *spent.published.items()]
    lines = [_line(n, p, i) for i, (n, p) in enumerate(named) if len(p[0])]
    title = "Epsilon by accountant"
    drawn = line_chart(lines, ident="chart-accountants", title=title, x="step", y="epsilon")
    legend = tuple(
        (f"{line.name}{'' if line.name == 'proved' else ', as published'}", mark(line.style)) for line in lines
    )
    notes = () if spent.why_not is None else (f"Proved: {spent.why_not}",)
    return Figure(title=title, svg=drawn, notes=notes, legend=legend)
