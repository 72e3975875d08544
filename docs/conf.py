"""The site: README, guides, notebooks with their stored output, reference and the book's reading list, by Sphinx.

`python -m sphinx -W -c docs . build/site` makes it of the pages as they lie in the repository; nothing is copied here.
Links to files that are no pages lead to the repository; a dead link is an error. Formulas are MathML, which browsers
draw themselves, so that no page asks another host for a script or a font. Left out: several versions, pages of sources.
"""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml

ROOT = Path(__file__).parent.parent
OPENING = runpy.run_path(str(ROOT / "tutorials/opening.py"))
TREE = {  # the captions of the side bar, and what stands below each
    "Start": [
        "docs/first_hour",
        "tutorials/guides/from_pytorch",
        "tutorials/guides/from_torchrec",
        "tutorials/guides/from_hetu",
        "examples/README",
        "examples/*/README",
    ],
    "The course": [
        "tutorials/README",
        "tutorials/SYLLABUS",
        *sorted(f"tutorials/{p.stem}" for p in (ROOT / "tutorials").glob("*.ipynb")),
    ],
    "How to": ["tutorials/guides/README", "tutorials/guides/[a-eg-z]*"],
    "Reference": ["tutorials/reference/README", "tutorials/reference/*"],
    "The book": ["hetu/README", "CONTRIBUTING", "CHANGELOG"],
}

project, author = "hetu", "the hetu developers"
copyright = author
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hetu/README.md", "examples/README.md", "examples/*/README.md"),
    *("docs/*.md", "tutorials/*.md", "tutorials/*.ipynb", "tutorials/guides/*.md", "tutorials/reference/*.md"),
]
extensions = ["myst_nb"]
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tutorials/build.py has run them
html_theme = "furo"
html_title = "hetu"
html_math_renderer = "mathml"
html_copy_source = html_show_sphinx = False
html_theme_options = {
    "source_repository": OPENING["url"](),
    "source_branch": OPENING["BRANCH"],
    "source_directory": "",
}
html_static_path = ["static"]
html_css_files = ["site.css"]


def adapt(app: Any, docname: str, source: list[str]) -> None:
    """Let links to files that are no pages lead to the repository, and the first page name all others."""
    here = Path(app.env.doc2path(docname)).parent
    source[0] = re.sub(r"(?<=\]\()[^)\s#]+", lambda found: target(app, here, found[0]), source[0])
    if docname == root_doc:
        for caption, pages in TREE.items():
            named = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{named}\n```\n"


def target(app: Any, here: Path, link: str) -> str:
    """A link as it stands, or the address of a file of the repository that is no page and no picture."""
    file = (here / link).resolve()
    inside = "://" not in link and file.exists() and file.is_relative_to(ROOT)
    page = file.suffix == ".svg" or app.env.path2doc(str(file)) in app.env.found_docs
    if not inside or page:
        return link
    kind = "tree" if file.is_dir() else "blob"
    return f"{OPENING['url']()}/{kind}/{OPENING['BRANCH']}/{file.relative_to(ROOT).as_posix()}"


def formula(translator: Any, node: Any) -> None:
    """A formula as MathML."""
    block = isinstance(node, nodes.math_block)
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def finish(app: Any, error: Exception | None) -> None:
    """The first page under the name that servers look for."""
    if not error and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("source-read", adapt)
    app.connect("build-finished", finish)
