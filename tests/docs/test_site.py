"""The site's sources: what the reference has, what the pages say of te_jax, and what packages say of the project.

That Sphinx takes them without a warning, and pyright the types, `make docs` and `make types` say."""

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from printed import all_blocks

import te_jax

import nnx_stubs  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="needs the source tree")

PUBLIC = ("te_jax", "te_jax.recipe", "te_jax.flax", "te_jax.nnx", "te_jax.layers", "te_jax.optim")
WORDS_OF_README = 900


@pytest.fixture(scope="module")
def site():
    """The modules of docs/site, by name."""
    sys.path.insert(0, str(SITE))
    try:
        names = "assemble", "docstrings", "messages", "notebooks", "reference"
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(SITE))


# -- the reference ---------------------------------------------------------------------------------------------


def test_all_that_packages_export_is_in_the_reference(site):
    documented = site["reference"].documented()
    for module in PUBLIC:
        exported = site["reference"].exported(module)
        assert exported, module
        objects = {name: getattr(importlib.import_module(module), name) for name in exported}
        missing = {name for name in objects if f"{module}.{name}" not in documented}
        assert all(inspect.ismodule(objects[name]) for name in missing), f"{module}: {missing}"


def test_all_of_the_reference_says_what_it_is(site):
    for name, value in site["reference"].documented().items():
        assert not callable(value) or (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_signatures_are_readable(site):
    for name, value in site["reference"].documented().items():
        if callable(value):
            text = site["reference"].signature(value)
            assert "0x" not in text and "<" not in text, f"{name}{text}"


def test_docstrings_become_markup(site):
    lines = [
        "`te_jax.x` of *args in a_ b; `y`s.",
        "",
        "a, b:  what",
        "       goes on",
        "Raises what `c` raises.",
        "",
        "    code = `1`",
        "",
        "- one of `d`",
        "  and two",
        "- three",
    ]
    assert site["docstrings"].convert(lines, {"te_jax.x": "te_jax.y"}) == [
        ":py:obj:`te_jax.x <te_jax.y>` of \\*args in a\\_ b; ``y``\\ s.",
        "",
        "``a, b``",
        "    what goes on",
        "",
        "Raises what ``c`` raises.",
        "",
        "::",
        "",
        "    code = `1`",
        "",
        "- one of ``d`` and two",
        "- three",
        "",
    ]


# -- pages -----------------------------------------------------------------------------------------------------


def test_links_of_the_site_lead_to_its_pages(site, tmp_path):
    site["assemble"].main(tmp_path / "source")
    pages = {path.relative_to(tmp_path / "source").as_posix(): path for path in (tmp_path / "source").rglob("*.md")}
    assert {path.stem for path in (tmp_path / "source" / "tutorials").glob("*.ipynb")} == {
        "gpt",
        "health",
        "moe",
        "lora",
        "devices",
    }
    howtos = {path.stem for path in (ROOT / "docs" / "howto").glob("*.md")} - {"index"}
    listed = pages["howto/index.md"].read_text().rpartition("```{toctree}")[2].split()
    assert howtos == set(listed) - {":hidden:", "```"}, "each how-to has a row in the table of docs/howto/index.md"
    for name, path in pages.items():
        text = site["assemble"].FENCE.sub("", path.read_text())
        for *_, link in site["assemble"].LINK.findall(text):
            target, _, anchor = link.partition("#")
            if not target.startswith("http"):
                found = (path.parent / target).resolve() if target else path
                assert found.is_file(), f"{name}: {link}"
                headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE) if anchor else ()
                assert not anchor or anchor in map(site["assemble"].slug, headings), f"{name}: {link}"
    listed = re.findall(r"^[\w/]+$", (SITE / "index.md").read_text(), re.MULTILINE)
    top = {name.removesuffix(".md") for name in pages if not re.match(r"(howto|api)/(?!index)", name)}
    assert set(listed) == top - {"index"}, (
        "a page of the site is in no table of contents, or none of its pages is there"
    )


def test_tutorials_are_notebooks(site):
    """Of nbformat 4.5: what its schema asks of each cell; the programs and outputs are those of the page."""
    names = [path.name for path in (ROOT / "docs" / "tutorials").glob("*.md")]
    assert len(names) >= 5
    for name in names:
        page = (ROOT / "docs" / "tutorials" / name).read_text()
        made = json.loads(site["notebooks"].notebook(page))
        assert (made["nbformat"], made["nbformat_minor"]) == (4, 5) and made["metadata"]["kernelspec"][
            "name"
        ] == "python3"
        cells, known = made["cells"], {"cell_type", "id", "metadata", "source"}
        assert len({cell["id"] for cell in cells}) == len(cells) and cells[0]["cell_type"] == "markdown"
        for cell in cells:
            code = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
            assert cell.keys() == known | code and cell["cell_type"] in ("code", "markdown")
            assert all(isinstance(line, str) for line in cell["source"])
        programs = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
        outputs = ["".join(output["text"]) for cell in cells for output in cell.get("outputs", ())]
        blocks = all_blocks(page)
        assert programs == [block.text for block in blocks if block.info == ["python"]], name
        assert outputs == [block.text for block in blocks if block.info == ["text"]] and outputs, name


def test_troubleshooting_explains_texts_that_te_jax_has(site):
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    texts = [text for said in site["messages"].texts().values() for text in said]
    assert len(explained) > 25 and len(texts) > 400
    for text in explained:
        parts = [re.escape(part.strip()) for part in text.split("...") if part.strip(" .")]
        assert any(re.search(".*?".join(parts), found) for found in texts), f"te_jax does not say: {text}"


def test_messages_are_those_of_the_sources(site):
    texts = site["messages"].texts()
    assert (
        "MeshResource: ... is ..., but the mesh in force has the axes ...; name one of them, or None."
        in texts["te_jax/sharding/resource.py"]
    )
    assert not any("Which mesh axis plays which part" in text for said in texts.values() for text in said), (
        "a docstring"
    )


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= WORDS_OF_README


# -- types and packages ----------------------------------------------------------------------------------------


def test_stubs_of_nnx_are_those_of_its_modules():
    assert nnx_stubs.STUB.read_text() == nnx_stubs.stub(), (
        "write it anew: PYTHONPATH=. python tests/support/nnx_stubs.py"
    )
    calls = {each.split("(")[0]: each for each in nnx_stubs.stub().split("\nclass ")[1:]}
    # What operands=True returns has no public name.
    assert [name for name, text in calls.items() if ") -> Any: ..." in text] == ["DenseGeneral"]
    assert "keys_values: KeysValues | None" in calls["TransformerLayer"]


def test_the_package_says_that_it_is_typed():
    assert Path(te_jax.__file__).with_name("py.typed").is_file()


def test_urls_of_the_package_have_one_address(tmp_path):
    """`make urls` sets them all."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["make", "-s", "urls", "URL=https://host.test/te_jax"], cwd=tmp_path, check=True)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Documentation", "Issues"} <= set(urls)
    assert all(url.startswith("https://host.test/te_jax") for url in urls.values()), urls


def test_the_version_is_said_alike():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
