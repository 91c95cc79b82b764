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


MOST_BYTES = 150_000
PICTURES = [
    (page, said, (ROOT / page).parent / target)
    for page in pages()
    for said, target in re.findall(
        r"!\[([^\]]*)\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")
    )
    if "://" not in target
]


def test_every_picture_is_small_and_described() -> None:
    for page, said, path in PICTURES:
        assert len(said.split()) >= 3, f"{page}: {path.name}"
        assert path.stat().st_size <= MOST_BYTES, path.name


def test_every_view_of_a_report_has_a_picture() -> None:
    script = (ROOT / "jaxfleet" / "report" / "page_views.js").read_text(encoding="utf-8")
    listed = script.partition("const VIEWS = {")[2].partition("};")[0]
    views = re.findall(r"(\w+): \[\"", listed)
    assert len(views) == 9
    names = {path.name for page, _, path in PICTURES if page == "docs/view.md"}
    assert names == {f"view-{view}.png" for view in (*views, "dark")}


def test_every_picture_of_the_documentation_is_on_a_page() -> None:
    shown = {path.resolve() for _, _, path in PICTURES}
    drawn = [path for suffix in ("png", "svg") for path in (ROOT / "docs").glob(f"*.{suffix}")]
    assert [path.name for path in drawn if path.resolve() not in shown] == []
