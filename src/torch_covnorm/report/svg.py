"""Turn matplotlib's SVG into a small one: flat, without metadata, in the page's colors."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

PAGE, INK, SOFT, LINE, TRACK = "#ffffff", "#1b2025", "#5b6570", "#dde1e6", "#e6e9ed"
BLUE, ORANGE, GREEN, VIOLET = "#1f6fb2", "#c2570c", "#1a7f5a", "#84589f"
_NAMED = {"page": PAGE, "ink": INK, "soft": SOFT, "line": LINE, "track": TRACK}
_NAMED |= {"blue": BLUE, "orange": ORANGE, "green": GREEN, "violet": VIOLET}
VARIABLES = {color: f"var(--{name})" for name, color in _NAMED.items()}


def lean(raw: bytes, label: str, key: str) -> ET.Element:
    """Return matplotlib's SVG as one flat element: no groups, no metadata, no namespaces.

    The element stands inside HTML. Screen readers read `label`. All ids begin with `key`.
    """
    root = ET.fromstring(raw)
    size = root.attrib["viewBox"]
    svg = ET.Element("svg", {"viewBox": size, "role": "img", "aria-label": label})
    _flatten(root, svg, {}, key)
    return svg


def _flatten(node: ET.Element, svg: ET.Element, ids: dict[str, str], key: str) -> None:
    for child in node:
        tag, old = child.tag.rpartition("}")[2], child.attrib
        if tag == "path" and "id" in old:  # a marker, drawn where it is used
            ids[old["id"]] = f"{key}-{len(ids) + 1}"
            new = {"id": ids[old["id"]], "d": _path(old["d"], 2)}
            ET.SubElement(ET.SubElement(svg, "defs"), "path", new)
        elif tag == "path" and (style := _style(child)) != "fill:none":
            ET.SubElement(svg, "path", {"d": _path(old["d"], 1), "style": style})
        elif tag == "use":
            new = {"href": "#" + ids[_link(child).removeprefix("#")], **_position(child)}
            ET.SubElement(svg, "use", {**new, "style": _style(child)})
        elif tag == "text":
            new = _position(child)
            if "rotate(-0 " not in old["transform"]:
                new["transform"] = _round(old["transform"], 1)
            ET.SubElement(svg, "text", {**new, "style": _style(child)}).text = child.text
        elif tag == "image":
            new = {name: old[name] for name in ("width", "height", "transform")}
            ET.SubElement(svg, "image", {"href": "".join(_link(child).split()), **new})
        else:
            _flatten(child, svg, ids, key)


def _position(node: ET.Element) -> dict[str, str]:
    return {axis: _round(node.attrib[axis], 1) for axis in ("x", "y")}


def _link(node: ET.Element) -> str:
    return node.attrib["{http://www.w3.org/1999/xlink}href"]


def _style(node: ET.Element) -> str:
    """Return the node's style in the page's colors, without what the page's sheet sets."""
    style = dict(part.split(": ", 1) for part in node.attrib.get("style", "").split("; ") if part)
    for name in ("font-size", "font-family", "stroke-linejoin", "stroke-linecap"):
        style.pop(name, None)
    return ";".join(f"{name}:{VARIABLES.get(value, value)}" for name, value in style.items())


def _path(d: str, digits: int) -> str:
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", _round(d, digits)).strip()


def _round(text: str, digits: int) -> str:
    return re.sub(r"-?\d+\.\d+", lambda m: f"{round(float(m[0]), digits):g}", text)
