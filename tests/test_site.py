"""The site: every page and notebook is on it, its links lead somewhere, and it asks no other host for anything."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
BUILD = ("-m", "sphinx", "-W", "-q", "-c", "docs", ".")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sphinx", "myst_nb", "furo"))), reason="the extra [docs] is not installed"
)
LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]+)\""
    r"|url\(['\"]?((?:https?:)?//[^)]+)|@import[^;]*(//[^;]+)"
)


# As long as a thousand other tests; that links of pages lead somewhere is tested in each run (`test_readme.py`).
built = pytest.mark.nightly


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command of CONTRIBUTING.md, where a warning, such as of a dead link, is an error."""
    folder = tmp_path_factory.mktemp("site") / "html"
    done = subprocess.run(
        [sys.executable, *BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_command_is_the_one_that_contributors_are_told() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert " ".join(part for part in ("python", *BUILD) if part != "-q") + " build/site" in text


@built
def test_every_page_is_there(site: Path) -> None:
    pages = [*(ROOT / "tutorials/guides").glob("*.md"), *(ROOT / "tutorials/reference").glob("*.md")]
    pages += [*(ROOT / "tutorials").glob("*.ipynb"), *(ROOT / "tutorials").glob("*.md"), ROOT / "hetu/README.md"]
    missing = [p.name for p in pages if not (site / p.relative_to(ROOT)).with_suffix(".html").exists()]
    assert missing == []
    home = (site / "index.html").read_text("utf-8")
    linked = [p for p in pages if f'href="{p.relative_to(ROOT).with_suffix(".html").as_posix()}"' not in home]
    assert linked == []  # all stand in the side bar


@built
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css")]
    found = {address for file in files for groups in LOADED.findall(file.read_text("utf-8")) for address in groups}
    assert len(files) > 50 and found - {""} == set()


def test_what_is_fetched_from_elsewhere_is_found() -> None:
    text = '<script async src="https://a.b/c.js"> <a href="https://no"> <link rel="x" href="//d.e/f.css">@import "//g"'
    found = [one or two or three for one, two, three in LOADED.findall(text)]
    assert found == ["https://a.b/c.js", "//d.e/f.css", '//g"']


@built
def test_notebooks_show_their_output_and_formulas_are_drawn_by_the_browser(site: Path) -> None:
    notebook = (site / "tutorials/01_a_graph_in_ten_lines.html").read_text("utf-8")
    assert "of 1,000 digits right" in notebook and ".svg" in notebook and "%pip" not in notebook
    course = (site / "tutorials/README.html").read_text("utf-8")
    assert course.count("<math") >= 4
    assert (site / "searchindex.js").stat().st_size > 100_000


def test_links_to_sources_lead_to_the_repository() -> None:
    conf = runpy.run_path(str(ROOT / "docs/conf.py"))
    address = f"{conf['OPENING']['url']()}/"
    env = SimpleNamespace(found_docs={"README"}, path2doc=lambda path: "README" if path.endswith("README.md") else None)
    app = SimpleNamespace(env=env)
    for link, found in {
        "hetu/core/op.py": f"{address}blob/main/hetu/core/op.py",
        "examples": f"{address}tree/main/examples",
        "README.md": "README.md",
        "https://e.org/f": "https://e.org/f",
        "nowhere.md": "nowhere.md",
    }.items():
        assert conf["target"](app, ROOT, link) == found
