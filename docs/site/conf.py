"""Sphinx's configuration. `assemble.py` copies it next to the pages."""

import os
import re
import sys
import tomllib
from pathlib import Path

# The GPU, if one is here, is not needed for reading docstrings.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402
import reference  # noqa: E402

import te_jax  # noqa: E402

_PROJECT = tomllib.loads((Path(te_jax.__file__).parents[1] / "pyproject.toml").read_text())["project"]
project, release = "te_jax", _PROJECT["version"]
copyright = "the authors of te_jax, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
smartquotes = False

# Pages in which a search finds nearly every word; they stand in the tables of contents.
NO_SEARCH = "messages", "performance", "design", "config_words", "changelog", "contributing"

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = f"te_jax {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
_urls = {name: url for name, url in _PROJECT["urls"].items() if ".example" not in url}  # not the placeholders
html_theme_options = {
    "navigation_with_keys": True,
    "footer_icons": [{"name": name, "url": url, "html": name, "class": ""} for name, url in _urls.items()],
}

autodoc_member_order = "bysource"
autodoc_typehints = "none"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

_KNOWN = reference.homes()


def _docstring(app, what, name, obj, options, lines):
    lines[:] = docstrings.convert(lines, _KNOWN)


def _signature(app, what, name, obj, options, signature, returns):
    if what not in ("class", "function", "method"):
        return None
    try:
        own, _, back = reference.signature(obj).partition(" -> ")
        return own, back
    except (TypeError, ValueError):
        return None


def _no_search(app, env):
    for page in NO_SEARCH:
        env.metadata[page]["nosearch"] = True


def _break_code(found):
    """Lets code in a table break behind "." and the like, so that tables are not wider than the page."""
    pre = re.compile(r'(?<=<span class="pre">)[^<]+')
    return pre.sub(lambda text: re.sub(r"(?<=[\w)\]])([._/(,=])(?=[\w.*\[(])", r"\1<wbr>", text[0]), found[0])


def _page(app, page, template, context, doctree):
    if "body" in context:
        context["body"] = re.sub(r"<table.*?</table>", _break_code, context["body"], flags=re.DOTALL)


def setup(app):
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    app.connect("env-updated", _no_search)
    app.connect("html-page-context", _page)
