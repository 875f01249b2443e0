"""The page's words. Numbers come from the benchmark's settings and rows, none is typed here."""

from __future__ import annotations

import math

import torch_covnorm as cn

from ... import domains
from ...fetch import PACKAGES
from .. import rates, table1
from ..profiles import SEEDS
from ..published import TABLE1
from ..settings import BATCH, EPOCHS, PIXELS, TUNING, USUAL, WHOLE
from .blocks import Block, Heading, Items, Table, Text
from .rows import NAMES, Rows
from .verdicts import OPEN, Claim

# Why we think that it came out so: remarks by hand, without numbers, by a claim's key.
COMMENTS: dict[str, str] = {
    "near-ra": (
        "What the cut leaves out of A hardly moves its output, and M, norms and head are tuned on "
        "as many images as RA saw."
    ),
    "chosen": (
        "With so few validation images the choice is mostly chance, and two domains say next to "
        "nothing about others."
    ),
    "equal-svd-fta": (
        "CovNorm is ahead at its larger thresholds and not at the smallest ones: M alone is tuned, "
        "which is a small part of its parameters, and it cannot make up for all that the bases "
        "leave out. SVD+FTA tunes both of its factors."
    ),
    "closed-form-0.9": (
        "At a high rate, which so small an M bears, tuning gets nearly as far from a random one."
    ),
    "closed-form-0.99": (
        "At the rate of the closed form a random M stays far behind; at the best of its own it "
        "makes up for much of that. What the closed form has for itself is that it needs no tuning."
    ),
    "order": (
        "Most of the paper's gaps between methods with adapters are below a point, and so are "
        "ours: seven domains of this size do not tell them apart. BN is much nearer to the others "
        "than in the paper; it was not before its rate was far above theirs."
    ),
    "joint": (
        "At one threshold the bases of domains that differ so much need more directions than each "
        "domain alone, and M has the product of the two ranks; more domains share the bases, but "
        "not M."
    ),
    "well-trained": (
        "The validation parts are so small that chance alone moves a cell by several times half a "
        "point."
    ),
    "loss-vgg16-not-tuned": (
        "The fewer parameters are left, the more it matters which sites have them. SVD with the "
        "ranks of this metric does as well as the metric itself, so what helps is the ranks, and "
        "hardly the directions."
    ),
    "loss-vgg16-tuned": "Tuning makes up for most of what the worse cut loses.",
    "loss-efficientnet-lite0-not-tuned": (
        "Its adapters are on narrow projections, a sixth of VGG16's parameters in all, and there "
        "is less to choose from."
    ),
    "loss-efficientnet-lite0-tuned": (
        "Each metric is tuned at the rate that validated best for it; at equal rates they are "
        "not distinguishable either."
    ),
}

# Of the section on the two metrics.
LOSS = (
    "The metric of the loss takes its gradients of the validation images, which the metric of the "
    "variance does not see: on its training images a network is so sure that all but a few have "
    "none. What it does without them has lines of its own."
)
# Below Table 2.
DECATHLON = (
    "By the mean all of them are close, and the domains do not agree on an order. The score does "
    "not tell them apart either: it weighs an image the more, the fewer errors the fine-tuned "
    "network makes, so that a handful of digits and of faces decides it. What does differ is the "
    "size: a domain of CovNorm costs a small part of one of RA or DAN, and of Piggyback's masks "
    "about half. FNFT and LwF, a network for each domain, are hardly better for it. The paper has "
    "CovNorm ahead of RA; here nothing of that can be told."
)
TITLE = "The paper on real data"
FILE = "../benchmarks/results/paper.jsonl"


def opening(found: Rows) -> list[Block]:
    """What this is, and where it comes from."""
    left = f" {found.left_out} rows of other images are left out." if found.left_out else ""
    return [
        Heading(TITLE, 1),
        Text(
            f"Made by `python -m benchmarks.paper page` from {len(found.all)} rows of "
            f"[benchmarks/results/paper.jsonl]({FILE}); every table says which.{left} "
            "A test makes this page anew and compares."
        ),
        Text(
            "The paper's own seven datasets could not be had here. These are its experiments on "
            "seven other domains that are real and differ as much, on small images; published "
            "numbers stand beside ours for the order of the methods, not for their level. "
            "`python -m benchmarks.paper full --data FOLDER` runs them on the originals."
        ),
    ]


def set_up() -> list[Block]:
    """Backbones, domains, training."""
    several = ", ".join(NAMES[m] for m in table1.SEVERAL)
    pixels = ", ".join(f"{name} at {size} px" for name, size in PIXELS.items())
    return [
        Heading("Set-up"),
        _domains(),
        Items(
            [
                f"**Backbones**: {pixels}. VGG16 has its 13 ImageNet convolutions and no fully "
                "connected layer; ResNet-26 is pre-trained here, for Table 2 alone. All weights "
                "are frozen but for FNFT and LwF; norms and head are a domain's own. Table 1 "
                "is without LwF: it keeps the answers of the old head, which this VGG16 does not "
                f"have (the paper: {TABLE1['lwf'][1]:.1f}). Shares of the network count a head of "
                "1000 classes with it (ResNet-26: of 10).",
                f"**Training**: batches of {BATCH}, AdamW (Piggyback: Adam), one cycle. Every "
                f"method trains for {WHOLE} epochs, RA too; what compresses an A starts from that "
                f"of {EPOCHS} epochs and is tuned for {TUNING} more. So all have seen the images "
                "as often, but for SVD, which is not tuned. The methods of Table 1, of the curves "
                "and of the starts of M share the A of a domain and seed. An A that was lost was "
                "trained again, and older rows of other tables do not say which one they start "
                "from. Images are not augmented. CovNorm tunes M, norms and head, and C and W "
                "stay; SVD+FTA, FTA and PCA+FTA train both factors. Of every training the epoch "
                "that validates best is kept, so a validation accuracy is the best of as many. In "
                "the tables of methods a tuning that validates clearly worse than what it started "
                "from is undone.",
                f"**Equal tuning**: every method has the same search, the best of {len(USUAL)} "
                "learning rates on the validation images of "
                f"{' and '.join(rates.SEARCH)} (ResNet-26: {' and '.join(rates.two('resnet26'))}), "
                f"one seed, and {rates.FURTHER} as well where less than {rates.TIE} points decide. "
                "Further rates are tried where the best is at an end (not for the cuts of "
                "`metric`); the first three of FNFT and Piggyback are lower. The methods of "
                "the curves have a second search for their small sizes. Joint methods take the "
                "rate of their like alone, LwF that of FNFT, CovNorm on EfficientNet-Lite0 "
                "that of VGG16. Heads train at the rate of the rest, but with FNFT, LwF and "
                f"Piggyback, whose rates are low, at {cn.METHODS['fnft'].training['head_lr']:g}. "
                "Test images choose no setting.",
                f"**Seeds**: {len(SEEDS)} for {several}, one for the rest. A seed sets head, "
                "adapters and the order of the images; the split stays. It repeats itself on one "
                "machine; on one with other instructions it is another run of the same kind, up to "
                "some points apart. The rows were made on several machines, the newer ones say of "
                "which instructions. Seed 0 of what starts from an A was run twice, as some of its "
                "A's had been lost between the methods; the second run counts, whose methods share "
                "them. The first is at commit abf4578: CovNorm's mean is a third of a point lower "
                "there, and its lead over RA within chance.",
                "**Intervals** are by Student's t over the domains, seeds averaged first: they "
                "speak of further domains like these. What stands behind ± is of seeds: it speaks "
                "of a repetition on the same images. The choice of test images alone moves a cell "
                f"by a standard error of up to {_chance()}.",
            ]
        ),
    ]


def _chance() -> str:
    """The standard error of an accuracy of one half, in the two smallest test parts."""
    tests = {name: parts[-1] for name, (_, parts) in domains.stated().items()}
    name = min(tests, key=lambda n: tests[n])
    next_, least = (100 * math.sqrt(0.25 / n) for n in (sorted(tests.values())[1], tests[name]))
    return f"{next_:.1f} points ({name}: {least:.1f})"


def _domains() -> Table:
    """Licences are as the fetching prints them."""
    body = [
        [
            name,
            PACKAGES[name].what,
            str(classes),
            ", ".join(map(str, parts)),
            PACKAGES[name].licence,
        ]
        for name, (classes, parts) in domains.stated().items()
    ]
    head = ["domain", "what it is", "classes", "train, validation, test", "licence of the data"]
    return Table("The seven domains, images of each part, and what the data may be used for.", head,
                 body, left=range(5))  # fmt: skip


def verdicts(claims: list[Claim]) -> list[Block]:
    """The list of expectations."""
    items = []
    for claim in claims:
        so_far = ", so far" if claim.numbers and claim.verdict == OPEN else ""
        numbers = f": {claim.numbers}" if claim.numbers else ""
        parts = [f"{claim.claim}. **{claim.verdict}**{so_far}{numbers}."]
        if claim.key in COMMENTS:
            parts.append(COMMENTS[claim.key])
        items.append(" ".join(parts))
    return [
        Heading("What we expected, and what came out"),
        Text(
            "Written down before these cells were run, after first experiments with one seed; "
            "numbers and verdicts are computed from the rows. An expectation that the mean "
            "meets while the interval reaches beyond it is said to hold on the mean alone; one "
            "that the mean misses while the interval reaches it is missed, but not refuted. No "
            "allowance is made for their number: one interval in twenty is off by chance. These "
            "words, and that RA's length is judged from nine epochs on instead of six, were chosen "
            "when a part of the rows was known."
        ),
        Items(items),
    ]
