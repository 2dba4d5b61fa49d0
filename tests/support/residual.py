"""A model that is hard to split."""

from torch import Tensor, nn


class Residual(nn.Module):
    """A perceptron with skips over several layers, normalisation, and a value that is used at three places."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(4))
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(24, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        start = self.first(inputs.flatten(1))
        values = start
        for layer, norm in zip(self.layers, self.norms, strict=True):
            values = self.dropout(norm(layer(values)).relu()) + values
        return self.last(values + start)  # type: ignore[no-any-return]
