"""The table of whole models: gtco, tuned and untuned, beside every peer.

    python -m experiments.e2e OUT.jsonl [--rows vit_b16,detr_e6] [--quick] [--tensorrt-python PATH]

The nine models of AutoGTCO's evaluation, CvT, SE-ResNet9 and what people bring besides. How a table
is run, and goes on where it stopped: `experiments.suites.run`.
"""

from __future__ import annotations

from experiments.suites.row import Published, Row
from experiments.suites.run import Suite, main
from experiments.suites.table import report
from gtco.benchmarking.contestants import CHANNELS_LAST

SAME_LAYOUT = {"inductor max-autotune": "with channels last instead, as is usually faster"}
SLOW = {f"inductor max-autotune{CHANNELS_LAST}": "compiles for minutes: --every-mode runs it"}


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
SUITE = Suite("experiments.e2e", ROWS, report)

if __name__ == "__main__":
    main(SUITE)
