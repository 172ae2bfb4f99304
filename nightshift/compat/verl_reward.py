"""The reward of an imported verl configuration that names none: the answer is compared with the ground truth."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKED = re.compile(r"####\s*(.+)")
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def score(response: str, ground_truth: str) -> float:
    """1.0 where the response's answer is the ground truth, else 0.0.

    The answer is what stands behind the last ``####``, else in the last ``\\boxed{}``, else the last number where the
    ground truth is a number, else the whole response.
    """
    wanted = _plain(str(ground_truth))
    if marked := _MARKED.findall(response):
        found = marked[-1]
    elif boxed := _BOXED.findall(response):
        found = boxed[-1]
    elif _NUMBER.fullmatch(wanted) and (numbers := _NUMBER.findall(response)):
        found = numbers[-1]
    else:
        found = response
    found = _plain(found)
    try:
        return float(float(found) == float(wanted))
    except ValueError:
        return float(found == wanted)


def _plain(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".").strip()
