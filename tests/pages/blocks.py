"""The fenced blocks of the README and of every page, and the commands that their text names."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import ROOT

PAGES = sorted(
    str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"))
)


@dataclass(frozen=True)
class Block:
    """One fenced block: the page, its language ("" for none), its number among the page's of that language."""

    page: str
    language: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{Path(self.page).stem}-{self.language or 'plain'}-{self.number}"

    @property
    def key(self) -> tuple[str, int]:
        """What the tables of the tests name it by."""
        return self.page, self.number


def blocks(language: str) -> list[Block]:
    """Every block of a language."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        mine = [body for name, body in fenced if name == language]
        found += [Block(page, language, number, body) for number, body in enumerate(mine)]
    return found


def languages() -> set[str]:
    """Every language that a block names."""
    texts = ((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    return {name for text in texts for name, _ in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)}


def words_of(line: str) -> list[str]:
    """A shell line's words, without what explains it: behind a #, or behind two spaces."""
    return shlex.split(re.split(r"\s{2,}|\s#", line.strip())[0])


def inline() -> list[tuple[str, str]]:
    """Every `command …` in running text, with its page."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        spans = re.findall(r"`([^`]+)`", text)
        found += [
            (page, span.replace("\n", " ")) for span in spans if re.match(r"(fusedce|make|python|torchrun) ", span)
        ]
    return found
