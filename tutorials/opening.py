"""How a stored notebook opens: the badges under its title, and the cell that installs hetu where it is missing.

The scripts have neither. The repository's address is the `url` of `setup.cfg`; change it there, then run
`python tutorials/build.py --opening`. Left out: branches other than `main`, and what Colab's own CuPy is too old for.
"""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parent.parent
BRANCH = "main"
MARK = "# Installs hetu where it is missing, as on Colab"
INSTALL = (
    MARK
    + """; for a GPU too, where there is one.
import importlib.util
import shutil

has = importlib.util.find_spec
if not has("hetu"):
    needs = "[gpu]" if shutil.which("nvidia-smi") and not has("cupy") else ""
    %pip install --quiet "hetu-dl{needs} @ git+URL\""""
)


def url() -> str:
    """The address of the repository."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", "utf-8")
    return settings["metadata"]["url"]


def badges(name: str) -> str:
    """The line of Markdown that opens the notebook `name` elsewhere."""
    owned, file = url().removeprefix("https://github.com/"), f"tutorials/{name}.ipynb"
    places = {
        "colab": f"https://colab.research.google.com/github/{owned}/blob/{BRANCH}/{file}",
        "binder": f"https://mybinder.org/v2/gh/{owned}/{BRANCH}?labpath={file}",
    }
    return " ".join(f"[![open in {place.title()}](badges/{place}.svg)]({to})" for place, to in places.items())


def install() -> str:
    """The first cell of code."""
    return INSTALL.replace("URL", url())


def opened(name: str, cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The cells (kind, text) of a source, of which the first begins with its title, as those of a notebook."""
    (kind, first), *rest = cells
    title, _, prose = first.partition("\n")
    return [(kind, f"{title}\n\n{badges(name)}\n{prose}"), ("code", install()), *rest]
