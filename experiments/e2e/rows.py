"""The rows of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gtco.benchmarking.contestants import CHANNELS_LAST

PEERS = (
    "untuned",
    "eager-calls",
    "eager",
    "torchscript",
    "inductor",
    "onnxruntime-cuda",
    "onnxruntime-tensorrt",
    "tensorrt",
)
LAYOUT_PEERS = ("eager-channels-last", "inductor-channels-last")
"""Besides, for models of convolutions."""
OF_A_CPU = ("onnxruntime",)
"""Besides, in a rehearsal: most others are missing there."""

SAME_LAYOUT = {"inductor max-autotune": "with channels last instead, as is usually faster"}
SLOW = {f"inductor max-autotune{CHANNELS_LAST}": "compiles for minutes: --every-mode runs it"}


@dataclass(frozen=True)
class Published:
    """Milliseconds that AutoGTCO's authors give, on an RTX 2080 Ti."""

    jit: float
    tensorrt: float
    ansor: float
    autogtco: float


@dataclass(frozen=True)
class Row:
    """One model.

    Args:
        name: a function of `experiments.models.<module>`, and of `experiments.models.small`.
        title: for people.
        module: where the model is.
        convolves: its images have a layout that matters.
        published: what its source says.
        left_out: contestants that do not run by default, and why.
    """

    name: str
    title: str
    module: str = "convolutional"
    convolves: bool = True
    published: Published | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def model(self, quick: bool) -> str:
        """As `gtco.locate` takes it."""
        return f"experiments.models.{'small' if quick else self.module}:{self.name}"

    def peers(self, quick: bool) -> tuple[str, ...]:
        """Of `gtco.benchmarking`."""
        layouts = LAYOUT_PEERS if self.convolves else ()
        return PEERS + layouts + (OF_A_CPU if quick else ())


def _vit(name: str, title: str, published: Published) -> Row:
    return Row(name, title, "vit", False, published)


def _setr(name: str, title: str, published: Published, convolves: bool = False) -> Row:
    left_out = SAME_LAYOUT if convolves else {}
    return Row(name, title, "autogtco", convolves, published, left_out)


def _detr(name: str, title: str, published: Published) -> Row:
    return Row(name, title, "autogtco", True, published, SAME_LAYOUT | SLOW)


def _convolutional(name: str, title: str) -> Row:
    return Row(name, title, left_out=SAME_LAYOUT)


ROWS = (
    _detr("detr_e3", "DETR-ResNet50-E3", Published(18.62, 6.97, 5.85, 5.32)),
    _detr("detr_e6", "DETR-ResNet50-E6", Published(23.67, 7.73, 6.78, 5.60)),
    _detr("detr_e12", "DETR-ResNet50-E12", Published(33.01, 15.79, 14.29, 13.18)),
    _setr("setr_naive_base", "SETR-Naive-Base", Published(31.06, 16.97, 15.44, 14.21)),
    _setr("setr_naive", "SETR-Naive", Published(68.26, 33.71, 34.22, 28.65)),
    _setr("setr_pup", "SETR-PUP", Published(37.62, 18.61, 17.89, 16.01), True),
    _vit("vit_b16", "ViT-B/16", Published(24.92, 5.87, 8.57, 8.43)),
    _vit("vit_l16", "ViT-L/16", Published(52.96, 18.45, 18.99, 18.41)),
    _vit("vit_h14", "ViT-H/14", Published(76.07, 34.14, 32.53, 29.89)),
    _convolutional("cvt_13", "CvT-13"),
    _convolutional("cvt_21", "CvT-21"),
    _convolutional("cvt_w24", "CvT-W24"),
    _convolutional("se_resnet9", "SE-ResNet9, batch 128"),
    _convolutional("se_resnet9_grey", "SE-ResNet9, grey, batch 128"),
    _convolutional("resnet50", "ResNet-50"),
    _convolutional("resnet50_batch32", "ResNet-50, batch 32"),
    _convolutional("resnet50_batch128", "ResNet-50, batch 128"),
    _convolutional("convnext_t", "ConvNeXt-T"),
    _convolutional("mobilenet_v2", "MobileNetV2"),
    _convolutional("unet", "U-Net, 256 x 256"),
    _convolutional("diffusion_block", "diffusion block, 32 x 32 x 320"),
)
BY_NAME = {row.name: row for row in ROWS}
