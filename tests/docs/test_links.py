"""Every link of the documentation has its target, on the forge as on the site."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages


def headings(text: str) -> set[str]:
    """Returns the anchors that the forge and the site give the headings of a page."""
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in shown}


@pytest.mark.parametrize("page", pages())
def test_every_link_of_a_page_has_its_target(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    outside = re.sub(r"`[^`\n]*`", "", outside)
    links = re.findall(r"\]\(([^)\s]+)\)", outside)
    links += re.findall(r"^\[[^\]]+\]: (\S+)$", outside, re.MULTILINE)
    for link in links:
        if re.match(r"(https?|mailto):", link):
            continue
        target, _, anchor = link.partition("#")
        linked = (ROOT / page).parent / target if target else ROOT / page
        assert linked.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in headings(linked.read_text(encoding="utf-8")), f"{page}: {link}"


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    docs = [Path(page).relative_to("docs") for page in pages() if page.startswith("docs/")]
    assert [str(p) for p in docs if p != Path("README.md") and f"]({p})" not in listed] == []
