"""The pages: each link and each named file exists, and the pages are as short as a reader may expect."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOORS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "INSTRUCTORS.md")]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(*DOORS, ROOT / "CHANGELOG.md", *DOCS),
    *sorted(ROOT.glob("course_*/**/README.md")),
    *(*sorted((ROOT / "cluster").glob("*.md")), ROOT / "tests/gpu/README.md"),
    ROOT / "data/text/README.md",
]
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]*)\)")
# a file or folder that a page names in backticks; NN, 14_new_topic and my_function stand for others
FOLDERS = [each.name for each in ROOT.iterdir() if each.is_dir() and each.name != "build"]
NAMED = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*)`")
PLACEHOLDER = re.compile(r"NN|14|my_function|^\.venv")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not re.match(r"https?:", link) and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            found.append(link)
    return found


def missing(page: Path) -> list[str]:
    """The files that a page names and that are not there."""
    named = NAMED.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [each for each in named if not PLACEHOLDER.search(each) and not (ROOT / each).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_and_each_named_file_of_a_page_exists(page: Path) -> None:
    assert broken(page) == []
    assert missing(page) == []


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, with `code`\n```text\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-heading-with-code) [b](other.md#no-heading) [c](gone.md) [d](https://x.y)\n"
        "```python\n[e](gone.py)\n```\n`tools/book.py` `tools/gone.py` `solutions/NN_topic.py`\n"
    )
    assert broken(page) == ["other.md#no-heading", "gone.md"]
    assert missing(page) == ["tools/gone.py"]


def length(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").splitlines())


def test_who_opens_the_course_teaches_or_changes_it_reads_a_few_screens() -> None:
    assert sum(map(length, DOORS)) <= 440
    for page, most in zip(DOORS, (110, 130, 200), strict=True):
        assert length(page) <= most, page.name


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_of_docs_is_short(page: Path) -> None:
    assert length(page) < 200


@pytest.mark.parametrize("page", [*DOORS, *DOCS], ids=lambda page: page.name)
def test_prose_is_broken_into_lines(page: Path) -> None:
    """A limit in lines means nothing where a line may be a page long. Rows of tables cannot be broken."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    assert not [
        each for each in text.split("\n") if len(each) > 120 and each[:2] not in ("| ", "![")
    ]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_each_page_of_docs_is_in_the_book_and_found_from_the_doors(page: Path) -> None:
    assert f"\ndocs/{page.stem}\n" in (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    assert any(f"](docs/{page.name}" in door.read_text(encoding="utf-8") for door in DOORS)
