"""Charts: ticks, scales, gaps, and what is drawn of odd data."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from gradveil.reports.charts import POINTS, Line, is_log, label, line_chart, log_ticks, mark, thinned, ticks

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*lines, **settings):
    svg = line_chart(lines, **{"ident": "c", "title": "T", "x": "step", "y": "value", **settings})
    return svg if svg is None else ElementTree.fromstring(str(svg).replace("<svg", f'<svg xmlns="{SVG[1:-1]}"', 1))


def texts(svg, kind):
    return [t.text for t in svg.iter(f"{SVG}text") if kind in t.get("class").split()]


def paths(svg, kind):
    return [p for p in svg.iter(f"{SVG}path") if p.get("class") == kind]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.07), (-3, 4), (1, 10_000), (0.999, 1.001), (1e-9, 3e-9), (12.3, 98_765.4)]
)
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-12 <= t <= high * (1 + 1e-12) for t in found)
    steps = {round((b - a) / (found[1] - found[0]), 6) for a, b in itertools.pairwise(found)}
    assert steps == {1.0}
    digits = f"{found[1] - found[0]:.3e}"[0]
    assert digits in "125"


def test_log_ticks_are_powers_of_ten_and_few():
    assert log_ticks(0.01, 1000) == [10.0**k for k in range(-2, 4)]
    assert len(log_ticks(1e-12, 1e12)) <= 6


def test_labels_of_ticks_differ():
    assert len({label(t) for t in ticks(0.9991, 1.0013)}) == len(ticks(0.9991, 1.0013))


def test_y_is_logarithmic_where_it_spans_more_than_two_decades_and_steps_never():
    line = Line(name="a", x=[1, 10_000], y=[1.0, 101.0])
    assert is_log(line.y)
    assert not is_log([1.0, 100.0])
    assert not is_log([0.0, 1e6])
    svg = drawn(line)
    assert "value, log scale" in texts(svg, "axis")
    assert "step" in texts(svg, "axis")
    assert "step, log scale" in texts(drawn(line, log_x=True), "axis")


def test_nothing_to_draw_is_none():
    assert drawn() is None
    assert drawn(Line(name="a", x=[], y=[])) is None
    assert drawn(Line(name="a", x=[1, 2], y=[math.nan, math.inf])) is None


def test_a_single_point_is_a_marker():
    svg = drawn(Line(name="a", x=[5], y=[0.3]))
    assert len(paths(svg, "dot")) == 1
    assert "L" not in paths(svg, "line")[0].get("d")


def test_a_constant_line_has_a_frame_around_it():
    svg = drawn(Line(name="a", x=[1, 2, 3], y=[4.0, 4.0, 4.0]))
    assert "4" in texts(svg, "tick")
    for values in ([0.0, 0.0], [-2.0, -2.0]):
        assert drawn(Line(name="a", x=[1, 2], y=values)) is not None


def test_what_is_not_finite_leaves_a_gap():
    svg = drawn(Line(name="a", x=[1, 2, 3, 4, 5], y=[1.0, 2.0, math.nan, 2.0, math.inf]))
    assert paths(svg, "line")[0].get("d").count("M") == 2
    assert not re.search("nan|inf", ElementTree.tostring(svg, encoding="unicode"))


def test_at_most_two_hundred_points_the_ends_among_them():
    svg = drawn(Line(name="a", x=range(10_000), y=[float(i) for i in range(10_000)]))
    assert len(re.findall("[ML]", paths(svg, "line")[0].get("d"))) <= POINTS
    assert thinned(10_000)[0] == 0 and thinned(10_000)[-1] == 9999
    assert thinned(3) == [0, 1, 2]


def test_everything_lies_inside_the_frame():
    svg = drawn(Line(name="a", x=range(50), y=[math.sin(i) for i in range(50)]))
    width, height = (float(v) for v in svg.get("viewBox").split()[2:])
    for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", paths(svg, "line")[0].get("d")):
        assert 0 <= float(x) <= width and 0 <= float(y) <= height


def test_it_can_be_read_aloud_and_names_are_escaped():
    svg = drawn(Line(name="<script>alert(1)</script>", x=[1, 2], y=[1.0, 2.0]), title="A & B")
    assert svg.find(f"{SVG}title").text == "A & B"
    assert "<script>" in svg.find(f"{SVG}desc").text  # text, not an element
    assert svg.get("aria-labelledby") == "c-t c-d"
    assert svg.find(f".//{SVG}script") is None


def test_lines_on_each_other_keep_their_markers_apart():
    both = [Line(name=str(s), x=range(100), y=[1.0 + i for i in range(100)], style=s) for s in (0, 1)]
    places = [{d.get("transform") for d in g.iter(f"{SVG}path")} - {None} for g in drawn(*both).iter(f"{SVG}g")]
    assert not places[0] & places[1]


def test_colours_go_through_css():
    text = str(mark(3)) + str(line_chart([Line(name="a", x=[1], y=[1.0])], ident="c", title="t", x="x", y="y"))
    assert "#" not in text and "rgb" not in text
