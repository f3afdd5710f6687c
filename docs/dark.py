"""Pictures in the dark: each SVG of a page has a twin with its colours turned round, and furo shows one of the two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

#: Colours of a picture in the light, and what they are in the dark. Others stay.
COLOURS = {
    "#ffffff": "#131416",  # furo's two backgrounds
    "#000000": "#cfd0d0",
    "#262626": "#cfd0d0",
    "#333333": "#cfd0d0",
    "#666666": "#9a9ca0",
    "#b0b0b0": "#5a5c5e",
    "#cccccc": "#5a5c5e",
    "#eeeeee": "#26282b",
}


def dark(svg: str) -> str:
    """The twin of a picture; what says no colour is black, in the light."""
    svg = re.sub(r"#[0-9a-fA-F]{6}\b", lambda match: COLOURS.get(match[0].lower(), match[0]), svg)
    return re.sub(r"<svg\b", f'<svg fill="{COLOURS["#000000"]}"', svg, count=1)


def write_if_new(path: Path, text: str) -> None:
    """Else Sphinx would read again what hasn't changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class Twins(SphinxTransform):
    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        source = Path(self.env.srcdir)
        for image in list(self.document.findall(nodes.image)):
            path = (source / self.env.docname).parent / image["uri"]
            if path.suffix != ".svg" or not path.exists() or "only-dark" in image["classes"]:
                continue
            self.env.note_dependency(str(path))
            name = f"{path.parent.resolve().name}-{path.name}"
            write_if_new(source / "_dark" / name, dark(path.read_text(encoding="utf-8")))
            twin = image.copy()
            twin["uri"], twin["classes"] = f"/_dark/{name}", [*image["classes"], "only-dark"]
            image["classes"] = [*image["classes"], "only-light"]
            image.parent.insert(image.parent.index(image) + 1, twin)


def setup(app: Any) -> None:
    app.add_transform(Twins)
