"""The built site asks no other machine for anything, and has every page and public name."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import jaxfleet
from tests.docs.blocks import ROOT, pages

pytestmark = [
    pytest.mark.grid,  # a build takes longer than a test may
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs"),
]
# Tags whose address the browser asks for when the page opens.
_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site() -> Path:
    """Builds the site, which fails at any warning: of a link, an anchor or a docstring."""
    here = str(Path(sys.executable).parent)  # the environment of the tests need not be active
    done = subprocess.run(
        ["/bin/bash", ".ci/site"],
        cwd=ROOT,
        env=dict(os.environ) | {"PATH": os.pathsep.join([here, os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "site"


class _Fetched(HTMLParser):
    """Collects what a page fetches, and its elements' names."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        address = given.get(_FETCHED.get(tag, ""))
        if address and given.get("rel") not in {"canonical", "next", "prev"}:
            self.addresses.append(address)
        self.addresses += re.findall(r"url\((.*?)\)", given.get("style") or "")


def read(page: Path) -> _Fetched:
    found = _Fetched()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def test_no_page_fetches_from_another_machine(site: Path) -> None:
    found = {page: read(page).addresses for page in site.glob("**/*.html")}
    assert len(found) > 30
    foreign = re.compile(r"^(\w+:)?//")
    assert {a for addresses in found.values() for a in addresses if foreign.match(a)} == set()


def test_no_style_sheet_fetches_from_another_machine(site: Path) -> None:
    styles = [sheet.read_text(encoding="utf-8") for sheet in site.glob("**/*.css")]
    fetched = [
        x for text in styles for x in re.findall(r"(?:url\(|@import )[\"']?([^)\"']+)", text)
    ]
    assert styles
    assert [x for x in fetched if re.match(r"(https?:)?//", x)] == []


def test_the_site_has_every_page(site: Path) -> None:
    for page in pages():
        place = Path(page)
        inside = place.relative_to("docs") if place.parts[0] == "docs" else Path("checkout", place)
        html = inside.with_name("index.html" if place.stem == "README" else f"{place.stem}.html")
        assert (site / html).is_file(), page


def test_the_reference_has_every_public_name(site: Path) -> None:
    found = read(site / "reference" / "jaxfleet.html").ids
    names = [name for name in dir(jaxfleet) if not name.startswith("_")]
    missing = [n for n in names if not any(i.endswith(f".{n}") for i in found)]
    modules = {"capture"}
    assert [n for n in missing if n in jaxfleet._HOME_OF and n not in modules] == []  # noqa: SLF001
