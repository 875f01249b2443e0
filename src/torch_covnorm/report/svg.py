"""From matplotlib's SVG to a small one: flat, without metadata, in the page's colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

PAGE, INK, SOFT, LINE, TRACK = "#ffffff", "#1b2025", "#5b6570", "#dde1e6", "#e6e9ed"
BLUE, ORANGE, GREEN, VIOLET = "#1f6fb2", "#c2570c", "#1a7f5a", "#84589f"
VARIABLES = {
    PAGE: "var(--page)",
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    TRACK: "var(--track)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    VIOLET: "var(--violet)",
}


def lean(raw: bytes, about: str, key: str) -> ET.Element:
    """matplotlib's SVG as one flat element: no groups, no metadata, ids that begin with `key`.

    The namespaces go: the element stands inside HTML. `about` is what a screen reader says.
    """
    root = ET.fromstring(raw)
    size = root.attrib["viewBox"]
    svg = ET.Element("svg", {"viewBox": size, "role": "img", "aria-label": about})
    _flatten(root, svg, {}, key)
    return svg


def _flatten(node: ET.Element, svg: ET.Element, ids: dict[str, str], key: str) -> None:
    for child in node:
        tag = child.tag.rpartition("}")[2]
        if tag == "path" and "id" in child.attrib:  # a marker, drawn where it is used
            ids[child.attrib["id"]] = f"{key}-{len(ids) + 1}"
            made = ET.SubElement(ET.SubElement(svg, "defs"), "path")
            made.attrib.update(id=ids[child.attrib["id"]], d=_path(child.attrib["d"], 2))
        elif tag == "path" and (look := _look(child)) != "fill:none":
            ET.SubElement(svg, "path", {"d": _path(child.attrib["d"], 1), "style": look})
        elif tag == "use":
            at = {a: _round(child.attrib[a], 1) for a in ("x", "y")}
            link = "#" + ids[_link(child).removeprefix("#")]
            ET.SubElement(svg, "use", {"href": link, **at, "style": _look(child)})
        elif tag == "text":
            at = {a: _round(child.attrib[a], 1) for a in ("x", "y")}
            if "rotate(-0 " not in child.attrib["transform"]:
                at["transform"] = _round(child.attrib["transform"], 1)
            ET.SubElement(svg, "text", {**at, "style": _look(child)}).text = child.text
        elif tag == "image":
            kept = {a: child.attrib[a] for a in ("width", "height", "transform")}
            ET.SubElement(svg, "image", {"href": "".join(_link(child).split()), **kept})
        else:
            _flatten(child, svg, ids, key)


def _link(node: ET.Element) -> str:
    return node.attrib["{http://www.w3.org/1999/xlink}href"]


def _look(node: ET.Element) -> str:
    """Its style, without what the page's sheet says and with the page's colours."""
    found = dict(part.split(": ", 1) for part in node.attrib.get("style", "").split("; ") if part)
    for name in ("font-size", "font-family", "stroke-linejoin", "stroke-linecap"):
        found.pop(name, None)
    return ";".join(f"{name}:{VARIABLES.get(value, value)}" for name, value in found.items())


def _path(d: str, digits: int) -> str:
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", _round(d, digits)).strip()


def _round(text: str, digits: int) -> str:
    return re.sub(r"-?\d+\.\d+", lambda m: f"{round(float(m[0]), digits):g}", text)
