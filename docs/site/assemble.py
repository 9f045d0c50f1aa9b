"""Puts the site's sources together: the documents as they are, the reference, all messages, notebooks
of the tutorials.

    python docs/site/assemble.py build/site/source

Links between documents are written for a reader of the source tree; here they are turned to the pages that hold what
they lead to. A link to what the site has not, such as a folder of results, becomes its text.
"""

import os
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import messages  # noqa: E402
import notebooks  # noqa: E402
import reference  # noqa: E402

FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FOLDERS = "docs", "docs/tutorials", "docs/howto"
HOWTOS = "howto/index.md"
OTHERS = {"examples/README.md": "examples.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def pages() -> dict[str, tuple[str, str]]:
    """{page of the site: (document that it is from, its text)}."""
    found = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")):
        document = path.relative_to(ROOT).as_posix()
        found[document.removeprefix("docs/")] = document, path.read_text()
    found |= {page: (document, (ROOT / document).read_text()) for document, page in OTHERS.items()}
    document, index = found[HOWTOS]
    listed = "\n".join(re.findall(r"^\| \[[^\]]*\]\(([\w-]+)\.md\)", index.partition("## Pages")[2], re.MULTILINE))
    found[HOWTOS] = document, f"{index}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    return found


def home(known: dict[str, str]) -> str:
    """The first page; parts that it has in common with the README are from there."""
    sections = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    parts = {part.partition("\n")[0]: f"## {part.rstrip()}" for part in sections}
    shared = lambda found: relinked("index.md", "README.md", parts[found[1]], known)
    return re.sub(r"^<!-- from README.md: (.*) -->$", shared, (HERE / "index.md").read_text(), flags=re.MULTILINE)


def target(page: str, document: str, link: str, known: dict[str, str]) -> str | None:
    """Where a link of `document` leads from `page` of the site; None for what the site has not."""
    path, _, anchor = link.partition("#")
    file = os.path.normpath(os.path.join(os.path.dirname(document), path)) if path else document
    to = known.get(file)
    if file == "README.md":
        to, anchor = "index.md", ""
    if file.startswith("docs/images/"):
        to = file.removeprefix("docs/")
    if to is None:
        return None
    return os.path.relpath(to, os.path.dirname(page) or ".") + (f"#{anchor}" if anchor else "")


def relinked(page: str, document: str, text: str, known: dict[str, str]) -> str:
    kept: list[str] = []
    text = FENCE.sub(lambda found: kept.append(found[0]) or f"\0{len(kept) - 1}\0", text)

    def link(found) -> str:
        if re.match(r"https?:|mailto:", found[3]):
            return found[0]
        to = target(page, document, found[3], known)
        return f"{found[1]}[{found[2]}]({to})" if to else found[2]

    text = re.sub(r"^<!--.*-->\n", "", LINK.sub(link, text), flags=re.MULTILINE)
    text = re.sub("\0(\\d+)\0", lambda found: kept[int(found[1])], text)
    return re.sub(r"^( *)```python \w+$", r"\1```python", text, flags=re.MULTILINE)


def main(folder: str) -> None:
    source = Path(folder).resolve()
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(HERE, source, ignore=shutil.ignore_patterns("*.pyc", "__pycache__"))
    shutil.copytree(ROOT / "docs" / "images", source / "images")
    found = pages()
    known = {document: page for page, (document, _) in found.items()}
    texts = {page: relinked(page, document, text, known) for page, (document, text) in found.items()}
    texts["index.md"] = home(known)
    texts |= reference.pages()
    texts["messages.md"] = messages.page()
    for page in [page for page in texts if page.startswith("tutorials/")]:
        file, (title, _, rest) = page.replace(".md", ".ipynb"), texts[page].partition("\n")
        texts[file] = notebooks.notebook(texts[page])
        texts[page] = f"{title}\n\n{{download}}`This page as a notebook <{Path(file).name}>`\n{rest}"
    for page, text in texts.items():
        (source / page).parent.mkdir(exist_ok=True)
        (source / page).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
