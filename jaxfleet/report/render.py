"""Renders a report as one HTML file that needs no network.

The page's script and style are in the file, and a policy in its head lets nothing else run or
load: not even text of a program that a mistake in the script would take for markup.
"""

import base64
import hashlib
from html import escape
from importlib.resources import files

from jaxfleet.observability import printable
from jaxfleet.report.model import Report
from jaxfleet.report.serialization import report_json

_SCRIPTS = (
    "page_model.js",
    "page_parts.js",
    "page_addresses.js",
    "page_views.js",
    "page_operators.js",
    "page_scopes.js",
    "page_boxes.js",
    "page_layout.js",
    "page_graph.js",
    "page_costs.js",
    "page_card.js",
    "page_print.js",
    "page.js",
)
_ESCAPES = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&"}


def render(report: Report) -> str:
    """Returns the page."""
    style, script = _part("page.css"), "\n".join(map(_part, _SCRIPTS))
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": escape(printable(report.title)),
        "STYLE": style,
        "DATA": report_json(report).translate(_ESCAPES),
        "SCRIPT": script,
    }
    page = _part("page.html")
    found = []
    for text in page.split("{{"):
        name, closed, rest = text.partition("}}")
        found += [parts[name], rest] if closed else [text]
    return "".join(found)


def _part(name: str) -> str:
    return (files("jaxfleet.report") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
