"""Queries of dashboards and alert rules, resolved against what a service exports."""

from __future__ import annotations

import re
from typing import Any

from sparse_attn.serving.exposition import Sample

Samples = list[Sample]

SUM = re.compile(r"sum(?: by \((?P<by>[^)]*)\))? \(rate\((?P<selector>[^()]*)\[[^\]]*\]\)\)")
AVERAGE = re.compile(r"avg by \((?P<by>[^)]*)\) \((?P<selector>[^()]*)\)")
QUANTILE = re.compile(r"histogram_quantile\([\d.]+, (?P<inner>.*)\)$")
SELECTOR = re.compile(r"(?P<name>\w+)(?:\{(?P<matchers>[^}]*)\})?$")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def select(selector: str, found: Samples) -> Samples:
    """The samples that a selector matches. Variables of a dashboard match everything."""
    match = SELECTOR.match(selector)
    assert match, f"no selector: {selector}"
    matchers = MATCHER.findall(match["matchers"] or "")
    assert len(matchers) == (match["matchers"] or "").count("="), selector

    def fits(labels: dict[str, str]) -> bool:
        for name, how, value in matchers:
            pattern = ".*" if value.startswith("$") else value if how == "=~" else re.escape(value)
            if not re.fullmatch(pattern, labels.get(name, "")) or name not in labels:
                return False
        return True

    matched = [sample for sample in found if sample[0] == match["name"] and fits(sample[1])]
    assert matched, f"nothing exported matches {selector}"
    # each alternative of a pattern is there, too
    for name, how, value in matchers:
        if how == "=~" and not value.startswith("$"):
            assert {labels[name] for _, labels, _ in matched} == set(value.split("|")), selector
    return matched


def resolve(query: str, found: Samples) -> Any:
    """The value of a query, counters standing for their rates, all groups added. Fails if something is missing."""

    def value(match: re.Match[str]) -> str:
        matched = select(match["selector"], found)
        for label in filter(None, re.split(r",\s*", match["by"] or "")):
            assert all(label in labels for _, labels, _ in matched), f"{label} is no label of {match['selector']}"
        return repr(sum(number for _, _, number in matched))

    quantile = QUANTILE.match(query)
    if quantile:
        query = quantile["inner"]
    left = AVERAGE.sub(value, SUM.sub(value, query))
    if left[0].isalpha():
        return sum(number for _, _, number in select(left, found))
    assert re.fullmatch(r"[\d.e+\-*/<>() ]+", left), f"not resolved: {left}"
    try:
        return eval(left)
    except ZeroDivisionError:
        return None
