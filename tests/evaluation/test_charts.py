from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from lockstep.evaluation.charts import Line, interval_chart, line_chart
from lockstep.evaluation.statistics import Estimate


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("text")]


def points(element: ElementTree.Element) -> np.ndarray:
    return np.array([pair.split(",") for pair in element.attrib["points"].split()], np.float64)


def test_a_line_is_drawn_where_its_values_are() -> None:
    x = np.linspace(0, 2_000_000, 11)
    svg = line_chart([Line("PPO", 0, (x, x / 1000))], "Environment frames", "Score")
    (line,) = parsed(svg).iter("polyline")
    drawn = points(line)
    assert (np.diff(drawn[:, 0]) > 0).all() and (np.diff(drawn[:, 1]) < 0).all()
    steps = np.diff(drawn, axis=0)
    assert np.allclose(steps, steps[0], atol=0.2)
    assert {"0", "500k", "1M", "1.5M", "2M"} <= set(words(svg)) and "Environment frames" in words(svg)


def test_everything_lies_within_the_picture() -> None:
    x = np.array([3.0, 4.0, 9.0])
    y = np.array([-21.0, 5.0, 19.0])
    line = Line("a", 0, (x, y), (y - 3, y + 30), ((x, y - 50),))
    root = parsed(line_chart([line], "x", "y"))
    width, height = (float(side) for side in root.attrib["viewBox"].split()[2:])
    shapes = [*root.iter("polyline"), *root.iter("polygon")]
    assert len(shapes) == 3
    for shape in shapes:
        drawn = points(shape)
        assert (drawn >= 0).all() and (drawn[:, 0] <= width).all() and (drawn[:, 1] <= height).all()


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    x = np.arange(10_000.0)
    (line,) = parsed(line_chart([Line("a", 0, (x, x))], "x", "y")).iter("polyline")
    drawn = points(line)
    assert len(drawn) < 300
    (short,) = parsed(line_chart([Line("a", 0, (x[[0, -1]], x[[0, -1]]))], "x", "y")).iter("polyline")
    np.testing.assert_allclose(drawn[[0, -1]], points(short))


@pytest.mark.parametrize("value", [0.0, 500.0, -21.0, 1e-4])
def test_a_constant_has_an_axis_too(value: float) -> None:
    svg = line_chart([Line("a", 0, (np.array([1.0, 2.0]), np.full(2, value)))], "x", "y")
    assert len(words(svg)) > 4 and "nan" not in svg


def test_ticks_can_be_told_apart() -> None:
    svg = line_chart([Line("a", 0, (np.array([1e6, 1.0004e6]), np.array([-20.51, -20.49])))], "x", "y")
    assert len(set(words(svg))) == len(words(svg))


def test_one_point_is_a_dot_and_no_point_is_said() -> None:
    one = np.array([1.0]), np.array([2.0])
    assert (
        line_chart([Line("a", 0, (np.full(9, 1.0), np.full(9, 2.0)), singles=(one, one))], "x", "y").count("dot") == 3
    )
    assert "<circle" in line_chart([Line("a", 0, (np.array([1.0]), np.array([2.0])))], "x", "y")
    assert "Nothing to draw" in line_chart([Line("a", 0, (np.empty(0), np.empty(0)))], "x", "y")


def test_the_ninth_line_is_dashed() -> None:
    x = np.array([0.0, 1.0])
    svg = line_chart([Line(str(number), number, (x, x)) for number in range(9)], "x", "y")
    assert re.findall(r'<g class="(c\d d\d)"', svg) == [*(f"c{number} d0" for number in range(8)), "c0 d1"]


def test_names_are_text_not_markup() -> None:
    x = np.array([0.0, 1.0])
    svg = line_chart([Line("a<b & c", 0, (x, x))], "x < y", '"y"')
    assert parsed(svg).attrib["aria-label"] == '"y" over x < y'
    assert next(parsed(svg).iter("title")).text == "a<b & c"


def test_intervals_are_drawn_to_scale() -> None:
    rows = [("a", 0, Estimate(1.0, (0.5, 2.0))), ("b", 1, Estimate(2.0, None))]
    root = parsed(interval_chart(rows, "IQM"))
    first, second = (float(dot.attrib["cx"]) for dot in root.iter("circle"))
    (bar,) = [path for path in root.iter("path") if path.attrib["class"] == "interval"]
    match = re.fullmatch(r"M([\d.]+) \d+H([\d.]+)", bar.attrib["d"])
    assert match
    low, high = float(match[1]), float(match[2])
    assert high == pytest.approx(second, abs=0.2) and (first - low) == pytest.approx((second - first) / 2, abs=0.2)
    assert [title.text for title in root.iter("title")] == ["a: 1 (0.5 to 2)", "b: 2"]
