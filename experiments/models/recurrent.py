"""Models with recurrent layers: text lines read from left to right.

Random weights, fp16, on the GPU if there is one.
"""

from __future__ import annotations

from torch import Tensor, nn

from experiments.models.transformers_zoo import Model, ready


def _convolution(before: int, channels: int, kernel: int = 3, *, norm: bool = False) -> nn.Module:
    """A convolution and a ReLU; with `norm` a batch norm between the two."""
    layer = nn.Conv2d(before, channels, kernel, padding=kernel // 2 if kernel == 3 else 0)
    return nn.Sequential(layer, nn.BatchNorm2d(channels) if norm else nn.Identity(), nn.ReLU())


class CRNN(nn.Module):
    """Shi, Bai and Yao's reader of text lines (2015), of 36 characters and the blank.

    Seven convolutions make a column of features of every fourth pixel of a line 32 pixels high;
    two bidirectional LSTMs of 256 cells read the columns.
    """

    def __init__(self, classes: int = 37, cells: int = 256) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(1, 64),
            nn.MaxPool2d(2, 2),
            _convolution(64, 128),
            nn.MaxPool2d(2, 2),
            _convolution(128, 256, norm=True),
            _convolution(256, 256),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            _convolution(256, 512, norm=True),
            _convolution(512, 512),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            _convolution(512, 512, 2, norm=True),
        )
        self.first = nn.LSTM(512, cells, bidirectional=True)
        self.between = nn.Linear(2 * cells, cells)
        self.second = nn.LSTM(cells, cells, bidirectional=True)
        self.classifier = nn.Linear(2 * cells, classes)

    def forward(self, lines: Tensor) -> Tensor:
        """Logits [columns, batch, classes] of `lines` [batch, 1, 32, pixels]."""
        columns = self.features(lines).squeeze(2).permute(2, 0, 1)
        rows, _ = self.first(columns)
        rows, _ = self.second(self.between(rows))
        return self.classifier(rows)


def crnn() -> Model:
    return ready(CRNN(), (1, 1, 32, 100))


def crnn_batch32() -> Model:
    return ready(CRNN(), (32, 1, 32, 100))
