"""The tables of measured figures in README.md, docs/ and results/log.md, and the plots, are written from the files in
results/.

results/tables.md has each table below a heading of its name and its document. A cell has a place for a figure in double
braces, in the grammar of `figures`. In the document the table stands between the comments `<!-- table: name -->` and
`<!-- end -->`.
"""

import pathlib
import re

from .figures import RESULTS, ROOT, figure
from .plots import drawings


def tables() -> dict[tuple[str, str], str]:
    """(document, name of the table) -> its text."""
    found = {}
    for part in re.split(r"^## ", (RESULTS / "tables.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        name, document = heading.split(", ")
        found[document, name] = re.sub(r"\{\{(.+?)\}\}", lambda place: figure(place[1]), text.strip())
    return found


def documents() -> dict[pathlib.Path, str]:
    """The documents with tables, as they should be. Raises ValueError where one has no place for a table."""
    found = {}
    for (document, name), table in tables().items():
        path, begin, end = ROOT / document, f"<!-- table: {name} -->\n", "<!-- end -->"
        before, marked, rest = found.get(path, path.read_text()).partition(begin)
        if not marked or end not in rest:
            raise ValueError(f"{document}: no {begin.strip()} with {end} behind it; results/tables.md names it.")
        found[path] = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return found


def main(args) -> int:
    wanted = documents() | drawings()
    changed = {path: text for path, text in wanted.items() if not path.is_file() or path.read_text() != text}
    for path, text in changed.items():
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        print(path.relative_to(ROOT), "is not what results/ makes it: `make tables`" if args.check else "is written")
    return 1 if changed and args.check else 0
