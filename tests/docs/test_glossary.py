"""docs/glossary.md: each word has a link or no counterpart, and what it names exists."""

import dataclasses
import re
from pathlib import Path

import jaxfleet as jf
from jaxfleet.runtime.step import Step
from jaxfleet.runtime.trainer_step import TrainerStep

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
ITEMS = re.findall(r"^- \*\*(.+?)\*\*: (.+?)(?=\n- |\n\n|\n$)", PAGE, re.MULTILINE | re.DOTALL)
WITHOUT = ("No counterpart", "No option")
OF_OTHERS = {"sync_mode", "is_distributed"}  # fluid's arguments


def test_each_word_has_a_link_or_no_counterpart() -> None:
    assert len(ITEMS) == PAGE.count("\n- **")
    assert [word for word, text in ITEMS if "](" not in text and not text.startswith(WITHOUT)] == []


def test_each_option_is_one_of_the_strategy() -> None:
    known = {field.name for field in dataclasses.fields(jf.DistributedStrategy)}
    named = set(re.findall(r"[`(]([a-z_]+)=", PAGE))
    assert len(named) > 8
    assert named - known - OF_OTHERS == set()


def test_each_function_and_method_exists() -> None:
    functions = set(re.findall(r"\bjf\.(\w+)", PAGE))
    methods = set(re.findall(r"\bstep\.([a-z_]+)", PAGE))
    assert functions
    assert methods
    assert [name for name in functions if not hasattr(jf, name)] == []
    assert [n for n in methods if not (hasattr(Step, n) or hasattr(TrainerStep, n))] == []
