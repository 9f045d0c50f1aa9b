"""Notebooks of the tutorials: a cell for each text and each program, with the outputs that the page shows."""

import json
import re

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\])\(([^)\s:]+)\.md(#[^)\s]*)?\)")


def notebook(page: str) -> str:
    """The JSON (nbformat 4.5) of a page of the site. Links to other pages are to their HTML."""
    cells, end = [], 0
    for fence in FENCE.finditer(page):
        said = page[end : fence.start()].strip()
        language = fence[1].partition(" ")[0]
        if language == "text" and not said and cells and cells[-1]["cell_type"] == "code":
            cells[-1]["outputs"].append({"name": "stdout", "output_type": "stream", "text": _lines(fence[2])})
        elif language == "python":
            cells += [_markdown(said)] if said else []
            cells.append(
                {"cell_type": "code", "execution_count": None, "outputs": [], "source": _lines(fence[2].strip())}
            )
        else:
            cells.append(_markdown(f"{said}\n\n{fence[0].strip()}".strip()))
        end = fence.end()
    if page[end:].strip():
        cells.append(_markdown(page[end:].strip()))
    for i, cell in enumerate(cells):
        cell |= {"id": f"cell-{i}", "metadata": {}}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _markdown(text: str) -> dict:
    return {"cell_type": "markdown", "source": _lines(LINK.sub(r"(\1.html\2)", text))}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
