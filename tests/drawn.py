"""Figures drawn without a browser: their marks with all that hovering says, and their words."""

from __future__ import annotations

import html
import re

import vl_convert

from rotoscope.report import Figure


def svg(figure: Figure, **chosen: str) -> str:
    """The figure as SVG, with drop-down lists set to these values."""
    spec = figure.chart.to_dict()
    known = {parameter["name"]: parameter for parameter in spec.get("params", [])}
    for name, value in chosen.items():
        options = known[name]["bind"]["options"]
        assert value in options, f"{name} offers {options}"
        known[name]["value"] = value
    return str(vl_convert.vegalite_to_svg(spec))


def marks(figure: Figure, role: str = "point", **chosen: str) -> list[dict[str, str]]:
    """What each mark of one kind (`point`, `bar`, `rect mark`, `line mark`, `area mark`) says, by title."""
    found = re.findall(rf'<path aria-label="([^"]*)"[^>]*aria-roledescription="{role}"', svg(figure, **chosen))
    said = [html.unescape(label).replace("−", "-") for label in found]
    return [dict(part.split(": ", 1) for part in label.split("; ") if ": " in part) for label in said]


def numbers(said: list[dict[str, str]], title: str) -> list[float]:
    """The values under one title; shares as such."""
    texts = [mark[title].replace(",", "") for mark in said if title in mark]
    return [float(text.rstrip("%")) / (100 if text.endswith("%") else 1) for text in texts]


def words(figure: Figure, **chosen: str) -> list[str]:
    """All words that are written in the figure."""
    return [html.unescape(text) for text in re.findall(r"<text [^>]*>([^<]*)</text>", svg(figure, **chosen))]
