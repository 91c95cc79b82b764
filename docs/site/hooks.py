"""What mkdocs does besides: the navigation, reference pages, and pages from outside docs/.

docs/README.md lists the pages, so its headings and links are the site's navigation. Pages link to
files of the checkout, such as `../examples/digits.py`: each becomes a page here, so that the links
work on the site as they do on the forge.
"""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs imports this file by its path

from docs.site import reference  # noqa: E402

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])|(?<=\]: )([^\s#]+)")
_FENCE = re.compile(r"(^ *```.*?^ *```[ ]*$)", re.MULTILINE | re.DOTALL)
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the navigation to what docs/README.md lists."""
    config.nav = [{"Home": "README.md"}, *_navigation()]
    config.watch.extend([str(HERE), str(ROOT / "jaxfleet"), str(ROOT / "passes")])
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the reference, and a page for every file outside docs/ that a page links."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    shim = HERE / "iframe-worker.js"
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(shim)))
    waiting = sorted(file.src_uri for file in files if file.is_documentation_page())
    seen = set[str]()
    while waiting:
        for place in _linked_outside(_source(waiting.pop(), files)):
            if place not in seen and (ROOT / place).exists():
                seen.add(place)
                uri = _uri(place)
                files.append(
                    File.generated(config, uri, content=_page_of(place), inclusion=_in(uri))
                )
                waiting.append(uri)
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Points links to files outside docs/ to their pages here."""
    return _relinked(markdown, _source(page.file.src_uri, files))


def _navigation() -> list[Any]:
    """Returns mkdocs' navigation: a tab for each `##` of docs/README.md, a group for each `###`."""
    tabs: list[Any] = []
    lines = (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("## "):
            tabs.append({line[3:]: []})
            entries = next(iter(tabs[-1].values()))
        elif line.startswith("### "):
            group: list[Any] = []
            entries = group
            next(iter(tabs[-1].values())).append({line[4:]: group})
        elif found := re.match(r"- \[[^\]]*\]\(([^)#]+)\)", line):
            place = posixpath.normpath(f"docs/{found[1]}")
            entries.append(_uri(place) if found[1].startswith("../") else found[1])
    for tab in tabs:
        if "Reference" in tab:
            tab["Reference"].append(
                {"From the code": [f"reference/{x}" for x in reference.pages()]}
            )
    return tabs


class _Source:
    """Where the text of a page comes from: a file of the checkout, or this build."""

    def __init__(self, place: str, text: str) -> None:
        self.place, self.text = place, text


def _source(uri: str, files: Files) -> _Source:
    file = files.get_file_from_path(uri)
    assert file is not None
    place = uri.removeprefix("checkout/") if uri.startswith("checkout/") else f"docs/{uri}"
    return _Source(place.removesuffix(".page.md"), file.content_string)


def _linked_outside(source: _Source) -> Iterator[str]:
    """Yields the paths in the checkout, outside docs/, that a page links."""
    for part in _FENCE.split(source.text)[::2]:
        for match in _LINK.finditer(part):
            if place := _outside(match[0], source):
                yield place


def _outside(link: str, source: _Source) -> str | None:
    """Returns the path in the checkout that a link means, if that is outside docs/."""
    if re.match(r"\w+:|/|#", link):
        return None
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source.place), link))
    return None if place == "docs" or place.startswith(("docs/", "..")) else place


def _relinked(markdown: str, source: _Source) -> str:
    is_moved = not source.place.startswith("docs/")

    def new(match: re.Match[str]) -> str:
        link = match[0]
        if place := _outside(link, source):
            target = _uri(place) if (ROOT / place).exists() else None
        elif is_moved and not re.match(r"\w+:|/|#", link):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(source.place), link))
            target = target.removeprefix("docs/")
        else:
            return link
        if target is None:
            return link
        here = source.place.removeprefix("docs/") if not is_moved else _uri(source.place)
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(new, part) for part in parts[::2]]
    return "".join(parts)


def _uri(place: str) -> str:
    """Returns the page of a file outside docs/."""
    return f"checkout/{place}" if place.endswith(".md") else f"checkout/{place}.page.md"


def _in(uri: str) -> InclusionLevel:
    """Returns where a page appears: source files are only linked."""
    return InclusionLevel.NOT_IN_NAV if uri.endswith(".page.md") else InclusionLevel.INCLUDED


def _page_of(place: str) -> str:
    path = ROOT / place
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.is_dir():
        names = sorted(p.relative_to(path).as_posix() for p in path.glob("**/*.py"))
        base = path.name
        return f"{_UNSEARCHED}# {place}/\n\n" + "".join(
            f"- [{name}]({base}/{name})\n" for name in names
        )
    text = path.read_text(encoding="utf-8")
    return f"{_UNSEARCHED}# {place}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
