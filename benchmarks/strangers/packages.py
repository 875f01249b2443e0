"""The packages that the data sets are made of. Nothing else in the project uses them."""

from __future__ import annotations

from ..fetch import Package

FONTS = Package(
    "strange-letters",
    "Debian",
    "fonts-aenigma=0.0.20080511+dfsg-4",
    "c7f33a4e5932af82a92c81a5a993a1d117c4309b47532cb0d9c3ad34bc54f5a8",
    7,
    "free to use, by their author's terms",
    "465 display fonts",
    "usr/share/fonts/truetype/aenigma/",
)
NOTO = Package(
    "strange-scripts",
    "Debian",
    "fonts-noto-core=20201225-1",
    "58f4f0bb6720f919f92096b3508e1412a0f1544424ade6c5b5bf1eb694dd64ba",
    12,
    "OFL-1.1",
    "fonts of most scripts of Unicode",
    "usr/share/fonts/truetype/noto/",
)
TWEMOJI = Package(
    "strange-emoji",
    "npm",
    "emoji-datasource-twitter@16.0.0",
    "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    62,
    "CC BY 4.0",
    "Twitter's emoji",
    "package/",
)
OXYGEN = Package(
    "strange-oxygen",
    "Debian",
    "oxygen-icon-theme=5:5.103.0-1",
    "3e49023e148906e41457a98a19a09858ddd761ef4f212fa356232924b3cebcce",
    32,
    "LGPL-3+",
    "icons of KDE",
    "usr/share/icons/oxygen/base/128x128/",
)
MATE = Package(
    "strange-mate",
    "Debian",
    "mate-icon-theme=1.26.0-1",
    "356945b21bf2449ab4d3c0cead5abbc84fab247b140c6d0252263470df49dc54",
    14,
    "LGPL-3+ or CC BY-SA",
    "icons of MATE",
    "usr/share/icons/mate/256x256/",
)
WESNOTH = Package(
    "strange-units",
    "Debian",
    "wesnoth-1.16-data=1:1.16.9-1",
    "1012b964bd412a6770685e3324ae3b61e176caff7846192d1ee63d55cd621e26",
    146,
    "GPL-2+ and CC BY-SA 4.0",
    "figures of the game Wesnoth",
    "usr/share/games/wesnoth/1.16/data/core/images/units/",
)
ARENA = Package(
    "strange-textures",
    "Debian",
    "openarena-081-textures=0.8.5split-14",
    "72bf05abd5286a1523b56ca04e25bceb775813d747f92ecd20749d512361a81f",
    94,
    "GPL-2+",
    "textures of the game OpenArena",
    "usr/share/games/openarena/baseoa/",
)
CELLS = Package(
    "strange-cells",
    "PyPI",
    "scellseg==0.1.8",
    "084c5f1b12d0d97f0c3d0880ae579c1b7c4f7dea2203486bd11ba4c640a92d3c",
    102,
    "partly not for commercial use",
    "micrographs of seven kinds of cells, with masks",
    "scellseg-0.1.8/scellseg/assets/contrast_data/",
)
TEXTILES = Package(
    "strange-textiles",
    "PyPI",
    "conformal-clip-data==0.1.4",
    "00144ccc179a887dbea15923be8cf236d0c0f49bf7fb6f7bb288e40b53fb1bcb",
    42,
    "MIT",
    "simulated textiles with and without defects",
    "conformal_clip_data/data/textile_images/simulated/",
    wheel=True,
)
FURNITURE = Package(
    "strange-furniture",
    "Debian",
    "sweethome3d-furniture=1.8-1",
    "3ccb90c63f9525e887a767b9cd5c8b6933b8b6b2973a615a5359ee68a2118668",
    120,
    "CC0, CC BY 3.0",
    "rendered furniture of Sweet Home 3D",
    "usr/share/sweethome3d/furniture/",
)
