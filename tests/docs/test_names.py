"""Names of `jf` and environment variables on the pages are those of the code."""

import re

import jaxfleet
from jaxfleet.env.meanings import MEANINGS
from tests.docs.blocks import ROOT, pages

TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages())
OF_DUMP = {"JAXFLEET_DUMP_SOURCE", "JAXFLEET_DUMP_UNTIL_COMPILED"}  # `jaxfleet dump` sets them


def test_every_name_of_jf_on_a_page_exists() -> None:
    named = set(re.findall(r"\bjf\.([a-zA-Z_]\w*)", TEXT))
    assert len(named) > 20
    assert sorted(name for name in named if not hasattr(jaxfleet, name)) == []


def test_the_pages_name_the_variables_that_jaxfleet_reads() -> None:
    named = set(re.findall(r"\bJAXFLEET_[A-Z_]*[A-Z]\b", TEXT))
    assert named == {name for name in MEANINGS if name.startswith("JAXFLEET_")} - OF_DUMP
